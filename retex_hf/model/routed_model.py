"""`RoutedModel`: the wrapped model's interface, settings and torch's module interface over a swappable state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from ..artifact.recipe_record import RecipeRecord
from ..artifact.state import MODULES, RetexParts
from ..backends import as_inputs
from ..config import RetexConfig
from ..data.labels import best_label
from ..errors import ConfigError, RetexError, TaskError, brief
from ..execution import ExpertCache, as_active, check_execution, logits_of, task_index
from ..recovery import RecoveryModule
from ..routing import Routing, Signatures, WeightSignatures
from ..utils.byte_sizes import parse_size
from ..utils.devices import META
from ..utils.locks import ChangeLock
from ..utils.tensor_bank import TensorBank
from .introspection import may_pass, refuse, shows_wrapped, without_shared_memory
from .peft_names import REFUSED, layer_status, model_status
from .snapshot import Snapshot

if TYPE_CHECKING:
    from peft.peft_model import TunerLayerStatus, TunerModelStatus
    from transformers import PreTrainedModel

# Methods of wrapped models that run on inputs. Of the others, those that only read are passed on (see `may_pass`).
ENTRY_POINT = re.compile(r"^(generate|encode_\w+|get_\w+_(features|embeds)|get_logits|forward_intermediates)$")
# Marks the merged model and its experts, which may be used alone.
GIVEN_AWAY = "_of_retex"

# Models whose recovery is disabled in the current context, once for each `with`. Not an attribute of the model, because
# `disable_adapter()` in one thread must not affect calls of another.
_disabled: ContextVar[tuple[ChangeLock, ...]] = ContextVar("retex_disabled", default=())


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
        self._change = ChangeLock()
        setattr(parts.model, GIVEN_AWAY, True)
        self._swap(Snapshot(parts, ExpertCache(parse_size(expert_cache, "expert_cache")), check_execution(execution)))
        self.eval()

    def _swap(self, state: Snapshot) -> None:
        """Replace the state, and torch's view of its modules, in one step: no call, Ctrl-C or fork sees only one."""
        self.__dict__.update(_state=state, _modules=state.parts.modules)

    def _exchange(self, old: RetexParts, new: RetexParts) -> None:
        """Replace old parts by new ones; refuse if the model has changed meanwhile."""
        with self._change.lock:
            now = self._state.parts
            if any(getattr(now, part) is not getattr(old, part) for part in ("config", "recovery", "signatures")):
                raise RetexError("The model was changed by another thread meanwhile, so nothing was done: try again.")
            setattr(new.model, GIVEN_AWAY, True)
            self._swap(self._state.with_parts(new))

    def _set(self, **parts: Any) -> None:
        """Replace single parts, and forget the experts and features that were made with the old ones."""
        with self._change.lock:
            self._swap(self._state.with_parts(replace(self._state.parts, **parts)))

    def _note(self, **parts: Any) -> None:
        """Replace parts that no call depends on."""
        with self._change.lock:
            self._swap(replace(self._state, parts=replace(self._state.parts, **parts)))

    def parts(self) -> RetexParts:
        """Return the model's parts, which later changes leave as they are."""
        return self._state.parts

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def retex_config(self) -> RetexConfig:
        """Return a copy of the artifact's configuration; `config` is the wrapped model's.

        >>> model.retex_config = dataclasses.replace(model.retex_config, temperature=0.5)  # doctest: +SKIP
        """
        return deepcopy(self._state.parts.config)

    @retex_config.setter
    def retex_config(self, value: RetexConfig) -> None:
        if not isinstance(value, RetexConfig) or value.tasks != self._state.tasks:
            raise ConfigError(
                f"retex_config must be a RetexConfig of the tasks {self._state.tasks}, not {brief(value)}."
            )
        self._set(config=value)

    @property
    def model(self) -> nn.Module:
        """Return the wrapped (merged) model."""
        return self._state.parts.model

    @property
    def recovery(self) -> RecoveryModule:
        """Return the module that recovers the experts."""
        return self._state.parts.recovery

    @property
    def heads(self) -> TensorBank:
        """Return the tensors that each task stores whole: `model.heads[task][name]`."""
        return self._state.parts.heads

    @property
    def rows(self) -> TensorBank:
        """Return each task's rows of tokens that the merged model lacks."""
        return self._state.parts.rows

    @property
    def pretrained(self) -> TensorBank:
        """Return the tensors of the base, where features come from them."""
        return self._state.parts.pretrained

    @property
    def signatures(self) -> Signatures | WeightSignatures | None:
        """Return what tells the tasks apart, or None before [`fit_signatures`]."""
        return self._state.parts.signatures

    @signatures.setter
    def signatures(self, value: Signatures | WeightSignatures | None) -> None:
        _require(value is None or isinstance(value, Signatures | WeightSignatures), "signatures", "Signatures", value)
        self._set(signatures=value)

    @property
    def recovery_errors(self) -> Mapping[str, float | None]:
        """Return the relative error that recovery leaves in every parameter, before rounding to the model's dtype."""
        return self._state.parts.errors

    @recovery_errors.setter
    def recovery_errors(self, value: Mapping[str, float | None]) -> None:
        _require(isinstance(value, Mapping), "recovery_errors", "a dict of parameters and errors", value)
        self._note(errors=value)

    @property
    def training_history(self) -> list[dict[str, Any]]:
        """Return the records of the training of the recovery; empty for the closed form."""
        return self._state.parts.history

    @property
    def recipe(self) -> RecipeRecord | None:
        """Return the recipe of the artifact, or None if its experts were in memory."""
        return self._state.parts.recipe

    @recipe.setter
    def recipe(self, value: RecipeRecord | None) -> None:
        _require(value is None or isinstance(value, RecipeRecord), "recipe", "a RecipeRecord", value)
        self._note(recipe=value)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """Return the latest measurements, which the model card shows."""
        return self._state.parts.evaluation

    @evaluation.setter
    def evaluation(self, value: dict[str, Any] | None) -> None:
        _require(value is None or isinstance(value, dict), "evaluation", "a dict of measurements", value)
        self._note(evaluation=value)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's wrappers (data parallel, FSDP) replace child modules under their names.
        if name in MODULES:
            own = name in ("heads", "rows", "pretrained")
            _require(
                isinstance(value, TensorBank if own else nn.Module), name, "a TensorBank" if own else "a module", value
            )
            _require(name != "heads" or list(value) == self._state.tasks, name, f"heads of {self._state.tasks}", value)
            self._set(**{name: value})
        else:
            super().__setattr__(name, value)

    # ---- identification ----------------------------------------------------------------------------------------------

    def identify(self, *args: Any, **inputs: Any) -> Routing:
        """Identify the task of each row: return `task_ids`, `tasks`, `residuals` and `probabilities`."""
        state = self._state
        if len(args) == 1 and not inputs:  # a bare tensor is the main input, as in fit_signatures
            return state.identify(as_inputs(state.parts.model, args[0]))[0]
        return state.identify(state.bind("forward", args, inputs))[0]

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
        return self._call(self._state, "forward", args, kwargs, task, adapter_names)

    def predict(
        self, *args: Any, task: Any = None, adapter_names: list[str] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Classify every row: return its task, its label and the label's score.

        If the routing abstains on out-of-distribution rows, `far` tells whether it did.
        """
        state = self._state
        output = self._call(state, "forward", args, kwargs, task, adapter_names)
        labels = state.parts.config.labels
        logits = logits_of(output)
        if not labels or logits is None or logits.ndim != 2:
            raise RetexError(f"predict needs one classification per row; {type(self.model).__name__} gives none.")
        if output.routing is None:
            raise TaskError("Without recovery the head to use is not known: name the task with task=.")
        read = [best_label(row, labels[name]) for name, row in zip(output.routing.tasks, logits, strict=True)]
        rows = zip(output.routing.tasks, read, strict=True)
        answers = [{"task": name, "label": label, "score": score} for name, (label, score) in rows]
        if output.routing.abstained is None:
            return answers
        far = output.routing.abstained.tolist()
        return [{**answer, "far": abstained} for answer, abstained in zip(answers, far, strict=True)]

    def _call(
        self,
        state: Snapshot,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        task: Any,
        names: list[str] | None,
    ) -> Any:
        recovered = self.has_active_enabled_adapter
        return state.call(method, args, kwargs, task, names, recovered=recovered, training=self.training)

    # ---- settings ----------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks, in the order of their ids."""
        return list(self._state.tasks)

    @property
    def side_folder(self) -> Path | None:
        """Return the folder of the tokenizer and processor files: where the model came from, or its base."""
        return self._state.parts.side_folder

    def tokenizer_folder(self, task: str | None = None) -> Path | None:
        """Return the folder of a task's tokenizer: its own if it has one, else the merged model's.

        >>> AutoTokenizer.from_pretrained(model.tokenizer_folder("chat"))  # doctest: +SKIP
        """
        parts = self._state.parts
        if task is None:
            return parts.side_folder
        task_index(task, parts.config.tasks)
        return parts.tokenizers.get(task, parts.side_folder)

    @property
    def execution(self) -> str:
        """Return how a batch of several tasks runs.

        `"grouped"` runs one recovered expert after the other, `"mixed"` all rows in one pass of the merged model with
        each row's own offsets beside it, and `"auto"` the one that a cost model predicts to be cheaper. Both give the
        same outputs. Quantised or offloaded weights always run mixed.
        """
        return self._state.execution

    @execution.setter
    def execution(self, value: str) -> None:
        with self._change.lock:
            self._swap(replace(self._state, execution=check_execution(value)))

    @property
    def routing(self) -> str | dict[str, Any]:
        """Return how rows are routed to tasks, as in [`RetexConfig`]; an assignment takes effect from the next call.

        >>> model.routing = {"method": "hard", "far": "merged"}  # doctest: +SKIP
        """
        return deepcopy(self._state.parts.config.routing)

    @routing.setter
    def routing(self, value: str | dict[str, Any]) -> None:
        with self._change.lock:
            parts = self._state.parts
            self._swap(replace(self._state, parts=replace(parts, config=replace(parts.config, routing=value))))

    @property
    def expert_cache(self) -> ExpertCache:
        """Return the cache of recovered experts, with its statistics.

        >>> model.expert_cache  # doctest: +SKIP
        ExpertCache(experts=2, 703463424 of 2000000000 bytes, hits=61, misses=2, evictions=0)
        """
        return self._state.cache

    @expert_cache.setter
    def expert_cache(self, size: str | int) -> None:
        with self._change.lock:
            self._swap(replace(self._state, cache=ExpertCache(parse_size(size, "expert_cache"))))

    def _forget_experts(self) -> None:
        """Start with an empty cache. Running calls keep the old one, and add nothing to the new one."""
        with self._change.lock:
            self._swap(replace(self._state, cache=self._state.cache.emptied()))

    @property
    def active_adapter(self) -> str | list[str] | None:
        """Return the task that calls without `task=` use (a list for a mixture), or None while they are routed."""
        names = self._state.active_names
        return list(names) if len(names) > 1 else next(iter(names), None)

    @property
    def active_adapters(self) -> list[str]:
        """Return the tasks that calls without `task=` may use: the pinned or all; none within `disable_adapter()`."""
        state = self._state
        return list(state.active_names or state.tasks) if self.has_active_enabled_adapter else []

    @property
    def has_active_enabled_adapter(self) -> bool:
        """Return whether calls run on recovered experts; False within `disable_adapter()`."""
        return self._change not in _disabled.get()

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
        with self._change.lock:
            self._swap(replace(self._state, active=as_active(task, self._state.tasks)))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the plain merged model within this context; `task=` still selects the head of a task.

        It applies to the thread or asyncio task that enters it, and to those that are given a copy of its context, such
        as `asyncio.to_thread`.
        """
        _disabled.set((*_disabled.get(), self._change))
        try:
            yield
        finally:
            # Abandoned generators may end in any order, so each removes only its own entry.
            entered = list(_disabled.get())
            if self._change in entered:  # absent if it ends in another thread's context
                entered.remove(self._change)
            _disabled.set(tuple(entered))

    def get_model_status(self) -> TunerModelStatus:
        """Return PEFT's model status, with tasks as adapters."""
        return model_status(self._state, self.has_active_enabled_adapter)

    def get_layer_status(self) -> list[TunerLayerStatus]:
        """Return PEFT's layer status, with an entry per recovered parameter."""
        return layer_status(self._state, self.has_active_enabled_adapter)

    def get_base_model(self) -> nn.Module:
        """Return the wrapped (merged) model. Hooks registered on it apply to experts recovered afterwards."""
        return self.model

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], **options: Any) -> None:
        """Change the attention implementation of the merged model, and of experts recovered from now on."""
        cast("PreTrainedModel", self.model).set_attn_implementation(attn_implementation, **options)
        self._forget_experts()

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
            self._forget_experts()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return a snapshot for copying or pickling, consistent even while tasks are added or deleted.

        The result of `compile()` is left out, because it is bound to this very model.
        """
        copied = dict(self.__dict__)
        copied.pop("_compiled_call_impl", None)
        # Other threads add to the proofs while they are copied.
        copied["_state"] = replace(copied["_state"], proofs=dict(copied["_state"].proofs))
        return copied

    # torch takes positional arguments too, which its overloads leave out.
    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return `nn.Module.state_dict`; without `keep_vars`, tied tensors are copies that do not share memory."""
        tensors = super().state_dict(*args, keep_vars=keep_vars, **kwargs)
        return tensors if keep_vars else without_shared_memory(tensors)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.expert_cache.clear()  # experts recovered from weights about to be replaced
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.expert_cache.clear()
        super()._apply(fn, recurse)
        device = self.recovery.task_embedding.device
        if self.signatures is not None and device != META:
            self.signatures = self.signatures.to(device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("model", "_state"):  # not set yet: delegating would recurse
                raise
        if name in REFUSED:
            raise AttributeError(REFUSED[name])
        value = getattr(self.model, name)
        if ENTRY_POINT.match(name) and callable(value):
            return partial(self._entry_point, name)
        if isinstance(value, nn.Module):
            raise AttributeError(
                f"{name!r} is a part of the merged model, and does not take tasks: model.get_base_model().{name}, "
                f"or that of an expert, model.merge_and_unload(task).{name}."
            )
        return value if may_pass(name, value) else partial(refuse, name, type(self.model).__name__)

    def _entry_point(
        self, method: str, *args: Any, task: Any = None, adapter_names: list[str] | None = None, **kwargs: Any
    ) -> Any:
        return self._call(self._state, method, args, kwargs, task, adapter_names)


def _require(fits: bool, name: str, expected: str, value: Any) -> None:
    if not fits:
        raise ConfigError(f"{name} of a model must be {expected}, not {brief(value)}.")
