"""Systems that keep a truncated SVD of each task's difference. They differ in the reference model, in how ranks follow
from one knob, in their bits, and in what becomes of vectors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import ConfigError
from ..recovery.layout import Sides
from .compressed import AVERAGE, BEST, PRETRAINED, Budgeted, check_bits, in_words, on
from .differences import Factors, Form, Reference, Whole

# What the bits of factors and of vectors are chosen from.
WIDTHS = (2, 3, 4, 5, 6, 8)
# Loses 3e-5 of a vector's energy, which is as good as exact, for half the bytes of bfloat16.
VECTOR_BITS = 8
SHARED_EXPERT = {"method": "task_arithmetic", "scale": 0.3}
# Of 4096 components, Delta-CoMe's authors keep 2 at 8 bits, the next 32 at 3, and what the budget allows at 2.
LEADING = ((2, 8), (32, 3))
LEADING_OF = 4096
LAST_BITS = 2


@dataclass(frozen=True)
class Fit:
    """A setting that fits, and the error that is expected of it."""

    setting: int
    bits: int | None
    vectors: Whole | None
    forms: dict[str, Form]
    error: float


class TaskSVD(Budgeted):
    """One rank for all matrices: the best approximation of each task's difference, at a number of bits per number.

    What the bytes of a whole rank leave over buys one more rank for the first matrices of the model. A matrix whose
    factors would take no fewer bytes than the matrix is stored whole. Vectors are kept or not, at whichever bits leave
    the least error (`Differences.expected_error`); in bfloat16 where factors are.

    Args:
        storage: See `Budgeted`.
        bits: Bits per number of factors; None: bfloat16; "best": those of 2, 3, 4, 5, 6 and 8 that leave the least
            error.
        reference: See `Compressed`.
        exclude: See `Compressed`.
    """

    title = "SVD"
    allows_whole = True
    keeps_vectors = True

    def __init__(
        self,
        storage: float | str = 0.01,
        *,
        bits: int | str | None = None,
        reference: Reference = AVERAGE,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(storage, reference, exclude)
        self.asked = bits
        self.bits: int | None = None if bits == BEST else check_bits(self, bits)

    def label(self) -> str:
        return f"{self.title} {on(self.reference)}, {in_words(self.asked)}"

    def compress(self) -> None:
        widths = WIDTHS if self.asked == BEST else (self.bits,)
        fits = [self.fitting(bits, vectors) for bits in widths for vectors in self.vector_forms(bits)]
        best = min(fits, key=lambda fit: fit.error)
        self.setting, self.bits, self.vectors, self.forms = best.setting, best.bits, best.vectors, best.forms

    def vector_forms(self, bits: int | None) -> list[Whole | None]:
        """Return the ways to keep vectors; None is to leave them at the reference's values."""
        if not self.keeps_vectors:
            return [None]
        return [None, Whole(None)] if bits is None else [None, *map(Whole, WIDTHS)]

    def fitting(self, bits: int | None, vectors: Whole | None) -> Fit:
        """Return the largest setting whose bytes fit, at some bits; nothing is kept if the vectors alone do not."""

        def size(setting: int) -> int:
            return len(self.weights.tasks) * self.differences.bytes(self.forms_at(setting, bits, vectors))

        settings = range(self.largest() * len(self.candidates()) + 1)
        setting = bisect_right(settings, self.budget(), key=size) - 1
        forms = self.forms_at(setting, bits, vectors) if setting >= 0 else {}
        return Fit(setting, bits, vectors, forms, self.differences.expected_error(forms))

    def largest(self) -> int:
        """Return the largest rank that any matrix may have."""
        return max((self.full_rank(sides) for sides in self.candidates().values()), default=0)

    @staticmethod
    def full_rank(sides: Sides) -> int:
        """Return how many singular values a matrix has."""
        return min(sides[1:])

    def candidates(self) -> dict[str, Sides]:
        """Return the tensors that may be factored."""
        return self.differences.matrices

    def rank(self, sides: Sides, step: int) -> int:
        """Return the rank of a matrix at a step, of which there are as many as the largest rank."""
        return min(step, self.full_rank(sides))

    def runs(self, sides: Sides, rank: int, bits: int | None) -> tuple[tuple[int, int | None], ...]:
        """Return the components of a matrix as `(count, bits)`."""
        return ((rank, bits),)

    def forms_at(self, setting: int, bits: int | None, vectors: Whole | None) -> dict[str, Form]:
        """Return what is kept of every tensor at a setting: a step for each of the matrices in turn, then the next."""
        forms: dict[str, Form] = {}
        step, further = divmod(setting, max(len(self.candidates()), 1))
        for place, (name, sides) in enumerate(self.candidates().items()):
            rank = self.rank(sides, step + (place < further))
            if rank:
                factors, whole = Factors(self.runs(sides, rank, bits)), Whole(bits)
                larger = factors.bytes(sides) >= whole.bytes(self.differences.numbers(name))
                forms[name] = whole if self.allows_whole and larger else factors
        if vectors is not None:
            forms |= dict.fromkeys(self.differences.vectors, vectors)
        return forms

    def offsets(self, task: str) -> Iterator[tuple[str, Tensor]]:
        for name, form in self.forms.items():
            yield name, self.differences.stored(task, name, form)

    def added_bytes(self) -> int:
        return len(self.weights.tasks) * self.differences.bytes(self.forms)

    def state(self) -> dict[str, Any]:
        vectors = None if self.vectors is None else self.vectors.bits or "bfloat16"
        rank = max(self.setting, 0) / max(len(self.candidates()), 1)
        return {**super().state(), "rank": rank, "bits": self.bits, "vectors": vectors}


