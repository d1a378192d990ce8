"""Base of methods with a body per row: mixtures of corners, running rows on them, and a cache of the answers."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.readout import Answer, Readout
from ..errors import TaskError
from ..evaluation.method import Material, Method, Prediction, take_rows, without_padding
from ..execution import copy_with
from ..merging.expert_weights import ExpertWeights, Weights
from .blocks import lookup_table
from .weights import expert_weights

# Approximate memory of the bodies that are mixed in one product.
WORKSPACE_BYTES = 512 * 1024**2


class Mixtures:
    """Models whose body is `sum_t c_t E_t`, with coefficients of their own for every row.

    Mixing is memory-bound, so bodies of several rows are made in one product that reads the corners once, and only
    those rows of the input embedding table are mixed that are looked up.

    Args:
        weights: The model, its tasks and their heads.
        corners: Stacked tensors `E_t` (T, ...) to mix.
        fixed: Tensors of the body that are the same in all mixtures.
    """

    @torch.inference_mode(False)  # later calls write to the tensors made here
    @torch.no_grad()
    def __init__(self, weights: ExpertWeights, corners: Weights, fixed: Mapping[str, Tensor]) -> None:
        alike = [name for name, stack in corners.items() if (stack == stack[:1]).all()]
        self.tasks = weights.tasks
        self._corners = {name: stack.flatten(1) for name, stack in corners.items() if name not in alike}
        self._coefficients = torch.zeros(len(self.tasks))
        parameters = dict(weights.model.named_parameters(remove_duplicate=False))
        # Models of all tasks share these tensors, whose contents change from row to row.
        self._tensors = {
            name: nn.Parameter(corners[name][0], requires_grad=False) if name in parameters else corners[name][0]
            for name in self._corners
        }
        table = lookup_table(weights.model, self._corners)
        self._table = table
        if table is not None:
            self._tensors[table].data = corners[table][0].clone()
        mixed = {name: stack.shape[1] for name, stack in self._corners.items() if name != table}
        numbers = sum(mixed.values())
        self._at_once = max(1, WORKSPACE_BYTES // (4 * max(numbers, 1)))
        self._spaces = {name: torch.empty(self._at_once, size) for name, size in mixed.items()}
        body = {**fixed, **{name: corners[name][0] for name in alike}, **self._tensors}
        self.modules = self._models(weights, body)

    def _models(self, weights: ExpertWeights, body: Mapping[str, Tensor]) -> dict[str, nn.Module]:
        """Return the body under the head of every task; one model for all where heads are outside of it."""
        modules: dict[str, nn.Module] = {}
        for task, head in weights.heads.items():
            if head or not modules:
                modules[task] = copy_with(weights.model, {**body, **head}).eval()
            else:
                modules[task] = next(iter(modules.values()))
        if self._table is not None:
            for module in set(modules.values()):
                lookup = module.get_submodule(self._table.rpartition(".")[0])
                lookup.register_forward_pre_hook(partial(self._look_up, self._table))
        return modules

    @torch.no_grad()
    def answers(
        self, readout: Readout, inputs: Mapping[str, Tensor], coefficients: Tensor, heads: Sequence[str]
    ) -> list[Answer]:
        """Answer each row by the mixture with its coefficients (rows, T), under the head of a task.

        Rows with equal coefficients run together, all others one at a time.
        """
        answers: dict[int, Answer] = {}
        distinct, which = coefficients.unique(dim=0, return_inverse=True)
        for first in range(0, len(distinct), self._at_once):
            chunk = distinct[first : first + self._at_once]
            for name, space in self._spaces.items():
                torch.mm(chunk, self._corners[name], out=space[: len(chunk)])
            for place, mixture in enumerate(chunk):
                self._enter(place, mixture)
                members = (which == first + place).nonzero()[:, 0]
                answers.update(self._run(readout, inputs, members, heads))
        return [answers[row] for row in range(len(heads))]

    def _enter(self, place: int, coefficients: Tensor) -> None:
        """Copy the body at a position of the workspace into the models."""
        self._coefficients = coefficients
        for name, space in self._spaces.items():
            self._tensors[name].data = space[place].view(self._tensors[name].shape)

    def _run(
        self, readout: Readout, inputs: Mapping[str, Tensor], members: Tensor, heads: Sequence[str]
    ) -> list[tuple[int, Answer]]:
        modules = {id(self.modules[heads[row]]): self.modules[heads[row]] for row in members.tolist()}
        found: list[tuple[int, Answer]] = []
        for key, module in modules.items():
            rows = [row for row in members.tolist() if id(self.modules[heads[row]]) == key]
            output = readout.call(module, without_padding(take_rows(inputs, torch.tensor(rows))))
            found += zip(rows, readout.answers(output, [heads[row] for row in rows]), strict=True)
        return found

    def _look_up(self, table: str, module: nn.Embedding, args: tuple[Any, ...]) -> None:
        """Mix the rows of the table that are about to be looked up."""
        lines = args[0].unique()
        corners = self._corners[table].view(len(self.tasks), *module.weight.shape)
        module.weight.data[lines] = torch.tensordot(self._coefficients, corners[:, lines], 1)


class Dynamic(Method):
    """A method whose router gives every row a mixture of corners, in three modes (see `Method`):

    - task unknown: the router's mixture, under the head of the largest coefficient;
    - task known: the router's mixture, under the true head;
    - oracle routing: the corner of the true task, under its head.

    Args:
        decimals: Round coefficients to this many decimals, so that rows with nearly equal ones run together. Default:
            no rounding.
        remember: Cache the result of each row, so that a second mode need not compute it again. Use it for accuracies
            only, not when measuring time.
    """

    routes = True

    def __init__(self, *, decimals: int | None = None, remember: bool = False) -> None:
        self.decimals, self.remember = decimals, remember

    def fit(self, material: Material) -> None:
        self.readout = material.readout
        self.weights = expert_weights(material)
        self._routed: dict[bytes, Tensor] = {}
        self._answered: dict[tuple[Any, ...], Answer] = {}
        with torch.no_grad():
            self.mixtures = self.prepare(material)

    @abstractmethod
    def prepare(self, material: Material) -> Mixtures:
        """Make the corners and the router."""

    @abstractmethod
    def route(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what the router finds of each row (rows, ...), whoever asks: the shares, unless `shares` says else."""

    def shares(self, found: Tensor, heads: Sequence[str] | None) -> Tensor:
        """Return the shares (rows, T) of the corners in the body of each row; they sum to one.

        `heads` are the true tasks where they are known. Most routers decide by the input alone.
        """
        return found

    @torch.no_grad()
    def predict(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None, *, oracle: bool = False
    ) -> Prediction:
        names = self.weights.tasks
        keys = row_keys(inputs) if self.remember else None
        shares = true_shares(self.name, names, tasks) if oracle else self.shares(self._found(inputs, keys), tasks)
        heads = [names[index] for index in shares.argmax(-1).tolist()] if tasks is None else list(tasks)
        return Prediction(self._answers(inputs, self.coefficients(shares), heads, keys), heads)

    def coefficients(self, shares: Tensor) -> Tensor:
        """Return the mixing coefficients for the router's shares."""
        if self.decimals is None:
            return shares
        rounded = shares.double().round(decimals=self.decimals)
        return (rounded / rounded.sum(-1, keepdim=True)).float()

    def _found(self, inputs: Mapping[str, Tensor], keys: list[bytes] | None) -> Tensor:
        if keys is None:
            return self.route(inputs)
        if not all(key in self._routed for key in keys):
            self._routed.update(zip(keys, self.route(inputs), strict=True))
        return torch.stack([self._routed[key] for key in keys])

    def _answers(
        self, inputs: Mapping[str, Tensor], coefficients: Tensor, heads: list[str], keys: list[bytes] | None
    ) -> list[Answer]:
        if keys is None:
            return self.mixtures.answers(self.readout, inputs, coefficients, heads)
        # Generated text does not depend on the head.
        under = heads if self.readout.chooses_head else [None] * len(heads)
        whole = [(key, row.numpy().tobytes(), head) for key, row, head in zip(keys, coefficients, under, strict=True)]
        new = [row for row, key in enumerate(whole) if key not in self._answered]
        if new:
            rows = torch.tensor(new)
            found = self.mixtures.answers(
                self.readout, take_rows(inputs, rows), coefficients[rows], [heads[row] for row in new]
            )
            self._answered.update(zip([whole[row] for row in new], found, strict=True))
        return [self._answered[key] for key in whole]


