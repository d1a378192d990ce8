"""Dealing independent pieces of work out to processes, so that the result does not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def deal(costs: Mapping[Key, float], processes: int) -> dict[Key, int]:
    """Give each piece to the process with the least work so far, largest pieces first."""
    loads = [0.0] * processes
    owners = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owner = loads.index(min(loads))
        owners[key] = owner
        loads[owner] += costs[key]
    return owners


def run_dealt(
    costs: Mapping[Key, float],
    work: Callable[[Key], Value],
    accelerator: Accelerator | None,
    description: str,
    progress: bool = True,
) -> dict[Key, Value]:
    """`{key: work(key)}` on every process; each key is worked on by one of them.

    Without an accelerator (or with one process) this is a plain loop. All processes must call it together.
    """
    count = 1 if accelerator is None else accelerator.num_processes
    rank = 0 if accelerator is None else accelerator.process_index
    owners = deal(costs, count)
    mine = [key for key in costs if owners[key] == rank]
    bar = tqdm(mine, desc=description, unit="tensor", disable=not progress or rank != 0)
    done = {key: work(key) for key in bar}
    if count == 1:
        return done
    results = {}
    for key in costs:
        results[key] = broadcast_object_list([done.get(key)], from_process=owners[key])[0]
    return results
