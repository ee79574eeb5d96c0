"""The command line as a whole: help, versions, networks, weights, and errors that a person can read."""

import json
import re
import subprocess

import numpy as np
import pytest
from cli_support import COMMAND, MODEL, environment, on_terminal, run, run_here
from safetensors.numpy import load_file

import cupy_resnet
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.weights_store import embedded

COMMANDS = (
    *("predict", "demo", "info", "models", "explain", "convert", "kernels", "doctor"),
    *("verify", "bench", "profile"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def own_weights(folder):
    """resnet20 for 7 classes, as a plain archive that says nothing about itself."""
    path = folder / "own.npz"
    np.savez(path, **random_state_dict(describe("resnet20", num_classes=7)))
    return path


def test_version(folder):
    done = run("--version", folder=folder)
    assert (done.status, done.out, done.err) == (0, f"cupy-resnet {cupy_resnet.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits_a_narrow_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    done = run_here(monkeypatch, capsys, command, "--help")
    assert done.status == 0
    assert done.err == ""
    assert f"Usage: cupy-resnet {command}" in done.out
    assert max(map(len, done.out.splitlines())) <= 60


def test_the_help_tells_every_command_in_a_whole_sentence(folder):
    done = run("--help", folder=folder, COLUMNS="80")
    told = {line.split()[0]: line for line in done.out.partition("Commands:")[2].splitlines() if line.strip()}
    for command in COMMANDS:
        assert told[command].endswith(".")
        assert "..." not in told[command]


def test_models_name_parameters_and_weights(folder):
    done = run("models", folder=folder)
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == cupy_resnet.list_models()
    assert any(line.startswith("resnet50 ") and "25.56 M" in line and "IMAGENET1K_V2" in line for line in lines)
    entries = {entry["name"]: entry for entry in json.loads(run("models", "--json", folder=folder).out)}
    assert list(entries) == cupy_resnet.list_models()
    # torchvision's documentation of ResNet18_Weights and ResNet152_Weights: num_params.
    assert entries["resnet18"]["parameters"] == 11_689_512
    assert entries["resnet152"]["parameters"] == 60_192_808
    assert entries["resnet18"]["default_size"] == 224
    assert entries["resnet20"]["embedded"] == [name for name in embedded() if name.startswith("resnet20-")]


def test_info_without_weights_and_without_network(folder):
    done = run("info", "resnet18", folder=folder)
    assert (done.status, done.err) == (0, "")
    assert "11,689,512" in done.out
    assert "not on this machine yet" in done.out
    facts = json.loads(run("info", "resnet50", "--size", "64", "--batch", "3", "--json", folder=folder).out)
    assert facts["input_shape"] == [3, 3, 64, 64]
    assert facts["parameters"] == sum(layer["parameters"] for layer in facts["layers"]) == 25_557_032
    assert facts["flops"] == sum(layer["flops"] for layer in facts["layers"])
    assert facts["layers"][-1]["output_shape"] == [3, 1000]
    assert facts["categories"][:2] == ["tench", "goldfish"]
    assert facts["transforms"]["resize"] == 256
    assert facts["weights"] is None


def test_info_counts_a_multiply_add_as_two(folder):
    # 1.814 GMAC are known of ResNet-18 at 224 × 224 (torchvision: "_ops"); pooling, ReLU and bias come on top.
    flops = json.loads(run("info", "resnet18", "--json", folder=folder).out)["flops"]
    assert 2 * 1.814e9 < flops < 2 * 1.814e9 * 1.01


def test_info_of_a_file(folder, own_weights):
    (folder / "names.txt").write_text("one\ntwo\nthree\nfour\nfive\nsix\nseven\n")
    arguments = ("--weights", own_weights, "--categories", "names.txt", "--crop", "24", "--mean", "0.5,0.5,0.25")
    done = run("convert", "resnet20", *arguments, "--output", "own.safetensors", folder=folder)
    assert done.status == 0, done.err
    facts = json.loads(run("info", "resnet20", "--weights", "own.safetensors", "--json", folder=folder).out)
    assert facts["num_classes"] == 7
    assert facts["categories"][6] == "seven"
    assert facts["input_shape"] == [1, 3, 24, 24]
    assert facts["transforms"]["mean"] == [0.5, 0.5, 0.25]
    assert facts["weights"]["source"] == "own.npz"
    assert len(facts["weights"]["sha256"]) == 64


def test_info_of_embedded_weights_names_source_and_hash(folder):
    done = run("info", "resnet20-cifar10", folder=folder)
    assert done.status == 0
    assert "airplane" in done.out
    assert "sha256" in done.out


@pytest.mark.parametrize("option", ["--format", "--to"])
def test_convert_to_a_manifest_with_an_archive(folder, own_weights, option):
    done = run("convert", "resnet20", "--weights", own_weights, option, "npz+json", "-o", "m.json", folder=folder)
    assert (done.status, done.out) == (0, "")
    assert "m.json" in done.err
    assert json.loads((folder / "m.json").read_text())["num_classes"] == 7
    with np.load(folder / "m.npz") as archive, np.load(own_weights) as before:
        np.testing.assert_array_equal(archive["conv1.weight"], before["conv1.weight"])


def test_convert_to_half_precision(folder):
    done = run("convert", "resnet20-cifar10", "--dtype", "float16", "--output", "half.safetensors", folder=folder)
    assert done.status == 0, done.err
    assert {array.dtype for array in load_file(folder / "half.safetensors").values()} == {np.dtype(np.float16)}


def test_explain_takes_the_names_that_predict_takes(folder):
    done = run("explain", "resnet20-cifar10", "--engine", "numpy", folder=folder)
    assert done.status == 0
    assert "layer3.2.conv2" in done.out


def test_explain_takes_a_precision(folder):
    done = run("explain", "resnet18", "--batch", "32", "--precision", "tf32", folder=folder)
    assert done.status == 0
    assert "tf32, as for an NVIDIA H100" in done.out
    assert "conv2d_wgmma" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict",), "PHOTO"),
        (("predict", "x.png", "--model", "resnet19"), "Did you mean 'resnet18'"),
        (("predict", "x.png", "--format", "xml"), "table, json, jsonl, csv"),
        (("predict", "x.png", "--topk", "0"), "--topk"),
        (("predict", "x.png", "--engine", "gpu"), "auto, cuda, numpy"),
        (("predict", "x.png", "--kernel", "conv2d_wingrad"), "conv2d_winograd"),
        (("predict", "x.png", "--precision", "fp8"), "auto, fp32"),
        (("predict", "x.png", "--preset", "IMAGENET1K_V3"), "IMAGENET1K_V2"),
        (("predict", "x.png", "--mean", "0.5,0.5"), "three numbers"),
        (("predict", "x.png", "--on-error", "ignore"), "raise, record"),
        (("info", "resnet19"), "resnet18"),
        (("convert", "resnet18"), "--output"),
        (("convert", "resnet18", "--output", "x.json", "--dtype", "int8"), "float32, float16"),
        (("models", "--jsn"), "--jsn"),
    ],
)
def test_wrong_usage_is_exit_status_2(monkeypatch, capsys, arguments, words):
    done = run_here(monkeypatch, capsys, *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "nowhere.png", *MODEL), "nowhere.png: no such file"),
        (("predict", "own.npz", *MODEL), "own.npz"),
        (("predict", "x.png", "--weights", "nowhere.npz"), "nowhere.npz"),
        (("predict", "x.png", "--weights", "own.npz", "--model", "resnet32"), "resnet20"),
        (("predict", "x.png", *MODEL, "--kernel", "conv2d_direct"), "NumPy engine"),
        (("predict", "x.png", *MODEL, "--output", "no/such/folder/x.csv"), "no folder"),
        (("predict", "x.png", *MODEL, "--output", "."), "is a folder"),
        (("convert", "resnet20", "--output", "x.bin"), ".safetensors or .json"),
        (("info", "resnet32", "--weights", "own.npz"), "resnet32"),
    ],
)
def test_a_failure_is_one_message_and_exit_status_1(folder, own_weights, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(folder)
    done = run_here(monkeypatch, capsys, *arguments)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert words in done.err
    assert "Traceback" not in done.err


def test_verbose_tells_where_an_error_comes_from(folder):
    done = run("--verbose", "predict", "nowhere.png", *MODEL, folder=folder)
    assert done.status == 1
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: nowhere.png")


def test_weights_that_cannot_be_had_name_three_ways_and_a_model_that_works(folder):
    hide = "sys.modules['torch'] = sys.modules['torchvision'] = None"
    program = f"import sys; {hide}; from cupy_resnet.cli import main; main()"
    command = [COMMAND[0], "-c", program, "predict", "x.png", "--engine", "numpy"]
    variables = environment(CUPY_RESNET_CACHE_DIR=str(folder / "cache"))
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: torchvision's IMAGENET1K_V1 weights of resnet18 cannot be had")
    assert "pip install 'cupy-resnet[torch]'" in done.stderr
    assert "cupy-resnet convert resnet18 --weights IMAGENET1K_V1 --output resnet18.safetensors" in done.stderr
    assert "resnet20-cifar10" in done.stderr


@pytest.mark.parametrize("arguments", [("models",), ("info", "resnet20")])
def test_a_terminal_of_40_columns_loses_no_letter(folder, arguments):
    narrow = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_terminal(*arguments, folder=folder, columns=40))
    assert max(map(len, narrow.splitlines())) <= 40
    wide = run(*arguments, folder=folder).out
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))


def test_an_error_of_the_gpu_is_a_message_and_any_other_fault_a_traceback(monkeypatch, capsys):
    def fail(error):
        def load(*arguments, **options):
            raise error("cudaErrorIllegalAddress: an illegal memory access was encountered")

        return load

    from_cuda = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})
    monkeypatch.setattr("cupy_resnet.loading.load", fail(from_cuda))
    done = run_here(monkeypatch, capsys, "predict", "a.jpg")
    assert done.status == 1
    assert done.err == "error: cudaErrorIllegalAddress: an illegal memory access was encountered\n"
    monkeypatch.setattr("cupy_resnet.loading.load", fail(RuntimeError))
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        run_here(monkeypatch, capsys, "predict", "a.jpg")
