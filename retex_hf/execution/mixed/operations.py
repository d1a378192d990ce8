"""Row-by-row forms of the operations that models apply their parameters with.

A matrix is never recovered: the merged one is applied to the whole batch at once, and each task's rows get
`G_t (S x)` added, with `S x` computed once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import MixedCall, MixedUnsupported
from .sources import Recovered, full_precision
from .task_tensor import OPERATIONS, TaskTensor, by_row, described, origin_of, per_task, values_of


def _rows_or_none(call: MixedCall, x: Any, *parameters: Any) -> int | None:
    """Entries per row of an input, or None where it has no rows (then every task has a result of its own)."""
    own = [parameter for parameter in parameters if isinstance(parameter, TaskTensor)]
    per_row = call.entries_per_row(origin_of(*own), x) if own else None
    return None if isinstance(x, TaskTensor) else per_row


def _has_factors(weight: Any) -> bool:
    """Whether a weight is a recovered matrix that is applied through its factors."""
    return isinstance(weight, TaskTensor) and isinstance(weight.source, Recovered) and weight.source.layout.batch == 1


def add_offset(call: MixedCall, out: Tensor, x: Tensor, source: Recovered, transposed: bool = False) -> Tensor:
    """`out + x D_t^T` for each row's task (`out + x D_t`, if `transposed`); `out` may be overwritten.

    `out` and `x` have the rows along their leading axis and features along the last.
    """
    own, common = source.acting_factors(call, transposed, x.device)
    # Written for x @ A_t @ B (or x @ A @ B_t): which factor meets the input first?
    own_first = transposed != source.shared_first
    result = out.reshape(-1, out.shape[-1]).float()
    x = x.reshape(-1, x.shape[-1]).float()
    with full_precision(x.device):
        if common is not None and own_first:
            result.addmm_(own.applied(call, x), common)
        else:
            own.add(call, result, x if common is None else x @ common)
    return result.view(out.shape).to(out.dtype)


def scaled(call: MixedCall, out: Tensor, source: Recovered) -> Tensor:
    """The affine variant's gamma on what the merged matrix gave."""
    scales = source.scales(call)
    if scales is None:
        return out
    gammas = torch.stack(scales).to(out.device, out.dtype)[call.index(len(out), out.device)]
    return out * gammas.view(-1, *[1] * (out.ndim - 1))


def _segmentwise(call: MixedCall, func: Callable, x: Tensor, per_row: int, *parameters: Any) -> Tensor:
    """A function on each segment's rows with its own parameters; heads of different widths are padded with -inf."""
    columns = [_beside(x, values_of(call, parameter)) for parameter in parameters]
    outputs = [
        func(x[part], *(column[number] for column in columns)) for number, part in enumerate(call.slices(per_row))
    ]
    width = max(output.shape[-1] for output in outputs)
    return torch.cat([F.pad(output, (0, width - output.shape[-1]), value=float("-inf")) for output in outputs])


def _beside(x: Tensor, values: list[Any]) -> list[Any]:
    """Values on the device of an input: a head whose layer is offloaded does not know where that runs."""
    return [value.to(x.device) if isinstance(value, Tensor) else value for value in values]


