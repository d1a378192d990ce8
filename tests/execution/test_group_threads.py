"""Groups of a batch run at the same time only where a caller cannot tell, and give what they give one by one."""

from __future__ import annotations

import threading

import pytest
import torch
from families import FAMILIES, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from retex_hf.artifact.recipe import use_threads
from retex_hf.execution import group_threads
from retex_hf.utils.threads import in_threads

PATIENCE = 20
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Meeting(nn.Module):
    """A model whose forward passes wait for each other, while there is a `barrier`."""

    barrier: threading.Barrier | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if Meeting.barrier is not None:
            Meeting.barrier.wait(PATIENCE)
        return self.linear(x)


class Drawing(Meeting):
    """A model that draws random numbers when it is used, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(1)  # the same for all rows, which a proof accepts


@pytest.fixture
def worth(monkeypatch):
    """Take every call for one that is worth threads; give torch two."""
    monkeypatch.setattr(group_threads, "WORTH", 0)
    monkeypatch.setattr(Meeting, "barrier", None)
    with use_threads(2):
        yield


def make(kind: type[Meeting] = Meeting):
    torch.manual_seed(0)
    base = kind()
    model, _ = build_from(base, make_experts(base))
    model.execution = "grouped"
    return model


def in_twos(monkeypatch) -> None:
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(2))


@torch.no_grad()
def test_groups_run_at_the_same_time_and_give_what_they_give_alone(worth, monkeypatch):
    model, x, names = make(), torch.randn(8, 6), [*TASKS[:2]] * 4
    expected = model(x, task=names)  # recovers the experts
    in_twos(monkeypatch)  # a group that ran alone would wait in vain
    assert_same(model(x, task=names), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "vit", "clip"])
def test_families_give_the_same_in_threads(worth, monkeypatch, family):
    model, _ = build_retex(family)
    model.execution = "grouped"
    inputs = FAMILIES[family].inputs(len(MIXED))
    at_once: list[int] = []
    inner = group_threads.groups_at_once
    monkeypatch.setattr("retex_hf.execution.runner.groups_at_once", lambda *a: at_once.append(inner(*a)) or at_once[-1])
    first, second = model(**inputs, task=MIXED), model(**inputs, task=MIXED)
    assert at_once == [2]  # the first call recovers experts, and decides nothing
    assert_same(second, first, **CLOSE)


@pytest.mark.parametrize(
    "circumstance",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        BaseTorchFunctionMode,
        torch.profiler.profile,
        lambda: use_threads(1),
    ],
    ids=["gradients", "autocast", "function mode", "profiler", "one thread"],
)
@torch.no_grad()
def test_groups_run_one_by_one_where_threads_would_lose_what_the_caller_set(worth, monkeypatch, circumstance):
    model, x, names = make(), torch.randn(4, 6), [*TASKS[:2]] * 2
    model(x, task=names)
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(1))
    threads: set[int] = set()
    inner = Meeting.forward

    def forward(self, x):
        threads.add(threading.get_ident())
        return inner(self, x)

    monkeypatch.setattr(Meeting, "forward", forward)
    with circumstance():
        model(x, task=names)
    assert threads == {threading.get_ident()}
    model(x, task=names)
    assert threads > {threading.get_ident()}


@torch.no_grad()
def test_hooks_see_groups_one_by_one(worth, monkeypatch):
    model, x, names = make(), torch.randn(4, 6), [*TASKS[:2]] * 2
    seen: list[int] = []
    model.get_base_model().linear.register_forward_hook(lambda *_: seen.append(threading.get_ident()))
    model(x, task=names)
    model(x, task=names)
    assert set(seen) == {threading.get_ident()}


@torch.no_grad()
def test_random_numbers_are_drawn_in_the_order_of_the_groups(worth):
    model, x, names = make(Drawing), torch.randn(8, 6), [*TASKS[:2]] * 4

    def answers() -> Tensor:
        torch.manual_seed(3)
        return model(x, task=names)

    first = answers()
    assert all(torch.equal(answers(), first) for _ in range(20))


@torch.no_grad()
def test_experts_that_do_not_fit_the_cache_are_recovered_one_by_one(worth, monkeypatch):
    model, x, names = make(), torch.randn(4, 6), [*TASKS[:2]] * 2
    model.expert_cache = 0
    expected = model(x, task=names)
    monkeypatch.setattr("retex_hf.execution.runner.groups_at_once", None)  # is not even asked
    assert_same(model(x, task=names), expected, exact=True)


@torch.no_grad()
def test_an_exception_in_a_thread_is_the_callers_and_the_next_call_is_right(worth, monkeypatch):
    model, x, names = make(), torch.randn(4, 6), [*TASKS[:2]] * 2
    expected = model(x, task=names)
    broken = threading.Barrier(2)
    broken.abort()
    monkeypatch.setattr(Meeting, "barrier", broken)
    with pytest.raises(threading.BrokenBarrierError):
        model(x, task=names)
    monkeypatch.setattr(Meeting, "barrier", None)
    assert_same(model(x, task=names), expected, **CLOSE)


def test_small_calls_are_not_worth_threads():
    with use_threads(2), torch.no_grad():
        model, _ = build_retex("bert")
        inputs = tokens(len(MIXED))
        proof = next(iter(model_proofs(model, inputs)))
        assert group_threads.groups_at_once(model.get_base_model(), inputs, len(MIXED), 3, proof) == 1


def model_proofs(model, inputs):
    model.execution = "grouped"
    model(**inputs, task=MIXED)
    return model._state.proofs.values()


def test_threads_to_come_keep_the_number_that_torch_had():
    def count(_: int) -> int:
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        return found[0]

    with use_threads(4):
        assert dict(in_threads(count, [0, 1], 2)) == {0: 4, 1: 4}
        assert torch.get_num_threads() == 4
