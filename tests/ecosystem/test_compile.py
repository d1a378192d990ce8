"""`torch.compile`: a recovered expert compiles; a `RetexModel` runs as it is, and says so."""

from __future__ import annotations

import logging
import pickle
from copy import deepcopy

import pytest
import torch
from families import FAMILIES, ROWS, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts

from retex_hf import TaskError
from retex_hf.model import introspection

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    introspection._warn_once.cache_clear()


@torch.no_grad()
@pytest.mark.parametrize(("name", "backend"), [("bert", "aot_eager"), ("llama-tied", "eager")])
def test_a_recovered_expert(name, backend):
    model, experts = build_retex(name)
    inputs = FAMILIES[name].inputs(ROWS)
    graphs = []

    def counting(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    expert = model.merge_and_unload("green")
    compiled = torch.compile(expert, backend=counting)
    assert_same(compiled(**inputs)[0], experts["green"](**inputs)[0], **CLOSE)
    assert graphs


@torch.no_grad()
@pytest.mark.parametrize("task", [MIXED, "red", None], ids=["mixed", "one", "identified"])
def test_a_compiled_model_runs_uncompiled_and_says_so_once(task, caplog):
    model, _ = build_retex("bert")
    model.fit_signatures({name: [tokens(8)] for name in TASKS}, progress=False)
    inputs = tokens(ROWS)
    expected = model(**inputs, task=task)
    compiled = torch.compile(model, backend="eager")
    with caplog.at_level(logging.WARNING, "retex_hf"):
        for _ in range(2):
            output = compiled(**inputs, task=task)
            assert_same(output, expected, **CLOSE)
            assert output.routing.tasks == expected.routing.tasks
    assert [record.getMessage() for record in caplog.records] == [introspection.NOT_COMPILED]


@torch.no_grad()
def test_one_graph_is_refused_with_the_reason():
    model, _ = build_retex("bert")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile one expert, torch\.compile"):
        torch.compile(model, backend="eager", fullgraph=True)(**tokens(ROWS), task=MIXED)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_refused_with_the_reason(strict):
    model, experts = build_retex("bert")
    inputs = tokens(ROWS)
    model.set_adapter("red")
    with pytest.raises(Exception, match=r"export one expert, torch\.export"):
        torch.export.export(model, (), inputs, strict=strict)
    exported = torch.export.export(model.merge_and_unload("red"), (), inputs).module()
    assert_same(exported(**inputs)[0], experts["red"](**inputs)[0], **CLOSE)


def test_generation_and_compiling_in_place():
    model, _ = build_retex("t5")
    inputs = tokens(ROWS)
    options = {"max_new_tokens": 4, "do_sample": False, "task": MIXED}
    expected = model.generate(**inputs, **options)
    assert torch.equal(torch.compile(model, backend="eager").generate(**inputs, **options), expected)
    model.get_base_model().compile(backend="eager")  # experts are copies, which torch makes without it
    model.expert_cache.clear()
    assert torch.equal(model.generate(**inputs, **options), expected)


@torch.no_grad()
def test_experts_given_as_compiled_models():
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    compiled = {task: torch.compile(expert, backend="eager") for task, expert in experts.items()}
    model, _ = build_from(torch.compile(base, backend="eager"), compiled)
    assert type(model.get_base_model()) is type(base)
    inputs = tokens(ROWS)
    assert_same(model(**inputs, task="blue"), experts["blue"](**inputs), **CLOSE)


@torch.no_grad()
def test_copies_of_a_model_that_was_compiled_in_place_are_their_own():
    model, experts = build_retex("bert")
    inputs = tokens(ROWS)
    model.compile(backend="eager")
    copied, pickled = deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert_same(other(**inputs, task="green"), experts["green"](**inputs), **CLOSE)
        other.delete_task("green")
        with pytest.raises(TaskError, match="green"):
            other(**inputs, task="green")
    assert copied.half()(**inputs, task="red")[0].dtype == torch.float16
    assert_same(model(**inputs, task="green"), experts["green"](**inputs), **CLOSE)
