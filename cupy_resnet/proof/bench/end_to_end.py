"""From files on disk to labels: how many images a second, and where the time goes; beside torchvision's pipeline.

Ours is ``model.predict(paths, stream=True)``. The rival is what a careful user of PyTorch writes: as many threads that
decode with Pillow and apply torchvision's transforms ahead of the network, batches in channels-last memory (pinned and
copied asynchronously to a GPU), the network eager with BatchNorm folded in, results read back at the end.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...engines.selection import make_engine
from ...engines.transfers import make_transfers
from ...images import Transforms, expand
from ...loading import load
from ...model import Model
from ...networks import describe
from ...preparation import default_workers
from ...weights_store import resolve, split_name
from ..machine import describe_machine
from .contenders import eager_or_folded, torch_settings
from .meters import Meter, make_meter
from .network import import_torch, torch_network
from .precisions import Rules, check_precision
from .report import from_stored, to_stored
from .statistics import FEWEST_SAMPLES, Ratio, Summary, ratio
from .timing import Effort, turns

FORMAT = "end_to_end"
STAGES = ("decode", "preprocess", "copy", "inference")
AGREEMENT = 0.99
"""Share of images on which both must name the same class, for a ratio: pixels are equal, logits nearly."""


@dataclass(frozen=True, kw_only=True)
class EndToEndReport:
    """Whole runs over a folder.

    Args:
        machine: as `cupy_resnet.proof.machine.describe_machine` gives it.
        model, precision, engine: what ran.
        images: how many a run takes.
        megabytes: that their files have together.
        batch_size: images that the network gets at once.
        workers: decoding threads, of both.
        ours_s: seconds of each run of ours.
        rival_s: seconds of each run of torchvision's pipeline; empty where it was not asked for.
        stages_ms: milliseconds per image by stage: ``decode`` and ``preprocess`` on one of the threads, ``copy`` of
            its pixels to the device, ``inference`` the rest until its logits are on the host. The stages of different
            images overlap.
        agreement: share of the images for which both name the same class; None without a rival.
    """

    machine: dict[str, Any]
    model: str
    precision: str
    engine: str
    images: int
    megabytes: float
    batch_size: int
    workers: int
    ours_s: list[float]
    rival_s: list[float]
    stages_ms: dict[str, float]
    agreement: float | None

    @property
    def shares(self) -> dict[str, float]:
        """Each stage's share of an image's own time, 0 to 1."""
        total = sum(self.stages_ms.values())
        return {stage: ms / total for stage, ms in self.stages_ms.items()}

    @property
    def occupancy(self) -> dict[str, float]:
        """How busy the decoding threads and the engine were during the median run, 0 to 1: what nears 1 is the limit.

        Under ``"threads"`` decoding and preprocessing, under ``"engine"`` copying and inference.
        """
        wall_ms = 1e3 * Summary.of(self.ours_s).median / self.images
        threads = (self.stages_ms["decode"] + self.stages_ms["preprocess"]) / self.workers
        engine = self.stages_ms["copy"] + self.stages_ms["inference"]
        return {"threads": threads / wall_ms, "engine": engine / wall_ms}

    @property
    def images_per_second(self) -> float:
        return self.images / Summary.of(self.ours_s).median

    @property
    def rival_images_per_second(self) -> float | None:
        return self.images / Summary.of(self.rival_s).median if self.rival_s else None

    @property
    def agrees(self) -> bool:
        """Whether both name the same classes, but for `AGREEMENT`; true without a rival."""
        return self.agreement is None or self.agreement >= AGREEMENT

    @property
    def ratio(self) -> Ratio:
        """How many times as fast as torchvision's pipeline."""
        if self.agreement is None:
            return Ratio.refused("there is no rival")
        if not self.agrees:
            return Ratio.refused(f"both name the same class for only {self.agreement:.1%} of the images")
        return ratio(Summary.of(self.ours_s), Summary.of(self.rival_s), "s")

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        return to_stored(self, FORMAT)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returned.

        Raises:
            ValueError: it is something else.
        """
        return cls(**from_stored(cls, values, FORMAT, "end-to-end report"))


def image_files(folder: Path) -> list[Path]:
    """Returns the image files in a folder and its subfolders, sorted.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    files = [Path(source.path) for source in expand(folder) if source.path is not None and Path(source.path).is_file()]
    if not files:
        raise FileNotFoundError(f"there are no images in {folder}")
    return files


