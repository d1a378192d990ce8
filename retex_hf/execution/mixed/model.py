"""A copy of a model that runs a whole mixed batch at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from ...recovery import RecoveryModule
from ...rows import Splitter, numbers_per_row
from ...utils.records import is_record, rebuilt, record_fields
from ..assignment import Group
from ..expert_cache import ExpertCache, copy_with, is_plain, names_of
from .call import Certificate, MixedCall, MixedUnsupported, Origin, Segment, within
from .cost import Work
from .row_order import RowOrder, RowOrderProbe, ShapeRecord, watch, watched
from .side_path import beside
from .sources import Head, Recovered, TensorSource
from .task_tensor import TaskTensor

# Outputs that have the images along their second axis.
COLUMN_FIELDS = frozenset({"logits_per_text", "text_logits"})
# Rows of the first and of the second task in two probes.
FEWER, MORE = (2, 3), (3, 4)
# Allowed difference between rows together and each row alone, relative to the largest entry of the output.
PROBE_TOLERANCE = 1e-3


Watch = RowOrder | RowOrderProbe | ShapeRecord


class MixedModel:
    """Runs batches whose rows belong to different tasks, in one pass.

    Each kind of call is probed once: rows of two tasks together must give what each gives alone. The probe rejects
    models that use a recovered parameter in a way that has no row-by-row form, or that may move rows (`row_order`).
    """

    def __init__(
        self, model: nn.Module, recovery: RecoveryModule, tasks: list[str], heads: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self.recovery = recovery
        self._wrapped = model
        # Results by kind of call: threads probe a kind once, without blocking other kinds.
        self._probed = ExpertCache(0)
        # Why this path is unavailable. A string, because an exception would keep its frames' tensors alive.
        self.reason: str | None = None
        try:
            self.model = _copy(model, recovery, tasks, heads)
        except MixedUnsupported as reason:
            self.reason = str(reason)

    def segments(self, groups: list[Group]) -> list[Segment]:
        """Return the groups of a batch as consecutive rows."""
        device = self.recovery.task_embedding.device
        segments, start = [], 0
        for group in groups:
            stop = start + len(group.rows)
            weights = group.mixture(self.recovery.num_tasks).to(device)
            embedding = self.recovery.embed(weights).detach()
            segments.append(Segment(group.task_id, start, stop, weights, embedding, group.recovered))
            start = stop
        return segments

    def run(self, method: str, kwargs: dict[str, Any], segments: list[Segment], certificate: Certificate) -> Any:
        """Call a method on rows sorted by segment."""
        call = MixedCall(segments, certificate, repeats=method == "generate")
        return self._call(method, kwargs, call, RowOrder(call, certificate.functions) if len(segments) > 1 else None)

    def probe(
        self, method: str, kwargs: Mapping[str, Any], segments: list[Segment], splitter: Splitter
    ) -> tuple[Certificate, Work]:
        """Return which parameters meet rows in a kind of call, and the work of one row.

        Raises `MixedUnsupported` if the model cannot run mixed batches in this kind of call.
        """
        if self.reason is not None:
            raise MixedUnsupported(self.reason)
        inputs = {
            (name, value.ndim > 0 and len(value) == splitter.rows, tuple(size == 1 for size in value.shape[1:]))
            for name, value in kwargs.items()
            if isinstance(value, Tensor)
        }
        # A probe with one task does not show whether rows of several tasks stay separate. Masks that hide nothing are
        # often left out of a model's computation.
        key = (method, frozenset(inputs), len(segments) > 1, frozenset(_hiding(kwargs, splitter.rows)))
        found = self._probed.get(key, lambda: self._find_out(method, kwargs, segments, splitter))
        if isinstance(found, str):
            raise MixedUnsupported(found)
        return found

    def _find_out(
        self, method: str, kwargs: Mapping[str, Any], segments: list[Segment], splitter: Splitter
    ) -> tuple[Certificate, Work] | str:
        """Return the result of a probe, or the reason why the model is unsupported."""
        try:
            return self._probe(method, kwargs, segments, splitter)
        except MixedUnsupported as reason:
            return str(reason)
        except Exception as error:
            # The batch may be at fault rather than the model, so do not remember the failure.
            raise MixedUnsupported(f"a probe of a few rows raised {type(error).__name__}: {error}") from error

    @torch.no_grad()
    def _probe(
        self, method: str, kwargs: Mapping[str, Any], segments: list[Segment], splitter: Splitter
    ) -> tuple[Certificate, Work]:
        first, second = segments[0], segments[-1]
        chosen = [first] if first is second else [first, second]
        at = dict(zip(map(id, chosen), _rows_to_probe(kwargs, splitter.rows), strict=False))

        def prepare(*counts: int, **options: Any) -> tuple[MixedCall, dict[str, Any]]:
            own = MixedCall([], is_probe=True, **options)
            rows: list[int] = []
            for part, count in zip(chosen, counts, strict=True):
                if count:
                    own.segments.append(replace(part, start=len(rows), stop=len(rows) + count))
                    rows += [at[id(part)]] * count
            return own, splitter.take(kwargs, torch.tensor(rows))

        def call(own: MixedCall, taken: dict[str, Any], watching: Watch | None = None) -> Any:
            if method != "generate":
                return self._call(method, taken, own, watching)
            settings = getattr(self._wrapped, "generation_config", None)
            return self._call(method, _two_steps(taken, settings), own, watching)["logits"]

        if first is second:
            single, taken = prepare(1)
            call(single, taken)
            return Certificate(frozenset(), frozenset()), self._work(method, kwargs, first, splitter, single)
        single, taken = prepare(1, 0)
        alone = call(single, taken)
        work = self._work(method, kwargs, first, splitter, single)
        other = call(*prepare(0, 1))
        fewer, taken = prepare(*FEWER, single=single.log)
        record = ShapeRecord(fewer)
        _check_rows(call(fewer, taken, record), alone, other, FEWER)
        meetings = zip(fewer.log, single.log, strict=True)
        certificate = _certificate([(name, size, one) for (name, size, _), (_, one, _) in meetings], fewer.per_task)
        more, taken = prepare(*MORE, certificate=certificate)
        order = RowOrderProbe(more, self.model, [tensor for _, tensor in _tensors(taken)], record)
        _check_rows(call(more, taken, order), alone, other, MORE)
        certificate = _with_computed(certificate, fewer, more) if fewer.computed else certificate
        return replace(certificate, functions=frozenset(order.seen)), work

    def _work(
        self, method: str, kwargs: Mapping[str, Any], segment: Segment, splitter: Splitter, single: MixedCall
    ) -> Work:
        """Return the products of one row; measure `generate` by its first step."""
        input_size = numbers_per_row(kwargs, splitter.rows)
        if method == "generate":
            step = _first_step(self.model, splitter.take(kwargs, torch.tensor([segment.start])))
            single = MixedCall(single.segments, is_probe=True)
            self._call("forward", step, single)
        return Work.of_log(single.log, self.recovery, input_size)

    def _call(self, method: str, kwargs: dict[str, Any], call: MixedCall, watching: Watch | None = None) -> Any:
        if hasattr(self._wrapped, "generation_config"):  # the original's may have been replaced since it was copied
            self.model.generation_config = self._wrapped.generation_config

        def run() -> Any:
            entered = self.model if method == "forward" else getattr(self.model, method)
            # `generate` moves the rows of beams itself, and enters the model through what is watched.
            with watching or nullcontext(), nullcontext() if method in ("forward", "generate") else watched():
                return _plain(call, entered(**kwargs))

        return within(call, run)


def _copy(
    model: nn.Module, recovery: RecoveryModule, tasks: list[str], heads: Mapping[str, Mapping[str, Tensor]]
) -> nn.Module:
    named = model.state_dict(keep_vars=True)
    places: dict[str, dict[str, TensorSource]] = {}
    for name in recovery:
        if recovery[name].layout.batch > 1:
            raise MixedUnsupported(
                f"{name!r} is a stack of matrices, such as a mixture's experts, without row-by-row form."
            )
        for alias in names_of(model, name):
            # Quantised layers may rename their weights.
            merged = named[alias] if alias in named else torch.empty(recovery[name].layout.shape, device="meta")
            module, _, attribute = alias.rpartition(".")
            places.setdefault(module, {})[attribute] = Recovered(name, merged.detach(), recovery)
    for name in next(iter(heads.values()), {}):
        module, _, attribute = name.rpartition(".")
        own = {tasks.index(task): head[name] for task, head in heads.items()}
        places.setdefault(module, {})[attribute] = Head(name, own)
    tensors: dict[str, Tensor] = {}
    replaced: dict[int, nn.Module] = {}
    for module, sources in places.items():
        names = {attribute: f"{module}.{attribute}" if module else attribute for attribute in sources}
        if all(name in named and is_plain(named[name]) for name in names.values()):
            tensors |= {name: TaskTensor(named[name], sources[attribute]) for attribute, name in names.items()}
        else:
            layer = model.get_submodule(module)
            replaced[id(layer)] = beside(layer, sources)
    copied = copy_with(model, tensors, replaced).eval()
    # `generate` calls the encoder of an encoder-decoder itself.
    is_two_part = getattr(getattr(copied, "config", None), "is_encoder_decoder", False)
    for entered in [copied, *([copied.get_encoder()] if is_two_part else [])]:  # type: ignore[operator]  # transformers'
        watch(entered)
    return copied


def _hiding(kwargs: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Return, for each mask that hides something, which rows it does that in."""
    masks = {
        name: (value == 0).flatten(1).any(1)
        for name, value in kwargs.items()
        if name.endswith("mask") and isinstance(value, Tensor) and value.ndim > 1 and len(value) == rows
        if not value.is_floating_point()
    }
    return {name: hidden for name, hidden in masks.items() if hidden.any()}


