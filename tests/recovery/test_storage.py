"""Factors on disk: narrow, mapped, and what is lost by it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from families import TEXT, tokens
from helpers import TASKS, assert_same, build_from, make_experts
from safetensors.torch import load_file
from transformers import BertConfig, BertModel
from trust.mutations import reseal

from retex_hf import ArtifactError, ConfigError, RetexConfig, RetexModel
from retex_hf.recovery import OffsetGenerator, RecoveryModule, plan_layout
from retex_hf.recovery.quantize import decode, encode, stored_parts

DTYPES = ("float32", "bfloat16", "float16", "int8")
NARROW = DTYPES[1:]
LAYOUTS = {
    "matrix": plan_layout((12, 10), 4, 3),
    "shared first": plan_layout((12, 10), 4, 3, order="shared_first"),
    "inner": plan_layout((12, 10), 4, 3, inner_rank=2),
    "batch": plan_layout((3, 12, 10), 4, 3),
    "whole": plan_layout((12, 40), "full", 3),
    "whole kernel": plan_layout((6, 4, 3, 3), "full", 3),
    "vector": plan_layout((12,), 4, 3),
    "scalar": plan_layout((), 4, 3),
}
# Largest error of one number, relative to the largest number of its row.
TOLERANCE = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1.02 * 0.5 / 127}


def make_generator(layout, bias: bool = True) -> OffsetGenerator:
    generator = OffsetGenerator.initialised(layout, 5)
    parts = {name: torch.randn(tensor.shape) for name, tensor in generator.named_parameters() if bias or name != "bias"}
    return OffsetGenerator.of_parts(layout, parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_off_by_no_more_than_its_rows_share(dtype):
    values = torch.randn(6, 40) * torch.logspace(-6, 2, 6).unsqueeze(1)
    stored, scale = encode(values, dtype, row=10)
    rows = values.view(6, 4, 10)
    error = (decode(stored, scale).view_as(rows) - rows).abs()
    limit = TOLERANCE[dtype] * rows.abs().amax(-1, keepdim=True) + (2**-25 if dtype == "float16" else 0)
    assert (error <= limit).all()
    assert dtype == "float32" or error.max() > 0
    assert (scale is None) == (dtype != "int8")


def test_int8_has_a_scale_per_row_and_keeps_zeros():
    values = torch.tensor([[0.0, 0.0, 127.0, -64.0], [1.0, 0.5, 0.0, 0.0]])
    codes, scale = encode(values, "int8", row=2)
    assert codes.dtype == torch.int8
    assert scale.tolist() == [[0.0, 1.0], [pytest.approx(1 / 127, rel=2**-8), 0.0]]
    assert codes.tolist() == [[0, 0, 127, -64], [127, 64, 0, 0]]
    assert decode(codes, scale)[0].tolist() == values[0].tolist()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_generators_are_stored_as_announced(layout, dtype, bias):
    stored = make_generator(layout, bias).stored_as(dtype)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.named_parameters()}
    assert found == stored_parts(layout, 5, bias, dtype)


@pytest.mark.parametrize(("name", "rows"), [("matrix", 12), ("shared first", 4), ("batch", 36), ("whole", 12)])
def test_a_generated_factor_has_a_scale_per_row(name, rows):
    assert make_generator(LAYOUTS[name]).stored_as("int8").weight_scale.shape == (5, rows)


def test_rows_of_small_kernels_are_joined():
    assert make_generator(LAYOUTS["whole kernel"]).stored_as("int8").weight_scale.shape == (5, 6)


@torch.no_grad()
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0, 0.0, 0.0], [0.3, 0.0, 0.5, 0.0, 0.2]], ids=["one", "mixture"])
def test_offsets_are_those_of_the_stored_values_in_float32(layout, dtype, weights):
    generator, embedding = make_generator(layout), torch.tensor(weights)
    stored = generator.stored_as(dtype)
    values = OffsetGenerator.of_parts(layout, {name: stored.factor(name) for name, _ in generator.named_parameters()})
    assert all(tensor.dtype == torch.float32 for tensor in values.parameters())
    assert stored(embedding).dtype == torch.float32
    torch.testing.assert_close(stored(embedding), values(embedding), rtol=1e-6, atol=1e-6)
    difference = (stored(embedding) - generator(embedding)).norm() / generator(embedding).norm()
    assert difference < 0.03
    assert (difference == 0) == (layout.kind == "vector")


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("base", [torch.float32, torch.float64])
def test_adding_to_a_base_is_the_offset_added(layout, base):
    generator, embedding = make_generator(layout), torch.randn(5)
    merged = torch.randn(layout.shape, dtype=base)
    added = generator.added_to(merged, embedding)
    assert added.dtype == base
    torch.testing.assert_close(added, merged + generator(embedding), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_adding_are_those_of_the_offset(layout):
    generator, embedding = make_generator(layout), torch.randn(5, requires_grad=True)
    probe, base = torch.randn(layout.shape), torch.randn(layout.shape)
    inputs = [embedding, *generator.parameters()]
    ours = torch.autograd.grad((generator.added_to(base, embedding) * probe).sum(), inputs)
    theirs = torch.autograd.grad(((base + generator(embedding)) * probe).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_shared_layers_stay_shared_and_nothing_can_be_trained():
    layout = LAYOUTS["matrix"]
    shared = make_generator(layout)
    names = {"a.weight": shared, "b.weight": shared, "c.weight": make_generator(layout)}
    stored = RecoveryModule(torch.randn(3, 5), names).stored_as("int8")
    assert stored["a.weight"] is stored["b.weight"]
    assert stored.generator_name("b.weight") == "a.weight"
    assert stored["c.weight"] is not stored["a.weight"]
    assert not any(parameter.requires_grad for parameter in stored.parameters())


@pytest.mark.parametrize("cast", ["half", "float", "double"])
@pytest.mark.parametrize("dtype", NARROW)
def test_casting_the_model_leaves_the_storage(dtype, cast):
    recovery = RecoveryModule(torch.randn(3, 5), {"a": make_generator(LAYOUTS["matrix"])}).stored_as(dtype)
    before = {name: tensor.clone() for name, tensor in recovery.state_dict().items()}
    getattr(recovery, cast)()
    assert {n: t.dtype for n, t in recovery.state_dict().items()} == {n: t.dtype for n, t in before.items()}
    assert_same(dict(recovery.state_dict()), before, exact=True)


OPTIONS = {
    "plain": {},
    "full": {"rank": "full"},
    "affine": {"recovery": "affine"},
    "shared layers": {"share_layers": True},
    "shared first": {"factor_order": "shared_first"},
    "inner": {"inner_rank": 2},
    "narrow": {"task_embedding_dim": 1},
}


def make_base() -> BertModel:
    return BertModel(BertConfig(**TEXT)).eval()


def make_model(dtype: str, **options) -> tuple[RetexModel, dict]:
    torch.manual_seed(0)
    base = make_base()
    return build_from(base, make_experts(base), **{"rank": 3, "recovery_dtype": dtype, **options})


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_saved_and_loaded_bit_by_bit_with_true_errors(tmp_path, dtype, options):
    model, experts = make_model(dtype, **options)
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    assert loaded.retex_config.recovery_dtype == dtype
    state = dict(model.recovery.state_dict())
    assert {n: t.dtype for n, t in loaded.recovery.state_dict().items()} == {n: t.dtype for n, t in state.items()}
    assert_same(dict(loaded.recovery.state_dict()), state, exact=True)
    assert dtype == "float32" or not any(parameter.requires_grad for parameter in model.recovery.parameters())
    merged = model.get_base_model().state_dict()
    recovered = {}
    for task in TASKS:
        recovered[task] = model.recover(task)
        assert_same(loaded.recover(task), recovered[task], exact=True)
    if options.get("share_layers") and dtype == "float32":
        return  # the solver gives one error for all the layers that share
    for name in model.recovery:
        truth = {task: experts[task].state_dict()[name].double() for task in TASKS}
        missed = sum((recovered[task][name].double() - truth[task]).square().sum() for task in TASKS)
        energy = sum((truth[task] - merged[name].double()).square().sum() for task in TASKS)
        assert model.recovery_errors[name] == pytest.approx((missed / energy).sqrt().item(), rel=1e-3, abs=2e-6), name


def test_narrow_storage_is_smaller_and_costs_accuracy_in_order(tmp_path):
    sizes, errors = {}, {}
    for dtype in DTYPES:
        model, _ = make_model(dtype, rank="full")
        model.save_pretrained(tmp_path / dtype)
        path = tmp_path / dtype / "retex_recovery.safetensors"
        sizes[dtype] = sum(t.numel() * t.element_size() for n, t in load_file(path).items() if "weight" in n)
        errors[dtype] = max(model.recovery_errors.values())
    assert sizes["bfloat16"] == sizes["float16"] < 0.56 * sizes["float32"]
    assert sizes["int8"] < 0.36 * sizes["float32"]
    assert errors["float32"] < 1e-6
    assert errors["float32"] < errors["float16"] < errors["bfloat16"] < errors["int8"] < 0.02


@torch.no_grad()
@pytest.mark.parametrize("dtype", NARROW)
def test_a_build_into_a_folder_stores_the_same_bits(tmp_path, dtype):
    model, experts = make_model(dtype)
    model.save_pretrained(tmp_path / "saved")
    torch.manual_seed(0)
    base = make_base()
    config = RetexConfig(rank=3, recovery_dtype=dtype)
    built = RetexModel.from_experts(base, experts, config, output_dir=tmp_path / "built", progress=False)
    name = "retex_recovery.safetensors"
    assert_same(load_file(tmp_path / "built" / name), load_file(tmp_path / "saved" / name), exact=True)
    assert built.recovery_errors == pytest.approx(model.recovery_errors, rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("dtype", NARROW)
def test_one_pass_over_a_mixed_batch_uses_the_stored_values(dtype):
    model, _ = make_model(dtype)
    inputs, tasks = tokens(6), [*TASKS, *TASKS]
    model.execution = "grouped"
    expected = model(**inputs, task=tasks)
    model.execution = "mixed"
    assert_same(model(**inputs, task=tasks), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stored", "asked"), [("int8", "float32"), ("float32", "int8"), ("bfloat16", "float16")])
def test_a_file_of_another_dtype_is_refused(tmp_path, stored, asked):
    make_model(stored)[0].save_pretrained(tmp_path / "artifact")
    path = tmp_path / "artifact" / "retex_config.json"
    path.write_text(path.read_text().replace(f'"recovery_dtype": "{stored}"', f'"recovery_dtype": "{asked}"'))
    reseal(tmp_path / "artifact")
    with pytest.raises(ArtifactError, match=r"retex_recovery.safetensors") as caught:
        RetexModel.from_pretrained(tmp_path / "artifact")
    assert "\n" not in str(caught.value)
    if "int8" not in (stored, asked):
        assert "has dtype torch.bfloat16, but retex_config.json asks for torch.float16" in str(caught.value)


def test_an_artifact_that_says_nothing_of_storage_is_float32(tmp_path):
    model, _ = make_model("float32")
    model.save_pretrained(tmp_path / "artifact")
    path = tmp_path / "artifact" / "retex_config.json"
    text = path.read_text()
    path.write_text(text.replace('  "recovery_dtype": "float32",\n', ""))
    assert path.read_text() != text
    reseal(tmp_path / "artifact")
    assert_same(RetexModel.from_pretrained(tmp_path / "artifact").recover("red"), model.recover("red"), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_float32_can_be_trained_on(tmp_path, dtype):
    model, _ = make_model(dtype)
    model.save_pretrained(tmp_path / "artifact")
    if dtype == "float32":
        loaded = RetexModel.from_pretrained(tmp_path / "artifact", is_trainable=True).train()
        loaded(**tokens(2), task="red").last_hidden_state.sum().backward()
        assert all(p.grad is not None for p in loaded.recovery[next(iter(loaded.recovery))].parameters())
    else:
        with pytest.raises(ConfigError, match=f"stored as {dtype} cannot be trained"):
            RetexModel.from_pretrained(tmp_path / "artifact", is_trainable=True)
        assert model.train()(**tokens(2), task="red").last_hidden_state.isfinite().all()


def test_numbers_that_float16_does_not_have_are_refused():
    base = BertModel(BertConfig(**TEXT))
    experts = make_experts(base)
    name = "pooler.dense.weight"
    huge = {**base.state_dict(), name: 1e8 * base.state_dict()[name]}
    message = r'recovery_dtype="float16" cannot hold \d.*, which the recovery of a parameter of shape \(16, 16\) needs'
    for rank in (4, "full"):
        with pytest.raises(ConfigError, match=message):
            build_from(base, {**experts, "red": huge}, rank=rank, recovery_dtype="float16")
        model, _ = build_from(base, experts, rank=rank, recovery_dtype="float16")
        with pytest.raises(ConfigError, match=message):
            model.add_task("huge", huge, progress=False)
        assert model.tasks == TASKS
        model, _ = build_from(base, experts, rank=rank, recovery_dtype="bfloat16")
        model.add_task("huge", huge, tolerance=0.01, progress=False)
        assert (model.recover("huge")[name] - huge[name]).norm() < 0.02 * huge[name].norm()


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"recovery_dtype must be one of .*, not 'int4'"):
        RetexConfig(recovery_dtype="int4")


# ---- mapped files ----------------------------------------------------------------------------------------------------


def mapped_file(tensor: torch.Tensor) -> str:
    """The file that a tensor's memory is a mapping of; empty for memory of the process's own."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if start <= address < end:
            return fields[5] if len(fields) > 5 else ""
    return ""


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_trainable", [False, True])
def test_loading_leaves_the_recovery_mapped(tmp_path, dtype, is_trainable):
    if is_trainable and dtype != "float32":
        pytest.skip("refused")
    make_model(dtype, feature_source="pretrained")[0].save_pretrained(tmp_path / "artifact")
    options = {"is_trainable": is_trainable, "dtype": torch.bfloat16, "verify": False}
    loaded = RetexModel.from_pretrained(tmp_path / "artifact", **options)
    loaded(**tokens(2), task="red")
    tensors = dict(loaded.recovery.named_parameters())
    assert len(tensors) > len(loaded.recovery)
    for name, tensor in tensors.items():
        assert mapped_file(tensor).endswith("retex_recovery.safetensors"), name
    for tensor in loaded.pretrained.buffers():
        assert mapped_file(tensor).endswith("retex_pretrained.safetensors")


