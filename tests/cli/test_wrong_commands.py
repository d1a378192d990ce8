"""Wrong input on the command line: one sentence, exit code 2, nothing written or changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from classifiers import make_classifiers

from retex_hf.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    place = make_classifiers(tmp_path_factory.mktemp("place"), {"low": 2, "high": 3})
    experts = [f"--expert={task}={place / 'experts' / task}" for task in ("low", "high")]
    data = [f"--data={task}={place / 'data' / task}" for task in ("low", "high")]
    options = ["--rank=4", "--output-dir", str(place / "artifact")]
    assert main(["build", "--base", str(place / "base"), *experts, *data, *options]) == 0
    (place / "recipe.yaml").write_text("base: base\nexperts: {low: experts/low}\n")
    (place / "broken.yaml").write_text("base: [")
    changes = "base: base\nexperts: {low: experts/low}\nchanges: [{add: high, expert: "
    (place / "gone.yaml").write_text(changes + "./none/high}]\n")
    (place / "gone-data.yaml").write_text(changes + "experts/high, data: {high: none.txt}}]\n")
    (place / "list.yaml").write_text("- a\n")
    (place / "empty.txt").write_text("")
    (place / "rows.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    (place / "two.jsonl").write_text('{"text": "w1", "sentence": "w2"}\n')
    (place / "numbers.jsonl").write_text('{"text": 3}\n')
    (place / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (place / "photo.png").write_bytes(b"no image")
    (place / "rows.csv").write_text("text\nw1\n")
    (place / "classes.json").write_text('{"low": ["a", "b"], "high": ["a", "b"]}')
    (place / "folder").mkdir()
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")
    unsigned = ["--rank=4", "--output-dir", str(place / "unsigned")]
    assert main(["build", "--base", str(place / "base"), *experts, *unsigned]) == 0
    return place


BUILD = ["build", "--base", "base", "--expert", "low=experts/low", "--output-dir", "out"]

WRONG = {
    "no such command": (["biuld"], "did you mean 'build'"),
    "no arguments": (["predict"], "required: ARTIFACT"),
    "unknown flag": (["predict", "artifact", "--tsk", "low"], "--tsk"),
    "shortened flag": (["predict", "artifact", "--tas", "low"], "--tas"),
    "not a number": (["predict", "artifact", "--batch-size", "many"], "many"),
    "no batch": (["predict", "artifact", "--batch-size", "0", "--text", "w1"], "positive number"),
    "no artifact": (["predict", "folder", "--text", "w1"], "not a ReTeX artifact"),
    "artifact missing": (["inspect", "./none"], "none does not exist"),
    "not on the Hub": (["inspect", "org/none"], "org/none"),
    "unknown task": (["predict", "artifact", "--task", "mid", "--text", "w1"], "'mid'"),
    "text and files": (["predict", "artifact", "rows.jsonl", "--text", "w1"], "either --text or files"),
    "inputs missing": (["predict", "artifact", "none.txt"], "none.txt does not exist"),
    "broken line": (["predict", "artifact", "rows.jsonl", "--batch-size", "1"], "line 2 is not valid JSON"),
    "two columns": (["predict", "artifact", "two.jsonl"], "--input-column"),
    "unknown column": (["predict", "artifact", "two.jsonl", "--input-column", "body"], "--input-column"),
    "a number for a text": (["predict", "artifact", "numbers.jsonl"], "must be a text"),
    "not UTF-8": (["predict", "artifact", "binary.txt"], "UTF-8"),
    "an image for a text": (["predict", "artifact", "photo.png"], "takes texts"),
    "no images": (["predict", "artifact", "folder"], "holds no images"),
    "generation of a classifier": (["predict", "artifact", "--text", "a", "--max-new-tokens", "3"], "generate text"),
    "nothing to build": (["build", "--output-dir", "out"], "needs a base and experts"),
    "recipe missing": (["build", "none.yaml"], "none.yaml does not exist"),
    "broken recipe": (["build", "broken.yaml"], "not valid YAML"),
    "recipe is a list": (["build", "list.yaml"], "keys and values"),
    "folder without recipe": (["build", "folder"], "holds no retex_recipe.yaml"),
    "no output_dir": (["build", "recipe.yaml"], "--output-dir"),
    "not a pair": (["build", "--expert", "low"], "TASK=SOURCE"),
    "a task twice": (["build", "--expert", "low=a", "--expert", "low=b"], "names 'low' twice"),
    "wrong rank": ([*BUILD, "--rank", "none"], "RetexConfig.rank"),
    "wrong merge": ([*BUILD, "--merge", "tise"], "tise"),
    "expert missing": ([*BUILD, "--expert", "high=./none"], "none"),
    "expert of another kind": ([*BUILD, "--expert", "high=folder"], "folder"),
    "data for no expert": ([*BUILD, "--data", "mid=data/low"], "'mid'"),
    "data of another kind": ([*BUILD, "--data", "low=numbers.jsonl"], "'low': Input 1 is a int"),
    "texts cut to nothing": ([*BUILD, "--data", "low=data/low", "--max-length", "0"], "max_length"),
    "added expert gone": (["build", "gone.yaml", "--output-dir", "out"], "expert 'high': none/high does not exist"),
    "added data gone": (["build", "gone-data.yaml", "--output-dir", "out"], "none.txt does not exist"),
    "data missing": ([*BUILD, "--data", "low=./none"], "none"),
    "training without adam": ([*BUILD, "--steps", "3"], "adam"),
    "output is a file": ([*BUILD, "--output-dir", "recipe.yaml"], "recipe.yaml is a file"),
    "data of another task": (["sign", "artifact", "--data", "mid=data/low"], "'mid'"),
    "data of one task only": (["sign", "artifact", "--data", "low=data/low"], "'high'"),
    "no such split": (["sign", "artifact", "--trust-recipe", "--split", "validation"], "validation"),
    "empty data": (["sign", "artifact", "--data", "low=empty.txt", "--data", "high=data/high"], "empty.txt is empty"),
    "no such layer": (["sign", "artifact", "--trust-recipe", "--feature-layer", "nowhere"], "nowhere"),
    "too few references": (["sign", "artifact", "--trust-recipe", "--num-reference", "0"], "num_reference"),
    "no labels": (["eval", "artifact", "--trust-recipe", "--label-column", "klass"], "klass"),
    "data of a recipe": (["eval", "artifact"], "pass --trust-recipe if you trust its author"),
    "data of a recipe, to sign": (["sign", "artifact"], "pass --trust-recipe if you trust its author"),
    "experts of a recipe": (
        ["eval", "artifact", "--data", "low=data/low", "--data", "high=data/high", "--individual"],
        "--expert TASK=SOURCE and --base",
    ),
    "too many threads": ([*BUILD, "--threads", "100000"], "threads must be a positive number of at most"),
    "a seed beyond 32 bits": ([*BUILD, "--solver", "adam", "--seed", "4294967296"], "seed"),
    "steps of a billion draws": ([*BUILD, "--solver", "adam", "--batch-size", "1000000000"], "batch_size"),
    "an embedding of a billion": ([*BUILD, "--task-embedding-dim", "1000000000"], "task_embedding_dim"),
    "calls of a billion rows": (["predict", "artifact", "--batch-size", "1000000000000000000000"], "at most 65536"),
    "no such port": (["demo", "artifact", "--port", "99999999", "--no-open"], "--port must be from 1 to 65535"),
    "no such host": (["demo", "artifact", "--host", "nowhere.invalid", "--no-open"], "--host 'nowhere.invalid'"),
    "figures on the Hub": (["eval", "org/none"], "org/none"),
    "expert elsewhere": (["eval", "artifact", "--trust-recipe", "--individual", "--expert", "low=./none"], "none"),
    "export of no task": (["export", "artifact", "mid", "out"], "'mid'"),
    "export over files": (["export", "artifact", "low", "base"], "not empty"),
    "export in no format": (["export", "artifact", "low", "out", "--format", "onnx"], "onnx"),
    "scope of a checkpoint": (["export", "artifact", "low", "out", "--scope", "linear"], "--format lora"),
    "task twice": (["add-task", "artifact", "low", "experts/low", "--data", "data/low"], "'low'"),
    "new expert missing": (["add-task", "artifact", "mid", "./none", "--data", "data/low"], "none"),
    "new task unsigned": (["add-task", "artifact", "mid", "experts/low"], "--data"),
    "new task signed alone": (["add-task", "unsigned", "mid", "experts/low", "--data", "data/low"], "leave out --data"),
    "build over the base": ([*BUILD, "--output-dir", "base"], "would be lost"),
    "build over an expert": ([*BUILD, "--output-dir", "experts/low"], "would be lost"),
    "build over another model": ([*BUILD, "--output-dir", "experts/high"], "would be lost"),
    "build over an adapter": ([*BUILD, "--output-dir", "adapter"], "would be lost"),
    "build over a base that is an artifact": (
        ["build", "--base", "artifact", "--expert", "low=experts/low", "--output-dir", "./artifact"],
        "holds the base",
    ),
    "save over a model": (["remove-task", "artifact", "low", "--output-dir", "experts/low"], "would be lost"),
    "output inside a file": ([*BUILD, "--output-dir", "recipe.yaml/out"], "a part of its path is a file"),
    "data is no file": ([*BUILD, "--data", "low=none.txt"], "none.txt does not exist"),
    "artifact is a file": (["inspect", "recipe.yaml"], "recipe.yaml is a file"),
    "inputs are a table": (["predict", "artifact", "rows.csv"], "rows.csv is a table"),
    "column of a text": (["predict", "artifact", "--text", "a", "--input-column", "b"], "--input-column is for files"),
    "residuals of a known task": (["predict", "artifact", "--text", "a", "--task", "low", "--residuals"], "--task"),
    "revision of a folder": (["predict", "artifact", "--text", "w1", "--revision", "v1"], "no revision 'v1'"),
    "classes of a classifier": (["predict", "artifact", "--text", "w1", "--classes", "classes.json"], "Classes"),
    "prompt without classes": (["predict", "artifact", "--text", "w1", "--prompt", "{}!"], "--prompt is for --classes"),
    "cut to nothing": (["predict", "artifact", "--text", "w1", "--max-length", "0"], "max_length"),
    "cut below nothing": (["sign", "artifact", "--trust-recipe", "--max-length", "-1"], "max_length"),
    "longer than positions": (
        ["predict", "artifact", "--text", "w1", "--max-length", "100000"],
        "what the model takes",
    ),
    "negative rows": (["eval", "artifact", "--trust-recipe", "--rows", "-1"], "must be positive, not -1"),
    "experts for nothing": (["eval", "artifact", "--expert", "low=experts/low"], "for --individual"),
    "results in a file": (["eval", "artifact", "--results-dir", "recipe.yaml"], "recipe.yaml is a file"),
    "remove no task": (["remove-task", "artifact", "mid"], "'mid'"),
    "push offline": (["push", "artifact", "org/name"], "offline"),
    "push to a bad name": (["push", "artifact", "org/a/b"], "org/a/b"),
    "push of no artifact": (["push", "folder", "org/name"], "not a ReTeX artifact"),
    "demo of no artifact": (["demo", "folder", "--no-open"], "not a ReTeX artifact"),
}


def fingerprint(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if not file.is_dir())
    return {str(file.relative_to(folder)): hashlib.sha1(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_and_changes_nothing(case, place, monkeypatch, capsys):
    arguments, message = WRONG[case]
    monkeypatch.chdir(place)
    before = fingerprint(place)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("retex") and error.count("\n") == 1, error
    assert message in error
    assert "Traceback" not in error
    assert fingerprint(place) == before
