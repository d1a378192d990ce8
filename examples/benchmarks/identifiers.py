"""Ways to identify tasks by their features, as functions of tensors: references (N, d) per task, then rows (B, d).

The paper's residual to a task's subspace is compared with two references on the same inputs: the nearest mean, which
uses less of them, and logistic regression, which is trained to separate tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from retex_hf.routing import Signatures

Identify = Callable[[Tensor], Tensor]
"""Maps rows of features (B, d) to task numbers (B,)."""


def by_residual(references: Sequence[Tensor], rank: int | float) -> Identify:
    """Choose the task whose affine subspace of dimension `rank` (or that ratio of `min(N, d)`) is nearest."""
    signatures = Signatures.fit(list(references), rank, "")
    return lambda features: signatures.residuals(features).argmin(1)


def by_mean(references: Sequence[Tensor]) -> Identify:
    """Choose the task whose mean is nearest.

    >>> import torch
    >>> by_mean([torch.zeros(4, 2), torch.ones(4, 2)])(torch.tensor([[0.9, 0.8]])).tolist()
    [1]
    """
    means = torch.stack([features.mean(0) for features in references])
    return lambda features: torch.cdist(features, means).argmin(1)


def by_regression(references: Sequence[Tensor], penalty: float = 1e-2) -> Identify:
    """Choose the likeliest task under multinomial logistic regression."""
    labels = torch.cat([torch.full((len(features),), task) for task, features in enumerate(references)])
    probe = fit_linear(torch.cat(list(references)), labels, len(references), penalty)
    return lambda features: probe(features).argmax(1)


@torch.inference_mode(False)
def fit_linear(features: Tensor, labels: Tensor, classes: int, penalty: float = 1e-2) -> Callable[[Tensor], Tensor]:
    """Fit multinomial logistic regression on standardised features; return the function that scores rows.

    Minimises mean cross-entropy plus `penalty / 2` times the squared weights, which is convex: L-BFGS from zero finds
    the one minimum, without a seed.
    """
    features = features.detach().clone().float()
    mean, scale = features.mean(0), features.std(0, unbiased=False).clamp(min=1e-6)
    scaled = (features - mean) / scale
    with torch.enable_grad():
        weight = torch.zeros(classes, scaled.shape[1], requires_grad=True)
        bias = torch.zeros(classes, requires_grad=True)
        optimiser = torch.optim.LBFGS([weight, bias], max_iter=200, history_size=20, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = nn.functional.cross_entropy(scaled @ weight.T + bias, labels) + penalty / 2 * weight.square().sum()
            value.backward()
            return value

        optimiser.step(loss)
    weight, bias = weight.detach(), bias.detach()
    return lambda rows: (rows.float() - mean) / scale @ weight.T + bias


def confusion(found: Sequence[Tensor], tasks: int) -> Tensor:
    """Return the shares (T, T) of each task's rows that are identified as each task.

    >>> import torch
    >>> confusion([torch.tensor([0, 1]), torch.tensor([1, 1])], 2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    return torch.stack([torch.bincount(rows, minlength=tasks) / len(rows) for rows in found])


def identified(identify: Identify, features: Sequence[Tensor]) -> float:
    """Return the mean over tasks of the share of rows identified as their own task."""
    return confusion([identify(rows) for rows in features], len(features)).diagonal().mean().item()
