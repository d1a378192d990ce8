"""Making experts, comparing outputs, editing files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel

TASKS = ["red", "green", "blue"]


@torch.no_grad()
def perturb(model: nn.Module, seed: int, low_rank: bool = False, scale: float = 0.3) -> nn.Module:
    """A copy of a model with every floating-point tensor moved a little (and every tied tensor once).

    `low_rank` moves matrices within a few directions that all seeds share, so that the stacked differences have a small
    rank: at most 3, and at most half of the smaller side.
    """
    generator = torch.Generator().manual_seed(seed)
    expert = deepcopy(model)
    seen = set()
    for index, (name, tensor) in enumerate(expert.state_dict(keep_vars=True).items()):
        if not tensor.is_floating_point() or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        size = scale * (tensor.std().item() if tensor.numel() > 1 else 0.1) + 1e-2
        # A convolution is a matrix with one row per output channel; axes of size 1 do not count.
        seen_as = tensor.flatten(1) if tensor.ndim == 4 or ("conv" in name and tensor.ndim > 2) else tensor.squeeze()
        if low_rank and seen_as.squeeze().ndim > 1:
            *batch, rows, columns = seen_as.shape
            rank = min(3, rows // 2, columns // 2)
            shared = torch.randn(*batch, rank, columns, generator=torch.Generator().manual_seed(index))
            noise = (torch.randn(*batch, rows, rank, generator=generator) @ shared).view(tensor.shape)
        else:
            noise = torch.randn(tensor.shape, generator=generator)
        moved = tensor + size * noise
        # Variances of batch normalisation stay positive.
        tensor.copy_(moved.abs() if (tensor > 0).all() and tensor.ndim == 1 else moved)
    return expert.eval()


def make_experts(model: nn.Module, **kwargs: Any) -> dict[str, nn.Module]:
    return {task: perturb(model, seed, **kwargs) for seed, task in enumerate(TASKS, start=1)}


def leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """All tensors of an output, with names."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from leaves(value, f"{name}.{key}")
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from leaves(value, f"{name}[{index}]")


def assert_same(actual: Any, expected: Any, exact: bool = False, **tolerances: float) -> None:
    """Outputs agree tensor by tensor."""
    actual_leaves, expected_leaves = dict(leaves(actual)), dict(leaves(expected))
    assert actual_leaves.keys() == expected_leaves.keys()
    assert actual_leaves
    for name, tensor in actual_leaves.items():
        if exact:
            assert torch.equal(tensor, expected_leaves[name]), name
        else:
            torch.testing.assert_close(
                tensor, expected_leaves[name], msg=lambda text, n=name: f"{n}: {text}", **tolerances
            )


# One task per row of a mixed batch: groups of one, two and three rows, none of them contiguous.
MIXED = ["green", "red", "blue", "red", "red", "blue"]


def rows_of(task: str, tasks: list[str] = MIXED) -> list[int]:
    return [row for row, name in enumerate(tasks) if name == task]


def take(inputs: Mapping[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """The given rows of a batch."""
    return {name: value[rows] for name, value in inputs.items()}


def build_retex(name: str, scale: float = 1.0, **options: Any) -> tuple[RetexModel, dict[str, nn.Module]]:
    """A `RetexModel` of a family with exact recovery, and the experts it was made of."""
    family = FAMILIES[name]
    base = family.make().eval()
    return build_from(base, make_experts(base, scale=scale), family.model_config, **options)


def build_from(
    base: nn.Module, experts: dict[str, nn.Module], model_config: dict[str, Any] | None = None, **options: Any
) -> tuple[RetexModel, dict[str, nn.Module]]:
    cache = options.pop("expert_cache", "2GB")
    config = RetexConfig(**({} if "storage" in options else {"rank": "full"}) | options)
    model = RetexModel.from_experts(
        base, experts, config, model_config=model_config, expert_cache=cache, progress=False
    )
    return model, experts


def launcher(processes: int) -> list[str]:
    """`accelerate launch` with so many processes, as arguments of Python.

    With `--cpu` it starts one, whatever their number is to be. With `--multi_gpu` it starts them all, and an
    `Accelerator(cpu=True)` (or any, without GPUs) makes them processes of the CPU.
    """
    kind = "--multi_gpu" if processes > 1 else "--cpu"
    return ["-m", "accelerate.commands.launch", kind, f"--num_processes={processes}", "--main_process_port=0"]


def edit_json(path: Path, *place: str, **values: Any) -> None:
    """Change values of a JSON file, within nested objects."""
    content = json.loads(path.read_text(encoding="utf-8"))
    inner = content
    for key in place:
        inner[key] = inner.get(key) or {}
        inner = inner[key]
    inner |= values
    path.write_text(json.dumps(content), encoding="utf-8")
