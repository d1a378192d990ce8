"""Several parameters at once: the same results, each thread with its share of the cores, and no reads side by side."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from test_spectra import TASKS, Experts, make_targets
from torch import Tensor

from retex_hf import RetexConfig
from retex_hf.artifact.recipe import use_threads
from retex_hf.recovery import BuildContext
from retex_hf.recovery.solver import ruled_layouts, solve_all
from retex_hf.recovery.storage import solve_storage
from retex_hf.recovery.work_sharing import solved_at_once
from retex_hf.utils.threads import in_threads


def test_keys_are_worked_on_at_the_same_time_and_come_in_their_order():
    both = threading.Barrier(2, timeout=20)

    def work(key: int) -> tuple[int, int]:
        both.wait()
        time.sleep(0.05 * (4 - key))  # the first takes longest
        return key, torch.get_num_threads()

    with use_threads(4):
        found = list(in_threads(work, [0, 1, 2, 3], 2))
        assert torch.get_num_threads() == 4
    assert found == [(key, (key, 2)) for key in range(4)]


@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_modes_of_the_caller_hold_in_threads(infers, learns):
    def modes(key: str) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode(infers), torch.set_grad_enabled(learns):
        expected = modes("")
        assert dict(in_threads(modes, ["a", "b"], 2)) == {"a": expected, "b": expected}


def test_after_an_error_nothing_else_is_begun():
    begun = []

    def work(key: int) -> int:
        begun.append(key)
        time.sleep(0.02)
        if key == 1:
            raise ValueError("the second one")
        return key

    with pytest.raises(ValueError, match="the second one"):
        list(in_threads(work, list(range(50)), 2))
    assert len(begun) < 10
    assert threading.active_count() < 20


def test_only_a_cpu_solves_several_at_once():
    with use_threads(2):
        assert solved_at_once(torch.device("cpu")) == 2
    with use_threads(64):
        assert solved_at_once(torch.device("cpu")) == 4
        assert solved_at_once(torch.device("cuda")) == 1


@pytest.mark.parametrize("kind", ["storage", "rank"])
def test_several_at_once_solve_as_one_after_the_other(kind):
    with use_threads(1):
        targets = make_targets()

    def tensors(at_once: int) -> dict[str, Tensor]:
        context = BuildContext(progress=False, at_once=at_once)
        if kind == "storage":
            recovery, errors = solve_storage(targets, RetexConfig(storage=0.1), frozenset(), 2e4, context)
        else:
            config = RetexConfig(rank=8)
            shapes = {name: tuple(targets.merged[name].shape) for name in targets.names}
            layouts = ruled_layouts(shapes, config, len(TASKS), frozenset())
            recovery, errors = solve_all(targets, layouts, config, context)
        assert list(errors) == targets.names
        return recovery.state_dict()

    with use_threads(1):
        one = tensors(1)
    with use_threads(3):
        three = tensors(3)
    assert list(one) == list(three)
    for name, tensor in one.items():
        assert torch.equal(tensor, three[name]), name


def test_tensors_of_experts_are_read_one_at_a_time(monkeypatch):
    reading, most = [], []
    read = Experts.read_expert

    def watched(self: Experts, task: str, name: str) -> Tensor:
        reading.append(name)
        most.append(len(reading))
        time.sleep(0.002)
        found = read(self, task, name)
        reading.remove(name)
        return found

    monkeypatch.setattr(Experts, "read_expert", watched)
    context = BuildContext(progress=False, at_once=3)
    solve_storage(make_targets(), RetexConfig(storage=0.1), frozenset(), 2e4, context)
    assert max(most) == 1
