"""Which module may import which, and which library: what test_structure.py holds the package to."""

ARROWS = {
    "": set(),  # the package itself: everything is imported on first use
    "_names": set(),
    "errors": set(),
    "environment": set(),
    "resources": set(),
    "cuda_errors": set(),
    "__main__": {"cli"},
    "cli": {
        *("", "_names", "checkpoints", "conv2d", "demo", "doctor", "environment", "errors", "explanation", "images"),
        *("jit", "kernels", "loading", "networks", "prediction", "progress", "proof", "summary", "tuning"),
        "weights_store",
    },
    "doctor": {"", "engines.cuda_engine", "environment", "errors", "jit", "weights_store"},
    "demo": {"drawings", "engines.cuda_engine", "environment", "loading", "model", "preparation", "weights_store"},
    "drawings": set(),
    "summary": {"explanation", "networks"},
    "predicting": {"environment", "loading", "model", "prediction"},
    "loading": {
        *("_names", "binding", "checkpoints", "conv2d", "engines", "errors", "model", "networks", "progress", "tuning"),
        "weights_store",
    },
    "model": {
        *("_names", "arrays", "engines", "explanation", "images", "networks", "pipeline", "plan", "prediction"),
        "weights_store",
    },
    "arena": {"binding", "engines.base", "engines.shape_engine", "networks"},
    "plan": {"arena", "conv2d", "engines.base", "jit", "networks", "replay"},
    "replay": {"cuda_errors", "gpu_arrays", "jit"},
    "pipeline": {
        *("batching", "cuda_errors", "engines.transfers", "images", "plan", "prediction", "preparation"),
        "progress",
    },
    "preparation": {"images"},
    "batching": {"binding", "engines.shape_engine", "networks"},
    "progress": {"jit"},
    "prediction": set(),
    "explanation": {
        *("binding", "conv2d", "engines.base", "engines.cuda_engine", "engines.shape_engine", "networks"),
    },
    "arrays": {"cuda_errors", "engines.base"},
    "gpu_arrays": set(),
    "binding": {"checkpoints", "engines.base", "engines.shape_engine", "errors", "networks"},
    "checkpoints": {"checkpoint_files", "errors"},
    "checkpoint_files": {"errors"},
    "networks": {"_names"},
    "kernels": {"conv2d", "engines.cuda_engine"},
    "images": {""},  # the version, for the User-Agent
    "weights_store": {
        *("_names", "checkpoint_files", "checkpoints", "environment", "errors", "networks", "resources"),
        "images.transforms",
    },
    "proof": set(),
    "proof.bench": {
        *("_names", "binding", "conv2d", "engines", "explanation", "images", "loading", "model", "networks"),
        *("preparation", "weights_store"),
    },
    "proof.ladder": {"binding", "conv2d", "engines.shape_engine", "networks"},
    "proof.ceilings": {"engines.cuda_engine", "environment", "weights_store.writing"},
    "proof.matrix_products": {"engines.cuda_engine"},
    "proof.notebook": {"conv2d", "engines.cuda_engine", "resources"},
    "proof.patches": {"conv2d"},
    "proof.tables": {"conv2d", "explanation", "networks"},
    "proof.tiles": {"conv2d"},
    "proof.plot_style": {"weights_store.writing"},
    "proof.profiling.bounds": {"explanation"},
    "proof.profiling.measuring": {"engines.base", "explanation", "model", "networks"},
    "proof.profiling.timed_ops": {"engines.base", "engines.checks"},
    "proof.profiling.trace": {"weights_store.writing"},
    "proof.machine": {"engines.cuda_engine"},
    "proof.verification": {
        *("_names", "batching", "binding", "checkpoints", "engines.base", "engines.numpy_engine", "images", "model"),
        *("networks", "prediction", "preparation", "weights_store"),
    },
    "proof.verification.metrics": set(),
    "engines": set(),
    "engines.base": set(),
    "engines.checks": {"conv2d.problem"},
    "engines.linear_problem": {"conv2d.problem"},
    "engines.numpy_windows": {"conv2d.problem"},
    "engines.shape_engine": {"conv2d.precision", "conv2d.problem"},
    "engines.selection": {"_names", "conv2d", "environment", "errors"},
    "engines.cuda_engine": {"_names", "conv2d", "errors"},
    "engines.cuda.arrays": {"conv2d", "jit"},
    "engines.cuda.convolution": {"conv2d", "jit"},
    "engines.cuda.device": {"conv2d", "errors"},
    "engines.cuda.forms": {"conv2d"},
    "engines.cuda.layout": {"conv2d", "jit"},
    "engines.cuda.pooling": {"jit"},
    "engines.cuda.prefetching": {"jit"},
    "conv2d": set(),
    "conv2d.back_to_back": {"jit"},
    "conv2d.fp32_variants": {"jit"},
    "conv2d.tensor_core_variants": {"jit"},
    "conv2d.tensor_maps": {"errors"},
    "conv2d.wgmma_patch": {"jit"},
    "conv2d.wgmma_3xtf32": {"jit"},
    "conv2d.stem": {"jit"},
    "conv2d.stem_wgmma": {"jit"},
    "conv2d.stem_wgmma_tf32": {"jit"},
    "conv2d.pieces": {"errors"},
    "conv2d.shortcut_choice": {"errors"},
    "conv2d.heuristics": {"_names", "errors"},
    "conv2d.tuned": {"environment", "jit"},
    "tuning": {
        *("binding", "conv2d", "engines.base", "engines.cuda_engine", "engines.shape_engine", "errors", "jit"),
        *("networks", "plan", "weights_store.writing"),
    },
    "jit": {"environment", "errors", "resources"},
}
"""Room or module → what it may import outside its own room, anywhere in its code. A module that is not listed has its
innermost listed room's arrows. An arrow to a room allows its modules too."""

