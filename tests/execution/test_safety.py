"""Nothing a call does, or fails to do, reaches the merged model or another call."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import FAMILIES, VOCAB, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, rows_of, take

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ROWS = len(MIXED)


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.get_base_model().state_dict().items()}


class Inside(Exception):
    pass


def fail(*_):
    raise Inside


@torch.no_grad()
@pytest.mark.parametrize("where", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_an_exception_in_any_group_leaves_everything_as_it_was(where, group):
    model, experts = build_retex("bert")
    model.execution = "grouped"
    inputs = tokens(ROWS)
    expected, before = model(**inputs, task=MIXED), snapshot(model)
    expert = model._state.expert(TASKS[group])
    handle = getattr(expert.encoder.layer[1], where)(fail)
    with pytest.raises(Inside):
        model(**inputs, task=MIXED)
    handle.remove()
    assert_same(snapshot(model), before, exact=True)
    assert_same(model(**inputs, task=MIXED), expected, exact=True)
    for task in TASKS:
        assert_same(model(**inputs, task=task), experts[task](**inputs), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    "wrong",
    [{"input_ids": torch.rand(ROWS, 5)}, {"input_ids": torch.full((ROWS, 5), VOCAB)}],
    ids=["dtype", "vocabulary"],
)
def test_a_wrong_input_leaves_everything_as_it_was(wrong):
    model, _ = build_retex("gpt2")
    inputs = tokens(ROWS)
    expected, before = model(**inputs, task=MIXED).logits, snapshot(model)
    for call in (model, model.generate):
        with pytest.raises((RuntimeError, IndexError)):
            call(**wrong, task=MIXED)
    assert_same(snapshot(model), before, exact=True)
    assert torch.equal(model(**inputs, task=MIXED).logits, expected)


@torch.no_grad()
def test_identification_that_fails_leaves_the_next_one_right():
    model, _ = build_retex("bert")
    inputs = tokens(ROWS)
    model.fit_signatures({task: [take(inputs, rows_of(task))] for task in TASKS}, progress=False)
    expected = model.identify(**inputs).residuals
    with pytest.raises((RuntimeError, IndexError)):
        model.identify(input_ids=torch.full((2, 5), VOCAB))
    assert torch.equal(model.identify(**inputs).residuals, expected)


@pytest.mark.parametrize("cache", ["2GB", 0])
def test_threads_get_what_one_after_the_other_would_get(cache):
    model, _ = build_retex("gpt2", expert_cache=cache, signature_rank=1)
    inputs = tokens(ROWS)
    model.fit_signatures({task: [take(inputs, rows_of(task))] for task in TASKS}, progress=False)

    def merged():
        with model.disable_adapter():
            return model(**inputs).logits

    calls = [
        lambda: model(**inputs, task=MIXED).logits,
        lambda: model(**inputs, task="red", output_hidden_states=True).hidden_states,
        lambda: model(**inputs).logits,
        lambda: model.identify(**inputs).residuals,
        lambda: model.generate(**inputs, task=MIXED[::-1], max_new_tokens=3),
        lambda: model.generate(**inputs, num_beams=2, max_new_tokens=2),
        merged,
    ]
    with torch.no_grad():
        expected = [call() for call in calls]
    before = snapshot(model)
    model.expert_cache.clear()

    @torch.no_grad()
    def work(thread: int) -> list:
        order = [(thread + step) % len(calls) for step in range(20)]
        return [(index, calls[index]()) for index in order]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for index, result in (pair for thread in results for pair in thread):
        assert_same(result, expected[index], exact=True)
    assert_same(snapshot(model), before, exact=True)


@torch.no_grad()
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ["bert-classifier", "open_clip-vit"])
def test_a_copy_answers_alike_and_is_independent(name, clone):
    model, _ = build_retex(name)
    inputs = FAMILIES[name].inputs(ROWS)
    main = next(iter(inputs))
    model.fit_signatures({task: [inputs[main][rows_of(task)]] for task in TASKS}, progress=False)
    expected, routed = model(**inputs, task=MIXED), model(**inputs)
    twin = clone(model)
    assert_same(twin(**inputs, task=MIXED), expected, exact=True)
    assert_same(twin(**inputs), routed, exact=True)
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.zero_()
    twin.expert_cache.clear()
    assert_same(model(**inputs, task=MIXED), expected, exact=True)


def embeds_and_gradient(run) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    embeds = torch.randn(ROWS, 8, 16, requires_grad=True)
    loss = run(embeds)
    loss.backward()
    return loss.detach(), embeds.grad


@pytest.mark.parametrize("inference_first", [False, True], ids=["fresh", "after inference mode"])
def test_gradients_reach_the_inputs_through_each_rows_expert(inference_first):
    model, experts = build_retex("llama-untied")
    labels = torch.randint(3, VOCAB, (ROWS, 8))
    if inference_first:
        with torch.inference_mode():
            model(inputs_embeds=torch.randn(ROWS, 8, 16), task=MIXED)
    loss, gradient = embeds_and_gradient(lambda x: model(inputs_embeds=x, labels=labels, task=MIXED).loss)

    def separately(embeds):
        losses = [
            experts[task](inputs_embeds=embeds[rows_of(task)], labels=labels[rows_of(task)]).loss * MIXED.count(task)
            for task in TASKS
        ]
        return sum(losses) / ROWS

    expected_loss, expected = embeds_and_gradient(separately)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


@torch.no_grad()
def test_train_and_eval_are_those_of_the_model():
    model, experts = build_retex("bert")
    inputs = tokens(ROWS)
    evaluated = model(**inputs, task=MIXED)
    assert_same(evaluated, model(**inputs, task=MIXED), exact=True)
    model.train()
    first, second = (model(**inputs, task=MIXED).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)  # dropout
    torch.manual_seed(3)
    trained = model(**inputs, task="red").last_hidden_state
    torch.manual_seed(3)
    torch.testing.assert_close(trained, experts["red"].train()(**inputs).last_hidden_state, **CLOSE)
    model.eval()
    assert_same(model(**inputs, task=MIXED), evaluated, exact=True)


@torch.no_grad()
def test_training_moves_no_statistics_of_the_merged_model_or_the_experts():
    model, _ = build_retex("resnet")
    inputs = FAMILIES["resnet"].inputs(ROWS)
    evaluated, before = model(**inputs, task=MIXED), snapshot(model)
    model.train()
    model(**inputs, task=MIXED)
    model.eval()
    assert_same(snapshot(model), before, exact=True)
    assert_same(model(**inputs, task=MIXED), evaluated, exact=True)


@torch.no_grad()
def test_identification_ignores_training_mode_and_leaves_it():
    model, _ = build_retex("bert")
    inputs = tokens(ROWS)
    model.fit_signatures({task: [take(inputs, rows_of(task))] for task in TASKS}, progress=False)
    expected = model.identify(**inputs).residuals
    model.train()
    assert torch.equal(model.identify(**inputs).residuals, expected)
    assert all(module.training for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_half_precision_come_back_bit_by_bit(dtype):
    base = FAMILIES["gpt2"].make().eval().to(dtype)
    model, experts = build_from(base, make_experts(base, scale=1.0))
    model.to(dtype)
    inputs = tokens(ROWS)
    for task in TASKS:
        assert_same(model.recover(task), experts[task].state_dict(), exact=True)
        assert torch.equal(model(**inputs, task=task).logits, experts[task](**inputs).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_recovers_experts_to_the_precision_of_its_dtype(dtype):
    model, experts = build_retex("gpt2")
    model.to(dtype)
    epsilon = torch.finfo(dtype).eps
    merged = model.get_base_model().state_dict()
    for task in TASKS:
        for name, tensor in model.recover(task).items():
            expected = experts[task].state_dict()[name]
            assert tensor.dtype == dtype
            # Two roundings: the merged weight, then the sum.
            bound = epsilon / 2 * (merged[name].float().abs() + expected.abs()) * 1.01 + 1e-7
            assert ((tensor.float() - expected).abs() <= bound).all(), name
