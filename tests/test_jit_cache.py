"""jit.cache: what is found again, and what happens to it among threads, processes, kills and bad disks."""

import errno
import json
import logging
import multiprocessing
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
from jit_support import KERNELS, use_kernels, write_kernels

from cupy_resnet import jit
from cupy_resnet.jit import building, cache
from cupy_resnet.jit.cache import KernelCache, file_of

KEY = "ab" * 32
SPAWN = multiprocessing.get_context("spawn")


def build(content=b"cubin", log="log"):
    return lambda: (content, log)


def never():
    raise AssertionError("compiled although the cache has it")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_survives_the_process(tmp_path):
    KernelCache(tmp_path).get(KEY, "scale", build())
    entry = KernelCache(tmp_path).get(KEY, "scale", never)
    assert (entry.cubin, entry.log) == (b"cubin", "log")
    assert entry.path.read_bytes() == b"cubin"
    assert entry.path.parent == tmp_path
    assert len(names(tmp_path)) == 2


def test_a_failed_build_stores_nothing_and_is_tried_again(tmp_path):
    kernels = KernelCache(tmp_path)
    with pytest.raises(ZeroDivisionError):
        kernels.get(KEY, "scale", lambda: 1 / 0)
    assert names(tmp_path) == []
    assert kernels.get(KEY, "scale", build()).cubin == b"cubin"


def damage_cubin(folder):
    next(folder.glob("*.cubin")).write_bytes(b"cubim")


def truncate_cubin(folder):
    next(folder.glob("*.cubin")).write_bytes(b"")


def remove_cubin(folder):
    next(folder.glob("*.cubin")).unlink()


def truncate_metadata(folder):
    path = next(folder.glob("*.json"))
    path.write_bytes(path.read_bytes()[:-5])


def lead_outside(folder):
    next(folder.glob("*.json")).write_text(json.dumps({"sha256": "../../etc/passwd", "log": ""}))


def write_other_json(folder):
    next(folder.glob("*.json")).write_text("[1]")


def write_binary(folder):
    next(folder.glob("*.json")).write_bytes(b"\xff\x00\xfe")


@pytest.mark.parametrize(
    "damage",
    [damage_cubin, truncate_cubin, remove_cubin, truncate_metadata, lead_outside, write_other_json, write_binary],
)
def test_a_damaged_entry_is_compiled_again_and_replaced(tmp_path, damage):
    KernelCache(tmp_path).get(KEY, "scale", build())
    before = names(tmp_path)
    damage(tmp_path)
    assert KernelCache(tmp_path).get(KEY, "scale", build()).cubin == b"cubin"
    assert names(tmp_path) == before
    assert KernelCache(tmp_path).get(KEY, "scale", never).cubin == b"cubin"


def test_of_many_threads_one_builds_and_the_others_wait(tmp_path):
    kernels = KernelCache(tmp_path)
    barrier = threading.Barrier(16)
    built, results = [], []

    def slow_build():
        built.append(threading.get_ident())
        time.sleep(0.1)
        return b"cubin", "log"

    def work():
        barrier.wait()
        results.append(kernels.get(KEY, "scale", slow_build))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(results) == 16
    assert all(result is results[0] for result in results)


