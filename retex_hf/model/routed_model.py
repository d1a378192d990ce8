"""A merged model and its recovery, in use: rows are identified, and each runs on its own expert."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import convert_file_size_to_int
from torch import Tensor, nn

from ..artifact.state import RetexParts
from ..backends import as_inputs, library_of
from ..config import BASE, routing_options
from ..data.labels import best_label
from ..errors import ConfigError, InputError, RetexError, TaskError
from ..execution import (
    Assignment,
    ExpertCache,
    ExpertRunner,
    Mixture,
    TrunkRecord,
    as_active,
    attach_routing,
    beside_own,
    call_method,
    check_execution,
    copy_with,
    logits_of,
    parse_adapter_names,
    parse_task,
    task_index,
)
from ..execution.vocabulary_rows import rows_beyond, tokens_of, with_all_rows
from ..routing import FeatureExtractor, Routing, WeightScorer, block_lists, candidate_layers, decide, trying
from ..utils.devices import META
from ..utils.locks import Turn
from ..utils.tensor_bank import TensorBank
from .introspection import may_pass, refuse, shows_wrapped, without_shared_memory
from .peft_names import REFUSED, check_spelling, layer_status, model_status

if TYPE_CHECKING:
    from peft.peft_model import TunerLayerStatus, TunerModelStatus

# Methods of wrapped models that run on inputs. Of the others, those that only read are passed on (see `may_pass`).
ENTRY_POINT = re.compile(r"^(generate|encode_\w+|get_\w+_(features|embeds)|get_logits|forward_intermediates)$")
# Marks the merged model and its experts, which may be used alone.
GIVEN_AWAY = "_of_retex"
TEXT_ENTRY_POINT = re.compile(r"^(encode_text|get_text_(\w+_)?(features|embeds))$")

# Models whose recovery is disabled in the current context, once for each `with`. Not an attribute of the model, because
# `disable_adapter()` in one thread must not affect calls of another.
_disabled: ContextVar[tuple[Turn, ...]] = ContextVar("retex_disabled", default=())


class RoutedModel(nn.Module):
    """The wrapped model's interface over the parts of a [`RetexModel`], which adds building and saving.

    Threads can share a model. Calls run concurrently, and wait only for an expert that another call is recovering. A
    call uses the model as it was when the call began, whatever `set_adapter`, `routing`, `add_task`, `delete_task` and
    `fit_signatures` do meanwhile. Each of the last three is refused at its end if tasks, signatures or routing have
    changed since it began. An exception in a call leaves the model unchanged. torch's in-place methods must not run
    concurrently with calls: `train`, `eval`, `to`, `load_state_dict`.

    Processes can share it too: a forked child continues with the model as it was, whatever other threads were doing,
    and computes with one thread (a limitation of torch). A pickled model (`spawn`) is the same model with an empty
    expert cache.
    """

    def __init__(self, parts: RetexParts, *, expert_cache: str | int = "2GB", execution: str = "auto") -> None:
        super().__init__()
        self._turn = Turn()
        self._active: str | Mixture | None = None
        self._cache = ExpertCache(_parse_size(expert_cache))
        # Findings about kinds of calls, for execution and identification.
        self._proofs: dict[Any, Any] = {}
        self.execution = execution
        self._adopt(parts)
        self.eval()

    def _adopt(self, parts: RetexParts) -> None:
        self.retex_config = parts.config
        self.model = parts.model
        setattr(parts.model, GIVEN_AWAY, True)
        self.recovery = parts.recovery
        self.heads = TensorBank(parts.heads)
        self.rows = TensorBank(parts.rows)
        self.pretrained = TensorBank({"base": parts.pretrained})
        self.signatures = parts.signatures
        self.recovery_errors = parts.errors
        self.training_history = parts.history
        self.recipe = parts.recipe
        self.evaluation = parts.evaluation
        self._side_folder = parts.side_folder
        self._tokenizers = parts.tokenizers
        self._unverified = parts.unverified

    def _frozen(self) -> RoutedModel:
        """Return a snapshot of the model for one call, which tasks added or deleted meanwhile do not affect."""
        frozen = object.__new__(type(self))
        frozen.__dict__.update(self.__dict__)
        frozen._modules = dict(frozen._modules)
        return frozen

    def _exchange(self, old: RetexParts, new: RetexParts) -> None:
        """Replace old parts by new ones atomically; refuse if the model has changed meanwhile."""
        with self._turn.lock:
            current = (self.retex_config, self.recovery, self.signatures)
            if any(a is not b for a, b in zip(current, (old.config, old.recovery, old.signatures), strict=True)):
                raise RetexError("The model was changed by another thread meanwhile, so nothing was done: try again.")
            before, changed = self._frozen().__dict__, self._frozen()
            changed._adopt(new)
            # Running calls keep the old cache, and add nothing to this one.
            changed._cache = self._cache.emptied()
            if not set(changed._active_names()) <= set(changed.tasks):
                changed._active = None
            # In one step, so that no new call, Ctrl-C or fork sees a partial change.
            self.__dict__.update({key: value for key, value in vars(changed).items() if before.get(key) is not value})

    def parts(self) -> RetexParts:
        """Return a snapshot of the model's parts."""
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
            rows=frozen._own_rows(),
            tokenizers=frozen._tokenizers,
        )

    def _own_rows(self) -> dict[str, dict[str, Tensor]]:
        return {task: own for task, own in self.rows.as_dict(self.retex_config.vocabulary).items() if own}

    # ---- identification ----------------------------------------------------------------------------------------------

    def identify(self, *args: Any, **inputs: Any) -> Routing:
        """Identify the task of each row: return `task_ids`, `tasks`, `residuals` and `probabilities`."""
        if len(args) == 1 and not inputs:  # a bare tensor is the main input, as in fit_signatures
            return self._frozen()._identify(as_inputs(self.model, args[0]))[0]
        return self._frozen()._identify(self._bind("forward", args, inputs))[0]

    def _identify(self, inputs: Mapping[str, Any]) -> tuple[Routing, TrunkRecord | None]:
        """Return the routing of a batch, and the outputs of a shared trunk if there is one."""
        signatures, record = self.signatures, None
        routing, thresholds = self.retex_config.routing, None
        if self.retex_config.signatures == "weights":
            scores = self._cache.get("features", lambda: self._scorer(inputs))(inputs)
            residuals = -scores if signatures is None else signatures.to(scores.device).centre - scores
        elif signatures is None:
            raise RetexError("The model has no task signatures yet: call fit_signatures, or name the task with task=.")
        else:
            layer = signatures.feature_layer
            extractor = self._cache.get("features", lambda: self._extractor([layer]))
            recorded = extractor.record(inputs)
            features = recorded.features[layer]
            signatures = signatures.to(features.device)
            residuals = signatures.residuals(features)
            options = routing_options(routing)
            if options["far"] is not None:
                thresholds = signatures.thresholds(options["quantile"], options["slack"])
            if self._trunk_blocks() and not recorded.proof.refused:
                record = TrunkRecord(recorded.outputs, recorded.rows, recorded.proof, recorded.reading)
        return decide(residuals, self.tasks, routing, self.retex_config.temperature, thresholds), record

    def _trunk_blocks(self) -> list[str]:
        """Return the blocks whose outputs the feature pass passes on to the experts."""
        trunk, layer = self.retex_config.trunk, getattr(self.signatures, "feature_layer", None)
        if trunk is None or not trunk["replayed"] or layer is None:
            return []
        lists = self._cache.get("blocks", lambda: block_lists(self.model))
        return next((blocks[: blocks.index(layer) + 1] for blocks in lists if layer in blocks), [layer])

    def _extractor(self, layers: list[str]) -> FeatureExtractor:
        pretrained = self.pretrained.as_dict(["base"])["base"]
        tensors = beside_own(self.model, pretrained)
        # Rows of unknown tasks may hold tokens that only some tasks have.
        if self.retex_config.vocabulary:
            heads = self.heads.as_dict(self.tasks)
            rows = rows_beyond(self.model, library_of(self.model), heads, self._own_rows())
            tensors |= with_all_rows({**self.model.state_dict(), **tensors}, rows)
        model = copy_with(self.model, tensors).eval()
        return FeatureExtractor(
            model, layers, self.retex_config.feature_pooling, self._trunk_blocks(), known=self._proofs
        )

    def _scorer(self, sample: Mapping[str, Any]) -> WeightScorer:
        if self.signatures is not None:
            return WeightScorer(self._extractor([self.signatures.feature_layer]), self.recovery)
        usable = trying(self._extractor, candidate_layers(self.model, self.retex_config), sample)
        return WeightScorer(self._extractor(usable.layers[-1:]), self.recovery)

    # ---- use ---------------------------------------------------------------------------------------------------------

    @shows_wrapped
    def forward(
        self, *args: Any, task: Any = None, adapter_names: list[str] | None = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        """Run the wrapped model's `forward`, every row on its own expert."""
        if labels is not None:  # a separate argument, because `Trainer` looks for its name in the class
            kwargs["labels"] = labels
            if (
                self.training
                and torch.is_grad_enabled()
                and not any(parameter.requires_grad for parameter in self.parameters())
            ):
                raise RetexError(
                    "No parameter of this model can be trained: load it with from_pretrained(..., is_trainable=True)."
                )
        return self._frozen()._routed("forward", args, kwargs, task, adapter_names)

    def predict(
        self, *args: Any, task: Any = None, adapter_names: list[str] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Classify every row: return its task, its label and the label's score.

        If the routing abstains on out-of-distribution rows, `far` tells whether it did.
        """
        frozen = self._frozen()
        output = frozen.forward(*args, task=task, adapter_names=adapter_names, **kwargs)
        labels = frozen.retex_config.labels
        logits = logits_of(output)
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

    def _routed(
        self, method: str, args: tuple, kwargs: dict[str, Any], task: Any, names: list[str] | None = None
    ) -> Any:
        kwargs = self._bind(method, args, kwargs)
        recovered = self._turn not in _disabled.get()
        if task is not None and names is not None:
            raise TaskError("task= and adapter_names= say the same: give one of them.")
        task = self._active if task is None and names is None and recovered else task
        if task is None and names is None and not recovered:
            self._require_merged_tokens(kwargs)
            return attach_routing(call_method(self.model, method, kwargs), None)
        runner = self._runner()
        unnamed = task is None and names is None
        if unnamed and TEXT_ENTRY_POINT.match(method) and runner.library.is_dual_encoder(self.model):
            self._require_shared_text_tower(method)
            return attach_routing(call_method(self.model, method, kwargs), None)
        if method == "generate" and isinstance(task, str) and not any(isinstance(v, Tensor) for v in kwargs.values()):
            rows = 1  # transformers starts one row from the BOS token
        else:
            given = task if names is None else names
            rows = runner.count_rows(kwargs, len(given) if isinstance(given, (list, tuple)) else None)
        if rows == 0:
            raise InputError("The batch has no rows.")
        record = None
        if names is not None:
            assignment = parse_adapter_names(names, self.tasks, rows)
            self._require_heads(names)
            routing = Routing(assignment.task_ids, list(names), assignment.weights)
        elif task is None:
            routing, record = self._identify(kwargs)
            self._require_something_to_learn(routing, kwargs)
            assignment = Assignment(routing.task_ids.cpu(), None if routing.weights is None else routing.weights.cpu())
        else:
            assignment = parse_task(task, self.tasks, rows)
            given = [self.tasks[index] for index in assignment.task_ids.tolist()]
            routing = Routing(assignment.task_ids, given, assignment.weights)
        if self.retex_config.labels:
            routing.num_labels = [runner.num_labels(index) for index in assignment.task_ids.tolist()]
        # One named task gives that expert's own output; a routed batch has the same width for any tasks.
        widen = not isinstance(task, str)
        output = runner.run(method, kwargs, assignment, recovered=recovered, widen=widen, record=record)
        return attach_routing(output, routing)

    def _require_something_to_learn(self, routing: Routing, kwargs: Mapping[str, Any]) -> None:
        """Refuse to train if all rows run on the merged model: the loss has no gradient, and torch does not say why."""
        learns = kwargs.get("labels") is not None and self.training and torch.is_grad_enabled()
        if learns and routing.abstained is not None and not routing.weights.any():
            raise InputError(
                "All rows of this batch are far from every task and run on the merged model, which is not trained: "
                'name the task with task=, or set model.routing = "hard" for training.'
            )

    def _require_merged_tokens(self, kwargs: Mapping[str, Any]) -> None:
        tokens = tokens_of(kwargs) if self.retex_config.vocabulary else None
        size = len(self.model.get_input_embeddings().weight) if tokens is not None else 0
        if tokens is not None and int(tokens.max()) >= size:
            raise InputError(
                f"The batch holds the token {int(tokens.max())}, but the merged model has {size} tokens: name the task "
                "that has it with task=."
            )

    def _require_heads(self, names: list[str]) -> None:
        if BASE in names and any(self.heads.as_dict(self.tasks).values()):
            raise TaskError(
                f"{BASE!r} has no head of its own, because every task has one: within disable_adapter(), task= runs "
                "the merged model under the head of a task."
            )

    def _require_shared_text_tower(self, method: str) -> None:
        own = [name for name in self.recovery if library_of(self.model).is_text_parameter(name)]
        if own:
            raise TaskError(
                f"{method} cannot tell the task from a text, and the experts differ in their text tower ({own[0]!r}): "
                "name the task with task=."
            )

    def _bind(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return positional arguments under their names, along with the keyword arguments."""
        check_spelling(getattr(self.model, method), kwargs)
        if not args:
            return kwargs
        parameters = inspect.signature(getattr(self.model, method)).parameters
        for name, parameter in list(parameters.items())[: len(args)]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise InputError(
                    f"{method} of {type(self.model).__name__} takes {name!r} without a name, which no row "
                    "can be taken from: give its arguments names."
                )
        names = list(parameters)
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
            rows=self._own_rows(),
            vocabulary=self.retex_config.vocabulary,
            proofs=self._proofs,
        )

    # ---- settings ----------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks, in the order of their ids."""
        return self.retex_config.tasks

    @property
    def side_folder(self) -> Path | None:
        """Return the folder of the tokenizer and processor files: where the model came from, or its base."""
        return self._side_folder

    def tokenizer_folder(self, task: str | None = None) -> Path | None:
        """Return the folder of a task's tokenizer: its own if it has one, else the merged model's.

        >>> AutoTokenizer.from_pretrained(model.tokenizer_folder("chat"))  # doctest: +SKIP
        """
        if task is not None:
            task_index(task, self.tasks)
        return self._tokenizers.get(task, self._side_folder)

    @property
    def execution(self) -> str:
        """Return how a batch of several tasks runs.

        `"grouped"` runs one recovered expert after the other, `"mixed"` all rows in one pass of the merged model with
        each row's own offsets beside it, and `"auto"` the one that a cost model predicts to be cheaper. Both give the
        same outputs. Quantised or offloaded weights always run mixed.
        """
        return self._execution

    @execution.setter
    def execution(self, value: str) -> None:
        self._execution = check_execution(value)

    @property
    def routing(self) -> str | dict[str, Any]:
        """Return how rows are routed to tasks, as in [`RetexConfig`]; an assignment takes effect from the next call.

        >>> model.routing = {"method": "hard", "far": "merged"}  # doctest: +SKIP
        """
        return self.retex_config.routing

    @routing.setter
    def routing(self, value: str | dict[str, Any]) -> None:
        with self._turn.lock:
            self.retex_config = replace(self.retex_config, routing=value)

    @property
    def expert_cache(self) -> ExpertCache:
        """Return the cache of recovered experts, with its statistics.

        >>> model.expert_cache  # doctest: +SKIP
        ExpertCache(2 experts, 703463424 of 2000000000 bytes, hits=61, misses=2, evictions=0)
        """
        return self._cache

    def _active_names(self) -> tuple[str, ...]:
        active = self._active
        return () if active is None else active.names if isinstance(active, Mixture) else (active,)

    @property
    def active_adapter(self) -> str | list[str] | None:
        """Return the task that calls without `task=` use (a list for a mixture), or None while they are routed."""
        names = self._active_names()
        return list(names) if len(names) > 1 else next(iter(names), None)

    @property
    def active_adapters(self) -> list[str]:
        """Return the tasks that calls without `task=` may use: the pinned or all; none within `disable_adapter()`."""
        return list(self._active_names() or self.tasks) if self.has_active_enabled_adapter else []

    @property
    def has_active_enabled_adapter(self) -> bool:
        """Return whether calls run on recovered experts; False within `disable_adapter()`."""
        return self._turn not in _disabled.get()

    def set_adapter(self, task: str | list[str] | None, *, inference_mode: bool | None = None) -> None:
        """Pin a task for all calls that do not name one; None restores routing.

        Several tasks are mixed in equal parts, with the head of the first. (PEFT adds adapters; here the differences of
        n tasks from the merged model are averaged.)

        Args:
            task: Name of the task, a list of names, or None.
            inference_mode: As in PEFT, whether it is frozen. All tasks share their trained parameters, which this
                method does not change: a value other than the model was loaded with is refused.
        """
        if inference_mode is not None and inference_mode == self.recovery.task_embedding.requires_grad:
            raise ConfigError(
                f"inference_mode={inference_mode} is not for a single task, because tasks share what is trained: load "
                f"with RetexModel.from_pretrained(..., is_trainable={not inference_mode})."
            )
        with self._turn.lock:  # held by delete_task while it checks whether its task is pinned
            self._active = as_active(task, self.tasks)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the plain merged model within this context; `task=` still selects the head of a task.

        It applies to the thread or asyncio task that enters it, and to those that are given a copy of its context, such
        as `asyncio.to_thread`.
        """
        _disabled.set((*_disabled.get(), self._turn))
        try:
            yield
        finally:
            # Abandoned generators may end in any order, so each removes only its own entry.
            entered = list(_disabled.get())
            if self._turn in entered:  # absent if it ends in another thread's context
                entered.remove(self._turn)
            _disabled.set(tuple(entered))

    def get_model_status(self) -> TunerModelStatus:
        """Return PEFT's model status, with tasks as adapters."""
        return model_status(self._frozen())

    def get_layer_status(self) -> list[TunerLayerStatus]:
        """Return PEFT's layer status, with an entry per recovered parameter."""
        return layer_status(self._frozen())

    def get_base_model(self) -> nn.Module:
        """Return the wrapped (merged) model. Hooks registered on it apply to experts recovered afterwards."""
        return self.model

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], **options: Any) -> None:
        """Change the attention implementation of the merged model, and of experts recovered from now on."""
        self.model.set_attn_implementation(attn_implementation, **options)
        self._cache = self._cache.emptied()

    @property
    def generation_config(self) -> Any:
        """Return the wrapped model's generation settings; an assignment applies to every expert."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.model.generation_config = value

    # ---- nn.Module ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RoutedModel:
        """Set the mode like `nn.Module.train`. In training, gradients reach the recovery module through the experts."""
        changes = mode != self.training
        super().train(mode)
        if changes:
            # Cached experts do not reflect what training changes.
            self._cache = self._cache.emptied()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return a snapshot for copying or pickling, consistent even while tasks are added or deleted.

        The result of `compile()` is left out, because it is bound to this very model.
        """
        state = self._frozen().__dict__
        state.pop("_compiled_call_impl", None)
        state["_proofs"] = dict(self._proofs)  # other threads add to it while it is copied
        return state

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return `nn.Module.state_dict`; without `keep_vars`, tied tensors are copies that do not share memory."""
        tensors = super().state_dict(*args, keep_vars=keep_vars, **kwargs)
        return tensors if keep_vars else without_shared_memory(tensors)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._cache.clear()  # experts recovered from weights about to be replaced
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        self._cache.clear()
        super()._apply(fn, recurse)
        device = self.recovery.task_embedding.device
        if self.signatures is not None and device != META:
            self.signatures = self.signatures.to(device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # not set yet: delegating would recurse
                raise
        if name in REFUSED:
            raise AttributeError(REFUSED[name])
        value = getattr(self.model, name)
        if ENTRY_POINT.match(name) and callable(value):
            return partial(self._entry_point, name)
        if isinstance(value, nn.Module):
            raise AttributeError(
                f"{name!r} is a part of the merged model, and knows nothing of tasks: model.get_base_model().{name}, "
                f"or that of an expert, model.merge_and_unload(task).{name}."
            )
        return value if may_pass(name, value) else partial(refuse, name, type(self.model).__name__)

    def _entry_point(
        self, method: str, *args: Any, task: Any = None, adapter_names: list[str] | None = None, **kwargs: Any
    ) -> Any:
        return self._frozen()._routed(method, args, kwargs, task, adapter_names)


def _parse_size(size: str | int) -> int:
    try:
        return convert_file_size_to_int(size)
    except ValueError:
        raise ConfigError(f'expert_cache must be a number of bytes or a size such as "2GB", not {size!r}.') from None
