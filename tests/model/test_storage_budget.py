"""Models of a budget of bytes: built, saved, run, exported and changed through the public interface."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from builds import check, save_family
from families import FAMILIES, tokens
from helpers import MIXED, TASKS, assert_same, build_from, make_experts, perturb
from peft import PeftModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retex_hf import ArtifactError, ConfigError, RetexConfig, RetexError, RetexModel
from retex_hf.config import storage_bytes
from retex_hf.recovery import ComponentGenerator, component_growth
from retex_hf.routing.responses import Responses, level

CHOSEN = ("bert-classifier", "t5", "gpt2", "vit", "resnet")


def build(name: str, storage: float | str = 0.2, **options) -> tuple[RetexModel, dict]:
    family = FAMILIES[name]
    base = family.make().eval()
    experts = make_experts(base)
    model, _ = build_from(base, experts, family.model_config, storage=storage, **options)
    return model, experts


def recovery_bytes(model: RetexModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.recovery.parameters())


def body_bytes(model: RetexModel) -> int:
    heads = set(model.heads[TASKS[0]])
    named = dict(model.get_base_model().named_parameters()) | dict(model.get_base_model().named_buffers())
    seen = {id(tensor): tensor for name, tensor in named.items() if name not in heads and tensor.is_floating_point()}
    return sum(tensor.numel() * tensor.element_size() for tensor in seen.values())


def relative_error(model: RetexModel, experts: dict, task: str) -> float:
    found, merged, own = model.recover(task), model.get_base_model().state_dict(), experts[task].state_dict()
    names = [name for name in own if own[name].is_floating_point() and own[name].shape == merged[name].shape]
    missed = sum((found[name] - own[name]).double().square().sum() for name in names)
    return float((missed / sum((merged[name] - own[name]).double().square().sum() for name in names)).sqrt())


@pytest.mark.parametrize("name", CHOSEN)
def test_a_budget_is_kept_and_more_bytes_recover_more(name):
    errors = []
    for storage in (0.02, 0.1, 0.3, 1.0):
        model, experts = build(name, storage)
        budget = storage_bytes(storage, len(TASKS) * body_bytes(model))
        assert 0.5 * min(budget, 0.5 * len(TASKS) * body_bytes(model)) <= recovery_bytes(model) <= budget
        assert all(isinstance(model.recovery[parameter], ComponentGenerator) for parameter in model.recovery)
        errors.append([relative_error(model, experts, task) for task in TASKS])
    means = [sum(own) / len(own) for own in errors]
    assert means == sorted(means, reverse=True)
    assert max(errors[-1]) < 1e-3


@pytest.mark.parametrize("name", CHOSEN)
@torch.no_grad()
def test_one_pass_gives_what_groups_give(name):
    model, _ = build(name, 0.1)
    inputs = FAMILIES[name].inputs(len(MIXED))
    outputs = []
    for execution in ("grouped", "mixed"):
        model.execution = execution
        outputs.append(model(**inputs, task=MIXED))
    assert_same(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)
    weights = torch.rand(len(MIXED), len(TASKS)).softmax(1)
    mixtures = []
    for execution in ("grouped", "mixed"):
        model.execution = execution
        mixtures.append(model(**inputs, task=weights))
    assert_same(mixtures[1], mixtures[0], rtol=1e-3, atol=1e-4)


class Multiplications(TorchDispatchMode):
    """Counts those of matrix products, also of products in place (torch's own counter passes these over)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm"):
            self.count += result.numel() * args[-1].shape[-2]
        return result


def multiplications(model: nn.Module, inputs: dict, **options) -> int:
    model(**inputs, **options)  # a model is probed once, which does not count
    with Multiplications() as counted:
        model(**inputs, **options)
    return counted.count


@torch.no_grad()
def test_in_one_pass_a_row_meets_the_directions_of_its_own_task_alone():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(96, 128))
    names, experts = [f"task {number}" for number in range(6)], {}
    for name in names:
        experts[name] = copy.deepcopy(base)
        experts[name][0].weight += 0.1 * torch.randn(128, 4) @ torch.randn(4, 96)
    model, _ = build_from(base, experts, storage=0.02)
    layout = model.recovery["0.weight"].layout
    assert layout.is_factored and layout.owned
    model.execution = "mixed"
    inputs = {"input": torch.randn(6, 96)}
    merged = multiplications(model.get_base_model(), inputs)
    alone = [multiplications(model, inputs, task=[name] * 6) - merged for name in names]
    # With the directions of all tasks it would be the sum. A tenth is for the embeddings of six tasks instead of one.
    assert 0 < multiplications(model, inputs, task=names) - merged < 1.1 * max(alone) < 0.5 * sum(alone)


