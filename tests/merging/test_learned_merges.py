"""Merges that learn from data, through `from_experts`: what is learned is kept, and ReTeX recovers from any merge."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from families import FAMILIES, VISION, images, tokens
from helpers import TASKS, assert_same, make_experts
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from retex_hf import ConfigError, InputError, RetexConfig, RetexModel, TaskError, register_merge
from retex_hf.build import build, plan
from retex_hf.data.readout import Classifier, Generator, ZeroShot
from retex_hf.merging import adamerging, registry
from retex_hf.merging.adamerging import learn_coefficients
from retex_hf.recovery import solver
from retex_hf.recovery.layout import MATRIX

QUICK = {"method": "adamerging", "steps": 3, "learning_rate": 0.05, "rows_per_task": 4}
MERGES = {
    "average": "average",
    "task_arithmetic": "task_arithmetic",
    "ties": "ties",
    "consensus": "consensus",
    "tuned ties": {"method": "ties", "scale": "auto"},
    "adamerging": QUICK,
    "adamerging++": {**QUICK, "trim": True},
}
LEARNED = ("consensus", "tuned ties", "adamerging", "adamerging++")


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    base = FAMILIES["bert-classifier"].make().eval()
    experts = make_experts(base)
    batches = {}
    for task in TASKS:
        inputs = tokens(12)
        with torch.no_grad():
            batches[task] = [inputs | {"labels": experts[task](**inputs).logits.argmax(-1)}]
    return base, experts, batches


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


@pytest.fixture
def learning(monkeypatch) -> list[str]:
    """What is learned, each time it is."""
    calls = []
    learn_options = build.learn_options

    def noted(name, *arguments):
        calls.append(name)
        return learn_options(name, *arguments)

    monkeypatch.setattr(build, "learn_options", noted)
    return calls


def make(bert, merge, calibration=True, **options) -> RetexModel:
    base, experts, batches = bert
    config = RetexConfig(**{"rank": "full", "merge": merge, **options.pop("config", {})})
    given = {"calibration": batches} if calibration else {}
    return RetexModel.from_experts(base, experts, config, progress=False, **given, **options)


def merged_tensors(model: RetexModel) -> dict[str, torch.Tensor]:
    return dict(model.get_base_model().state_dict())


# ---- ReTeX on top of each merge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MERGES)
def test_full_rank_gives_back_every_expert(bert, name):
    model = make(bert, MERGES[name], calibration=name in LEARNED)
    for task, expert in bert[1].items():
        assert_same(model.recover(task), dict(expert.state_dict()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MERGES)
def test_the_loss_at_a_rank_is_the_discarded_energy(bert, name):
    rank = 3
    model = make(bert, MERGES[name], calibration=name in LEARNED, config={"rank": rank, "weighting": "plain"})
    merged, experts = merged_tensors(model), {task: expert.state_dict() for task, expert in bert[1].items()}
    recovered = {task: model.recover(task) for task in TASKS}
    checked = 0
    for parameter in model.recovery:
        layout = model.recovery[parameter].layout
        if layout.kind != MATRIX:
            continue
        differences = torch.stack([experts[task][parameter] - merged[parameter] for task in TASKS]).double()
        energies = torch.linalg.svdvals(differences.flatten(0, 1)).square()
        loss = sum((recovered[task][parameter] - experts[task][parameter]).double().square().sum() for task in TASKS)
        assert loss.item() == pytest.approx(energies[layout.rank :].sum().item(), rel=1e-3)
        assert model.recovery_errors[parameter] ** 2 == pytest.approx((loss / energies.sum()).item(), rel=1e-3)
        checked += 1
    assert checked > 5


# ---- what was learned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNED)
def test_saved_and_loaded_it_is_the_same_to_the_bit(bert, name, tmp_path):
    model = make(bert, MERGES[name])
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path)
    assert loaded.retex_config == model.retex_config
    assert_same(merged_tensors(loaded), merged_tensors(model), exact=True)
    for task in TASKS:
        assert_same(loaded.recover(task), model.recover(task), exact=True)


@pytest.mark.parametrize("name", LEARNED)
def test_the_saved_configuration_says_what_was_merged(bert, name, learning):
    model = make(bert, MERGES[name])
    assert learning == [name.removeprefix("tuned ").rstrip("+")]
    merge = json.loads(json.dumps(model.retex_config.merge))
    again = make(bert, merge, calibration=False)
    assert learning == [name.removeprefix("tuned ").rstrip("+")]
    assert_same(merged_tensors(again), merged_tensors(model), exact=True)
    assert again.retex_config.merge == merge


def test_the_coefficients_are_those_of_learning_alone(bert):
    base, experts, batches = bert
    model = make(bert, MERGES["adamerging++"])
    weights = plan.load_expert_weights(base, experts)
    inputs = {task: [{k: v for k, v in b.items() if k != "labels"} for b in found] for task, found in batches.items()}
    options = {key: value for key, value in QUICK.items() if key != "method"}
    expected = learn_coefficients(weights, Classifier().logits, inputs, trimmed_density=0.2, progress=False, **options)
    found = model.retex_config.merge["coefficients"]
    assert list(found) == TASKS
    assert [list(found[task]) for task in TASKS] == [list(weights.base)] * 3
    assert [list(found[task].values()) for task in TASKS] == expected.tolist()
    merged = merged_tensors(model)
    body = {
        n: b + torch.tensordot(expected[:, i], adamerging.trimmed(weights.vectors, 0.2)[n], 1)
        for i, (n, b) in enumerate(weights.base.items())
    }
    for name, tensor in body.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    defaults = {"density": 0.2, "start": 0.3, "seed": 0}
    assert defaults.items() <= model.retex_config.merge.items()


def test_labels_do_not_matter_to_entropy(bert):
    base, experts, batches = bert
    bare = {task: [{k: v for k, v in b.items() if k != "labels"} for b in found] for task, found in batches.items()}
    with_labels = make(bert, QUICK)
    without = make((base, experts, bare), QUICK)
    assert with_labels.retex_config.merge == without.retex_config.merge


def test_towers_and_generators_need_a_readout():
    tower = CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION, projection_dim=6)).eval()
    heads = {task: torch.randn(classes, 6) for task, classes in zip(TASKS, (2, 3, 4), strict=True)}
    experts = make_experts(tower)
    readout = ZeroShot(heads)
    batches = {task: [images(4)] for task in TASKS}
    model = make((tower, experts, batches), QUICK, readout=readout)
    values = torch.tensor([list(row.values()) for row in model.retex_config.merge["coefficients"].values()])
    assert (values != 0.3).any()
    for task in TASKS:
        with torch.no_grad():
            batches[task][0]["labels"] = readout.answers(experts[task](**batches[task][0]), [task] * 4)
    assert "scale" in make((tower, experts, batches), "consensus", readout=readout).retex_config.merge

    t5 = FAMILIES["t5"].make().eval()
    batches = {task: [tokens(4) | {"labels": torch.ones(4, 3, dtype=torch.long)}] for task in TASKS}
    model = make((t5, make_experts(t5), batches), QUICK, readout=Generator(tokenizer=None))
    values = torch.tensor([list(row.values()) for row in model.retex_config.merge["coefficients"].values()])
    assert (values != 0.3).any()


def test_a_bare_tensor_is_the_main_input(bert):
    base, experts, _ = bert
    ids = {task: torch.randint(3, 40, (4, 6)) for task in TASKS}
    bare = make((base, experts, {task: [ids[task]] for task in TASKS}), QUICK)
    named = make((base, experts, {task: {"input_ids": ids[task]} for task in TASKS}), QUICK)
    assert bare.retex_config.merge == named.retex_config.merge


# ---- a user's own ----------------------------------------------------------------------------------------------------


def test_the_documented_example_runs(bert, own_registry):
    seen = []

    def best_pull(calibration, *, candidates=(0.3, 0.6, 1.0)):
        weights = calibration.weights

        def score(pull):
            body = weights.body(torch.full((len(weights.tasks),), pull / len(weights.tasks)))
            seen.append((sum(calibration.accuracy(body, task) for task in weights.tasks), pull))
            return seen[-1][0]

        return {"pull": max(candidates, key=score)}

    @register_merge("chosen midpoint", calibrate=best_pull)
    def chosen_midpoint(base, experts, *, pull="auto"):
        return base + pull * (torch.stack(experts).mean(0) - base)

    model = make(bert, "chosen midpoint")
    best = max(score for score, _ in seen)
    pull = next(pull for score, pull in seen if score == best)
    assert model.retex_config.merge == {"method": "chosen midpoint", "candidates": [0.3, 0.6, 1.0], "pull": pull}
    assert [candidate for _, candidate in seen] == [0.3, 0.6, 1.0]
    base, experts = bert[0].state_dict(), [expert.state_dict() for expert in bert[1].values()]
    merged = merged_tensors(model)
    for name in base:
        if "classifier" not in name:
            expected = (1 - pull) * base[name] + pull * sum(expert[name] for expert in experts) / 3
            torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)


def test_a_method_that_finds_nothing_is_named(bert, own_registry):
    @register_merge("idle", calibrate=lambda calibration: {})
    def idle(base, experts, *, pull="auto"):
        return base

    with pytest.raises(ConfigError, match="'idle' must find 'pull' from its calibration data, but did not"):
        make(bert, "idle")


# ---- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("merge", "calibration", "message"),
    [
        ("adamerging", False, r"'adamerging' finds coefficients from data: pass calibration=\{task: batches\}"),
        ("consensus", False, "'consensus' finds thresholds and scale from data: pass calibration="),
        ({"method": "consensus", "scale": 0.5}, False, "'consensus' finds thresholds from data"),
        ("average", True, "calibration= is for merge methods that learn from data; 'average' does not"),
        ({"method": "ties"}, True, "calibration= has nothing to find: no option of 'ties' in RetexConfig.merge"),
        ({"method": "ties", "scale": "auto"}, False, "'ties' finds scale from data: pass calibration="),
        (
            {"method": "consensus", "scale": 0.5, "thresholds": 0.4},
            True,
            "calibration= has nothing to find: no option of 'consensus' in RetexConfig.merge is \"auto\"",
        ),
        ({"method": "adamerging", "rate": 1}, True, "method 'adamerging' has no option 'rate'; it takes"),
        ({**QUICK, "steps": 1.5}, True, "steps must be an integer from 0, not 1.5"),
        ({**QUICK, "rows_per_task": 0}, True, "rows_per_task must be an integer from 1, not 0"),
        ({**QUICK, "learning_rate": "fast"}, True, "learning_rate must be a number, not 'fast'"),
    ],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_data_and_method_must_fit(bert, merge, calibration, message, on_disk, tmp_path):
    options = {"output_dir": tmp_path / "disk"} if on_disk else {}
    with pytest.raises(ConfigError, match=message):
        make(bert, merge, calibration, **options)
    assert list(tmp_path.iterdir()) == []


def test_data_beside_a_finished_merge_is_refused(bert, tmp_path):
    bert[0].save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"calibration= is for merge methods that learn from data; .* is merged already"
    ):
        make(bert, str(tmp_path))


def test_a_readout_without_data_is_refused(bert):
    with pytest.raises(ConfigError, match="readout= says how to read answers to calibration=, which is not given"):
        make(bert, "average", calibration=False, readout=Classifier())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: b | {"pink": b["red"]}, TaskError, "calibration has batches of 'pink', which is not one of the"),
        (lambda b: {"red": b["red"]}, TaskError, r"calibration needs batches of every task; \['green', 'blue'\] have"),
        (lambda b: b | {"red": []}, InputError, "Task 'red' has no calibration inputs"),
        (lambda b: b | {"red": ["text"]}, InputError, "A batch must be a dict of keyword arguments or a tensor"),
        (lambda b: b | {"red": [{"labels": torch.ones(2)}]}, InputError, "'red': a calibration batch holds no tensor"),
        (
            lambda b: b | {"red": [tokens(3) | {"token_type_ids": torch.zeros(2, 8, dtype=torch.long)}]},
            InputError,
            "Task 'red': the tensors of a calibration batch differ in their number of rows",
        ),
        (lambda b: list(b.values()), InputError, "calibration must be a dict of task name to batches, not a list"),
    ],
)  # fmt: skip
def test_bad_batches_are_named(bert, change, error, message):
    base, experts, batches = bert
    with pytest.raises(error, match=message):
        make((base, experts, change(dict(batches))), QUICK)


# ---- on disk, interrupted, in several processes ----------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNED)
def test_straight_into_a_folder_it_is_the_same(bert, name, tmp_path):
    on_disk = make(bert, MERGES[name], output_dir=tmp_path / "disk")
    in_memory = make(bert, MERGES[name])
    assert on_disk.retex_config.merge == in_memory.retex_config.merge
    assert_same(merged_tensors(on_disk), merged_tensors(in_memory), exact=True)


@pytest.mark.parametrize("change", ["nothing", "data"])
def test_a_resumed_build_does_not_learn_again_unless_the_data_changed(bert, change, learning, tmp_path, monkeypatch):
    base, experts, batches = bert
    target = tmp_path / "disk"

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(solver, "_solve_unit", stop)
        with pytest.raises(KeyboardInterrupt):
            make(bert, QUICK, output_dir=target, config={"rank": 3})
    assert learning == ["adamerging"]
    if change == "data":
        batches = {**batches, "red": [tokens(5)]}
    model = make((base, experts, batches), QUICK, output_dir=target, config={"rank": 3})
    assert learning == ["adamerging"] * (1 if change == "nothing" else 2)
    expected = make((base, experts, batches), QUICK, config={"rank": 3})
    assert model.retex_config.merge == expected.retex_config.merge
    assert_same(merged_tensors(model), merged_tensors(expected), exact=True)


def test_the_estimate_counts_the_experts_in_memory(bert):
    base, experts, _ = bert
    plain, learned = (
        plan.prepare(base, experts, RetexConfig(rank=3, merge=merge)).estimate() for merge in ("average", "adamerging")
    )
    body = sum(tensor.numel() for name, tensor in base.state_dict().items() if "classifier" not in name)
    assert learned.memory > plain.memory
    assert learned.memory >= 4 * body * (len(TASKS) + 3)
    assert learned.disk == plain.disk


TWO_PROCESSES = """
    import sys
    import torch
    from accelerate import Accelerator
    from retex_hf import RetexConfig, RetexModel

    torch.set_num_threads(1)
    folder = sys.argv[1]
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    # Other data on the other process: only what the main process learns counts.
    torch.manual_seed(7 + accelerator.process_index)
    batches = {task: [{"input_ids": torch.randint(3, 40, (6, 5))}] for task in ("red", "green", "blue")}
    experts = {task: f"{folder}/{task}" for task in batches}
    merge = {"method": "adamerging", "steps": 3, "learning_rate": 0.05, "rows_per_task": 4}
    config = RetexConfig(rank=3, merge=merge)
    options = {"calibration": batches, "accelerator": accelerator, "progress": False}
    on_disk = RetexModel.from_experts(f"{folder}/base", experts, config, output_dir=f"{folder}/disk", **options)
    in_memory = RetexModel.from_experts(f"{folder}/base", experts, config, **options)
    in_memory.save_pretrained(f"{folder}/saved-{accelerator.process_index}")
    accelerator.end_training()
