"""The house stands as it was drawn: which module may import which, what lies where, what a kernel file tells."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from arrows import ARROWS, LIBRARIES, ON_FIRST_USE, TYPE_ARROWS

from cupy_resnet import environment

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupy_resnet"
KERNELS = ROOT / "kernels_cu"

HELPER_STAGES = {"conv2d_winograd": {"winograd_filter_transform"}}
"""Kernel file → entry functions beside its public kernel."""

TOP_LEVEL = {"LICENSE", "README.md", "cupy_resnet", "kernels_cu", "notebooks", "pyproject.toml", "tests", "weights"}
MAX_LINES = 400


def module_name(path: Path) -> str:
    """``conv2d.problem`` of its file; a room's ``__init__`` is the room, the package's the empty string."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Imports(ast.NodeVisitor):
    """Collects a module's imports as (kind, target); a kind is ``"module"``, ``"function"`` or ``"types"``.

    Targets within the package are module names as in `SOURCES`, those outside top-level names in ``<>``. Names given
    to ``import_module`` as text count too.
    """

    def __init__(self, path: Path) -> None:
        self.kind = "module"
        self.found: set[tuple[str, str]] = set()
        self.package = path.parent.relative_to(ROOT).parts
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def add(self, dotted: str) -> None:
        top, _, rest = dotted.partition(".")
        self.found.add((self.kind, rest if top == "cupy_resnet" else f"<{top}>"))

    def within(self, kind: str, node: ast.AST) -> None:
        before, self.kind = self.kind, kind
        self.generic_visit(node)
        self.kind = before

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package[: len(self.package) + 1 - node.level] if node.level else ()
        base = ".".join((*above, *filter(None, [node.module])))
        for alias in node.names:
            dotted = f"{base}.{alias.name}"
            self.add(dotted if dotted.removeprefix("cupy_resnet.") in SOURCES else base)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
            self.add(node.args[0].value)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.within("function" if self.kind == "module" else self.kind, node)

    def visit_If(self, node: ast.If) -> None:
        self.within("types" if "TYPE_CHECKING" in ast.unparse(node.test) else self.kind, node)


IMPORTS = {name: Imports(path).found for name, path in SOURCES.items()}


def room(module: str) -> str:
    return module.partition(".")[0]


def row(module: str) -> str:
    """The key of `ARROWS` that speaks for a module: its own, else that of the innermost room with a row."""
    while module not in ARROWS and "." in module:
        module = module.rpartition(".")[0]
    return module


def arrows(module: str, *, types: bool) -> set[str]:
    """What a module imports outside its room, for the type checker only or for running."""
    kinds = {"types"} if types else {"module", "function"}
    targets = {target for kind, target in IMPORTS[module] if kind in kinds and not target.startswith("<")}
    return {target for target in targets if not module or room(target) != room(module)}


def allows(allowed: set[str], target: str) -> bool:
    return target in allowed or room(target) in allowed


@pytest.mark.parametrize("module", SOURCES, ids=lambda name: name or "cupy_resnet")
def test_arrows(module: str) -> None:
    assert room(module) in ARROWS, f"{module} is in no room of the table: draw its arrows there"
    allowed = ARROWS[row(module)]
    new = {target for target in arrows(module, types=False) if not allows(allowed, target)}
    assert not new, f"{module} imports {new}, which the table does not allow"
    allowed = allowed | TYPE_ARROWS.get(row(module), set())
    new = {target for target in arrows(module, types=True) if not allows(allowed, target)}
    assert not new, f"{module} imports {new} for typing, which the table does not allow"


def test_the_table_has_no_arrow_that_is_not_drawn() -> None:
    for key, allowed in ARROWS.items():
        assert key in SOURCES, f"the table speaks of {key}, which does not exist"
        drawn = set().union(*(arrows(module, types=False) for module in SOURCES if row(module) == key))
        unused = {target for target in allowed if not any(allows({target}, real) for real in drawn)}
        assert not unused, f"{key} does not import {unused} any more: take the arrows out"


