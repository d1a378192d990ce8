"""A merged model and what recovers its experts, in use: rows are identified, and each runs on its own expert."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .config import routing_options
from .errors import ConfigError, InputError, RetexError, TaskError
from .execution import (
    Assignment,
    ExpertCache,
    ExpertRunner,
    TrunkRecord,
    attach_routing,
    call_method,
    check_execution,
    copy_with,
    in_own_dtypes,
    parse_task,
    task_index,
)
from .labels import best_label
from .libraries import as_inputs, library_of
from .locks import Turn
from .parts import RetexParts
from .routing import (
    FeatureExtractor,
    Routing,
    WeightScorer,
    decide,
    feature_blocks,
    resolve_feature_layers,
)
from .tensor_bank import TensorBank
from .wrapped import shows_wrapped, without_shared_memory

# Methods of wrapped models that run on inputs; all others (`num_parameters`, `get_input_embeddings`) pass through.
ENTRY_POINT = re.compile(r"^(generate|encode_\w+|get_\w+_features|get_logits|forward_intermediates)$")
TEXT_ENTRY_POINT = re.compile(r"^(encode_text|get_text_features)$")

# Models whose recovery is switched off in the current context, once for each `with`. Not an attribute of the model: one
# thread's `disable_adapter()` must not reach into another's call.
_disabled: ContextVar[tuple[Turn, ...]] = ContextVar("retex_disabled", default=())


class RoutedModel(nn.Module):
    """The wrapped model's interface over the parts of a [`RetexModel`], which adds how they are made and kept.

    Threads can share a model. Calls run side by side, and none waits for another's pass through the model; those that
    need the same expert at the same moment wait until one of them has made it. A call goes by the model as it was when
    the call began, whatever `set_adapter`, `routing`, `add_task`, `delete_task` and `fit_signatures` do meanwhile.
    Each of the last three is refused at its end, if tasks, signatures or routing have become others since it began.
    Whatever a call raises, the model is as before. What torch does to a module in place is not for use beside calls:
    `train`, `eval`, `to`, `load_state_dict`.

    Processes can share it too: a child that is forked goes on with the model as it was, whatever other threads were
    doing, and computes with one thread (torch can take no others along). A pickled model (`spawn`) is the same model
    with an empty expert cache.
    """

    def __init__(self, parts: RetexParts, *, expert_cache: str | int = "2GB", execution: str = "auto") -> None:
        super().__init__()
        self._turn = Turn()
        self._active_task: str | None = None
        self._cache = ExpertCache(_parse_size(expert_cache))
        self.execution = execution
        self._adopt(parts)
        self.eval()

    def _adopt(self, parts: RetexParts) -> None:
        self.retex_config = parts.config
        self.model = parts.model
        self.recovery = parts.recovery
        self.heads = TensorBank(parts.heads)
        self.pretrained = TensorBank({"base": parts.pretrained})
        self.signatures = parts.signatures
        self.recovery_errors = parts.errors
        self.training_history = parts.history
        self.recipe = parts.recipe
        self.evaluation = parts.evaluation
        self._side_folder = parts.side_folder
        self._unverified = parts.unverified

    def _frozen(self) -> RoutedModel:
        """The model as it is at this moment, for one call: tasks that come or go meanwhile do not reach into it."""
        frozen = object.__new__(type(self))
        frozen.__dict__.update(self.__dict__)
        frozen._modules = dict(frozen._modules)
        return frozen

    def _exchange(self, old: RetexParts, new: RetexParts) -> None:
        """Take new parts in the place of old ones, all at once."""
        with self._turn.lock:
            current = (self.retex_config, self.recovery, self.signatures)
            if any(a is not b for a, b in zip(current, (old.config, old.recovery, old.signatures), strict=True)):
                raise RetexError("The model was changed by another thread meanwhile, so nothing was done: try again.")
            before, changed = self._frozen().__dict__, self._frozen()
            changed._adopt(new)
            # Calls that are running go on with the cache they know, and leave nothing in this one.
            changed._cache = self._cache.emptied()
            if changed._active_task not in changed.tasks:
                changed._active_task = None
            # In one step: neither a call that begins, nor Ctrl-C, nor a fork can come in between.
            self.__dict__.update({key: value for key, value in vars(changed).items() if before.get(key) is not value})

    def parts(self) -> RetexParts:
        """What the model is made of, as it is at this moment."""
        frozen = self._frozen()
        return RetexParts(
            config=frozen.retex_config,
            model=frozen.model,
            recovery=frozen.recovery,
            heads=frozen.heads.as_dict(frozen.tasks),
            errors=frozen.recovery_errors,
            signatures=frozen.signatures,
            pretrained=frozen.pretrained.as_dict(["base"])["base"],
            side_folder=frozen._side_folder,
            history=frozen.training_history,
            recipe=frozen.recipe,
            evaluation=frozen.evaluation,
            unverified=frozen._unverified,
        )

    # ---- identification ----------------------------------------------------------------------------------------------

    def identify(self, *args: Any, **inputs: Any) -> Routing:
        """Which task each row belongs to: `task_ids`, `tasks`, `residuals` and `probabilities`."""
        if len(args) == 1 and not inputs:  # a bare tensor is the main input, as in fit_signatures
            return self._frozen()._identify(as_inputs(self.model, args[0]))[0]
        return self._frozen()._identify(self._bind("forward", args, inputs))[0]

    def _identify(self, inputs: Mapping[str, Any]) -> tuple[Routing, TrunkRecord | None]:
        """The routing of a batch, and what a shared trunk computed on the way."""
        signatures, record = self.signatures, None
        routing, thresholds = self.retex_config.routing, None
        if self.retex_config.signatures == "weights":
            scores = self._cache.get("features", self._scorer)(inputs)
            residuals = -scores if signatures is None else signatures.to(scores.device).centre - scores
        elif signatures is None:
            raise RetexError("The model has no task signatures yet: call fit_signatures, or name the task with task=.")
        else:
            layer = signatures.feature_layer
            extractor = self._cache.get("features", lambda: self._extractor([layer]))
            features, outputs = extractor.record(inputs)
            signatures = signatures.to(features[layer].device)
            residuals = signatures.residuals(features[layer])
            options = routing_options(routing)
            if options["far"] is not None:
                thresholds = signatures.thresholds(options["quantile"], options["slack"])
            if self._trunk_blocks():
                record = TrunkRecord(outputs, len(residuals))
        return decide(residuals, self.tasks, routing, self.retex_config.temperature, thresholds), record

    def _trunk_blocks(self) -> list[str]:
        """Blocks whose outputs a feature pass hands on to the experts."""
        trunk, layer = self.retex_config.trunk, getattr(self.signatures, "feature_layer", None)
        if trunk is None or not trunk["replayed"] or layer is None:
            return []
        blocks = self._cache.get("blocks", lambda: feature_blocks(self.model))
        return blocks[: blocks.index(layer) + 1] if layer in blocks else [layer]

    def _extractor(self, layers: list[str]) -> FeatureExtractor:
        pretrained = self.pretrained.as_dict(["base"])["base"]
        model = copy_with(self.model, in_own_dtypes(self.model, pretrained)).eval()
        return FeatureExtractor(model, layers, self.retex_config.feature_pooling, self._trunk_blocks())

    def _scorer(self) -> WeightScorer:
        last = resolve_feature_layers(self.model, self.retex_config)[-1]
        return WeightScorer(self._extractor([last]), self.recovery)

    # ---- use ---------------------------------------------------------------------------------------------------------

    @shows_wrapped
    def forward(self, *args: Any, task: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """The wrapped model's `forward`, every row on its own expert."""
        if labels is not None:  # an argument of its own, because `Trainer` looks for its name in the class
            kwargs["labels"] = labels
            if (
                self.training
                and torch.is_grad_enabled()
                and not any(parameter.requires_grad for parameter in self.parameters())
            ):
                raise RetexError(
                    "No parameter of this model can be trained: load it with from_pretrained(..., is_trainable=True)."
                )
        return self._frozen()._routed("forward", args, kwargs, task)

    def predict(self, *args: Any, task: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """For classifiers: the task, the label and its score, for every row; also whether the row is `far` from every
        task, where the routing says what becomes of such rows."""
        frozen = self._frozen()
        output = frozen.forward(*args, task=task, **kwargs)
        labels = frozen.retex_config.labels
        logits = output.get("logits") if isinstance(output, ModelOutput) else None
        if not labels or logits is None or logits.ndim != 2:
            raise RetexError(f"predict needs one classification per row; {type(self.model).__name__} gives none.")
        if output.routing is None:
            raise TaskError("Without recovery nothing says which head to use: name the task with task=.")
        read = [best_label(row, labels[name]) for name, row in zip(output.routing.tasks, logits, strict=True)]
        rows = zip(output.routing.tasks, read, strict=True)
        answers = [{"task": name, "label": label, "score": score} for name, (label, score) in rows]
        if output.routing.abstained is None:
            return answers
        far = output.routing.abstained.tolist()
        return [{**answer, "far": abstained} for answer, abstained in zip(answers, far, strict=True)]

    def _routed(self, method: str, args: tuple, kwargs: dict[str, Any], task: Any) -> Any:
        kwargs = self._bind(method, args, kwargs)
        recovered = self._turn not in _disabled.get()
        task = self._active_task if task is None and recovered else task
        if task is None and not recovered:
            return attach_routing(call_method(self.model, method, kwargs), None)
        runner = self._runner()
        if task is None and TEXT_ENTRY_POINT.match(method) and runner.library.is_dual_encoder(self.model):
            self._require_shared_text_tower(method)
            return attach_routing(call_method(self.model, method, kwargs), None)
        if method == "generate" and isinstance(task, str) and not any(isinstance(v, Tensor) for v in kwargs.values()):
            rows = 1  # transformers starts one row from the BOS token
        else:
            rows = runner.count_rows(kwargs)
        if rows == 0:
            raise InputError("The batch has no rows.")
        record = None
        if task is None:
            routing, record = self._identify(kwargs)
            self._require_something_to_learn(routing, kwargs)
            assignment = Assignment(routing.task_ids.cpu(), None if routing.weights is None else routing.weights.cpu())
        else:
            assignment = parse_task(task, self.tasks, rows)
            names = [self.tasks[index] for index in assignment.task_ids.tolist()]
            routing = Routing(assignment.task_ids, names, assignment.weights)
        if self.retex_config.labels:
            routing.num_labels = [runner.num_labels(index) for index in assignment.task_ids.tolist()]
        # One named task is that expert's own output; a routed batch has the same width whatever tasks it holds.
        widen = not isinstance(task, str)
        output = runner.run(method, kwargs, assignment, recovered=recovered, widen=widen, record=record)
        return attach_routing(output, routing)

    def _require_something_to_learn(self, routing: Routing, kwargs: Mapping[str, Any]) -> None:
        """The merged model is not trained: the loss of rows that all run on it has no gradient, and torch does not say
        why."""
        learns = kwargs.get("labels") is not None and self.training and torch.is_grad_enabled()
        if learns and routing.abstained is not None and not routing.weights.any():
            raise InputError(
                "All rows of this batch are far from every task and run on the merged model, which is not trained: "
                'name the task with task=, or set model.routing = "hard" for training.'
            )

    def _require_shared_text_tower(self, method: str) -> None:
        own = [name for name in self.recovery if library_of(self.model).is_text_parameter(name)]
        if own:
            raise TaskError(
                f"{method} cannot tell the task from a text, and the experts differ in their text tower ({own[0]!r}): "
                "name the task with task=."
            )

    def _bind(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Positional arguments under their names."""
        if not args:
            return kwargs
        names = list(inspect.signature(getattr(self.model, method)).parameters)
        if len(args) > len(names):
            raise InputError(f"{method} takes at most {len(names)} positional arguments, not {len(args)}.")
        for name in names[: len(args)]:
            if name in kwargs:
                raise InputError(f"{method} got {name!r} twice.")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _runner(self, cache: ExpertCache | None = None) -> ExpertRunner:
        return ExpertRunner(
            model=self.model,
            library=library_of(self.model),
            recovery=self.recovery,
            tasks=self.tasks,
            heads=self.heads.as_dict(self.tasks),
            labels=self.retex_config.labels,
            cache=self._cache if cache is None else cache,
            execution=self.execution,
            trunk=self._trunk_blocks(),
        )

    # ---- settings ----------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order of their ids."""
        return self.retex_config.tasks

    @property
    def side_folder(self) -> Path | None:
        """Where tokenizer and processor files lie that are saved with the model: the folder it was loaded from, or
        that of its base."""
        return self._side_folder

    @property
    def execution(self) -> str:
        """How a batch of several tasks runs: `"grouped"` (one recovered expert after the other), `"mixed"` (all rows in
        one pass of the merged model, each with its own offsets beside it), or `"auto"` (what a cost model says is
        cheaper; both give the same outputs). Weights that are quantised or offloaded always run mixed."""
        return self._execution

    @execution.setter
    def execution(self, value: str) -> None:
        self._execution = check_execution(value)

    @property
    def routing(self) -> str | dict[str, Any]:
        """How rows are given to tasks, as in [`RetexConfig`]; assigning another way holds for the calls that follow.

        >>> model.routing = {"method": "hard", "far": "merged"}  # doctest: +SKIP
        """
        return self.retex_config.routing

    @routing.setter
    def routing(self, value: str | dict[str, Any]) -> None:
        with self._turn.lock:
            self.retex_config = replace(self.retex_config, routing=value)

    @property
    def expert_cache(self) -> ExpertCache:
        """The recovered experts at hand, and how well that works.

        >>> model.expert_cache  # doctest: +SKIP
        ExpertCache(2 experts, 703463424 of 2000000000 bytes, hits=61, misses=2, evictions=0)
        """
        return self._cache

    @property
    def active_adapter(self) -> str | None:
        """The task that calls without `task=` use, or None while they are routed."""
        return self._active_task

    def set_adapter(self, task: str | None) -> None:
        """Pin one task for all calls that do not name one; None goes back to routing."""
        with self._turn.lock:  # which delete_task has while it looks whether its task is pinned
            if task is not None:
                task_index(task, self.tasks)
            self._active_task = task

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within this context the model is the plain merged model; `task=` still selects the head of a task.

        It holds for the thread, or the asyncio task, that enters it, and for those that are given a copy of its
        context, such as `asyncio.to_thread`."""
        _disabled.set((*_disabled.get(), self._turn))
        try:
            yield
        finally:
            # Generators that are left half-way end in any order: each takes away what it has added.
            entered = list(_disabled.get())
            if self._turn in entered:  # not so if it ends in another thread, whose context never had it
                entered.remove(self._turn)
            _disabled.set(tuple(entered))

    def get_base_model(self) -> nn.Module:
        """The wrapped (merged) model. Hooks registered on it act on the experts that are recovered afterwards."""
        return self.model

    @property
    def generation_config(self) -> Any:
        """The wrapped model's generation settings; assigning new ones reaches every expert."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.model.generation_config = value

    # ---- nn.Module ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RoutedModel:
        """As `nn.Module.train`. In training mode gradients reach the recovery module through the experts."""
        changes = mode != self.training
        super().train(mode)
        if changes:
            # Experts were recovered from what training is about to change, or has changed.
            self._cache = self._cache.emptied()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled: the model of one moment, even while tasks come or go."""
        return self._frozen().__dict__

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> dict[str, Any]:
        """As `nn.Module.state_dict`; without `keep_vars`, tied tensors are equal, but do not share memory."""
        tensors = super().state_dict(*args, keep_vars=keep_vars, **kwargs)
        return tensors if keep_vars else without_shared_memory(tensors)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._cache.clear()  # of experts that were recovered from what is about to be replaced
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        self._cache.clear()
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # not set yet: looking further would recurse
                raise
        value = getattr(self.model, name)
        if ENTRY_POINT.match(name) and callable(value):
            return partial(self._entry_point, name)
        return value

    def _entry_point(self, method: str, *args: Any, task: Any = None, **kwargs: Any) -> Any:
        return self._frozen()._routed(method, args, kwargs, task)


def _parse_size(size: str | int) -> int:
    try:
        return convert_file_size_to_int(size)
    except ValueError:
        raise ConfigError(f'expert_cache must be a number of bytes or a size such as "2GB", not {size!r}.') from None
