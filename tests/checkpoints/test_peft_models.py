"""A `PeftModel` given as an expert is read as what the object itself computes: on its own base, in its own state."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES, LLM, TEXT
from helpers import assert_same
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, VeraConfig, get_peft_model
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import open_source
from retex_hf.errors import CheckpointError, ConfigError

TARGETS = ["q_proj", "down_proj"]
INPUTS = torch.arange(3, 27).reshape(3, 8)
TYPES: dict[str, Callable[..., Any]] = {
    "lora": lambda **options: LoraConfig(r=4, target_modules=TARGETS, **options),
    "dora": lambda **options: LoraConfig(r=4, target_modules=TARGETS, use_dora=True, **options),
    "ia3": lambda **options: IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], **options),
    "loha": lambda **options: LoHaConfig(r=3, target_modules=TARGETS, **options),
    "vera": lambda **options: VeraConfig(r=3, target_modules=TARGETS, **options),
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**LLM, tie_word_embeddings=False, **options)).eval()


@pytest.fixture
def base() -> nn.Module:
    return llama()


def shift(model: nn.Module, seed: int = 3, scale: float = 0.01) -> nn.Module:
    """A model as further training would leave it."""
    torch.manual_seed(seed)
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return other


def adapt(model: nn.Module, config: Any, seed: int = 1, scale: float = 0.1) -> PeftModel:
    torch.manual_seed(seed)
    adapted = get_peft_model(deepcopy(model), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    return adapted.eval()


def build(base: Any, expert: Any, **options: Any) -> RetexModel:
    return RetexModel.from_experts(base, {"red": expert}, RetexConfig(rank="full"), progress=False, **options)


@torch.no_grad()
def check(base: nn.Module, expert: PeftModel, **tolerances: float) -> RetexModel:
    """The expert of a build computes what the object computes, which the build leaves as it was."""
    before = {name: tensor.clone() for name, tensor in expert.state_dict().items()}
    model = build(base, expert)
    tolerances = {"rtol": 1e-4, "atol": 1e-5} | tolerances
    assert_same(model(input_ids=INPUTS, task="red").logits, expert(input_ids=INPUTS).logits, **tolerances)
    assert_same(dict(expert.state_dict()), before, exact=True)
    return model


def distance(base: nn.Module, expert: PeftModel) -> float:
    with torch.no_grad():
        return (base(input_ids=INPUTS).logits - expert(input_ids=INPUTS).logits).abs().max().item()


@pytest.mark.parametrize("kind", TYPES)
def test_its_own_base(base, kind):
    expert = adapt(shift(base), TYPES[kind]())
    model = check(base, expert)
    assert_same(model.recover("red"), dict(deepcopy(expert).merge_and_unload().state_dict()), rtol=1e-4, atol=1e-5)
    assert model.retex_config.experts["red"]["adapter"] == ("lora" if kind == "dora" else kind)


@pytest.mark.parametrize("kind", TYPES)
def test_modules_to_save(base, kind):
    expert = adapt(shift(base), TYPES[kind](modules_to_save=["lm_head", "norm"]))
    assert not torch.equal(expert.get_base_model().lm_head.weight, base.lm_head.weight)
    check(base, expert)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
def test_the_scale_of_its_layers(base, kind):
    expert = adapt(base, TYPES[kind]())
    plain = distance(base, expert)
    for layer in expert.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 5.0)
    assert distance(base, expert) > plain + 1e-4
    check(base, expert)


@pytest.mark.parametrize("kind", TYPES)
def test_merged_adapters_are_read(base, kind):
    """A merged adapter is in the object's own weights, and in none but those."""
    expert = adapt(shift(base), TYPES[kind]())
    expert.merge_adapter()
    check(base, expert)


def test_merged_while_another_is_active(base):
    """Where one adapter is merged, peft runs no other."""
    expert = adapt(base, TYPES["lora"]())
    expert.merge_adapter()
    expert.add_adapter("other", TYPES["lora"](init_lora_weights=False))
    expert.set_adapter("other")
    check(base, expert.eval())


def test_one_of_several_adapters(base):
    expert = adapt(base, TYPES["lora"](modules_to_save=["norm"]))
    expert.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    expert.set_adapter("other")
    check(base, expert.eval())
    expert.set_adapter("default")
    check(base, expert.eval())


