"""Row-by-row forms of the operations with which models apply their parameters.

Matrices are not recovered: the merged one is applied to the whole batch at once, and `G_t (S x)` is added to each
task's rows, with `S x` computed once for all rows where tasks share `S`.
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
    """Return the entries per row of an input, or None where it has no rows (every task then has its own result)."""
    own = [parameter for parameter in parameters if isinstance(parameter, TaskTensor)]
    per_row = call.entries_per_row(origin_of(*own), x) if own else None
    return None if isinstance(x, TaskTensor) else per_row


def _factored(weight: Tensor) -> Recovered | None:
    """Return the source of a weight that is a recovered matrix, applied through its factors; else None."""
    source = weight.source if isinstance(weight, TaskTensor) else None
    return source if isinstance(source, Recovered) and source.layout.batch == 1 else None


def add_offset(call: MixedCall, out: Tensor, x: Tensor, source: Recovered, transposed: bool = False) -> Tensor:
    """Return `out + x D_t^T` for each row's task (`out + x D_t`, if `transposed`); may overwrite `out`.

    `out` and `x` have the rows along their leading axis and features along the last.
    """
    factors = source.acting_factors(call, transposed, x.device)
    result = out.reshape(-1, out.shape[-1]).float()
    with full_precision(x.device):
        factors.add(call, result, x.reshape(-1, x.shape[-1]).float())
    return result.view(out.shape).to(out.dtype)


def scaled(call: MixedCall, out: Tensor, source: Recovered) -> Tensor:
    """Multiply the output of the merged matrix by the affine variant's gamma; return it unchanged without one."""
    scales = source.scales(call)
    if scales is None:
        return out
    gammas = torch.stack(scales).to(out.device, out.dtype)[call.index(len(out), out.device)]
    return out * gammas.view(-1, *[1] * (out.ndim - 1))


def _segmentwise(call: MixedCall, func: Callable, x: Tensor, per_row: int, *parameters: Any) -> Tensor:
    """Apply a function to each segment's rows with its own parameters; pad heads of different widths with -inf."""
    columns = [_beside(x, values_of(call, parameter)) for parameter in parameters]
    outputs = [
        func(x[part], *(column[number] for column in columns)) for number, part in enumerate(call.slices(per_row))
    ]
    width = max(output.shape[-1] for output in outputs)
    return torch.cat([F.pad(output, (0, width - output.shape[-1]), value=float("-inf")) for output in outputs])


def _beside(x: Tensor, values: list[Any]) -> list[Any]:
    """Move values to the device of an input: a head does not know on which device its offloaded layer runs."""
    return [value.to(x.device) if isinstance(value, Tensor) else value for value in values]


