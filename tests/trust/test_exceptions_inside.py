"""Whatever a call raises, and wherever: the model is as before, and the next call is right."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from trust import subjects, threads
from trust.subjects import TASKS
from trust.threads import fingerprint

import retex_hf
from retex_hf.execution import trunk_replay
from retex_hf.execution.mixed import call as mixed_call
from retex_hf.model import routed_model
from retex_hf.routing import features, weight_scores

HOME = Path(retex_hf.__file__).parent
TRACED = tuple(str(HOME / name) for name in ("model/routed_model.py", "execution", "routing", "utils/locks.py"))
CONTEXT = (
    trunk_replay._replayed,
    mixed_call._current,
    features._current,
    weight_scores._current,
    routed_model._disabled,
)
EVERY = 15  # the test stops at one in so many lines; by hand, all of them: RETEX_EVERY_LINE=1


class Stopped(BaseException):
    """Like Ctrl-C, it is no `Exception`."""


def inputs() -> dict[str, torch.Tensor]:
    return subjects.mixed_batch(subjects.make_tokenizer())


def hooks_of(module: torch.nn.Module) -> int:
    return sum(len(value) for part in module.modules() for name, value in vars(part).items() if name.endswith("_hooks"))


class Watched:
    """A model, and how it was before anything went wrong."""

    def __init__(self, model: retex_hf.RetexModel, execution: str) -> None:
        self.model, self.inputs = model, inputs()
        model.execution = execution
        self.expected = self.answer()
        self.weights = fingerprint(dict(self.model.state_dict()))
        self.hooks, self.modules = hooks_of(self.model), dict(self.model.named_modules())

    @torch.no_grad()
    def answer(self) -> str:
        output = self.model(**self.inputs)
        return fingerprint([output, vars(output.routing)])

    def check(self, where: object) -> None:
        cache = self.model.expert_cache
        assert not self.model._change.lock.locked(), where
        assert not cache._lock.locked(), where
        assert all(repr(making.turn).startswith("<unlocked") for making in cache._making.values()), where
        assert all(context.get(None) in (None, ()) for context in CONTEXT), where
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), where
        assert hooks_of(self.model) == self.hooks, where
        assert dict(self.model.named_modules()) == self.modules, where
        assert fingerprint(dict(self.model.state_dict())) == self.weights, where
        assert self.answer() == self.expected, where
        assert not cache._making, where
        assert cache.bytes <= cache.capacity, where


# ---- at every line ---------------------------------------------------------------------------------------------------


def stopping_at(wanted: tuple[str, int] | None, seen: dict[tuple[str, int], None]):
    """A trace function that notes the lines of our own that run, and raises at one of them."""

    def line(frame, event, _):
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            seen[place] = None
            if place == wanted:
                raise Stopped
        return line

    def start(frame, event, _):
        return line if frame.f_code.co_filename.startswith(TRACED) else None

    return start


@pytest.mark.skipif(sys.gettrace() is not None, reason="something else is tracing")
@pytest.mark.parametrize(
    ("execution", "options"),
    [
        ("grouped", {"shared_trunk": True}),
        ("mixed", {"routing": threads.SOME_FAR}),
        ("grouped", {"signatures": "weights"}),
    ],
    ids=["grouped, shared trunk", "mixed, far rows", "by weights"],
)
def test_stopped_at_any_line(execution, options):
    watched = Watched(threads.make_case("bert", work_dir=Path(), options=options).model, execution)

    def traced(wanted: tuple[str, int] | None) -> dict[tuple[str, int], None]:
        seen: dict[tuple[str, int], None] = {}
        watched.model.expert_cache.clear()  # so that experts are made, too
        tracer = sys.gettrace()
        sys.settrace(stopping_at(wanted, seen))
        try:
            watched.model(**watched.inputs)
        finally:
            sys.settrace(tracer)
        return seen

    lines = list(traced(None))
    assert len(lines) > 150
    assert {Path(name).name for name, _ in lines} >= {"routed_model.py", "runner.py", "expert_cache.py", "features.py"}
    watched.check("nowhere")
    every = 1 if os.environ.get("RETEX_EVERY_LINE") else EVERY
    offset = {"grouped": 0, "mixed": 1}[execution]
    for place in lines[offset::every]:
        with pytest.raises(Stopped):
            traced(place)
        watched.check(place)


# ---- at any moment ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alarm():
    """Raises KeyboardInterrupt in the main thread after a time."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        pytest.skip("needs timers that interrupt the main thread")

    def ring(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)

    def interrupted(call, seconds: float) -> bool:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        finally:
            torch.set_grad_enabled(True)  # torch's own switch may have been left half-way
        return False

    yield interrupted
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_interrupted_at_any_moment(alarm, execution):
    watched, draw, stopped = Watched(subjects.make_model(), execution), random.Random(0), 0

    def call() -> None:
        watched.model.expert_cache.clear()
        watched.model(**watched.inputs)

    limit = 0.02
    for number in range(25):
        if alarm(call, draw.uniform(1e-4, limit)):
            stopped += 1
            watched.check(number)
        else:
            limit *= 0.8
    assert stopped >= 5


