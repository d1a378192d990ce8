"""Where a layer's output has its rows and its features is proven, though sizes coincide."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers as tf
from families import VOCAB
from torch import Tensor, nn

from retex_hf import ConfigError
from retex_hf.backends import hf_transformers
from retex_hf.execution import copy_with
from retex_hf.routing import FeatureExtractor, block_lists, trying
from retex_hf.routing.axes import axis_by_change

WIDTH = 8
TEXT = {"vocab_size": VOCAB}


def ids(rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCAB, (rows, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def xlnet() -> tf.XLNetModel:
    return tf.XLNetModel(tf.XLNetConfig(**TEXT, d_model=WIDTH, n_layer=2, n_head=2, d_inner=16))


def fsmt() -> tf.FSMTModel:
    config = tf.FSMTConfig(
        langs=["de", "en"], src_vocab_size=VOCAB, tgt_vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    return tf.FSMTModel(config)


def bert() -> tf.BertModel:
    config = tf.BertConfig(
        **TEXT, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=WIDTH
    )
    return tf.BertModel(config)


MODELS = {"xlnet": (xlnet, "layer.1", 1), "fsmt": (fsmt, "encoder.layers.1", 0), "bert": (bert, "encoder.layer.1", 0)}


@torch.no_grad()
def expected_features(model: nn.Module, layer: str, inputs: dict[str, Tensor], axis: int) -> Tensor:
    """The mean over the tokens of one row after another, each of which runs alone."""
    seen: list[Any] = []
    model.get_submodule(layer).register_forward_hook(lambda module, args, output: seen.append(output))
    for row in range(len(inputs["input_ids"])):
        model(**{name: value[row : row + 1] for name, value in inputs.items()})
    hidden = [output if isinstance(output, Tensor) else output[0] for output in seen]
    return torch.stack([tensor.select(axis, 0).mean(0) for tensor in hidden])


@pytest.mark.parametrize(("rows", "length"), [(WIDTH, WIDTH), (5, 5), (3, WIDTH), (WIDTH, 3), (1, 4), (1, WIDTH)])
@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_each_row_whatever_the_sizes(name, rows, length):
    torch.manual_seed(0)
    make, layer, axis = MODELS[name]
    model = make().eval()
    inputs = ids(rows, length)
    if name == "fsmt":
        axis = 1  # its encoder has the tokens first
    expected = expected_features(model, layer, inputs, axis)
    actual = FeatureExtractor(copy_with(model, {}), [layer], "mean")(inputs)[layer]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    shuffled = torch.randperm(rows)
    again = FeatureExtractor(copy_with(model, {}), [layer], "mean")({k: v[shuffled] for k, v in inputs.items()})[layer]
    torch.testing.assert_close(again, expected[shuffled], rtol=1e-4, atol=1e-5)


def test_features_in_inference_mode_are_the_same():
    torch.manual_seed(0)
    model = bert().eval()
    expected = expected_features(model, "encoder.layer.1", inputs := ids(3, WIDTH), 0)
    with torch.inference_mode():
        made = bert().eval()
        made.load_state_dict(model.state_dict())
        given = {name: value.clone() for name, value in inputs.items()}
        actual = FeatureExtractor(copy_with(made, {}), ["encoder.layer.1"], "mean")(given)["encoder.layer.1"]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A layer whose output has its features along an axis, all axes being equally long."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.act = (
            nn.Conv1d(WIDTH, WIDTH, 1) if kind == "channels first" else nn.Linear(WIDTH, WIDTH, kind != "no bias")
        )
        if kind == "normalised":
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mix(hidden.mT).mT  # along positions, as mixers do
        hidden = hidden + self.act(hidden)
        return self.norm(hidden) if self.kind == "normalised" else hidden.relu() if self.kind == "relu" else hidden


@pytest.mark.parametrize("kind", ["plain", "no bias", "normalised", "relu", "channels first"])
def test_the_last_parameter_tells_the_axis_of_the_features(kind):
    torch.manual_seed(0)
    block, given = Block(kind), torch.randn(2, WIDTH, WIDTH)

    def hidden_of(parameters):
        return torch.func.functional_call(block, dict(parameters), (given,))

    axis = axis_by_change(hidden_of, dict(block.named_parameters()), [1, 2])
    assert axis == (1 if kind == "channels first" else 2)


def test_nothing_is_guessed_where_no_parameter_tells():
    mixing = nn.Parameter(torch.randn(WIDTH, WIDTH))
    given = torch.randn(2, WIDTH, WIDTH)
    assert axis_by_change(lambda _: given, {"mix": mixing}, [1, 2]) is None


def test_a_parameter_that_moves_everything_tells_nothing():
    mixing = nn.Parameter(torch.randn(WIDTH, WIDTH))
    given = torch.randn(2, WIDTH, WIDTH)

    def hidden_of(parameters):
        return given * parameters.get("mix", mixing).sum()

    assert axis_by_change(hidden_of, {"mix": mixing}, [1, 2]) is None


class Dropping(nn.Module):
    """Keeps positions above a threshold, pads with zeros: what a row gives depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = [row[row[:, 0] > 0] for row in x]
        return self.second(self.first(nn.utils.rnn.pad_sequence(kept, batch_first=True)))


