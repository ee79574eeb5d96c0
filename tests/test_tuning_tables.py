"""Tables of measured choices: what is found in them, what is passed over, and how they are written."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cli_support import ROOT, environment
from tuning_support import LAYER, PLAIN, entry, fresh_tables

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dPair, Device, choose, choose_shortcut, tuned
from cupy_resnet.conv2d.back_to_back_choice import choose_back_to_back
from cupy_resnet.tuning import Candidate, candidates, remember, write_table

GPU = replace(H100, name="NVIDIA Imaginary 100")
"""No shipped table is for it."""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


def other(problem: tuned.Conv2dProblem, device: Device = GPU, spread_nan: bool = True) -> Candidate:
    """A candidate that the cost model does not choose."""
    choice = choose(problem, device, spread_nan=spread_nan, use_tables=False)
    chosen = Candidate(choice.variant, choice.config)
    return next(c for c in candidates(problem, device, spread_nan=spread_nan) if c != chosen)


@pytest.mark.parametrize("problem", [LAYER, PLAIN], ids=lambda p: p.precision)
def test_what_is_remembered_is_chosen_at_once_and_in_the_next_process(problem: tuned.Conv2dProblem) -> None:
    by_model = choose(problem, GPU, spread_nan=True)
    fastest = other(problem)
    path = remember(GPU.name, [entry(fastest, problem)])
    assert path is not None
    for _ in range(2):
        choice = choose(problem, GPU, spread_nan=True)
        assert Candidate(choice.variant, choice.config) == fastest
        assert choice.reason == "fastest of 37 timed on this GPU, 12.3 µs (next best 12.9)"
        tuned.forget()  # as if the process were new
    assert choose(problem, GPU, spread_nan=True, use_tables=False) == by_model
    assert choose(replace(problem, N=9), GPU, spread_nan=True).reason != choice.reason


def test_a_lone_candidate_has_no_next_best() -> None:
    remember(GPU.name, [entry(other(LAYER), LAYER, next_microseconds=None, candidates=1)])
    assert choose(LAYER, GPU, spread_nan=True).reason == "fastest of 1 timed on this GPU, 12.3 µs"


def test_it_holds_for_the_gpu_it_was_measured_on_only() -> None:
    remember(GPU.name, [entry(other(LAYER), LAYER)])
    twin = replace(GPU, name="NVIDIA Imaginary 101")
    assert "by the model" in choose(LAYER, twin, spread_nan=True).reason


def test_an_entry_that_spreads_nan_is_no_answer_where_that_is_not_allowed() -> None:
    winograd = Candidate("conv2d_winograd", VARIANTS["conv2d_winograd"].candidates(PLAIN, GPU)[0])
    remember(GPU.name, [entry(winograd, PLAIN)])
    assert choose(PLAIN, GPU, spread_nan=True).variant == "conv2d_winograd"
    assert choose(PLAIN, GPU) == choose(PLAIN, GPU, use_tables=False)
    grouped = replace(LAYER, groups=32)
    merged = next(c for c in candidates(grouped, GPU, spread_nan=True) if getattr(c.config, "merged_groups", 1) > 1)
    remember(GPU.name, [entry(merged, grouped)])
    assert choose(grouped, GPU, spread_nan=True).config == merged.config
    assert choose(grouped, GPU) == choose(grouped, GPU, use_tables=False)


def test_an_entry_that_spreads_no_nan_is_an_answer_in_either_case_but_its_own_comes_first() -> None:
    both, alone = candidates(LAYER, GPU)[1:3]
    remember(GPU.name, [entry(both, LAYER)])
    assert choose(LAYER, GPU).config == both.config
    remember(GPU.name, [entry(alone, LAYER, spread_nan=False)])
    assert choose(LAYER, GPU).config == alone.config
    assert choose(LAYER, GPU, spread_nan=True).config == both.config


def test_a_kernel_asked_for_by_name_stays_but_takes_its_own_measured_configuration() -> None:
    fastest = other(PLAIN)
    remember(GPU.name, [entry(fastest, PLAIN)])
    choice = choose(PLAIN, GPU, fastest.variant, spread_nan=True)
    assert (choice.variant, choice.config) == (fastest.variant, fastest.config)
    assert choice.reason.startswith("asked for by name; fastest of 37 timed on this GPU")
    choice = choose(PLAIN, GPU, "conv2d_shared", spread_nan=True)
    assert (choice.variant, choice.reason) == ("conv2d_shared", "asked for by name")
    strided = replace(PLAIN, stride_h=2)
    fastest = other(strided)
    remember(GPU.name, [entry(fastest, strided)])
    choice = choose(strided, GPU, "conv2d_winograd", spread_nan=True)
    assert choice.config == fastest.config
    assert choice.fallback == "conv2d_winograd needs stride 1, not 2×1"


@pytest.mark.parametrize(
    "changes",
    [{"config": {"tile_m": 77}}, {"variant": "conv2d_gone"}, {"variant": "conv2d_direct", "config": {}}],
    ids=["tile gone", "kernel gone", "kernel not for auto"],
)
def test_an_entry_that_no_candidate_fits_is_passed_over(
    changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    remember(GPU.name, [entry(other(LAYER), LAYER, **changes)])
    with caplog.at_level(logging.DEBUG, "cupy_resnet"):
        assert choose(LAYER, GPU, spread_nan=True) == choose(LAYER, GPU, spread_nan=True, use_tables=False)
    assert ("has no configuration {'tile_m': 77}" in caplog.text) == ("variant" not in changes)
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_entries_do_not_survive_a_change_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    path = remember(GPU.name, [entry(other(LAYER), LAYER)])
    assert path is not None
    monkeypatch.setattr(tuned, "sources_digest", lambda: "1" * 64)
    tuned.forget()
    assert tuned.own_path(GPU.name) != path
    assert "by the model" in choose(LAYER, GPU, spread_nan=True).reason
    # Nor by a file that only has the right name.
    tuned.own_path(GPU.name).write_bytes(path.read_bytes())
    tuned.forget()
    assert "by the model" in choose(LAYER, GPU, spread_nan=True).reason


def test_a_file_that_another_process_changes_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(tuned.time, "monotonic", lambda: now)
    first, second = candidates(LAYER, GPU, spread_nan=True)[1:3]
    path = remember(GPU.name, [entry(first, LAYER)])
    assert path is not None
    assert choose(LAYER, GPU, spread_nan=True).config == first.config
    path.write_bytes(tuned.Table(GPU.name, tuned.kernels_digest()).merged([entry(second, LAYER)]).dump())
    now += tuned.CHECK_SECONDS / 2
    assert choose(LAYER, GPU, spread_nan=True).config == first.config
    now += tuned.CHECK_SECONDS
    assert choose(LAYER, GPU, spread_nan=True).config == second.config
    path.unlink()
    tuned.forget()
    assert "by the model" in choose(LAYER, GPU, spread_nan=True).reason


def test_while_nothing_changes_decisions_and_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(GPU.name, [entry(other(LAYER), LAYER)])
    choice = choose(LAYER, GPU, spread_nan=True)
    known = tuned.lookup(GPU.name)
    monkeypatch.setattr(tuned, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(tuned, "read_own", lambda gpu: pytest.fail("the file was read again"))
    assert tuned.lookup(GPU.name) is known
    assert choose(LAYER, GPU, spread_nan=True) is choice


FOREIGN = {
    "empty": b"",
    "cut off": b'{"format": 1, "gpu": "NVIDIA Imaginary 100", "sources',
    "binary": bytes(range(256)),
    "a list": b"[]",
    "nested without end": b"[" * 100_000,
    "another format": b'{"format": 2, "gpu": "NVIDIA Imaginary 100", "sources_digest": "", "entries": []}',
    "without entries": b'{"format": 1, "gpu": "NVIDIA Imaginary 100", "sources_digest": ""}',
    "of another GPU": b'{"format": 1, "gpu": "NVIDIA Real", "sources_digest": "", "entries": []}',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_is_no_table_is_ignored_with_one_warning_and_then_replaced(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned.own_path(GPU.name)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for _ in range(3):
        assert "by the model" in choose(LAYER, GPU, spread_nan=True).reason
        tuned.forget()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"{path} is ignored and will be replaced by the next tuning: " in warning.getMessage()
    fastest = other(LAYER)
    assert remember(GPU.name, [entry(fastest, LAYER)]) == path
    assert choose(LAYER, GPU, spread_nan=True).config == fastest.config
    assert len(caplog.records) == 1


def test_entries_that_mean_nothing_leave_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    good = entry(other(LAYER), LAYER)
    valid = good.as_dict()
    bad = [
        None,
        {},
        valid | {"future": 1},
        valid | {"problem": {"N": 1}},
        valid | {"problem": valid["problem"] | {"N": -1}},
        valid | {"problem": valid["problem"] | {"H": "wide"}},
        valid | {"problem": valid["problem"] | {"precision": "fp4"}},
        valid | {"problem": None},
        valid | {"variant": 7},
        valid | {"config": [1]},
        valid | {"microseconds": "fast"},
        valid | {"microseconds": float("nan")},
        valid | {"spread_nan": 1},
        {name: value for name, value in valid.items() if name != "candidates"},
    ]
    table = {"format": 1, "gpu": "x", "sources_digest": "y", "entries": [*bad, valid]}
    with caplog.at_level(logging.DEBUG, "cupy_resnet"):
        assert tuned.Table.parse(json.dumps(table).encode()).entries == {good.key: good}
    assert len(caplog.records) == len(bad)


def test_a_table_is_written_the_same_whatever_the_order_and_read_back() -> None:
    problems = [LAYER, PLAIN, replace(LAYER, N=1), replace(LAYER, N=32, dilation_h=2)]
    entries = [entry(other(LAYER), problem) for problem in problems]
    entries.append(entry(other(LAYER), LAYER, spread_nan=False, next_microseconds=None))
    table = tuned.Table("x", "y").merged(entries)
    assert tuned.Table("x", "y").merged(reversed(entries)).dump() == table.dump()
    assert tuned.Table.parse(table.dump()) == table
    assert len(table.dump().splitlines()) == 7 + len(entries)
    assert tuned.Table.parse(tuned.Table("x", "").dump()) == tuned.Table("x", "")


def test_remembering_adds_and_replaces() -> None:
    first, second = candidates(LAYER, GPU, spread_nan=True)[1:3]
    small = replace(LAYER, N=1)
    remember(GPU.name, [entry(first, LAYER), entry(first, small)])
    remember(GPU.name, [entry(second, LAYER)])
    assert choose(LAYER, GPU, spread_nan=True).config == second.config
    assert choose(small, GPU, spread_nan=True).config == first.config


REMEMBERING = """
import sys
sys.path[:0] = sys.argv[1:2]
from dataclasses import replace
from functools import cache
from tuning_support import LAYER, entry
from cupy_resnet.conv2d import VARIANTS, H100
from cupy_resnet.tuning import Candidate, remember
config = VARIANTS["conv2d_mma"].candidates(LAYER, H100)[0]
sys.stdin.readline()
for n in range(10):
    remember("GPU", [entry(Candidate("conv2d_mma", config), replace(LAYER, N=10 * int(sys.argv[2]) + n))])