@pytest.mark.parametrize("name", ["bert-classifier", "resnet"])
def test_a_range_of_directions_is_read_alone(name):
    model, _ = build(name, 0.1)
    generators = [model.recovery[parameter] for parameter in model.recovery]
    for generator in (one for one in generators if one.layout.is_factored):
        whole = generator.right()
        assert len(whole) == generator.layout.rank
        for first in range(len(whole) + 1):
            for last in range(first, len(whole) + 1):
                assert torch.equal(generator.right(range(first, last)), whole[first:last])


@pytest.mark.parametrize("name", ["bert-classifier", "t5", "resnet"])
def test_a_folder_is_built_as_in_memory_and_loads_to_the_bit(name, tmp_path):
    base, experts = save_family(FAMILIES[name], tmp_path / "models")
    model = check(base, experts, RetexConfig(storage=0.15), tmp_path)
    again = RetexModel.from_pretrained(tmp_path / "disk")
    for parameter in model.recovery:
        assert again.recovery[parameter].layout == model.recovery[parameter].layout
    tensors = model.recovery.state_dict()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in again.recovery.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("scope", ["all", "linear"])
def test_an_adapter_is_exported_of_a_task_that_has_nothing_in_some_matrix(tmp_path, scope):
    model, _ = build("gpt2", "1.2KB")
    layouts = {name: model.recovery[name].layout for name in model.recovery}
    empty = {
        task: {name for name, layout in layouts.items() if len(layout.shape) == 2 and not layout.left[index]}
        for index, task in enumerate(TASKS)
    }
    assert any(empty[task] - empty[other] for task in TASKS for other in TASKS)
    inputs = tokens(3)
    for task in TASKS:
        found = model.export_lora(task, tmp_path / task, scope=scope)
        if scope == "linear":
            assert not {f"{module}.weight" for module in found.lora} & empty[task]
        else:
            peft = PeftModel.from_pretrained(copy.deepcopy(model.get_base_model()), tmp_path / task).eval()
            assert_same(peft(**inputs).logits, model(**inputs, task=task).logits, rtol=1e-3, atol=1e-4)


def test_a_pattern_that_excludes_nothing_is_named(caplog):
    build("bert", exclude=["*embeddings*"])
    assert "no tensor that could be recovered" not in caplog.text
    build("bert", exclude=["*embeddings*", "*nosuch*"])
    assert "RetexConfig.exclude: no tensor that could be recovered matches '*nosuch*'" in caplog.text


@torch.no_grad()
def test_an_exported_adapter_is_the_recovered_expert(tmp_path):
    model, _ = build("gpt2", 0.2)
    model.export_lora("red", tmp_path / "adapter")
    peft = PeftModel.from_pretrained(copy.deepcopy(model.get_base_model()), tmp_path / "adapter").eval()
    inputs = tokens(3)
    assert_same(peft(**inputs).logits, model(**inputs, task="red").logits, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_tasks_come_and_go_and_the_others_stay_to_the_bit():
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    new = experts.pop("blue")
    model, _ = build_from(base, experts, None, storage=0.2)
    before = {task: model.recover(task) for task in model.tasks}
    added = model.add_task("blue", new, progress=False)
    body = body_bytes(model) if "blue" in model.heads else 0
    assert 0 < added.added_bytes <= 0.2 * body * 1.05 + 64
    for task, tensors in before.items():
        found = model.recover(task)
        assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())
    assert relative_error(model, {"blue": new}, "blue") < 0.7
    kept = model.recover("blue")
    model.delete_task("red")
    found = model.recover("blue")
    assert all(torch.equal(tensor, found[name]) for name, tensor in kept.items())
    exact, _ = build_from(base, experts, None, storage=0.2)
    exact.add_task("blue", new, tolerance=0.01, progress=False)
    assert relative_error(exact, {"blue": new}, "blue") < 0.011


@torch.no_grad()
def test_weighting_says_whether_a_small_update_counts_as_much_as_a_large_one():
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    start = base.state_dict()
    for name, tensor in experts["red"].state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(start[name] + 0.02 * (tensor - start[name]))
    found = {}
    for weighting in ("tasks", "plain"):
        # Merged at the base, so that the differences are the updates themselves.
        merge = {"method": "task_arithmetic", "scale": 0.0}
        model, _ = build_from(base, experts, None, storage=0.1, weighting=weighting, merge=merge)
        found[weighting] = {task: relative_error(model, experts, task) for task in TASKS}
    assert found["plain"]["red"] > 0.95 > found["tasks"]["red"] + 0.1
    assert found["plain"]["green"] < found["tasks"]["green"]