def linear(call: MixedCall, func: Callable, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    per_row = _rows_or_none(call, x, weight, bias)
    if per_row is None:
        return per_task(call, func, (x, weight, bias), {})
    source = _factored(weight)
    if source is not None:
        # The affine variant scales the matrix, not the bias.
        late_bias = isinstance(bias, TaskTensor) or source.scales(call) is not None
        out = scaled(call, func(x, source.merged, None if late_bias else bias), source)
        out = add_offset(call, out, x, source)
    elif isinstance(weight, TaskTensor):
        return _segmentwise(call, func, x, per_row, weight, bias)
    else:
        late_bias, out = True, func(x, weight)
    return out + _aligned(call, bias, out) if late_bias and bias is not None else out


def _aligned(call: MixedCall, vector: Tensor, out: Tensor) -> Tensor:
    return by_row(call, vector, len(out), out.ndim) if isinstance(vector, TaskTensor) else vector


def matmul(call: MixedCall, func: Callable, x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ W`, for parameters that are stored transposed."""
    if isinstance(x, TaskTensor) and not isinstance(weight, TaskTensor):
        if x.ndim != 2 or weight.ndim != 3:
            raise MixedUnsupported(f"A product with {described(x)} on the left has no row-by-row form.")
        return linear(call, F.linear, weight.mT, x).mT  # W @ X, where X has a row axis before its columns
    per_row = _rows_or_none(call, x, weight)
    if per_row is None:
        return per_task(call, func, (x, weight), {})
    source = _factored(weight)
    if source is None or weight.ndim != 2:
        return _segmentwise(call, func, x, per_row, weight)
    out = scaled(call, func(x, source.merged), source)
    return add_offset(call, out, x, source, transposed=True)


def addmm(call: MixedCall, func: Callable, bias: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
    """Compute `bias + x @ W`, as GPT-2's Conv1D does."""
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
    source = _factored(weight)
    if source is None:
        return _segmentwise(call, lambda rows, table: func(rows, table, *args, **kwargs), ids, per_row, weight)
    out = scaled(call, func(ids, source.merged, *args, **kwargs), source)
    pairs, parts = source.pairs(call, ids.device), call.slices(per_row)
    generated, shared = ([], None) if pairs is not None else source.factors(call, ids.device)
    with full_precision(out.device):
        if pairs is not None:
            looked_up = zip(parts, pairs, strict=True)
            offset = torch.cat([F.embedding(ids[part], table) @ rows for part, (table, rows) in looked_up])
        elif shared is None:
            offset = torch.cat([F.embedding(ids[part], table) for part, table in zip(parts, generated, strict=True)])
        elif source.shared_first:
            taken = F.embedding(ids, shared)
            offset = torch.cat([taken[part] @ factor for part, factor in zip(parts, generated, strict=True)])
        else:
            taken = torch.cat([F.embedding(ids[part], factor) for part, factor in zip(parts, generated, strict=True)])
            offset = taken @ shared
    return (out + offset).to(out.dtype)


def getitem(call: MixedCall, func: Callable, tensor: Tensor, index: Any) -> Tensor:
    """Look up rows of a table by a tensor of ids as an embedding; apply any other index to every task's value."""
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
    return _affine(call, normal, weight, bias, _aligned)


def rms_norm(
    call: MixedCall, func: Callable, x: Tensor, normalized_shape: Any, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    per_row = _rows_or_none(call, x, weight)
    if per_row is None:
        return per_task(call, func, (x, normalized_shape, weight, *args), kwargs)
    return func(x, normalized_shape, None, *args, **kwargs) * _aligned(call, weight, x)


def _affine(
    call: MixedCall,
    normal: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    align: Callable[[MixedCall, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return `normal * weight + bias`, each as far as it is given, aligned with `normal`."""
    out = normal if weight is None else normal * align(call, weight, normal)
    return out if bias is None else out + align(call, bias, normal)


def _channels(call: MixedCall, vector: Tensor, x: Tensor) -> Tensor:
    """Return a vector over channels, aligned with (rows, channels, ...)."""
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
    if training or running_mean is None or running_var is None:
        raise MixedUnsupported("Batch normalisation by the batch's own statistics mixes rows.")
    if _rows_or_none(call, x, running_mean, running_var, weight, bias) is None:
        raise MixedUnsupported("Batch normalisation of what has no rows is not supported.")
    mean, variance = _channels(call, running_mean, x), _channels(call, running_var, x)
    normal = (x - mean) * torch.rsqrt(variance + eps)
    return _affine(call, normal, weight, bias, _channels)


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
    return _affine(call, normal, weight, bias, _channels)


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
    """Convolve; for a factored weight, convolve with `S` as the kernel, then apply `G_t` at every position."""
    per_row = _rows_or_none(call, x, weight, bias)
    if per_row is None:
        return per_task(call, func, (x, weight, bias, stride, padding, dilation, groups), {})
    where, source = (stride, padding, dilation, groups), _factored(weight)
    if not isinstance(weight, TaskTensor):
        out = func(x, weight, None, *where)
    elif source is None or groups != 1 or not source.layout.is_factored or source.shared_first:
        out = _segmentwise(call, lambda rows, kernel: func(rows, kernel, None, *where), x, per_row, weight)
    else:
        out = scaled(call, func(x, source.merged, None, *where), source)
        parts, pairs = call.slices(per_row), source.pairs(call, x.device)

        def inner(rows: Tensor, factor: Tensor) -> Tensor:
            return func(rows.float(), factor.view(-1, *source.merged.shape[1:]), None, *where).flatten(2)

        with full_precision(x.device):
            if pairs is not None:
                products = [own @ inner(x[part], rows) for part, (own, rows) in zip(parts, pairs, strict=True)]
            else:
                generated, shared = source.factors(call, x.device)
                assert shared is not None  # of every matrix
                common = inner(x, shared)
                products = [factor @ common[part] for part, factor in zip(parts, generated, strict=True)]
            offset = torch.cat(products)
        out = (out + offset.view(out.shape)).to(out.dtype)
    return out if bias is None else out + _channels(call, bias, out)


def multi_head_attention(
    call: MixedCall,
    func: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
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
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute torch's attention module with its projections row by row; inputs are (length, rows, width)."""
    inputs = (query, key, value)
    unusual = static_k is not None or static_v is not None or (bias_k is None) != (bias_v is None)
    without_rows = any(x.ndim != 3 or isinstance(x, TaskTensor) for x in inputs)
    if unusual or without_rows or (training and dropout_p):
        raise MixedUnsupported("This form of torch's multi-head attention has no row-by-row form.")
    _check_attention(inputs, embed_dim_to_check, num_heads, key_padding_mask, attn_mask, is_causal)
    if use_separate_proj_weight:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None  # as in torch
        heads = _separate_projections(inputs, (q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias)
    else:
        assert in_proj_weight is not None  # as in torch
        heads = _packed_projections(inputs, in_proj_weight, in_proj_bias)
    rows = query.shape[1]
    # `expand` on a `TaskTensor` lets the call decide whether this axis is the rows; nothing here can tell.
    extra = [None if bias is None else bias.expand(rows, -1, -1) for bias in (bias_k, bias_v)]
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "add_zero_attn": add_zero_attn,
        "need_weights": need_weights,
        "average_attn_weights": average_attn_weights,
        "is_causal": is_causal,
    }
    if not any(isinstance(tensor, TaskTensor) for tensor in (*heads, *extra, attn_mask, key_padding_mask)):
        attended, *weights = _attend(heads, extra, attn_mask, key_padding_mask, **options)
    elif all(isinstance(head, TaskTensor) for head in heads):
        attended, *weights = per_task(call, _attend, (heads, extra, attn_mask, key_padding_mask), options)
    else:
        raise MixedUnsupported("Multi-head attention of rows to what has one value per task has no row-by-row form.")
    return F.linear(attended, out_proj_weight, out_proj_bias).transpose(0, 1), weights[0] if need_weights else None


def _check_attention(
    inputs: tuple[Tensor, Tensor, Tensor],
    width: int,
    num_heads: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Refuse what torch refuses: broadcasting would silently accept some of it here."""
    query, key, value = inputs
    rows, target, source = query.shape[1], len(query), len(key)
    fits = query.shape[2] == width and key.shape[1] == rows and value.shape[:2] == key.shape[:2]
    fits = fits and not (is_causal and attn_mask is None)
    fits = fits and (key_padding_mask is None or key_padding_mask.shape == (rows, source))
    shapes = ((target, source), (rows * num_heads, target, source))
    fits = fits and (attn_mask is None or tuple(attn_mask.shape) in shapes)
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    if not fits or not all(mask.dtype == torch.bool or mask.is_floating_point() for mask in masks):
        raise MixedUnsupported("torch's multi-head attention does not accept inputs or masks of these sizes or types.")


def _packed_projections(inputs: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Project queries, keys and values, (rows, length, width), with one matrix.

    The whole matrix is applied to each distinct input, because a slice of it would have to be recovered.
    """
    distinct = {id(x): x for x in inputs}
    projected = {name: F.linear(x.transpose(0, 1), weight, bias).chunk(3, -1) for name, x in distinct.items()}
    return [projected[id(x)][part] for part, x in enumerate(inputs)]


def _separate_projections(inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], bias: Tensor | None) -> list[Tensor]:
    """Project queries, keys and values, (rows, length, width), with a matrix each."""
    biases = [None] * 3 if bias is None else bias.chunk(3)
    parts = zip(inputs, weights, biases, strict=True)
    return [F.linear(x.transpose(0, 1), weight, own) for x, weight, own in parts]


def _attend(
    heads: list[Tensor],
    extra: list[Tensor | None],
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    num_heads: int,
    add_zero_attn: bool,
    need_weights: bool,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    """Attend to projected inputs, (rows, length, width), as torch does; return the weights too if they are needed."""
    (query, key, value), (bias_k, bias_v) = heads, extra
    # As in torch: `is_causal` replaces the mask only where nothing else needs the mask.
    is_causal = is_causal and key_padding_mask is None and not need_weights
    key, value = _lengthened(key, bias_k, add_zero_attn), _lengthened(value, bias_v, add_zero_attn)
    mask = _joint_mask(None if is_causal else attn_mask, key_padding_mask, num_heads, key.shape[1], query.dtype)
    query, key, value = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (query, key, value))
    if not need_weights:
        attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        return (attended.transpose(1, 2).flatten(2),)
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    attended = (weights @ value).transpose(1, 2).flatten(2)
    return attended, weights.mean(1) if average_attn_weights else weights


def _lengthened(x: Tensor, bias: Tensor | None, add_zero_attn: bool) -> Tensor:
    """Append a learned position, and one of zeros, to projected keys or values."""
    x = x if bias is None else torch.cat([x, bias], 1)
    return F.pad(x, (0, 0, 0, 1)) if add_zero_attn else x


def _joint_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, length: int, dtype: torch.dtype
) -> Tensor | None:
    """Add both masks, (rows or 1, heads or 1, queries or 1, keys); keep positions appended to the keys visible."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, num_heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None])
    # True hides a position here, and shows it in a mask of `scaled_dot_product_attention`: add numbers instead.
    masks = [
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    padded = [F.pad(mask, (0, length - mask.shape[-1])) for mask in masks]
    return sum(padded[1:], padded[0]) if padded else None


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
