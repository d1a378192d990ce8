"""Synthetic checkpoints: a base and experts with the shapes of CLIP ViT-B/32's vision tower.

The values are random, but the differences between experts and base resemble those of fine-tuning: directions of
decaying weight, partly common to all tasks, over a noise floor. Tensors are made and written one at a time, so that the
process stays small.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

# Scale of the weights and of the differences by fine-tuning, about as in the published CLIP experts.
BASE_STD, DIFFERENCE_STD = 0.02, 0.001
DECAY = 0.5  # the i-th direction of a difference weighs i ** -DECAY
COMMON = 0.5  # share of a direction's energy that all tasks have in common
NOISE = 0.2  # share of a difference's energy that is noise


def clip_shapes() -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters of a default `CLIPVisionModel`, which is ViT-B/32."""
    with torch.device("meta"):
        model = CLIPVisionModel(CLIPVisionConfig())
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def write_clip_experts(folder: str | Path, tasks: Sequence[str], seed: int = 0) -> tuple[Path, dict[str, Path]]:
    """Write a base and one expert per task below `folder`; return the base's folder and each task's."""
    base_folder = Path(folder) / "base"
    expert_folders = {task: Path(folder) / "experts" / task for task in tasks}
    config = CLIPVisionConfig(architectures=["CLIPVisionModel"], dtype="float32")
    shapes = clip_shapes()
    files = []
    try:
        for target in (base_folder, *expert_folders.values()):
            target.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(target)
            files.append((target / "model.safetensors").open("wb"))
            _write_header(files[-1], shapes)
        for index, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(seed * 100_003 + index)
            base = make_base(name, shape, generator)
            files[0].write(base.numpy().tobytes())
            for file, difference in zip(files[1:], make_differences(shape, len(tasks), generator), strict=True):
                file.write((base + difference).numpy().tobytes())
    finally:
        for file in files:
            file.close()
    return base_folder, expert_folders


class Experts:
    """Reads the tensors of a base and its experts one at a time from memory-mapped files."""

    def __init__(self, base_folder: Path, expert_folders: Mapping[str, Path]) -> None:
        self._base = safe_open(base_folder / "model.safetensors", framework="pt")
        self._experts = {t: safe_open(f / "model.safetensors", framework="pt") for t, f in expert_folders.items()}
        self.tasks = list(expert_folders)
        self.names = list(self._base.keys())

    def read_base(self, name: str) -> Tensor:
        return self._base.get_tensor(name)

    def read_expert(self, task: str, name: str) -> Tensor:
        return self._experts[task].get_tensor(name)


def make_base(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a pre-trained tensor: normal, around one for the weights of layer norms."""
    centre = 1.0 if "norm" in name and name.endswith(".weight") else 0.0
    return centre + BASE_STD * torch.randn(shape, generator=generator)


def make_differences(shape: tuple[int, ...], num_tasks: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield each task's difference of a tensor; the patch convolution has a row per output channel."""
    if len(shape) < 2:
        for _ in range(num_tasks):
            yield DIFFERENCE_STD * torch.randn(shape, generator=generator)
        return
    rows, columns = shape[0], prod(shape[1:])
    rank = max(1, min(rows, columns) // 3)
    weights = torch.arange(1, rank + 1, dtype=torch.float32) ** -DECAY
    weights *= ((1 - NOISE) / weights.square().sum()).sqrt()
    common = torch.randn(rank, columns, generator=generator) * COMMON**0.5
    for _ in range(num_tasks):
        own = torch.randn(rank, columns, generator=generator) * (1 - COMMON) ** 0.5
        left = torch.randn(rows, rank, generator=generator) * weights
        difference = NOISE**0.5 * torch.randn(rows, columns, generator=generator)
        difference.addmm_(left, own.add_(common))
        yield difference.mul_(DIFFERENCE_STD).view(shape)


def _write_header(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the header of a float32 safetensors file, after which the tensors' bytes follow in the same order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    file.write(struct.pack("<Q", len(head)) + head)
