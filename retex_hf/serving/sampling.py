"""Choice of the next token by the settings of each row, and by its own random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a row are chosen: the likeliest at temperature 0, else drawn.

    `top_p` keeps the likeliest tokens that together reach this probability, `top_k` so many of them.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    @property
    def draws(self) -> bool:
        """Return whether tokens are drawn."""
        return self.temperature > 0

    def generator(self) -> torch.Generator:
        """Return a row's own random numbers, which no other row of a batch takes from."""
        return torch.Generator().manual_seed(self.seed)

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """Draw a token by its scores (vocabulary,).

        >>> import torch
        >>> from retex_hf.serving.sampling import Sampling
        >>> cold = Sampling(temperature=1e-6)
        >>> cold.draw(torch.tensor([1.0, 3.0, 2.0]), cold.generator())
        1
        """
        return int(torch.multinomial(self.probabilities(scores), 1, generator=generator))

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the distribution (vocabulary,) that tokens are drawn from.

        >>> import torch
        >>> from retex_hf.serving.sampling import Sampling
        >>> scores = torch.tensor([0.5, 0.25, 0.25]).log()
        >>> Sampling(temperature=1.0, top_p=0.6).probabilities(scores).round(decimals=4).tolist()
        [0.6667, 0.3333, 0.0]
        """
        scores = scores.detach().cpu().double()
        likely = torch.softmax((scores - scores.max()) / self.temperature, dim=0)
        ordered, tokens = likely.sort(descending=True, stable=True)
        kept = ordered.cumsum(0) - ordered < self.top_p
        kept[0] = True  # also at top_p 0
        if self.top_k is not None:
            kept[self.top_k :] = False
        chosen = torch.where(kept, ordered, 0)
        return torch.zeros_like(likely).scatter(0, tokens, chosen / chosen.sum())