def test_no_two_modules_import_each_other() -> None:
    graph = {
        module: {target for kind, target in found if kind != "types" and not target.startswith("<") and target}
        for module, found in IMPORTS.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", SOURCES, ids=lambda name: name or "cupy_resnet")
def test_libraries(module: str) -> None:
    for kind, target in IMPORTS[module]:
        library = target.strip("<>")
        if not target.startswith("<") or library in sys.stdlib_module_names or library == "numpy" or kind == "types":
            continue
        assert allows(LIBRARIES.get(library, set()), module), f"{module} imports {library}"
        assert kind == "function" or library not in ON_FIRST_USE, f"{module} imports {library} before it is needed"


def run(program: str) -> str:
    """Runs a program in a fresh interpreter, outside the repository; returns what it prints."""
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_is_quick_and_imports_no_library() -> None:
    program = """
import time
before, begin = set(sys.modules), time.perf_counter()
import cupy_resnet
seconds = time.perf_counter() - begin
print(seconds, *{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    seconds, *imported = run(program).split()
    assert imported == ["cupy_resnet"]
    assert float(seconds) < 0.5


def test_without_cupy_and_torch_the_numpy_engine_runs_a_whole_network() -> None:
    program = """
sys.modules["cupy"] = sys.modules["torch"] = None
import numpy as np
import cupy_resnet
from cupy_resnet.networks import describe, random_state_dict
model = cupy_resnet.load("resnet20", random_state_dict(describe("resnet20")))
logits = model(np.ones((2, 3, 32, 32), np.float32))
assert logits.shape == (2, 10) and np.isfinite(logits).all() and logits.std() > 0
print(model.engine, len(model.explain(engine="cuda")))
"""
    engine, steps = run(program).split()
    assert engine == "numpy"
    assert int(steps) > 19


def test_the_package_prints_nothing() -> None:
    for path in SOURCES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}"


def code(path: Path) -> str:
    """A CUDA file without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cu")), ids=lambda path: path.stem)
def test_a_kernel_file_has_one_public_kernel_named_as_the_file(path: Path) -> None:
    entries = re.findall(
        r'extern "C" __global__ void(?:\s+[A-Z_]+)?(?:\s+__(?:cluster_dims|launch_bounds)__\([^)]*\))*\s+(\w+)\(',
        code(path),
    )
    assert sorted(entries) == sorted({path.stem, *HELPER_STAGES.get(path.stem, ())})
    assert code(path).count("__global__") == len(entries), 'every entry function is extern "C"'


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cu")), ids=lambda path: path.stem)
def test_a_kernel_file_tells_what_it_does_in_its_head(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[: next(number for number, line in enumerate(lines) if not line.startswith("//"))]
    assert re.match(rf"// {path.stem}: \S", head[0])
    for part in ("@solves", "@arch", "Equation", "Layouts", "Grid"):
        assert any(re.match(rf"// {part}\s+\S", line) for line in head), f"the head does not tell {part}"


def test_kernels_know_nothing_of_python() -> None:
    for path in sorted(KERNELS.rglob("*")):
        if path.is_dir():
            assert path.name == "include"
            continue
        assert path.suffix in (".cu", ".cuh", ".md"), path
        if path.suffix == ".md":
            continue
        assert (path.parent.name == "include") == (path.suffix == ".cuh"), path
        text = code(path)
        assert not re.search(r"python|pybind|cupy|numpy|torch|PyObject", text, re.IGNORECASE), path
        for name in re.findall(r'#include "([^"]+)"', text):
            assert (KERNELS / "include" / name).is_file(), f"{path} includes {name}"


def repository_files() -> Iterator[Path]:
    """What is committed or would be."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            yield ROOT / name


def test_the_top_level_holds_the_rooms_and_nothing_else() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_no_room_is_too_large_to_live_in() -> None:
    for path in repository_files():
        if path.suffix in (".py", ".cu", ".cuh", ".md"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines"


def test_the_readme_keeps_its_promises() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / target).exists(), f"README.md links to {target}"
    (tree,) = re.findall(r"```\n(kernels_cu/.*?)```", readme, re.DOTALL)
    for indent, name in re.findall(r"^( *)(\S+[/.]\S*)", tree, re.MULTILINE):
        assert ((PACKAGE if indent else ROOT) / name).exists(), f"README.md speaks of {name}"
    for variable in environment.VARIABLES:
        assert f"| `{variable.name}` |" in readme
    (arguments,) = re.findall(r"^pip install (.+) && pytest$", readme, re.MULTILINE)
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"pip install --quiet {arguments}\n" in commands
    assert "\npytest " in commands


PRIVATE = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w"),
    "an issue's number": re.compile(r"\bissues?\s+#?\d|(?<!\w)#\d+\b", re.IGNORECASE),
    "who wrote it and when": re.compile(r"\b(?:this|last|previous|earlier|later) session\b|\bhelpers? (?:wrote|did)\b"),
    "a folder beside the repository": re.compile(r"\.\./shared(?!/data\b)"),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_the_repository_speaks_of_itself_only(kind: str) -> None:
    found = []
    for path in repository_files():
        if path == Path(__file__):
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line}" for n, line in enumerate(lines, 1) if PRIVATE[kind].search(line)
        ]
    assert not found, f"{kind}:\n" + "\n".join(found[:10])