def test_components_are_not_trained(tmp_path):
    model, experts = build("bert", 0.2)
    with pytest.raises(ConfigError, match="trains factors of one rank"):
        RetexModel.from_experts(FAMILIES["bert"].make(), experts, RetexConfig(storage=0.2), solver="adam")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="components at a few bits each cannot be trained"):
        RetexModel.from_pretrained(tmp_path / "model", is_trainable=True)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "low-rank products" in card


@torch.no_grad()
def test_scores_of_weights_are_those_of_the_recovered_differences():
    model, _ = build("bert", 0.5, signatures="weights")
    hidden = torch.randn(4, 5, 16)
    checked = set()
    for name in model.recovery:
        generator = model.recovery[name]
        if len(generator.layout.shape) != 2 or generator.layout.shape[1] != 16:
            continue
        module = nn.Linear(16, generator.layout.shape[0])
        offsets = [generator(one_hot) for one_hot in torch.eye(len(TASKS))]
        if any(not offset.any() for offset in offsets):
            continue
        levelled = [level(offset) for offset in offsets]
        energies = [(hidden @ matrix.T).square().sum((1, 2)) / 5 for matrix in levelled]
        found = Responses(module, generator, torch.eye(len(TASKS)))(hidden, None)
        torch.testing.assert_close(found, torch.stack(energies, 1).log(), rtol=1e-3, atol=1e-3)
        checked.add(generator.layout.kind)
    assert checked
    assert model.identify(**tokens(6)).residuals.shape == (6, 3)


def test_damaged_components_are_refused(tmp_path):
    model, _ = build("bert", 0.2)
    model.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "retex_config.json").read_text())
    entries = config["artifact"]["recovery"]
    name = next(name for name, entry in entries.items() if entry["kind"] == "components")
    for key, value in {
        "left": [[[1, 7]]] * 3,
        "right": [[-1, 4]],
        "rows": 3,
        "owned": 1,
        "batch": 0,
        "kind": "rounded",
        "generator": "other",
        "scaled": True,
    }.items():
        changed = copy.deepcopy(config)
        changed["artifact"]["recovery"][name][key] = value
        (tmp_path / "model" / "retex_config.json").write_text(json.dumps(changed))
        with pytest.raises(ArtifactError, match=r"is not valid|cannot share|asks for|components of"):
            RetexModel.from_pretrained(tmp_path / "model", verify=False)


def test_ranks_and_bytes_exclude_each_other():
    with pytest.raises(ConfigError, match="rank and storage exclude each other"):
        RetexConfig(storage=0.1, rank=8)
    for wrong in (0, 1.5, "many", "0%", "200%", True, -1):
        with pytest.raises(ConfigError, match="storage must be a share"):
            RetexConfig(storage=wrong)
    assert storage_bytes("2.5%", 1000) == 25 and storage_bytes("1KB", 10) == 1000


def test_settings_of_another_kind_of_recovery_are_refused(tmp_path):
    family = FAMILIES["bert"]
    base = family.make().eval()
    for options, change in (
        ({"storage": 0.1}, {"storage": None, "rank": 8}),
        ({"rank": 3}, {"storage": 0.1, "rank": None}),
    ):
        folder = tmp_path / next(iter(options))
        build_from(base, make_experts(base), None, **options)[0].save_pretrained(folder)
        values = json.loads((folder / "retex_config.json").read_text())
        (folder / "retex_config.json").write_text(json.dumps(values | change))
        with pytest.raises(ArtifactError, match=r"is stored as by .*, which its settings are not"):
            RetexModel.from_pretrained(folder, verify=False)


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.2, 0.3])
def test_an_added_task_keeps_its_tolerance_in_every_parameter(tolerance):
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    model, _ = build_from(base, experts, None, storage=0.02)
    new = perturb(base, seed=9)
    with torch.no_grad():
        for name, tensor in new.state_dict().items():
            if tensor.ndim == 1:  # a few large numbers, which no normal distribution has
                tensor[::7] += 5 * (tensor - base.state_dict()[name])[::7]
    added = model.add_task("new", new, tolerance=tolerance, progress=False)
    assert max(added.errors.values()) <= tolerance