def test_different_keys_build_at_the_same_time():
    kernels = KernelCache(None)
    both_inside = threading.Barrier(2)

    def meet():
        both_inside.wait(timeout=10)
        return b"cubin", "log"

    threads = [threading.Thread(target=kernels.get, args=(key, "scale", meet)) for key in ("aa", "bb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both_inside.broken


def refuse(error):
    def write(path, content):
        raise OSError(error, os.strerror(error), str(path))

    return write


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_warned_of_once(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(cache, "_replace", refuse(error))
    kernels = KernelCache(tmp_path / "kernels")
    with caplog.at_level(logging.WARNING):
        entries = [kernels.get(key, "scale", build()) for key in ("aa", "bb", "cc", "aa")]
    assert entries[0] is entries[3]
    assert [entry.path for entry in entries] == [None] * 4
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert str(tmp_path / "kernels") in warnings[0]
    assert os.strerror(error) in warnings[0]
    assert "CUPY_RESNET_CACHE_DIR" in warnings[0]


def test_a_folder_that_cannot_be_made_is_warned_of(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert KernelCache(tmp_path / "file/kernels").get(KEY, "scale", build()).cubin == b"cubin"
    assert len(caplog.records) == 1


def test_a_system_without_home_folder_gets_no_folder_in_the_working_directory(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    KernelCache(Path("~/.cache/kernels")).get(KEY, "scale", build())
    assert names(tmp_path) == []
    assert "no home folder" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_warned_of(tmp_path, caplog):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert KernelCache(tmp_path).get(KEY, "scale", build()).cubin == b"cubin"
    assert len(caplog.records) == 1


def test_a_disk_that_fills_up_half_way_leaves_no_temporary_file(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", fail)
    KernelCache(tmp_path).get(KEY, "scale", build())
    assert names(tmp_path) == []


def test_an_entry_in_memory_gets_a_file_to_load_from(tmp_path):
    entry = KernelCache(None).get(KEY, "scale", build(b"only in memory"))
    path = file_of(entry)
    assert path.read_bytes() == b"only in memory"
    assert file_of(entry) == path
    stored = KernelCache(tmp_path).get(KEY, "scale", build())
    assert file_of(stored) == stored.path
    stored.path.unlink()  # someone empties the cache folder meanwhile
    assert file_of(stored).read_bytes() == b"cubin"


def test_stale_temporary_files_are_removed_and_fresh_ones_kept(tmp_path):
    stale, fresh = tmp_path / f"{cache._TEMPORARY}1", tmp_path / f"{cache._TEMPORARY}2"
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (0, 0))
    KernelCache(tmp_path).get(KEY, "scale", build())
    assert not stale.exists()
    assert fresh.exists()


def die_between_the_two_files(folder):
    original = cache._replace

    def replace(path, content):
        if path.suffix == ".json":
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, content)

    cache._replace = replace
    KernelCache(Path(folder)).get(KEY, "scale", build())


def die_while_writing(folder):
    original = Path.replace

    def replace(path, target):
        os.truncate(path, 3)
        os.kill(os.getpid(), signal.SIGKILL)
        original(path, target)

    Path.replace = replace
    KernelCache(Path(folder)).get(KEY, "scale", build())


@pytest.mark.parametrize("death", [die_between_the_two_files, die_while_writing])
def test_what_a_killed_process_leaves_is_not_used(tmp_path, death):
    process = SPAWN.Process(target=death, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path)  # it did leave something
    assert KernelCache(tmp_path).get(KEY, "scale", build(b"new")).cubin == b"new"
    assert KernelCache(tmp_path).get(KEY, "scale", never).cubin == b"new"


def content(number):
    return bytes([number % 256]) * 200_000


def fill(folder, started):
    kernels = KernelCache(Path(folder))
    started.set()
    for number in range(100_000):
        kernels.get(f"{number:064x}", "scale", build(content(number)))


def test_kill_9_at_any_moment_leaves_only_whole_entries(tmp_path):
    started = SPAWN.Event()
    process = SPAWN.Process(target=fill, args=(str(tmp_path), started))
    process.start()
    assert started.wait(60)
    time.sleep(0.3)
    process.kill()
    process.join(60)
    entries = list(tmp_path.glob("*.json"))
    assert entries
    for path in entries:
        key = path.stem.removeprefix("scale-")
        assert KernelCache(tmp_path).get(key, "scale", never).cubin == content(int(key, 16))


# The rest goes through NVRTC.

CONFIGURATIONS = [{"FACTOR": factor} for factor in (2, 3, 5)]


@pytest.fixture
def root(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    use_kernels(monkeypatch, tmp_path / "kernels_cu")
    return write_kernels(tmp_path / "kernels_cu")


@pytest.fixture
def compilations():
    seen = []
    with jit.on_compile(lambda event: seen.append(event.name) if event.seconds is None else None):
        yield seen


def forget():
    building._cache_at.cache_clear()


def test_an_edited_include_is_a_miss_and_its_undoing_a_hit(root, compilations):
    header = root / "include/inner/factor.cuh"
    first = jit.compile_kernel("scale", arch="sm_80")
    forget()
    assert jit.compile_kernel("scale", arch="sm_80") == first
    assert len(compilations) == 1
    header.write_text(header.read_text().replace("FACTOR 2", "FACTOR 4"))
    second = jit.compile_kernel("scale", arch="sm_80")
    assert second.cubin != first.cubin
    assert len(compilations) == 2
    header.write_text(KERNELS["include/inner/factor.cuh"])
    assert jit.compile_kernel("scale", arch="sm_80") == first
    assert len(compilations) == 2


def test_a_hit_still_tells_registers(root, compilations):
    first = jit.compile_kernel("scale", arch="sm_80").resources
    forget()
    assert jit.compile_kernel("scale", arch="sm_80").resources == first
    assert first["scale"].registers > 0
    assert len(compilations) == 1


def test_source_options_architecture_and_nvrtc_are_in_the_key(root, monkeypatch):
    def key(arch="sm_80", **defines):
        return jit.compile_kernel("scale", defines=defines, arch=arch).key

    keys = [key(), key(FACTOR=3), key(arch="sm_90"), key(arch="sm_90a")]
    monkeypatch.setattr(building, "COMMON_OPTIONS", (*building.COMMON_OPTIONS, "--use_fast_math"))
    keys.append(key())
    monkeypatch.setattr(building.toolchain, "nvrtc_version", lambda: (99, 1))
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_disk_cache_can_be_switched_off(root, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_RESNET_DISK_CACHE", "0")
    assert jit.compile_kernel("scale", arch="sm_80").entry.path is None
    assert not (tmp_path / "cache").exists()


def race(kernels, barrier, results):
    patch = pytest.MonkeyPatch()
    use_kernels(patch, Path(kernels))
    building.toolchain.import_nvrtc()
    barrier.wait(120)
    compiled = [jit.compile_kernel("scale", defines=defines, arch="sm_80") for defines in CONFIGURATIONS]
    results.put([(one.key, one.cubin, str(one.entry.path)) for one in compiled])


def test_eight_processes_that_start_cold_agree(root, tmp_path):
    barrier, results = SPAWN.Barrier(8), SPAWN.Queue()
    processes = [SPAWN.Process(target=race, args=(str(root), barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert all(outcome == outcomes[0] for outcome in outcomes)
    paths = {Path(path) for _, _, path in outcomes[0]}
    metadata = {path.parent / f"scale-{key}.json" for (key, _, _), path in zip(outcomes[0], paths, strict=True)}
    assert len(paths) == len(metadata) == len(CONFIGURATIONS)
    assert set((tmp_path / "cache/kernels").iterdir()) == paths | metadata
