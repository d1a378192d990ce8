"""Rows with no image, one or several, whole or packed: every expert gets the images of its own rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from helpers import make_experts
from torch import nn

from retex_hf import InputError, RetexConfig, RetexModel

IMAGE, VOCAB = 30, 40
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "projection_dim": 16,
}  # fmt: skip
PLACES = 4  # of an image
LENGTH = 14


def llava() -> nn.Module:
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION), text_config=tf.LlamaConfig(**TEXT), image_token_index=IMAGE,
        image_seq_length=PLACES, vision_feature_layer=-1,
    )  # fmt: skip
    return tf.LlavaForConditionalGeneration(config).eval()


def qwen() -> nn.Module:
    vision = {
        "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
    config = tf.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=31, vision_start_token_id=32,
        vision_end_token_id=33,
    )  # fmt: skip
    return tf.Qwen2VLForConditionalGeneration(config).eval()


def texts(counts: list[int], places: int = PLACES) -> torch.Tensor:
    """Rows with so many images each."""
    rows = torch.randint(3, 25, (len(counts), LENGTH))
    for row, count in enumerate(counts):
        rows[row, 1 : 1 + places * count] = IMAGE
    return rows


def whole(counts: list[int]) -> dict[str, torch.Tensor]:
    ids = texts(counts)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(sum(counts), 3, 8, 8)}


def packed(counts: list[int]) -> dict[str, torch.Tensor]:
    """Patches of all images; one of a row's images is of 2 x 4 patches, the others of 2 x 2: two places, and one."""
    ids = torch.randint(3, 25, (len(counts), LENGTH))
    grids = []
    for row, count in enumerate(counts):
        start = 1
        for image in range(count):
            wide = image == 0
            grids.append([1, 2, 4 if wide else 2])
            ids[row, start] = 32
            ids[row, start + 1 : start + 2 + wide] = IMAGE
            start += 3 + wide
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip


def row_of(inputs: dict[str, Any], row: int, counts: list[int]) -> dict[str, Any]:
    """A row alone, with its own images."""
    first, last = sum(counts[:row]), sum(counts[: row + 1])
    alone = {name: value[row : row + 1] for name, value in inputs.items()}
    if "image_grid_thw" in inputs:
        sizes = inputs["image_grid_thw"].prod(1)
        alone["image_grid_thw"] = inputs["image_grid_thw"][first:last]
        alone["pixel_values"] = inputs["pixel_values"][int(sizes[:first].sum()) : int(sizes[:last].sum())]
    else:
        alone["pixel_values"] = inputs["pixel_values"][first:last]
    if first == last:
        alone = {name: value for name, value in alone.items() if name not in ("pixel_values", "image_grid_thw")}
    return alone


def build(make) -> RetexModel:
    torch.manual_seed(0)
    base = make()
    config = RetexConfig(rank="full")
    return RetexModel.from_experts(base, make_experts(base), config, check_base=False, progress=False)


