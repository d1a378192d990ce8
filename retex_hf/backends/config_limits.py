"""Bound what an untrusted configuration may ask for by the weights that come with it.

A few numbers in a configuration can ask for a model of a billion layers and exhaust memory. The weight files bound what
is possible, because their size is fixed: refuse any model that they could not fill.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..checkpoints.inventory import computed_names
from ..checkpoints.sources import Source, TensorInfo
from ..errors import CheckpointError, brief, shorten

# Configuration keys that count layers, heads, labels and the like, each of which takes time and memory. The last names
# are specific to single families: GPT-Neo's list of repeated layers, the dense layers before the others.
COUNT = re.compile(
    r"(^|_)(num|n|layers?|depths?|blocks?|labels?|heads?|experts?|stages?)(_|$)"
    r"|^(attention_types|first_k_dense_replace|out_indices)$"
)
# For libraries whose configurations hold little but sizes.
ANY_KEY = re.compile("")
# Far above the counts of real models, and still cheap to allocate if the entries are small.
HARMLESS_COUNT = 100_000
# Sizes of square complex matrices that a model computes when it is created, even on the meta device (FNet).
SQUARED = {"tpu_short_seq_length"}
BYTES_PER_COMPLEX = 16
# Limit on the processor time for creating a model; a thousand layers take about ten seconds.
HARMLESS_SECONDS, SECONDS_PER_TENSOR = 30.0, 0.05
# Limit on modules and parameters per tensor in the files; tied, fused and weightless ones count too.
PIECES_PER_TENSOR, HARMLESS_PIECES = 100, 10_000
# Limit on constants that a model computes itself (positions, masks), in bytes.
HARMLESS_BUFFERS = 1 << 30


def check_counts(path: Path, values: Any, source: Source, keys: re.Pattern[str] = COUNT) -> None:
    """Refuse a count in a configuration that no model with these weights can have."""
    largest = max((size for info in source.infos.values() for size in info.shape), default=0)
    limit = max(HARMLESS_COUNT, largest, len(source.infos))

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping):
            for inner, entry in value.items():
                walk(entry, inner)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                walk(entry, key)
        elif key in SQUARED and isinstance(value, int) and BYTES_PER_COMPLEX * value**2 > HARMLESS_BUFFERS:
            raise CheckpointError(f"{path}: {key!r} is {brief(value)}; its square takes more memory than the weights.")
        elif isinstance(value, int) and keys.search(key) and value > limit:  # floats are never counts
            raise CheckpointError(f"{path}: {key!r} is {brief(value)}; the weights leave room for {limit} at most.")

    walk(values, "")


@contextmanager
def limited_pieces(path: Path, source: Source) -> Iterator[None]:
    """Within this context, abort creating a model with far more modules than its weights have tensors."""
    limit, thread, made = HARMLESS_PIECES + PIECES_PER_TENSOR * len(source.infos), threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal made
        if threading.get_ident() != thread:  # the hooks are global to all threads
            return
        made += 1
        if made > limit:
            raise CheckpointError(
                f"{path} asks for more than {limit} layers, but the weights are {len(source.infos)} tensors."
            )

    hooks = [register_module_module_registration_hook(count), register_module_parameter_registration_hook(count)]
    seconds = HARMLESS_SECONDS + SECONDS_PER_TENSOR * len(source.infos)
    try:
        with limited_time(seconds, f"{path} asks for a model that takes over {seconds:.0f} seconds to make."):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def limited_time(seconds: float, refusal: str) -> Iterator[None]:
    """Within this context, stop this thread with a refusal once it has used so many seconds of processor time.

    Processor time makes the limit independent of how busy the machine is. The thread is stopped between two Python
    instructions; a single call of native code is not interrupted.
    """
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else time.CLOCK_MONOTONIC
    start, stopped = time.clock_gettime(clock), False

    def watch() -> None:
        nonlocal stopped
        while not done.wait(1.0):
            with lock:
                if done.is_set() or time.clock_gettime(clock) - start < seconds:
                    continue
                stopped = True
                _raise_in(thread, TooLong)
                return

    watcher = threading.Thread(target=watch, daemon=True, name="retex time limit")
    watcher.start()
    try:
        yield
    except TooLong:
        raise CheckpointError(refusal) from None
    finally:
        with lock:
            done.set()
            if stopped:
                _raise_in(thread, None)  # cancel it if it was not delivered yet
    if stopped:
        raise CheckpointError(refusal)


class TooLong(BaseException):
    """Raised in a thread that exceeds its time limit; a `BaseException`, so that no library's `except Exception`
    catches it."""


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    exception = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


def check_weights(path: Path, model: nn.Module, source: Source, infos: Mapping[str, TensorInfo]) -> None:
    """Refuse weights that do not fit a model; `infos` describes them under the model's names.

    `model` is on the meta device; `path` is the configuration that it was created from.
    """
    tensors = model.state_dict(keep_vars=True)
    for name, info in infos.items():
        expected = tensors[name]
        if info.shape != tuple(expected.shape):
            raise CheckpointError(
                f"{source.label}: tensor {name!r} has shape {info.shape}, but {path.name} asks for "
                f"{tuple(expected.shape)}."
            )
        if info.dtype.is_floating_point != expected.dtype.is_floating_point:
            raise CheckpointError(f"{source.label}: tensor {name!r} has dtype {info.dtype}, not {expected.dtype}.")
    there = {id(tensors[name]) for name in infos}  # tied tensors count once
    wanted = [name for name, _ in model.named_parameters() if name not in computed_names(model)]
    missing = [name for name in wanted if id(tensors.get(name)) not in there]
    if missing:
        raise CheckpointError(
            f"{source.label} lacks {len(missing)} tensor(s) that {path.name} asks for: {shorten(missing)}."
        )
    buffers = sum(_bytes(buffer) for buffer in model.buffers())
    if buffers > HARMLESS_BUFFERS + sum(_bytes(tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path} asks for {buffers} bytes of constants, more than the weights have.")


def _bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


@contextmanager
def limited_model(path: Path, sizes: Mapping[str, Any], source: Source) -> Iterator[None]:
    """Within this context, create a model only if its weights (`source`) could fill it; treat every number in its
    configuration (at `path`) as a possible size."""
    check_counts(path, sizes, source, keys=ANY_KEY)
    with limited_pieces(path, source):
        yield
