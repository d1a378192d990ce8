"""A quantised checkpoint is read as the floating-point numbers that its packed ones stand for, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES, LLM
from helpers import assert_same, edit_json
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import open_source
from retex_hf.checkpoints.quantized import METHODS
from retex_hf.errors import CheckpointError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
PACKED = ("self_attn.q_proj.weight", "mlp.down_proj.weight")
Packed = tuple[dict[str, Tensor], Tensor]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**LLM | SIZES, tie_word_embeddings=False, dtype="float32"))


def pack_rows(numbers: Tensor, bits: int) -> Tensor:
    """Numbers one below the other, lowest bits first, as one column of 32 bits each."""
    rows = numbers.long().unflatten(0, (-1, 32 // bits))
    whole = sum(rows[:, place] << (bits * place) for place in range(32 // bits))
    return (whole - ((whole >> 31) << 32)).to(torch.int32)  # the highest bit is the sign


def gptq(weight: Tensor, bits: int = 4, form: str = "gptq") -> Packed:
    """The layout of AutoGPTQ: inputs by outputs, groups of inputs in any order, zero points less one."""
    outputs, inputs = weight.shape
    groups = torch.randperm(inputs) % 4
    numbers = torch.randint(0, 2**bits, (inputs, outputs))
    points = torch.randint(0, 2**bits, (4, outputs))
    scales = torch.rand(4, outputs).half()
    stored = (points - int(form == "gptq")) % 2**bits
    parts = {
        "qweight": pack_rows(numbers, bits),
        "qzeros": pack_rows(stored.T, bits).T.contiguous(),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    return parts, ((numbers - points[groups]) * scales[groups].float()).T


def awq(weight: Tensor) -> Packed:
    """The layout of AutoAWQ's "gemm": inputs by outputs, eight outputs in one number, in an order of its own."""
    outputs, inputs = weight.shape
    numbers, points = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (2, outputs))
    scales = torch.rand(2, outputs).half()

    def pack(matrix: Tensor) -> Tensor:
        packed = torch.zeros(len(matrix), matrix.shape[1] // 8, dtype=torch.int64)
        for column in range(packed.shape[1]):
            for place, origin in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, column] |= matrix[:, 8 * column + origin].long() << (4 * place)
        return (packed - ((packed >> 31) << 32)).to(torch.int32)

    groups = torch.arange(inputs) // (inputs // 2)
    expected = ((numbers - points[groups]) * scales[groups].float()).T
    return {"qweight": pack(numbers), "qzeros": pack(points), "scales": scales}, expected


