"""The claims that must hold on every architecture family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, ROWS, Family
from helpers import TASKS, assert_same, leaves, make_experts
from torch import nn

import retex_hf.backends as libraries
from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import take_inventory

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MIXED = ["green", "red", "blue", "red", "red", "blue"]

pytestmark = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def build(family: Family, base: nn.Module, experts: dict[str, nn.Module], **options) -> RetexModel:
    config = RetexConfig(**options)
    return RetexModel.from_experts(base, experts, config, model_config=family.model_config, progress=False)


@torch.no_grad()
def test_full_rank_gives_back_every_expert(family):
    base = family.make().eval()
    experts = make_experts(base)
    model = build(family, base, experts, rank="full")
    inputs = family.inputs(ROWS)
    for task in TASKS:
        assert_same(model(**inputs, task=task), experts[task](**inputs), **CLOSE)
        assert_same(model.recover(task), experts[task].state_dict(), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_rank_that_covers_the_differences_gives_back_every_expert(family):
    base = family.make().eval()
    experts = make_experts(base, low_rank=True)
    model = build(family, base, experts, rank=4)
    assert any(model.recovery[name].layout.kind == "matrix" for name in model.recovery)
    inputs = family.inputs(ROWS)
    for task in TASKS:
        assert_same(model(**inputs, task=task), experts[task](**inputs), **CLOSE)


@torch.no_grad()
def test_loss_is_the_discarded_energy(family):
    base = family.make().eval()
    experts = make_experts(base)
    model = build(family, base, experts, rank=3, weighting="plain")
    recovered = {task: model.recover(task) for task in TASKS}
    targets = {task: expert.state_dict() for task, expert in experts.items()}
    merged = model.get_base_model().state_dict()
    lossy = 0
    for name in model.recovery:
        layout = model.recovery[name].layout
        differences = torch.stack([targets[task][name] - merged[name] for task in TASKS]).double()
        loss = sum((recovered[task][name] - targets[task][name]).double().square().sum() for task in TASKS).item()
        expected = 0.0
        if layout.kind == "matrix":
            # One stacked matrix [D_1; ...; D_T] per member of the batch.
            stacks = differences.reshape(len(TASKS), *layout.stacked_shape).transpose(0, 1)
            values = torch.linalg.svdvals(stacks.reshape(layout.batch, -1, layout.columns))
            expected = values[:, layout.rank :].square().sum().item()
            lossy += 1
        energy = differences.square().sum().item()
        assert abs(loss - expected) <= 1e-5 * energy, name
        assert abs(model.recovery_errors[name] - (expected / energy) ** 0.5) <= 1e-3, name
    assert lossy > 0


@torch.no_grad()
def test_mixed_batch_equals_separate_calls_row_by_row(family):
    base = family.make().eval()
    experts = make_experts(base)
    model = build(family, base, experts, rank=3)
    inputs = family.inputs(ROWS)
    mixed = dict(leaves(model(**inputs, task=MIXED)))
    for task in TASKS:
        rows = [row for row, name in enumerate(MIXED) if name == task]
        separate = dict(leaves(model(**inputs, task=task)))
        assert separate.keys() == mixed.keys()
        for name, tensor in separate.items():
            if name.endswith("logits_per_text"):
                actual, expected = mixed[name][:, rows], tensor[:, rows]
            elif tensor.ndim and len(tensor) == ROWS:
                actual, expected = mixed[name][rows], tensor[rows]
            else:  # does not follow the rows (texts, logit scale): every row has its expert's
                actual, expected = mixed[name][rows], tensor.expand(len(rows), *tensor.shape)
            torch.testing.assert_close(actual, expected, msg=lambda text, n=name: f"{n}: {text}", **CLOSE)


@torch.no_grad()
def test_saving_and_loading_is_bit_identical(family, tmp_path):
    base = family.make().eval()
    model = build(family, base, make_experts(base), rank=3)
    model.fit_signatures({task: [family.inputs(8)] for task in TASKS}, progress=False)
    inputs = family.inputs(ROWS)
    one_pass = model(**inputs)
    model.execution = "grouped"
    routed = model(**inputs)
    model.save_pretrained(tmp_path / "artifact")

    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    # Mapped factors lie at other addresses, where products may be rounded otherwise.
    assert_same(loaded(**inputs), one_pass, rtol=1e-5, atol=1e-5)
    loaded.execution = "grouped"
    again = loaded(**inputs)
    assert_same(again, routed, exact=True)
    assert torch.equal(again.routing.residuals, routed.routing.residuals)
    for task in TASKS:
        assert_same(loaded(**inputs, task=task), model(**inputs, task=task), exact=True)

    plain, merged = load_plain(tmp_path / "artifact", base), model.get_base_model()
    assert_same(plain.state_dict(), merged.state_dict(), exact=True)
    with model.disable_adapter():  # its weights lie at other addresses too
        assert_same(plain(**inputs), model(**inputs), rtol=1e-5, atol=1e-6)


def load_plain(folder: Path, base: nn.Module) -> nn.Module:
    if isinstance(base, transformers.PreTrainedModel):
        return getattr(transformers, type(base).__name__).from_pretrained(folder).eval()
    import open_clip

    return open_clip.create_model(f"local-dir:{folder}").eval()


@torch.no_grad()
def test_merged_model_is_untouched_after_any_call(family):
    base = family.make().eval()
    experts = make_experts(base)
    model = build(family, base, experts, rank=3)
    before = {name: tensor.clone() for name, tensor in model.get_base_model().state_dict().items()}
    inputs = family.inputs(ROWS)
    model(**inputs, task=MIXED)
    model.execution = "grouped"

    root = libraries.library_of(model.model).feature_root(model.model)
    calls = []

    def fail_on_the_second_group(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("inside")

    model.expert_cache.clear()  # so that the experts are made with the hook
    handle = root.register_forward_pre_hook(fail_on_the_second_group)
    with pytest.raises(RuntimeError, match="inside"):
        model(**inputs, task=MIXED)
    handle.remove()
    model.expert_cache.clear()
    assert_same(dict(model.get_base_model().state_dict()), before, exact=True)
    assert_same(model(**inputs, task="red"), build(family, base, experts, rank=3)(**inputs, task="red"), exact=True)


def test_building_from_folders_equals_building_from_modules(family, tmp_path):
    base = family.make().eval()
    experts = make_experts(base)
    library = libraries.library_of(base)
    folders = {}
    for name, model in {"base": base, **experts}.items():
        folders[name] = tmp_path / name
        folders[name].mkdir()
        if family.model_config is not None:
            libraries.openclip.describe(model, family.model_config, None, None)
        library.save(model, folders[name], "5GB")
    from_modules = build(family, base, experts, rank=3)
    base_folder = folders.pop("base")
    from_folders = RetexModel.from_experts(base_folder, folders, RetexConfig(rank=3), progress=False)
    assert_same(dict(from_folders.model.state_dict()), dict(from_modules.model.state_dict()), exact=True)
    assert_same(dict(from_folders.recovery.state_dict()), dict(from_modules.recovery.state_dict()), exact=True)


def test_every_tensor_is_covered_once(family):
    base = family.make().eval()
    experts = make_experts(base)
    model = build(family, base, experts, rank=3)
    inventory = take_inventory(base)
    heads = set(model.heads["red"])
    assert set(model.recovery) | heads == set(inventory.shapes)
    assert not set(model.recovery) & heads
