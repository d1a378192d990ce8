"""Reading of quantised checkpoints as floating-point numbers, tensor by tensor.

`quantization_config` in `config.json` names the method. Tensors are unpacked by the published layouts of the methods,
without their packages; arithmetic is in float32, and the result is rounded once, to the dtype that the configuration
names. Other methods are refused: numbers packed in another way would be silently wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import CheckpointError, brief
from .sources import Source, TensorInfo

REMEDY = "load it in transformers, call model.dequantize(), save it, and give that checkpoint"
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}
# Their Conv1D holds (inputs, outputs), and packed weights do not say which way round they are.
TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
# The order in which AWQ packs eight columns into one integer.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BNB_STATE = "weight.quant_state.bitsandbytes__"
LONGEST_STATE = 10_000
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass
class UnpackedSource(Source):
    """The tensors of a quantised checkpoint in floating point: dequantised when they are read, or stored plain."""

    tensors: Source = field(kw_only=True)
    unpacked: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        if name not in self.unpacked:
            return self.tensors.read(name)
        return self.unpacked[name]().to(self.infos[name].dtype)

    def identity(self) -> dict[str, Any]:
        return self.tensors.identity()


def unpack(source: Source, config: Mapping[str, Any]) -> UnpackedSource:
    """Return a quantised checkpoint's tensors as floating-point numbers.

    Args:
        source: Tensors as they are stored.
        config: Content of its `config.json`, with a `quantization_config`.
    """
    settings = config["quantization_config"]
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if isinstance(settings, dict) and method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{source.label} is quantised by {brief(method, 60)}, which is not read (supported: "
            f"{', '.join(METHODS)}): {REMEDY}."
        )
    if config.get("model_type") in TRANSPOSED_MODELS:
        raise CheckpointError(
            f"{source.label} is a quantised {config['model_type']} model, which is not read: {REMEDY}."
        )
    packed = METHODS[method](_Packed(source, method), settings)
    if not packed.weights:
        assert source.folder is not None  # where `config` is from
        raise CheckpointError(
            f"{source.label}: {source.folder / 'config.json'} has a quantization_config of {method}, but no tensor is "
            "packed that way: remove it if the weights are plain."
        )
    named = config.get("dtype", config.get("torch_dtype"))
    dtype = DTYPES.get(named, torch.float32) if isinstance(named, str) else torch.float32
    infos = {name: info for name, info in source.infos.items() if name not in packed.used}
    for name, info in infos.items():
        if info.dtype in FLOAT8.values():
            raise CheckpointError(f"{source.label}: tensor {name!r} has eight bits and no scale: {REMEDY}.")
    for name, (shape, _) in packed.weights.items():
        if name in infos:
            raise CheckpointError(f"{source.label} holds {name!r} twice, packed and plain.")
        infos[name] = TensorInfo(shape, dtype)
    unpacked = {name: read for name, (_, read) in packed.weights.items()}
    kept = {key: getattr(source, key) for key in ("folder", "model", "provenance", "files")}
    provenance = kept["provenance"] | {"quantized": method}
    return UnpackedSource(
        source.label,
        infos,
        **{**kept, "provenance": provenance},
        packed=True,
        optional=frozenset(packed.optional),
        tensors=source,
        unpacked=unpacked,
    )


class _Packed:
    """The packed weights of a checkpoint, collected one by one: `weights` by name, with shape and reader; and in `used`
    the names of the tensors that they are made of."""

    def __init__(self, source: Source, method: str) -> None:
        self.source, self.method = source, method
        self.weights: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
        self.used: set[str] = set()
        self.optional: set[str] = set()

    def modules(self, suffix: str) -> list[str]:
        """Return the names, without the suffix, of all tensors with this suffix (which begins with `.` or `_`)."""
        return [name.removesuffix(suffix) for name in self.source.infos if name.endswith(suffix)]

    def info(self, name: str, rank: int | None = None, *dtypes: torch.dtype) -> TensorInfo:
        """Return the info of a required tensor; refuse another number of axes or another dtype."""
        info = self.source.infos.get(name)
        if info is None:
            raise CheckpointError(f"{self.source.label} is quantised by {self.method}, but lacks {name!r}.")
        if (rank is not None and len(info.shape) != rank) or (dtypes and info.dtype not in dtypes):
            self.refuse(name)
        self.used.add(name)
        return info

    def refuse(self, name: str) -> NoReturn:
        info = self.source.infos[name]
        raise CheckpointError(
            f"{self.source.label}: tensor {name!r} has shape {info.shape} and dtype {info.dtype}, which {self.method} "
            "does not write for its configuration."
        )

    def leave_out(self, *names: str) -> None:
        self.used |= {name for name in names if name in self.source.infos}

    def note_bias(self, module: str) -> None:
        """Mark a bias of zeros as optional: quantised layers may have one where the plain ones have none."""
        name = f"{module}.bias"
        if name in self.source.infos and not self.source.read(name).any():
            self.optional.add(name)

    def add(self, name: str, shape: tuple[int, ...], compute: Callable[..., Tensor], *parts: str) -> None:
        self.weights[name] = (shape, lambda: compute(*(self.source.read(part) for part in parts)))

    def refuse_setting(self, key: str, value: Any, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.source.label} is quantised by {self.method} with {key}={brief(value, 60)}, expected {expected}: "
            f"{REMEDY}."
        )


def unpack_bits(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Unpack 32-bit integers into numbers of `bits` bits, lowest first, along an axis.

    >>> import torch
    >>> from retex_hf.checkpoints.quantized import unpack_bits
    >>> unpack_bits(torch.tensor([[0x0000_0321]], dtype=torch.int32), 4, 1)[0, :4].tolist()
    [1, 2, 3, 0]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return parts.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _gptq(packed: _Packed, settings: Mapping[str, Any]) -> _Packed:
    bits, form = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if not isinstance(bits, int) or bits not in (2, 4, 8):
        packed.refuse_setting("bits", bits, "2, 4 or 8")
    if form not in ("gptq", "gptq_v2"):
        packed.refuse_setting("checkpoint_format", form, "gptq or gptq_v2")
    per_number = 32 // bits
    for module in packed.modules(".qweight"):
        rows, outputs = packed.info(f"{module}.qweight", 2, torch.int32).shape
        groups = packed.info(f"{module}.scales", 2, *DTYPES.values()).shape
        inputs = rows * per_number
        zeros = packed.info(f"{module}.qzeros", 2, torch.int32).shape
        if packed.info(f"{module}.g_idx", 1, torch.int32).shape != (inputs,):
            packed.refuse(f"{module}.g_idx")
        if groups[1] != outputs or zeros != (groups[0], outputs // per_number) or outputs % per_number:
            packed.refuse(f"{module}.qzeros")
        compute = partial(_read_gptq, packed.source.label, module, bits, int(form == "gptq"))
        names = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
        packed.add(f"{module}.weight", (outputs, inputs), compute, *names)
        packed.note_bias(module)
    return packed


def _read_gptq(
    label: str, module: str, bits: int, offset: int, weight: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor
) -> Tensor:
    groups = groups.long()
    if groups.numel() and not (groups.min().item() >= 0 and groups.max().item() < len(scales)):
        raise CheckpointError(f"{label}: '{module}.g_idx' names groups that '{module}.scales' does not have.")
    # In the first format, zero points are stored minus one, modulo 2**bits.
    points = (unpack_bits(zeros, bits, 1) + offset) & (2**bits - 1)
    numbers = unpack_bits(weight, bits, 0)
    return ((numbers - points[groups]).float() * scales.float()[groups]).T.contiguous()


def _awq(packed: _Packed, settings: Mapping[str, Any]) -> _Packed:
    bits = settings.get("bits", settings.get("w_bit", 4))
    form = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if bits != 4:
        packed.refuse_setting("bits", bits, "4")
    if form != "gemm":
        packed.refuse_setting("version", form, "gemm")
    for module in packed.modules(".qweight"):
        inputs, columns = packed.info(f"{module}.qweight", 2, torch.int32).shape
        groups, outputs = packed.info(f"{module}.scales", 2, *DTYPES.values()).shape
        zeros = packed.info(f"{module}.qzeros", 2, torch.int32).shape
        if outputs != 8 * columns or zeros != (groups, columns) or not groups or inputs % groups:
            packed.refuse(f"{module}.scales")
        names = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        packed.add(f"{module}.weight", (outputs, inputs), _read_awq, *names)
        packed.note_bias(module)
    return packed


def _read_awq(weight: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    order = torch.tensor(AWQ_ORDER).argsort()
    numbers, points = (
        unpack_bits(tensor, 4, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1) for tensor in (weight, zeros)
    )
    repeat = len(numbers) // len(points)
    points, scales = (tensor.repeat_interleave(repeat, 0) for tensor in (points, scales.float()))
    return ((numbers - points).float() * scales).T.contiguous()


def _bitsandbytes(packed: _Packed, settings: Mapping[str, Any]) -> _Packed:
    for module in packed.modules(".SCB"):
        rows = packed.info(f"{module}.weight", 2, torch.int8).shape[0]
        if packed.info(f"{module}.SCB", 1, torch.float32).shape != (rows,):
            packed.refuse(f"{module}.SCB")
        form = f"{module}.weight_format"
        if form in packed.source.infos and (prod(packed.info(form).shape) != 1 or packed.source.read(form).any()):
            packed.refuse(form)  # a row order specific to one kind of GPU
        shape = packed.source.infos[f"{module}.weight"].shape
        packed.add(f"{module}.weight", shape, _read_int8, f"{module}.weight", f"{module}.SCB")
    for kind in ("nf4", "fp4"):
        for module in packed.modules(f".{BNB_STATE}{kind}"):
            _add_bnb4(packed, module, kind)
    return packed


def _read_int8(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * (scale[:, None] / 127)


def _add_bnb4(packed: _Packed, module: str, kind: str) -> None:
    source, name = packed.source, f"{module}.weight"
    state_name = f"{module}.{BNB_STATE}{kind}"
    if prod(packed.info(state_name, 1, torch.uint8).shape) > LONGEST_STATE:
        packed.refuse(state_name)
    try:
        state = json.loads(bytes(source.read(state_name).tolist()).decode())
        shape, block = tuple(state["shape"]), state["blocksize"]
        nested = state.get("nested_blocksize")
        offset = float(state.get("nested_offset", 0.0)) if nested is not None else 0.0
        sizes = [*shape, block, *([] if nested is None else [nested])]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(
            f"{source.label}: tensor {state_name!r} does not hold what bitsandbytes writes."
        ) from None
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**40 for size in sizes):
        raise CheckpointError(f"{source.label}: tensor {state_name!r} does not hold what bitsandbytes writes.")
    count = prod(shape)
    blocks = -(-count // block)
    if 2 * prod(packed.info(name, None, torch.uint8).shape) != count + count % 2:
        packed.refuse(name)
    scales = [f"{name}.absmax", f"{name}.quant_map"]
    dtype = torch.float32 if nested is None else torch.uint8
    if packed.info(scales[0], 1, dtype).shape != (blocks,):
        packed.refuse(scales[0])
    if packed.info(scales[1], 1, torch.float32).shape != (16,):
        packed.refuse(scales[1])
    if nested is not None:
        scales += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        if packed.info(scales[2], 1, torch.float32).shape != (-(-blocks // nested),):
            packed.refuse(scales[2])
        if packed.info(scales[3], 1, torch.float32).shape != (256,):
            packed.refuse(scales[3])
    packed.add(name, shape, partial(_read_bnb4, shape, block, nested, offset), name, *scales)


def _read_bnb4(
    shape: tuple[int, ...], block: int, nested: int | None, offset: float, weight: Tensor, *scales: Tensor
) -> Tensor:
    absmax, values, *second = scales
    if nested is not None:
        # The scales are quantised too: code values times a scale per block, plus the mean of the scales.
        outer = second[0].repeat_interleave(nested)[: len(absmax)]
        absmax = second[1][absmax.long()] * outer + offset
    weight = weight.flatten()
    numbers = torch.stack([weight >> 4, weight & 15], 1).flatten()[: prod(shape)]
    return (values[numbers.long()] * absmax.repeat_interleave(block)[: len(numbers)]).reshape(shape)


def _fp8(packed: _Packed, settings: Mapping[str, Any]) -> _Packed:
    block = settings.get("weight_block_size", [128, 128])
    fits = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    if block is not None and not fits:
        packed.refuse_setting("weight_block_size", block, "two whole numbers")
    for suffix in (".weight_scale_inv", ".weight_scale"):
        for module in packed.modules(suffix):
            shape = packed.info(f"{module}.weight", 2, *FLOAT8.values()).shape
            scale = packed.info(f"{module}{suffix}", None, *DTYPES.values()).shape
            blocks = None if block is None else tuple(-(-s // b) for s, b in zip(shape, block, strict=True))
            sides = block if scale == blocks else None
            if sides is None and prod(scale) not in (1, shape[0]):
                packed.refuse(f"{module}{suffix}")
            compute = partial(_read_scaled, sides)
            packed.add(f"{module}.weight", shape, compute, f"{module}.weight", f"{module}{suffix}")
            packed.leave_out(f"{module}.activation_scale", f"{module}.input_scale", f"{module}.input_scale_ub")
    return packed


def _read_scaled(block: list[int] | None, weight: Tensor, scale: Tensor) -> Tensor:
    weight, scale = weight.float(), scale.float()
    if block is None:  # one scale, or one per row
        return weight * scale.reshape(-1, 1)
    rows, columns = weight.shape
    return weight * scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _compressed_tensors(packed: _Packed, settings: Mapping[str, Any]) -> _Packed:
    form = settings.get("format")
    if form not in ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"):
        packed.refuse_setting("format", form, "float-quantized, int-quantized, naive-quantized or pack-quantized")
    for name in packed.source.infos:
        if name.endswith((".weight_zero_point", ".weight_g_idx")):
            raise CheckpointError(f"{packed.source.label} holds {name!r}, which is not read: {REMEDY}.")
    for module in packed.modules(".weight_scale"):
        scale = packed.info(f"{module}.weight_scale", None, *DTYPES.values()).shape
        packed.leave_out(f"{module}.input_scale", f"{module}.input_zero_point")
        if form == "pack-quantized":
            _add_packed(packed, module, scale, settings)
            continue
        shape = packed.info(f"{module}.weight", 2, torch.int8, *FLOAT8.values()).shape
        _add_grouped(packed, module, f"{module}.weight", shape, scale, lambda weight: weight)
    return packed


def _add_packed(packed: _Packed, module: str, scale: tuple[int, ...], settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    weights = [entry.get("weights") if isinstance(entry, dict) else None for entry in entries]
    found = [weight.get("num_bits") if isinstance(weight, dict) else None for weight in weights]
    bits = found[0] if found and all(number == found[0] for number in found) else None
    if not isinstance(bits, int) or bits not in (4, 8):
        packed.refuse_setting("num_bits", sorted({str(number) for number in found}), "4 or 8")
    rows, columns = packed.info(f"{module}.weight_packed", 2, torch.int32).shape
    name = f"{module}.weight_shape"
    if prod(packed.info(name, 1, torch.int64, torch.int32).shape) != 2:
        packed.refuse(name)
    shape = tuple(packed.source.read(name).tolist())
    if shape[0] != rows or -(-shape[1] // (32 // bits)) != columns:
        packed.refuse(name)

    def take_apart(weight: Tensor) -> Tensor:
        return unpack_bits(weight, bits, 1)[:, : shape[1]] - 2 ** (bits - 1)

    _add_grouped(packed, module, f"{module}.weight_packed", shape, scale, take_apart)


def _add_grouped(
    packed: _Packed,
    module: str,
    stored: str,
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    take_apart: Callable[[Tensor], Tensor],
) -> None:
    """Add a weight with one scale, one per row, or one per row and group of columns."""
    per_row = scale[1] if len(scale) == 2 else 1
    if not (prod(scale) == 1 or (scale[0] == shape[0] and len(scale) <= 2 and per_row and shape[1] % per_row == 0)):
        packed.refuse(f"{module}.weight_scale")

    def compute(weight: Tensor, factors: Tensor) -> Tensor:
        factors = factors.float().reshape(-1, per_row)
        return take_apart(weight).float() * factors.repeat_interleave(shape[1] // per_row, 1)

    packed.add(f"{module}.weight", shape, compute, stored, f"{module}.weight_scale")


def _mxfp4(packed: _Packed, settings: Mapping[str, Any]) -> _Packed:
    for name in packed.modules("_blocks"):
        experts, rows, groups, width = packed.info(f"{name}_blocks", 4, torch.uint8).shape
        if packed.info(f"{name}_scales", 3, torch.uint8).shape != (experts, rows, groups):
            packed.refuse(f"{name}_scales")
        packed.add(name, (experts, 2 * groups * width, rows), _read_mxfp4, f"{name}_blocks", f"{name}_scales")
    return packed


def _read_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    values = torch.tensor(FP4_VALUES)
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - 127
    return torch.ldexp(values[numbers.long()], exponents).flatten(-2).mT.contiguous()


METHODS: dict[str, Callable[[_Packed, Mapping[str, Any]], _Packed]] = {
    "awq": _awq, "bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed_tensors, "fbgemm_fp8": _fp8,
    "fp8": _fp8, "gptq": _gptq, "mxfp4": _mxfp4,
}  # fmt: skip