def measure_end_to_end(
    model: str,
    folder: Path,
    *,
    weights: str | None = None,
    engine: str = "auto",
    precision: str = "fp32",
    batch_size: int = 32,
    workers: int | None = None,
    rival: bool = True,
    effort: Effort | None = None,
    commit: str | None = None,
    show: Callable[[str], None] = lambda doing: None,
    meter: Meter | None = None,
) -> EndToEndReport:
    """Runs over a folder again and again, ours and the rival taking turns, after one run each that does not count.

    That first run compiles what is to be compiled and brings the files into the system's cache, so that the disk is
    not what is compared.

    Args:
        model: as for `cupy_resnet.load`.
        folder: with image files; every one must be readable.
        weights: as for `cupy_resnet.load`.
        engine, precision: likewise.
        batch_size: images at once, of both.
        workers: decoding threads, of both; by default one per processor.
        rival: whether to run torchvision's pipeline.
        effort: how many runs (`samples`) and how long; the warm-up is one run.
        commit: as for `describe_machine`.
        show: told what is being done.
        meter: by default that of the engine's device.

    Raises:
        FileNotFoundError: no images.
        ImageError: an image cannot be read.
        ImportError: torch is not installed.
    """
    rules = check_precision(precision)
    files = image_files(folder)
    effort, workers = effort or Effort(samples=5), workers or default_workers()
    found = resolve(model, weights)
    engine = make_engine(engine).name
    meter = meter or make_meter(engine)
    with load(model, weights, engine=engine, precision=precision) as loaded:
        show("the first run, which does not count")
        predictions = _run_ours(loaded, files, batch_size, workers)
        runs: dict[str, Callable[[], Any]] = {"ours": lambda: _run_ours(loaded, files, batch_size, workers)}
        labels: np.ndarray | None = None
        if rival:
            show("the rival's first run, which does not count")
            network = describe(split_name(model)[0], num_classes=loaded.num_classes)
            pipeline = TorchvisionPipeline(
                torch_network(network, found.state), loaded.transforms, rules, meter.device, batch_size, workers
            )
            labels = pipeline.run(files)
            runs["rival"] = lambda: pipeline.run(files)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        fewest = min(FEWEST_SAMPLES, effort.samples)
        for number, name in turns(list(runs), effort.samples, meter, seconds=effort.seconds, fewest=fewest):
            show(f"run {number + 1}, {name}")
            meter.synchronize()
            begin = meter.now()
            result = runs[name]()
            seconds[name].append(meter.now() - begin)
            predictions = result if name == "ours" else predictions
        stages = _stages(predictions, _copy_ms(engine, loaded.transforms.crop, batch_size, meter))
    agreement = None
    if labels is not None:
        agreement = float(np.mean(labels == [prediction.class_index for prediction in predictions]))
    return EndToEndReport(
        machine=describe_machine(commit, engine=engine),
        model=model,
        precision=precision,
        engine=engine,
        images=len(files),
        megabytes=sum(file.stat().st_size for file in files) / 1e6,
        batch_size=batch_size,
        workers=workers,
        ours_s=seconds["ours"],
        rival_s=seconds.get("rival", []),
        stages_ms=stages,
        agreement=agreement,
    )


def _run_ours(model: Model, files: Sequence[Path], batch_size: int, workers: int) -> list[Any]:
    return list(model.predict(files, stream=True, topk=1, batch_size=batch_size, workers=workers))


