"""Small suites of every kind of readout: random experts, and inputs that tell the tasks apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as tf
from families import FAMILIES, TEXT, VISION
from helpers import TASKS, perturb
from torch import Tensor, nn

from retex_hf.data.readout import Classifier, Generator, Readout, ZeroShot
from retex_hf.evaluation.method import Collate, Material, TaskData

CLASSES = {"red": 6, "green": 7, "blue": 9}
# Models of the usual initialisation give nearly the same features for everything.
LARGE = {"initializer_range": 0.3}
ROWS = 24
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}


class Spelling:
    """A tokenizer that spells out token ids."""

    def batch_decode(self, ids: Tensor, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(token) for token in row if token > 1) for row in ids.tolist()]


def pad(texts: Sequence[list[int]]) -> dict[str, Tensor]:
    longest = max(len(text) for text in texts)
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def stack(images: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"pixel_values": torch.stack(list(images))}


def texts(task: int, rows: int, generator: torch.Generator) -> list[list[int]]:
    """Rows of tokens of the task's own part of the vocabulary."""
    first = 3 + 12 * task
    lengths = torch.randint(4, 9, (rows,), generator=generator).tolist()
    return [torch.randint(first, first + 6, (length,), generator=generator).tolist() for length in lengths]


def pictures(task: int, rows: int, generator: torch.Generator) -> list[Tensor]:
    """Coarse noise around a pattern of the task's own."""
    pattern = 3 * torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(100 + task))
    noise = torch.randn(rows, 3, 4, 4, generator=generator)
    return list(nn.functional.interpolate(pattern + noise, scale_factor=8))


def classifiers(
    backbone: nn.Module, make: Callable[[int], nn.Module], prefix: str, scale: float
) -> dict[str, nn.Module]:
    """Experts of one backbone, with heads of different width."""
    experts = {}
    for seed, (task, classes) in enumerate(CLASSES.items(), start=1):
        expert = make(classes)
        setattr(expert, prefix, perturb(backbone, seed, scale=scale))
        # Small random features call for large heads, else all answers are the same.
        for parameter in expert.classifier.parameters():
            nn.init.normal_(parameter, std=1.0)
        experts[task] = expert.eval()
    return experts


@torch.no_grad()
def centre_head(expert: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Make all classes about equally likely."""
    linear = [module for module in expert.classifier.modules() if isinstance(module, nn.Linear)][-1]
    linear.bias -= expert(**inputs).logits.mean(0)


def bert() -> tuple[nn.Module, dict[str, nn.Module], Readout]:
    base = tf.BertModel(tf.BertConfig(**TEXT, **LARGE)).eval()
    make = lambda n: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, **LARGE, num_labels=n))  # noqa: E731
    return base, classifiers(base, make, "bert", 1.0), Classifier()


def vit() -> tuple[nn.Module, dict[str, nn.Module], Readout]:
    base = tf.ViTModel(tf.ViTConfig(**VISION, **LARGE), add_pooling_layer=False).eval()
    make = lambda n: tf.ViTForImageClassification(tf.ViTConfig(**VISION, **LARGE, num_labels=n))  # noqa: E731
    return base, classifiers(base, make, "vit", 1.0), Classifier()


def resnet() -> tuple[nn.Module, dict[str, nn.Module], Readout]:
    base = tf.ResNetModel(tf.ResNetConfig(**RESNET)).eval()
    make = lambda n: tf.ResNetForImageClassification(tf.ResNetConfig(**RESNET, num_labels=n))  # noqa: E731
    return base, classifiers(base, make, "resnet", 0.3), Classifier()


def clip_vision() -> tuple[nn.Module, dict[str, nn.Module], Readout]:
    config = tf.CLIPVisionConfig(**VISION, initializer_factor=8.0, projection_dim=12)
    base = tf.CLIPVisionModelWithProjection(config).eval()
    experts = {task: perturb(base, seed, scale=1.0) for seed, task in enumerate(TASKS, start=1)}
    return base, experts, ZeroShot({task: torch.randn(classes, 12) for task, classes in CLASSES.items()}, scale=5.0)


def t5() -> tuple[nn.Module, dict[str, nn.Module], Readout]:
    base = FAMILIES["t5"].make().eval()
    experts = {task: perturb(base, seed, scale=1.0) for seed, task in enumerate(TASKS, start=1)}
    return base, experts, Generator(Spelling(), max_new_tokens=4)


def gpt2() -> tuple[nn.Module, dict[str, nn.Module], Readout]:
    base = FAMILIES["gpt2"].make().eval()
    experts = {task: perturb(base, seed, scale=1.0) for seed, task in enumerate(TASKS, start=1)}
    return base, experts, Generator(Spelling(), max_new_tokens=4)


KINDS: dict[str, tuple[Callable[[], Any], Callable[..., list], Collate]] = {
    "bert": (bert, texts, pad),
    "vit": (vit, pictures, stack),
    "resnet": (resnet, pictures, stack),
    "clip": (clip_vision, pictures, stack),
    "t5": (t5, texts, pad),
    "gpt2": (gpt2, texts, lambda rows: {name: value.flip(1) for name, value in pad(rows).items()}),
}


def make_material(kind: str, rows: int = ROWS) -> Material:
    """Base, experts and data of one kind; the answers of the data are those of the experts."""
    make, draw, collate = KINDS[kind]
    base, experts, readout = make()
    if isinstance(readout, Classifier):
        for number, task in enumerate(TASKS):
            centre_head(experts[task], collate(draw(number, rows, torch.Generator().manual_seed(99))))
    data = {}
    for part in (0, 1):
        for number, task in enumerate(TASKS):
            inputs = draw(number, rows, torch.Generator().manual_seed(10 * part + number))
            with torch.no_grad():
                output = readout.call(experts[task], collate(inputs))
            data[part, task] = TaskData(task, inputs, readout.answers(output, [task] * rows))
    train, validation = ({task: data[part, task] for task in TASKS} for part in (0, 1))
    return Material(base, experts, train, validation, collate, readout)


def mixed_batch(material: Material) -> tuple[dict[str, Tensor], list[str]]:
    """Rows of all tasks, out of order, and their tasks."""
    tasks = [TASKS[(row * row) % 3 if row % 4 else 2] for row in range(9)]
    inputs = [material.validation[task].inputs[row] for row, task in enumerate(tasks)]
    return material.collate(inputs), tasks
