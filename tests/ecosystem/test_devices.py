"""`device_map`, offloading, quantisation and dtypes through `from_pretrained`."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import ROWS, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, take
from materials_of_pipelines import TEXTS, make_tokenizer, text_classifier
from torch import Tensor, nn
from transformers import pipeline
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import is_optimum_quanto_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from retex_hf import ArtifactError, RetexError, RetexModel

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SOME = {"max_memory": {"cpu": "22KB"}}  # of 36


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved classifier with heads of three widths, in full precision."""
    model, _ = text_classifier()
    folder = tmp_path_factory.mktemp("devices") / "artifact"
    model.save_pretrained(folder)
    return model, folder


@torch.no_grad()
def test_a_device_map_that_puts_everything_in_one_place(saved):
    model, folder = saved
    inputs = tokens(ROWS)
    loaded = RetexModel.from_pretrained(folder, device_map="auto")
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert_same(loaded(**inputs, task=MIXED), model(**inputs, task=MIXED), **CLOSE)
    assert_same(loaded.merge_and_unload("red")(**inputs), model(**inputs, task="red"), **CLOSE)


@torch.no_grad()
def test_a_device_map_that_offloads_to_the_disk(saved, tmp_path):
    model, folder = saved
    inputs = tokens(ROWS)
    loaded = RetexModel.from_pretrained(folder, device_map="auto", offload_folder=str(tmp_path / "off"), **SOME)
    assert {"cpu", "disk"} == set(loaded.hf_device_map.values())
    assert_same(loaded(**inputs, task=MIXED), model(**inputs, task=MIXED), **CLOSE)
    assert loaded(**inputs).routing.tasks == model(**inputs).routing.tasks
    with pytest.raises(RetexError, match=r"No expert can be recovered as a whole model, because '.*' is quantised or"):
        loaded.merge_and_unload("red")
    tokenizer = make_tokenizer()
    answers = [
        pipeline("text-classification", model=own, tokenizer=tokenizer)(TEXTS, batch_size=3) for own in (model, loaded)
    ]
    for one, other in zip(*answers, strict=True):
        assert {**one, "score": pytest.approx(one["score"], rel=1e-4)} == other
    with pytest.warns(UserWarning, match="a model with offloaded modules"):  # of transformers, which needs the memory
        loaded.save_pretrained(tmp_path / "again")
    assert_same(RetexModel.from_pretrained(tmp_path / "again")(**inputs, task=MIXED), model(**inputs, task=MIXED))


@torch.no_grad()
def test_losses_of_offloaded_heads_are_refused(saved, tmp_path):
    loaded = RetexModel.from_pretrained(saved[1], device_map="auto", offload_folder=str(tmp_path), **SOME)
    with pytest.raises(RetexError, match="cannot run in one pass: tasks have losses of their own"):
        loaded(**tokens(ROWS), labels=torch.zeros(ROWS, dtype=torch.long), task=MIXED)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(saved, dtype):
    """Loaded in a dtype or cast to it: heads and body go together, and experts are as good as the dtype allows."""
    model, folder = saved
    inputs = tokens(ROWS)
    expected = model(**inputs, task=MIXED).logits
    loaded = RetexModel.from_pretrained(folder, dtype=dtype)
    cast = RetexModel.from_pretrained(folder)
    cast.half() if dtype == torch.float16 else cast.bfloat16()
    for own in (loaded, cast):
        assert own.dtype == dtype
        assert own.recovery.task_embedding.dtype == torch.float32  # what is recovered is rounded once
        logits = own(**inputs, task=MIXED).logits
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), expected, rtol=0.02, atol=0.05)
        assert own(**inputs).routing.tasks == model(**inputs).routing.tasks
    assert_same(loaded(**inputs, task=MIXED), cast(**inputs, task=MIXED), **CLOSE)


@torch.no_grad()
def test_base_features_in_another_dtype(tmp_path):
    """The base's own tensors, which identify, are in the dtype of the model that they stand in."""
    base = tf.ViTModel(tf.ViTConfig(image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2,
                                    num_attention_heads=2, intermediate_size=24))  # fmt: skip
    model, _ = build_from(base, make_experts(base), feature_source="pretrained")
    images = {task: torch.randn(8, 3, 16, 16) + index for index, task in enumerate(TASKS)}
    model.fit_signatures({task: [own] for task, own in images.items()}, progress=False)
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for task, own in images.items():
        assert loaded.identify(pixel_values=own.bfloat16()).tasks == [task] * 8


def test_the_meta_device(saved):
    loaded = RetexModel.from_pretrained(saved[1]).to("meta")
    assert loaded.device.type == "meta"
    assert all(parameter.is_meta for parameter in loaded.parameters())


# ---- quantised bases -------------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """What a library of quantised layers puts in the place of a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def dequantised(self) -> Tensor:
        return self.weight * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantised(), self.bias)


@register_quantization_config("stand-in")
class StandInConfig(QuantizationConfigMixin):
    def __init__(self, quant_method: str = "stand-in") -> None:
        self.quant_method = quant_method


@register_quantizer("stand-in")
class StandInQuantizer(HfQuantizer):
    """Quantises the linear layers of a model that has been loaded, as bitsandbytes does on the way."""

    requires_calibration = False

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs) -> nn.Module:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and "encoder" in name:
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, Int8Linear(module))
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


@torch.no_grad()
def test_a_quantised_base_runs_in_one_pass_with_exact_offsets(tmp_path):
    model, _ = build_retex("bert", rank=3)
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path, quantization_config=StandInConfig())
    merged = loaded.get_base_model()
    assert merged.encoder.layer[0].output.dense.weight.dtype == torch.int8
    inputs = tokens(ROWS)
    output = loaded(**inputs, task=MIXED).last_hidden_state
    # An expert of plain numbers: the quantised values, and the offsets of the task.
    for task in TASKS:
        expert = model.merge_and_unload(task)
        for name, module in merged.named_modules():
            if isinstance(module, Int8Linear):
                embedding = model.recovery.embed(torch.eye(len(TASKS))[TASKS.index(task)])
                weight = module.dequantised() + model.recovery.offset(f"{name}.weight", embedding)
                expert.get_submodule(name).weight.copy_(weight)
        rows = [row for row, own in enumerate(MIXED) if own == task]
        torch.testing.assert_close(output[rows], expert(**take(inputs, rows)).last_hidden_state, **CLOSE)
    with pytest.raises(RetexError, match=r"No expert can be recovered as a whole model, because '.*' is quantised"):
        loaded.merge_and_unload("red")


@pytest.mark.skipif(is_optimum_quanto_available(), reason="it is installed")
def test_a_quantiser_that_is_not_installed_is_named(saved):
    with pytest.raises(ArtifactError, match=r"the merged model does not load: .* requires optimum-quanto library"):
        RetexModel.from_pretrained(saved[1], quantization_config=tf.QuantoConfig(weights="int8"))
