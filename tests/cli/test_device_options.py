"""`--device`, `--device-map` and `--dtype` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from classifiers import make_classifiers
from safetensors.torch import load_file
from second_device import DEVICE, in_use, rule

from retex_hf import RetexModel
from retex_hf.cli import COMMANDS, main

RUNNING = ("build", "sign", "predict", "eval", "add-task", "export", "demo", "serve")
TEXTS = ["--text", "one two", "--text", "three"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return make_classifiers(tmp_path_factory.mktemp("models"), {"low": 2, "high": 3, "more": 2})


@pytest.fixture(scope="module")
def built(folders, tmp_path_factory) -> Path:
    """Built and signed on the second device, held in bfloat16."""
    out = tmp_path_factory.mktemp("artifacts") / "two"
    pairs = [part for t in ("low", "high") for part in ("--expert", f"{t}={folders / 'experts' / t}")]
    pairs += [part for t in ("low", "high") for part in ("--data", f"{t}={folders / 'data' / t}")]
    options = ["--rank", "4", "--num-reference", "8", "--device", str(DEVICE), "--dtype", "bfloat16"]
    with in_use():
        assert main(["build", "--base", str(folders / "base"), *pairs, *options, "--output-dir", str(out)]) == 0
    return out


@pytest.fixture(autouse=True)
def second_device():
    with in_use():
        yield


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_run_a_model_offer_a_device(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ("--device " in text) == ("--dtype " in text) == (command in RUNNING)
    assert ("--device-map " in text) == (command in RUNNING and command != "build")


def test_what_a_build_was_told_of_dtype_and_device(built):
    assert {tensor.dtype for tensor in load_file(built / "model.safetensors").values()} == {torch.bfloat16}
    recipe = RetexModel.from_pretrained(built).recipe
    assert recipe["dtype"] == "bfloat16" and "device" not in recipe  # another machine may have another


@pytest.mark.parametrize("place", [["--device", str(DEVICE)], ["--device-map", str(DEVICE)], ["--dtype", "float32"]])
def test_answers_do_not_depend_on_where_they_are_computed(built, place, capsys):
    records = []
    for options in ([], place):
        assert main(["predict", str(built), *TEXTS, "--residuals", *options]) == 0
        records.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    for here, there in zip(*records, strict=True):
        assert (there["task"], there["answer"]) == (here["task"], here["answer"])
        assert there["residuals"] == pytest.approx(here["residuals"], rel=0.05)
        assert there["score"] == pytest.approx(here["score"], abs=0.02)


def test_tasks_are_added_signed_evaluated_and_exported_on_a_device(folders, built, tmp_path, capsys):
    device = ["--device", str(DEVICE)]
    three, source = tmp_path / "three", str(folders / "data" / "more")
    added = ["add-task", str(built), "more", str(folders / "experts" / "more"), "--data", source]
    assert main([*added, "--output-dir", str(three), *device]) == 0
    named = [part for t in ("low", "high", "more") for part in ("--data", f"{t}={folders / 'data' / t}")]
    assert main(["sign", str(three), *named, *device]) == 0
    assert main(["eval", str(three), *named, "--rows", "4", "--json", *device]) == 0
    figures = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert figures["methods"]["ReTeX"]["modes"]["known"]["accuracy"]
    assert main(["export", str(three), "more", str(tmp_path / "expert"), *device, "--dtype", "float16"]) == 0
    exported = load_file(tmp_path / "expert" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float16}
    assert RetexModel.from_pretrained(three).dtype == torch.bfloat16


def test_what_is_loaded_in_another_dtype_and_saved_says_so(built, tmp_path):
    assert "unrecorded" not in RetexModel.from_pretrained(built, dtype="bfloat16").recipe
    model = RetexModel.from_pretrained(built, dtype="float16")
    model.save_pretrained(tmp_path / "half")
    again = RetexModel.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.float16
    assert again.recipe["unrecorded"] == ["cast the merged model to float16"]


def test_layers_on_the_disk(built, tmp_path, capsys):
    places = "{bert.embeddings: cpu, bert.encoder: disk, bert.pooler: disk, dropout: cpu, classifier: cpu}"
    records = []
    for options in ([], ["--device-map", places, "--offload-folder", str(tmp_path / "off")]):
        assert main(["predict", str(built), *TEXTS, *options]) == 0
        records.append([json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()])
    assert records[0] == records[1]
    assert list((tmp_path / "off").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:7"], "device 'cuda:7' is not on this machine"),
        (["--device-map", "{bert: cuda:7}"], "device 'cuda:7' is not on this machine"),
        (["--device", "cpu", "--device-map", "auto"], "give one of them"),
        (["--dtype", "int4"], "dtype must be a floating-point dtype"),
        (["--dtype", "float8_e4m3fn"], "dtype must be a floating-point dtype that torch computes in"),
        (["--device-map", "meta"], '"meta" holds no numbers'),
        (["--device-map", "{bert: meta}"], '"meta" holds no numbers'),
    ],
)
def test_wrong_places_are_one_sentence(built, options, message, capsys):
    assert main(["predict", str(built), *TEXTS, *options]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said


def test_too_little_memory_is_one_sentence(built, capsys):
    with rule(largest=100):
        assert main(["predict", str(built), *TEXTS, "--device", str(DEVICE)]) == 2
    said = capsys.readouterr().err.strip()
    assert "The device does not have enough memory to hold the model" in said and "\n" not in said