"""


def test_processes_that_remember_at_once_lose_nothing(cache_folder: Path) -> None:
    command = [sys.executable, "-c", REMEMBERING, str(ROOT / "tests")]
    variables = environment(CUPY_RESNET_CACHE_DIR=str(cache_folder))
    processes = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=variables)
        for n in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors.decode()
        assert errors == b""
    assert {problem.N for problem, _ in tuned.read_own("GPU").entries} == set(range(30))
    assert not list(tuned.own_path("GPU").parent.glob(".writing-*"))


@pytest.mark.parametrize("why", ["a file in the way", "no home folder"])
def test_where_nothing_can_be_written_it_holds_for_the_process_with_one_warning(
    why: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "no home folder":
        monkeypatch.setattr("cupy_resnet.environment.cache_dir", lambda: Path("relative"))
    else:
        cache_folder.write_bytes(b"")
        monkeypatch.setattr(tuned, "_warned", {tuned.own_path(GPU.name)})  # reading fails, too, and says so: not here
    first, second = candidates(LAYER, GPU, spread_nan=True)[1:3]
    for fastest in (first, second):
        assert remember(GPU.name, [entry(fastest, LAYER)]) is None
        tuned.forget()
        assert choose(LAYER, GPU, spread_nan=True).config == fastest.config
    (warning,) = caplog.records
    assert "holds for this process only. Set CUPY_RESNET_CACHE_DIR to a writable folder." in warning.getMessage()
    assert not Path("relative").exists()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 PCIe", "NVIDIA H100"),
        ("NVIDIA H100 NVL", "NVIDIA H100"),
        ("NVIDIA H100", "NVIDIA H100"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100"),
        ("Tesla V100-SXM2-16GB", "Tesla V100"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada Generation"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert tuned.family(name) == family


def test_a_shipped_table_counts_for_its_family_after_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = candidates(LAYER, GPU, spread_nan=True)[1:3]
    written = write_table(tmp_path / "shipped.json", "NVIDIA Imaginary 100 80GB HBM3", [entry(first, LAYER)])
    assert written == tuned.Table.parse((tmp_path / "shipped.json").read_bytes())
    monkeypatch.setattr(tuned, "_shipped", cache(lambda: (written,)))
    tuned.forget()
    choice = choose(LAYER, GPU, spread_nan=True)
    assert (choice.config, choice.reason) == (first.config, "tuned on NVIDIA Imaginary 100")
    assert "by the model" in choose(LAYER, replace(GPU, name=f"{GPU.name} MIG 1g.10gb"), spread_nan=True).reason
    remember(GPU.name, [entry(second, LAYER)])
    assert choose(LAYER, GPU, spread_nan=True).config == second.config
    # Other kernels: the user's own does not count any more, the shipped one does, and says so.
    monkeypatch.setattr(tuned, "sources_digest", lambda: "1" * 64)
    tuned.forget()
    choice = choose(LAYER, GPU, spread_nan=True)
    assert choice.config == first.config
    assert choice.reason == "tuned on NVIDIA Imaginary 100, before its kernels changed"


def test_a_shippable_table_grows_but_keeps_nothing_of_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new folder" / "tuned.json"
    small = replace(LAYER, N=1)
    write_table(path, GPU.name, [entry(other(LAYER), LAYER)])
    assert len(write_table(path, GPU.name, [entry(other(LAYER), small)]).entries) == 2
    monkeypatch.setattr(tuned, "sources_digest", lambda: "1" * 64)
    tuned.forget()
    assert len(write_table(path, GPU.name, [entry(other(LAYER), small)]).entries) == 1
    path.write_text("something else")
    assert write_table(path, GPU.name, []) == tuned.Table.parse(path.read_bytes())


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_the_table_that_comes_with_the_package(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry is one that GPUs with this processor follow: a table of other configurations would be of no use."""
    (path,) = Path(tuned.__file__).parent.glob("tuned_*.json")
    table = tuned.Table.parse(path.read_bytes())
    monkeypatch.setattr(tuned, "_shipped", cache(lambda: (table,)))
    tuned.forget(gpu)
    assert table.dump() == path.read_bytes()
    assert table.gpu == tuned.family("NVIDIA H200") == "NVIDIA H200"
    for problem, spread_nan in table.entries:
        device = replace(H100, name=gpu)
        if isinstance(problem, Conv2dPair):
            reason = choose_back_to_back(problem, device, spread_nan=spread_nan).reason
        elif problem.shortcut_channels:
            reason = choose_shortcut(problem, device, spread_nan=spread_nan)[1]
        else:
            reason = choose(problem, device, spread_nan=spread_nan).reason
        wording = "((two|several) kernels are faster: )?tuned on NVIDIA H200(, before its kernels changed)?"
        assert re.fullmatch(wording, reason), problem  # not that of another batch size
