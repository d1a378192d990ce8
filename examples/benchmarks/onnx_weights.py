"""Minimal reader of the weights in an ONNX file, dynamically quantised or in float32: parses only the fields that it
needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# Field numbers of onnx.proto.
MODEL_GRAPH = 7
GRAPH_NODE, GRAPH_INITIALIZER = 1, 5
NODE_INPUT, NODE_NAME, NODE_OPERATION = 1, 3, 4
TENSOR_DIMENSION, TENSOR_TYPE, TENSOR_FLOATS, TENSOR_INTEGERS, TENSOR_NAME, TENSOR_RAW = 1, 2, 4, 5, 8, 9
TYPES = {1: np.dtype("<f4"), 2: np.dtype("u1"), 3: np.dtype("i1")}
# Operations that multiply by a linear layer's weight, and how the names of their nodes end.
MULTIPLICATIONS = {"MatMul": "/MatMul", "MatMulInteger": "/MatMul_quant"}

Message = dict[int, list[int | memoryview]]


def read_varint(data: memoryview, start: int) -> tuple[int, int]:
    """Read a number of seven bits per byte, lowest first; return it and the start of the next field."""
    value = shift = 0
    while True:
        byte = data[start]
        value, shift, start = value | (byte & 127) << shift, shift + 7, start + 1
        if byte < 128:
            return value, start


def varints(data: memoryview) -> Iterator[int]:
    """Yield all numbers of a packed field."""
    start = 0
    while start < len(data):
        value, start = read_varint(data, start)
        yield value


def parse(data: memoryview) -> Message:
    """Parse the fields of one message by their numbers; nested messages stay bytes."""
    fields: Message = {}
    start = 0
    while start < len(data):
        key, start = read_varint(data, start)
        kind = key & 7
        if kind == 0:
            value, start = read_varint(data, start)
        elif kind in (1, 2, 5):
            length, start = read_varint(data, start) if kind == 2 else (8 if kind == 1 else 4, start)
            value, start = data[start : start + length], start + length
        else:
            raise ValueError(f"not an ONNX file: a field of wire type {kind}, which protocol buffers do not use")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def text(message: Message, field: int) -> str:
    """Return the only value of a text field."""
    return bytes(message[field][0]).decode()


def initializer(message: Message) -> np.ndarray:
    """Return the values of one stored tensor."""
    shape = message.get(TENSOR_DIMENSION, [])
    kind = TYPES.get(message[TENSOR_TYPE][0])
    if kind is None:
        raise ValueError(
            f"{text(message, TENSOR_NAME)}: ONNX data type {message[TENSOR_TYPE][0]}; expected float32, uint8 or int8"
        )
    if TENSOR_INTEGERS in message:
        # Negative numbers are stored as 64-bit complements; the cast keeps their lowest byte, which is the number.
        return np.fromiter(varints(message[TENSOR_INTEGERS][0]), np.uint64).astype(kind).reshape(shape)
    values = message[TENSOR_RAW if TENSOR_RAW in message else TENSOR_FLOATS][0]
    return np.frombuffer(values, kind).reshape(shape)


def dequantise(values: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> Tensor:
    """Return `(values - zero point) * scale` in float32, as ONNX's DequantizeLinear defines it."""
    return torch.from_numpy((values.astype(np.float32) - zero_point.astype(np.float32)) * scale)


def read_weights(data: bytes) -> dict[str, Tensor]:
    """Return all weights of an exported PyTorch model under its own parameter names, in float32.

    Exporting replaces the name of a linear layer's weight by a number and stores it transposed. The node that
    multiplies by it still names the layer: "/decoder/block.0/layer.0/SelfAttention/q/MatMul_quant". Products of two
    activations, as in attention, multiply by no stored tensor.
    """
    graph = parse(parse(memoryview(data))[MODEL_GRAPH][0])
    stored = {}
    for message in map(parse, graph[GRAPH_INITIALIZER]):
        stored[text(message, TENSOR_NAME)] = initializer(message)
    linear = {}
    for node in map(parse, graph[GRAPH_NODE]):
        ending = MULTIPLICATIONS.get(text(node, NODE_OPERATION))
        factor = bytes(node[NODE_INPUT][1]).decode() if ending else None
        if factor in stored:
            module = text(node, NODE_NAME).removesuffix(ending).strip("/").replace("/", ".")
            linear[factor] = f"{module}.weight"
    weights = {}
    for name, values in stored.items():
        if name.endswith("_quantized"):
            own_name = name.removesuffix("_quantized")
            weight = dequantise(values, stored[f"{own_name}_scale"], stored[f"{own_name}_zero_point"])
        elif name.endswith(("_scale", "_zero_point")):
            continue
        else:
            own_name, weight = name, torch.from_numpy(values.copy())
        weights[linear.get(name, own_name)] = weight.T.contiguous() if name in linear else weight
    return weights