def rows_with(*counts: int) -> Tensor:
    """Rows of five positions, of which so many are kept."""
    x = torch.randn(len(counts), 5, 4)
    x[:, :, 0] = torch.where(torch.arange(5) < torch.tensor(counts)[:, None], 1.0, -1.0)
    return x


def test_positions_that_depend_on_the_content_are_refused():
    model = Dropping().eval()

    def extractor() -> FeatureExtractor:
        return FeatureExtractor(copy_with(model, {}), ["first"], "mean")

    with pytest.raises(ConfigError, match="gives different numbers of positions to rows of the same size"):
        extractor()({"x": rows_with(2, 2, 4)})
    seen_before = extractor()
    seen_before({"x": rows_with(2, 2, 2)})
    with pytest.raises(ConfigError, match="gives different numbers of positions to rows of the same size"):
        seen_before({"x": rows_with(3, 3)})


def detr() -> tf.DetrForObjectDetection:
    backbone = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = tf.DetrConfig(
        backbone_config=backbone, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5, use_timm_backbone=False,
    )  # fmt: skip
    return tf.DetrForObjectDetection(config)


def test_a_detector_is_identified_by_its_encoder():
    model = detr().eval()
    inputs = {"pixel_values": torch.randn(3, 3, 32, 32)}
    found = trying(lambda layers: FeatureExtractor(copy_with(model, {}), layers, "mean"), block_lists(model), inputs)
    assert found.layers == ["model.encoder.layers.0", "model.encoder.layers.1"]
    together = found(inputs)
    alone = torch.cat(
        [found({"pixel_values": inputs["pixel_values"][row : row + 1]})[found.layers[1]] for row in range(3)]
    )
    torch.testing.assert_close(together[found.layers[1]], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("CLIPModel", True), ("SiglipModel", True), ("AlignModel", True), ("ClapModel", True), ("XCLIPModel", True),
     ("PeAudioModel", True), ("PeVideoModel", True), ("Tipsv2Model", True), ("VisionTextDualEncoderModel", True),
     ("BlipModel", True), ("OwlViTModel", True), ("FlavaModel", False), ("FlavaForPreTraining", False),
     ("Blip2ForImageTextRetrieval", False), ("LlavaModel", False), ("BertModel", False), ("Florence2Model", False)],
)  # fmt: skip
def test_a_dual_encoder_is_known_by_what_it_gives(name, expected):
    cls = getattr(tf, name)
    model = cls.__new__(cls)  # nothing of it is read but its class, and whether it has a part for texts
    nn.Module.__init__(model)
    if "text_model" in inspect.getsource(cls.__init__):
        model.text_model = nn.Identity()
    assert hf_transformers.is_dual_encoder(model) == expected
