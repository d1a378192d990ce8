"""The modules of a model from which features can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ..backends import library_of
from ..config import RetexConfig
from ..errors import ConfigError

NUMBER = re.compile(r"[0-9]+")


def feature_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks that features are read from first: the elements of the largest outermost block
    list where the model's inputs become features."""
    return block_lists(model)[0]


def block_lists(model: nn.Module) -> list[list[str]]:
    """Return the block names of all block lists: first those where the model's inputs become features, the largest
    first, then those elsewhere."""
    root = library_of(model).feature_root(model)
    prefix = next(name for name, module in model.named_modules() if module is root)
    found = [[f"{prefix}.{block}" if prefix else block for block in blocks] for blocks in _lists_of(root)]
    return found + [blocks for blocks in _lists_of(model) if blocks not in found] if prefix else found


def trunk_blocks(model: nn.Module, layer: str) -> list[str]:
    """Return the blocks up to a feature layer, and it; the layer alone where it is in no list of blocks."""
    return next((blocks[: blocks.index(layer) + 1] for blocks in block_lists(model) if layer in blocks), [layer])


def _lists_of(root: nn.Module) -> list[list[str]]:
    lists: list[tuple[int, list[str]]] = []
    taken: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(parent + ".") for parent in taken):
            continue
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            taken.append(name)
            lists.append((_size(module), [f"{name}.{child}" for child in _called(module)]))
    # Stages that are plain attributes (OpenCLIP's ResNet: layer1 ... layer4) outweigh any one list inside the root.
    # Attributes of other names are not stages: a sequence beside a stem may be run element by element (FastViT).
    numbered: dict[str, list[str]] = {}
    for name, module in root.named_children():
        if isinstance(module, nn.Sequential) and NUMBER.search(name):
            numbered.setdefault(NUMBER.sub("", name), []).append(name)
    if not any(isinstance(module, nn.ModuleList) for module in root.children()):
        several = [stages for stages in numbered.values() if len(stages) > 1]
        lists += [(sum(_size(root.get_submodule(stage)) for stage in stages), stages) for stages in several]
    # The fallback where no list is usable, or there is none.
    lists.append((-1, [name for name, module in root.named_children() if any(True for _ in module.parameters())]))
    return [blocks for _, blocks in sorted(lists, reverse=True)]


def _called(blocks: nn.Module) -> Iterator[str]:
    """Yield the names of the elements of a list; descend into nested lists, because a list itself is never called."""
    for name, child in blocks.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{name}.{below}" for below in _called(child))
        else:
            yield name


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def candidate_layers(model: nn.Module, config: RetexConfig) -> Iterator[list[str]]:
    """Yield the module names that `feature_layer` stands for: one, or for "auto" the blocks of one list after the
    other."""
    layer = config.feature_layer
    if layer == "auto":
        yield from block_lists(model)
    elif isinstance(layer, str):
        if layer not in dict(model.named_modules()):
            raise ConfigError(
                f"RetexConfig.feature_layer: the model has no module {layer!r}; its blocks are {feature_blocks(model)}."
            )
        yield [layer]
    else:
        blocks = feature_blocks(model)
        if not -len(blocks) <= layer < len(blocks):
            raise ConfigError(f"RetexConfig.feature_layer: index {layer} is outside the model's {len(blocks)} blocks.")
        yield [blocks[layer]]