def _stages(predictions: Sequence[Any], copy_ms: float) -> dict[str, float]:
    """Milliseconds per image by stage, the mean over all images; copying is part of what `Timings` calls inference."""
    mean = {
        stage: 1e3 * float(np.mean([getattr(prediction.timings, stage) for prediction in predictions]))
        for stage in ("decode", "preprocess", "inference")
    }
    copy = min(copy_ms, mean["inference"])
    return {
        "decode": mean["decode"],
        "preprocess": mean["preprocess"],
        "copy": copy,
        "inference": mean["inference"] - copy,
    }


def _copy_ms(engine: str, crop: int, batch_size: int, meter: Meter, repeats: int = 10) -> float:
    """Milliseconds per image that bringing pixels to the engine takes: from the threads' arrays into one batch, and on
    a GPU across the bus; alone, by the same way that `Model.predict` uses.
    """
    transfers = make_transfers(make_engine(engine))
    images = list(np.random.default_rng(0).integers(0, 256, (batch_size, crop, crop, 3), np.uint8))
    times = []
    try:
        for _ in range(repeats + 1):
            meter.synchronize()
            begin = meter.now()
            transfers.upload(images)
            meter.synchronize()
            times.append(meter.now() - begin)
    finally:
        transfers.release()
    return 1e3 * float(np.median(times[1:])) / batch_size


class TorchvisionPipeline:
    """Pillow and torchvision's transforms on threads, torch behind them.

    Args:
        net: torch's network, float32, on the CPU.
        transforms: resize, crop, mean and std, as of our model.
        rules: of the precision.
        device: ``"cuda"`` or ``"cpu"``.
        batch_size: images at once.
        workers: threads.
    """

    def __init__(
        self, net: Any, transforms: Transforms, rules: Rules, device: str, batch_size: int, workers: int
    ) -> None:
        torch = import_torch()
        from torchvision.transforms import v2

        self._torch, self._rules, self._device = torch, rules, device
        self._batch_size, self._workers = batch_size, workers
        self._module = eager_or_folded(net, rules, device, "nhwc", folded=True)
        self._dtype = getattr(torch, rules.dtype)
        self._prepare = v2.Compose(
            [v2.Resize(transforms.resize, antialias=True), v2.CenterCrop(transforms.crop), v2.PILToTensor()]
        )
        mean, std = (
            torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (transforms.mean, transforms.std)
        )
        self._mean, self._std = mean, std

    def run(self, files: Sequence[Path]) -> np.ndarray:
        """Returns the likeliest class of each file."""
        classes = []
        with torch_settings(self._rules):
            waiting: list[Any] = []
            for image in self._images(files):
                waiting.append(image)
                if len(waiting) == self._batch_size:
                    classes.append(self._classify(waiting))
                    waiting = []
            if waiting:
                classes.append(self._classify(waiting))
            return np.concatenate([batch.cpu().numpy() for batch in classes])

    def _images(self, files: Sequence[Path]) -> Iterator[Any]:
        """Decodes ahead, in order, twice as many as there are threads: what our pipeline does."""
        ahead: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(self._workers) as pool:
            for file in files:
                ahead.append(pool.submit(self._decode, file))
                if len(ahead) == 2 * self._workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _decode(self, file: Path) -> Any:
        from PIL import Image, ImageOps

        with Image.open(file) as image:
            return self._prepare(ImageOps.exif_transpose(image).convert("RGB"))

    def _classify(self, images: Sequence[Any]) -> Any:
        torch = self._torch
        batch = torch.stack(list(images))
        if self._device == "cuda":
            batch = batch.pin_memory().to("cuda", non_blocking=True)
        x = ((batch.float() / 255 - self._mean) / self._std).to(self._dtype)
        return self._module(x.contiguous(memory_format=torch.channels_last)).argmax(1)
