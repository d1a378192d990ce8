"""Offloaded and quantised weights: the merged layers run as they are, and every row's offsets are added beside them."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers as tf
from families import FAMILIES, ROWS, TEXT, VOCAB, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, rows_of, take
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexError, RetexModel

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
OFFLOADED = ["bert", "t5", "llama-untied", "llama-tied", "gpt2"]


def offload(model: nn.Module, how: str, folder) -> None:
    accelerate.cpu_offload(model) if how == "cpu" else accelerate.disk_offload(model, str(folder))
    assert all(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize(("name", "how"), [*((name, "cpu") for name in OFFLOADED), ("t5", "disk")])
def test_offloaded_models_run_in_one_pass(name, how, tmp_path):
    model, _ = build_retex(name, rank=4)
    inputs = FAMILIES[name].inputs(ROWS)
    model.execution = "grouped"
    expected = {"mixed": model(**inputs, task=MIXED), "one": model(**inputs, task="blue")}
    model.expert_cache.clear()
    offload(model.model, how, tmp_path)
    with pytest.raises(RetexError, match=r"No expert can be recovered as a whole model, because '.*' is quantised"):
        model(**inputs, task=MIXED)
    model.execution = "auto"
    assert_same(model(**inputs, task=MIXED), expected["mixed"], **CLOSE)
    assert_same(model(**inputs, task="blue"), expected["one"], **CLOSE)
    assert all(parameter.is_meta for parameter in model.model.parameters())


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_offloaded_models_generate(name):
    model, _ = build_retex(name, rank=4)
    inputs = tokens(ROWS)
    options = {"max_new_tokens": 4, "do_sample": False, "no_repeat_ngram_size": 1, "pad_token_id": VOCAB - 1}
    model.execution = "grouped"
    expected = model.generate(**inputs, **options, task=MIXED)
    model.expert_cache.clear()
    accelerate.cpu_offload(model.model)
    model.execution = "auto"
    assert torch.equal(model.generate(**inputs, **options, task=MIXED), expected)


@torch.no_grad()
def test_heads_of_an_offloaded_model(tmp_path):
    """Each task's own head, not the merged model's that is loaded for the layer."""
    base = tf.BertModel(tf.BertConfig(**TEXT))
    base.save_pretrained(tmp_path / "base")
    for width, (task, body) in enumerate(make_experts(base).items(), start=2):
        expert = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=width)).eval()
        expert.bert.load_state_dict(body.state_dict(), strict=False)
        nn.init.normal_(expert.classifier.weight)
        expert.save_pretrained(tmp_path / task)
    experts = {task: str(tmp_path / task) for task in TASKS}
    model = RetexModel.from_experts(str(tmp_path / "base"), experts, RetexConfig(rank=4), progress=False)
    inputs = tokens(ROWS)
    expected = model(**inputs, task=MIXED).logits
    model.expert_cache.clear()
    accelerate.cpu_offload(model.model)
    torch.testing.assert_close(model(**inputs, task=MIXED).logits, expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "culprit"),
    [("vit", "cls_token"), ("bart", "BartScaledWordEmbedding"), ("whisper", "Conv1d"), ("mamba", "MambaMixer")],
)
def test_layers_that_have_no_side_path_are_refused(name, culprit):
    model, _ = build_retex(name, rank=4)
    accelerate.cpu_offload(model.model)
    with pytest.raises(RetexError, match=f"cannot run in one pass: .*{culprit}"):
        model(**FAMILIES[name].inputs(ROWS), task=MIXED)


@torch.no_grad()
def test_embeddings_of_bounded_norm_have_no_side_path():
    """The bound applies to merged row and offset together, not to the merged row beside the offset."""
    model, _ = build_retex("llama-untied", rank=4)
    model.model.get_input_embeddings().max_norm = 0.1
    accelerate.cpu_offload(model.model)
    with pytest.raises(RetexError, match=r"cannot run in one pass: .*embed_tokens.*belongs to a Embedding"):
        model(**tokens(ROWS), task=MIXED)


@torch.no_grad()
def test_the_affine_variant_needs_the_merged_values():
    model, _ = build_retex("llama-untied", rank=4, recovery="affine")
    accelerate.cpu_offload(model.model)
    with pytest.raises(RetexError, match="is scaled as well as moved"):
        model(**tokens(ROWS), task=MIXED)


def test_training_an_offloaded_model_is_refused():
    model, _ = build_retex("llama-untied", rank=4)
    accelerate.cpu_offload(model.model)
    model.train()
    with pytest.raises(RetexError, match="the model is in training mode"):
        model(**tokens(ROWS), task=MIXED)


# ---- quantised layers ------------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear layer as libraries of quantised layers have it: sizes, an integer weight, a scale per row."""

    def __init__(self, layer: nn.Linear, hidden: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = layer.weight.abs().amax(1, keepdim=True) / 127
        quantised = (layer.weight / self.scale).round().to(torch.int8)
        # Some keep the integers under another name than the weight had.
        self.register_parameter("packed" if hidden else "weight", nn.Parameter(quantised, requires_grad=False))
        self.bias = layer.bias

    def dequantised(self) -> Tensor:
        return (self.packed if hasattr(self, "packed") else self.weight) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantised(), self.bias)


def quantise(model: nn.Module, hidden: bool) -> list[str]:
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Int8Linear(model.get_submodule(name), hidden))
    return names


def exact_experts(model: RetexModel, base: nn.Module) -> dict[str, nn.Module]:
    """Plain models of the dequantised weights plus the exact offsets."""
    experts = {}
    for index, task in enumerate(TASKS):
        expert = type(base)(base.config).eval()
        if expert.config.tie_word_embeddings and expert.get_output_embeddings() is not None:
            expert.get_output_embeddings().weight = nn.Parameter(expert.get_output_embeddings().weight.clone())
        embedding = model.recovery.embed(torch.eye(len(TASKS))[index])
        ties = getattr(model.model, "all_tied_weights_keys", {})
        for name, tensor in expert.state_dict(keep_vars=True).items():
            module, _, attribute = name.rpartition(".")
            layer = model.model.get_submodule(module)
            quantised = isinstance(layer, Int8Linear) and attribute == "weight"
            tensor.copy_(layer.dequantised() if quantised else getattr(layer, attribute))
            known = name if name in model.recovery else ties.get(name)
            if known in model.recovery:
                tensor += model.recovery.offset(known, embedding)
        experts[task] = expert
    return experts


@torch.no_grad()
@pytest.mark.parametrize("hidden", [False, True], ids=["weight", "packed"])
@pytest.mark.parametrize("name", ["bert", "llama-tied", "llama-untied"])
def test_quantised_layers_plus_exact_offsets(name, hidden):
    """With biases that stay plain beside a quantised weight, and an output layer whose tie is torn apart."""
    base = FAMILIES[name].make().eval()
    model, _ = build_from(base, make_experts(base), rank=4)
    quantised = quantise(model.model, hidden)
    assert len(quantised) > 6
    inputs = tokens(ROWS)
    output = model(**inputs, task=MIXED)[0]
    experts = exact_experts(model, base)
    for task in TASKS:
        rows = rows_of(task)
        torch.testing.assert_close(output[rows], experts[task](**take(inputs, rows))[0], **CLOSE)
    model.execution = "grouped"
    with pytest.raises(RetexError, match="is quantised or offloaded"):
        model(**inputs, task=MIXED)
