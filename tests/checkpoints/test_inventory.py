"""What counts as a tensor of the model."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from helpers import make_experts
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import take_inventory


class Everything(nn.Module):
    """One of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.linear.weight
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3)
        self.normed = weight_norm(nn.Conv1d(2, 4, 3))
        self.stacked = nn.Parameter(torch.randn(3, 4, 5))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("computed", torch.zeros(2), persistent=False)


def test_every_kind_of_tensor():
    inventory = take_inventory(Everything())
    assert inventory.shapes == {
        "stacked": (3, 4, 5),
        "scalar": (),
        "mean": (2,),
        "linear.weight": (2, 3),
        "linear.bias": (2,),
        "conv1.weight": (2, 2, 3),
        "conv1.bias": (2,),
        "conv2.weight": (2, 2, 3, 3),
        "conv2.bias": (2,),
        "conv3.weight": (2, 2, 3, 3, 3),
        "conv3.bias": (2,),
        "normed.bias": (4,),
        "normed.parametrizations.weight.original0": (4, 1, 1),
        "normed.parametrizations.weight.original1": (4, 2, 3),
    }
    assert inventory.aliases["linear.weight"] == ("linear.weight", "tied.weight")
    assert set(inventory.integers) == {"ids", "mask"}
    weights = {"conv1.weight", "conv2.weight", "conv3.weight"}
    normed = {f"normed.parametrizations.weight.original{index}" for index in (0, 1)}
    assert inventory.convolutions == weights | normed


@pytest.mark.parametrize("family", ["resnet", "open_clip-resnet"])
def test_running_statistics_are_merged_and_counters_are_not(family):
    model = FAMILIES[family].make()
    inventory = take_inventory(model)
    statistics = {name for name in inventory.shapes if name.endswith(("running_mean", "running_var"))}
    assert statistics
    assert statistics == set(inventory.shapes) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert inventory.integers
    assert all(name.endswith("num_batches_tracked") for name in inventory.integers)


def test_counters_come_from_the_base():
    base = FAMILIES["resnet"].make().eval()
    experts = make_experts(base)
    for count, model in enumerate((base, *experts.values()), start=7):
        for name, tensor in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                tensor.fill_(count)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    for name in take_inventory(base).integers:
        assert model.get_base_model().state_dict()[name] == 7


def test_conv1d_weights_of_mamba_are_convolutions():
    inventory = take_inventory(FAMILIES["mamba"].make())
    assert inventory.convolutions == {f"backbone.layers.{index}.mixer.conv1d.weight" for index in range(2)}
    # GPT-2's Conv1D is a linear layer.
    assert take_inventory(FAMILIES["gpt2"].make()).convolutions == frozenset()
