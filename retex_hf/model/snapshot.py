"""A snapshot of a model, and a call on it: rows are identified, and each runs on its own expert."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..artifact.state import RetexParts
from ..backends import library_of
from ..config import BASE, routing_options
from ..errors import InputError, RetexError, TaskError
from ..execution import (
    Assignment,
    ExpertCache,
    ExpertRunner,
    Group,
    Mixture,
    SharedTrunk,
    TrunkRecord,
    announce,
    attach_routing,
    call_method,
    for_rows,
    parse_adapter_names,
    parse_task,
    task_index,
)
from ..execution.vocabulary_rows import tokens_of
from ..routing import FeatureExtractor, Routing, Signatures, WeightSignatures, decide, like
from ..routing.features import Recorded
from .components import announced_scorer_of, extractor_of, runner_of
from .peft_names import check_spelling
from .shared_trunk import trunk_of
from .trunk_references import record_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT_ENTRY_POINT = re.compile(r"^(encode_text|get_text_(\w+_)?(features|embeds))$")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a call depends on. A change of the model makes a new snapshot; running calls keep theirs.

    `cache` holds the experts recovered from these `parts` and nothing else, so that a call never meets experts of other
    parts. `proofs` are findings about kinds of calls, which depend on the architecture alone. `active` is the pinned
    task.
    """

    parts: RetexParts
    cache: ExpertCache
    execution: str
    active: str | Mixture | None = None
    proofs: dict[Any, Any] = field(default_factory=dict)

    def with_parts(self, parts: RetexParts) -> Snapshot:
        """Return the snapshot after a change of parts: with an empty cache, and no pinned task that is gone."""
        active = self.active if set(self.active_names) <= set(parts.config.tasks) else None
        return replace(self, parts=parts, cache=self.cache.emptied(), active=active)

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks, in the order of their ids."""
        return self.parts.config.tasks

    @property
    def active_names(self) -> tuple[str, ...]:
        """Return the pinned tasks."""
        active = self.active
        return () if active is None else active.names if isinstance(active, Mixture) else (active,)

    # ---- identification ----------------------------------------------------------------------------------------------

    def identify(self, inputs: Mapping[str, Any]) -> tuple[Routing, TrunkRecord | None]:
        """Return the routing of a batch, and the outputs of a shared trunk if there is one."""
        signatures, recorded = self.parts.signatures, None
        routing, thresholds, distances = self.parts.config.routing, None, None
        temperature = self.parts.config.temperature
        if self.parts.identified_by == "weights":
            # Calibrated with images of their size; nothing else that came before may change what a row is taken for.
            form = self.cache.get("form", lambda: library_of(self.parts.model).input_form(self.parts.model))
            key = ("features", None if form is None else like(form, inputs))
            scorer = self.cache.get(key, lambda: announced_scorer_of(self.parts, inputs, self.proofs))
            scores = scorer(inputs)
            residuals = scorer.centre.to(scores.device) - scores
            if isinstance(signatures, WeightSignatures):
                residuals = residuals + signatures.lead.to(scores.device)
        elif not isinstance(signatures, Signatures):
            raise RetexError("The model has no task signatures yet: call fit_signatures, or name the task with task=.")
        else:
            extractor = self.cache.get("features", self._extractor)
            recorded = extractor.record(inputs)
            signatures = signatures.to(recorded.features[signatures.feature_layer].device)
            placed = signatures.space(recorded.features)
            residuals = signatures.residuals(placed)
            temperature = temperature or signatures.temperature
            options = routing_options(routing)
            if options["far"] is not None:
                thresholds = signatures.thresholds(options["quantile"], options["slack"])
                distances = signatures.distances(placed)
        decided = decide(residuals, self.tasks, routing, temperature or 1.0, thresholds, distances)
        return decided, None if recorded is None else self._trunk_record(recorded, decided)

    @property
    def trunk(self) -> SharedTrunk | None:
        """Return the trunk that rows of identified tasks share."""
        signatures, described = self.parts.signatures, self.parts.config.trunk
        alignment = signatures.alignment if isinstance(signatures, Signatures) else None
        if described is None or alignment is None:
            return None
        return self.cache.get("trunk", lambda: trunk_of(self.parts, alignment))

    def _extractor(self) -> FeatureExtractor:
        signatures, trunk = self.parts.signatures, self.trunk
        assert isinstance(signatures, Signatures)
        layers = list(signatures.space.layers)
        if trunk is None or not trunk.replayed:
            return extractor_of(self.parts, layers, known=self.proofs)
        layers = [trunk.junction, *(layer for layer in layers if layer != trunk.junction)]
        return extractor_of(self.parts, layers, trunk.blocks, known=self.proofs, with_cache=trunk.cached)

    def _trunk_record(self, recorded: Recorded, routing: Routing) -> TrunkRecord | None:
        """Return what the trunk has computed, aligned with each row's expert, where experts can continue from it."""
        trunk = self.trunk
        if trunk is None or not trunk.replayed or recorded.proof.refused:
            return None
        layout, weights = recorded.layouts[trunk.junction], assignment_of(routing).mixtures(len(self.tasks))
        return record_of(recorded).aligned(trunk.junction, layout, trunk.alignment, weights)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        task: Any = None,
        names: list[str] | None = None,
        *,
        recovered: bool = True,
        training: bool = False,
    ) -> Any:
        """Call a method of the wrapped model, every row on its own expert.

        Args:
            method: Name of the method.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            task: A task, one per row, or mixing weights; None identifies the rows.
            names: PEFT's `adapter_names`, instead of `task`.
            recovered: Whether experts are recovered; otherwise the merged model runs, under the heads of tasks.
            training: Whether the model is in training mode.
        """
        kwargs = self.bind(method, args, kwargs)
        if task is not None and names is not None:
            raise TaskError("task= and adapter_names= mean the same: give one of them.")
        task = self.active if task is None and names is None and recovered else task
        if task is None and names is None and not recovered:
            self._require_merged_tokens(kwargs)
            return attach_routing(call_method(self.parts.model, method, for_rows(kwargs, None)), None)
        runner, unnamed = self.runner(), task is None and names is None
        if unnamed and TEXT_ENTRY_POINT.match(method) and runner.library.is_dual_encoder(self.parts.model):
            self._require_shared_text_tower(method)
            return attach_routing(call_method(self.parts.model, method, kwargs), None)
        if method == "generate" and isinstance(task, str) and not any(isinstance(v, Tensor) for v in kwargs.values()):
            rows = 1  # transformers starts one row from the BOS token
        else:
            given = task if names is None else names
            rows = runner.count_rows(kwargs, len(given) if isinstance(given, (list, tuple)) else None)
        if rows == 0:
            raise InputError("The batch has no rows.")
        record = None
        if unnamed:
            runner = self.runner(behind_trunk=True)
            routing, record = self.identify(kwargs)
            self._require_something_to_learn(routing, kwargs, training)
            assignment = assignment_of(routing)
        else:
            assignment, routing = self._named(task, names, rows)
        if self.parts.config.labels:
            routing.num_labels = [runner.num_labels(index) for index in assignment.task_ids.tolist()]
        announce(kwargs, routing)
        # One named task gives that expert's own output; a routed batch has the same width for any tasks.
        widen = not isinstance(task, str)
        output = runner.run(method, kwargs, assignment, recovered=recovered, widen=widen, record=record)
        return attach_routing(output, routing)

    def _named(self, task: Any, names: list[str] | None, rows: int) -> tuple[Assignment, Routing]:
        """Return the assignment of rows whose tasks the caller names, and its routing."""
        if names is not None:
            assignment = parse_adapter_names(names, self.tasks, rows)
            self._require_heads(names)
        else:
            assignment = parse_task(task, self.tasks, rows)
            names = [self.tasks[index] for index in assignment.task_ids.tolist()]
        return assignment, Routing(assignment.task_ids, list(names), assignment.weights)

    def _require_something_to_learn(self, routing: Routing, kwargs: Mapping[str, Any], training: bool) -> None:
        """Refuse to train if all rows run on the merged model: the loss has no gradient, and torch does not say why."""
        learns = kwargs.get("labels") is not None and training and torch.is_grad_enabled()
        if learns and routing.abstained is not None and routing.weights is not None and not routing.weights.any():
            raise InputError(
                "All rows of this batch are out of distribution and run on the merged model, which is not trained: "
                'name the task with task=, or set model.routing = "hard" for training.'
            )

    def _require_merged_tokens(self, kwargs: Mapping[str, Any]) -> None:
        tokens = tokens_of(kwargs) if self.parts.config.vocabulary else None
        if tokens is None:
            return
        size = len(cast("PreTrainedModel", self.parts.model).get_input_embeddings().get_parameter("weight"))
        if int(tokens.max()) >= size:
            raise InputError(
                f"The batch holds the token {int(tokens.max())}, but the merged model has {size} tokens: name the task "
                "that has it with task=."
            )

    def _require_heads(self, names: list[str]) -> None:
        if BASE in names and any(self.parts.heads.values()):
            raise TaskError(
                f"{BASE!r} has no head of its own, because every task has one: within disable_adapter(), task= runs "
                "the merged model under the head of a task."
            )

    def _require_shared_text_tower(self, method: str) -> None:
        own = [name for name in self.parts.recovery if library_of(self.parts.model).is_text_parameter(name)]
        if own:
            raise TaskError(
                f"{method} cannot tell the task from a text, and the experts differ in their text tower ({own[0]!r}): "
                "name the task with task=."
            )

    def bind(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return positional arguments under their names, along with the keyword arguments."""
        check_spelling(getattr(self.parts.model, method), kwargs)
        if not args:
            return kwargs
        parameters = inspect.signature(getattr(self.parts.model, method)).parameters
        for name, parameter in list(parameters.items())[: len(args)]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise InputError(
                    f"{method} of {type(self.parts.model).__name__} takes {name!r} by position, so its "
                    "rows cannot be found: pass its arguments by name."
                )
        names = list(parameters)
        if len(args) > len(names):
            raise InputError(f"{method} takes at most {len(names)} positional arguments, not {len(args)}.")
        for name in names[: len(args)]:
            if name in kwargs:
                raise InputError(f"{method} got {name!r} twice.")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def runner(self, behind_trunk: bool = False) -> ExpertRunner:
        """Return the runner of the experts, which keeps them in the cache: of whole experts, or of those behind the
        shared trunk, where there is one."""
        parts, trunk = self.parts, self.trunk if behind_trunk else None
        if trunk is not None:
            recovery = self.cache.get("behind trunk", lambda: parts.recovery.without(trunk.parameters))
            parts = replace(parts, recovery=recovery)
        return runner_of(parts, self.cache, execution=self.execution, trunk=trunk, proofs=self.proofs)

    @torch.no_grad()  # in training mode, experts carry gradients and cannot be copied
    def expert(self, task: str | Mixture) -> nn.Module:
        """Return an expert to inspect or to copy, without gradients.

        It comes from the cache, unless training changes its weights.
        """
        runner = self.runner()
        runner = replace(runner, cache=ExpertCache(0)) if runner.model.training else runner
        if isinstance(task, Mixture):
            first = task_index(task.names[0], runner.tasks)
            return runner.expert(Group(first, torch.arange(0), task.weights(runner.tasks)))
        return runner.expert(Group(task_index(task, runner.tasks), torch.arange(0)))


def assignment_of(routing: Routing) -> Assignment:
    """Return which experts rows run on."""
    return Assignment(routing.task_ids.cpu(), None if routing.weights is None else routing.weights.cpu())
