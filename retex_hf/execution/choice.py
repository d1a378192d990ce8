"""Choice between running group by group on recovered experts and running all rows in one pass.

Both give the same outputs. One pass is refused where that cannot be shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ConfigError, RetexError
from ..rows import Splitter, numbers_per_row
from .assignment import Group
from .expert_cache import ExpertCache, is_plain, names_of
from .mixed import Call, MixedModel, MixedUnsupported, grouped_cost, mixed_cost
from .mixed.call import Certificate, Segment

logger = logging.getLogger(__name__)

EXECUTIONS = ("auto", "grouped", "mixed")
# Expected number of calls that a cached expert serves.
EXPECTED_REUSE = 16
DEFAULT_NEW_TOKENS = 20


def check_execution(execution: str) -> str:
    if execution not in EXECUTIONS:
        raise ConfigError(f"execution must be one of {EXECUTIONS}, not {execution!r}.")
    return execution


def refused(reason: object, swappable: bool) -> RetexError:
    """Return the error for a batch that has to run in one pass and cannot."""
    way_out = ' Set execution="auto" to run it group by group.' if swappable else ""
    return RetexError(f"This batch cannot run in one pass: {str(reason).rstrip('.')}.{way_out}")


@dataclass(frozen=True)
class OnePass:
    """A plan to run a batch in one pass: its rows as segments, and the result of probing this kind of call.

    `or_grouped` tells whether to fall back to running group by group if the probe missed something.
    """

    model: MixedModel
    segments: list[Segment]
    certificate: Certificate
    or_grouped: bool

    def run(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Call a method on rows sorted by segment."""
        return self.model.run(method, kwargs, self.segments, self.certificate)


@dataclass
class Chooser:
    """Chooses how one call runs.

    `expert_bytes` is the size of a recovered expert, `cached` tells whether a task's expert is in the cache, and
    `swappable` whether experts can be recovered at all (not from quantised or offloaded weights).
    """

    execution: str
    cache: ExpertCache
    cached: Callable[[Group], bool]
    expert_bytes: int
    swappable: bool
    mixed: Callable[[], MixedModel]

    def choose(
        self, method: str, kwargs: Mapping[str, Any], groups: list[Group], splitter: Splitter, size: Call
    ) -> OnePass | None:
        """Return how to run a call in one pass, or None to run it group by group."""
        if self.execution == "grouped" or (self.execution == "auto" and self._surely_grouped(groups)):
            return None
        mixed, or_grouped = self.mixed(), self.execution == "auto" and self.swappable
        try:
            if mixed.reason is not None:
                raise MixedUnsupported(mixed.reason)
            segments = mixed.segments(groups)
            certificate, work = mixed.probe(method, kwargs, segments, splitter)
        except MixedUnsupported as reason:
            if or_grouped:
                logger.info("Running group by group, because %s", reason)
                return None
            raise refused(reason, self.swappable) from None
        if or_grouped and grouped_cost(work, size) <= mixed_cost(work, size):
            return None
        return OnePass(mixed, segments, certificate, or_grouped)

    def missing(self, groups: list[Group]) -> float:
        """Return how many experts a call must recover; count those that fit the cache as shared with later calls."""
        groups = [group for group in groups if group.recovered]  # the merged body needs no recovery
        mixtures = sum(group.weights is not None for group in groups)
        pure = len(groups) - mixtures
        if pure * self.expert_bytes > self.cache.capacity:
            return len(groups)
        made = sum(group.weights is None and not self.cached(group) for group in groups)
        return mixtures + made / EXPECTED_REUSE

    def _surely_grouped(self, groups: list[Group]) -> bool:
        """Return whether the call needs one expert that stays in memory: it runs as a plain model, which is fastest."""
        one = len(groups) == 1 and groups[0].weights is None
        stays = one and (not groups[0].recovered or self.expert_bytes <= self.cache.capacity)
        return self.swappable and stays


def size_of_call(
    method: str,
    kwargs: Mapping[str, Any],
    groups: list[Group],
    missing: float,
    option: Callable[[str], Any],
    encoder: str | None,
) -> Call:
    """Return the numbers that determine the cost of a call; `encoder` names the part that `generate` runs once."""
    rows = [len(group.rows) for group in groups]
    input_size = numbers_per_row(kwargs, sum(rows))
    if method != "generate":
        return Call(rows, missing, input_size)
    steps = option("max_new_tokens")
    if steps is None:
        prompt = 0 if encoder is not None else input_size
        steps = max(1, (option("max_length") or DEFAULT_NEW_TOKENS) - prompt)
    beams = max(option("num_beams") or 1, option("num_return_sequences") or 1)
    return Call(rows, missing, input_size, steps=steps, beams=beams, once=encoder)


def find_fixed(model: nn.Module, names: list[str]) -> str | None:
    """Return a recovered parameter whose tensor cannot be replaced (quantised or offloaded), or None."""
    tensors = model.state_dict(keep_vars=True)
    aliases = (alias for name in names for alias in names_of(model, name))
    return next((name for name in aliases if name not in tensors or not is_plain(tensors[name])), None)
