"""The mapping from entries of an input to the rows of a batch.

Most inputs have the rows along their first axis. Images, videos and sounds of models that mix them with text may
differ: a row has as many of them as its text has placeholder tokens, in the order of these tokens, either whole
(`pixel_values` of one image each) or packed (patches of all images, with their grids). Where more than one reading is
possible, `proof` determines which is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError

# Kinds of items with placeholder tokens in the text: the names of their inputs, and the configuration keys of the
# tokens.
ITEMS = {
    "image": ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask", "spatial_shapes",
              "image_position_ids", "image_patches", "pixel_position_ids", "patch_attention_mask", "num_tiles"),
    "video": ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_sizes"),
    "audio": ("input_features", "feature_attention_mask", "input_features_mask", "audio_attention_mask", "input_values",
              "audio_feature_lens", "audio_sizes", "audio_embed_sizes", "padding_mask"),
}  # fmt: skip
ITEM_INPUTS = frozenset(name for names in ITEMS.values() for name in names)
PLACEHOLDERS = ("{}_token_id", "{}_token_index", "{}_token_index_id")
# Inputs that hold the sizes of items: batches in which these differ are not alike.
SIZES = re.compile(r"(_sizes|grid_thw|spatial_shapes|num_tiles|feature_lens|second_per_grid_ts)$")
# Inputs that mark several sequences packed into one row, which cannot be split.
PACKED = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


@dataclass(frozen=True)
class Owned:
    """An input whose entries along an axis belong to rows; `owner` is the row of each, None if entry i belongs to row
    i.

    `present` tells which rows have such an input, where the others have padding.
    """

    axis: int
    owner: Tensor | None = None
    present: Tensor | None = None

    def take(self, value: Tensor, rows: Tensor) -> Tensor:
        """Return the entries of some rows, in the order of these rows."""
        index = rows if self.owner is None else entries_of(self.owner, rows)
        return value.index_select(self.axis, index.to(value.device))

    def is_empty(self, rows: Tensor) -> bool:
        """Return whether none of these rows has any entry."""
        if self.present is not None:
            return not bool(self.present[rows].any())
        return self.owner is not None and not bool(torch.isin(self.owner, rows).any())


def entries_of(owner: Tensor, rows: Tensor) -> Tensor:
    """Return the positions of the entries of some rows, in the order of these rows."""
    return torch.cat([(owner == row).nonzero().flatten() for row in rows.tolist()])


Reading = Mapping[str, Owned]


def readings(model: nn.Module, kwargs: Mapping[str, Any], rows: int, whole: frozenset[str]) -> dict[str, Reading]:
    """Return all readings of a batch by name, the likelier first. Inputs in none of them are the same for all rows."""
    for name in PACKED:
        if kwargs.get(name) is not None:
            raise InputError(f"{name!r} packs several sequences into one row: give a row for each, or name one task.")
    tensors = {
        name: value
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and value.ndim > 0 and name not in whole
    }
    by_rows = dict(_by_rows(tensors, rows))
    by_items = by_rows | _by_items(model, kwargs, tensors, rows)
    by_rows |= _where_present(model, kwargs, by_rows)
    found: dict[str, Reading] = {
        name: reading
        for name, reading in {"items": by_items, "rows": by_rows}.items()
        if all(_covers(tensors[key], reading.get(key), rows) for key in tensors)
    } or _refuse(tensors, by_items, rows)
    if len(found) == 2 and _same(by_items, by_rows, rows):
        return {"rows": by_rows}  # with one entry per row, both readings agree
    return found


def pattern(kwargs: Mapping[str, Any], given: Mapping[str, Reading]) -> tuple[Any, ...] | None:
    """Return what two batches must have in common, besides names and axes, to be split in the same way; None where
    every row has one entry of everything, all alike."""
    owners = {
        (name, tuple(owned.owner.tolist()))
        for reading in given.values()
        for name, owned in reading.items()
        if owned.owner is not None
    }
    sizes = {
        name: tuple(map(tuple, value.tolist()))
        for name, value in kwargs.items()
        if SIZES.search(name) and isinstance(value, Tensor) and value.ndim == 2
    }
    uneven = any(len(set(rows)) > 1 for rows in sizes.values())
    return (frozenset(owners), frozenset(sizes.items())) if owners or uneven or len(given) > 1 else None


def _same(first: Reading, second: Reading, rows: int) -> bool:
    """Return whether two readings of a batch give every row the same entries."""
    plain = torch.arange(rows)

    def owner(reading: Reading, name: str) -> tuple[int, Tensor] | None:
        owned = reading.get(name)
        return None if owned is None else (owned.axis, plain if owned.owner is None else owned.owner)

    for name in {*first, *second}:
        one, other = owner(first, name), owner(second, name)
        if one is None or other is None or one[0] != other[0] or not torch.equal(one[1], other[1]):
            return False
    return True


def _where_present(model: nn.Module, kwargs: Mapping[str, Any], by_rows: Reading) -> dict[str, Owned]:
    """Return inputs that hold padding in rows without placeholder tokens for them."""
    ids = kwargs.get("input_ids")
    found: dict[str, Owned] = {}
    for kind, names in ITEMS.items():
        token = _placeholder(model, kind)
        given = [name for name in names if name in by_rows]
        if token is None or not given or not isinstance(ids, Tensor) or ids.ndim != 2:
            continue
        present = (ids.cpu() == token).any(1)
        if present.any() and not present.all():
            found |= {name: Owned(by_rows[name].axis, present=present) for name in given}
    return found


def _covers(value: Tensor, owned: Owned | None, rows: int) -> bool:
    if owned is None:
        return value.shape[0] == 1
    return value.shape[owned.axis] == (rows if owned.owner is None else len(owned.owner))


def _refuse(tensors: Mapping[str, Tensor], reading: Reading, rows: int) -> dict[str, Reading]:
    name = next(key for key in tensors if not _covers(tensors[key], reading.get(key), rows))
    raise InputError(
        f"{name!r} has {tensors[name].shape[0]} entries in a batch of {rows} rows, and nothing says which row each "
        "belongs to: give one per row, or name one task."
    )


def _by_rows(tensors: Mapping[str, Tensor], rows: int) -> Iterator[tuple[str, Owned]]:
    for name, value in tensors.items():
        if "position_ids" in name and value.ndim == 3 and value.shape[1] == rows:
            yield name, Owned(1)  # the first axis is time, height and width
        elif value.shape[0] == rows:
            yield name, Owned(0)


def _by_items(
    model: nn.Module, kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor], rows: int
) -> dict[str, Owned]:
    ids = kwargs.get("input_ids")
    if ids is None and kwargs.get("inputs_embeds") is None:
        return _by_grid(tensors)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != rows:
        return {}
    found: dict[str, Owned] = {}
    for kind, names in ITEMS.items():
        given = {name: tensors[name] for name in names if name in tensors}
        token = _placeholder(model, kind)
        if not given or token is None:
            continue
        grid = given.get(f"{kind}_grid_thw")
        is_place = ids.cpu() == token
        owner = _owner_by_grid(grid, is_place) if grid is not None else _owner_by_places(given, is_place)
        if owner is None:
            continue
        for name, value in given.items():
            if len(value) == len(owner):
                found[name] = Owned(0, owner)
            elif grid is not None and len(value) == int(grid.prod(1).sum()):
                found[name] = Owned(0, owner.repeat_interleave(grid.cpu().prod(1)))
    return found


def grid_of(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of the input with the number of patches per image, where patches are packed and every image is a
    row."""
    if any(tensors.get(name) is not None for name in ("input_ids", "inputs_embeds")):
        return None
    names = [name for name, value in tensors.items() if name.endswith("grid_thw") and isinstance(value, Tensor)]
    return names[0] if len(names) == 1 and tensors[names[0]].ndim == 2 else None


