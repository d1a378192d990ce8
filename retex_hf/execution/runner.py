"""Run one call on several experts: split the batch, run each group on its expert, join the outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from ..backends import Backend
from ..errors import InputError, RetexError
from ..recovery import RecoveryModule
from ..rows import ITEM_INPUTS, NOT_ROWS, TEXT_INPUTS, Proof, Reading, Splitter, count_rows, pattern, prove, readings
from ..utils.random_numbers import repeatable
from ..utils.threads import in_threads
from .assignment import Assignment, Group
from .choice import Chooser, OnePass, find_fixed, refused, size_of_call
from .expert_cache import ExpertCache, copy_with, expert_bytes, recover_tensors
from .group_threads import groups_at_once
from .items import NoticedItems
from .joining import Joiner, check_separable
from .mixed import MixedModel, MixedUnsupported, grouped_cost, mixed_cost
from .outputs import logits_of
from .row_callbacks import for_rows
from .trunk_replay import SharedTrunk, TrunkRecord, install_replay, replaying
from .vocabulary_rows import rows_beyond, tokens_of, with_all_rows, with_own_rows

GENERATION_OPTIONS = frozenset(GenerationConfig().to_dict())
LOSS_INPUTS = ("labels", "start_positions", "end_positions")


@dataclass
class ExpertRunner:
    """Run routed calls with the parts of a `RetexModel`."""

    model: nn.Module
    library: Backend
    recovery: RecoveryModule
    tasks: list[str]
    heads: Mapping[str, Mapping[str, Tensor]]
    labels: Mapping[str, dict[str, Any]]
    cache: ExpertCache
    execution: str = "auto"
    trunk: SharedTrunk | None = None
    # Rows for tokens that the merged model lacks, where vocabularies differ (see `RetexConfig.vocabulary`).
    rows: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    vocabulary: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    # Proofs by kind of call: they depend on the architecture, not on the weights, so they outlive a change of weights.
    proofs: dict[Any, Proof] = field(default_factory=dict)

    def num_labels(self, task_id: int) -> int | None:
        """Return the width of a task's own classification head, or None without one."""
        labels = self.labels.get(self.tasks[task_id])
        return None if labels is None else len(labels["id2label"])

    def _width(self, task_id: int) -> int | None:
        """Return the width of a task's logits (classes or tokens), or None where all tasks have the same."""
        labels = self.num_labels(task_id)
        return self.vocabulary.get(self.tasks[task_id], {}).get("size") if labels is None else labels

    def expert(self, group: Group, recovered: bool = True) -> nn.Module:
        """Return the expert of a group; with `recovered=False` the merged body with the task's head."""
        recovered = recovered and group.recovered
        learning = recovered and self._is_learning()
        make = partial(self._make, group, recovered, learning)
        # Cache pure tasks only: mixtures rarely recur, and weights in training change at every step. The key separates
        # training from evaluation, because training updates the statistics of an expert's batch normalisation.
        key = self._key(group, recovered)
        size = partial(self._own_bytes, group, recovered) if recovered or self._changed_rows(group) else None
        kept = group.weights is None and not (recovered and self._may_learn())
        expert = self.cache.get(key, make, size) if kept else make()
        if hasattr(self.model, "generation_config"):
            expert.generation_config = self._generation_config(self.tasks[group.task_id])
        return expert

    def _generation_config(self, task: str) -> Any:
        """Return the model's generation settings, with the task's own special tokens."""
        settings = self.model.generation_config
        own = self.vocabulary.get(task, {}).get("token_ids")
        if own:
            settings = deepcopy(settings)
            for key, value in own.items():
                setattr(settings, key, value)
        return settings

    def _key(self, group: Group, recovered: bool) -> tuple:
        return (group.task_id, recovered, self.model.training, self.trunk is not None)

    def _may_learn(self) -> bool:
        """Return whether the recovery module is being trained, so that its experts change from step to step."""
        return self.model.training and self.recovery.task_embedding.requires_grad

    def _is_learning(self) -> bool:
        """Return whether gradients of this call must reach the recovery module."""
        return torch.is_grad_enabled() and self._may_learn()

    @torch.inference_mode(False)  # an expert outlives the call it is made in, and may have to carry gradients later
    def _make(self, group: Group, recovered: bool, learning: bool) -> nn.Module:
        task = self.tasks[group.task_id]
        tensors = dict(self.heads.get(task, {}))
        if recovered:
            self._require_plain_numbers()
            weights = group.mixture(len(self.tasks))
            device = self.recovery.task_embedding.device
            with torch.set_grad_enabled(learning):
                tensors |= recover_tensors(self.model.state_dict(), self.recovery, weights.to(device))
        if self._changed_rows(group):
            self._require_plain_rows()
            shared = {**self.model.state_dict(), **tensors}
            with torch.set_grad_enabled(learning):
                tensors |= with_own_rows(shared, self.rows[task], self.vocabulary[task]["size"])
        expert = copy_with(self.model, tensors)
        if self.trunk is not None:
            align = partial(self.trunk.align, weights=weights) if recovered else None
            install_replay(expert, self.trunk.blocks, align)
        if task in self.vocabulary:
            self.library.set_vocabulary(expert, self.vocabulary[task]["size"], self.vocabulary[task]["token_ids"])
        if task in self.labels:
            self.library.set_labels(expert, self.labels[task])
        return expert

    def _require_plain_numbers(self) -> None:
        fixed = find_fixed(self.model, list(self.recovery))
        if fixed is not None:
            raise RetexError(
                f"No expert can be recovered as a whole model, because {fixed!r} is quantised or offloaded; "
                'run it in one pass with execution="auto" or "mixed".'
            )

    def _changed_rows(self, group: Group) -> list[str]:
        """Return the tensors of which a task has more or fewer rows than the merged model."""
        task = self.tasks[group.task_id]
        tensors = self.model.state_dict() if task in self.rows else {}
        return [name for name in self.rows.get(task, ()) if len(tensors[name]) != self.vocabulary[task]["size"]]

    def _require_plain_rows(self) -> None:
        fixed = find_fixed(self.model, list(next(iter(self.rows.values()))))
        if fixed is not None:
            raise RetexError(
                f"Task-specific tokens cannot be added, because {fixed!r} is quantised or offloaded: "
                "load the model without quantisation and offloading."
            )

    def _own_bytes(self, group: Group, recovered: bool) -> int:
        tensors = self.model.state_dict()
        names = set(self._changed_rows(group))
        added = sum(own.nbytes for own in self.rows.get(self.tasks[group.task_id], {}).values())
        added += sum(tensors[name].nbytes for name in names if not recovered or name not in self.recovery)
        if not recovered:
            return added
        self._require_plain_numbers()
        return added + expert_bytes(tensors, self.recovery)

    def _check_tokens(self, kwargs: Mapping[str, Any], groups: list[Group]) -> None:
        """Refuse tokens that a row's task does not have: torch would raise an unclear index error."""
        tokens = tokens_of(kwargs) if self.vocabulary else None
        if tokens is None:
            return
        for group in groups:
            task, own = self.tasks[group.task_id], tokens[group.rows.to(tokens.device)]
            size = self.vocabulary[task]["size"]
            if int(own.max()) >= size:
                row = int(group.rows[(own >= size).reshape(len(own), -1).any(1).nonzero()[0, 0].cpu()])
                raise InputError(
                    f"Row {row} holds the token {int(own.max())}, but task {task!r}, to which it was assigned, has "
                    f"{size} tokens: use the tokenizer of that task."
                )

    def count_rows(self, kwargs: Mapping[str, Any], named: int | None = None) -> int:
        return count_rows(kwargs, self.library.row_inputs(self.model), named)

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

        `widen` pads classification logits to the widest head, so that a routed call always has the same output width.
        `record` holds what a shared trunk has already computed for these rows.
        """
        if record is not None and (not record.serves(kwargs, self.model) or self._finds_padding(method, kwargs)):
            record = None
        groups = assignment.groups()
        self._check_tokens(kwargs, groups)
        kwargs, as_tuple = _ask_for_fields(method, kwargs, self.model) if self.library.NAMES_FIELDS else (kwargs, False)
        splitter, proof = self._proven(method, kwargs, groups, len(assignment.task_ids))
        items = kwargs.get("num_items_in_batch")
        if items is not None and len(groups) > 1:
            kwargs = {**kwargs, "num_items_in_batch": NoticedItems.of(items)}
        one_pass = self._choose(method, kwargs, groups, splitter) if recovered else None

        def call(run: Callable[..., Any], rows: Tensor) -> Any:
            """Call `run` with some of the rows; skip splitting if there is only one group."""
            alone = len(groups) == 1
            taken = for_rows(kwargs if alone else splitter.take(kwargs, rows), rows)
            return replaying(record, None if alone else rows, lambda: run(method, taken))

        parts = None if one_pass is None else self._run_mixed(one_pass, groups, call)
        rows, outputs = parts or self._run_grouped(
            groups, recovered, call, self._at_once(kwargs, groups, recovered, proof)
        )
        if widen:
            widths = [self._width(group.task_id) or 0 for group in groups]
            widths = [max(widths)] if parts else widths  # one pass pads all rows to the widest head among them
            outputs = [self._widened(output, width) for output, width in zip(outputs, widths, strict=True)]
        output = outputs[0]
        if len(groups) > 1:
            output = self._joiner(method, kwargs, rows, splitter, proof).join(outputs)
        return _as_tuple(output, list(outputs[0])) if as_tuple else output

    def _finds_padding(self, method: str, kwargs: Mapping[str, Any]) -> bool:
        """Return whether `generate` masks padding that the caller, and so the pass that identified the rows, did not
        mask."""
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        pad, tokens = option("pad_token_id"), tokens_of(kwargs)
        if method != "generate" or kwargs.get("attention_mask") is not None or pad is None or tokens is None:
            return False
        return bool((tokens == int(pad)).any())

    def _proven(
        self, method: str, kwargs: Mapping[str, Any], groups: list[Group], rows: int
    ) -> tuple[Splitter, Proof | None]:
        """Return how to split a batch, and a proof of where the rows are in its outputs (None where none is needed)."""
        whole = self._whole(method, kwargs)
        if len(groups) == 1:
            return Splitter(rows, whole, {}), None
        settings = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        check_separable(kwargs, len(groups), settings if method == "generate" else None)
        if method == "forward" and kwargs.get("use_cache") is True:
            raise InputError(
                f"'use_cache' asks for a cache, and those of the {len(groups)} experts this batch needs cannot be put "
                "together: leave it out, use generate, or call once per task with task=."
            )
        given = readings(self.model, kwargs, rows, whole)
        # With texts only, `generate` needs no proof: its outputs are known, and each text is one row.
        if method == "generate" and len(given) == 1 and ITEM_INPUTS.isdisjoint(kwargs):
            return Splitter(rows, whole, next(iter(given.values()))), None
        # Where rows differ in their number of entries, a proof holds for batches of the same pattern only.
        shape = pattern(kwargs, given)
        parts = None if shape is None else [group.rows for group in groups]
        apart = () if parts is None else tuple(tuple(part.tolist()) for part in parts)
        key = (method, _kind(kwargs, rows), *given, shape, apart)
        proof = self.proofs.get(key)
        if proof is None:
            proof = self._prove(method, kwargs, given, rows, whole, parts)
            if method == "generate" and "logits" in proof.refused:
                raise InputError(
                    f"The rows of this batch cannot be separated: the model's output {proof.refused['logits']}. "
                    "Call once per task with task=."
                )
            if not proof.refused and len(given) == 1:
                self.proofs[key] = proof
        return Splitter(rows, whole, given[proof.reading]), None if method == "generate" else proof

    @torch.inference_mode(False)
    def _prove(
        self,
        method: str,
        kwargs: Mapping[str, Any],
        given: Mapping[str, Reading],
        rows: int,
        whole: frozenset[str],
        parts: list[Tensor] | None,
    ) -> Proof:
        beyond = rows_beyond(self.model, self.library, self.heads, self.rows) if self.vocabulary else {}
        tensors = with_all_rows(self.model.state_dict(), beyond)
        prober = copy_with(self.model, {**_opened_gates(self.model), **tensors}).eval()
        # The merged model's head does not fit the labels of other tasks: prove without them.
        if self.rows or any(self.heads.values()):
            kwargs = {name: value for name, value in kwargs.items() if name not in LOSS_INPUTS}
        if method == "generate":
            method, kwargs = "forward", forward_inputs(prober, kwargs, rows)

        draws, device = False, next((tensor.device for tensor in tensors.values()), torch.device("cpu"))

        @torch.no_grad()
        def call(part: Mapping[str, Any]) -> Any:
            nonlocal draws
            with repeatable(device):  # models with random numbers must draw the same ones for a row
                before = torch.get_rng_state()
                output = call_method(prober, method, part)
                draws |= not torch.equal(before, torch.get_rng_state())
            return output

        proof = prove(call, lambda reading, part: Splitter(rows, whole, reading).take(kwargs, part), given, rows, parts)
        return replace(proof, draws=draws)

    def _run_mixed(
        self, one_pass: OnePass, groups: list[Group], call: Callable[..., Any]
    ) -> tuple[list[Tensor], list[Any]] | None:
        """Run all rows, sorted by group, in one pass; None where the model does something that its probe did not."""
        rows = torch.cat([group.rows for group in groups])
        try:
            return [rows], [call(one_pass.run, rows)]
        except MixedUnsupported as reason:
            if not one_pass.or_grouped:
                raise refused(reason, self._chooser().swappable) from None
            return None

    def _at_once(self, kwargs: Mapping[str, Any], groups: list[Group], recovered: bool, proof: Proof | None) -> int:
        """Return how many groups to run at the same time; one by one where experts have to be recovered first, so that
        no more of them are in memory than before."""
        kept = (self._key(group, recovered and group.recovered) in self.cache for group in groups)
        if any(group.weights is not None for group in groups) or not all(kept):
            return 1
        return groups_at_once(self.model, kwargs, sum(len(group.rows) for group in groups), len(groups), proof)

    def _run_grouped(
        self, groups: list[Group], recovered: bool, call: Callable[..., Any], at_once: int
    ) -> tuple[list[Tensor], list[Any]]:
        """Run every group on its expert, some at the same time; return the rows and the output of each."""

        def output(index: int) -> Any:
            group = groups[index]
            return call(lambda method, part: call_method(self.expert(group, recovered), method, part), group.rows)

        largest_first = sorted(range(len(groups)), key=lambda index: -len(groups[index].rows))
        outputs = dict(in_threads(output, largest_first if at_once > 1 else range(len(groups)), at_once))
        return [group.rows for group in groups], [outputs[index] for index in range(len(groups))]

    def _choose(
        self, method: str, kwargs: Mapping[str, Any], groups: list[Group], splitter: Splitter
    ) -> OnePass | None:
        """Return how to run the whole batch in one pass, or None to run it group by group."""
        chooser = self._chooser()
        # Different heads have different losses, and in training layers like batch normalisation mix the rows.
        refusal = None
        if self.model.training:
            refusal = "the model is in training mode"
        elif any(self.heads.values()) and any(kwargs.get(name) is not None for name in LOSS_INPUTS):
            refusal = "tasks have losses of their own"
        elif odd := [name for name, owned in splitter.reading.items() if owned.owner is not None]:
            refusal = f"the entries of {odd[0]!r} are not one per row"
        if refusal is not None and (self.execution == "mixed" or not chooser.swappable):
            raise refused(refusal, chooser.swappable)
        if refusal is not None:
            return None
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        # For finished rows, scores are -inf but for padding group by group, and the model's own in one pass: do not let
        # the choice of execution decide between the two.
        detailed = method == "generate" and option("return_dict_in_generate")
        if detailed and self.execution == "auto" and chooser.swappable:
            return None
        size = size_of_call(method, kwargs, groups, chooser.missing(groups), option, self._encoder())
        return chooser.choose(method, kwargs, groups, splitter, size)

    def costs(self, method: str, kwargs: Mapping[str, Any], assignment: Assignment) -> tuple[float, float]:
        """Estimate a call's multiplications group by group and in one pass, as `execution="auto"` does."""
        groups, chooser = assignment.groups(), self._chooser()
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        size = size_of_call(method, kwargs, groups, chooser.missing(groups), option, self._encoder())
        splitter, _ = self._proven(method, kwargs, groups, len(assignment.task_ids))
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
            mixed=lambda: self.cache.get("mixed" if self.trunk is None else "mixed behind trunk", self._make_mixed),
        )

    def _encoder(self) -> str | None:
        """Return the prefix of the parameters that `generate` runs once: the encoder's, in encoder-decoder models."""
        root = self.library.feature_root(self.model)
        if root is self.model:
            return None
        return next(f"{name}." for name, module in self.model.named_modules() if module is root)

    @torch.inference_mode(False)
    def _make_mixed(self) -> MixedModel:
        mixed = MixedModel(self.model, self.recovery, self.tasks, self.heads)
        if self.rows or len({described["size"] for described in self.vocabulary.values()}) > 1:
            mixed.reason = "tasks have tokens of their own."
        if mixed.reason is None and self.trunk is not None:
            install_replay(mixed.model, self.trunk.blocks, self.trunk.align_segments)
        return mixed

    def _whole(self, method: str, kwargs: Mapping[str, Any]) -> frozenset[str]:
        whole = NOT_ROWS | (GENERATION_OPTIONS if method == "generate" else frozenset())
        return whole | TEXT_INPUTS if self._texts_apart(kwargs) else whole

    def _texts_apart(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the texts of a call are class prompts for its images, not rows of their own."""
        images = self.library.main_inputs(self.model)
        return self.library.is_dual_encoder(self.model) and any(kwargs.get(name) is not None for name in images)

    def _widened(self, output: Any, width: int | None) -> Any:
        logits = logits_of(output)
        if not width or logits is None:
            return output
        widest = max(self._width(index) or 0 for index in range(len(self.tasks)))
        if logits.shape[-1] == width < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - width), value=float("-inf"))
            if isinstance(output, Tensor):
                return logits
            output["logits"] = logits
        return output

    def _joiner(
        self, method: str, kwargs: Mapping[str, Any], rows: list[Tensor], splitter: Splitter, proof: Proof | None
    ) -> Joiner:
        option = _generation_options(kwargs, getattr(self.model, "generation_config", None))
        pad = option("pad_token_id")
        if pad is None:
            pad = getattr(self.model, "pad_id", None)  # the name that CoCa uses
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
            proof=proof,
            reading=splitter.reading,
            unnamed_heads=method != "generate" and not self.labels and any(self.heads.values()),
        )


def call_method(model: nn.Module, method: str, kwargs: Mapping[str, Any]) -> Any:
    """Call a method of a model; call the module itself for `forward`, so that its hooks run."""
    return model(**kwargs) if method == "forward" else getattr(model, method)(**kwargs)


def _opened_gates(model: nn.Module) -> dict[str, Tensor]:
    """Return replacements for parameters that are all zero: a gate of zero would hide a path that experts may use."""
    return {
        name: torch.full_like(parameter, 0.1)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not parameter.is_meta and not parameter.any()
    }


def _kind(kwargs: Mapping[str, Any], rows: int) -> frozenset[Any]:
    """Return a key of the call's arguments; a proof of one call holds for all calls with the same key."""
    return frozenset((name, _form(value, rows)) for name, value in kwargs.items())


def _form(value: Any, rows: int) -> Any:
    """Return what a proof depends on in an argument: the axes of a tensor, the value of an option."""
    if isinstance(value, Tensor):
        return value.ndim, value.ndim > 0 and len(value) == rows
    if isinstance(value, Mapping):
        return frozenset((str(key), _form(part, rows)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_form(part, rows) for part in value)
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value)


def forward_inputs(model: nn.Module, kwargs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the arguments of `generate` that `forward` accepts, and the start token of a decoder."""
    accepted = inspect.signature(model.forward).parameters
    given = {name: value for name, value in kwargs.items() if name in accepted}
    if "decoder_input_ids" in accepted:
        first = getattr(model.config, "decoder_start_token_id", None) or 0
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        given.setdefault("decoder_input_ids", torch.full((rows, 1), first, device=device))
    return given


def _ask_for_fields(method: str, kwargs: dict[str, Any], model: nn.Module) -> tuple[dict[str, Any], bool]:
    """Request named fields instead of a tuple, whose entries have no names; say whether to convert at the end."""
    if method != "forward" or not hasattr(model, "config"):
        return kwargs, False
    wanted = kwargs.get("return_dict")
    as_tuple = wanted is False or (wanted is None and getattr(model.config, "return_dict", True) is False)
    return ({**kwargs, "return_dict": True}, True) if as_tuple else (kwargs, False)


def _as_tuple(output: ModelOutput, names: list[str]) -> tuple:
    """Return the values in the order of `names`, with None for dropped fields (a cache), so that positions hold."""
    values = iter(output.to_tuple())
    return tuple(next(values) if name in output else None for name in names)


def _generation_options(kwargs: Mapping[str, Any], default: Any) -> Callable[[str], Any]:
    """Return a lookup of generation options in the order of `generate`: the call, its configuration, the model's."""

    def option(name: str) -> Any:
        places = (
            kwargs.get(name),
            getattr(kwargs.get("generation_config"), name, None),
            getattr(default, name, None),
        )
        return next((value for value in places if value is not None), None)

    return option


def _loss_weights(kwargs: Mapping[str, Any], groups: list[Tensor], model: nn.Module) -> list[float]:
    """Return how many labels count in each group's mean loss."""
    labels, starts = kwargs.get("labels"), kwargs.get("start_positions")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        counted = (labels[:, 1:] if labels.ndim > 1 and _predicts_next_token(model) else labels) != -100
    elif isinstance(starts, Tensor):
        # Truncated answers have positions outside the text, which the loss ignores.
        text = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        counted = starts < text.shape[1]
    else:
        return [float(len(group)) for group in groups]
    return [float(counted[group.to(counted.device)].sum()) for group in groups]


def _predicts_next_token(model: nn.Module) -> bool:
    """Return whether a model's own loss compares each token with the next label.

    The class name does not tell: the loss of GPT-2 does, that of BartForCausalLM does not.
    """
    uses_default = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    return uses_default and getattr(model, "loss_function", None) is ForCausalLMLoss
