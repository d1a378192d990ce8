"""The recipe that an artifact carries: what it was built from, and what was done to it since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, brief
from .recipe import OF_REFERENCES, Recipe, check_kind, kinds_of, pinned

SIGNED_IN_MEMORY = "fit signatures on batches in memory"
# Options of `add_task` that a change repeats.
OF_ADDING = ("base", "tolerance", "check_base")


class RecipeRecord(Mapping[str, Any]):
    """The recipe in `retex_recipe.yaml`, as a read-only mapping of its keys.

    The values of the file are untrusted: the properties check what they return, so that an artifact whose recipe cannot
    be used still loads. Methods that note something return a new record.

    >>> from retex_hf.artifact.recipe_record import RecipeRecord
    >>> record = RecipeRecord({"base": "org/base", "experts": {"a": "org/a"}})
    >>> record.with_task("b", "org/b").without_task("a")["changes"]
    [{'add': 'b', 'expert': 'org/b'}, {'remove': 'a'}]
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = deepcopy(dict(values or {}))

    def __getitem__(self, key: str) -> Any:
        return deepcopy(self._values[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"RecipeRecord({self._values!r})"

    # ---- what it says ------------------------------------------------------------------------------------------------

    @property
    def base(self) -> str | None:
        """Return the base of the build."""
        base = self.get("base")
        if base is not None:
            check_kind(base, "str", "'base' of the artifact's recipe")
        return base

    @property
    def experts(self) -> dict[str, str]:
        """Return the experts of the build and of later changes."""
        built = self.get("experts", {})
        check_kind(built, "dict[str, str]", "'experts' of the artifact's recipe")
        added = [(change["add"], change.get("expert")) for change in self.changes if "add" in change]
        wrong = [pair for pair in added if not all(isinstance(part, str) for part in pair)]
        if wrong:
            raise ConfigError(
                f"A change of the artifact's recipe must add a task and its expert, not {brief(wrong[0])}."
            )
        return built | dict(added)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Return the changes after the build, in order."""
        changes = self.get("changes", [])
        if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
            raise ConfigError(f"'changes' of the artifact's recipe must be a list of changes, not {brief(changes)}.")
        return changes

    @property
    def unrecorded(self) -> list[str]:
        """Return the changes that a recipe cannot express."""
        unrecorded = self.get("unrecorded", [])
        if not isinstance(unrecorded, list) or not all(isinstance(entry, str) for entry in unrecorded):
            raise ConfigError(
                f"'unrecorded' of the artifact's recipe must be a list of texts, not {brief(unrecorded)}."
            )
        return unrecorded

    @property
    def threads(self) -> Any:
        """Return the number of threads of the build, unchecked: `use_threads` checks it."""
        return self.get("threads")

    def data_of(self, tasks: Sequence[str]) -> dict[str, str]:
        """Return the data of those tasks for which the recipe names data, in the build or in later changes.

        >>> from retex_hf.artifact.recipe_record import RecipeRecord
        >>> changes = [{"add": "b", "expert": "x", "data": {"b": "b.txt"}}, {"remove": "c"}]
        >>> RecipeRecord({"data": {"a": "a.txt", "c": "c.txt"}, "changes": changes}).data_of(["a", "b"])
        {'a': 'a.txt', 'b': 'b.txt'}
        """
        found: dict[str, str] = {}
        for references in (self, *(change.get("sign", change) for change in self.changes)):
            found |= _read_references(references).get("data", {})
        return {task: found[task] for task in tasks if task in found}

    def references(self) -> dict[str, Any]:
        """Return the `OF_REFERENCES` of the last fit of signatures for all tasks, where they are not the defaults.

        >>> from retex_hf.artifact.recipe_record import RecipeRecord
        >>> changes = [{"remove": "c"}, {"sign": {"data": {}, "max_length": 64}}]
        >>> RecipeRecord({"max_length": 32, "changes": changes}).references()
        {'max_length': 64}
        """
        signings = [change["sign"] for change in self.changes if "sign" in change]
        last = _read_references((signings or [self])[-1])
        return {key: value for key, value in last.items() if key in OF_REFERENCES}

    # ---- what is noted in it -----------------------------------------------------------------------------------------

    def with_values(self, **values: Any) -> RecipeRecord:
        """Return the record with some keys set."""
        return RecipeRecord({**self, **values})

    def with_task(
        self,
        name: str,
        expert: str | PathLike[str],
        *,
        revision: str | None = None,
        signed_in_memory: bool = False,
        **options: Any,
    ) -> RecipeRecord:
        """Note an added task. `options` are those of `OF_ADDING` that are not the defaults."""
        record = self._with_change({"add": name, "expert": pinned(expert, revision), **options})
        return record._with_unrecorded(_signed_task_in_memory(name)) if signed_in_memory else record

    def without_task(self, name: str) -> RecipeRecord:
        """Note a deleted task."""
        return self._with_change({"remove": name})

    def signed_with(self, references: Mapping[str, Any]) -> RecipeRecord:
        """Note signatures of all tasks fitted on references, either after the build or after the last change."""
        changes = list(self.changes)
        while changes and "sign" in changes[-1]:  # nothing was added since, so the earlier signing leaves no trace
            changes.pop()
        if changes:
            values = {**self, "changes": [*changes, {"sign": dict(references)}]}
        else:
            replaced = ("data", *OF_REFERENCES, "changes", "unrecorded")
            values = {key: value for key, value in self.items() if key not in replaced} | dict(references)
        return RecipeRecord(values)._with_only([what for what in self.unrecorded if what != SIGNED_IN_MEMORY])

    def task_signed_with(self, name: str, references: Mapping[str, Any]) -> RecipeRecord:
        """Note the references of the task that was added last."""
        changes = [*self.changes[:-1], {**self.changes[-1], **references}]
        unrecorded = [what for what in self.unrecorded if what != _signed_task_in_memory(name)]
        return self.with_values(changes=changes)._with_only(unrecorded)

    def signed_in_memory(self) -> RecipeRecord:
        """Note that signatures were fitted on batches that no recipe can name.

        Earlier signatures stay noted, because tasks added since have joined them.
        """
        return self._with_unrecorded(SIGNED_IN_MEMORY)

    def cast_to(self, dtype: torch.dtype) -> RecipeRecord:
        """Note that the model was loaded in another dtype than stored, and may be saved in it.

        >>> import torch
        >>> from retex_hf.artifact.recipe_record import RecipeRecord
        >>> RecipeRecord({"base": "org/base"}).cast_to(torch.float16).unrecorded
        ['cast the merged model to float16']
        """
        return self._with_unrecorded(f"cast the merged model to {str(dtype).removeprefix('torch.')}")

    def _with_change(self, change: dict[str, Any]) -> RecipeRecord:
        return self.with_values(changes=[*self.changes, change])

    def _with_unrecorded(self, what: str) -> RecipeRecord:
        return self.with_values(unrecorded=sorted({*self.unrecorded, what}))

    def _with_only(self, unrecorded: list[str]) -> RecipeRecord:
        values = {key: value for key, value in self.items() if key != "unrecorded"}
        return RecipeRecord(values | ({"unrecorded": unrecorded} if unrecorded else {}))


def check_trusted(named: Mapping[str, str], artifact: str | Path, trusted: bool, instead: str) -> None:
    """Refuse to read what an artifact's recipe names, unless its author is trusted.

    An untrusted recipe could request any Hub repository, or have local files read and shown.

    Args:
        named: Sources that would be read, and their locations according to the recipe.
        artifact: The artifact whose recipe it is.
        trusted: Whether the caller trusts the author.
        instead: How the caller can name the data explicitly.
    """
    if named and not trusted:
        shown = ", ".join(f"{what}: {brief(source)}" for what, source in named.items())
        raise ConfigError(
            f"The recipe in {artifact} names what to read ({shown}): pass --trust-recipe if you trust its author, or "
            f"{instead}."
        )


def _signed_task_in_memory(task: str) -> str:
    return f"sign task {task!r} with batches in memory"


def _read_references(values: Any) -> dict[str, Any]:
    """Return the location and reading options of reference inputs, checking the type of each."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"'sign' of the artifact's recipe must hold keys and values, not {brief(values)}.")
    kinds = kinds_of(Recipe)
    found = {key: values[key] for key in ("data", *OF_REFERENCES) if values.get(key) is not None}
    for key, value in found.items():
        check_kind(value, kinds[key], f"{key!r} of the artifact's recipe")
    return found
