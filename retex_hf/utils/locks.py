"""Fork-safe locks.

A forked child has only the thread that forked. A lock that another thread held at that moment would stay locked in the
child for ever, and that thread's work would never be finished: both are renewed in the child. torch would likewise wait
for ever for its OpenMP threads, so it runs on one thread in a child.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

import torch


class HasLocks(Protocol):
    """An object that holds locks."""

    def renew_locks(self) -> None:
        """Replace the locks and discard the unfinished work of other threads, which do not exist after a fork."""


_holders: WeakSet[HasLocks] = WeakSet()


def renew_in_children(holder: HasLocks) -> None:
    """Renew the locks of an object in every forked child."""
    _holders.add(holder)


def _renew() -> None:
    for holder in _holders:
        holder.renew_locks()
    if _holders:  # leave children without a model of this library alone
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew)


class ChangeLock:
    """The lock for changing a model: `with change.lock`. A copy of the model gets a lock of its own.

    It also serves as an identity token of the model where the model itself must not be kept alive. `with` takes the
    lock directly, because its methods are written in C: Ctrl-C cannot interrupt them halfway.
    """

    def __init__(self) -> None:
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return ChangeLock, ()


class Making:
    """The lock for instantiating a model of another library: `with making.lock`.

    transformers temporarily patches torch and itself, for all threads. Two threads at once would leave the patches
    behind: models made afterwards would have no initial values, and no tied weights.
    """

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


making = Making()