def true_shares(method: str, names: Sequence[str], tasks: Sequence[str] | None) -> Tensor:
    """Return one for each row's task and zero for others (rows, T), for oracle routing; refuse rows without tasks."""
    if tasks is None:
        raise TaskError(f"{method} needs the task of every row for oracle routing.")
    return torch.eye(len(names))[[names.index(task) for task in tasks]]


def row_keys(inputs: Mapping[str, Tensor]) -> list[bytes]:
    """Return keys that identify the rows of a batch, independent of their padding."""
    rows = len(next(iter(inputs.values())))
    keys = []
    for row in range(rows):
        digest = hashlib.blake2b(digest_size=16)
        for name, value in without_padding(take_rows(inputs, torch.tensor([row]))).items():
            digest.update(name.encode() + str(tuple(value.shape)).encode() + value.contiguous().numpy().tobytes())
        keys.append(digest.digest())
    return keys


def task_arithmetic(weights: ExpertWeights, scale: float) -> Weights:
    """Return `W_0 + scale * sum_t (W_t - W_0)` of the whole body."""
    return weights.body(torch.full((len(weights.tasks),), scale))


def bytes_of(weights: ExpertWeights, numbers: Mapping[str, int]) -> int:
    """Return the bytes of the given count of numbers per tensor, in the dtype in which the model stores that tensor."""
    return sum(count * weights.element_size(name) for name, count in numbers.items())