def linear(call: MixedCall, func: Callable, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    per_row = _rows_or_none(call, x, weight, bias)
    if per_row is None:
        return per_task(call, func, (x, weight, bias), {})
    if isinstance(weight, TaskTensor) and not _has_factors(weight):
        return _segmentwise(call, func, x, per_row, weight, bias)
    if isinstance(weight, TaskTensor):
        # The affine variant scales the matrix, not the bias.
        late_bias = isinstance(bias, TaskTensor) or weight.source.scales(call) is not None
        out = scaled(call, func(x, weight.source.merged, None if late_bias else bias), weight.source)
        out = add_offset(call, out, x, weight.source)
    else:
        late_bias, out = True, func(x, weight)
    return out + _aligned(call, bias, out) if late_bias and bias is not None else out


def _aligned(call: MixedCall, vector: Tensor, out: Tensor) -> Tensor:
    return by_row(call, vector, len(out), out.ndim) if isinstance(vector, TaskTensor) else vector


def matmul(call: MixedCall, func: Callable, x: Tensor, weight: Tensor) -> Tensor:
    """`x @ W`, for parameters that are kept transposed."""
    if not isinstance(weight, TaskTensor):
        if x.ndim != 2 or weight.ndim != 3:
            raise MixedUnsupported(f"A product with {described(x)} on the left has no row-by-row form.")
        return linear(call, F.linear, weight.mT, x).mT  # W @ X for X with a row axis before its columns
    per_row = _rows_or_none(call, x, weight)
    if per_row is None:
        return per_task(call, func, (x, weight), {})
    if not _has_factors(weight) or weight.ndim != 2:
        return _segmentwise(call, func, x, per_row, weight)
    out = scaled(call, func(x, weight.source.merged), weight.source)
    return add_offset(call, out, x, weight.source, transposed=True)


def addmm(call: MixedCall, func: Callable, bias: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
    """`bias + x @ W`: GPT-2's Conv1D."""
    if kwargs:
        raise MixedUnsupported(f"addmm with {sorted(kwargs)} has no row-by-row form.")
    out = matmul(call, torch.matmul, x, weight) if isinstance(weight, TaskTensor) else x @ weight
    if isinstance(out, TaskTensor):
        return per_task(call, torch.add, (out, bias), {})
    return out + _aligned(call, bias, out)


def embedding(call: MixedCall, func: Callable, ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    per_row = _rows_or_none(call, ids, weight)
    if per_row is None:
        return per_task(call, func, (ids, weight, *args), kwargs)
    if not _has_factors(weight):
        return _segmentwise(call, lambda rows, table: func(rows, table, *args, **kwargs), ids, per_row, weight)
    source = weight.source
    out = scaled(call, func(ids, source.merged, *args, **kwargs), source)
    generated, shared = source.factors(call, ids.device)
    parts = call.slices(per_row)
    with full_precision(out.device):
        if shared is None:
            offset = torch.cat([F.embedding(ids[part], table) for part, table in zip(parts, generated, strict=True)])
        elif source.shared_first:
            taken = F.embedding(ids, shared)
            offset = torch.cat([taken[part] @ factor for part, factor in zip(parts, generated, strict=True)])
        else:
            taken = torch.cat([F.embedding(ids[part], factor) for part, factor in zip(parts, generated, strict=True)])
            offset = taken @ shared
    return (out + offset).to(out.dtype)


def getitem(call: MixedCall, func: Callable, tensor: Tensor, index: Any) -> Tensor:
    """Rows of a table by a tensor of ids are an embedding; any other index applies to every task's value."""
    if isinstance(tensor, TaskTensor) and isinstance(index, Tensor) and index.dtype == torch.long and tensor.ndim == 2:
        return embedding(call, F.embedding, index, tensor)
    return per_task(call, func, (tensor, index), {})


def layer_norm(
    call: MixedCall,
    func: Callable,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    per_row = _rows_or_none(call, x, weight, bias)
    if per_row is None:
        return per_task(call, func, (x, normalized_shape, weight, bias, *args), kwargs)
    normal = func(x, normalized_shape, None, None, *args, **kwargs)
    return _affine(normal, _optional(call, weight, normal), _optional(call, bias, normal))


def rms_norm(
    call: MixedCall, func: Callable, x: Tensor, normalized_shape: Any, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    per_row = _rows_or_none(call, x, weight)
    if per_row is None:
        return per_task(call, func, (x, normalized_shape, weight, *args), kwargs)
    return func(x, normalized_shape, None, *args, **kwargs) * _aligned(call, weight, x)


def _optional(call: MixedCall, vector: Tensor | None, out: Tensor) -> Tensor | None:
    return None if vector is None else _aligned(call, vector, out)


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled_ = normal if weight is None else normal * weight
    return scaled_ if bias is None else scaled_ + bias


def _channels(call: MixedCall, vector: Tensor | None, x: Tensor) -> Tensor | None:
    """A vector over channels, aligned with (rows, channels, ...)."""
    if vector is None:
        return None
    if not isinstance(vector, TaskTensor):
        return vector.view(-1, *[1] * (x.ndim - 2))
    return by_row(call, vector, len(x), 2).view(len(x), -1, *[1] * (x.ndim - 2))


def batch_norm(
    call: MixedCall,
    func: Callable,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None:
        raise MixedUnsupported("Batch normalisation by the batch's own statistics mixes rows.")
    if _rows_or_none(call, x, running_mean, running_var, weight, bias) is None:
        raise MixedUnsupported("Batch normalisation of what has no rows is not supported.")
    mean, variance = _channels(call, running_mean, x), _channels(call, running_var, x)
    normal = (x - mean) * torch.rsqrt(variance + eps)
    return _affine(normal, _channels(call, weight, x), _channels(call, bias, x))


def group_norm(
    call: MixedCall,
    func: Callable,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if _rows_or_none(call, x, weight, bias) is None:
        return per_task(call, func, (x, num_groups, weight, bias, *args), kwargs)
    normal = func(x, num_groups, None, None, *args, **kwargs)
    return _affine(normal, _channels(call, weight, x), _channels(call, bias, x))


def convolution(
    call: MixedCall,
    func: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution with a factored weight is one with `S` as its kernel, followed by `G_t` at every position."""
    per_row = _rows_or_none(call, x, weight, bias)
    if per_row is None:
        return per_task(call, func, (x, weight, bias, stride, padding, dilation, groups), {})
    where = (stride, padding, dilation, groups)
    own_bias = isinstance(bias, TaskTensor)
    if not isinstance(weight, TaskTensor):
        out = func(x, weight, None, *where)
    elif not _has_factors(weight) or groups != 1 or weight.source.layout.kind != "matrix" or weight.source.shared_first:
        out = _segmentwise(call, lambda rows, kernel: func(rows, kernel, None, *where), x, per_row, weight)
    else:
        source = weight.source
        generated, shared = source.factors(call, x.device)
        out = scaled(call, func(x, source.merged, None, *where), source)
        parts = call.slices(per_row)
        with full_precision(x.device):
            inner = func(x.float(), shared.view(-1, *source.merged.shape[1:]), None, *where).flatten(2)
            offset = torch.cat([factor @ inner[part] for part, factor in zip(parts, generated, strict=True)])
        out = (out + offset.view(out.shape)).to(out.dtype)
    if bias is None:
        return out
    return out + (_channels(call, bias, out) if own_bias else bias.view(-1, *[1] * (out.ndim - 2)))


def multi_head_attention(
    call: MixedCall,
    func: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """torch's own attention module, where keys are values: inputs are (length, rows, width)."""
    unusual = use_separate_proj_weight or bias_k is not None or add_zero_attn or key_padding_mask is not None
    without_rows = query.ndim != 3 or isinstance(query, TaskTensor) or isinstance(key, TaskTensor)
    if unusual or without_rows or key is not value or (training and dropout_p):
        raise MixedUnsupported("This form of torch's multi-head attention has no row-by-row form.")
    width = query.shape[-1]
    projected = F.linear(key.transpose(0, 1), in_proj_weight, in_proj_bias)
    queries = projected if query is key else F.linear(query.transpose(0, 1), in_proj_weight, in_proj_bias)
    heads = [
        part.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for part in (queries[..., :width], projected[..., width : 2 * width], projected[..., 2 * width :])
    ]
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))
    attended = F.scaled_dot_product_attention(*heads, attn_mask=attn_mask, is_causal=is_causal and attn_mask is None)
    output = F.linear(attended.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return output.transpose(0, 1), None


OPERATIONS |= {
    "linear": linear,
    "matmul": matmul,
    "__matmul__": matmul,
    "__rmatmul__": lambda call, func, weight, x: matmul(call, torch.matmul, x, weight),
    "addmm": addmm,
    "embedding": embedding,
    "__getitem__": getitem,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "multi_head_attention_forward": multi_head_attention,
}
