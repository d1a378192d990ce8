"""matplotlib is an extra: without it everything works but pictures, and what draws names the extra."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from classifiers import make_classifiers
from families import TEXT
from helpers import make_experts
from hubs import WRITE
from local_hub import LocalHub
from transformers import BertConfig, BertModel

from retex_hf import RetexConfig, RetexError, RetexModel
from retex_hf.artifact.card.figures import plot_results
from retex_hf.artifact.plots import (
    plot_energy_ratios,
    plot_errors,
    plot_gammas,
    plot_losses,
    plot_storage,
    save_figures,
)
from retex_hf.evaluation.figures import plot_report
from retex_hf.workflows.analysis import StoragePoint

SENTENCE = "Drawing needs matplotlib: pip install 'retex-hf[plots]'."
REPO = "org/without-pictures"
RECORDS = [{"step": 50, "loss": 4.0, "relative_error": 1.0, "gamma": {"a": {"w": 1.0}}}]

# Runs commands, given as lists of words, one after the other, where matplotlib cannot be imported.
HIDDEN = """
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from retex_hf.cli import main

for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""
LIGHT = """
import sys
import retex_hf
from retex_hf.cli import main

assert main(["inspect", sys.argv[1]]) == 0
import retex_hf.artifact.plots, retex_hf.evaluation
assert "matplotlib" not in sys.modules
"""


@pytest.fixture
def without(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


def make_model() -> RetexModel:
    base = BertModel(BertConfig(**TEXT)).eval()
    return RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_all_commands_work_without_matplotlib(tmp_path):
    folders = make_classifiers(tmp_path / "models", {"low": 2, "high": 3})
    out, results = tmp_path / "artifact", tmp_path / "results"
    build = ["build", "--base", str(folders / "base"), "--rank", "4", "--output-dir", str(out)]
    for task in ("low", "high"):
        build += ["--expert", f"{task}={folders / 'experts' / task}", "--data", f"{task}={folders / 'data' / task}"]
    evaluate = ["eval", str(out), "--trust-recipe", "--rows", "4", "--results-dir", str(results)]
    commands = [build, evaluate, ["inspect", str(out)], ["push", str(out), REPO]]
    with LocalHub(tmp_path / "hub", tokens={WRITE: "write"}) as hub:
        online = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": WRITE, "HF_HUB_OFFLINE": "0"}
        done = run(HIDDEN, json.dumps(commands), **online, HF_HOME=str(tmp_path / "home"))
        assert done.returncode == 0, done.stderr
        pushed = set(hub.files(REPO))
    assert "README.md" in pushed and not any(name.endswith(".png") for name in pushed)
    assert f"The model card lacks the figures 'errors', 'results'. {SENTENCE}" in done.stderr
    assert f"has no picture. {SENTENCE}" in done.stderr
    assert sorted(path.name for path in results.iterdir()) == ["results.json", "results.md"]

    light = run(LIGHT, str(out))
    assert light.returncode == 0, light.stderr


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_losses(RECORDS),
        lambda: plot_gammas(RECORDS),
        lambda: plot_energy_ratios({"a": [0.5, 1.0]}),
        lambda: plot_errors({"a.weight": 0.5}),
        lambda: plot_storage([StoragePoint(8, 0.02, 0.6, 0.02, 0.5)]),
        lambda: plot_results({"task known": {"a": 0.9}}),
        lambda: plot_report({"methods": {"ReTeX": {"modes": {}}}}),
        lambda: save_figures("nowhere", errors={"a.weight": 0.5}),
    ],
    ids=["losses", "gammas", "energy_ratios", "errors", "storage", "results", "report", "save_figures"],
)
def test_what_draws_names_the_extra(without, draw, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RetexError) as caught:
        draw()
    assert str(caught.value) == SENTENCE
    assert not list(tmp_path.iterdir())


def test_a_card_does_not_show_figures_that_it_could_not_redraw(tmp_path, monkeypatch, caplog):
    model = make_model()
    model.save_pretrained(tmp_path)
    model.create_or_update_model_card(tmp_path)
    assert shown(tmp_path) == ["figures/errors.png"]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        model.save_pretrained(tmp_path)
    assert shown(tmp_path) == []
    assert caplog.messages == [f"The model card lacks the figures 'errors'. {SENTENCE}"]
    model.save_pretrained(tmp_path)
    assert shown(tmp_path) == ["figures/errors.png"]


def shown(folder: Path) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\((.*?)\)", (folder / "README.md").read_text(encoding="utf-8"))


def test_the_page_names_the_extra(without):
    overview = pytest.importorskip("retex_hf.demo.overview")
    page = str(overview.figures_html(make_model()))
    assert "pip install &#39;retex-hf[plots]&#39;" in page and "<img" not in page