def test_a_change_that_is_interrupted_is_made_or_not_made(alarm):
    case = threads.make_case("bert", work_dir=Path())
    model, draw = case.model, random.Random(0)
    history = threads.History(case)
    batch = inputs()
    expected = model(**batch, task="red").logits
    stopped, limit = 0, 0.1
    for _ in range(20):
        there = threads.EXTRA in model.tasks
        change = (lambda: model.delete_task(threads.EXTRA)) if there else (lambda: history._add_task(threads.EXTRA))
        if alarm(change, draw.uniform(1e-4, limit)):
            stopped += 1
        else:
            limit *= 0.9
        sizes = {len(model.tasks), model.recovery.num_tasks, len(model.heads)}
        assert sizes == {model.identify(**batch).residuals.shape[1]}
        assert not model._change.lock.locked()
        torch.testing.assert_close(model(**batch, task="red").logits, expected, rtol=1e-3, atol=1e-4)
    assert stopped >= 3


# ---- by hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_a_hook_raises_at_its_nth_call(execution, error):
    model = subjects.make_model()
    countdown = [-1]

    def hook(*_) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise error("a hook")

    model.get_base_model().bert.encoder.layer[0].register_forward_hook(hook)
    model.expert_cache.clear()
    watched = Watched(model, execution)
    # The first layer runs to identify, then (grouped) for each of three experts, or (mixed) to probe and in one pass.
    for number in range(1, 5):
        model.expert_cache.clear()
        countdown[0] = number
        with pytest.raises((error, retex_hf.RetexError), match="a hook"):
            model(**watched.inputs)
        countdown[0] = -1
        watched.check(number)


# ---- disable_adapter -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    model, batch = subjects.make_model(), inputs()

    @torch.no_grad()
    def answer() -> str:
        return fingerprint(model(**batch))

    recovered = answer()
    with model.disable_adapter():
        merged = answer()
    assert answer() == recovered != merged
    return model, answer, merged, recovered


def test_disabled_in_one_thread_and_in_what_is_given_its_context(shared):
    model, answer, merged, recovered = shared
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer).result() == recovered
        with model.disable_adapter():
            assert answer() == merged
            assert pool.submit(answer).result() == recovered
            assert pool.submit(contextvars.copy_context().run, answer).result() == merged
        assert pool.submit(answer).result() == recovered
        assert pool.submit(contextvars.copy_context().run, answer).result() == recovered
    assert answer() == recovered


def test_disabled_in_one_asyncio_task(shared):
    model, answer, merged, recovered = shared

    async def plain() -> list[str]:
        return [await asyncio.to_thread(answer), answer()]

    async def disabled() -> list[str]:
        with model.disable_adapter():
            found = [await asyncio.to_thread(answer)]
            await asyncio.sleep(0)
            return [*found, answer()]

    async def both() -> list[list[str]]:
        return await asyncio.gather(disabled(), plain(), disabled())

    assert asyncio.run(both()) == [[merged] * 2, [recovered] * 2, [merged] * 2]
    assert answer() == recovered


def test_disabled_by_generators_that_end_in_any_order(shared):
    model, answer, merged, recovered = shared

    def steps():
        with model.disable_adapter():
            yield answer()
            yield answer()

    first, second = steps(), steps()
    assert [next(first), next(second)] == [merged] * 2
    first.close()
    assert answer() == merged  # the second is still within
    second.close()
    assert answer() == recovered
    abandoned = steps()
    next(abandoned)
    del abandoned
    gc.collect()
    assert answer() == recovered
    with pytest.raises(ZeroDivisionError), model.disable_adapter():
        raise ZeroDivisionError
    assert answer() == recovered


def test_disabling_one_model_disables_no_other_even_in_its_place(shared):
    _, answer, _, recovered = shared
    other = subjects.make_model("bert", tasks=TASKS[:2])
    with other.disable_adapter():
        assert answer() == recovered
    entered = other.disable_adapter()
    entered.__enter__()
    context = contextvars.copy_context()  # of a task that goes on when the model is gone
    entered.__exit__(None, None, None)
    del other, entered
    gc.collect()
    assert all(context.run(lambda: routed_model.ChangeLock() not in routed_model._disabled.get()) for _ in range(100))
