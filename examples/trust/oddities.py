"""Tools for the cases of odd numbers and odd inputs: a subject to try them on, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexError, RetexModel

from .subjects import FAMILIES, TASKS, batch, make_tokenizer, mixed_batch, texts

FAR = {"method": "hard", "far": "merged"}


class Wrong(AssertionError):
    """A case gave a result that it must not give."""


@dataclass
class Subject:
    """Base and experts of one family, as fresh copies that a case may change."""

    family: str
    seed: int = 0
    execution: str = "auto"
    base: nn.Module = field(init=False)
    experts: dict[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.tokenizer = make_tokenizer()
        self.base, self.experts = FAMILIES[self.family](self.tokenizer)

    def build(self, experts: Mapping[str, nn.Module] | None = None, **config: Any) -> RetexModel:
        """Build a model without signatures. Tiny random experts are too far from their base to pass for related."""
        options = RetexConfig(**{"rank": 4, "feature_layer": 0, **config})
        model = RetexModel.from_experts(self.base, experts or self.experts, options, progress=False, check_base=False)
        model.execution = self.execution
        return model

    def signed(self, experts: Mapping[str, nn.Module] | None = None, **config: Any) -> RetexModel:
        """Build a model with signatures of the texts of each task."""
        model = self.build(experts, **config)
        references = {task: [self.texts(task, 24)] for task in model.tasks}
        model.fit_signatures(references, progress=False)
        return model

    def texts(self, task: str, rows: int, seed: int = 0) -> dict[str, Tensor]:
        return batch(self.tokenizer, texts(task, rows, seed))

    def rows(self, seed: int = 1) -> dict[str, Tensor]:
        """Return two rows of every task."""
        return mixed_batch(self.tokenizer, 2, seed)

    def embedded(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same rows as vectors, which can hold any number."""
        vectors = self.base.get_input_embeddings()(rows["input_ids"]).detach()
        return {"inputs_embeds": vectors, "attention_mask": rows["attention_mask"]}

    @torch.no_grad()
    def answer(self, model: nn.Module, rows: Mapping[str, Any], **options: Any) -> Tensor:
        """Return logits, without the padding of narrower heads."""
        logits = self.output(model, rows, **options).logits
        return logits.float().masked_fill(logits == -torch.inf, 0)

    def output(self, model: nn.Module, rows: Mapping[str, Any], **options: Any) -> Any:
        count = len(next(iter(rows.values())))
        if self.family == "t5":
            options["decoder_input_ids"] = torch.zeros(count, 2, dtype=torch.long)
        return model(**rows, **options)

    def matrix(self, model: nn.Module) -> tuple[str, nn.Parameter]:
        """Return a weight matrix inside a block."""
        return next(
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.ndim == 2 and ("layer." in name or "block." in name) and min(parameter.shape) > 8
        )


def same(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Check that both are finite, and equal to within a share of the largest entry."""
    width = min(found.shape[-1], expected.shape[-1]) if found.ndim > 1 else None
    found, expected = (value[..., :width].float() for value in (found, expected))
    if not torch.isfinite(found).all():
        raise Wrong(f"{what}: not finite")
    distance = (found - expected).abs().max().item() if found.numel() else 0.0
    if distance > tolerance * expected.abs().max().clamp(min=1e-3).item():
        raise Wrong(f"{what}: off by {distance:.2e}")


def holds(condition: object, what: str) -> None:
    if not condition:
        raise Wrong(what)


def refused(call: Callable[[], Any], *words: str, by: type[Exception] = RetexError) -> None:
    """Check that a call is refused by an error of this library, in one sentence that holds these words."""
    try:
        call()
    except by as error:
        missing = [word for word in words if word not in str(error)]
        holds(not missing, f"the refusal does not say {missing}: {error}")
    else:
        raise Wrong("it was not refused")


def errors_are_shares(model: RetexModel) -> None:
    """Check that relative errors of recovery lie between 0 and 1 (up to rounding), whatever the numbers are."""
    wrong = {name: error for name, error in model.recovery_errors.items() if not 0 <= error <= 1 + 1e-4}
    holds(not wrong, f"relative errors {wrong}")


def finite_recovery(model: RetexModel) -> None:
    wrong = [name for name, part in model.recovery.named_parameters() if not torch.isfinite(part.float()).all()]
    holds(not wrong, f"factors of {wrong} are not finite")


def copies(expert: nn.Module, tasks: tuple[str, ...] = TASKS) -> dict[str, nn.Module]:
    return {task: deepcopy(expert) for task in tasks}


@dataclass(frozen=True)
class Case:
    """One odd case: `outcome` is the required result ("right" or "refused"), `families` are those to try it on."""

    name: str
    outcome: str
    run: Callable[[Subject], None]
    families: tuple[str, ...]


CASES: list[Case] = []


def case(name: str, outcome: str = "right", families: tuple[str, ...] = tuple(FAMILIES)) -> Callable:
    """Register a function as a case."""

    def listed(run: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CASES.append(Case(name, outcome, run, families))
        return run

    return listed
