"""Search for a model's MLPs and attention blocks by shape and class, for methods that treat them separately."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..checkpoints import take_inventory
from ..config import matches
from ..errors import ConfigError

ATTENTION = ("attention", "attn")
NORM = "norm"

Linear = nn.Linear | Conv1D


def linear_layers(model: nn.Module, body: Collection[str]) -> dict[str, Linear]:
    """Return all linear layers of a body, in the model's order. `body` names the tensors of the body."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and f"{name}.weight" in body
    }


def find_mlps(model: nn.Module, body: Collection[str], patterns: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Return the linear layers of every MLP: adjacent ones that expand (one, or two if gated) and contract.

    Args:
        model: Model to search.
        body: Names of the tensors to consider; heads are not among them.
        patterns: Name patterns of the layers of an MLP, in their order, where shapes do not identify them.

    >>> from torch.nn import GELU, Linear, Sequential
    >>> from retex_hf.baselines.blocks import find_mlps
    >>> model = Sequential(Linear(4, 4), Linear(4, 8), GELU(), Linear(8, 4))
    >>> find_mlps(model, model.state_dict())
    [('1', '3')]
    """
    layers = linear_layers(model, body)
    names, mlps, start = list(layers), [], 0
    while start < len(names):
        length = _matching(names[start:], patterns) if patterns else _expanding(list(layers.values())[start:])
        if length:
            mlps.append(tuple(names[start : start + length]))
        start += max(length, 1)
    return mlps


def require_mlps(
    model: nn.Module, body: Collection[str], method: str, patterns: Sequence[str] | None
) -> list[tuple[str, ...]]:
    """Return the result of `find_mlps`; refuse a model without MLPs."""
    mlps = find_mlps(model, body, patterns)
    if not mlps:
        kind = type(model).__name__
        raise ConfigError(
            f"{method} mixes the MLPs of a model, but no neighbouring linear layers of {kind} "
            + (f"are called {list(patterns)}." if patterns else "expand and contract: name their layers with mlps=.")
        )
    return mlps


def find_attention(
    model: nn.Module, body: Collection[str], mlps: Collection[Sequence[str]], patterns: Sequence[str] | None = None
) -> list[str]:
    """Return the names of the attention blocks.

    These are the outermost modules whose class is named so (or that match a pattern), that hold matrices of the body
    and no MLP.
    """
    layers = [layer for mlp in mlps for layer in mlp]
    found: list[str] = []
    for name, module in model.named_modules():
        called = matches(name, patterns) if patterns is not None else _is_attention(module)
        inside = any(name.startswith(f"{block}.") for block in found)
        if not name or not called or inside or any(layer.startswith(f"{name}.") for layer in layers):
            continue
        if any(f"{name}.{key}" in body and tensor.ndim > 1 for key, tensor in module.state_dict().items()):
            found.append(name)
    return found


def block_tensors(modules: Sequence[str], body: Collection[str]) -> list[str]:
    """Return the names of the body's tensors in some modules."""
    return [name for name in body if name.startswith(tuple(f"{module}." for module in modules))]


def norms_and_embeddings(model: nn.Module, body: Collection[str]) -> list[str]:
    """Return the names of the body's normalisation tensors and embeddings (of words, positions, classes)."""
    modules = tuple(f"{name}." for name, module in model.named_modules() if _is_norm_or_table(module))
    return [name for name in body if name.startswith(modules) or _is_embedding(name)]


def lookup_table(model: nn.Module, body: Collection[str]) -> str | None:
    """Return the name of the word embedding table if only look-ups read it (a tied table is also used as a matrix)."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    aliases = take_inventory(model).aliases
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == words:
            weight = f"{name}.weight"
            return weight if weight in body and len(aliases[weight]) == 1 else None
    return None


def layer_size(layer: Linear) -> tuple[int, int]:
    """Return the input and output width of a linear layer."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _expanding(layers: Sequence[Linear]) -> int:
    """Return how many of the first layers form one MLP; 0 where none begins here."""
    narrow, wide = layer_size(layers[0])
    ups = 1
    while ups < len(layers) and layer_size(layers[ups]) == (narrow, wide):
        ups += 1
    closes = ups < len(layers) and layer_size(layers[ups]) == (wide, narrow)
    return ups + 1 if wide > narrow and closes else 0


def _matching(names: Sequence[str], patterns: Sequence[str]) -> int:
    pairs = zip(names, patterns, strict=False)
    fits = len(names) >= len(patterns) and all(matches(name, [pattern]) for name, pattern in pairs)
    return len(patterns) if fits else 0


def _is_attention(module: nn.Module) -> bool:
    return any(word in type(module).__name__.lower() for word in ATTENTION)


def _is_embedding(name: str) -> bool:
    """Return whether a bare parameter is named as an embedding (`pos_embed`, `class_embedding`, `cls_token`)."""
    own = name.rpartition(".")[2]
    return "embed" in own or own.endswith("token")


def _is_norm_or_table(module: nn.Module) -> bool:
    leaf = next(module.children(), None) is None
    return isinstance(module, nn.Embedding) or (leaf and NORM in type(module).__name__.lower())
