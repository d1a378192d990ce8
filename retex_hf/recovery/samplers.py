"""Distributions over task weights for the mixtures of soft training (the paper compares three)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sample_weights(
    method: str | dict[str, Any] | None, count: int, num_tasks: int, generator: torch.Generator
) -> Tensor:
    """Draw mixing weights (count, T): one-hot and uniform over tasks for None, else by `RetexConfig.soft_training`.

    >>> generator = torch.Generator().manual_seed(0)
    >>> sample_weights({"method": "dirichlet", "alpha": 1.0}, 1000, 4, generator).sum(1).allclose(torch.ones(1000))
    True
    """
    options: dict[str, Any] = dict(method) if isinstance(method, dict) else {"method": method}
    if options["method"] is None:
        return torch.nn.functional.one_hot(torch.randint(num_tasks, (count,), generator=generator), num_tasks).float()
    if options["method"] == "dirichlet":
        # A Dirichlet draw is a normalised vector of Gamma draws.
        alpha = torch.full((count, num_tasks), float(options.get("alpha", 1.0)), dtype=torch.float64)
        draws = torch._standard_gamma(alpha, generator=generator).clamp(min=torch.finfo(torch.float64).tiny)
        return (draws / draws.sum(1, keepdim=True)).float()
    draw = torch.rand if options["method"] == "uniform_softmax" else torch.randn
    return draw(count, num_tasks, generator=generator).softmax(1)
