"""Sources of a task tensor's values: factors of the recovery module, heads, or a computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...recovery import ComponentGenerator, ComponentLayout, Layout, RecoveryModule
from ...recovery.components import ROUNDED
from ...recovery.layout import MATRIX, SHARED_FIRST, VECTOR
from .call import MixedCall, Origin
from .products import Chain, OwnFactors


def full_precision(device: torch.device) -> AbstractContextManager:
    """Disable autocast, because offsets are computed in float32."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class TensorSource(ABC):
    """`values(call)` has one tensor per segment; `name` is None for what was computed on the way, and `is_allocated`
    says that its values share no memory with a parameter."""

    name: str | None
    is_allocated = False

    @property
    def has_one_shape(self) -> bool:
        return True

    @property
    @abstractmethod
    def origin(self) -> Origin:
        """Return the key under which a probe stores its findings about this tensor."""

    @abstractmethod
    def values(self, call: MixedCall) -> list[Tensor]:
        """Return the value of each segment's task."""


def _transposed(matrix: list[Tensor] | Tensor) -> list[Tensor] | Tensor:
    return [own.T for own in matrix] if isinstance(matrix, list) else matrix.T


@dataclass
class Computed(TensorSource):
    """Results of an operation; `history` identifies the computation, so that a repeated one is recognised."""

    tensors: list[Tensor]
    history: int
    name: None = None
    is_allocated: bool = False

    @property
    def origin(self) -> Origin:
        return self.history

    def values(self, call: MixedCall) -> list[Tensor]:
        return self.tensors


@dataclass
class Head(TensorSource):
    """A tensor that each task stores whole; shapes may differ."""

    name: str
    tensors: Mapping[int, Tensor]

    @property
    def origin(self) -> Origin:
        return self.name

    @property
    def has_one_shape(self) -> bool:
        return len({tensor.shape for tensor in self.tensors.values()}) == 1

    def values(self, call: MixedCall) -> list[Tensor]:
        return [self.tensors[segment.task_id] for segment in call.segments]


