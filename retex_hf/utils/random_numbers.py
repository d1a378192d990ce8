"""Random numbers that are the same every time, without a trace in the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Draw the same random numbers as every other time, on the CPU and on the device; afterwards the caller's go on.

    On a CPU nothing else is seeded: `torch.manual_seed` also seeds every kind of accelerator, under locks that a
    process which is forked meanwhile would wait for in vain.

    >>> with repeatable(torch.device("cpu")):
    ...     first = torch.rand(())
    >>> with repeatable(torch.device("cpu")):
    ...     print(bool(torch.rand(()) == first))
    True
    """
    here = device.type in ("cpu", "meta")
    with torch.random.fork_rng(devices=[] if here else range(torch.accelerator.device_count())):
        (torch.default_generator.manual_seed if here else torch.manual_seed)(0)
        yield
