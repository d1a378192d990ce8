"""Rows of inputs, each a batch of one, so that it is known which values belong to a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trust.small_models import FIRST_WORD

LENGTH = 6
TASKS = 3

Maker = Callable[["Draw"], Tensor]


@dataclass
class Draw:
    """Draws the numbers of one row; those of different tasks come from different ranges."""

    task: int
    generator: torch.Generator
    vocab: int = 64

    def words(self, *shape: int, vocab: int | None = None) -> Tensor:
        vocab = vocab or self.vocab
        low = FIRST_WORD if vocab > 2 * FIRST_WORD else min(3, vocab - 1)
        width = max(1, (vocab - low) // TASKS)
        start = low + self.task * width if vocab - low >= TASKS else low
        return torch.randint(start, min(vocab, start + width), (1, *shape), generator=self.generator)

    def noise(self, *shape: int, axis: bool = True) -> Tensor:
        """Return noise on a wave; without `axis`, the entries of a row lie along the first axis (patches)."""
        values = torch.randn(*((1, *shape) if axis else shape), generator=self.generator)
        wave = torch.linspace(0, 3.1 * (self.task + 1), values.shape[-1]).sin()
        return values * 0.7 + wave * 1.5

    def count(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (1, *shape), generator=self.generator)


@dataclass(frozen=True)
class Recipe:
    """How to make a row: a maker for each input.

    A row has one of each `per_item` input for each of its images or sounds, which `places` tokens (`placeholder`)
    represent in its text. `items` is their maximum number: rows with fewer have words instead. Other texts have
    different lengths. `shared` inputs serve all rows.
    """

    makers: Mapping[str, Maker]
    vocab: int
    placeholder: int | None = None
    places: int = 0
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    per_item: frozenset[str] = frozenset()
    items: int = 1

    @property
    def is_rich(self) -> bool:
        """Return whether there is more than text."""
        return any(value.is_floating_point() for value in self.row(0, 0).values())

    def row(self, task: int, seed: int, items: int | None = None) -> dict[str, Tensor]:
        """Make one row of a task, with `items` images."""
        items = self.items if items is None else items
        draw = Draw(task, torch.Generator().manual_seed(seed), self.vocab)
        made: dict[str, Tensor] = {}
        for name, make in self.makers.items():
            if name not in self.per_item:
                made[name] = make(draw)
            elif items:
                made[name] = torch.cat([make(draw) for _ in range(items)])
        return made | (self._with_places(made, items) if self.places else self._padded(made, seed))

    def _padded(self, made: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Shorten the text of every third row by one word."""
        ids, mask = made.get("input_ids"), made.get("attention_mask")
        if ids is None or mask is None or mask.shape != ids.shape or seed % 3 != 1 or len(made) > 2:
            return {}
        kept = torch.arange(ids.shape[-1]) < ids.shape[-1] - 1
        return {"input_ids": ids * kept, "attention_mask": mask * kept}

    def _with_places(self, made: Mapping[str, Tensor], items: int) -> dict[str, Tensor]:
        """Return the text with placeholders, and the inputs that accompany it."""
        ids = made["input_ids"]
        first, rest = ids[:, :1], ids[:, 1:]
        image = torch.full((1, self.places), self.placeholder)
        words = first.expand(1, self.places)
        slots = [image if slot < items else words for slot in range(self.items)]
        ids = torch.cat([*(part for slot in slots for part in (first, slot)), rest], 1)
        kinds = (ids == self.placeholder).long()
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        texts |= dict.fromkeys(("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"), kinds)
        return {name: value for name, value in texts.items() if name in made}


def collate(rows: list[dict[str, Tensor]], shared: Mapping[str, Tensor]) -> dict[str, Any]:
    """Join rows into one batch."""
    names = dict.fromkeys(name for row in rows for name in row)
    batch: dict[str, Any] = {name: torch.cat([row[name] for row in rows if name in row]) for name in names}
    return {**batch, **shared}
