"""MoW-Merging: which blocks are mixed, with what, and what the rest is."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import numpy as np
import pytest
import torch
from explicit import assert_all_modes, body_tensors, logits_of, raw, rows
from helpers import TASKS
from materials import make_material, mixed_batch

from retex_hf.baselines.mow import MoW, similarity
from retex_hf.baselines.weights import expert_weights
from retex_hf.errors import ConfigError

QUICK = {"epochs": 2, "static_steps": 2, "static_rows_per_task": 4, "progress": False}


def mean_cosine(vectors: list[np.ndarray]) -> float:
    pairs = list(combinations(vectors, 2))
    return sum(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs) / len(pairs)


def test_similarity_is_the_mean_cosine_over_pairs_of_tasks():
    weights = expert_weights(make_material("bert"))
    names = [name for name in weights.base if "layer.0.attention" in name]
    flat = [np.concatenate([weights.vectors[name][task].flatten().numpy() for name in names]) for task in range(3)]
    assert similarity(weights, names) == pytest.approx(mean_cosine(flat), abs=1e-5)


def test_the_blocks_that_agree_least_are_mixed():
    material = make_material("bert")
    weights = expert_weights(material)
    # All experts move the first layer's attention and the second layer's MLP alike.
    for name, vectors in weights.vectors.items():
        if "layer.0.attention" in name or "layer.1.intermediate" in name or "layer.1.output" in name:
            vectors[:] = vectors[:1].clone()
    method = MoW(blocks=1, static=weights.base, **QUICK)
    method.fit(material)
    prefix = "bert.encoder.layer"
    assert method.mixed_blocks == [
        (f"{prefix}.1.attention",),
        (f"{prefix}.0.intermediate.dense", f"{prefix}.0.output.dense"),
    ]
    for name in weights.base:
        own = name.startswith((f"{prefix}.1.attention", f"{prefix}.0.intermediate", f"{prefix}.0.output"))
        assert (name in method.dynamic) == (own or "LayerNorm" in name or "_embeddings" in name), name


def test_bodies_are_those_of_the_equation():
    material = raw(make_material("bert"))
    weights = expert_weights(material)
    static = {name: tensor + torch.randn_like(tensor) / 10 for name, tensor in weights.base.items()}
    method = MoW(blocks=1, static=static, **QUICK)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    shares = method.route(inputs).double().numpy()
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    _, experts = body_tensors(material)

    def by_hand(row, coefficients, head):
        body = {name: tensor.double().numpy() for name, tensor in static.items()}
        for name in method.dynamic:
            body[name] = sum(c * e for c, e in zip(coefficients, experts[name], strict=True))
        return logits_of(material, head, body, row)

    heads = [TASKS[index] for index in shares.argmax(1)]
    assert_all_modes(method, inputs, tasks, shares, heads, by_hand)
    middle = method.gate.extractor.model.state_dict()
    name = method.dynamic[-1]
    np.testing.assert_allclose(middle[name], sum(experts[name]) / 3, atol=1e-5)


def test_the_rest_is_adamerging_of_trimmed_task_vectors():
    material = make_material("bert")
    method = MoW(blocks=1, density=0.3, **{**QUICK, "static_steps": 0})
    method.fit(material)
    base, experts = body_tensors(material)
    names = list(method.weights.base)
    flats = [np.concatenate([(experts[name][task] - base[name]).ravel() for name in names]) for task in range(3)]
    limits = [np.sort(np.abs(flat))[-round(0.3 * len(flat))] for flat in flats]
    model = method.mixtures.modules["red"].state_dict()
    static = [name for name in names if name not in method.dynamic]
    assert static
    for name in static:
        # No step was taken, so all coefficients are where they start.
        vectors = [experts[name][task] - base[name] for task in range(3)]
        kept = [np.where(np.abs(v) >= limit * (1 - 1e-5), v, 0) for v, limit in zip(vectors, limits, strict=True)]
        np.testing.assert_allclose(model[name], base[name] + 0.3 * sum(kept), atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "clip", "t5", "gpt2"])
def test_other_readouts(kind):
    material = make_material(kind)
    method = MoW(train_share=0.5, **QUICK)
    method.fit(material)
    inputs, tasks = mixed_batch(material)
    together = method.predict(inputs, tasks)
    alone = [method.predict(row, [task]) for row, task in zip(rows(inputs), tasks, strict=True)]
    assert together.answers == [prediction.answers[0] for prediction in alone]
    assert set(method.predict(inputs).tasks) <= set(TASKS)


def test_the_gate_sees_a_share_of_the_inputs_and_no_labels():
    material = make_material("bert")
    unlabelled = {
        part: {
            task: dataclasses.replace(data, answers=[None] * len(data))
            for task, data in getattr(material, part).items()
        }
        for part in ("train", "validation")
    }
    method = MoW(train_share=0.1, **QUICK)
    collated = []
    spy = dataclasses.replace(
        material, **unlabelled, collate=lambda rows: collated.append(len(rows)) or material.collate(rows)
    )
    method.static = expert_weights(spy).base
    method.fit(spy)
    assert collated == [3, 3, 3, 24, 24, 24]  # a tenth of 24 training inputs, then validation


def test_storage_is_static_tensors_mixed_ones_of_every_expert_and_the_gate():
    material = make_material("bert")
    method = MoW(blocks=1, hidden=8, static=expert_weights(material).base, **QUICK)
    method.fit(material)
    numbers = sum(tensor.numel() * (3 if name in method.dynamic else 1) for name, tensor in method.weights.base.items())
    assert method.storage_bytes() == 4 * (numbers + 16 * 8 + 8 + 8 * 3 + 3)


def test_what_a_model_lacks_is_said():
    material = make_material("resnet")
    with pytest.raises(ConfigError, match="MoW-Merging mixes the MLPs of a model"):
        MoW(**QUICK).fit(material)
    material = make_material("bert")
    with pytest.raises(ConfigError, match=r"has none by the names \['\*.attn'\]"):
        MoW(attention=["*.attn"], **QUICK).fit(material)
    method = MoW(attention=[], static=expert_weights(material).base, **QUICK)
    method.fit(material)
    assert not any("attention" in module for block in method.mixed_blocks for module in block)
    with pytest.raises(ConfigError, match="train_share must be in"):
        MoW(train_share=0.0)
