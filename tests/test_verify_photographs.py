"""Verification on photographs: agreement, labels, what differs, in bounded memory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from predict_support import CLASSES, STATE, counted, decoding_threads, pixels, small_model

import cupy_resnet
from cupy_resnet import weights_store
from cupy_resnet.images import normalize, prepare
from cupy_resnet.proof.verification import (
    PhotoReport,
    compare_photographs,
    first_photographs,
    make_reference,
    photographs,
    read_labels,
    verify,
)

WEIGHTS = weights_store.resolve("resnet20", STATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine photographs and two files that are none, in the order of their names 00 to 10."""
    root = tmp_path_factory.mktemp("photographs")
    for index in range(11):
        Image.fromarray(pixels(index)).save(root / f"{index:02}.png")
    (root / "03.png").write_bytes(b"no image")
    (root / "07.png").write_bytes((root / "07.png").read_bytes()[:200])
    return root


class Skewed:
    """A reference whose logits are ours but for what a test does to them: so every difference is known."""

    name = "a test"

    def __init__(self, change) -> None:
        self.model = small_model()
        self.change = change
        self.seen: list[np.ndarray] = []

    def checkpoints(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return self.model.checkpoints(x)

    def logits(self, x: np.ndarray) -> np.ndarray:
        first = sum(map(len, self.seen))
        self.seen.append(x)
        logits = self.model(x).copy()
        for row in range(len(x)):
            self.change(first + row, logits[row])
        return logits


def nothing(index: int, logits: np.ndarray) -> None:
    pass


def compared(photos, change=nothing, labels=None, batch_size: int = 4, **options) -> PhotoReport:
    loaded = small_model()
    return compare_photographs(
        loaded,
        Skewed(change),
        photos,
        labels=read_labels(labels, loaded),
        root=str(photos),
        batch_size=batch_size,
        **options,
    )


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_correct_model_agrees_on_every_photograph(folder: Path, kind: str) -> None:
    shown: list[int] = []
    loaded = small_model()
    report = compare_photographs(
        loaded,
        make_reference(kind, WEIGHTS),
        folder,
        labels=read_labels(None, loaded),
        root=str(folder),
        batch_size=4,
        advance=lambda: shown.append(1),
    )
    assert report.passed
    assert (report.photographs, report.unreadable, report.compared) == (11, 2, 9)
    assert report.top1_agree == report.top5_agree == 9
    assert 0 < report.largest_share < 1
    assert len(shown) == 11
    assert report.labelled == 0
    assert [Path(str(path)).name for path, _ in report.errors] == ["03.png", "07.png"]
    assert not any(str(path) in reason for path, reason in report.errors)
    json.dumps(report.to_dict(), allow_nan=False)


def test_both_sides_see_what_torchvision_would_show_them(folder: Path) -> None:
    reference = Skewed(nothing)
    loaded = small_model()
    compare_photographs(loaded, reference, folder, labels=read_labels(None, loaded), root=str(folder), batch_size=4)
    x = np.concatenate(reference.seen)
    readable = [index for index in range(11) if index not in (3, 7)]
    transforms = loaded.transforms
    assert transforms.crop == 16
    for row, index in zip(x, readable, strict=True):
        expected = normalize(prepare(Image.fromarray(pixels(index)), transforms), transforms)
        np.testing.assert_array_equal(row, expected.transpose(2, 0, 1))
    assert [len(batch) for batch in reference.seen] == [4, 4, 1]


def test_what_differs_is_listed_with_both_margins(folder: Path) -> None:
    model = small_model()
    ours = model(first_photographs(model, folder, 9)[0])
    order = np.argsort(-ours, axis=1)

    def change(index: int, logits: np.ndarray) -> None:
        if index == 2:  # the second becomes the first, by 0.25
            logits[order[2, 1]] = logits[order[2, 0]] + 0.25
        if index == 5:  # the last of five makes way
            logits[order[5, 5]] += 2e-6 + logits[order[5, 4]] - logits[order[5, 5]]
        if index == 8:
            logits[0] = np.nan

    report = compared(folder, change)
    assert not report.passed
    assert (report.top1_agree, report.top5_agree, report.compared) == (7, 7, 9)
    assert report.largest_share == np.inf
    by_name = {Path(str(d.path)).name: d for d in report.differing}
    flipped = by_name["02.png"]
    assert (flipped.ours, flipped.reference) == (order[2, 0], order[2, 1])
    assert flipped.ours_name == CLASSES[order[2, 0]]
    assert flipped.ours_margin == pytest.approx(ours[2, order[2, 0]] - ours[2, order[2, 1]], rel=1e-5)
    assert flipped.reference_margin == pytest.approx(0.25, rel=1e-5)
    assert not flipped.top1_agrees
    assert flipped.share is not None
    assert flipped.share > 1
    swapped = by_name["06.png"]
    assert swapped.top1_agrees
    assert not swapped.top5_agrees
    broken = by_name["10.png"]
    assert (broken.reference, broken.reference_margin, broken.share) == (None, None, None)
    assert broken.ours == order[8, 0]
    assert report.over_tolerance == 3
    assert [Path(str(d.path)).name for d in report.differing] == ["02.png", "10.png", "06.png"]
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["largest_share"] is None


def test_a_tie_within_tolerance_is_listed_and_no_failure(folder: Path) -> None:
    def tie(index: int, logits: np.ndarray) -> None:
        if index == 0:
            first, second = np.argsort(-logits)[:2]
            logits[second] = np.nextafter(logits[first], np.float32(np.inf))

    model = small_model()
    logits = model(first_photographs(model, folder, 1)[0])[0]
    first, second = np.argsort(-logits)[:2]
    state = STATE | {"linear.bias": STATE["linear.bias"].copy()}
    state["linear.bias"][second] += logits[first] - logits[second]  # now both are equal but for rounding
    tied = small_model(state)
    reference = Skewed(tie)
    reference.model = tied
    report = compare_photographs(
        tied, reference, folder / "00.png", labels=read_labels(None, tied), root=str(folder), batch_size=1
    )
    assert report.passed
    assert report.compared == 1
    (difference,) = report.differing
    assert {difference.ours, difference.reference} == {first, second}
    assert max(difference.ours_margin, difference.reference_margin) < 1e-5


# Labels --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        "01.png,1\n02.png,bird\n05.png,9\n",
        "index,file,category\n1,01.png,automobile\n2,02.png,bird\n9,05.png,truck\n",
        "\ufefffilename,label\n01.png, automobile\n\n02.png,2\n./05.png,truck\n",
    ],
)
def test_labels_from_a_table(folder: Path, tmp_path: Path, table: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(table, encoding="utf-8")
    labels = read_labels(path, small_model())
    root = str(folder)
    assert [labels.of(f"{root}/{index:02}.png", root) for index in range(6)] == [None, 1, 2, None, None, 9]
    assert labels.of(None, root) is None


def test_counting_what_is_right(folder: Path, tmp_path: Path) -> None:
    model = small_model()
    order = np.argsort(-model(first_photographs(model, folder, 9)[0]), axis=1)
    path = tmp_path / "labels.csv"
    path.write_text(f"00.png,{order[0, 0]}\n01.png,{order[1, 4]}\n02.png,{order[2, 5]}\n04.png,{order[3, 1]}\n")

    def change(index: int, logits: np.ndarray) -> None:
        if index == 3:
            logits[order[3, 1]] = logits[order[3, 0]] + 1

    report = compared(folder, change, labels=path)
    assert report.labelled == 4
    assert (report.ours_top1, report.ours_top5) == (1, 3)
    assert (report.reference_top1, report.reference_top5) == (2, 3)
    assert (report.differing[0].label, report.differing[0].label_name) == (order[3, 1], CLASSES[order[3, 1]])


def test_labels_from_folders(tmp_path: Path) -> None:
    for name in ("cat", "n03417042", "thing"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels(1)).save(tmp_path / name / "x.png")
    Image.fromarray(pixels(1)).save(tmp_path / "x.png")
    model = small_model()
    model.wnids = [f"n0341704{index}" for index in range(10)]
    labels = read_labels(None, model)
    found = {name: labels.of(f"{tmp_path}/{name}", str(tmp_path)) for name in ("cat/x.png", "n03417042/x.png", "x.png")}
    assert found == {"cat/x.png": 3, "n03417042/x.png": 2, "x.png": None}
    report = compare_photographs(model, Skewed(nothing), tmp_path, labels=labels, root=str(tmp_path), batch_size=8)
    assert (report.compared, report.labelled) == (4, 2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("a.png,cat\nb.png,dragon\n", "line 2: 'dragon' is neither a class's index nor a name"),
        ("a.png,10\n", "line 1: there is no class 10: the model has 10, numbered from 0"),
        ("a.png,-1\n", "line 1: '-1' is neither"),
        ("a.png\n", "line 1: it must hold a photograph's name and its class"),
        ("file,label\na.png,crane\n", "line 2: several classes are called 'crane'; give the class's index"),
        ("", "holds no labels"),
        ("file,label\n", "holds no labels"),
    ],
)
def test_tables_that_cannot_be_understood(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(table)
    model = small_model(categories=[*CLASSES[:8], "crane", "crane"])
    with pytest.raises(ValueError, match=message):
        read_labels(path, model)
    with pytest.raises(FileNotFoundError):
        read_labels(tmp_path / "other.csv", model)


# Many photographs, or none -------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, done = [0], [0]
    ahead: list[int] = []

    def images() -> Iterator[np.ndarray]:
        for index in range(300):
            yield pixels(index % 5) if index % 7 else np.zeros((2, 2, 2, 2, 2))

    def advance() -> None:
        done[0] += 1
        ahead.append(taken[0] - done[0])

    def wrong(index: int, logits: np.ndarray) -> None:
        logits[index % 10] = 1e6

    monkeypatch.setattr(photographs, "MOST_LISTED", 20)
    loaded = small_model()
    report = compare_photographs(
        loaded,
        Skewed(wrong),
        counted(images(), taken),
        labels=read_labels(None, loaded),
        root=".",
        batch_size=8,
        workers=2,
        advance=advance,
    )
    assert report.photographs == 300
    assert report.unreadable == 43
    assert report.compared == report.over_tolerance == 257
    assert len(report.errors) == 20
    assert sum(difference.top1_agrees for difference in report.differing) == 20
    assert sum(not difference.top1_agrees for difference in report.differing) == 20
    assert max(ahead) <= 8 + 2 + 2 * 2 + 2  # a batch with what is unreadable in it, and what the threads work on
    assert not decoding_threads()


def test_a_folder_of_what_is_no_photograph_does_not_pile_up(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index:02}.png").write_bytes(b"no image")
    report = compared(tmp_path, batch_size=2)
    assert (report.photographs, report.unreadable, report.compared) == (40, 40, 0)
    assert not report.passed
    with pytest.raises(ValueError, match=r"no photograph can be read: .*00\.png"):
        first_photographs(small_model(), tmp_path, 2)
    with pytest.raises(ValueError, match=r"no photograph can be read: .*no such file"):
        first_photographs(small_model(), tmp_path / "none", 2)
    assert not decoding_threads()


def test_verify_compares_the_first_photographs_layer_by_layer(folder: Path) -> None:
    totals: list[int | None] = []

    @contextmanager
    def progress(total):
        totals.append(total)
        yield lambda: None

    outcome = verify(small_model(), WEIGHTS, "torch", photos=folder, batch=3, progress=progress)
    assert outcome.passed
    assert outcome.layers is not None
    assert outcome.photographs is not None
    assert outcome.layers.input_shape == (3, 3, 16, 16)
    assert outcome.layers.input_from == f"the first 3 photographs of {folder}"
    assert outcome.photographs.compared == 9
    assert totals == [11]
    assert set(json.loads(json.dumps(outcome.to_dict(), allow_nan=False))) == {"passed", "layers", "photographs"}


def test_torchs_stored_answers_on_real_photographs(data_folder: Path) -> None:
    """Independent of torch here and now: the logits were computed elsewhere, from torchvision's own transforms."""
    stored = np.load(data_folder / "imagenet" / "resnet18_torch_logits.npy")
    weights = data_folder / "imagenet" / "resnet18_state_dict.npz"
    photos = sorted((data_folder / "imagenet" / "photos").iterdir())[:3]
    with cupy_resnet.load("resnet18", weights, engine="numpy", categories="imagenet") as model:

        class Stored:
            name = "stored"

            def checkpoints(self, x: np.ndarray) -> dict[str, np.ndarray]:
                raise NotImplementedError

            def logits(self, x: np.ndarray) -> np.ndarray:
                return stored[:3]

        labels = read_labels(data_folder / "imagenet" / "labels.csv", model)
        report = compare_photographs(model, Stored(), photos, labels=labels, root=str(photos[0].parent), batch_size=3)
    assert report.passed
    assert report.top1_agree == report.top5_agree == report.labelled == 3
