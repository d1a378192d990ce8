"""Distribution of independent pieces of work to processes; the result does not depend on their number."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..checkpoints.tensor_store import Store
from ..errors import shorten
from ..utils.devices import enough_memory
from ..utils.progress import track

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


def run_dealt(
    costs: Mapping[Key, float],
    work: Callable[[Key], Value],
    accelerator: Accelerator | None,
    description: str,
    progress: bool = True,
    *,
    store: Store | None = None,
    written: Callable[[Key], Sequence[Tensor]] | None = None,
) -> dict[Key, Value]:
    """Return `{key: work(key)}` on every process; one process works on each key.

    Without an accelerator (or with one process) this is a plain loop. All processes must call it together.

    Args:
        costs: The keys, and the cost of each.
        work: Function that returns a value that JSON can hold. It may also fill tensors.
        accelerator: Accelerator whose processes share the work.
        description: Name of the progress bar, and of this stage in the store.
        progress: Show a progress bar.
        store: Store that records finished keys; those known from an interrupted build are not worked on again.
        written: Function that returns the tensors that `work(key)` fills. They are sent to the other processes, unless
            all share those of the store.
    """
    known = {} if store is None else store.finished(description)
    names = {key: json.dumps(key) for key in costs}
    todo = {key: cost for key, cost in costs.items() if names[key] not in known}
    count = 1 if accelerator is None else accelerator.num_processes
    rank = 0 if accelerator is None else accelerator.process_index
    owners = deal(todo, count)
    mine = [key for key in todo if owners[key] == rank]
    done = {}
    for key in track(mine, title=description, unit="tensor", progress=progress and rank == 0):
        with enough_memory(f"work on {shorten([key] if isinstance(key, str) else key)}"):
            done[key] = work(key)
        if store is not None:
            store.record(description, names[key], done[key])
    results = {}
    send = count > 1 and written is not None and not (store is not None and store.shared)
    for key in costs:
        if key not in todo:
            results[key] = known[names[key]]
        elif count == 1:
            results[key] = done[key]
        else:
            tensors = list(written(key)) if send else []
            piece = [done.get(key), tensors if key in done else None]
            results[key], filled = broadcast_object_list([piece], from_process=owners[key])[0]
            if key not in done:
                for tensor, other in zip(tensors, filled, strict=True):
                    tensor.data.copy_(other)
    return results
