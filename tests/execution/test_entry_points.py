"""The public methods of dual encoders: images are routed, prompts belong to all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, OPEN_CLIP_VIT, VOCAB, images
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, rows_of
from open_clip.model import CLIP
from torch import Tensor, nn

from retex_hf import InputError, TaskError

ROWS = len(MIXED)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# One prompt; as many as a group has rows; something else; as many as there are images.
PROMPTS = [1, 2, 3, 4, ROWS]
HF_MODELS = ["clip", "siglip"]
OPEN_CLIP_MODELS = ["open_clip-vit", "open_clip-resnet", "open_clip-custom-text"]


def prompts(number: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB - 1, (number, 8))
    ids[:, -1] = VOCAB - 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pooled(features) -> Tensor:
    return features if isinstance(features, Tensor) else features.pooler_output


@torch.no_grad()
def freeze_text(base: nn.Module, experts: dict[str, nn.Module]) -> None:
    """What fine-tuning of the image tower leaves alone."""
    for expert in experts.values():
        state = expert.state_dict()
        for name, tensor in base.state_dict().items():
            if not name.startswith(("vision_model", "visual")):
                state[name].copy_(tensor)


def build_frozen(name: str):
    base = FAMILIES[name].make().eval()
    experts = make_experts(base, scale=1.0)
    freeze_text(base, experts)
    model, experts = build_from(base, experts, FAMILIES[name].model_config)
    return base, model, experts


@torch.no_grad()
@pytest.mark.parametrize("number", PROMPTS, ids=lambda number: f"{number} prompts")
@pytest.mark.parametrize("name", HF_MODELS)
def test_forward_scores_every_image_on_its_own_expert(name, number):
    model, experts = build_retex(name)
    inputs = images(ROWS) | prompts(number)
    output = model(**inputs, task=MIXED)
    assert output.logits_per_image.shape == (ROWS, number)
    assert output.logits_per_text.shape == (number, ROWS)
    assert output.text_embeds.shape[:2] == (ROWS, number)  # the text towers differ: every row has its own
    for task in TASKS:
        rows, alone = rows_of(task), experts[task](**inputs)
        torch.testing.assert_close(output.logits_per_image[rows], alone.logits_per_image[rows], **CLOSE)
        torch.testing.assert_close(output.logits_per_text[:, rows], alone.logits_per_text[:, rows], **CLOSE)
        torch.testing.assert_close(output.image_embeds[rows], alone.image_embeds[rows], **CLOSE)
        torch.testing.assert_close(
            output.vision_model_output.last_hidden_state[rows],
            alone.vision_model_output.last_hidden_state[rows],
            **CLOSE,
        )
        for row in rows:
            torch.testing.assert_close(output.text_embeds[row], alone.text_embeds, **CLOSE)
            torch.testing.assert_close(
                output.text_model_output.last_hidden_state[row], alone.text_model_output.last_hidden_state, **CLOSE
            )


@torch.no_grad()
@pytest.mark.parametrize("name", HF_MODELS)
def test_image_and_text_features_by_row(name):
    model, experts = build_retex(name)
    pictures, texts = images(ROWS), prompts(ROWS)
    image_features = pooled(model.get_image_features(**pictures, task=MIXED))
    positional = pooled(model.get_image_features(pictures["pixel_values"], task=MIXED))
    text_features = pooled(model.get_text_features(**texts, task=MIXED))
    assert torch.equal(image_features, positional)
    for task in TASKS:
        rows = rows_of(task)
        torch.testing.assert_close(
            image_features[rows], pooled(experts[task].get_image_features(**pictures))[rows], **CLOSE
        )
        torch.testing.assert_close(text_features[rows], pooled(experts[task].get_text_features(**texts))[rows], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("number", PROMPTS, ids=lambda number: f"{number} prompts")
@pytest.mark.parametrize("name", HF_MODELS)
def test_a_frozen_text_tower_needs_no_task_and_keeps_its_shapes(name, number):
    base, model, experts = build_frozen(name)
    inputs = images(ROWS) | prompts(number)
    expected = base(**inputs)
    output = model(**inputs, task=MIXED)
    assert torch.equal(output.text_embeds, expected.text_embeds)
    assert_same(output.text_model_output, expected.text_model_output, exact=True)
    for task in TASKS:
        rows, alone = rows_of(task), experts[task](**inputs)
        torch.testing.assert_close(output.logits_per_text[:, rows], alone.logits_per_text[:, rows], **CLOSE)
    assert_same(model.get_text_features(**prompts_of(inputs)), base.get_text_features(**prompts_of(inputs)), exact=True)


def prompts_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("name", [*HF_MODELS, *OPEN_CLIP_MODELS])
def test_a_tuned_text_tower_needs_a_task(name):
    model, _ = build_retex(name)
    texts = prompts(4)
    with pytest.raises(TaskError, match="cannot tell the task from a text"):
        if name in HF_MODELS:
            model.get_text_features(**texts)
        else:
            model.encode_text(texts["input_ids"])


@torch.no_grad()
@pytest.mark.parametrize("name", HF_MODELS)
def test_the_contrastive_loss_of_several_experts_is_refused(name):
    model, experts = build_retex(name)
    inputs = images(ROWS) | prompts(ROWS)
    with pytest.raises(InputError, match="'return_loss' cannot serve the 3 experts"):
        model(**inputs, return_loss=True, task=MIXED)
    torch.testing.assert_close(
        model(**inputs, return_loss=True, task="red").loss, experts["red"](**inputs, return_loss=True).loss, **CLOSE
    )


@torch.no_grad()
@pytest.mark.parametrize("name", OPEN_CLIP_MODELS)
def test_open_clip_encoders_by_row(name):
    model, experts = build_retex(name)
    pictures, texts = images(ROWS)["pixel_values"], prompts(ROWS)["input_ids"]
    image_features = model.encode_image(pictures, normalize=True, task=MIXED)
    text_features = model.encode_text(texts, task=MIXED)
    assert image_features.routing.tasks == MIXED
    for task in TASKS:
        rows = rows_of(task)
        expected = experts[task].encode_image(pictures, normalize=True)
        torch.testing.assert_close(image_features[rows], expected[rows], **CLOSE)
        torch.testing.assert_close(text_features[rows], experts[task].encode_text(texts)[rows], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("number", PROMPTS, ids=lambda number: f"{number} prompts")
@pytest.mark.parametrize("as_dict", [False, True], ids=["tuple", "dict"])
def test_open_clip_forward(as_dict, number):
    base = CLIP(**OPEN_CLIP_VIT, output_dict=as_dict).eval()
    model, experts = build_from(base, make_experts(base, scale=1.0), OPEN_CLIP_VIT)
    pictures, texts = images(ROWS)["pixel_values"], prompts(number)["input_ids"]
    output = model(pictures, texts, task=MIXED)
    assert isinstance(output, dict if as_dict else tuple)
    assert output.routing.tasks == MIXED
    image_features, text_features, scale = output.values() if as_dict else output
    assert text_features.shape[:2] == (ROWS, number)
    for task in TASKS:
        rows, alone = rows_of(task), experts[task](pictures, texts)
        expected = list(alone.values() if as_dict else alone)
        torch.testing.assert_close(image_features[rows], expected[0][rows], **CLOSE)
        for row in rows:
            torch.testing.assert_close(text_features[row], expected[1], **CLOSE)
            torch.testing.assert_close(scale[row], expected[2], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("number", PROMPTS, ids=lambda number: f"{number} prompts")
def test_open_clip_logits(number):
    model, experts = build_retex("open_clip-vit")
    pictures, texts = images(ROWS)["pixel_values"], prompts(number)["input_ids"]
    image_logits, text_logits = model.get_logits(pictures, texts, task=MIXED)
    for task in TASKS:
        rows, alone = rows_of(task), experts[task].get_logits(pictures, texts)
        torch.testing.assert_close(image_logits[rows], alone[0][rows], **CLOSE)
        torch.testing.assert_close(text_logits[:, rows], alone[1][:, rows], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("as_dict", [False, True], ids=["tuple", "dict"])
def test_open_clip_forward_of_one_kind_only(as_dict):
    base = CLIP(**OPEN_CLIP_VIT, output_dict=as_dict).eval()
    model, experts = build_from(base, make_experts(base, scale=1.0), OPEN_CLIP_VIT)
    pictures, texts = images(ROWS)["pixel_values"], prompts(ROWS)["input_ids"]
    for key, inputs in {"image_features": {"image": pictures}, "text_features": {"text": texts}}.items():
        output = model(**inputs, task=MIXED)
        features = output[key] if as_dict else output[key == "text_features"]
        for task in TASKS:
            alone = experts[task](**inputs)
            expected = alone[key] if as_dict else alone[key == "text_features"]
            torch.testing.assert_close(features[rows_of(task)], expected[rows_of(task)], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["open_clip-vit", "open_clip-custom-text"])
def test_open_clip_intermediate_features(name):
    model, experts = build_retex(name)
    inputs = {"image": images(ROWS)["pixel_values"], "text": prompts(3)["input_ids"]}
    output = model.forward_intermediates(**inputs, task=MIXED)
    for task in TASKS:
        rows, alone = rows_of(task), experts[task].forward_intermediates(**inputs)
        torch.testing.assert_close(output["image_features"][rows], alone["image_features"][rows], **CLOSE)
        for actual, expected in zip(output["image_intermediates"], alone["image_intermediates"], strict=True):
            torch.testing.assert_close(actual[rows], expected[rows], **CLOSE)
        for actual, expected in zip(output["text_intermediates"], alone["text_intermediates"], strict=True):
            torch.testing.assert_close(actual[rows], expected.expand(len(rows), *expected.shape), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", OPEN_CLIP_MODELS)
def test_open_clip_with_a_frozen_text_tower(name):
    base, model, experts = build_frozen(name)
    pictures, texts = images(ROWS)["pixel_values"], prompts(4)["input_ids"]
    assert torch.equal(model.encode_text(texts), base.encode_text(texts))
    output = model(pictures, texts, task=MIXED)
    assert torch.equal(output[1], base(pictures, texts)[1])
    assert output[2].shape == ()
    for task in TASKS:
        torch.testing.assert_close(output[0][rows_of(task)], experts[task](pictures, texts)[0][rows_of(task)], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["clip", "open_clip-vit"])
def test_routed_classification_needs_no_task_at_all(name):
    _, model, _ = build_frozen(name)
    pictures, main = images(3 * ROWS)["pixel_values"], "pixel_values" if name == "clip" else "image"
    model.retex_config = replace(model.retex_config, signature_rank=1)
    model.fit_signatures({task: [pictures[index::3]] for index, task in enumerate(TASKS)}, progress=False)
    texts = prompts(4) if name == "clip" else {"text": prompts(4)["input_ids"]}
    routing = model.identify(**{main: pictures})
    assert len(set(routing.tasks)) > 1
    routed = model(**{main: pictures}, **texts)
    assert routed.routing.tasks == routing.tasks
    assert_same(routed, model(**{main: pictures}, **texts, task=routing.tasks), exact=True)
    encode = model.get_image_features if name == "clip" else model.encode_image
    features = encode(pictures)
    assert features.routing.tasks == routing.tasks
    assert_same(features, encode(pictures, task=routing.tasks), exact=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "vit", "t5", "gpt2"])
def test_positional_arguments_are_those_of_the_wrapped_model(name):
    model, _ = build_retex(name)
    inputs = FAMILIES[name].inputs(ROWS)
    if name in ("t5", "gpt2"):
        inputs = {"input_ids": inputs["input_ids"]} | (
            {"decoder_input_ids": inputs["decoder_input_ids"]} if name == "t5" else {}
        )
    main, *others = inputs
    rest = {other: inputs[other] for other in others}
    assert_same(model(inputs[main], **rest, task=MIXED), model(**inputs, task=MIXED), exact=True)
    with pytest.raises(InputError, match=f"'{main}' twice"):
        model(inputs[main], **inputs, task=MIXED)


def test_methods_that_take_no_inputs_pass_through():
    model, _ = build_retex("bert")
    assert model.num_parameters() == model.get_base_model().num_parameters()
    assert model.get_input_embeddings() is model.get_base_model().get_input_embeddings()
    assert model.config is model.get_base_model().config
    with pytest.raises(AttributeError, match="no_such_method"):
        model.no_such_method()
