"""The second device that other tests rely on: it computes what the CPU computes, and mixes with it as a GPU does."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from second_device import DEVICE, SecondTensor, in_use, rule, to_second
from torch import nn

MIXED_DEVICES = "Expected all tensors to be on the same device"
MATRIX, VECTOR = torch.randn(3, 3), torch.randn(3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b.unsqueeze(0)]).T.softmax(-1),
        lambda a, b: a.double().mul(2).float() - b,
        lambda a, b: torch.linalg.eigh(a @ a.T).eigenvalues,
        lambda a, b: torch.where(a > 0, a, torch.tensor(0.5)),
        lambda a, b: a.clone().index_put_((torch.tensor([0]),), b),
        lambda a, b: torch.arange(3, device=a.device) + torch.tensor([1, 2, 3], device=b.device),
        lambda a, b: nn.functional.scaled_dot_product_attention(a[None], a[None], a[None]),
        lambda a, b: torch.addmm(b, a, a, out=torch.empty(0, device=a.device)),
    ],
)
def test_values_are_those_of_the_cpu(compute):
    found = compute(MATRIX.to(DEVICE), VECTOR.to(DEVICE))
    assert isinstance(found, SecondTensor) and found.device == DEVICE
    torch.testing.assert_close(found.cpu(), compute(MATRIX, VECTOR))


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: here + there,
        lambda there, here: torch.stack([there, here]),
        lambda there, here: there @ here,
        lambda there, here: torch.where(here > 0, there, there),
        lambda there, here: here.add_(there),
        lambda there, here: torch.mul(there, there, out=here),
        lambda there, here: there.index_select(0, torch.tensor([0])),
        lambda there, here: there.gather(0, torch.tensor([0])),
        lambda there, here: nn.functional.linear(there, torch.eye(3)),
        lambda there, here: there.index_put((torch.tensor([0, 1, 2]),), here),
    ],
)
def test_both_devices_in_one_operation_are_refused(mix):
    with pytest.raises(RuntimeError, match=MIXED_DEVICES):
        mix(VECTOR.to(DEVICE), VECTOR.clone())


def test_what_may_lie_on_the_cpu():
    there = VECTOR.to(DEVICE)
    assert torch.equal((there * torch.tensor(2.0)).cpu(), VECTOR * 2)
    assert torch.equal(there[torch.tensor([2, 0])].cpu(), VECTOR[[2, 0]])
    assert torch.equal(there[torch.tensor([True, False, True])].cpu(), VECTOR[[0, 2]])
    here = torch.empty(3)
    here.copy_(there)
    assert torch.equal(here, VECTOR) and here.device.type == "cpu"
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        VECTOR[torch.tensor([0]).to(DEVICE)]
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()


def test_rules():
    with rule(float64=False), pytest.raises(TypeError, match="float64"):
        MATRIX.to(DEVICE).double()
    with rule(largest=20), pytest.raises(torch.OutOfMemoryError):
        MATRIX.to(DEVICE)
    assert MATRIX.to(DEVICE).double().dtype == torch.float64


@torch.no_grad()
def test_modules_move_as_to_a_gpu():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    expected = model(MATRIX)
    with in_use():
        model.to(DEVICE)
    assert model[1].weight is model[0].weight and isinstance(model[0].weight, nn.Parameter)
    for moved in (model, deepcopy(model)):
        assert moved[1].weight is moved[0].weight
        torch.testing.assert_close(moved(to_second(MATRIX)).cpu(), expected)
    assert model.half()[0].weight.raw.dtype == torch.float16


def test_it_is_not_the_accelerator():
    assert torch.accelerator.current_accelerator(check_available=True) != DEVICE.type
    assert torch.empty(1).device.type == "cpu"
