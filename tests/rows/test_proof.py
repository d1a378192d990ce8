"""Every row of the trial counts: a model that serves the first row right may still give the second one another's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from retex_hf.rows import Along, Owned, Proof, prove


def proven(mix: Tensor) -> Proof:
    """What is proven of a model whose row i, in a batch of two, is computed from the rows that `mix` names."""
    batch = {"x": torch.randn(2, 3)}

    def call(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": part["x"][mix] if len(part["x"]) == 2 else part["x"]}

    return prove(call, lambda _, rows: {"x": batch["x"][rows]}, {"rows": {"x": Owned(0)}}, 2)


def test_rows_that_are_their_own_are_proven():
    assert proven(torch.tensor([0, 1])).places == {"y": Along(0, 1)}


def test_a_second_row_that_gets_what_is_the_firsts_is_refused():
    assert proven(torch.tensor([0, 0])).refused == {"y": "differs between a row alone and the same row in a batch"}


def test_a_first_row_that_gets_what_is_the_seconds_is_refused():
    assert proven(torch.tensor([1, 1])).refused == {"y": "differs between a row alone and the same row in a batch"}
