"""What torch functions do with a tensor that has one value per task: the right thing for every row, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retex_hf.execution import Group
from retex_hf.execution.mixed import MixedModel, MixedUnsupported
from retex_hf.execution.mixed.call import Certificate, MixedCall, Segment, _current
from retex_hf.execution.mixed.sources import Head, Recovered
from retex_hf.execution.mixed.task_tensor import DESCRIPTIONS, ELEMENTWISE, PER_VALUE, TaskTensor
from retex_hf.recovery import RecoveryModule, plan_layout, solve
from retex_hf.rows import Splitter

TASKS = 3
# Rows per task; five rows divide none of the other sizes here.
LENGTHS = [2, 1, 2]
ROWS = sum(LENGTHS)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def offsets_of(shape: tuple[int, ...], rank: int | str = "full", **options):
    """A recovery module of one parameter `w`, and the offsets it gives."""
    differences = [torch.randn(shape) for _ in range(TASKS)]
    layout = plan_layout(shape, rank=rank, num_tasks=TASKS, convolution=len(shape) > 2, **options)
    recovery = RecoveryModule.from_solutions({"w": solve(differences, layout)}, num_tasks=TASKS).requires_grad_(False)
    return recovery, [recovery.offset("w", row) for row in torch.eye(TASKS)]


def segments() -> list[Segment]:
    stops = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [
        Segment(task, stop - length, stop, row, row)
        for task, (length, stop, row) in enumerate(zip(LENGTHS, stops, torch.eye(TASKS), strict=True))
    ]


def parameter(shape: tuple[int, ...], rank: int | str = "full", **options) -> tuple[TaskTensor, list[Tensor]]:
    """A task tensor and its value for every task."""
    merged = torch.rand(shape) + 0.5
    recovery, offsets = offsets_of(shape, rank, **options)
    return TaskTensor(merged, Recovered("w", merged, recovery)), [merged + offset for offset in offsets]


@contextmanager
def running(call: MixedCall) -> Iterator[None]:
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def a_call() -> MixedCall:
    """A call in which `w` meets rows, as if a probe had found that out."""
    return MixedCall(segments(), is_probe=True)


def by_segment(values: list[Tensor], x: Tensor, function) -> Tensor:
    parts = zip(x.split(LENGTHS), values, strict=True)
    return torch.cat([function(part, value) for part, value in parts])


def values_of(result: TaskTensor, call: MixedCall) -> list[Tensor]:
    assert isinstance(result, TaskTensor)
    return result.source.values(call)


# ---- rows ------------------------------------------------------------------------------------------------------------

LAYOUTS = [
    {"rank": "full"},
    {"rank": 2},
    {"rank": 2, "order": "shared_first"},
    {"rank": 3, "inner_rank": 2},
    {"rank": 3, "inner_rank": 2, "order": "shared_first"},
]
MATRIX_OPERATIONS = {
    "linear": ((12, 8), (ROWS, 7, 8), lambda x, w: F.linear(x, w)),
    "linear, plain bias": ((12, 8), (ROWS, 7, 8), lambda x, w: F.linear(x, w, torch.ones(12))),
    "linear of a vector per row": ((12, 8), (ROWS, 8), lambda x, w: F.linear(x, w)),
    "matmul": ((8, 12), (ROWS, 7, 8), lambda x, w: x @ w),
    "torch.matmul": ((8, 12), (ROWS, 7, 8), lambda x, w: torch.matmul(x, w)),
    "addmm": ((8, 12), (ROWS * 7, 8), lambda x, w: torch.addmm(torch.ones(12), x, w)),
    "left": ((12, 8), (ROWS, 8, 7), lambda x, w: w @ x),
    "conv2d": ((12, 3, 2, 2), (ROWS, 3, 6, 6), lambda x, w: F.conv2d(x, w, torch.ones(12), stride=2, padding=1)),
    "conv1d": ((12, 4, 3), (ROWS, 4, 9), lambda x, w: F.conv1d(x, w, None, dilation=2)),
    "grouped conv2d": ((12, 1, 3, 3), (ROWS, 12, 6, 6), lambda x, w: F.conv2d(x, w, groups=12)),
    "normalised": ((12, 8), (ROWS, 8), lambda x, w: F.linear(x, F.normalize(w, dim=1))),
    "weight normalised": ((12, 8), (ROWS, 8), lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True))),
    "sliced": ((12, 8), (ROWS, 8), lambda x, w: F.linear(x, w[:5])),
    "embedding": ((12, 8), None, lambda x, w: F.embedding(x, w)),
    "embedding by index": ((12, 8), None, lambda x, w: w[x]),
    "padded embedding": ((12, 8), None, lambda x, w: F.embedding(x, w, padding_idx=0)),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MATRIX_OPERATIONS)
def test_matrices_are_applied_row_by_row(name, layout):
    shape, size, function = MATRIX_OPERATIONS[name]
    x = torch.randint(0, 12, (ROWS, 7)) if size is None else torch.randn(size)
    weight, values = parameter(shape, **layout)
    with running(a_call()):
        result = function(x, weight)
    assert type(result) is Tensor
    parts = x.unflatten(0, (ROWS, -1)).split(LENGTHS)
    expected = torch.cat([function(part.flatten(0, 1), value) for part, value in zip(parts, values, strict=True)])
    torch.testing.assert_close(result, expected, **CLOSE)


VECTOR_OPERATIONS = {
    "bias": ((ROWS, 7, 8), lambda x, w: F.linear(x, torch.eye(8), w)),
    "addmm": ((ROWS, 8), lambda x, w: torch.addmm(w, x, torch.eye(8))),
    "layer_norm": ((ROWS, 7, 8), lambda x, w: F.layer_norm(x, (8,), w, w, 1e-3)),
    "layer_norm, bias": ((ROWS, 7, 8), lambda x, w: F.layer_norm(x, (8,), None, w)),
    "rms_norm": ((ROWS, 7, 8), lambda x, w: F.rms_norm(x, (8,), w, 1e-3)),
    "rms by hand": ((ROWS, 7, 8), lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))),
    "batch_norm": ((ROWS, 8, 3, 3), lambda x, w: F.batch_norm(x, w, w.abs() + 1, w, w)),
    "group_norm": ((ROWS, 8, 3, 3), lambda x, w: F.group_norm(x, 2, w, w)),
    "conv bias": ((ROWS, 8, 5), lambda x, w: F.conv1d(x, torch.ones(8, 8, 1), w)),
    "scale": ((ROWS, 7, 8), lambda x, w: x * w),
    "channels": ((ROWS, 8, 3, 3), lambda x, w: x * w[:, None, None]),
    "in place": ((ROWS, 7, 8), lambda x, w: x.clone().mul_(w)),
    "exp": ((ROWS, 7, 8), lambda x, w: x - w.exp()),
    "where": ((ROWS, 7, 8), lambda x, w: torch.where(x > 0, x, w)),
    "token": ((ROWS, 7, 8), lambda x, w: torch.cat([w.view(1, 1, 8).expand(len(x), -1, -1), x], 1)),
    "joined token": (
        (ROWS, 7, 8),
        lambda x, w: torch.cat(
            tensors=[w.view(1, 1, 8) if isinstance(w, TaskTensor) else w.expand(len(x), 1, 8), x], dim=1
        ),
    ),
    "repeated token": ((ROWS, 7, 8), lambda x, w: torch.cat([w.view(1, 1, 8).repeat(len(x), 1, 1), x], 1)),
}


@pytest.mark.parametrize("name", VECTOR_OPERATIONS)
def test_vectors_are_applied_row_by_row(name):
    size, function = VECTOR_OPERATIONS[name]
    x = torch.randn(size)
    weight, values = parameter((8,))
    with running(a_call()):
        result = function(x, weight)
    assert type(result) is Tensor
    torch.testing.assert_close(result, by_segment(values, x, function), **CLOSE)


# ---- every function of torch that takes one tensor -------------------------------------------------------------------

ARGUMENTS = {
    "view": (-1,), "reshape": (-1,), "unsqueeze": (0,), "permute": (1, 0), "transpose": (0, 1),
    "unflatten": (0, (2, 3)), "to": (torch.float64,), "type": (torch.float64,), "type_as": (torch.rand(1).double(),),
    "pow": (2,), "__pow__": (2,), "split": (2,), "chunk": (2,), "dropout": (0.5, False),
}  # fmt: skip
PROPERTIES = {"data", "T", "mT"}


def apply_unary(tensor: Tensor, name: str):
    if name in PROPERTIES:
        return getattr(tensor, name)
    if name == "dropout":
        return F.dropout(tensor, *ARGUMENTS[name])
    found = getattr(tensor, name, None) or getattr(F, name)
    is_method = hasattr(tensor, name)
    return found(*(() if is_method else (tensor,)), *ARGUMENTS.get(name, ()))


def flat(result) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.parametrize("name", sorted(PER_VALUE))
def test_functions_of_one_tensor_give_every_task_its_own(name):
    weight, values = parameter((6, 4))
    call = a_call()
    with running(call):
        results = flat(apply_unary(weight, name))
        for part, result in enumerate(results):
            for value, expected in zip(values_of(result, call), values, strict=True):
                torch.testing.assert_close(value, flat(apply_unary(expected, name))[part], equal_nan=True)


@pytest.mark.parametrize("name", sorted(DESCRIPTIONS))
def test_descriptions_are_those_of_the_merged_tensor(name):
    weight, _ = parameter((6, 4))
    plain = torch.rand(6, 4)
    found, expected = getattr(weight, name), getattr(plain, name)
    assert (found() if callable(found) else found) == (expected() if callable(expected) else expected)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
@pytest.mark.parametrize("with_rows", [True, False])
def test_functions_of_two_tensors(name, with_rows):
    weight, values = parameter((8,))
    x = torch.rand(ROWS, 8) + 1 if with_rows else torch.rand(8) + 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        if name == "where":
            return torch.where(w > 1, w, x)
        method = getattr(w, name, None) or (lambda other: getattr(torch, name)(w, other))
        return method(x)

    call = a_call()
    with running(call):
        result = function(x, weight)
        if with_rows:
            torch.testing.assert_close(result, by_segment(values, x, function), **CLOSE)
        else:
            for value, own in zip(values_of(result, call), values, strict=True):
                torch.testing.assert_close(value, function(x, own), **CLOSE)


def functions_of_one_tensor() -> list[tuple[str, object]]:
    """All methods of a tensor, and what models find in `torch.nn.functional` and `torch.linalg`."""
    found = [(name, getattr(Tensor, name)) for name in dir(Tensor)]
    found += [(name, getattr(module, name)) for module in (F, torch.linalg) for name in dir(module)]
    # Not functions of a tensor's numbers, and what needs another process or device.
    left_out = {"__class__", "__init_subclass__", "__subclasshook__", "__new__", "__init__", "__dir__", "__hash__"}
    left_out |= {"share_memory_", "cuda", "xpu", "ipu", "hpu", "mtia", "pin_memory", "register_hook"}
    return [
        (name, function)
        for name, function in found
        if callable(function) and not isinstance(function, type) and name not in left_out
    ]


def test_no_function_computes_with_merged_values():
    """Whatever torch offers is answered for every task, or refused: no plain numbers come out of a parameter."""
    weight, _ = parameter((6, 4))
    leaks, answered = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in functions_of_one_tensor():
            for arguments in ((), (0,)):
                try:
                    with running(a_call()):
                        result = function(weight, *arguments)
                except Exception:  # refused, or called with the wrong arguments
                    continue
                answered += 1
                if any(
                    isinstance(item, (Tensor, np.ndarray)) and type(item) is not TaskTensor for item in flat(result)
                ):
                    leaks.append(name)
    assert answered > 200
    assert not leaks


# ---- reads and writes that have no row-by-row form -------------------------------------------------------------------

REFUSED = {
    "item": lambda w, x: w.sum().item(),
    "float": lambda w, x: float(w.sum()),
    "bool": lambda w, x: bool((w > 0).all()),
    "tolist": lambda w, x: w.tolist(),
    "numpy": lambda w, x: w.numpy(),
    "asarray": lambda w, x: np.asarray(w),
    "equal": lambda w, x: torch.equal(w, w),
    "add_": lambda w, x: w.add_(1),
    "setitem": lambda w, x: w.__setitem__(0, 1.0),
    "data.copy_": lambda w, x: w.data.copy_(torch.zeros(8, 8)),
    "data assigned": lambda w, x: setattr(w, "data", torch.zeros(8, 8)),
    "no_grad zero_": lambda w, x: w.zero_(),
    "written from": lambda w, x: torch.zeros(8, 8).copy_(w),
    "einsum": lambda w, x: torch.einsum("bi,oi->bo", x, w),
    "bilinear": lambda w, x: F.bilinear(x, x, w.view(1, 8, 8)),
    "mm": lambda w, x: torch.mm(x, w),
    "index_select": lambda w, x: torch.index_select(w, 0, torch.zeros(ROWS, dtype=torch.long)),
    "embedding_bag": lambda w, x: F.embedding_bag(torch.zeros(ROWS, 2, dtype=torch.long), w),
    "prelu": lambda w, x: F.prelu(x, w[0]),
    "addcmul": lambda w, x: torch.addcmul(x, w[0], x),
    "ops.aten.mm": lambda w, x: torch.ops.aten.mm.default(x, w),
    "batch statistics": lambda w, x: F.batch_norm(x, None, None, w[0], w[0], training=True),
    "embedding, max_norm": lambda w, x: F.embedding(torch.arange(ROWS), w, max_norm=0.1),
    "embedding without rows, max_norm": lambda w, x: F.embedding(torch.arange(ROWS + 1), w, max_norm=0.0),
    "embedding_bag, max_norm": lambda w, x: F.embedding_bag(torch.zeros(3, 2, dtype=torch.long), w, max_norm=0.1),
    "relu, inplace": lambda w, x: F.relu(w, inplace=True),
    "hardtanh, inplace": lambda w, x: F.hardtanh(w, inplace=True),
    "exp, out": lambda w, x: torch.exp(w, out=torch.zeros(8, 8)),
    "add, out": lambda w, x: torch.add(w, 1, out=torch.zeros(8, 8)),
    "matmul, out": lambda w, x: torch.matmul(x, w, out=torch.zeros(ROWS, 8)),
    "addmm, beta": lambda w, x: torch.addmm(torch.ones(8), x, w, beta=0.5),
    "addmm, alpha": lambda w, x: torch.addmm(w[0], x, torch.eye(8), alpha=0.5),
    "cat along rows": lambda w, x: torch.cat([w[:1], x]),
    "cat along rows, dim": lambda w, x: torch.cat([x, w[:1]], dim=-2),
    "concat along rows, axis": lambda w, x: torch.concat([x, w[:1]], axis=0),
    "torch.batch_norm": lambda w, x: torch.batch_norm(x, w[0], w[0], w[0], w[0].abs(), False, 0.1, 1e-5, False),
    "native attention": lambda w, x: torch._native_multi_head_attention(
        x[None], x[None], x[None], 8, 2, w.repeat(3, 1), w[0].repeat(3), w, w[0], None, False
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_row_by_row_form_is_refused(name):
    weight, _ = parameter((8, 8))
    merged = weight.source.merged.clone()
    with running(a_call()), pytest.raises((MixedUnsupported, RuntimeError, TypeError)):
        REFUSED[name](weight, torch.randn(ROWS, 8))
    assert torch.equal(weight.source.merged, merged)


IN_PLACE_BY_OPTION = {
    "embedding": lambda w: F.embedding(torch.arange(ROWS), w, max_norm=0.1),
    "relu": lambda w: F.relu(w, inplace=True),
    "relu of a view": lambda w: F.relu(w.view(-1), inplace=True),
    "relu of a part": lambda w: F.relu(w[:2], inplace=True),
    "relu of the same": lambda w: F.relu(w.float(), inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE_BY_OPTION)
def test_heads_are_not_written_to(name):
    tensors = {task: torch.randn(8, 8) for task in range(TASKS)}
    kept = deepcopy(tensors)
    with running(a_call()), pytest.raises(MixedUnsupported, match="writes to"):
        IN_PLACE_BY_OPTION[name](TaskTensor(tensors[0], Head("w", tensors)))
    assert all(torch.equal(tensors[task], kept[task]) for task in kept)


def test_a_parameter_has_no_numbers_of_its_own():
    weight, _ = parameter((8, 8))
    with pytest.raises(RuntimeError), torch._C.DisableTorchFunctionSubclass():
        weight.untyped_storage().tolist()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(MixedUnsupported, match="past torch's Python"):
        weight.sum()


def test_a_parameter_outside_a_call_is_refused():
    weight, _ = parameter((8, 8))
    with pytest.raises(MixedUnsupported, match="outside a call"):
        F.linear(torch.randn(2, 8), weight)


# ---- models that go past torch's Python functions, or past rows ------------------------------------------------------


@torch.jit.script
def scripted(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


class CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.mm(x, w)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def probe(module: nn.Module, x: Tensor) -> tuple[MixedModel, list[Segment], Certificate]:
    """Recover every parameter of a module with three tasks, and ask whether it runs mixed batches."""
    recoveries, values = {}, {}
    for name, parameter_ in module.named_parameters():
        shape = tuple(parameter_.shape)
        values[name] = [torch.randn(shape) for _ in range(TASKS)]
        recoveries[name] = solve(values[name], plan_layout(shape, rank="full", num_tasks=TASKS))
    recovery = RecoveryModule.from_solutions(recoveries, num_tasks=TASKS).requires_grad_(False)
    mixed = MixedModel(module.eval(), recovery, ["a", "b", "c"], {})
    own = mixed.segments([Group(task, torch.zeros(length)) for task, length in enumerate(LENGTHS)])
    certificate, _ = mixed.probe("forward", {"x": x}, own, Splitter(ROWS, frozenset()))
    return mixed, own, certificate


class Wrapped(nn.Module):
    """Modules of torch under one name of the input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor):
        return self.module(x)