@pytest.mark.parametrize("begun", ["pissa", "pissa_niter_4", "olora", "mica", "orthogonal"])
def test_what_an_initialisation_changed_of_the_base(base, begun):
    """The object has the base that its adapter was begun with, so that nothing has to be derived again."""
    check(base, adapt(base, TYPES["lora"](init_lora_weights=begun)))


@torch.no_grad()
@pytest.mark.parametrize("kind", TYPES)
def test_its_base_in_half_precision(base, kind):
    """Merged in float32: peft rounds neither the adapter nor what it adds to a weight."""
    half = shift(base).bfloat16()
    expert = adapt(half, TYPES[kind]())
    assert next(expert.get_base_model().parameters()).dtype == torch.bfloat16
    wide = deepcopy(expert).float().merge_and_unload()
    assert_same(build(base, expert).recover("red"), dict(wide.state_dict()), rtol=1e-4, atol=1e-5)
    narrow = build(base.bfloat16(), expert)
    assert {tensor.dtype for tensor in narrow.model.state_dict().values()} == {torch.bfloat16}
    expected = {name: tensor.bfloat16() for name, tensor in wide.state_dict().items()}
    assert_same(dict(narrow.model.state_dict()), expected, exact=True)


def test_tables_with_tokens_of_its_own(base):
    grown = shift(base)
    grown.resize_token_embeddings(LLM["vocab_size"] + 2, mean_resizing=False)
    check(base, adapt(grown, TYPES["lora"]()))


@torch.no_grad()
def test_a_bias_that_the_base_lacks(base):
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)
    expert = adapt(base, config)
    with pytest.raises(CheckpointError, match=r"does not merge into '.*layers.0.self_attn.q_proj': .*no bias.$"):
        build(base, expert)
    for name, parameter in expert.named_parameters():
        if name.endswith("lora_B.default.bias"):
            parameter.zero_()
    check(base, expert)


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [3, 5]}])
def test_tied_embeddings(options):
    """What changes the embedding changes the output layer too, and once, though peft merges it into both."""
    torch.manual_seed(0)
    base = tf.LlamaForCausalLM(tf.LlamaConfig(**LLM, tie_word_embeddings=True)).eval()
    options = {"target_modules": ["q_proj"], "ensure_weight_tying": True, **options}
    check(base, adapt(shift(base), LoraConfig(r=4, **options)))


def test_on_disk_it_is_as_in_memory(base, tmp_path):
    expert = adapt(shift(base), TYPES["dora"](modules_to_save=["norm"]))
    built = build(base, expert, output_dir=tmp_path / "retex")
    assert_same(built.recover("red"), build(base, expert).recover("red"), rtol=1e-5, atol=1e-6)


def test_in_a_parallel_wrapper(base):
    expert = adapt(shift(base), TYPES["lora"]())
    assert_same(build(base, nn.DataParallel(expert)).recover("red"), build(base, expert).recover("red"), exact=True)


