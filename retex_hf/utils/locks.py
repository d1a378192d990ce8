"""Locks and threads, and what becomes of them when a process forks.

A child has the thread that forked and no other. A lock that another thread held at that moment would stay locked in the
child for ever, and what that thread was making would never be finished: both are made anew there. Likewise torch would
wait for ever for the threads among which it shares its work (OpenMP's): in a child it works without them.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

import torch


class HasLocks(Protocol):
    """What holds locks."""

    def renew_locks(self) -> None:
        """Forget what other threads were doing: there are none."""


_holders: WeakSet[HasLocks] = WeakSet()


def renew_in_children(holder: HasLocks) -> None:
    """Have the locks of an object made anew in every child that is forked."""
    _holders.add(holder)


def _renew() -> None:
    for holder in _holders:
        holder.renew_locks()
    if _holders:  # children that have no model of ours are left alone
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # where processes can fork
    os.register_at_fork(after_in_child=_renew)


class Turn:
    """Whose turn it is to change a model: `with turn.lock`. It also stands for the model where one must not be kept
    alive. A copy of the model gets one of its own.

    The lock itself is what `with` takes, because its methods are not written in Python: Ctrl-C cannot come in between.
    """

    def __init__(self) -> None:
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return Turn, ()


class Making:
    """One thread at a time makes a model of another library: `with making.lock`.

    transformers patches torch and itself for the time being, for all threads. Two at once would leave the patches
    behind: models made afterwards would have no initial values, and no tied weights.
    """

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


making = Making()