NOT_OFFERED = {
    "TorchScript": (lambda: Layer(lambda x, w: scripted(x, w)), (ROWS, 8)),
    "custom function": (lambda: Layer(CustomFunction.apply), (ROWS, 8)),
    "LSTM": (lambda: Wrapped(nn.LSTM(8, 8, batch_first=True)), (ROWS, 3, 8)),
    "GRU": (lambda: Wrapped(nn.GRU(8, 8, batch_first=True)), (ROWS, 3, 8)),
    "RNN": (lambda: Wrapped(nn.RNN(8, 8, batch_first=True)), (ROWS, 3, 8)),
    "LSTMCell": (lambda: Wrapped(nn.LSTMCell(8, 8)), (ROWS, 8)),
    "Bilinear": (lambda: Layer(lambda x, w: F.bilinear(x, x, w[None])), (ROWS, 8)),
    "transposed convolution": (
        lambda: Layer(lambda x, w: F.conv_transpose1d(x[..., None], w[..., None])[..., 0]),
        (ROWS, 8),
    ),
    "outer": (lambda: Layer(lambda x, w: torch.outer(x[:, 0], w[0])), (ROWS, 8)),
    "the largest weights": (lambda: Layer(lambda x, w: x * w.topk(1, dim=0)[0][0]), (ROWS, 8)),
    "rows second": (lambda: Layer(lambda x, w: (x.transpose(0, 1) + w[:7, None]).transpose(0, 1)), (ROWS, 7, 8)),
    "mixes rows": (lambda: Layer(lambda x, w: F.linear(x - x.mean(0), w)), (ROWS, 8)),
    "sorts rows": (lambda: Layer(lambda x, w: F.linear(x[x[:, 0].argsort()], w)), (ROWS, 8)),
    "sums rows": (lambda: Layer(lambda x, w: F.linear(x, w).sum(0)), (ROWS, 8)),
    "counts rows": (lambda: Layer(lambda x, w: F.linear(x, w) * len(x)), (ROWS, 8)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", NOT_OFFERED)
def test_models_that_are_not_offered(name):
    make, size = NOT_OFFERED[name]
    x = torch.randn(size)
    x[:, 0] = -x[:, 0].sort(0).values  # descending, so that sorting moves rows
    with pytest.raises(MixedUnsupported):
        probe(make(), x)


def recovered(module: nn.Module, mixed: MixedModel, task: int) -> nn.Module:
    expert = deepcopy(module)
    with torch.no_grad():
        for name, tensor in expert.named_parameters():
            tensor += mixed.recovery.offset(name, torch.eye(TASKS)[task])
    return expert


OFFERED = {
    "attention": (lambda: Wrapped(SelfAttention()), (ROWS, 3, 8)),
    "encoder layer": (lambda: Wrapped(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)), (ROWS, 3, 8)),
    "weight norm": (
        lambda: Wrapped(nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3))),
        (ROWS, 3, 8),
    ),
    "checkpoint": (
        lambda: Layer(lambda x, w: torch.utils.checkpoint.checkpoint(F.linear, x, w, use_reentrant=False)),
        (ROWS, 8),
    ),
    "in place, without rows": (
        lambda: Layer(lambda x, w: x @ F.dropout(F.relu(F.linear(w, w), inplace=True), 0.5, False, inplace=True)),
        (ROWS, 8),
    ),
    "a sum of the weights": (lambda: Layer(lambda x, w: x + w.sum(0)), (ROWS, 8)),
    "two layers": (lambda: Wrapped(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))), (ROWS, 8)),
}


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@torch.no_grad()
@pytest.mark.parametrize("name", OFFERED)
def test_models_of_torchs_own_layers_are_exact(name):
    make, size = OFFERED[name]
    module, x = make(), torch.randn(size)
    mixed, own, certificate = probe(module, x)
    result = mixed.run("forward", {"x": x}, own, certificate)
    parts = enumerate(x.split(LENGTHS))
    expected = torch.cat([recovered(module, mixed, task)(part) for task, part in parts])
    torch.testing.assert_close(result, expected, **CLOSE)
