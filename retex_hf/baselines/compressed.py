"""Base of the systems that keep every expert in few bytes: a reference model and a compressed difference per task.

All need one model (the base, or a merge of the experts) and the tasks' heads. What they are charged for, and what
`storage` limits, is everything else: factors, codes, scales, signs, positions, masks, vectors and tensors that tasks
share. `added_bytes` is that number; `storage_bytes` adds the one model, as for every other method.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..config import RetexConfig, storage_bytes
from ..errors import ConfigError
from ..evaluation.method import Material
from ..merging.expert_weights import Weights
from ..recovery.codes import BITS
from .bodies import TaskBodies
from .differences import Differences, Reference, differences_from

PRETRAINED, AVERAGE = "pretrained", "average"
# Let a system choose the bits that leave the least error.
BEST = "best"
# The names of usual references in tables.
REFERENCES = {PRETRAINED: "base", AVERAGE: "merged"}


class Compressed(TaskBodies):
    """`W_t = W_ref + C(W_t - W_ref)`, where C is what remains after compression. Data-free; must be given the task.

    Args:
        reference: The model that differences are taken from: `"pretrained"`, or a merge as in `RetexConfig.merge`.
        exclude: Tensors that stay at the reference's value, as in `RetexConfig.exclude`.
    """

    title: str
    differences: Differences
    """Made by `fit`."""

    def __init__(self, reference: Reference, exclude: Sequence[str] = ()) -> None:
        self.reference, self.exclude = reference, list(exclude)

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return getattr(self, "_name", self.label())

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    def label(self) -> str:
        """Return the title and the settings that tell two systems of one class apart."""
        return self.title

    def fit(self, material: Material) -> None:
        super().fit(material)
        self.differences = differences_from(material, self.reference, self.exclude)
        self.compress()

    @abstractmethod
    def compress(self) -> None:
        """Choose what to keep of `self.differences`."""

    @abstractmethod
    def offsets(self, task: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in which a task's body differs from the reference, by name, as they are after storage."""

    @abstractmethod
    def added_bytes(self) -> int:
        """Return the bytes of everything beside the reference model and the heads, of all tasks."""

    def body(self, task: str) -> Weights:
        body = dict(self.differences.reference)
        for name, offset in self.offsets(task):
            body[name] = body[name] + offset
        return body

    def experts_bytes(self) -> int:
        """Return the bytes of all experts without heads, which shares refer to."""
        return len(self.weights.tasks) * self.weights.body_bytes()

    def storage_bytes(self) -> int:
        """Return the bytes of the reference model, and of everything that is added to it."""
        return self.weights.body_bytes() + self.added_bytes()

    def packed_bytes(self) -> int:
        return self.added_bytes()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "added_bytes": self.added_bytes()}


class Budgeted(Compressed):
    """A system with a knob: it takes the largest setting that fits into its storage.

    Args:
        storage: Most bytes that may be added for all tasks, as in `RetexConfig.storage`: a share of the experts' bytes
            or a size.
        reference: See `Compressed`.
        exclude: See `Compressed`.
    """

    def __init__(self, storage: float | str, reference: Reference, exclude: Sequence[str] = ()) -> None:
        super().__init__(reference, exclude)
        RetexConfig(storage=storage)  # refuses what is no storage
        self.storage = storage

    def budget(self) -> float:
        """Return the most bytes that may be added."""
        return storage_bytes(self.storage, self.experts_bytes())


def check_bits(owner: object, bits: int | str | None) -> int | None:
    """Return a number of bits per number, or None for bfloat16; refuse others."""
    if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool) or bits not in BITS):
        raise ConfigError(f"{type(owner).__name__}: bits must be None (bfloat16) or one of {BITS}, not {bits!r}.")
    return bits


def in_words(bits: int | str | None) -> str:
    """Return a number of bits as it is shown in names.

    >>> in_words(None), in_words(4), in_words("best")
    ('bfloat16', '4 bits', 'best bits')
    """
    return "bfloat16" if bits is None else f"{bits} bits"


def on(reference: Reference) -> str:
    """Return a reference as it is shown in names.

    >>> on("pretrained"), on("average"), on({"method": "ties"})
    ('on base', 'on merged', 'on ties')
    """
    method = reference if isinstance(reference, str) else reference["method"]
    return f"on {REFERENCES.get(method, method)}"
