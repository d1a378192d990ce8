"""Processes that share a model: forked, spawned, and the workers of a DataLoader."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
import second_device
import torch
from torch.utils.data import DataLoader
from trust import subjects
from trust.subjects import TASKS
from trust.threads import fingerprint

from retex_hf import RetexConfig, RetexModel

PATIENCE = 120
needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork processes"
)
ROWS = [*TASKS, *TASKS]


def inputs() -> dict[str, torch.Tensor]:
    return subjects.mixed_batch(subjects.make_tokenizer())


def answers(model: RetexModel) -> list[str]:
    """What is asked of a model in another process."""
    torch.set_num_threads(1)
    batch, found = inputs(), []
    with torch.no_grad():
        for execution in ("grouped", "mixed"):
            model.execution = execution
            found += [fingerprint(model(**batch)), fingerprint(model(**batch, task=ROWS))]
        model.set_adapter("green")
        found.append(fingerprint(model(**batch)))
        model.set_adapter(None)
        model.delete_task("blue")
        found.append(fingerprint(model(**batch, task="red")))
    return found


def answers_of_folder(folder: str) -> list[str]:
    return answers(RetexModel.from_pretrained(folder))


def in_fork(function) -> object:
    """The result of a function in a forked child, which must not hang."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send(function()))
    child.start()
    try:
        assert receiving.poll(PATIENCE), "the child hangs"
        return receiving.recv()
    finally:
        child.kill()
        child.join()


@needs_fork
def test_a_fork_while_other_threads_hold_every_lock():
    """The worst moment: a change is being made, the cache is written to, an expert is made, a probe is under way."""
    model = subjects.make_model()
    expected = answers(subjects.make_model())
    model.execution = "mixed"
    model(**inputs(), task=ROWS)
    probes = model.expert_cache.get("mixed", lambda: None)._probed
    held, go_on = threading.Barrier(4), threading.Event()

    def hold_locks() -> None:
        with model._change.lock, model.expert_cache._lock, probes._lock:
            held.wait(PATIENCE)
            go_on.wait(PATIENCE)

    def make() -> None:
        held.wait(PATIENCE)
        go_on.wait(PATIENCE)

    key = (0, True, False)
    holding = [
        threading.Thread(target=model.expert_cache.get, args=(key, make)),
        threading.Thread(target=probes.get, args=("kind", make)),
        threading.Thread(target=hold_locks),
    ]
    assert key not in model.expert_cache
    for thread in holding[:2]:
        thread.start()
    while not (model.expert_cache._making.get(key) and probes._making.get("kind")):
        pass
    holding[2].start()
    held.wait(PATIENCE)
    try:
        assert in_fork(lambda: answers(model)) == expected
    finally:
        go_on.set()
        for thread in holding:
            thread.join(PATIENCE)


@needs_fork
def test_forks_while_other_threads_call():
    model = subjects.make_model()
    expected = answers(subjects.make_model())
    stop, batch = threading.Event(), inputs()

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(**batch, task=ROWS)
                model.set_adapter("red")
                model.set_adapter(None)
                model.expert_cache.clear()

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert in_fork(lambda: answers(model)) == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)


@needs_fork
def test_a_fork_after_torch_has_shared_its_work_among_threads():
    """The child has none of them, and must not wait for them."""
    model, batch = subjects.make_model(), inputs()
    large, before = torch.ones(1000, 1000), torch.get_num_threads()

    def alone() -> tuple[list[str], float, int]:
        with torch.no_grad():
            found = [fingerprint(model(**batch)), fingerprint(model(**batch, task=ROWS))]
            return found, torch.softmax(large, 1).sum().item(), torch.get_num_threads()

    torch.set_num_threads(1)
    try:
        expected = alone()
        torch.set_num_threads(2)
        torch.softmax(large, 1)
        assert in_fork(alone) == expected
        assert torch.get_num_threads() == 2  # the child's one thread is the child's
    finally:
        torch.set_num_threads(before)


def signed_in_a_fork(shared_trunk: bool) -> tuple[str, object]:
    """Residuals of a model that is signed here, and in a fork: both after a backward pass that knows of an accelerator.

    On such machines torch runs no backward pass in a fork, so the proofs about layers must not need one.
    """
    base, experts = subjects.bert(subjects.make_tokenizer())
    config = RetexConfig(rank="full", feature_layer=0, shared_trunk=shared_trunk)
    model = RetexModel.from_experts(base, experts, config, progress=False)
    width = base.config.hidden_size
    tokens = torch.arange(width * width).view(width, width) % base.config.vocab_size  # as long as the layers are wide
    references = {task: [{"input_ids": tokens.roll(row, 1)}] for row, task in enumerate(TASKS)}

    def signed() -> str:
        model.fit_signatures(references, progress=False)
        return fingerprint(model.identify(input_ids=tokens).residuals)

    def differentiated() -> str:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    with second_device.in_use():
        differentiated()
        assert "fork" in in_fork(differentiated)
        forked = in_fork(signed)  # first: what is found out once is kept
        return signed(), forked


@needs_fork
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_a_fork_after_autograd_has_run_fits_signatures(shared_trunk):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        here, forked = pool.submit(signed_in_a_fork, shared_trunk).result(PATIENCE)
    assert forked == here


@needs_fork
def test_workers_of_a_data_loader_identify_rows():
    model, batch = subjects.make_model(), inputs()
    expected = [model.identify(**{name: value[[row]] for name, value in batch.items()}).tasks[0] for row in range(6)]
    assert set(expected) == set(TASKS)

    def collate(rows: list[int]) -> list[str]:
        return model.identify(**{name: value[rows] for name, value in batch.items()}).tasks

    loader = DataLoader(range(6), batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    assert [task for tasks in loader for task in tasks] == expected


def test_a_spawned_process_gets_the_model_or_loads_it(tmp_path):
    expected = answers(subjects.make_model())
    model = subjects.make_model()
    model.save_pretrained(tmp_path / "saved")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        given = pool.submit(answers, model)
        loaded = pool.submit(answers_of_folder, str(tmp_path / "saved"))
        assert given.result(PATIENCE) == expected
        assert loaded.result(PATIENCE) == expected
    assert model.tasks == list(TASKS)  # what the child does to its copy stays there