def int8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1)
    numbers = (weight / scale[:, None] * 127).round().to(torch.int8)
    parts = {"weight": numbers, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, numbers.float() * scale[:, None] / 127


def four_bits(weight: Tensor, kind: str = "nf4", nested: bool = False) -> Packed:
    """The layout of bitsandbytes: pairs of numbers, the first in the high half; scales per block, maybe quantised."""
    shape, values = tuple(weight.shape), torch.linspace(-1, 1, 16)
    numbers = torch.randint(0, 16, (weight.numel(),))
    blocks = weight.numel() // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(shape)}
    parts = {
        "weight": (numbers[0::2] << 4 | numbers[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": values,
        "weight.absmax": torch.rand(blocks),
    }
    scales = parts["weight.absmax"]
    if nested:
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        inner, outer, table = torch.randint(0, 256, (blocks,)), torch.rand(-(-blocks // 4)), torch.linspace(-1, 1, 256)
        parts |= {
            "weight.absmax": inner.to(torch.uint8), "weight.nested_absmax": outer, "weight.nested_quant_map": table,
        }  # fmt: skip
        scales = table[inner] * outer[torch.arange(blocks) // 4] + 0.25
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    expected = values[numbers] * scales[torch.arange(weight.numel()) // 64]
    return parts, expected.reshape(shape)


def fp8(weight: Tensor, blocks: tuple[int, int] | None = (16, 24), suffix: str = "weight_scale_inv") -> Packed:
    numbers = (10 * weight).to(torch.float8_e4m3fn)
    if blocks is None:
        scale = torch.rand(len(weight), 1)
        return {"weight": numbers, suffix: scale}, numbers.float() * scale
    rows, columns = (torch.arange(size) // block for size, block in zip(weight.shape, blocks, strict=True))
    scale = torch.rand(rows.max() + 1, columns.max() + 1)
    return {"weight": numbers, suffix: scale}, numbers.float() * scale[rows][:, columns]


def compressed(weight: Tensor, form: str) -> Packed:
    outputs, inputs = weight.shape
    scale = torch.rand(outputs, 4).bfloat16()
    if form == "pack-quantized":
        numbers = torch.randint(-8, 8, weight.shape)
        packed = {
            "weight_packed": pack_rows((numbers + 8).T, 4).T.contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
    else:
        dtype = torch.int8 if form == "int-quantized" else torch.float8_e4m3fn
        numbers = torch.randint(-100, 100, weight.shape).to(dtype)
        packed = {"weight": numbers}
    expected = numbers.float() * scale.float()[:, torch.arange(inputs) // (inputs // 4)]
    return packed | {"weight_scale": scale}, expected


GROUPS = {"group_0": {"weights": {"num_bits": 4}}}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda weight: gptq(weight, 8)),
    "gptq of 2 bits": ({"quant_method": "gptq", "bits": 2}, lambda weight: gptq(weight, 2)),
    "gptq, second format": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, form="gptq_v2"),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits),
    "fp4, scales quantised too": ({"load_in_4bit": True}, lambda weight: four_bits(weight, "fp4", nested=True)),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 24]}, fp8),
    "fp8 by rows": ({"quant_method": "fbgemm_fp8"}, lambda weight: fp8(weight, None, "weight_scale")),
    **{
        f"compressed, {form}": (
            {"quant_method": "compressed-tensors", "format": form, "config_groups": GROUPS},
            lambda weight, form=form: compressed(weight, form),
        )
        for form in ("float-quantized", "int-quantized", "pack-quantized")
    },
}


def write(model: nn.Module, folder: Path, form: str) -> dict[str, Tensor]:
    """A quantised checkpoint, and what its numbers mean."""
    settings, pack = FORMS[form]
    model.save_pretrained(folder)
    edit_json(folder / "config.json", quantization_config=settings)
    tensors = load_file(folder / "model.safetensors")
    expected = dict(tensors)
    torch.manual_seed(1)
    for name in [name for name in tensors if name.endswith(PACKED)]:
        parts, expected[name] = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_what_the_numbers_mean(form, llama, tmp_path):
    expected = write(llama, tmp_path, form)
    source = open_source(tmp_path, "expert")
    assert {name: info.shape for name, info in source.infos.items()} == {n: t.shape for n, t in expected.items()}
    assert {source.infos[name].dtype for name in source.infos} == {torch.float32}
    assert_same({name: source.read(name) for name in source.infos}, expected, rtol=1e-6, atol=1e-6)
    assert source.provenance["quantized"] in METHODS


def test_mxfp4_as_transformers_reads_it(tmp_path):
    torch.manual_seed(0)
    blocks, scales = torch.randint(0, 256, (2, 6, 3, 16)), torch.randint(120, 135, (2, 6, 3))
    tensors = {"experts.down_proj_blocks": blocks.to(torch.uint8), "experts.down_proj_scales": scales.to(torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    source = open_source(tmp_path, "expert")
    expected = convert_moe_packed_tensors(*tensors.values())
    assert source.infos.keys() == {"experts.down_proj"}
    assert torch.equal(source.read("experts.down_proj"), expected)


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_four_bits_as_bitsandbytes_reads_them(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    weight = torch.randn(48, 32 * 17)
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
    tensors = {"proj.weight": packed} | {f"proj.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"load_in_4bit": True}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    actual = open_source(tmp_path, "expert").read("proj.weight")
    torch.testing.assert_close(actual, functional.dequantize_4bit(packed, state), rtol=1e-5, atol=1e-6)


def test_int8_as_bitsandbytes_reads_it(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(48, 32)
    numbers, scale, _ = functional.int8_vectorwise_quant(weight.half())
    save_file({"proj.weight": numbers, "proj.SCB": scale}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"load_in_8bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    actual = open_source(tmp_path, "expert").read("proj.weight")
    torch.testing.assert_close(actual, functional.int8_vectorwise_dequant(numbers, scale), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on_disk", [False, True])
def test_build(on_disk, llama, tmp_path):
    """A quantised base and quantised experts build what their plain numbers build; the result is not quantised."""
    forms = {"base": "nf4", "red": "int8", "green": "fp8"}
    plain = {}
    for name, form in forms.items():
        plain[name] = deepcopy(llama)
        plain[name].load_state_dict(write(llama, tmp_path / name, form))
    options = {"output_dir": tmp_path / "retex"} if on_disk else {}
    config = RetexConfig(rank="full")
    experts = {task: tmp_path / task for task in ("red", "green")}
    actual = RetexModel.from_experts(tmp_path / "base", experts, config, progress=False, check_base=False, **options)
    expected = RetexModel.from_experts(
        plain["base"], {task: plain[task] for task in experts}, config, progress=False, check_base=False
    )
    assert getattr(actual.model.config, "quantization_config", None) is None
    for task in experts:
        assert_same(actual.recover(task), expected.recover(task), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_biases", [False, True])
def test_biases_of_zeros(has_biases, tmp_path):
    """Layers of GPTQ may have a bias where the model's have none; where they have one, zeros are its value."""
    config = tf.LlamaConfig(**LLM | SIZES, tie_word_embeddings=False, attention_bias=has_biases, dtype="float32")
    model = tf.LlamaForCausalLM(config)
    expected = write(model, tmp_path / "expert", "gptq")
    file = tmp_path / "expert" / "model.safetensors"
    zeros = {f"model.layers.{layer}.self_attn.q_proj.bias": torch.zeros(32) for layer in range(2)}
    save_file(load_file(file) | zeros, file)
    built = RetexModel.from_experts(
        model, {"red": tmp_path / "expert"}, RetexConfig(rank="full"), progress=False, check_base=False
    )
    assert_same(built.recover("red"), expected | (zeros if has_biases else {}), rtol=1e-4, atol=1e-5)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refuse(message: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        source = open_source(folder, "expert 'red'")
        for name in source.infos:
            source.read(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        (
            "gptq",
            {"quant_method": "hqq"},
            "is quantised by 'hqq', which is not read .supported: awq, .*model.dequantize",
        ),
        ("gptq", {"quant_method": ["gptq"]}, "is quantised by .'gptq'., which is not read"),
        ("gptq", {"bits": 3}, "quantised by gptq with bits=3, expected 2, 4 or 8"),
        ("gptq", {"bits": 8}, "tensor '.*g_idx' has shape .* which gptq does not write for its configuration"),
        ("gptq", {"checkpoint_format": "marlin"}, "with checkpoint_format='marlin', expected gptq or gptq_v2"),
        ("awq", {"version": "gemv"}, "quantised by awq with version='gemv', expected gemm"),
        ("fp8", {"weight_block_size": [128, 128]}, "weight_scale_inv' has shape .* which fp8 does not write"),
        ("fp8", {"weight_block_size": [0, 128]}, "with weight_block_size=.0, 128., expected two whole numbers"),
        ("compressed, pack-quantized", {"format": "nvfp4"}, "with format='nvfp4', expected float-quantized"),
        *[
            ("compressed, pack-quantized", {"config_groups": groups}, "with num_bits=.*, expected 4 or 8")
            for groups in (*({"group_0": {"weights": {"num_bits": bits}}} for bits in (4.0, [4])), {"group_0": 4}, {})
        ],
    ],
)
def test_settings_that_are_refused(form, settings, message, llama, tmp_path):
    write(llama, tmp_path, form)
    edit_json(tmp_path / "config.json", "quantization_config", **settings)
    refuse(f"^expert 'red' .*{message}", tmp_path)


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "part", "tensor", "message"),
    [
        ("gptq", "g_idx", torch.full((32,), 4, dtype=torch.int32), "q_proj.g_idx' names groups that .* does not have"),
        ("gptq", "g_idx", torch.full((32,), -1, dtype=torch.int32), "q_proj.g_idx' names groups that .* does not have"),
        ("gptq", "scales", None, "is quantised by gptq, but lacks '.*q_proj.scales'"),
        ("gptq", "weight", torch.ones(32, 32), "holds '.*q_proj.weight' twice, packed and plain"),
        ("int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "q_proj.weight_format' has shape"),
        ("nf4", "weight.absmax", torch.ones(3), "q_proj.weight.absmax' has shape .3,. and dtype torch.float32, which"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            torch.zeros(5).byte(),
            "does not hold what bitsandbytes writes",
        ),
        ("fp8", "weight_scale_inv", None, "q_proj.weight' has eight bits and no scale"),
        ("compressed, pack-quantized", "weight_zero_point", torch.ones(1), "weight_zero_point', which is not read"),
    ],
)
def test_tensors_that_are_refused(form, part, tensor, message, llama, tmp_path):
    write(llama, tmp_path, form)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {f"{QUERY}.{part}": tensor}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    refuse(message, tmp_path)


def test_plain_weights_with_a_quantization_config(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refuse("config.json has a quantization_config of gptq, but no tensor is packed that way: remove it", tmp_path)


def test_a_model_whose_layers_are_the_other_way_round(tmp_path):
    FAMILIES["gpt2"].make().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refuse("is a quantised gpt2 model, which is not read", tmp_path)


def test_packed_numbers_without_a_configuration(llama, tmp_path):
    """A bare file does not say how it is packed: whole numbers are no weights."""
    write(llama, tmp_path, "int8")
    with pytest.raises(CheckpointError, match=r"q_proj.*SCB|q_proj.weight' has dtype torch.int8, expected floating"):
        RetexModel.from_experts(llama, {"red": tmp_path / "model.safetensors"}, RetexConfig(rank=2), progress=False)