def _by_grid(tensors: Mapping[str, Tensor]) -> dict[str, Owned]:
    name = grid_of(tensors)
    if name is None:
        return {}
    patches = tensors[name].cpu().prod(1)
    owner = torch.arange(len(patches)).repeat_interleave(patches)
    packed = {key: Owned(0, owner) for key, value in tensors.items() if len(value) == len(owner)}
    return packed | {name: Owned(0)}


def _placeholder(model: nn.Module, kind: str) -> int | None:
    """Return the placeholder token of an image, a video or a sound in a text, from the model's configuration or a
    nested one (ColPali contains that of a whole vision-language model)."""
    waiting = [getattr(model, "config", None)]
    while waiting:
        config = waiting.pop(0)
        for pattern in PLACEHOLDERS:
            value = getattr(config, pattern.format(kind), None)
            if isinstance(value, int):
                return value
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return None


def _owner_by_grid(grid: Tensor, is_place: Tensor) -> Tensor | None:
    """Return the row of each item, where its grid tells how many placeholders it takes: its patches, divided by how
    many are merged into one."""
    patches, places = grid.cpu().prod(1), is_place.sum(1)
    total = int(places.sum())
    if not total or int(patches.sum()) % total:
        return None
    merged = int(patches.sum()) // total
    if (patches % merged).any():
        return None
    return _dealt(patches // merged, places)


def _dealt(sizes: Tensor, places: Tensor) -> Tensor | None:
    """Assign items of these sizes to rows with so many placeholders, in order; None where an item would span two
    rows."""
    ends, last = sizes.cumsum(0), places.cumsum(0)
    if not len(ends) or int(ends[-1]) != int(last[-1]):
        return None
    owner = torch.searchsorted(last, ends)
    begins = torch.searchsorted(last, ends - sizes, right=True)
    return owner if torch.equal(owner, begins) else None


def _owner_by_places(given: Mapping[str, Tensor], is_place: Tensor) -> Tensor | None:
    """Return the row of each item, where all take equally many placeholders; else where each is one unbroken run of
    them."""
    items, places = len(next(iter(given.values()))), is_place.sum(1)
    total = int(places.sum())
    if total and total % items == 0 and not (places % (total // items)).any():
        return torch.arange(len(places)).repeat_interleave(places // (total // items))
    before = torch.nn.functional.pad(is_place, (1, 0))[:, :-1]
    runs = (is_place & ~before).sum(1)
    return torch.arange(len(runs)).repeat_interleave(runs) if int(runs.sum()) == items else None