class Net(nn.Module):
    """A class of somebody's own, whose attention peft wraps as one layer."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.act = activation()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.attention(x, x, x, need_weights=False)[0]))


@torch.no_grad()
def test_a_class_of_somebodys_own():
    torch.manual_seed(0)
    base, x = Net().eval(), torch.randn(2, 3, 8)
    expert = adapt(shift(base), LoraConfig(r=2, target_modules=["attention", "out"]))
    expected = expert(x)  # which unregisters weights of the attention
    assert_same(build(base, expert)(x, task="red"), expected, rtol=1e-4, atol=1e-5)


def test_a_base_that_computes_otherwise():
    torch.manual_seed(0)
    expert = adapt(Net(nn.GELU), LoraConfig(r=2, target_modules=["out"]))
    with pytest.raises(CheckpointError, match=r"'act' is a .*GELU, not a .*ReLU as in the other experts"):
        RetexModel.from_experts(Net(), {"green": shift(Net()), "red": expert}, progress=False, check_base=False)
    expert = adapt(llama(hidden_act="gelu"), TYPES["lora"]())
    with pytest.raises(CheckpointError, match="has hidden_act='gelu' in its configuration, and the other experts"):
        build(llama(), expert)


def test_a_base_of_another_descent(base):
    torch.manual_seed(5)
    expert = adapt(tf.LlamaForCausalLM(base.config), TYPES["lora"]())
    with pytest.raises(CheckpointError, match="expert 'red'"):
        build(base, expert)


def test_labels_are_its_own():
    torch.manual_seed(0)
    classifier = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, id2label={0: "no", 1: "yes", 2: "both"}))
    expert = adapt(shift(classifier), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    model = build(FAMILIES["bert"].make(), expert, check_base=False)
    assert model.retex_config.labels["red"]["id2label"] == {"0": "no", "1": "yes", "2": "both"}


def test_nothing_is_logged(base, caplog):
    expert = adapt(shift(base), TYPES["lora"](modules_to_save=["norm"]))
    with caplog.at_level(logging.INFO, logger="retex_hf"):
        build(base, expert)
    assert not caplog.records


# ---- tasks come and go -----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", TYPES)
def test_add_task(base, kind):
    """A PeftModel brings its base along, so none may be named."""
    expert = adapt(shift(base), TYPES[kind](modules_to_save=["norm"]))
    model = build(base, shift(base, 7))
    with pytest.raises(ConfigError, match="expert 'new' is a PeftModel, which has its own"):
        model.add_task("new", expert, base=base, progress=False)
    model.add_task("new", expert, tolerance=0, progress=False)
    actual = model(input_ids=INPUTS, task="new").logits
    assert_same(actual, expert(input_ids=INPUTS).logits, rtol=1e-3, atol=1e-4)


def test_add_task_refuses_what_a_build_refuses(base):
    model = build(base, shift(base))
    expert = adapt(base, TYPES["lora"]())
    expert.base_model.disable_adapter_layers()
    with pytest.raises(CheckpointError, match=r"^expert 'new' is a PeftModel whose adapter is disabled in 'model\."):
        model.add_task("new", expert, progress=False)
    with pytest.raises(ConfigError, match="base= is for experts that are adapters; expert 'new' is not one"):
        model.add_task("new", shift(base), base=base, progress=False)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refuse(message: str, base: nn.Module, expert: PeftModel) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build(base, expert)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", TYPES)
def test_disabled_adapters(base, kind):
    expert = adapt(base, TYPES[kind](modules_to_save=["norm"]))
    message = r"^expert 'red' is a PeftModel whose adapter is disabled in '.*': call its enable_adapter_layers\(\)"
    with expert.disable_adapter():
        refuse(message, base, expert)
    check(base, expert)
    expert.get_base_model().model.norm.enable_adapters(False)
    refuse(message.replace(".*", "model.norm"), base, expert)


def test_several_active_adapters(base):
    expert = adapt(base, TYPES["lora"]())
    expert.add_adapter("other", TYPES["lora"](init_lora_weights=False))
    layer = expert.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_adapter(["default", "other"])
    refuse(r"active adapters in '.*0.self_attn.q_proj' are \['default', 'other'\]: expected exactly one", base, expert)
    expert.base_model.set_adapter(["default", "other"])
    refuse(r"active adapters are \['default', 'other'\]: expected exactly one; .*merge_and_unload\(\)", base, expert)


def test_parameters_merged_in_part():
    base = FAMILIES["mixtral"].make()
    expert = adapt(base, LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    next(module for module in expert.modules() if hasattr(module, "parameter_name")).merge()
    refuse(r"merged into parts of '.*experts' only: call its unmerge_adapter\(\)", base, expert)


def test_a_quantised_base(base):
    expert = adapt(base, TYPES["lora"]())
    layer = expert.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    refuse("a PeftModel on a quantised base, .*: save the adapter with its save_pretrained, and give", base, expert)


def test_variants_whose_weight_depends_on_the_input(base):
    expert = adapt(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3]))
    refuse("is a LoRA adapter with alora_invocation_tokens, which is not read", base, expert)


def test_tensors_without_numbers(base):
    expert = adapt(base, TYPES["lora"]())
    expert.get_base_model().model.layers[0].self_attn.q_proj.to("meta")
    refuse("q_proj.*' is on the meta device: it has no numbers", base, expert)


def test_only_the_module_that_is_read_is_copied(base, monkeypatch):
    source = open_source(adapt(base, TYPES["lora"]()), "expert 'red'", adapters=True)
    assert source.read("model.norm.weight").data_ptr() == source.model.model.norm.weight.data_ptr()
    copies = []
    monkeypatch.setattr(
        "retex_hf.checkpoints.peft_models.deepcopy",
        lambda module, memo: copies.append(module) or deepcopy(module, memo),
    )
    source.read("model.layers.1.mlp.down_proj.weight")
    assert copies == [source.wrappers["model.layers.1.mlp.down_proj"]]
