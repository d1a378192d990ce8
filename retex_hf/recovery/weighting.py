"""Weights of the errors that the exact solver adds up.

The error is relative to what it is a part of: `sum_t sum_l w_tl ||D_tl - R_tl||^2` with `w_tl = 1 / (E_t (E_tl /
E_t)^alpha)`, where `E_tl` is the energy of task t's difference in parameter l and `E_t` its sum over all parameters.
With alpha = 0 every task counts the same, whatever the size of its update; towards alpha = 1 every parameter counts the
same as well. The plain sum of the paper has all weights equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Weight of a parameter's own energy, between none (0) and all (1).
ALPHA = 0.5


def task_weights(energies: Mapping[str, Sequence[float]], weighting: str | None) -> dict[str, list[float]]:
    """Return the weight of every task's error in every parameter; `energies` are those of the differences."""
    if weighting == "plain":
        return {name: [1.0] * len(own) for name, own in energies.items()}
    totals = [sum(column) for column in zip(*energies.values(), strict=True)]
    return {
        name: [
            0.0 if energy == 0 else 1 / (total * (energy / total) ** ALPHA)
            for energy, total in zip(own, totals, strict=True)
        ]
        for name, own in energies.items()
    }
