"""timm's windowed attention keeps what it computes from its weights: recovered experts must not run on another's."""

from __future__ import annotations

from copy import deepcopy
from threading import Thread

import pytest
import torch
from helpers import TASKS, perturb
from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from retex_hf import RetexConfig, RetexModel
from retex_hf.execution import copy_with


@pytest.fixture(scope="module")
def base() -> TimmWrapperForImageClassification:
    torch.manual_seed(0)
    network = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
    config = TimmWrapperConfig(
        architecture="tiny_vit_5m_224", model_args={"window_sizes": [4, 4, 4, 2], **network}, num_labels=3
    )
    model = TimmWrapperForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * (2 if "attention_biases" in name else 0.3))
    return model


@pytest.fixture(scope="module")
def experts(base: nn.Module) -> dict[str, nn.Module]:
    return {task: perturb(base, seed) for seed, task in enumerate(TASKS, start=1)}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(6, 3, 64, 64)


@pytest.mark.parametrize("execution", ["grouped", "auto"])
def test_experts_have_their_own_biases(base, experts, images, execution) -> None:
    config = RetexConfig(rank="full", heads=["timm_model.head.fc"])
    model = RetexModel.from_experts(base, experts, config, execution=execution, progress=False)
    tasks = [TASKS[i] for i in (0, 1, 2, 2, 1, 0)]
    with torch.inference_mode():
        merged = model.model(images).logits  # fills the caches of the merged model
        expected = {task: deepcopy(expert)(images).logits for task, expert in experts.items()}
        for task in TASKS:
            assert (merged - expected[task]).abs().max() > 1e-2
            torch.testing.assert_close(model(images, task=task).logits, expected[task], atol=1e-4, rtol=1e-4)
        for order in (tasks, tasks[::-1], tasks[2:] + tasks[:2]):
            rows = torch.stack([expected[task][row] for row, task in enumerate(order)])
            torch.testing.assert_close(model(images, task=order).logits, rows, atol=1e-4, rtol=1e-4)


def test_only_the_biases(base, images) -> None:
    name = next(name for name in base.state_dict() if name.endswith("attention_biases"))
    other = {name: torch.randn(base.state_dict()[name].shape) * 3}
    expected = deepcopy(base)
    expected.load_state_dict(other, strict=False)
    model = deepcopy(base)
    with torch.inference_mode():
        before = model(images).logits
        after = copy_with(model, other)(images).logits
        assert (before - after).abs().max() > 1e-4
        torch.testing.assert_close(after, expected(images).logits, atol=1e-5, rtol=1e-5)


def test_gradients_after_inference(base, images) -> None:
    # What was cached in inference mode carries no gradients, and torch refuses to save it for a backward pass.
    scale = torch.ones((), requires_grad=True)
    biases = {name: tensor.detach() for name, tensor in base.named_parameters() if name.endswith("attention_biases")}
    copied = copy_with(base, {name: scale * tensor for name, tensor in biases.items()})
    with torch.inference_mode():
        copied(images)
    (gradient,) = torch.autograd.grad(copied(images).logits.square().sum(), scale)
    assert gradient.abs() > 0


def test_several_threads(base, images) -> None:
    copied, results = copy_with(base, {}), []
    expected = deepcopy(base)(images).logits.detach()

    def run() -> None:
        with torch.inference_mode():
            results.extend(copied(images).logits for _ in range(5))

    threads = [Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for result in results:
        torch.testing.assert_close(result, expected)