TYPE_ARROWS = {
    "cli": {"model"},
    "": {"loading", "model", "networks", "predicting", "prediction"},
    "engines.base": {"conv2d.problem"},
    "loading": {"engines.cuda_engine"},
    "model": {"tuning"},
    "networks": {"engines.base"},
    "plan": {"engines.cuda_engine"},
}
"""Further arrows that exist for the type checker only."""

LIBRARIES = {
    "cuda": {"jit.headers", "jit.launching"},
    "cupy": {
        *("arrays", "conv2d", "engines.cuda_engine", "engines.cuda.device", "engines.transfers", "doctor.cuda", "plan"),
        *("arena", "engines.cuda.prefetching", "replay"),
        *(
            "jit.launching",
            "jit.toolchain",
            "tuning.bench",
            "tuning.operands",
            "tuning.passes",
            "proof.machine",
            *(f"proof.bench.{m}" for m in ("fusion", "ladder", "meters")),
        ),
        *(f"proof.{m}" for m in ("ceilings", "clock", "matrix_products", "notebook")),
    },
    "filelock": {"weights_store.pretrained"},
    "PIL": {"demo", "drawings", "images", "proof.bench.end_to_end"},
    "matplotlib": {"proof.bench.plot", "proof.patches", "proof.plot_style", "proof.tiles"},
    "platformdirs": {"environment"},
    "rich": {"cli", "progress"},
    "safetensors": {"checkpoint_files", "weights_store.encoding"},
    "torch": {
        "checkpoint_files",
        *(f"proof.bench.{m}" for m in ("contenders", "meters", "network")),
        "proof.matrix_products",
        "proof.verification.torch_reference",
        "weights_store.pretrained",
    },  # to read .pth files, and to be compared with
    "torchvision": {
        "proof.bench.end_to_end",
        "proof.bench.network",
        "proof.verification.torch_reference",
        "weights_store.pretrained",
    },
    "typer": {"cli"},
}
"""Library → the modules and rooms that may import it; NumPy is everybody's."""

ON_FIRST_USE = {"cuda", "cupy", "filelock", "matplotlib", "safetensors", "torch", "torchvision"}
"""Of these, what no module imports before it is needed."""
