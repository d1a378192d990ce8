"""One call on several experts: split, run each group on its expert, join."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from ..errors import RetexError
from ..recovery import RecoveryModule
from .assignment import Assignment, Group
from .batching import NOT_ROWS, TEXT_INPUTS, Joiner, Splitter, count_rows
from .choice import Chooser, OnePass, find_fixed, size_of_call
from .experts import ExpertCache, copy_with, expert_bytes, recover_tensors
from .items import NoticedItems
from .mixed import MixedModel, MixedUnsupported, grouped_cost, mixed_cost
from .trunk import TrunkRecord, install_replay, replaying

GENERATION_OPTIONS = frozenset(GenerationConfig().to_dict())
LOSS_INPUTS = ("labels", "start_positions", "end_positions")


@dataclass
class ExpertRunner:
    """What a routed call needs to know of a `RetexModel`."""

    model: nn.Module
    library: ModuleType
    recovery: RecoveryModule
    tasks: list[str]
    heads: Mapping[str, Mapping[str, Tensor]]
    labels: Mapping[str, dict[str, Any]]
    cache: ExpertCache
    execution: str = "auto"
    trunk: list[str] = field(default_factory=list)

    def num_labels(self, task_id: int) -> int | None:
        """Width of a task's own classification head."""
        labels = self.labels.get(self.tasks[task_id])
        return None if labels is None else len(labels["id2label"])

    def expert(self, group: Group, recovered: bool = True) -> nn.Module:
        """The expert of a group; with `recovered=False` the merged body under the task's head."""
        recovered = recovered and group.recovered
        learning = recovered and self._is_learning()
        make = partial(self._make, group, recovered, learning)
        # Mixtures are endless, and weights that are being learned change at every step; only pure tasks are worth
        # keeping. Training moves the statistics of an expert's batch normalisation: evaluation has its own.
        key = self._key(group, recovered)
        size = self._own_bytes if recovered else None
        expert = make() if learning or group.weights is not None else self.cache.get(key, make, size)
        if hasattr(self.model, "generation_config"):
            expert.generation_config = self.model.generation_config
        return expert

    def _key(self, group: Group, recovered: bool) -> tuple:
        return (group.task_id, recovered, self.model.training)

    def _is_learning(self) -> bool:
        """Whether gradients of this call must reach the recovery module."""
        return self.model.training and torch.is_grad_enabled() and self.recovery.task_embedding.requires_grad

    @torch.inference_mode(False)  # an expert outlives the call it is made in, and may have to carry gradients later
    def _make(self, group: Group, recovered: bool, learning: bool) -> nn.Module:
        task = self.tasks[group.task_id]
        tensors = dict(self.heads.get(task, {}))
        if recovered:
            self._require_plain_numbers()
            weights = group.weights
            if weights is None:
                weights = torch.nn.functional.one_hot(torch.tensor(group.task_id), len(self.tasks)).float()
            device = self.recovery.task_embedding.device
            with torch.set_grad_enabled(learning):
                tensors |= recover_tensors(self.model.state_dict(), self.recovery, weights.to(device))
        expert = copy_with(self.model, tensors)
        install_replay(expert, self.trunk)
        if task in self.labels:
            self.library.set_labels(expert, self.labels[task])
        return expert

    def _require_plain_numbers(self) -> None:
        fixed = find_fixed(self.model, list(self.recovery))
        if fixed is not None:
            raise RetexError(
                f"No expert of its own can be recovered, because {fixed!r} is quantised or offloaded; "
                'run it in one pass with execution="auto" or "mixed".'
            )

    def _own_bytes(self) -> int:
        self._require_plain_numbers()
        return expert_bytes(self.model.state_dict(), self.recovery)

    def count_rows(self, kwargs: Mapping[str, Any]) -> int:
        return count_rows(kwargs, self.library.row_inputs(self.model))

    def run(
        self,
        method: str,
        kwargs: dict[str, Any],
        assignment: Assignment,
        *,
        recovered: bool,
        widen: bool,
        record: TrunkRecord | None = None,
    ) -> Any:
        """Call `method` on every group's expert and join the outputs.

        `widen` pads classification logits to the widest head: a routed call has one shape whatever its rows are.
        `record` is what a shared trunk has computed for these rows already.
        """
        record = record if record is not None and record.serves(kwargs) else None
        groups = assignment.groups()
        splitter = Splitter(len(assignment.task_ids), self._whole(method, kwargs))
        splitter.check(kwargs, len(groups))
        kwargs, as_tuple = _ask_for_fields(method, kwargs, self.model)
        items = kwargs.get("num_items_in_batch")
        if items is not None and len(groups) > 1:
            kwargs = {**kwargs, "num_items_in_batch": NoticedItems.of(items)}
        one_pass = self._choose(method, kwargs, groups, splitter) if recovered else None

        def call(run: Callable[..., Any], rows: Tensor) -> Any:
            """Call what runs some of the rows; all of them need not be taken apart."""
            alone = len(groups) == 1
            taken = kwargs if alone else splitter.take(kwargs, rows)
            return replaying(record, None if alone else rows, lambda: run(method, taken))

        parts = None if one_pass is None else self._run_mixed(one_pass, groups, call)
        rows, outputs = parts or self._run_grouped(groups, recovered, call)
        if widen:
            widths = [self.num_labels(group.task_id) or 0 for group in groups]
            widths = [max(widths)] if parts else widths  # in one pass all rows have the width of the widest among them
            outputs = [self._widened(output, width) for output, width in zip(outputs, widths, strict=True)]
        output = outputs[0] if len(groups) == 1 else self._joiner(method, kwargs, rows).join(outputs)
        return _as_tuple(output, list(outputs[0])) if as_tuple else output

    def _run_mixed(
        self, one_pass: OnePass, groups: list[Group], call: Callable[..., Any]
    ) -> tuple[list[Tensor], list[Any]] | None:
        """All rows, sorted by group, and their output; None where the model did what its probe did not show."""
        rows = torch.cat([group.rows for group in groups])
        try:
            return [rows], [call(one_pass.run, rows)]
        except MixedUnsupported:
            if not one_pass.or_grouped:
                raise
            return None

    def _run_grouped(
        self, groups: list[Group], recovered: bool, call: Callable[..., Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """The rows of every group, and its expert's output."""

        def output(group: Group) -> Any:
            return call(lambda method, part: call_method(self.expert(group, recovered), method, part), group.rows)

        return [group.rows for group in groups], [output(group) for group in groups]

    def _choose(
        self, method: str, kwargs: Mapping[str, Any], groups: list[Group], splitter: Splitter
    ) -> OnePass | None:
        """How to run the whole batch in one pass, or None to run it group by group."""
        chooser = self._chooser()
        # Rows of different heads have different losses; and in training the batch is what a layer sees of it.
        refusal = None
        if self.model.training:
            refusal = "the model is in training mode"
        elif any(self.heads.values()) and any(kwargs.get(name) is not None for name in LOSS_INPUTS):
            refusal = "tasks have losses of their own"
        if refusal is not None and (self.execution == "mixed" or not chooser.swappable):
            raise RetexError(f"This batch cannot run in one pass: {refusal}.")
        if refusal is not None:
            return None
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        # Scores of rows that have finished are those of certain padding in groups, and the model's own in one pass.
        detailed = method == "generate" and option("return_dict_in_generate")
        if detailed and self.execution == "auto" and chooser.swappable:
            return None
        size = size_of_call(method, kwargs, groups, chooser.missing(groups), option, self._encoder())
        return chooser.choose(method, kwargs, groups, splitter, size)

    def costs(self, method: str, kwargs: Mapping[str, Any], assignment: Assignment) -> tuple[float, float]:
        """What `execution="auto"` expects a call to cost group by group and in one pass, in multiplications."""
        groups, chooser = assignment.groups(), self._chooser()
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        size = size_of_call(method, kwargs, groups, chooser.missing(groups), option, self._encoder())
        splitter = Splitter(len(assignment.task_ids), self._whole(method, kwargs))
        mixed = chooser.mixed()
        _, work = mixed.probe(method, kwargs, mixed.segments(groups), splitter)
        return grouped_cost(work, size), mixed_cost(work, size)

    def _chooser(self) -> Chooser:
        swappable = find_fixed(self.model, list(self.recovery)) is None
        return Chooser(
            self.execution,
            self.cache,
            cached=lambda group: self._key(group, group.recovered) in self.cache,
            expert_bytes=expert_bytes(self.model.state_dict(), self.recovery) if swappable else 0,
            swappable=swappable,
            mixed=lambda: self.cache.get("mixed", self._make_mixed),
        )

    def _encoder(self) -> str | None:
        """Prefix of the parameters that `generate` runs once, in encoder-decoder models."""
        root = self.library.feature_root(self.model)
        if root is self.model:
            return None
        return next(f"{name}." for name, module in self.model.named_modules() if module is root)

    @torch.inference_mode(False)
    def _make_mixed(self) -> MixedModel:
        mixed = MixedModel(self.model, self.recovery, self.tasks, self.heads)
        if mixed.reason is None:
            install_replay(mixed.model, self.trunk)
        return mixed

    def _whole(self, method: str, kwargs: Mapping[str, Any]) -> frozenset[str]:
        whole = NOT_ROWS | (GENERATION_OPTIONS if method == "generate" else frozenset())
        return whole | TEXT_INPUTS if self._texts_apart(kwargs) else whole

    def _texts_apart(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether the texts of a call are class prompts for its images, not rows of their own."""
        images = self.library.row_inputs(self.model)[:2]
        return self.library.is_dual_encoder(self.model) and any(kwargs.get(name) is not None for name in images)

    def _widened(self, output: Any, width: int | None) -> Any:
        if not width or not isinstance(output, ModelOutput) or output.get("logits") is None:
            return output
        widest = max(self.num_labels(index) or 0 for index in range(len(self.tasks)))
        if output.logits.shape[-1] == width < widest:
            output["logits"] = torch.nn.functional.pad(output.logits, (0, widest - width), value=float("-inf"))
        return output

    def _joiner(self, method: str, kwargs: Mapping[str, Any], rows: list[Tensor]) -> Joiner:
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        pad = option("pad_token_id")
        if pad is None:
            pad = getattr(self.model, "pad_id", None)  # CoCa's
        if pad is None:
            eos = option("eos_token_id")
            pad = eos[0] if isinstance(eos, (list, tuple)) else eos
        return Joiner(
            rows=sum(map(len, rows)),
            groups=rows,
            loss_weights=_loss_weights(kwargs, rows, self.model),
            sum_losses=bool(getattr(kwargs.get("num_items_in_batch"), "uses", ())),
            pad_token_id=int(pad or 0),
            num_beams=option("num_beams") or 1,
            texts_apart=self._texts_apart(kwargs),
            tuple_fields=self.library.tuple_fields(method),
        )


def call_method(model: nn.Module, method: str, kwargs: Mapping[str, Any]) -> Any:
    """Call a method of a model; `forward` through the module itself, so that its hooks run."""
    return model(**kwargs) if method == "forward" else getattr(model, method)(**kwargs)


def _ask_for_fields(method: str, kwargs: dict[str, Any], model: nn.Module) -> tuple[dict[str, Any], bool]:
    """transformers' tuples do not say what is what: ask for named fields, and make the tuple at the end."""
    if method != "forward" or not hasattr(model, "config"):
        return kwargs, False
    wanted = kwargs.get("return_dict")
    as_tuple = wanted is False or (wanted is None and getattr(model.config, "return_dict", True) is False)
    return ({**kwargs, "return_dict": True}, True) if as_tuple else (kwargs, False)


def _as_tuple(output: ModelOutput, names: list[str]) -> tuple:
    """The values in the order of `names`; what could not be joined (a cache) leaves a gap, so that no other moves."""
    values = iter(output.to_tuple())
    return tuple(next(values) if name in output else None for name in names)


def _generation_options(kwargs: Mapping[str, Any], default: Any) -> Callable[[str], Any]:
    """Look up a generation option where `generate` does: the call, the configuration given, the model's own."""

    def option(name: str) -> Any:
        places = (
            kwargs.get(name),
            getattr(kwargs.get("generation_config"), name, None),
            getattr(default, name, None),
        )
        return next((value for value in places if value is not None), None)

    return option


def _loss_weights(kwargs: Mapping[str, Any], groups: list[Tensor], model: nn.Module) -> list[float]:
    """How many labels count in each group's mean loss."""
    labels, starts = kwargs.get("labels"), kwargs.get("start_positions")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        counted = (labels[:, 1:] if labels.ndim > 1 and _predicts_next_token(model) else labels) != -100
    elif isinstance(starts, Tensor):
        # Answers that were cut off lie outside the text and do not count.
        text = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        counted = starts < text.shape[1]
    else:
        return [float(len(group)) for group in groups]
    return [float(counted[group.to(counted.device)].sum()) for group in groups]


def _predicts_next_token(model: nn.Module) -> bool:
    """Whether a model's own loss compares each token with the next label. The class name does not tell: GPT-2's does,
    BartForCausalLM's does not."""
    uses_default = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    return uses_default and getattr(model, "loss_function", None) is ForCausalLMLoss
