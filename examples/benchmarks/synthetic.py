"""Models of real shapes with random weights, to measure time and memory, which do not depend on the weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import open_clip
import torch
import transformers
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.artifact.state import RetexParts
from retex_hf.backends import openclip
from retex_hf.checkpoints import take_inventory
from retex_hf.recovery import OffsetGenerator, RecoveryModule, plan_layout
from retex_hf.utils.tensor_bank import TensorBank


def timing_arguments(description: str, repeats: int = 5) -> argparse.Namespace:
    """Parse the command line of a benchmark that measures time; set the number of threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def task_names(number: int) -> list[str]:
    return [f"task {index}" for index in range(number)]


def clip_model(architecture: str = "ViT-B-32") -> nn.Module:
    """Make an OpenCLIP model with random weights."""
    torch.manual_seed(0)
    model = open_clip.create_model(architecture, pretrained=None).eval().requires_grad_(False)
    openclip.describe(model, architecture, None, None)
    return model


def t5_model() -> transformers.T5ForConditionalGeneration:
    """Make a T5-small with random weights."""
    torch.manual_seed(0)
    config = transformers.T5Config(decoder_start_token_id=0)  # the defaults are those of T5-small
    return transformers.T5ForConditionalGeneration(config).eval().requires_grad_(False)


def retex_model(
    model: nn.Module, tasks: list[str], rank: int, *, recovered: Callable[[str], bool] = bool, **options: object
) -> RetexModel:
    """Make a `RetexModel` around a model, with random factors for the tensors that `recovered` names.

    The other arguments are those of `RetexConfig`.
    """
    generator = torch.Generator().manual_seed(0)
    inventory = take_inventory(model)
    generators = {}
    for name, shape in inventory.shapes.items():
        if not recovered(name):
            continue
        layout = plan_layout(shape, rank, len(tasks), convolution=name in inventory.convolutions)
        numbers = torch.Size(layout.generated_shape).numel()
        weight = torch.empty(len(tasks), numbers).normal_(std=1e-3, generator=generator)
        shared = None
        if layout.shared_shape is not None:
            shared = torch.empty(layout.shared_shape).normal_(std=0.03, generator=generator)
        generators[name] = OffsetGenerator(layout, weight, None, shared)
    recovery = RecoveryModule(torch.eye(len(tasks)), generators).requires_grad_(False)
    config = RetexConfig(rank=rank, tasks=tasks, **options)
    return RetexModel(RetexParts(config, model, recovery, TensorBank({task: {} for task in tasks}), {}))


def images(task: int, rows: int, size: int = 224) -> Tensor:
    """Draw random images; those of each task have a colour and a coarse pattern of their own, for identification."""
    pattern = torch.randn(1, 3, 7, 7, generator=torch.Generator().manual_seed(task))
    return torch.randn(rows, 3, size, size) + torch.nn.functional.interpolate(pattern, size=(size, size))


def sentences(task: int, rows: int, length: int, vocabulary: int = 32_000) -> Tensor:
    """Draw random token ids; each task has a vocabulary of its own."""
    words = torch.randint(3, vocabulary, (256,), generator=torch.Generator().manual_seed(task))
    return words[torch.randint(256, (rows, length))]


def seconds(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the best time of each call. Calls alternate, so that other load on the machine affects all of them."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
