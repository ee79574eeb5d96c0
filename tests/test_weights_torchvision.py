"""torchvision's weights by name: fetched from a server on loopback, converted once, then read without torch."""

import hashlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torchvision
from weights_support import Server, named, serving, tiny_checkpoint

from cupy_resnet import environment
from cupy_resnet.images.transforms import Transforms
from cupy_resnet.networks import describe
from cupy_resnet.weights_store import Weights, WeightsUnavailableError, imagenet_classes, pretrained, resolve, resolving

ROOT = Path(__file__).resolve().parent.parent
MEMBER = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
NAME = "resnet18-IMAGENET1K_V1"
CHECKPOINT = tiny_checkpoint()


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, no cache and no copies of torch's but the test's own, and no embedded weights unless it makes some."""
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv(environment.CACHE_DIR.name, str(tmp_path / "cache"))
    (tmp_path / "embedded").mkdir()
    monkeypatch.setattr(resolving, "folder", lambda _: tmp_path / "embedded")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes torchvision say that the weights of ResNet-18 lie at a URL."""
    return lambda url: monkeypatch.setattr(MEMBER.value, "url", url)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes torch, torchvision and filelock impossible to import."""

    def hide() -> None:
        for module in ("torch", "torchvision", "filelock"):
            monkeypatch.setitem(sys.modules, module, None)

    return hide


def cache() -> Path:
    return environment.cache_dir() / "weights"


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def check(weights: Weights) -> None:
    """The weights are those of `CHECKPOINT`, all of them."""
    table = describe("resnet18").tensor_table()
    assert {key: array.shape for key, array in weights.state.items()} == table
    assert all((array == np.float32(0.5)).all() and array.dtype == np.float32 for array in weights.state.values())


def test_the_names_are_torchvisions() -> None:
    for model, names in pretrained.NAMES.items():
        members = torchvision.models.get_model_weights(model).__members__
        assert set(members) == {*names, "DEFAULT"}
        assert members["DEFAULT"] is members[names[-1]]
        for name in names:
            assert pretrained.parse(model, str(members[name])) == name
    known = torchvision.models.list_models(module=torchvision.models)
    assert set(pretrained.NAMES) == {name for name in known if name.startswith(("resne", "wide_resne"))}


def test_what_torchvision_says_about_every_weights_is_understood() -> None:
    names = [name for _, _, name in imagenet_classes()]
    for model in pretrained.NAMES:
        for name in pretrained.NAMES[model]:
            url, transforms, categories, own_copy = pretrained._published(model, name)
            assert pretrained._sha256_prefix(url) in own_copy.name
            assert categories == names
            newer = name == "IMAGENET1K_V2" or model == "resnext101_64x4d"
            assert transforms == Transforms.preset("IMAGENET1K_V2" if newer else "IMAGENET1K_V1")


@pytest.mark.parametrize(
    ("model", "text", "name"),
    [
        ("resnet18", "DEFAULT", "IMAGENET1K_V1"),
        ("resnet50", "DEFAULT", "IMAGENET1K_V2"),
        ("resnet50", "IMAGENET1K_V1", "IMAGENET1K_V1"),
        ("resnext50_32x4d", "ResNeXt50_32X4D_Weights.DEFAULT", "IMAGENET1K_V2"),
        ("resnet50", "my_weights", None),
        ("resnet50", "./IMAGENET1K_V1", None),
        ("resnet50", "IMAGENET1K_V1.npz", None),
    ],
)
def test_names(model: str, text: str, name: str | None) -> None:
    assert pretrained.parse(model, text) == name


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        ("resnet18", "IMAGENET1K_V2", r"unknown weights of resnet18 'IMAGENET1K_V2'\..* Valid: IMAGENET1K_V1, DEFAULT"),
        ("resnet18", "ResNet50_Weights.IMAGENET1K_V2", "is not for resnet18: its weights are IMAGENET1K_V1"),
        ("resnet20", "IMAGENET1K_V1", "torchvision has no weights of resnet20: 'IMAGENET1K_V1' is for resnet18"),
        ("resnet18", "imagenet", "unknown weights of resnet18 'imagenet'.* Valid: IMAGENET1K_V1, a file that ends in"),
    ],
)
def test_names_that_do_not_exist(model: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(model, text)


def test_fetched_once_and_then_read_without_torch(server: Server, publish: Callable, no_torch: Callable) -> None:
    url = server.offer(CHECKPOINT)
    publish(url)
    reported: list[tuple[int, int | None]] = []
    first = resolve("resnet18", progress=lambda *numbers: reported.append(numbers))
    check(first)
    assert reported[-1] == (len(CHECKPOINT), len(CHECKPOINT))
    assert files(cache()) == {f"{NAME}.safetensors", f"{NAME}.json"}
    no_torch()
    for again in (resolve("resnet18", "DEFAULT"), resolve("resnet18", MEMBER)):  # type: ignore[arg-type]
        check(again)
        assert again.sha256 == first.sha256
        assert again.transforms == Transforms.preset("IMAGENET1K_V1").to_dict()
        assert (again.name, again.source, again.path) == ("IMAGENET1K_V1", url, cache() / f"{NAME}.safetensors")
        assert again.source_sha256 == hashlib.sha256(CHECKPOINT).hexdigest()
        assert again.categories is not None
        assert again.wnids is not None
        assert (again.label(1), again.wnids[1]) == ("goldfish", "n01443537")
    record = json.loads((cache() / f"{NAME}.json").read_text())
    assert record["sha256"] == hashlib.sha256((cache() / f"{NAME}.safetensors").read_bytes()).hexdigest()
    assert record["source"] == url
    assert len(server.requests) == 1
    resolve("resnet18", cache() / f"{NAME}.safetensors")  # as a file, it says the same about itself


def test_a_copy_that_torch_has_is_used_if_its_hash_is_right(server: Server, publish: Callable, tmp_path: Path) -> None:
    url = server.offer(CHECKPOINT)
    publish(url)
    own = tmp_path / "torch" / "hub" / "checkpoints" / named(CHECKPOINT)
    own.parent.mkdir(parents=True)
    own.write_bytes(CHECKPOINT)
    check(resolve("resnet18"))
    assert server.requests == []
    (cache() / f"{NAME}.json").unlink()
    own.write_bytes(CHECKPOINT[:-1])
    check(resolve("resnet18"))
    assert len(server.requests) == 1
    assert own.read_bytes() == CHECKPOINT[:-1], "torch's folder is torch's"


def damage_tensors(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": damage_tensors,
    "cut short": lambda path: os.truncate(path, 1000),
    "empty": lambda path: os.truncate(path, 0),
    "no record": lambda path: path.with_suffix(".json").unlink(),
    "half a record": lambda path: os.truncate(path.with_suffix(".json"), 40),
    "a record of something else": lambda path: path.with_suffix(".json").write_text("[1]"),
    "no tensors": lambda path: path.unlink(),
}


def test_a_damaged_cache_is_never_used(
    server: Server, publish: Callable, no_torch: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    publish(server.offer(CHECKPOINT))
    resolve("resnet18")
    path = cache() / f"{NAME}.safetensors"
    for number, (name, damage) in enumerate(DAMAGES.items(), start=2):
        damage(path)
        check(resolve("resnet18"))
        assert len(server.requests) == number, name
    assert "sha256" in caplog.text
    damage_tensors(path)
    no_torch()
    with pytest.raises(WeightsUnavailableError):
        resolve("resnet18")


def offline(server: Server) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/{named(CHECKPOINT)}"


def truncated(server: Server) -> str:
    server.promised = len(CHECKPOINT) + 1000
    return server.offer(CHECKPOINT)


def other_model(server: Server) -> str:
    content = tiny_checkpoint("resnet34")
    return server.offer(content, named(content))


def web_page(server: Server) -> str:
    page = b"<html>Please log in</html>"
    return server.offer(page, named(page))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (offline, r"cannot be reached \(.*refused"),
        (lambda _: "http://no-such-host.invalid/resnet18-01234567.pth", r"cannot be reached \("),
        (lambda _: "file:///etc/resnet18-01234567.pth", "is neither an http nor an https address"),
        (lambda server: server.offer(b"", "x.pth")[:-5] + named(CHECKPOINT), "answers HTTP 404"),
        (lambda server: server.offer(CHECKPOINT, "resnet18-00000000.pth"), "has the sha256 .*, expected 00000000"),
        (lambda server: server.offer(CHECKPOINT, "resnet18.pth"), "has no part of its sha256"),
        (truncated, rf"stopped after {len(CHECKPOINT)} of {len(CHECKPOINT) + 1000} bytes"),
        (other_model, "the state dict does not fit resnet18"),
        (web_page, "cannot be read as a torch file of tensors"),
    ],
)
def test_what_is_not_there_or_not_right_is_not_used(
    server: Server, publish: Callable, tmp_path: Path, url: Callable[[Server], str], reason: str
) -> None:
    (tmp_path / "embedded" / "resnet20-cifar10.safetensors").touch()
    publish(url(server))
    with pytest.raises(WeightsUnavailableError, match=re.compile(reason, re.DOTALL)) as caught:
        resolve("resnet18")
    message = str(caught.value)
    assert message.startswith("torchvision's IMAGENET1K_V1 weights of resnet18 cannot be had: ")
    assert "pip install 'cupy-resnet[torch]'" in message
    assert "cupy-resnet convert resnet18 --weights IMAGENET1K_V1" in message
    assert "weights of your own" in message
    assert 'model="resnet20-cifar10" works now' in message
    assert files(cache()) == set()


def test_without_torch_the_error_comes_before_any_download(
    server: Server, publish: Callable, no_torch: Callable
) -> None:
    publish(server.offer(CHECKPOINT))
    no_torch()
    with pytest.raises(WeightsUnavailableError, match="not in the cache folder, and the torch extra is not installed"):
        resolve("resnet18")
    assert server.requests == []


def test_a_broken_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(WeightsUnavailableError, match="torch and torchvision are not installed"):
        resolve("resnet18")


def test_a_cache_that_cannot_be_written_costs_a_warning(
    server: Server, publish: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(server.offer(CHECKPOINT))
    (tmp_path / "file").touch()
    monkeypatch.setenv(environment.CACHE_DIR.name, str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        weights = resolve("resnet18")
    check(weights)
    assert weights.path is None
    (record,) = caplog.records
    assert "Set CUPY_RESNET_CACHE_DIR to a writable folder" in record.getMessage()


PROGRAM = """
import logging, sys
sys.path.insert(0, {root!r})
from cupy_resnet.weights_store import pretrained, resolve
published = pretrained._published

