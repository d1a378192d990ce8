"""Half precision from the build to the answer, by values: what is rounded is rounded once."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import ROWS, TEXT, images, tokens
from helpers import MIXED, TASKS, build_from, build_retex, make_experts
from safetensors.torch import load_file

from retex_hf import ConfigError, RetexConfig, RetexModel

HALF = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def bert() -> tf.BertForSequenceClassification:
    return tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3)).eval()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_experts_in_half_precision_are_recovered_to_the_bit(dtype):
    """A difference of two such numbers fits float32, so full rank gives the expert's own bits, or their neighbours."""
    base = bert().to(dtype)
    model, experts = build_from(base, make_experts(base))
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.recovery.parameters()} == {torch.float32}
    for task, expert in experts.items():
        for name, tensor in model.recover(task).items():
            assert tensor.dtype == expert.state_dict()[name].dtype, name
            torch.testing.assert_close(tensor, expert.state_dict()[name], rtol=2 * ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("streamed", [False, True], ids=["memory", "folder"])
def test_the_recovery_knows_what_the_merged_model_was_rounded_to(tmp_path, dtype, streamed):
    """Differences are taken from the merged model as it is held: an expert is one rounding away, not two."""
    base = bert()
    experts = make_experts(base)
    folder = {"output_dir": tmp_path / "artifact"} if streamed else {}
    config = RetexConfig(rank="full")
    model = RetexModel.from_experts(base, experts, config, dtype=dtype, progress=False, **folder)
    if not streamed:
        model.save_pretrained(tmp_path / "artifact")
    stored = load_file(tmp_path / "artifact" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    assert loaded.dtype == loaded.config.dtype == dtype
    heads = [head for head in loaded.parts().heads.values()]
    assert {tensor.dtype for head in heads for tensor in head.values()} == {dtype}
    for name, tensor in loaded.recover("red").items():
        expected = experts["red"].state_dict()[name]
        if expected.is_floating_point():
            torch.testing.assert_close(tensor.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)
    # Asked for in float32, the same folder gives the experts as exactly as before it was rounded.
    wide = RetexModel.from_pretrained(tmp_path / "artifact", dtype="float32")
    name = "bert.encoder.layer.0.output.dense.weight"
    torch.testing.assert_close(wide.recover("red")[name], experts["red"].state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_rows_of_several_tasks(dtype, execution):
    base = bert()
    experts = make_experts(base)
    wide, _ = build_from(base, experts)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), dtype=dtype, progress=False)
    model.execution = execution
    inputs = tokens(ROWS)
    logits = model(**inputs, task=MIXED).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), wide(**inputs, task=MIXED).logits, rtol=0.03, atol=0.05)


def test_generate_gives_the_words_of_the_experts_in_the_same_dtype():
    model, experts = build_retex("llama-tied", scale=1.0)
    model, experts = build_from(
        model.merge_and_unload("red").to(torch.bfloat16),
        {task: expert.to(torch.bfloat16) for task, expert in experts.items()},
    )
    model.execution = "grouped"
    inputs, options = tokens(ROWS), {"max_new_tokens": 4}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["input_ids"] = inputs["input_ids"].clamp(min=3)
    found = model.generate(**inputs, **options, task=MIXED)
    recovered = {task: model.merge_and_unload(task) for task in TASKS}
    for row, task in enumerate(MIXED):
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        expected = recovered[task].generate(**own, **options)[0]
        assert torch.equal(found[row, : len(expected)], expected)
    # In one pass sums are rounded in another order: near-ties may fall otherwise, so the first scores are compared.
    options |= {"output_logits": True, "return_dict_in_generate": True, "task": MIXED}
    grouped = model.generate(**inputs, **options).logits[0]
    model.execution = "mixed"
    mixed = model.generate(**inputs, **options).logits[0]
    assert mixed.dtype == grouped.dtype
    torch.testing.assert_close(mixed.float(), grouped.float(), rtol=0.03, atol=0.03)


def test_features_and_signatures_are_in_float32():
    base = tf.ViTModel(tf.ViTConfig(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2,
                                    num_attention_heads=2, intermediate_size=24))  # fmt: skip
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=2), dtype="bfloat16", progress=False)
    rows = {task: images(8)["pixel_values"].bfloat16() + index for index, task in enumerate(TASKS)}
    model.fit_signatures({task: [own] for task, own in rows.items()}, progress=False)
    assert model.signatures.mean.dtype == model.signatures.basis.dtype == torch.float32
    for task, own in rows.items():
        routing = model.identify(own)
        assert routing.residuals.dtype == torch.float32 and routing.tasks == [task] * 8


def test_what_a_class_keeps_in_float32_stays_so(tmp_path):
    """T5's `wo` overflows float16; transformers keeps it wide, and constants that a model computes too."""
    base = build_retex("t5")[0].merge_and_unload("red")
    config = RetexConfig(rank=2)
    model = RetexModel.from_experts(base, make_experts(base), config, dtype="float16", progress=False)
    dtypes = {name: tensor.dtype for name, tensor in model.model.state_dict().items()}
    assert {dtype for name, dtype in dtypes.items() if ".wo." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".wo." not in name} == {torch.float16}
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path)
    assert {name: tensor.dtype for name, tensor in loaded.model.state_dict().items()} == dtypes


def test_wrong_dtypes_are_refused():
    base = bert()
    for dtype in ("int8", "half a float", torch.int32, "float8_e4m3fn", torch.float8_e5m2):
        with pytest.raises(ConfigError, match="dtype must be a floating-point dtype"):
            RetexModel.from_experts(base, make_experts(base), dtype=dtype, progress=False)