"""


def test_all_processes_merge_what_the_main_one_learned(bert, tmp_path):
    base, experts, _ = bert
    base.save_pretrained(tmp_path / "base")
    for task, expert in experts.items():
        expert.save_pretrained(tmp_path / task)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `accelerate launch --cpu`, which starts one process, whatever their number is to be.
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={
                **os.environ,
                **world,
                "RANK": rank,
                "LOCAL_RANK": rank,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        errors = process.communicate(timeout=600)[1]
        assert process.returncode == 0, errors[-3000:]
    torch.manual_seed(7)
    batches = {task: [{"input_ids": torch.randint(3, 40, (6, 5))}] for task in TASKS}
    alone = make((tmp_path / "base", {task: tmp_path / task for task in TASKS}, batches), QUICK, config={"rank": 3})
    alone.save_pretrained(tmp_path / "alone")
    expected = _contents(tmp_path / "alone")
    assert _contents(tmp_path / "disk") == expected
    assert _contents(tmp_path / "saved-0") == expected
    # transformers saves a model's own weights in the main process only; merge, recovery and heads are ours.
    own = {key: value for key, value in expected.items() if not key.startswith("model.safetensors")}
    assert len(own) > 1 and _contents(tmp_path / "saved-1") == own


def _contents(folder: Path) -> dict:
    tensors = {
        f"{path.name} {name}": tensor.tolist()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return {**tensors, "merge": json.loads((folder / "retex_config.json").read_text())["merge"]}