KINDS = {"llava": (llava, whole), "qwen2-vl": (qwen, packed)}
# Where there are as many images as rows, nothing but the texts says whose they are.
COUNTS = [[1, 1, 1], [2, 0, 1], [0, 2, 1], [1, 2, 0], [2, 1, 1], [0, 0, 2]]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> tuple[RetexModel, Any]:
    make, inputs = KINDS[request.param]
    return build(make), inputs


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("execution", ["grouped", "auto"])
@torch.no_grad()
def test_every_row_is_answered_as_alone(kind, counts, execution):
    model, make = kind
    model.execution = execution
    inputs = make(counts)
    tasks = ["red", "green", "red"]
    logits = model(**inputs, task=tasks).logits
    for row, task in enumerate(tasks):
        alone = model.merge_and_unload(task)(**row_of(inputs, row, counts)).logits
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tasks", [["red", "green", "blue"], ["green", "red", "blue"]])
@torch.no_grad()
def test_images_go_back_to_their_places(tasks):
    """Also where the first task has none."""
    model = build(llava)
    counts = [2, 0, 1]
    inputs = whole(counts)
    seen = model(**inputs, task=tasks).image_hidden_states
    assert len(seen) == 3 * PLACES
    for row, task, own in ((0, tasks[0], slice(0, 2 * PLACES)), (2, tasks[2], slice(2 * PLACES, None))):
        alone = model.merge_and_unload(task)(**row_of(inputs, row, counts)).image_hidden_states
        torch.testing.assert_close(seen[own], alone, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_generating(kind):
    model, make = kind
    inputs = make([2, 0, 1])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    tasks = ["red", "green", "red"]
    tokens = model.generate(**inputs, task=tasks, **options)
    for row, task in enumerate(tasks):
        alone = model.merge_and_unload(task).generate(**row_of(inputs, row, [2, 0, 1]), **options)
        assert tokens[row, : alone.shape[1]].tolist() == alone[0].tolist()


def test_images_that_belong_to_no_row_are_refused():
    model = build(llava)
    inputs = whole([2, 0, 1])
    inputs["pixel_values"] = torch.randn(5, 3, 8, 8)
    with pytest.raises(InputError, match=r"'pixel_values' has 5 entries in a batch of 3 rows"):
        model(**inputs, task=["red", "green", "red"])


def smolvlm() -> nn.Module:
    config = tf.SmolVLMConfig(
        vision_config={**VISION, "image_size": 16}, text_config=tf.LlamaConfig(**TEXT).to_dict(), image_token_id=IMAGE,
        scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    return tf.SmolVLMForConditionalGeneration(config).eval()


def padded_images(counts: list[int]) -> dict[str, torch.Tensor]:
    """Images by rows (rows, images, C, H, W), with images of zeros where a row has fewer."""
    ids, most = texts(counts), max(counts)
    pixels = torch.zeros(len(counts), most, 3, 16, 16)
    for row, count in enumerate(counts):
        pixels[row, :count] = torch.randn(count, 3, 16, 16)
    mask = torch.ones(len(counts), most, 16, 16, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "pixel_attention_mask": mask,
    }


@torch.no_grad()
def test_what_one_batch_shows_of_images_is_not_taken_for_another():
    torch.manual_seed(0)
    base = smolvlm()
    experts = make_experts(base)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"))
    # As many images as rows could be one each. The first batch looks alike under both readings, the next does not.
    for counts, tasks in (
        ([2, 0, 0, 2], "red green red green"),
        ([2, 1, 1, 0], "red green red red"),
        ([2, 2, 0, 0], "red green red green"),
        ([0, 1, 2], "red green red"),
        ([2, 1, 0], "red red green"),
    ):
        batch, names = padded_images(counts), tasks.split()
        logits = model(**batch, task=names).logits
        for row, name in enumerate(names):
            alone = {key: value[row : row + 1] for key, value in batch.items()}
            if not counts[row]:
                alone = {key: value for key, value in alone.items() if not key.startswith("pixel")}
            torch.testing.assert_close(logits[row], experts[name](**alone).logits[0], rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("counts", [[2, 0, 1, 1], [3, 0, 0, 1]])
def test_as_many_images_as_rows_after_a_batch_with_one_each(counts):
    torch.manual_seed(0)
    base = llava()
    experts = make_experts(base)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"))
    for given in ([1, 1, 1, 1], counts):
        batch, names = whole(given), ["red", "green", "red", "green"]
        logits = model(**batch, task=names).logits
        owner = torch.arange(4).repeat_interleave(torch.tensor(given))
        for row, name in enumerate(names):
            alone = {key: value[row : row + 1] for key, value in batch.items() if key != "pixel_values"}
            if given[row]:
                alone["pixel_values"] = batch["pixel_values"][owner == row]
            torch.testing.assert_close(logits[row], experts[name](**alone).logits[0], rtol=1e-3, atol=1e-4)


def test_rows_without_images_are_identified_too():
    torch.manual_seed(0)
    base = llava()
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank="full"))
    model.fit_signatures({"red": whole([1, 2, 1, 1]), "green": whole([1, 1, 0, 1]), "blue": whole([1, 1])})
    assert model.signatures.feature_layer.startswith("model.language_model")
    found = model.identify(**(batch := whole([0, 1, 2]))).residuals
    shuffled = {key: value[[1, 0, 2]] if key != "pixel_values" else value for key, value in batch.items()}
    torch.testing.assert_close(model.identify(**shuffled).residuals, found[[1, 0, 2]], rtol=1e-3, atol=1e-4)