@dataclass
class Recovered(TensorSource):
    """A recovered parameter: the merged tensor (a meta tensor where a quantised layer hides it) and its factors."""

    name: str
    merged: Tensor
    recovery: RecoveryModule

    @property
    def origin(self) -> Origin:
        return self.name

    @property
    def layout(self) -> Layout | ComponentLayout:
        return self.recovery[self.name].layout

    @property
    def shared_first(self) -> bool:
        layout = self.layout
        return isinstance(layout, Layout) and layout.order == SHARED_FIRST

    def values(self, call: MixedCall) -> list[Tensor]:
        """Return the recovered tensors of all segments; keep only vectors, which are small."""
        if self.layout.kind == VECTOR:
            return call.kept(("values", self.name), lambda: self._vectors(call))
        if self.layout.kind == ROUNDED and len(self.layout.shape) < 2:
            return call.kept(("values", self.name), lambda: self._recovered(call))
        return self._recovered(call)

    def _recovered(self, call: MixedCall) -> list[Tensor]:
        with full_precision(call.device), torch.no_grad():
            return [
                self.recovery.recover(self.name, self.merged, segment.embedding).to(self.merged.dtype)
                if segment.recovered
                else self.merged
                for segment in call.segments
            ]

    @torch.no_grad()  # in evaluation mode only the inputs need gradients
    def _vectors(self, call: MixedCall) -> list[Tensor]:
        """Recover the vectors of all segments at once, because they are many and small."""
        device, scales = self.merged.device, self.scales(call)
        scalar = self.recovery.paper_form(self.name).factor("shared")
        assert scalar is not None  # of every vector
        merged = self.merged.float().expand(len(call.segments), *self.merged.shape)
        with full_precision(device):
            if scales is not None:
                merged = merged * torch.stack(scales).to(device).view(-1, *[1] * self.merged.ndim)
            offsets = torch.stack(self._generated(call)).to(device).view(merged.shape)
            return list(torch.addcmul(merged, offsets, scalar.to(device)).to(self.merged.dtype))

    def _generated(self, call: MixedCall) -> list[Tensor]:
        generator, rows = self.recovery.paper_form(self.name), call.one_hot_rows
        if rows is not None:
            return [generator.generated_row(row) for row in rows]
        nothing = torch.zeros(generator.layout.generated_shape, device=call.device)
        return [generator.generated(part.embedding) if part.recovered else nothing for part in call.segments]

    def scales(self, call: MixedCall) -> list[Tensor] | None:
        """Return the affine variant's gamma for every segment, or None for other variants."""
        scale = self.recovery.scale(self.name)
        if scale is None:
            return None
        with torch.no_grad():
            return [
                scale(segment.embedding) if segment.recovered else torch.ones((), device=call.device)
                for segment in call.segments
            ]

    def factors(self, call: MixedCall, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
        """Return `G_t` for every segment and the shared factor `S`, in float32 on `device`.

        The offset is `G_t @ S` (or `S @ G_t`), or `G_t` alone where it is stored whole. ReTeX-E's inner factor is
        multiplied into the shared one: `A_t (B S)`.
        """

        def moved() -> tuple[list[Tensor], Tensor | None]:
            generated, shared = self._factors(call)
            return [factor.to(device) for factor in generated], None if shared is None else shared.to(device)

        return call.kept(("factors", self.name, device), moved)

    def pairs(self, call: MixedCall, device: torch.device) -> list[tuple[Tensor, Tensor]] | None:
        """Return `G_t` (a, k) and `S_t` (k, b) of every segment, with zeros up to a common k, where tasks have
        directions of their own; None where they share `S`, or where offsets are stored whole.

        Multiplying all rows by the directions of all tasks would take as many times longer as there are tasks.
        """
        generator = self.recovery[self.name]
        if not isinstance(generator, ComponentGenerator) or not generator.layout.is_factored:
            return None
        if not generator.layout.owned:
            return None
        return call.kept(("pairs", self.name, device), lambda: self._pairs(generator, call, device))

    @torch.no_grad()
    def _pairs(
        self, generator: ComponentGenerator, call: MixedCall, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        found = [generator.mixed_factors(part.embedding * part.recovered) for part in call.segments]
        rank = max(1, *(len(rows) for _, rows in found))
        # Each side in one storage, where it serves as a batch of matrices too.
        own = torch.stack([F.pad(own, (0, rank - len(rows))) for own, rows in found]).to(device)
        rows = torch.stack([F.pad(rows, (0, 0, 0, rank - len(rows))) for _, rows in found]).to(device)
        return list(zip(own, rows, strict=True))

    def acting_factors(self, call: MixedCall, transposed: bool, device: torch.device) -> Chain:
        """Return the factors for multiplication from the right: transposed, unless the parameter itself is."""
        key = ("acting", self.name, transposed, device)
        return call.kept(key, lambda: self._acting_factors(call, transposed, device))

    def _acting_factors(self, call: MixedCall, transposed: bool, device: torch.device) -> Chain:
        pairs = self.pairs(call, device)
        if pairs is not None:
            matrices: list[list[Tensor] | Tensor] = [list(side) for side in zip(*pairs, strict=True)]
        else:
            generated, shared = self.factors(call, device)
            matrices = [generated] if shared is None else [generated, shared]
            matrices = matrices[::-1] if self.shared_first else matrices
        if not transposed:
            matrices = [_transposed(matrix) for matrix in reversed(matrices)]
        return Chain([OwnFactors(matrix) if isinstance(matrix, list) else matrix for matrix in matrices])

    @torch.no_grad()
    def _factors(self, call: MixedCall) -> tuple[list[Tensor], Tensor | None]:
        generator = self.recovery[self.name]
        if isinstance(generator, ComponentGenerator):
            return self._components(generator, call)
        with full_precision(call.device):
            generated = self._generated(call)
        shared, inner = generator.factor("shared"), generator.factor("inner")
        if shared is not None and self.layout.kind == MATRIX:
            shared = shared[0]
            if inner is not None:
                with full_precision(call.device):
                    shared = shared @ inner[0] if self.shared_first else inner[0] @ shared
            return [factor[0] for factor in generated], shared
        if shared is not None:  # the scalar of a vector
            generated = [factor * shared for factor in generated]
        return [factor.view(self.layout.shape[0], -1) for factor in generated], None

    def _components(self, generator: ComponentGenerator, call: MixedCall) -> tuple[list[Tensor], Tensor | None]:
        embeddings = [segment.embedding if segment.recovered else None for segment in call.segments]
        if generator.layout.is_factored:
            return generator.joint_factors(embeddings)
        nothing = torch.zeros(generator.layout.shape, device=call.device)
        offsets = [nothing if embedding is None else generator(embedding) for embedding in embeddings]
        return [offset.view(self.layout.shape[0], -1) for offset in offsets], None
