"""Many threads on one model: nothing is mixed up, nothing waits for what it does not need, nothing piles up."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer
from trust import subjects, threads
from trust.subjects import TASKS
from trust.tally import Tally
from trust.threads import CASES, EXTRA, THREADS, TURNS, fingerprint

PATIENCE = 60


@pytest.mark.parametrize("name", CASES)
def test_every_answer_is_one_that_is_given_alone(name, tmp_path):
    tally = Tally(name)
    case = threads.make_case(work_dir=tmp_path, **CASES[name])
    threads.share(case, tally, None, seed=0)
    assert not tally.problems
    assert tally.tried == THREADS * TURNS + 1
    kinds = {outcome for outcome in tally.outcomes if not outcome.startswith("changes (")}
    assert kinds <= {"same as alone", "raised, as it should", "the merged model is as before"}
    assert tally.outcomes["same as alone"] >= THREADS


def test_the_trial_notices_a_call_that_sees_two_states(tmp_path):
    case = threads.make_case("bert", work_dir=tmp_path)
    history, tally = threads.History(case), Tally("wrong")
    answer = threads.Answer("routed", 0, 0, fingerprint(case.calls["named"](case.model)))
    threads._judge(answer, history, {}, tally)
    assert tally.outcomes == {"mismatch": 1}
    case.model.set_adapter("green")
    history.states.append(case.model)
    late = threads.Answer("routed", 0, 1, fingerprint(case.calls["routed"](case.model)))
    threads._judge(late, history, {}, tally)
    assert tally.outcomes == {"mismatch": 1, "same as alone": 1}
    early = threads.Answer("routed", 0, 0, late.found)
    threads._judge(early, history, {}, tally)
    assert tally.outcomes["mismatch"] == 2


CHANGES = {
    "delete_task": lambda case: case.model.delete_task("red"),
    "add_task": lambda case: threads.History(case)._add_task(EXTRA),
    "fit_signatures": lambda case: case.model.fit_signatures(case.references(list(TASKS), 50), progress=False),
    "set_adapter": lambda case: case.model.set_adapter("green"),
    "routing": lambda case: setattr(case.model, "routing", "soft"),
}


@pytest.mark.parametrize(
    ("family", "name", "change"),
    [
        *(("bert", "routed", change) for change in CHANGES),
        *(("bert", name, "delete_task") for name in ("identify", "predict")),
        *(("t5", "generate", change) for change in ("delete_task", "routing")),
    ],
)
@torch.no_grad()
def test_a_call_goes_by_the_model_as_it_was_when_it_began(family, name, change, tmp_path):
    """The change is made in the midst of the call: while its rows are being identified."""
    case, changes = threads.make_case(family, work_dir=tmp_path), []

    def call() -> str:
        found = case.calls[name](case.model)
        return fingerprint([found, vars(found.routing) if hasattr(found, "routing") else None])

    def hook(*_: Any) -> None:
        if changes:
            changes.pop()(case)

    layer = "bert.encoder.layer.0" if family == "bert" else "encoder.block.0"
    case.model.get_base_model().get_submodule(layer).register_forward_hook(hook)
    case.model.expert_cache.clear()
    expected = call()
    changes.append(CHANGES[change])
    assert call() == expected
    assert not changes


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
@torch.no_grad()
def test_of_the_rows_that_threads_share_some_are_far(execution, tmp_path):
    case = threads.make_case(work_dir=tmp_path, **CASES["far rows"])
    case.model.execution = execution
    _, routing = case.calls["routed"](case.model)
    assert sorted(set(routing["abstained"].tolist())) == [False, True]


# ---- waiting ---------------------------------------------------------------------------------------------------------


class Gate:
    """A hook in which one thread stays until it is let go on."""

    def __init__(self) -> None:
        self.thread, self.reached, self.open = None, threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if threading.current_thread() is self.thread:
            self.reached.set()
            assert self.open.wait(PATIENCE)

    def __deepcopy__(self, memo: dict) -> Gate:
        return self

    def slow(self, call: Callable[[], Any]) -> list[Any]:
        """Start a call in a thread of its own and return when it stands in the hook; its result comes later."""
        results: list[Any] = []
        self.thread = threading.Thread(target=lambda: results.append(fingerprint(call())), daemon=True)
        self.thread.start()
        assert self.reached.wait(PATIENCE)
        return results


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_nothing_waits_for_a_slow_call(execution, tmp_path):
    case = threads.make_case("bert", work_dir=tmp_path)
    model, gate = case.model, Gate()
    model.get_base_model().bert.encoder.layer[1].register_forward_hook(gate)
    model.execution = execution
    model.expert_cache.clear()
    calls = {name: call for name, call in case.calls.items() if name not in case.expected_errors}
    expected = {name: fingerprint(call(model)) for name, call in calls.items()}
    results = gate.slow(lambda: case.calls["routed"](model))

    def others() -> None:
        for name, call in calls.items():
            assert fingerprint(call(model)) == expected[name], name
        history = threads.History(case)
        model.set_adapter("red")
        model.set_adapter(None)
        history._add_task(EXTRA)
        model.fit_signatures(case.references(model.tasks, 0), progress=False)
        model.delete_task(EXTRA)
        case.calls["routed"](model)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(others).result(PATIENCE)
    assert not results  # it has been standing there all the time
    gate.open.set()
    gate.thread.join(PATIENCE)
    assert results == [expected["routed"]]


def test_a_slow_probe_holds_up_no_other_kind_of_call():
    model, gate = subjects.make_model("t5"), Gate()
    model.get_base_model().decoder.block[0].register_forward_hook(gate)
    model.execution = "mixed"
    model.expert_cache.clear()
    inputs = subjects.mixed_batch(subjects.make_tokenizer())
    rows = [*TASKS, *TASKS]
    results = gate.slow(lambda: model.generate(**inputs, task=rows, **threads.SAY))
    with ThreadPoolExecutor(1) as pool:
        forward = pool.submit(model, **inputs, decoder_input_ids=inputs["input_ids"], task=rows)
        assert forward.result(PATIENCE).logits.shape[0] == 6
    gate.open.set()
    gate.thread.join(PATIENCE)
    assert results == [fingerprint(model.generate(**inputs, task=rows, **threads.SAY))]


def test_a_stream_that_nobody_reads_holds_up_nobody():
    tokenizer, model = subjects.make_tokenizer(), subjects.make_model("t5")
    inputs = subjects.batch(tokenizer, subjects.texts("red", 1))
    expected = model.generate(**inputs, task="red", **threads.SAY)
    streamer = TextIteratorStreamer(tokenizer, timeout=PATIENCE)
    results: list[torch.Tensor] = []
    generating = threading.Thread(
        target=lambda: results.append(model.generate(**inputs, task="red", streamer=streamer, **threads.SAY))
    )
    generating.start()
    next(streamer)  # and nobody asks for more
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model.generate, **inputs, task="red", **threads.SAY).result(PATIENCE), expected)
    generating.join(PATIENCE)
    assert torch.equal(results[0], expected)


@torch.no_grad()
def test_a_probe_may_come_to_need_itself():
    """A hook that calls the model from within a probe of the same kind of call must not wait for itself."""
    model = subjects.make_model()
    model.execution = "mixed"
    inputs = subjects.mixed_batch(subjects.make_tokenizer())
    within: list[str] = []

    @torch.no_grad()
    def call() -> str:
        return fingerprint(model(**inputs, task=[*TASKS, *TASKS]))

    expected = call()

    def hook(*_: Any) -> None:
        if not within:
            within.append("begun")
            within[0] = call()

    model.get_base_model().bert.encoder.layer[0].register_forward_hook(hook)
    model.expert_cache.clear()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result(PATIENCE) == expected
    assert within == [expected]


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"signatures": "weights"}, {"shared_trunk": True}], ids=str)
@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_a_model_is_freed_when_nobody_uses_it(options, execution, tmp_path):
    """Without the garbage collector: nothing refers to itself, not even what a failed call leaves behind."""
    case = threads.make_case("bert", work_dir=tmp_path, options=options)
    model = case.model
    model.execution = execution
    gc.collect()
    gc.disable()
    try:
        for name in ("routed", "per row", "identify", "merged"):
            case.calls[name](model)
        for name in case.expected_errors:
            try:
                case.calls[name](model)
            except Exception:
                continue
            pytest.fail(f"{name!r} raised nothing")
        kept = [
            weakref.ref(model),
            *(weakref.ref(parameter) for parameter in model.get_base_model().parameters()),
            *(weakref.ref(item) for item, _ in model.expert_cache._items.values() if not isinstance(item, list)),
        ]
        assert len(kept) > 20
        del model, case
        sys.last_value = sys.last_traceback = None
        alive = [reference() for reference in kept if reference() is not None]
        assert not alive
    finally:
        gc.enable()


def test_many_calls_pile_up_nothing(tmp_path):
    case = threads.make_case("bert", work_dir=tmp_path)
    model = case.model
    names = ["routed", "per row", "one row", "identify", "no such task", "wrong values, per row"]

    def call(times: int) -> int:
        for _ in range(times):
            for name in names:
                try:
                    case.calls[name](model)
                except Exception:
                    assert name in case.expected_errors
        gc.collect()
        return len(gc.get_objects())

    call(3)
    before, after = call(3), call(20)
    assert after - before < 100
    assert len(model.expert_cache._items) < 10


def test_a_refusal_is_remembered_without_what_it_has_met(monkeypatch):
    from retex_hf.execution.mixed import MixedModel, MixedUnsupported
    from retex_hf.rows import Splitter

    class Large:
        pass

    met: list[weakref.ref] = []

    def refuse(*_: Any) -> None:
        large = Large()
        met.append(weakref.ref(large))
        raise MixedUnsupported("no")

    monkeypatch.setattr(MixedModel, "_probe", refuse)
    model = subjects.make_model()
    inputs = subjects.mixed_batch(subjects.make_tokenizer())
    model.execution = "auto"
    model.expert_cache.capacity = 0  # so that one pass is thought of
    depths = []
    for _ in range(5):
        model(**inputs, task=[*TASKS, *TASKS])
        with pytest.raises(MixedUnsupported) as refused:
            model.expert_cache.get("mixed", lambda: None).probe("forward", {}, [], Splitter(0, frozenset()))
        depths.append(len(refused.traceback))
    assert len(met) == 2  # one for each kind of call
    assert all(reference() is None for reference in met)
    assert len(set(depths[1:])) == 1


def test_two_models_at_once_and_copies_of_one():
    inputs = subjects.mixed_batch(subjects.make_tokenizer())
    first, second = subjects.make_model(), subjects.make_model(tasks=TASKS[:2])
    models = [first, second, threads.copy.deepcopy(first), threads.copy.deepcopy(second)]
    expected = [fingerprint(model(**inputs)) for model in models]
    assert expected[:2] == expected[2:] and expected[0] != expected[1]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda number: fingerprint(models[number % 4](**inputs)), range(24))
        assert list(found) == expected * 6
    models[2].set_adapter("red")
    assert first.active_adapter is None
    assert fingerprint(first(**inputs)) == expected[0]
