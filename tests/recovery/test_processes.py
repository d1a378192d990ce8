"""Real processes: `accelerate launch examples/train.py` with one and with two, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from classifiers import make_classifiers, make_encoders
from helpers import launcher
from safetensors.torch import load_file

from retex_hf import RetexConfig, RetexModel
from retex_hf.recovery.work_sharing import deal

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def test_work_is_dealt_by_cost():
    owners = deal({"a": 8.0, "b": 5.0, "c": 4.0, "d": 3.0, "e": 1.0}, 2)
    loads = [sum(cost for key, cost in zip("abcde", (8, 5, 4, 3, 1), strict=True) if owners[key] == p) for p in (0, 1)]
    assert sorted(loads) == [10, 11]
    assert set(deal({"a": 1.0}, 4).values()) == {0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return make_encoders(tmp_path_factory.mktemp("models"))


def command(folders: Path, output: Path, processes: int, *flags: str) -> list[str]:
    experts = [f"--expert={task}={folders / task}" for task in ("red", "green", "blue")]
    return [
        sys.executable, *launcher(processes), str(SCRIPT), f"--base={folders / 'base'}", *experts,
        f"--output-dir={output}", "--rank=4", "--cpu", *flags,
    ]  # fmt: skip


def launch(folders: Path, output: Path, processes: int, *flags: str) -> None:
    arguments = command(folders, output, processes, *flags)
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Processes: {processes}." in done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def recovery(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "retex_recovery.safetensors")


ADAM = ("--solver=adam", "--steps=40", "--warmup-steps=5", "--learning-rate=0.01", "--batch-size=2", "--log-every=1")


@pytest.fixture(scope="module")
def one_process(folders, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "one"
    launch(folders, output, 1, *ADAM)
    return output


def test_two_processes_give_the_losses_of_one(folders, one_process, tmp_path):
    launch(folders, tmp_path / "two", 2, *ADAM)
    losses = [
        [record["loss"] for record in json.loads((output / "retex_training.json").read_text())]
        for output in (one_process, tmp_path / "two")
    ]
    assert len(losses[0]) == 40
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    ours, theirs = recovery(tmp_path / "two"), recovery(one_process)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


def test_killed_and_resumed_it_ends_with_the_same_weights(folders, one_process, tmp_path):
    output, checkpoints = tmp_path / "resumed", tmp_path / "checkpoints"
    flags = (*ADAM, f"--checkpoint-dir={checkpoints}", "--checkpoint-every=5")
    process = subprocess.Popen(
        command(folders, output, 1, *flags), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (checkpoints / "state" / "retex_progress.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()  # killed before it was done
    launch(folders, output, 1, *flags)
    ours, theirs = recovery(output), recovery(one_process)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_exact_result_does_not_depend_on_the_number_of_processes(folders, tmp_path):
    config = RetexConfig(rank=4, task_embedding_dim=1)
    experts = {task: folders / task for task in ("red", "green", "blue")}
    RetexModel.from_experts(folders / "base", experts, config, output_dir=tmp_path / "1", progress=False)
    launch(folders, tmp_path / "2", 2, "--task-embedding-dim=1")
    ours, theirs = recovery(tmp_path / "1"), recovery(tmp_path / "2")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    merged = [load_file(tmp_path / number / "model.safetensors") for number in ("1", "2")]
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("bases: x", r"has no key 'bases'"),
        ("config: {rnak: 4}", r"'config' of the recipe .* has no key 'rnak'"),
        ("training: {lr: 4}", r"'training' of the recipe .* has no key 'lr'"),
        ("[1, 2]", "must hold keys and values"),
        ("base: x", "needs a base and experts"),
        ("{base: b, experts: {a: e}}", "needs an output_dir"),
        ("{base: b, experts: {a: e}, output_dir: o, config: {rank: 4, inner_rank: 8}}", "inner_rank must not exceed"),
        (
            "{base: b, experts: {a: e}, output_dir: o, config: {soft_training: {method: dirichlet, alpha: 0}}}",
            "above 0",
        ),
    ],
)
def test_wrong_recipes_are_refused_in_one_sentence(recipe, message, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import train

    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    monkeypatch.setattr(sys, "argv", ["train.py", "--recipe", str(path), "--cpu"])
    with pytest.raises(SystemExit, match=message) as caught:
        train.main()
    assert str(caught.value).startswith("error: ") and "\n" not in str(caught.value)


def test_a_missing_recipe_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", "--recipe", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit, match=r"none\.yaml does not exist"):
        train.main()


@pytest.fixture
def classifiers(tmp_path) -> Path:
    return make_classifiers(tmp_path, {"low": 2, "high": 3})


def test_a_recipe_with_data_builds_signs_draws_evaluates_and_saves(classifiers, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import train

    recipe = {
        "base": str(classifiers / "base"),
        "experts": {task: str(classifiers / "experts" / task) for task in ("low", "high")},
        "config": {"rank": 4, "num_reference": 32},
        "data": {task: str(classifiers / "data" / task) for task in ("low", "high")},
        "output_dir": str(classifiers / "out"),
        "analyse": True,
        "cpu": True,
    }
    (classifiers / "recipe.yaml").write_text(json.dumps(recipe))
    monkeypatch.setattr(sys, "argv", ["train.py", "--recipe", str(classifiers / "recipe.yaml"), "--rank", "full"])
    train.main()
    out = classifiers / "out"
    results = json.loads((out / "results.json").read_text())
    methods = {name: of["modes"] for name, of in results["methods"].items()}
    for task in ("low", "high"):
        individual, known = (methods[n]["known"]["accuracy"]["tasks"][task]["value"] for n in ("individual", "ReTeX"))
        assert known == individual  # rank full: the expert itself
        unknown = methods["ReTeX"]["unknown"]["accuracy"]["tasks"][task]["value"]
        identified = methods["ReTeX"]["unknown"]["identification"]["tasks"][task]["value"]
        assert identified > 0.8
        assert known - (1 - identified) <= unknown <= known
    drawn = {path.name for path in (out / "figures").iterdir()}
    assert drawn >= {"errors.png", "energy_ratios.png", "storage.png"}
    model = RetexModel.from_pretrained(out)
    assert model.evaluation == results
    assert model.retex_config.rank == "full"  # flags win over the recipe
    assert model.tasks == ["low", "high"] and model.signatures is not None


def test_two_processes_sign_before_the_folder_is_replaced(classifiers):
    """All processes end with the signed artifact, and leave nothing beside it."""
    tasks = ("low", "high")
    flags = [f"--expert={task}={classifiers / 'experts' / task}" for task in tasks]
    flags += [f"--data={task}={classifiers / 'data' / task}" for task in tasks]
    flags += ["--rank=4", "--num-reference=32", "--cpu", "--solver=adam"]
    flags += ["--steps=4", "--warmup-steps=0", "--batch-size=2"]
    out = classifiers / "runs" / "out"
    arguments = [*launcher(2), str(SCRIPT), f"--base={classifiers / 'base'}", f"--output-dir={out}", *flags]
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=300, cwd=classifiers
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert os.listdir(out.parent) == ["out"]
    model = RetexModel.from_pretrained(out)
    assert model.tasks == list(tasks) and model.signatures is not None and sorted(model.recipe["data"]) == sorted(tasks)
