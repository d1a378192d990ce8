"""Work on several keys at once, in threads that share the cores that torch uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def in_threads(work: Callable[[Key], Value], keys: Sequence[Key], threads: int) -> Iterator[tuple[Key, Value]]:
    """Yield keys and `work(key)` in the order of the keys, computed by some threads; each has its share of torch's.

    Context variables and torch's modes of gradients and inference are those of the caller. After an error no further
    key is begun.

    >>> dict(in_threads(lambda key: key**2, [3, 1, 2], threads=2))
    {3: 9, 1: 1, 2: 4}
    """
    threads = min(threads, len(keys))
    if threads <= 1:
        yield from ((key, work(key)) for key in keys)
        return
    usual = torch.get_num_threads()
    learns, infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.set_num_threads(max(1, usual // threads))
        torch.get_num_threads()  # torch settles a thread's number when it is first asked
        ready.wait()

    def here(key: Key) -> Value:
        # Both are settings of a thread, not of the process.
        with torch.inference_mode(infers), torch.set_grad_enabled(learns):
            return work(key)

    pool = ThreadPoolExecutor(threads, initializer=begin)
    try:
        try:
            futures = [pool.submit(copy_context().run, here, key) for key in keys]
        except BaseException:
            ready.abort()  # a thread could not be started, and the others wait for it
            raise
        ready.wait()
        # torch also keeps a number for threads to come, which `begin` has changed: put it right at once.
        torch.set_num_threads(usual)
        for key, future in zip(keys, futures, strict=True):
            yield key, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(usual)
