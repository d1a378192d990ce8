"""Paths that no file can have, wherever somebody types one: one sentence, no traceback, nothing made."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trust.killed import prepare_folders
from users import as_nobody, give, reachable_folder

from retex_hf import RetexConfig, RetexError, RetexModel, TrainingConfig, WriteError, verify
from retex_hf.artifact.plots import plot_errors, save_figures
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.artifact.recipe import Recipe
from retex_hf.cli import main
from retex_hf.data.datasets import load_inputs
from retex_hf.evaluation import load_task
from retex_hf.model.export.checkpoint import export_checkpoint
from retex_hf.utils.paths import as_path
from retex_hf.workflows.from_recipe import make

BAD = {
    "no such user": ("~nosuchuser/model", "there is no user of that name"),
    "long name": ("x" * 300, "File name too long"),
    "long path": ("/x" * 3000, "File name too long"),
    "zero byte": ("mo\0del", "a character that no path may have"),
    "half a character": ("mo\ud800del", "a character that no path may have"),
    "loop": ("loop", "Too many levels of symbolic links"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    prepare_folders(folder)
    return folder


@pytest.fixture
def place(shared, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def build(shared: Path, **changes: object) -> None:
    experts = {"red": str(shared / "experts" / "red"), "green": str(shared / "experts" / "green")}
    given = {"base": str(shared / "base"), "experts": experts, "output_dir": "out", "config": RetexConfig(rank=2)}
    RetexModel.from_experts(**{**given, **changes}, progress=False)


def model(shared: Path) -> RetexModel:
    return RetexModel.from_pretrained(shared / "previous")


CALLS: dict[str, Callable[[Path, str], object]] = {
    "from_pretrained": lambda shared, path: RetexModel.from_pretrained(path),
    "from_pretrained, of a Path": lambda shared, path: RetexModel.from_pretrained(Path(path)),
    "verify": lambda shared, path: verify(path),
    "save_pretrained": lambda shared, path: model(shared).save_pretrained(path),
    "save_description": lambda shared, path: model(shared).save_description(path),
    "card": lambda shared, path: model(shared).create_or_update_model_card(path),
    "export": lambda shared, path: export_checkpoint(model(shared), "red", path),
    "export as LoRA": lambda shared, path: model(shared).export_lora("red", path),
    "base": lambda shared, path: build(shared, base=path),
    "base, of OpenCLIP": lambda shared, path: build(shared, base=f"local-dir:{path}"),
    "expert": lambda shared, path: build(shared, experts={"red": path}),
    "merge": lambda shared, path: build(shared, config=RetexConfig(rank=2, merge=path)),
    "output_dir": lambda shared, path: build(shared, output_dir=path),
    "checkpoint_dir": lambda shared, path: build(
        shared, solver="adam", training=TrainingConfig(steps=2, warmup_steps=0, checkpoint_dir=path)
    ),
    "recipe": lambda shared, path: make(Recipe(base=path, experts={"red": path}), progress=False),
    "load_inputs": lambda shared, path: load_inputs("red", path),
    "load_task": lambda shared, path: load_task("red", path),
    "load_task of arrays": lambda shared, path: load_task("red", path + ".npz" if path != "loop" else path),
    "load_preprocessor": lambda shared, path: load_preprocessor(path, model(shared).model),
    "figure": lambda shared, path: plot_errors({"a.weight": 0.5}, path),
    "figures": lambda shared, path: save_figures(path, errors={"a.weight": 0.5}),
    "config": lambda shared, path: RetexConfig().save_pretrained(path),
    "config, read": lambda shared, path: RetexConfig.from_pretrained(path),
}
COMMANDS = {
    "predict": ["predict", "{path}", "--text", "a"],
    "predict, of a file": ["predict", "{artifact}", "{path}"],
    "predict, classes": ["predict", "{artifact}", "--text", "a", "--classes", "{path}"],
    "inspect": ["inspect", "{path}"],
    "verify": ["verify", "{path}"],
    "verify --record": ["verify", "{path}", "--record"],
    "sign": ["sign", "{path}", "--data", "red=x"],
    "sign, data": ["sign", "{artifact}", "--data", "red={path}", "--data", "green={path}"],
    "sign, output": [
        "sign", "{artifact}", "--data", "red={texts}", "--data", "green={texts}", "--output-dir", "{path}",
    ],
    "eval": ["eval", "{path}", "--data", "red=x"],
    "eval, data": ["eval", "{artifact}", "--data", "red={path}"],
    "eval, results": ["eval", "{artifact}", "--data", "red=x", "--results-dir", "{path}"],
    "add-task": ["add-task", "{path}", "blue", "x"],
    "add-task, expert": ["add-task", "{artifact}", "blue", "{path}", "--data", "{texts}"],
    "add-task, data": ["add-task", "{artifact}", "blue", "{expert}", "--data", "{path}"],
    "remove-task": ["remove-task", "{path}", "red"],
    "remove-task, output": ["remove-task", "{artifact}", "red", "--output-dir", "{path}"],
    "export": ["export", "{artifact}", "red", "{path}"],
    "push": ["push", "{path}", "me/mine"],
    "build": ["build", "{path}"],
    "build, output": [
        "build", "--base", "{base}", "--expert", "red={expert}", "--rank", "2", "--output-dir", "{path}",
    ],
    "build, base": ["build", "--base", "{path}", "--expert", "red={expert}", "--output-dir", "out"],
    "build, data": [
        "build", "--base", "{base}", "--expert", "red={expert}", "--data", "red={path}", "--output-dir", "out",
    ],
}  # fmt: skip


def left(place: Path) -> list[str]:
    return sorted(os.listdir(place))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", CALLS)
def test_a_path_that_cannot_be_is_one_sentence(call, bad, shared, place):
    path, reason = BAD[bad]
    before = left(place)
    with pytest.raises(RetexError, match=reason) as caught:
        CALLS[call](shared, path)
    said = str(caught.value)
    assert "\n" not in said and "\0" not in said and len(said) < 600
    assert said.encode()  # it can be printed
    assert left(place) == before


@pytest.mark.parametrize("bad", [name for name in BAD if name not in ("zero byte", "half a character")])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_it_in_one_sentence(command, bad, shared, place, capsys):
    path, reason = BAD[bad]
    known = {
        "path": path, "artifact": shared / "previous", "texts": shared / "texts" / "red.txt",
        "expert": shared / "experts" / "red", "base": shared / "base",
    }  # fmt: skip
    before = left(place)
    assert main([argument.format(**known) for argument in COMMANDS[command]]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert reason in said[-1] and said[-1].startswith(f"retex {COMMANDS[command][0]}: ")
    assert left(place) == before


def test_folders_that_may_not_be_read_are_one_sentence_too(shared):
    with reachable_folder() as folder:
        shutil.copytree(shared / "previous", folder / "closed" / "artifact")
        (folder / "closed" / "texts.txt").write_text("a text\n")
        give(folder)
        (folder / "closed").chmod(0)
        calls = {
            "from_pretrained": lambda path: RetexModel.from_pretrained(path),
            "verify": verify,
            "load_inputs": lambda path: load_inputs("red", path),
            "base": lambda path: RetexModel.from_experts(path, {"red": path}, progress=False),
            "config": lambda path: RetexConfig().save_pretrained(path),
            "figure": lambda path: plot_errors({"a.weight": 0.5}, path),
        }
        for call in calls.values():
            for path in (folder / "closed", folder / "closed" / "artifact", folder / "closed" / "texts.txt"):
                with pytest.raises(RetexError, match=r"[Pp]ermission denied|Is a directory") as caught:
                    as_nobody(call, path)
                assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc, where nobody can make a file")
def test_where_no_file_can_be_made_nobody_waits_for_a_lock(shared):
    saved, start = model(shared), time.monotonic()
    with pytest.raises(WriteError, match=r"/proc.* cannot be written"):
        saved.save_pretrained("/proc/retex")
    assert time.monotonic() - start < 10


def test_a_path_is_given_back_with_the_home_folder_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("~/model") == tmp_path / "model"
    assert as_path("org/name") == Path("org/name")
    assert as_path(Path("~")) == tmp_path


def test_a_model_is_saved_in_the_home_folder(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model(shared).save_pretrained("~/mine")
    assert os.listdir(tmp_path) == ["mine"]
    assert RetexModel.from_pretrained("~/mine").tasks == ["red", "green"]
