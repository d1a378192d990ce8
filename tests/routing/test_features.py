"""Features: the right module, pooled over the right tokens, and not one module more."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest
import torch
from families import FAMILIES, VOCAB
from helpers import build_from, make_experts
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from retex_hf import ConfigError, InputError, RetexConfig
from retex_hf.execution import copy_with
from retex_hf.model.components import extractor_of
from retex_hf.routing import FeatureExtractor, candidate_layers, feature_blocks, pool
from retex_hf.routing.pooling import Layout, pool_rows
from retex_hf.rows import Along, AlongItems, Owned

ROWS = 4
BLOCKS = {
    "bert": ["encoder.layer.0", "encoder.layer.1"],
    "bert-classifier": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "roberta": ["roberta.encoder.layer.0", "roberta.encoder.layer.1"],
    "deberta-v2": ["encoder.layer.0", "encoder.layer.1"],
    "vit": ["layers.0", "layers.1"],
    "clip": ["vision_model.encoder.layers.0", "vision_model.encoder.layers.1"],
    "siglip": ["vision_model.encoder.layers.0", "vision_model.encoder.layers.1"],
    "swin": ["encoder.layers.0", "encoder.layers.1"],
    "convnext": [f"encoder.stages.{stage}" for stage in range(4)],
    "resnet": ["encoder.stages.0", "encoder.stages.1"],
    "t5": ["encoder.block.0", "encoder.block.1"],
    "bart": ["model.encoder.layers.0", "model.encoder.layers.1"],
    "whisper": ["model.encoder.layers.0", "model.encoder.layers.1"],
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "llama-tied": ["model.layers.0", "model.layers.1"],
    "llama-untied": ["model.layers.0", "model.layers.1"],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "mamba": ["backbone.layers.0", "backbone.layers.1"],
    "open_clip-vit": ["visual.transformer.resblocks.0", "visual.transformer.resblocks.1"],
    "open_clip-custom-text": ["visual.transformer.resblocks.0", "visual.transformer.resblocks.1"],
    "open_clip-coca": ["visual.transformer.resblocks.0", "visual.transformer.resblocks.1"],
    "open_clip-resnet": [f"visual.layer{stage}" for stage in range(1, 5)],
}


def extractor(model: nn.Module, *layers: str, pooling: str = "mean") -> FeatureExtractor:
    return FeatureExtractor(copy_with(model, {}), list(layers), pooling)


@torch.no_grad()
def output_of(model: nn.Module, layer: str, inputs: dict[str, Tensor]) -> Tensor:
    """What a module gives in a whole forward pass."""
    model, seen = deepcopy(model), []
    model.get_submodule(layer).register_forward_hook(lambda module, args, output: seen.append(output))
    model(**inputs)
    return seen[0] if isinstance(seen[0], Tensor) else seen[0][0]


def mean_by_hand(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if hidden.ndim == 4:
        return hidden.mean((2, 3))
    if mask is None:
        return hidden.mean(1)
    return torch.stack([row[keep.bool()].mean(0) for row, keep in zip(hidden, mask, strict=True)])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_every_architecture(name):
    assert feature_blocks(FAMILIES[name].make()) == BLOCKS[name]


@pytest.mark.parametrize("name", BLOCKS)
def test_features_are_the_pooled_output_of_the_module(name):
    model = FAMILIES[name].make().eval()
    inputs = FAMILIES[name].inputs(ROWS)
    features = extractor(model, *BLOCKS[name])(inputs)
    assert list(features) == BLOCKS[name]
    images_only = "clip" in name or "siglip" in name
    for layer, actual in features.items():
        hidden = output_of(model, layer, inputs)
        expected = mean_by_hand(hidden, None if images_only else inputs.get("attention_mask"))
        assert actual.shape[0] == ROWS
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_pass_stops_at_the_module(name):
    first = extractor(FAMILIES[name].make().eval(), BLOCKS[name][0])
    first(FAMILIES[name].inputs(ROWS))  # which finds out where the rows are
    calls: dict[str, int] = {}
    for module_name, module in first.model.named_modules():
        module.register_forward_pre_hook(lambda *_, key=module_name: calls.update({key: calls.get(key, 0) + 1}))
    first(FAMILIES[name].inputs(ROWS))
    assert calls[BLOCKS[name][0]] == 1
    later = BLOCKS[name][1:]
    foreign = ("decoder", "lm_head", "model.decoder", "classifier", "text", "text_model", "transformer.resblocks")
    assert not [key for key in calls if key.startswith(tuple(later)) or key.startswith(foreign)]


def test_the_pass_stops_at_the_deepest_of_several_modules():
    blocks = [f"encoder.layer.{index}" for index in range(4)]
    model = BertModel(BertConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, num_attention_heads=2))
    several = extractor(model.eval(), blocks[2], blocks[0])
    several(FAMILIES["bert"].inputs(ROWS))  # which finds out where the rows are
    calls = []
    for block in blocks:
        several.model.get_submodule(block).register_forward_pre_hook(lambda *_, key=block: calls.append(key))
    features = several(FAMILIES["bert"].inputs(ROWS))
    assert calls == blocks[:3]
    assert list(features) == [blocks[2], blocks[0]]


def padded(inputs: dict[str, Tensor], columns: int, left: bool) -> dict[str, Tensor]:
    zeros = torch.zeros(ROWS, columns, dtype=torch.long)
    return {name: torch.cat([zeros, value] if left else [value, zeros], 1) for name, value in inputs.items()}


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize(
    ("name", "left"),
    [("bert", False), ("roberta", False), ("deberta-v2", False), ("t5", False), ("bart", False), ("gpt2", False),
     ("llama-tied", False), ("mamba", False), ("gpt2", True), ("llama-tied", True), ("mamba", True), ("mixtral", True)],
)  # fmt: skip
def test_padding_does_not_change_the_features(name, left, pooling):
    model = FAMILIES[name].make().eval()
    ids = torch.randint(3, VOCAB, (ROWS, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    features = extractor(model, *BLOCKS[name], pooling=pooling)
    expected = features(inputs)
    for columns in (1, 5):
        actual = features(padded(inputs, columns, left))
        for layer in BLOCKS[name]:
            torch.testing.assert_close(actual[layer], expected[layer], rtol=1e-4, atol=1e-5)


def test_positions_given_by_the_caller_are_kept():
    model = FAMILIES["gpt2"].make().eval()
    ids = torch.randint(3, VOCAB, (ROWS, 6))
    inputs = padded({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 2, left=True)
    positions = torch.arange(8).expand(ROWS, 8)
    features = extractor(model, "transformer.h.0")
    given = features(inputs | {"position_ids": positions})["transformer.h.0"]
    hidden = output_of(model, "transformer.h.0", inputs | {"position_ids": positions})
    torch.testing.assert_close(given, mean_by_hand(hidden, inputs["attention_mask"]), rtol=1e-5, atol=1e-6)


HIDDEN = torch.arange(24.0).view(2, 4, 3)
LEFT, RIGHT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("pooling", "mask", "expected"),
    [
        ("mean", None, [HIDDEN[0].mean(0), HIDDEN[1].mean(0)]),
        ("first", None, [HIDDEN[0, 0], HIDDEN[1, 0]]),
        ("last", None, [HIDDEN[0, 3], HIDDEN[1, 3]]),
        ("mean", LEFT, [HIDDEN[0, 2:].mean(0), HIDDEN[1].mean(0)]),
        ("first", LEFT, [HIDDEN[0, 2], HIDDEN[1, 0]]),
        ("last", LEFT, [HIDDEN[0, 3], HIDDEN[1, 3]]),
        ("mean", RIGHT, [HIDDEN[0, :2].mean(0), HIDDEN[1, :3].mean(0)]),
        ("first", RIGHT, [HIDDEN[0, 0], HIDDEN[1, 0]]),
        ("last", RIGHT, [HIDDEN[0, 1], HIDDEN[1, 2]]),
    ],
)
def test_pooling(pooling, mask, expected):
    torch.testing.assert_close(pool(HIDDEN, mask, pooling), torch.stack(expected))
    if mask is not None:
        torch.testing.assert_close(pool(HIDDEN, mask.bool(), pooling), torch.stack(expected))


def test_masked_positions_may_hold_anything():
    hidden = HIDDEN.masked_fill(LEFT.unsqueeze(-1) == 0, float("nan"))
    for pooling in ("mean", "first", "last"):
        assert torch.equal(pool(hidden, LEFT, pooling), pool(HIDDEN, LEFT, pooling))


def test_a_row_without_tokens_has_zero_features():
    assert pool(HIDDEN, torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]]), "mean")[0].tolist() == [0.0] * 3


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_maps_are_averaged_and_vectors_stay(pooling):
    maps = torch.randn(2, 3, 4, 5)
    for hidden, axis in ((maps, 1), (maps.movedim(1, 3), 3)):
        actual = pool_rows(hidden, Layout(Along(0, 1), axis), {}, 2, None, pooling)
        torch.testing.assert_close(actual, maps.mean((2, 3)))
    vectors = HIDDEN[:, 0]
    assert torch.equal(pool_rows(vectors, Layout(Along(0, 1), 1), {}, 2, LEFT, pooling), vectors)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("mask", [None, LEFT, RIGHT])
def test_rows_and_features_may_be_on_any_axes(pooling, mask):
    expected = pool(HIDDEN, mask, pooling)
    for rows, features in itertools.permutations(range(3), 2):
        hidden = HIDDEN.movedim((0, 2), (rows, features))
        actual = pool_rows(hidden, Layout(Along(rows, 1), features), {}, 2, mask, pooling)
        assert torch.equal(actual, expected)


def test_several_entries_of_a_row_are_averaged():
    views = torch.stack([HIDDEN, HIDDEN + 2], 1)  # two of each row
    layout = Layout(Along(0, 2), 2)
    for mask in (None, LEFT):
        actual = pool_rows(views.flatten(0, 1), layout, {}, 2, mask, "mean")
        torch.testing.assert_close(actual, pool(HIDDEN + 1, mask, "mean"))
    stacked = Layout(Along(1, 1), 3)  # Gemma 3n stacks several versions of the hidden states
    torch.testing.assert_close(
        pool_rows(views.movedim(1, 0), stacked, {}, 2, LEFT, "mean"), pool(HIDDEN + 1, LEFT, "mean")
    )


def test_images_of_a_row_are_averaged_and_a_row_without_is_refused():
    images = torch.randn(3, 4, 5)
    layout = Layout(AlongItems("pixel_values", 1, 1), 2)
    reading = {"pixel_values": Owned(0, torch.tensor([0, 1, 1]))}
    each = images.mean(1)
    actual = pool_rows(images, layout, reading, 2, None, "mean")
    torch.testing.assert_close(actual, torch.stack([each[0], each[1:].mean(0)]))
    with pytest.raises(InputError, match="Row 2 has none of 'pixel_values'"):
        pool_rows(images, layout, reading, 3, None, "mean")


def test_half_precision_features_are_averaged_in_full():
    model = FAMILIES["bert"].make().eval().to(torch.bfloat16)
    ids = torch.randint(3, VOCAB, (ROWS, 32))
    actual = extractor(model, "encoder.layer.0")({"input_ids": ids})["encoder.layer.0"]
    expected = output_of(model, "encoder.layer.0", {"input_ids": ids}).float().mean(1)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(0, [0]), (1, [1]), (2, [2]), (-1, [2]), (-3, [0]), ("auto", [0, 1, 2]), ("transformer.h.1", [1])],
)
def test_feature_layer_as_index_name_or_auto(layer, expected):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2))
    layers = next(candidate_layers(model, RetexConfig(feature_layer=layer)))
    assert layers == [f"transformer.h.{index}" for index in expected]


def test_any_module_may_be_the_feature_layer():
    model = FAMILIES["bert"].make().eval()
    inputs = FAMILIES["bert"].inputs(ROWS)
    for layer in ("embeddings", "encoder.layer.1.attention.self", "encoder.layer.0.output.dense", "pooler"):
        assert list(candidate_layers(model, RetexConfig(feature_layer=layer))) == [[layer]]
        hidden = output_of(model, layer, inputs)
        expected = hidden if hidden.ndim == 2 else mean_by_hand(hidden, inputs["attention_mask"])
        torch.testing.assert_close(extractor(model, layer)(inputs)[layer], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(2, "index 2 is outside the model's 2 blocks"), (-3, "index -3 is outside"),
     ("encoder.layer.7", r"no module 'encoder.layer.7'; its blocks are \['encoder.layer.0', 'encoder.layer.1'\]")],
)  # fmt: skip
def test_a_feature_layer_that_does_not_exist_is_refused(layer, message):
    with pytest.raises(ConfigError, match=message):
        list(candidate_layers(FAMILIES["bert"].make(), RetexConfig(feature_layer=layer)))


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [("t5", "decoder.block.0", "does not run when features are computed"),
     ("clip", "text_model.encoder.layers.0", "does not run when features are computed"),
     ("bert", "encoder.layer.0.attention.self.dropout", "does not run when features are computed")],
)  # fmt: skip
def test_a_module_that_gives_no_features_is_refused(name, layer, message):
    with pytest.raises(ConfigError, match=message):
        extractor(FAMILIES[name].make().eval(), layer)(FAMILIES[name].inputs(ROWS))


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("clip", {"input_ids": torch.ones(2, 8, dtype=torch.long)}),
        ("open_clip-vit", {"text": torch.ones(2, 8, dtype=torch.long)}),
        ("vit", {"input_ids": torch.ones(2, 8, dtype=torch.long)}),
        ("bert", {"pixel_values": torch.ones(2, 3, 32, 32)}),
        ("bert", {"attention_mask": torch.ones(2, 8)}),
        ("bert", {"labels": torch.ones(2)}),
        ("t5", {"decoder_input_ids": torch.ones(2, 8, dtype=torch.long)}),
        ("bert", {}),
    ],
    ids=[
        "text for clip",
        "text for open_clip",
        "text for vit",
        "image for bert",
        "mask",
        "labels",
        "decoder",
        "nothing",
    ],
)
def test_inputs_that_say_nothing_about_the_task_are_refused(name, inputs):
    with pytest.raises(InputError, match=r"The task cannot be identified from .* task="):
        extractor(FAMILIES[name].make().eval(), BLOCKS[name][0])(inputs)


@pytest.mark.parametrize(
    ("name", "alias"), [("gpt2", "inputs"), ("t5", "inputs"), ("open_clip-vit", "image"), ("open_clip-coca", "images")]
)
def test_other_names_of_the_main_input(name, alias):
    inputs = FAMILIES[name].inputs(ROWS)
    main = "input_ids" if "input_ids" in inputs else "image"
    features = extractor(FAMILIES[name].make().eval(), BLOCKS[name][0])
    renamed = {alias: inputs[main], **{key: value for key, value in inputs.items() if key == "attention_mask"}}
    assert torch.equal(features(renamed)[BLOCKS[name][0]], features(inputs)[BLOCKS[name][0]])


def test_embeddings_may_stand_for_ids():
    model = FAMILIES["gpt2"].make().eval()
    ids = torch.randint(3, VOCAB, (ROWS, 6))
    features = extractor(model, "transformer.h.0")
    expected = features({"input_ids": ids})["transformer.h.0"]
    embeds = model.transformer.wte(ids)
    assert torch.equal(features({"inputs_embeds": embeds})["transformer.h.0"], expected)
    assert torch.equal(features({"inputs_embeds": embeds, "input_ids": ids})["transformer.h.0"], expected)


@torch.no_grad()
@pytest.mark.parametrize("source", ["merged", "pretrained"])
def test_features_come_from_the_merged_or_the_pretrained_model(source):
    base = FAMILIES["bert"].make().eval()
    model, _ = build_from(base, make_experts(base, scale=1.0), feature_source=source)
    merged = model.get_base_model()
    inputs = FAMILIES["bert"].inputs(ROWS)
    features = extractor_of(model.parts(), ["encoder.layer.0"])(inputs)["encoder.layer.0"]
    means = {
        name: mean_by_hand(module(**inputs, output_hidden_states=True).hidden_states[1], inputs["attention_mask"])
        for name, module in (("merged", merged), ("pretrained", base))
    }
    torch.testing.assert_close(features, means[source], rtol=1e-5, atol=1e-6)
    assert (means["merged"] - means["pretrained"]).abs().max() > 0.1


@torch.no_grad()
def test_finding_the_axis_of_features_changes_nothing_that_other_threads_use(monkeypatch):
    """BERT of 16 features reads 16 tokens: only a changed parameter tells the two axes apart."""
    from retex_hf.routing import features

    model = FAMILIES["bert"].make().eval()
    layer = feature_blocks(model)[0]
    found, width = extractor(model, layer), model.config.hidden_size
    inputs = {"input_ids": torch.arange(2 * width).reshape(2, width) % VOCAB}
    expected = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    inner, calls = features.functional_call, []

    def call(module, *rest):
        def watch(*_):
            calls.append(all(torch.equal(t, expected[name]) for name, t in found.model.state_dict().items()))

        handle = module.model.get_submodule(layer).register_forward_pre_hook(watch)
        try:
            return inner(module, *rest)
        finally:
            handle.remove()

    monkeypatch.setattr(features, "functional_call", call)
    assert found(inputs)[layer].shape == (2, width)
    assert calls and all(calls)