def published_at_home(*arguments):
    import torchvision
    torchvision.models.ResNet18_Weights.IMAGENET1K_V1.value.url = {url!r}
    return published(*arguments)

pretrained._published = published_at_home
weights = resolve("resnet18", "IMAGENET1K_V1")
print(weights.sha256, len(weights.state), "torch" in sys.modules)
"""


def start(url: str) -> subprocess.Popen:
    program = PROGRAM.format(root=str(ROOT), url=url)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )


def test_of_eight_processes_one_downloads_and_the_others_wait(server: Server) -> None:
    url = server.offer(CHECKPOINT)
    server.go_on.clear()
    processes = [start(url) for _ in range(8)]
    assert server.half_sent.wait(60)
    time.sleep(1)  # the others arrive at the lock
    server.go_on.set()
    outcomes = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outcomes
    answers = [out.split() for out, _ in outcomes]
    assert len(server.requests) == 1
    assert len({sha256 for sha256, _, _ in answers}) == 1
    assert {count for _, count, _ in answers} == {str(len(describe("resnet18").tensor_table()))}
    assert [torch for _, _, torch in answers].count("True") == 1, "those that waited need no torch"
    assert files(cache()) == {f"{NAME}.safetensors", f"{NAME}.json"}


def test_a_process_killed_while_downloading_leaves_nothing_that_is_used(server: Server, publish: Callable) -> None:
    url = server.offer(CHECKPOINT)
    server.go_on.clear()
    with start(url) as process:
        assert server.half_sent.wait(60)
        process.send_signal(signal.SIGKILL)
    server.go_on.set()
    (leftover,) = files(cache())
    assert leftover.startswith(".writing-")
    publish(url)
    check(resolve("resnet18"))
    assert len(server.requests) == 2
    os.utime(cache() / leftover, (0, 0))
    (cache() / f"{NAME}.json").unlink()
    check(resolve("resnet18"))
    assert files(cache()) == {f"{NAME}.safetensors", f"{NAME}.json"}, "an old leftover is cleared away"


def test_an_entry_whose_record_was_not_written_is_not_used(
    server: Server, publish: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server.offer(CHECKPOINT))
    write_file = pretrained.write_file

    class StoppedError(BaseException):
        pass

    def tensors_only(path: Path, content: bytes) -> None:
        if path.suffix == ".json":
            raise StoppedError
        write_file(path, content)

    monkeypatch.setattr(pretrained, "write_file", tensors_only)
    with pytest.raises(StoppedError):
        resolve("resnet18")
    assert files(cache()) == {f"{NAME}.safetensors"}
    monkeypatch.setattr(pretrained, "write_file", write_file)
    check(resolve("resnet18"))
    assert len(server.requests) == 2
