"""A mirror of the Hub with small random models and data, laid out as the repositories that a recipe names."""

from __future__ import annotations

import re
import string
from pathlib import Path

import torch
import transformers as tf
from datasets import ClassLabel, Dataset, Features, Image, Value
from helpers import perturb
from PIL import Image as Pictures
from recipes import DataSource, Recipe
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

ROWS = 10
CLASSES = ["red fox", "green_tree", "blue sea"]
CHARACTERS = string.ascii_letters + string.digits + string.punctuation
# Any text is some characters, so that no two classes look alike.
VOCABULARY = ["<pad>", "</s>", "<unk>", *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
LENGTH = 128
TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def write_mirror(recipe: Recipe, folder: Path) -> None:
    """Everything that a recipe of Hub names needs, at a small fraction of its size."""
    torch.manual_seed(0)
    kind = recipe.readout["kind"]
    base = folder / recipe.base
    write_tokenizer(base)
    if kind == "zero_shot":
        write_clip(recipe, base, folder)
    else:
        write_text_models(recipe, base, folder)
    for seed, task in enumerate(recipe.experts):
        write_data(recipe.data[task], folder / "datasets", seed=seed, images=kind == "zero_shot")
    configurations(recipe, folder / "datasets")


def write_tokenizer(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


def write_clip(recipe: Recipe, base: Path, folder: Path) -> None:
    """A whole CLIP model, and image towers with the tensor names that earlier versions of transformers wrote."""
    text = {"vocab_size": len(VOCABULARY), "max_position_embeddings": LENGTH, "pad_token_id": 0, "eos_token_id": 1}
    vision = {"image_size": 16, "patch_size": 8}
    model = tf.CLIPModel(
        tf.CLIPConfig(text_config=TEXT | text | {"bos_token_id": 1}, vision_config=TEXT | vision, projection_dim=12)
    )
    model.save_pretrained(base)
    size = {"height": 16, "width": 16}
    tf.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size).save_pretrained(base)
    tower = tf.CLIPVisionModel.from_pretrained(base)
    for seed, name in enumerate(recipe.experts.values(), start=1):
        perturb(tower, seed).save_pretrained(folder / name)
        file = folder / name / "model.safetensors"
        tensors = {f"vision_model.{key.removeprefix('vision_model.')}": value for key, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def write_text_models(recipe: Recipe, base: Path, folder: Path) -> None:
    if recipe.readout["kind"] == "generate":
        config = tf.T5Config(
            vocab_size=len(VOCABULARY), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
            decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        model = tf.T5ForConditionalGeneration(config)
        model.save_pretrained(base)
        for seed, name in enumerate(recipe.experts.values(), start=1):
            perturb(model, seed, scale=1.0).save_pretrained(folder / name)
        return
    config = {"vocab_size": len(VOCABULARY), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    tf.GPT2LMHeadModel(tf.GPT2Config(**config, **special)).save_pretrained(base)
    for seed, (task, name) in enumerate(recipe.experts.items(), start=1):
        labels = len(recipe.data[task].classes or CLASSES)
        model = tf.GPT2ForSequenceClassification.from_pretrained(base, num_labels=labels)
        perturb(model, seed, scale=1.0).save_pretrained(folder / name)


def write_data(source: DataSource, folder: Path, *, seed: int, images: bool) -> None:
    """Train and test parts as Parquet, with the columns that the recipe reads."""
    generator = torch.Generator().manual_seed(seed)
    classes = source.classes or CLASSES
    labels = torch.randint(len(classes), (2 * ROWS,), generator=generator).tolist()
    features = {source.label: ClassLabel(names=[f"{i}" for i in range(len(classes))] if source.classes else CLASSES)}
    columns: dict[str, list] = {source.label: labels}
    for column in columns_of(source) or ["image"]:
        if images:
            pixels = torch.randint(256, (2 * ROWS, 16, 16, 3), generator=generator, dtype=torch.uint8)
            columns[column] = [Pictures.fromarray(picture.numpy()) for picture in pixels]
        else:
            chosen = torch.randint(len(CHARACTERS), (2 * ROWS, 5), generator=generator).tolist()
            columns[column] = [" ".join(CHARACTERS[character] for character in row) for row in chosen]
        features[column] = Image() if images else Value("string")
    data = Dataset.from_dict(columns, features=Features(features))
    target = folder / source.path / (source.name or "data")
    target.mkdir(parents=True)
    for start, split in ((0, source.train), (ROWS, source.test)):
        data.select(range(start, start + ROWS)).to_parquet(target / f"{split}-00000-of-00001.parquet")


def columns_of(source: DataSource) -> list[str]:
    if isinstance(source.input, str):
        return re.findall(r"\{(\w+)\}", source.input) or [source.input]
    return source.input or []


def configurations(recipe: Recipe, folder: Path) -> None:
    """The card of each data set says which files belong to which configuration."""
    sources = [recipe.data[task] for task in recipe.experts]
    for path in {source.path for source in sources if source.name}:
        lines = ["---", "configs:"]
        for source in sources:
            if source.path == path:
                lines += [f"- config_name: {source.name}", "  data_files:"]
                for split in (source.train, source.test):
                    lines += [f"  - split: {split}", f"    path: {source.name}/{split}-*"]
        (folder / path / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