def _rows_to_probe(kwargs: Mapping[str, Any], rows: int) -> list[int]:
    """Return two rows, the first of them with as much masked as any; a batch of one row has one."""
    masks = _hiding(kwargs, rows).values()
    first = int(torch.stack(list(masks)).sum(0).argmax()) if masks else 0
    return [first, 1 if first == 0 else 0][:rows]


def _two_steps(kwargs: Mapping[str, Any], settings: GenerationConfig | None) -> dict[str, Any]:
    """Return arguments that make `generate` compute one token from the prompt and one from its cache.

    The user's callbacks and options are left out: they only choose among what the model computes.
    """
    inputs = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) or name == "encoder_outputs"}
    options = {
        "max_new_tokens": 2,
        "min_new_tokens": 2,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if settings is None:
        return inputs | options
    # transformers warns of lengths set in two ways, and the model may have its own.
    settings = copy(settings)
    settings.update(**options, max_length=None, min_length=None)
    return inputs | {"generation_config": settings}


def _certificate(meetings: list[tuple[Origin, int, int]], per_task: set[str]) -> Certificate:
    """Derive which parameters meet rows from the sizes that they meet with more and with fewer rows."""
    free = {(origin, size) for origin, size, fewer in meetings if size == fewer}
    rows = {origin for origin, size, fewer in meetings if size != fewer}
    # A single entry for several rows is recognised by its size.
    both = sorted(str(origin) for origin, size in free if size > 1 and origin in rows)
    if both:
        raise MixedUnsupported(f"{both[0]!r} is applied to rows and to what has no rows.")
    return Certificate(frozenset(rows), frozenset({origin for origin, _ in free} - rows), frozenset(per_task))


def _with_computed(named: Certificate, fewer: MixedCall, more: MixedCall) -> Certificate:
    """Extend a certificate by values computed from parameters, from calls on fewer and on more rows.

    Both calls assumed that a tensor has rows where its shape and size allow it; refuse the model where that was wrong.
    """
    meetings: list[tuple[Origin, int, int]] = []
    for (origin, small, could), (same, large, _) in zip(fewer.computed, more.computed, strict=True):
        has_rows = large * fewer.rows == small * more.rows and small > 0
        guessed = [could and size > 1 and size % call.rows == 0 for size, call in ((small, fewer), (large, more))]
        if origin != same or not (has_rows or small == large) or guessed != [has_rows, has_rows]:
            raise MixedUnsupported("a value computed from parameters meets a tensor whose rows cannot be told apart.")
        meetings.append((origin, large, small))
    found = _certificate(meetings, set())
    return replace(named, rows=named.rows | found.rows, row_free=named.row_free | found.row_free)


def _first_step(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `forward` for the first step of `generate` on one row."""
    accepted = inspect.signature(model.forward).parameters
    step = {
        name: value
        for name, value in kwargs.items()
        if name in accepted and (isinstance(value, Tensor) or name == "encoder_outputs")
    }
    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if main is not None and isinstance(kwargs.get("inputs"), Tensor):
        step.setdefault(main, kwargs["inputs"])
    decodes = "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False)
    if decodes and "decoder_input_ids" not in step:
        start = getattr(getattr(model, "generation_config", None), "decoder_start_token_id", None)
        given = next(value if isinstance(value, Tensor) else value[0] for value in step.values())
        step["decoder_input_ids"] = torch.full((1, 1), start or 0, device=given.device)
    return step


def _plain(call: MixedCall, output: Any, name: str = "output") -> Any:
    """Replace task tensors in an output (text features, a logit scale) by one value per row."""
    if isinstance(output, TaskTensor):
        if call.is_probe:
            call.per_task.add(name)
        elif call.certificate is not None and len(call.segments) > 1 and name not in call.certificate.per_task:
            raise MixedUnsupported(f"{name!r} has no rows, but had rows in the probe.")
        values = output.source.values(call)
        if len(values) == 1:
            return values[0]
        return torch.stack(values)[call.index(call.rows, output.device)]
    if isinstance(output, Mapping) or is_record(output):
        return rebuilt(output, {key: _plain(call, value, str(key)) for key, value in record_fields(output).items()})
    if type(output) in (list, tuple):
        return type(output)(_plain(call, value, name) for value in output)
    return output


def _tensors(value: Any, name: str = "output") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping) or is_record(value):
        return [found for key, item in record_fields(value).items() for found in _tensors(item, str(key))]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _tensors(item, name)]
    return []


def _check_rows(together: Any, alone: Any, other: Any, counts: tuple[int, int]) -> None:
    """Refuse a model for which a row of two tasks' rows together differs from the same row alone."""
    for row in range(sum(counts)):
        _check_row(together, alone if row < counts[0] else other, row, sum(counts))


def _check_row(together: Any, alone: Any, row: int, rows: int) -> None:
    for (name, all_rows), (_, single) in zip(_tensors(together), _tensors(alone), strict=True):
        if not all_rows.is_floating_point() or (name.endswith("loss") and all_rows.ndim == single.ndim == 0):
            continue
        found = _row_of(name, all_rows.float(), single.shape, row, rows)
        # A narrower head is padded next to a wider one.
        inside = tuple(slice(size) for size in single.shape)
        own, outside = found[inside], found.numel() - single.numel()
        if own.shape != single.shape or (found == -float("inf")).sum() < outside:
            raise MixedUnsupported(f"{name!r} has the shape {tuple(all_rows.shape)} for {rows} rows.")
        own, expected = own.nan_to_num(), single.float().nan_to_num()
        scale = expected.abs().max().clamp(min=1e-6)
        if not (own - expected).abs().max() <= PROBE_TOLERANCE * scale:
            raise MixedUnsupported(f"{name!r} of {rows} rows together differs from each row alone.")


def _row_of(name: str, all_rows: Tensor, single: torch.Size, row: int, rows: int) -> Tensor:
    """Return one row of the output of several, in the shape it has alone.

    Rows lead, or there is one value per task, or rows come second (the logits of texts), or one value serves all rows.
    """
    if all_rows.ndim == len(single) > 0 and len(all_rows) == rows * single[0]:
        return all_rows[row * single[0] : (row + 1) * single[0]]
    if all_rows.ndim == len(single) + 1 and len(all_rows) == rows:
        return all_rows[row]
    if name in COLUMN_FIELDS and all_rows.ndim == 2:
        return all_rows[:, row : row + 1]
    return all_rows