@linux
def test_copies_and_moves_work_on_mapped_tensors(tmp_path):
    model, _ = make_model("float32")
    model.save_pretrained(tmp_path / "artifact")
    expected = model.recover("red")
    assert_same(RetexModel.from_pretrained(tmp_path / "artifact").to("cpu").recover("red"), expected, exact=True)
    moved = RetexModel.from_pretrained(tmp_path / "artifact").to("meta")
    assert all(parameter.is_meta for parameter in moved.recovery.parameters())


@torch.no_grad()
def test_saving_over_the_folder_that_is_mapped_is_safe(tmp_path):
    folder = tmp_path / "artifact"
    model, _ = make_model("int8")
    model.save_pretrained(folder)
    expected = {task: model.recover(task) for task in TASKS}
    loaded = RetexModel.from_pretrained(folder, expert_cache=0)
    loaded.save_pretrained(folder)  # onto itself
    again = RetexModel.from_pretrained(folder, expert_cache=0)
    other, _ = make_model("float32", rank=2)
    other.save_pretrained(folder)  # and another model over both
    for task in TASKS:
        assert_same(loaded.recover(task), expected[task], exact=True)
        assert_same(again.recover(task), expected[task], exact=True)
        assert_same(RetexModel.from_pretrained(folder).recover(task), other.recover(task), exact=True)
    loaded.save_pretrained(tmp_path / "twin")
    assert_same(RetexModel.from_pretrained(tmp_path / "twin").recover("red"), expected["red"], exact=True)


@torch.no_grad()
def test_changing_a_loaded_recovery_leaves_the_file(tmp_path):
    make_model("float32")[0].save_pretrained(tmp_path / "artifact")
    content = (tmp_path / "artifact" / "retex_recovery.safetensors").read_bytes()
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    for parameter in loaded.recovery.parameters():
        parameter.zero_()
    del loaded
    assert (tmp_path / "artifact" / "retex_recovery.safetensors").read_bytes() == content