class LoRAExtraction(TaskSVD):
    """A LoRA extracted from each expert, as every server takes it: one rank, on the weights of linear layers.

    On the base; biases, norms, convolutions and everything else stay the base's. (mergekit's `mergekit-extract-lora`
    adds these to the adapter: that is `TaskSVD` on the base.)

    Args:
        storage: See `Budgeted`.
        bits: See `TaskSVD`.
        exclude: See `Compressed`.
    """

    title = "LoRA extraction"
    allows_whole = False
    keeps_vectors = False

    def __init__(
        self, storage: float | str = 0.01, *, bits: int | str | None = None, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(storage, bits=bits, reference=PRETRAINED, exclude=exclude)

    def candidates(self) -> dict[str, Sides]:
        modules = self.weights.model.named_modules()
        linear = {f"{name}.weight" for name, module in modules if isinstance(module, (nn.Linear, Conv1D))}
        return {name: sides for name, sides in self.differences.matrices.items() if name in linear}


class RankShare(TaskSVD):
    """The same share of the singular values of every matrix, rounded up."""

    def rank(self, sides: Sides, step: int) -> int:
        return -(-step * self.full_rank(sides) // max(self.largest(), 1))


class TwinCompression(RankShare):
    """Twin-Merging's compression: the SVD of `W_t - W*` cut to a share of the singular values, task known, no router.

    `W*` is task arithmetic with factor 0.3, as in the paper; `TwinMerging` is the system with its router.

    Args:
        storage: See `Budgeted`.
        bits: See `TaskSVD`.
        exclude: See `Compressed`.
    """

    title = "Twin-Merging's compression"

    def __init__(
        self, storage: float | str = 0.01, *, bits: int | str | None = None, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(storage, bits=bits, reference=SHARED_EXPERT, exclude=exclude)

    def label(self) -> str:
        return f"{self.title}, {in_words(self.asked)}"


class TSVC(RankShare):
    """TSV-C: each task keeps a share of the singular components of its task vector, the authors 1/T.

    Args:
        storage: See `Budgeted`; default: the authors' share, whatever its size.
        bits: See `TaskSVD`.
        exclude: See `Compressed`.
    """

    title = "TSV-C"

    def __init__(
        self, storage: float | str | None = None, *, bits: int | str | None = None, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__("100%" if storage is None else storage, bits=bits, reference=PRETRAINED, exclude=exclude)
        self.authors_share = storage is None
        if self.authors_share and bits == BEST:
            raise ConfigError('TSVC: bits="best" needs a storage, because without one the most bits are the best.')

    def label(self) -> str:
        return f"{self.title}{' (1/T)' if self.authors_share else ''}, {in_words(self.asked)}"

    def compress(self) -> None:
        if not self.authors_share:
            return super().compress()
        self.setting = -(-self.largest() // len(self.weights.tasks)) * len(self.candidates())
        self.vectors = Whole(None if self.bits is None else VECTOR_BITS)
        self.forms = self.forms_at(self.setting, self.bits, self.vectors)


class DeltaCoMe(TaskSVD):
    """Delta-CoMe: singular vectors at falling precision, the first 2 at 8 bits, the next 32 at 3, all others at 2.

    The authors round with calibration inputs (GPTQ); here rounding is that of all other systems, without data.

    Args:
        storage: See `Budgeted`.
        scaled: Scale the numbers 2 and 32, which the authors use for matrices of 4096 rows, to each matrix (rounded
            up), instead of taking them as they are.
        reference: See `Compressed`; the authors' is `"pretrained"`.
        exclude: See `Compressed`.
    """

    title = "Delta-CoMe"
    allows_whole = False

    def __init__(
        self,
        storage: float | str = 0.01,
        *,
        scaled: bool = False,
        reference: Reference = PRETRAINED,
        exclude: Sequence[str] = (),
    ) -> None:
        if not isinstance(scaled, bool):
            raise ConfigError(f"DeltaCoMe: scaled must be True or False, not {scaled!r}.")
        super().__init__(storage, bits=LAST_BITS, reference=reference, exclude=exclude)
        self.scaled = scaled

    def label(self) -> str:
        return f"{self.title} {on(self.reference)}{', scaled' if self.scaled else ''}"

    def runs(self, sides: Sides, rank: int, bits: int | None) -> tuple[tuple[int, int | None], ...]:
        runs: list[tuple[int, int | None]] = []
        left = rank
        for count, bits in LEADING:
            wanted = -(-count * self.full_rank(sides) // LEADING_OF) if self.scaled else count
            runs.append((min(wanted, left), bits))
            left -= runs[-1][0]
        return tuple((count, bits) for count, bits in (*runs, (left, LAST_BITS)) if count)
