"""Distribution of independent pieces of work to processes; the result does not depend on their number."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..checkpoints.tensor_store import MemoryStore, Store
from ..errors import shorten
from ..utils.devices import enough_memory
from ..utils.progress import track
from ..utils.threads import in_threads

MOST_AT_ONCE = 4

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def deal(costs: Mapping[Key, float], processes: int) -> dict[Key, int]:
    """Assign each piece to the process with the least work so far, largest pieces first."""
    loads = [0.0] * processes
    owners = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owner = loads.index(min(loads))
        owners[key] = owner
        loads[owner] += costs[key]
    return owners


@dataclass(frozen=True)
class BuildContext:
    """The circumstances of a build, the same for all of its stages.

    Args:
        accelerator: Accelerator whose processes share the work; None for one process.
        progress: Show progress bars.
        store: Where results are kept. It records finished work; what is known from an interrupted build is not done
            again.
        at_once: How many parameters each process solves at the same time.
    """

    accelerator: Accelerator | None = None
    progress: bool = True
    store: Store = field(default_factory=MemoryStore)
    at_once: int = 1

    @property
    def is_main_process(self) -> bool:
        """Return whether this is the process that writes and reports."""
        return self.accelerator is None or self.accelerator.is_main_process


def solved_at_once(device: torch.device) -> int:
    """Return how many parameters to solve at the same time: several on a CPU of several cores.

    One decomposition hardly gains from a second core. Memory grows with their number, so there are few.
    """
    return min(MOST_AT_ONCE, torch.get_num_threads()) if device.type == "cpu" else 1


def run_dealt(
    context: BuildContext,
    costs: Mapping[Key, float],
    work: Callable[[Key], Value],
    title: str,
    written: Callable[[Key], Sequence[Tensor]] | None = None,
    at_once: int = 1,
) -> dict[Key, Value]:
    """Return `{key: work(key)}` on every process; one process works on each key.

    With one process this is a plain loop. All processes must call it together.

    Args:
        context: Who shares the work, and where finished work is recorded.
        costs: The keys, and the cost of each.
        work: Function that returns a value that JSON can hold. It may also fill tensors.
        title: Name of the progress bar, and of this stage in the store.
        written: Function that returns the tensors that `work(key)` fills. They are sent to the other processes, unless
            all share those of the store.
        at_once: How many keys this process works on at the same time, in threads.
    """
    accelerator, store = context.accelerator, context.store
    known = store.finished(title)
    names = {key: json.dumps(key) for key in costs}
    todo = {key: cost for key, cost in costs.items() if names[key] not in known}
    count = 1 if accelerator is None else accelerator.num_processes
    rank = 0 if accelerator is None else accelerator.process_index
    owners = deal(todo, count)
    mine = [key for key in todo if owners[key] == rank]
    done = {}

    def guarded(key: Key) -> Value:
        names: Any = [key] if isinstance(key, str) else key
        with enough_memory(f"work on {shorten(names)}"):
            return work(key)

    found = in_threads(guarded, mine, at_once)
    shown = context.progress and rank == 0
    for key, value in track(found, title=title, unit="tensor", total=len(mine), progress=shown):
        done[key] = value
        store.record(title, names[key], done[key])
    results = {}
    for key in costs:
        if key not in todo:
            results[key] = known[names[key]]
        elif count == 1:
            results[key] = done[key]
        else:
            tensors = [] if written is None or store.shared else list(written(key))
            piece = [done.get(key), tensors if key in done else None]
            results[key], filled = broadcast_object_list([piece], from_process=owners[key])[0]
            if key not in done:
                for tensor, other in zip(tensors, filled, strict=True):
                    tensor.data.copy_(other)
    return results
