"""The names under which an artifact's models are asked for: auto, merged, and its tasks."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, shorten
from ..model.retex_model import RetexModel
from .errors import ApiError
from .rows import AUTO, MERGED


@dataclass(frozen=True)
class Names:
    """The models of an artifact; `routes` tells whether "auto" is one of them."""

    tasks: tuple[str, ...]
    routes: bool

    @classmethod
    def of(cls, model: RetexModel) -> Names:
        for name in (AUTO, MERGED):
            if name in model.tasks:
                raise ConfigError(f"The task {name!r} cannot be served, because {name!r} names a model: rename it.")
        return cls(tuple(model.tasks), model.parts().identified_by is not None)

    @property
    def all(self) -> list[str]:
        """Return all names, the default first."""
        return [*([AUTO] if self.routes else []), MERGED, *self.tasks]

    def check(self, name: str) -> str:
        """Return a name that exists."""
        if name in self.all:
            return name
        if name == AUTO:
            raise ApiError(
                400,
                f"This artifact has no signatures to route by: run retex sign, or name a task as model "
                f"({shorten(self.tasks, 20)}).",
                param="model",
                code="no_signatures",
            )
        shown = ", ".join(repr(known) for known in self.all)
        raise ApiError(
            404, f"There is no model {name[:100]!r}; the models are {shown}.", param="model", code="model_not_found"
        )