@pytest.mark.parametrize("storage", ["6%", "12KB"])
def test_every_further_task_gets_as_many_bytes_as_those_before(storage):
    """However many there are by then, whichever were deleted, and in whichever dtype the model was loaded."""
    base = FAMILIES["gpt2"].make().eval()
    experts = make_experts(base)
    model, _ = build_from(base, experts, None, storage=storage)
    share = model.retex_config.task_bytes
    assert recovery_bytes(model) <= share * len(TASKS)
    if storage == "12KB":
        assert share == 12_000 / len(TASKS)
    errors = []
    for number in range(4):
        before = recovery_bytes(model)
        added = model.add_task(f"new {number}", perturb(base, seed=20 + number), progress=False)
        assert 0.9 * share <= recovery_bytes(model) - before <= share
        errors.append(sum(added.errors.values()) / len(added.errors))
    assert max(errors) < 1.25 * min(errors)
    for task in [*TASKS, "new 0"]:
        model.delete_task(task)
    before = recovery_bytes(model)
    model.add_task("last", perturb(base, seed=30), progress=False)
    assert 0.9 * share <= recovery_bytes(model) - before <= share


def test_a_share_of_bytes_does_not_depend_on_the_dtype_that_a_model_is_loaded_in(tmp_path):
    base = FAMILIES["gpt2"].make().eval()
    build_from(base, make_experts(base), None, storage="6%")[0].save_pretrained(tmp_path / "artifact")
    grown = []
    for dtype in (torch.float32, torch.bfloat16):
        model = RetexModel.from_pretrained(tmp_path / "artifact", dtype=dtype)
        before = recovery_bytes(model)
        model.add_task("new", perturb(base, seed=20), progress=False)
        grown.append(recovery_bytes(model) - before)
    assert abs(grown[0] - grown[1]) < 0.05 * grown[0]


def test_a_model_that_does_not_know_its_share_asks_for_a_tolerance():
    base = FAMILIES["bert"].make().eval()
    model, _ = build_from(base, make_experts(base), None, storage=0.1)
    parts = model.parts()
    model = RetexModel(replace(parts, config=replace(parts.config, task_bytes=None)))
    with pytest.raises(RetexError, match=r"was given, .*: give tolerance=, or build it again"):
        model.add_task("new", perturb(base, seed=9), progress=False)
    model.add_task("new", perturb(base, seed=9), tolerance=0.1, progress=False)


def test_more_directions_than_an_index_can_number_are_refused(monkeypatch):
    weight, common = torch.randn(64, 64), torch.randn(64, 64)

    def make(own: float, seed: int) -> nn.Module:
        module = nn.Sequential(nn.Linear(64, 64, bias=False))
        module[0].weight.data = weight + 0.1 * common * (0.3 + seed % 5) + own * torch.randn(64, 64)
        return module

    base = nn.Sequential(nn.Linear(64, 64, bias=False))
    base[0].weight.data = weight
    experts = {f"task {seed}": make(1e-5, seed) for seed in range(4)}
    model = RetexModel.from_experts(base, experts, RetexConfig(storage="3%"), progress=False)
    assert not model.recovery["0.weight"].layout.owned
    monkeypatch.setattr(component_growth, "LARGEST_INDEX", 100)
    model.add_task("first", make(0.1, 7), tolerance=0, progress=False)
    with pytest.raises(RetexError, match=r"'0.weight' would have .* with one more task, and at most 100 can"):
        model.add_task("second", make(0.1, 8), tolerance=0, progress=False)
    assert model.tasks == [*experts, "first"]


def test_a_budget_that_the_embedding_takes_alone_is_warned_of(caplog):
    base = FAMILIES["bert"].make().eval()
    model, _ = build_from(base, make_experts(base), None, storage="10B")
    assert not list(model.recovery)
    assert "nothing is recovered, because the embedding of" in caplog.text
    model.add_task("new", perturb(base, seed=9), progress=False)
    assert "Nothing of the new task is recovered" in caplog.text
    model.add_task("exact", perturb(base, seed=10), tolerance=0.01, progress=False)
    assert relative_error(model, {"exact": perturb(base, seed=10)}, "exact") < 0.02


def test_a_configuration_of_another_model_brings_neither_its_trunk_nor_its_share_of_bytes():
    base = FAMILIES["bert"].make().eval()
    trunk = {
        "junction": "encoder.layer.0", "axis": -1, "parameters": [], "cached": False, "replayed": True, "cost": {}
    }  # fmt: skip
    model, _ = build_from(base, make_experts(base), None, rank=2, trunk=trunk, task_bytes=5.0)
    assert model.retex_config.trunk is None and model.retex_config.task_bytes is None
