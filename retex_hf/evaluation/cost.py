"""Time and memory of methods, relative to one static model that runs beside them.

These figures depend on the machine and its load, so they are kept out of `results.json`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.readout import Readout
from ..data.task_data import TaskData
from ..errors import EvaluationError, TaskError
from ..merging.expert_weights import ExpertWeights
from ..utils.atomic_file import whole_file
from ..utils.atomic_folder import check_target
from ..utils.progress import track
from ..utils.tables import Table
from .checks import check_tasks
from .method import Collate, Material, Method, Prediction
from .run import MODES, ask, mixed_batches, modes_of

STATUS = Path("/proc/self/status")
WATCH_SECONDS = 0.002
NOT_WALKED = (str, bytes, int, float, type, ModuleType, ExpertWeights)


class StaticModel(Method):
    """One plain model that answers a batch in one pass, whatever its tasks: the lower bound of serving cost.

    It answers under the one head that it has, so its accuracy means nothing.
    """

    modes = ("known",)

    def __init__(self, model: nn.Module, readout: Readout, name: str = "static") -> None:
        self.model, self.readout, self.name = model, readout, name

    def fit(self, material: Material) -> None:
        """Do nothing: the model is finished."""

    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        if tasks is None:
            raise TaskError(f"{self.name} has no router: name the task of every row.")
        return Prediction(self.readout.answers(self.readout.call(self.model, inputs), list(tasks)), list(tasks))

    def storage_bytes(self) -> int:
        return held_bytes(self.model)


@dataclass(frozen=True)
class Cost:
    """Cost of one method in one mode.

    Args:
        method: Name of the method.
        mode: Mode in which it ran.
        milliseconds: Median time of a batch, over batches and repeats.
        latency_ratio: Median of the time of a batch, relative to the time of the static model on the same batch just
            before.
        held_bytes: Bytes of the tensors that the method keeps in memory, with caches; at least its storage.
        added_bytes: Peak of the additional memory while answering; median over batches.
        memory_ratio: Held and added memory, relative to the static model's.
    """

    method: str
    mode: str
    milliseconds: float
    latency_ratio: float
    held_bytes: int
    added_bytes: int
    memory_ratio: float


@dataclass(frozen=True)
class CostTable:
    """Costs of several methods. The first entry is the static model, to which the others are relative."""

    costs: Sequence[Cost]
    batch_size: int
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "batch_size": self.batch_size,
            "threads": self.threads,
            "costs": [asdict(cost) for cost in self.costs],
        }

    def table(self) -> Table:
        """Return a table with one line per method and mode."""
        header = ["method", "mode", "ms per batch", "latency", "held (MB)", "added (MB)", "memory"]
        rows = [
            [
                cost.method,
                MODES[cost.mode],
                f"{cost.milliseconds:.1f}",
                f"{cost.latency_ratio:.2f}x",
                f"{cost.held_bytes / 1e6:.1f}",
                f"{cost.added_bytes / 1e6:.1f}",
                f"{cost.memory_ratio:.2f}x",
            ]
            for cost in self.costs
        ]
        return Table(header, rows)

    def markdown(self) -> str:
        """Return a Markdown table and the meaning of its columns."""
        return f"{self.table().markdown()}\n\n{self._legend()}\n"

    def save(self, folder: str | Path) -> dict[str, Path]:
        """Write `cost.json` and `cost.md`.

        Returns:
            `{name: path}` of the files.
        """
        folder = check_target(folder)
        paths = {kind: folder / f"cost.{kind}" for kind in ("json", "md")}
        with whole_file(paths["json"]) as file:
            file.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        with whole_file(paths["md"]) as file:
            file.write_text(self.markdown(), encoding="utf-8")
        return paths

    def __str__(self) -> str:
        return f"{self.table().text()}\n\n{self._legend()}"

    def _legend(self) -> str:
        static = self.costs[0].method
        return (
            f"Batches of {self.batch_size} rows of all tasks, {self.threads} threads. Latency and memory relative to "
            f"{static!r}, which answered the same batches in turn. Held: weights kept in memory, with caches; added: "
            "peak on top of them while answering."
        )


def measure_cost(
    methods: Sequence[Method],
    tasks: Sequence[TaskData],
    collate: Collate,
    static: Method,
    *,
    batch_size: int = 64,
    batches: int = 8,
    repeats: int = 5,
    modes: Sequence[str] = ("known", "unknown"),
    seed: int = 0,
    progress: bool = True,
) -> CostTable:
    """Measure time and memory of fitted methods on mixed batches.

    Method and static model alternate on every batch, so that a change of the machine's load affects both. Memory is
    this process's anonymous memory, as Linux reports it.

    Args:
        methods: Methods to measure, in each of the modes that they have.
        tasks: Data to draw inputs from.
        collate: Makes a batch of raw inputs.
        static: The model that costs are relative to, given the task; see `StaticModel`.
        batch_size: Rows of a batch.
        batches: Number of batches, at most.
        repeats: Number of timings of each batch.
        modes: Modes to run.
        seed: Seed of the mixed stream.
        progress: Show a progress bar.
    """
    if batches < 1 or repeats < 1:
        raise EvaluationError(f"Costs need at least one batch and one repeat, not {batches} and {repeats}.")
    check_tasks(tasks)
    stream = [
        batch for batch in mixed_batches([len(task) for task in tasks], batch_size, seed) if len(batch) == batch_size
    ]
    if not stream:
        raise EvaluationError(f"The tasks have fewer rows than one batch of {batch_size}.")
    prepared = [
        (collate([tasks[task].inputs[row] for task, row in batch]), [tasks[task].name for task, _ in batch])
        for batch in stream[:batches]
    ]
    pairs = [(method, mode) for method in methods for mode in modes_of(method) if mode in modes]
    with torch.inference_mode():
        reference = _measure(static, "known", prepared, repeats, static, None)
        bar = track(pairs, title="Measuring costs", unit="method", progress=progress)
        costs = [_measure(method, mode, prepared, repeats, static, reference) for method, mode in bar]
    return CostTable([reference, *costs], batch_size, torch.get_num_threads())


Prepared = Sequence[tuple[Mapping[str, Tensor], list[str]]]


def _measure(
    method: Method, mode: str, prepared: Prepared, repeats: int, static: Method, reference: Cost | None
) -> Cost:
    for inputs, names in prepared:  # warm up: first-use loading and caching are not part of the cost of a batch
        ask(static, inputs, names, "known")
        ask(method, inputs, names, mode)
    seconds, ratios = [], []
    for _ in range(repeats):
        for inputs, names in prepared:
            beside = _seconds(partial(ask, static, inputs, names, "known"))
            seconds.append(_seconds(partial(ask, method, inputs, names, mode)))
            ratios.append(seconds[-1] / beside)
    added = []
    for inputs, names in prepared:
        with watched() as peak:
            ask(method, inputs, names, mode)
        added.append(peak.added)
    held, most = max(held_bytes(method), method.storage_bytes()), int(median(added))
    whole = held + most if reference is None else reference.held_bytes + reference.added_bytes
    return Cost(method.name, mode, 1000 * median(seconds), median(ratios), held, most, (held + most) / max(whole, 1))


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def held_bytes(owner: Any) -> int:
    """Return the size of all tensors reachable from an object, each storage counted once.

    Experts in memory (`ExpertWeights`) are not counted: they serve fitting, and all methods share them.

    >>> import torch
    >>> from retex_hf.evaluation.cost import held_bytes
    >>> weight = torch.zeros(10)
    >>> held_bytes({"weight": weight, "its transpose": [weight.t()], "other": torch.zeros(2)})
    48
    """
    storages: dict[int, int] = {}
    seen, todo = set(), [owner]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, NOT_WALKED):
            continue
        seen.add(id(value))
        # Subclasses such as task tensors hold no numbers themselves, but refer to tensors that do.
        if type(value) in (Tensor, nn.Parameter):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += value
        elif hasattr(value, "__dict__"):
            todo += vars(value).values()
    return sum(storages.values())


class Peak(threading.Thread):
    """Thread that watches the anonymous memory of this process; `added` is how far it rose."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(WATCH_SECONDS):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    @property
    def added(self) -> int:
        return self.peak_bytes - self.start_bytes


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch memory while a block runs."""
    gc.collect()
    # Memory that was freed but not returned to the system would hide what the block takes.
    ctypes.CDLL(None).malloc_trim(0)
    peak = Peak()
    peak.start()
    try:
        yield peak
    finally:
        peak.stopped.set()
        peak.join()


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    if not STATUS.is_file():
        raise EvaluationError(f"Memory is read from {STATUS}, which only Linux has.")
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
