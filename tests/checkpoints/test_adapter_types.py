"""An adapter of any type that changes weights, saved by peft, is read as what peft's `merge_and_unload` makes of it."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from families import FAMILIES, LLM, TEXT, VISION
from helpers import assert_same, edit_json
from peft import PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.boft import layer as boft_layer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.backends import library_of
from retex_hf.checkpoints import align_source, open_source
from retex_hf.checkpoints.quantized import METHODS
from retex_hf.checkpoints.tuners import JOINT, REFUSED, TUNERS
from retex_hf.errors import CheckpointError


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def vit() -> nn.Module:
    return tf.ViTModel(tf.ViTConfig(**VISION))


def resnet() -> nn.Module:
    return FAMILIES["resnet"].make()


MODELS = {
    "bert": lambda: FAMILIES["bert"].make(),
    "gpt2": lambda: FAMILIES["gpt2"].make(),
    "t5": lambda: FAMILIES["t5"].make(),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLM, tie_word_embeddings=False)),
    "vit": vit,
    "resnet": resnet,
}
# The linear layers of each, of different shapes.
TARGETS = {
    "bert": ["query", "intermediate.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "t5": ["q", "wo"],
    "llama": ["q_proj", "down_proj"],
    "vit": ["q_proj", "up_proj", "fc1", "query", "intermediate.dense"],
}


def adapt(base: nn.Module, kind: str, seed: int = 0, **options: Any) -> PeftModel:
    """A model with an adapter whose numbers all differ from those that it began with."""
    torch.manual_seed(seed)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**options)
    model = get_peft_model(deepcopy(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def merged(base: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What peft makes of a folder."""
    torch.manual_seed(99)  # another state than the one that the adapter was made with
    return PeftModel.from_pretrained(deepcopy(base), folder).merge_and_unload().state_dict()


def read(base: nn.Module, expert: Any) -> dict[str, Tensor]:
    """What is read of it, tensor by tensor."""
    library, model = library_of(base), deepcopy(base).to("meta")
    model.tie_weights()
    below, _ = library.align(base, open_source(base, "the base"))
    entries, unexpected = align_source(library, model, open_source(expert, "expert 'red'", adapters=True), below)
    assert not unexpected
    return {name: entry() for name, (info, entry) in entries.items()}


def check(base: nn.Module, folder: Path, changed: int = 1, **tolerances: float) -> dict[str, Tensor]:
    expected, actual, before = merged(base, folder), read(base, folder), base.state_dict()
    different = [name for name in expected if not torch.equal(expected[name], before[name])]
    assert len(different) >= changed
    assert actual.keys() == expected.keys()
    assert_same(actual, expected, **{"rtol": 1e-5, "atol": 1e-6} | tolerances)
    return actual


# Per type: options, and the models whose layers peft takes.
LINEAR = ("bert",)
BOTH = ("llama", "gpt2")
ALL = (*LINEAR, *BOTH, "t5", "vit")
TYPES: dict[str, list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    "ADALORA": [({"init_r": 3, "target_r": 2, "lora_alpha": 6, "total_step": 10}, BOTH)],
    "ADAMSS": [({"r": 8, "num_subspaces": 2}, ("bert",))],
    "BEFT": [({}, ("bert",))],
    "BOFT": [
        ({"boft_block_size": 4, "bias": "boft_only"}, LINEAR),
        ({"boft_block_size": 4, "boft_n_butterfly_factor": 2}, ("bert",)),
    ],
    "C3A": [({"block_size": 4, "block_size_pattern": {"query": 8}}, LINEAR)],
    "DEFT": [({"r": 3}, BOTH), ({"r": 3, "decomposition_method": "qr", "para": True, "alpha": 2.0}, ("bert",))],
    "DELORA": [({"r": 3, "rank_pattern": {"layer.0.*query": 2}, "lambda_pattern": {"intermediate.dense": 7}}, LINEAR)],
    "FOURIERFT": [({"n_frequency": 20, "scaling": 15.0, "n_frequency_pattern": {"query": 30}}, BOTH)],
    "GLORA": [
        ({"r": 3}, ("bert", "vit")),
        ({"r": 3, "config_A_B": "vector", "config_C": "none", "config_D_E": "none"}, ("llama",)),
    ],
    "GRALORA": [({"r": 4, "gralora_k": 2, "hybrid_r": 2}, BOTH)],
    "HIRA": [({"r": 3}, BOTH)],
    "HRA": [({"r": 2}, LINEAR), ({"r": 2, "apply_GS": True}, ("bert",))],
    "LOHA": [
        ({"r": 3, "alpha": 5, "rank_pattern": {"query": 2}, "alpha_pattern": {"layer.1.*": 9}}, ("bert", "t5", "vit"))
    ],
    "LOKR": [({"r": 3, "alpha": 5}, LINEAR), ({"r": 1, "decompose_both": True, "decompose_factor": 4}, ("bert",))],
    "MISS": [
        ({"r": 4}, LINEAR),
        ({"r": 4, "init_weights": "bat"}, ("bert",)),
        ({"r": 4, "init_weights": "mini", "mini_r": 4}, ("bert",)),
    ],
    "OFT": [
        ({"oft_block_size": 4}, LINEAR),
        ({"r": 2, "oft_block_size": 0, "coft": True, "eps": 0.1, "block_share": True}, ("bert",)),
        ({"oft_block_size": 4, "use_cayley_neumann": False}, ("bert",)),
    ],
    "OSF": [({"effective_rank": 3}, LINEAR)],
    "PEANUT": [({"r": 3, "scaling": 2.0}, LINEAR), ({"r": 3, "depth": 2, "act_fn": "tanh"}, ("bert",))],
    "PSOFT": [
        ({"r": 4}, LINEAR),
        ({"r": 4, "ab_svd_init": "pissa_init", "psoft_alpha": 8, "use_cayley_neumann": True}, ("bert",)),
    ],
    "PVERA": [({"r": 3}, BOTH), ({"r": 3, "save_projection": False, "projection_prng_key": 7}, ("bert",))],
    "RANDLORA": [
        ({"r": 3, "randlora_alpha": 6}, BOTH),
        ({"r": 3, "save_projection": False, "sparse": True}, ("bert", "gpt2")),
        ({"r": 3, "save_projection": False, "very_sparse": True}, ("bert",)),
    ],
    "ROAD": [
        ({"group_size": 4}, LINEAR),
        ({"variant": "road_2", "group_size": 4}, ("bert",)),
        ({"variant": "road_4", "group_size": 4}, ("bert",)),
    ],
    "SHIRA": [({"r": 2}, LINEAR)],
    "SUPERTUNING": [({"sparsity": 0.9}, LINEAR)],
    "TINYLORA": [({"r": 2, "u": 4}, BOTH), ({"r": 2, "u": 4, "weight_tying": 0.5}, ("bert",))],
    "VBLORA": [
        ({"r": 2, "num_vectors": 6, "vector_length": 4}, BOTH),
        ({"r": 2, "num_vectors": 6, "vector_length": 4, "save_only_topk_weights": True}, ("bert",)),
    ],
    "VERA": [
        ({"r": 3}, ALL),
        ({"r": 3, "save_projection": False, "projection_prng_key": 7, "bias": "all"}, ("bert", "gpt2")),
    ],
    "WAVEFT": [
        ({"n_frequency": 20, "n_frequency_pattern": {"query": 30}}, BOTH),
        ({"n_frequency": 20, "wavelet_family": "db2"}, ("bert",)),
        ({"n_frequency": 20, "use_idwt": False}, ("bert",)),
    ],
}
CASES = [
    pytest.param(kind, model, options, id=f"{kind}-{model}-{number}")
    for kind, variants in TYPES.items()
    for number, (options, models) in enumerate(variants)
    for model in models
]


@pytest.mark.parametrize(("kind", "model", "options"), CASES)
def test_linear_layers(kind, model, options, tmp_path):
    base = MODELS[model]()
    adapter = adapt(base, kind, target_modules=TARGETS[model], **options)
    adapter.save_pretrained(tmp_path)
    expected = check(base, tmp_path, changed=2)
    # In memory it is read without its configuration, off its own layers.
    assert_same(read(base, adapter), expected, rtol=1e-5, atol=1e-6)


LORA = {
    "DoRA": {"r": 3, "lora_alpha": 5, "use_dora": True, "rank_pattern": {"query": 2}, "use_rslora": True},
    "PiSSA": {"r": 3, "init_lora_weights": "pissa"},
    "OLoRA": {"r": 3, "init_lora_weights": "olora"},
    "MiCA": {"r": 3, "init_lora_weights": "mica"},
}


# peft's OLoRA does not take a Conv1D.
@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name in LORA for model in ("bert", "gpt2") if (name, model) != ("OLoRA", "gpt2")],
)
def test_variants_of_lora(name, model, tmp_path):
    """PiSSA and OLoRA take their first factors out of the base: peft does so again from the base that it is given."""
    base = MODELS[model]()
    adapter = adapt(base, "LORA", target_modules=TARGETS[model], **LORA[name])
    adapter.save_pretrained(tmp_path)
    actual = check(base, tmp_path, changed=2)
    # And that is the model that was trained, which changed its own copy of the base.
    assert_same(actual, adapter.merge_and_unload().state_dict(), rtol=1e-4, atol=1e-5)


def test_pissa_that_peft_converted(tmp_path):
    """Saved as the difference to the base, it is an ordinary LoRA adapter of twice the rank."""
    base = MODELS["bert"]()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, init_lora_weights="pissa", target_modules=["query"])
    model = get_peft_model(deepcopy(base), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "begun")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=tmp_path / "begun")
    settings = json.loads((tmp_path / "plain" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["init_lora_weights"], settings["r"]) == (True, 6)
    actual = check(base, tmp_path / "plain")
    assert_same(actual, model.merge_and_unload().state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["bert", "gpt2", "t5", "vit"])
def test_ia3(model, tmp_path):
    """Feed-forward modules are scaled by their inputs, others by their outputs, with their biases."""
    base = MODELS[model]()
    last = TARGETS[model][-1]
    adapt(base, "IA3", target_modules=TARGETS[model], feedforward_modules=[last]).save_pretrained(tmp_path)
    check(base, tmp_path, changed=2)
    edit_json(
        tmp_path / "adapter_config.json",
        feedforward_modules=f".*{last}",
        target_modules=f".*({'|'.join(TARGETS[model])})",
    )
    check(base, tmp_path, changed=2)


@pytest.mark.parametrize(
    ("model", "targets"), [("bert", ["LayerNorm"]), ("t5", ["layer_norm"]), ("llama", ["input_layernorm", "norm"])]
)
def test_norms(model, targets, tmp_path):
    base = MODELS[model]()
    adapt(base, "LN_TUNING", target_modules=targets).save_pretrained(tmp_path)
    check(base, tmp_path, changed=3)


CONVOLUTIONS = {
    "ADALORA": {"init_r": 3, "target_r": 2, "total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "HIRA": {"r": 3},
    "HRA": {"r": 2},
    "LOHA": {"r": 3, "use_effective_conv2d": True},
    "LOKR": {"r": 2, "use_effective_conv2d": True},
    "OFT": {"oft_block_size": 4},
    "IA3": {"feedforward_modules": []},
    "LORA": {"r": 2, "use_dora": True},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(kind, tmp_path):
    base = MODELS["resnet"]().eval()
    targets = ["layer.0.convolution"]
    adapt(base, kind, target_modules=targets, **CONVOLUTIONS[kind]).save_pretrained(tmp_path)
    check(base, tmp_path, atol=1e-5)


EMBEDDINGS = {
    "HIRA": {"r": 3},
    "LORA": {"r": 3, "use_dora": True},
    "OFT": {"oft_block_size": 4},
    "TINYLORA": {"r": 2, "u": 4},
    "TRAINABLE_TOKENS": {"token_indices": [3, 7, 11]},
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_embeddings(kind, tmp_path):
    base = MODELS["llama"]()
    adapt(base, kind, target_modules=["embed_tokens"], **EMBEDDINGS[kind]).save_pretrained(tmp_path)
    check(base, tmp_path)


@pytest.mark.parametrize("kind", ["TRAINABLE_TOKENS", "LORA"])
def test_tokens_of_an_embedding_that_is_the_output_layer_too(kind, tmp_path):
    base = FAMILIES["llama-tied"].make()
    options = (
        {"token_indices": [3, 7]}
        if kind != "LORA"
        else {"trainable_token_indices": [3, 7], "target_modules": ["q_proj"]}
    )
    adapt(base, kind, **options).save_pretrained(tmp_path, save_embedding_layers=False)
    actual = check(base, tmp_path)
    assert torch.equal(actual["lm_head.weight"], actual["model.embed_tokens.weight"])
    assert not torch.equal(actual["lm_head.weight"][7], base.lm_head.weight[7])
    assert torch.equal(actual["lm_head.weight"][8], base.lm_head.weight[8])


def test_ranks_that_adalora_gave_up(tmp_path):
    """peft keeps fewer ranks, and divides by the number that it began with."""
    base = MODELS["bert"]()
    model = adapt(base, "ADALORA", target_modules=["query"], init_r=4, target_r=2, total_step=10, tfinal=2)
    name = "encoder.layer.{}.attention.self.query.lora_E"
    pattern = {name.format(0): [True, False, True, True], name.format(1): [False, False, False, True]}
    model.base_model.resize_modules_by_rank_pattern(pattern, "default")
    model.peft_config["default"].rank_pattern = pattern
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")[f"base_model.model.{name.format(1)}"].shape == (1, 1)
    check(base, tmp_path, changed=2)


def test_build(tmp_path):
    """From adapters of three types to experts that are recovered, in memory and to disk, of a class with a head."""
    base = MODELS["bert"]()
    classifier = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3))
    classifier.bert.load_state_dict(base.state_dict())
    options = {"target_modules": ["query", "intermediate.dense"], "task_type": "SEQ_CLS"}
    adapters = {
        "loha": adapt(classifier, "LOHA", r=3, **options),
        "vera": adapt(classifier, "VERA", r=3, **options),
        "dora": adapt(classifier, "LORA", r=3, use_dora=True, **options),
    }
    for task, adapter in adapters.items():
        adapter.save_pretrained(tmp_path / task)
    folders = {task: tmp_path / task for task in adapters}
    full = {task: deepcopy(adapter).merge_and_unload() for task, adapter in adapters.items()}
    config = RetexConfig(rank="full")
    expected = RetexModel.from_experts(base, full, config, progress=False)
    for experts, options in ((folders, {"output_dir": tmp_path / "retex"}), (adapters, {})):
        actual = RetexModel.from_experts(base, experts, config, progress=False, **options)
        assert [entry["adapter"] for entry in actual.retex_config.experts.values()] == ["loha", "vera", "lora"]
        for task in adapters:
            assert_same(actual.recover(task), expected.recover(task), rtol=1e-4, atol=1e-5)


def test_base_in_half_precision(tmp_path):
    """Merged in float32 and rounded once."""
    base = MODELS["llama"]()
    adapt(base, "LOHA", target_modules=["q_proj"], r=3).save_pretrained(tmp_path)
    half = deepcopy(base).bfloat16()
    expected = read(deepcopy(half).float(), tmp_path)
    assert_same(read(half, tmp_path), {name: tensor.bfloat16() for name, tensor in expected.items()}, exact=True)


def test_the_state_of_chance_is_left_alone(tmp_path):
    base = MODELS["bert"]()
    adapt(base, "VERA", target_modules=["query"], r=3, save_projection=False).save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    read(base, tmp_path)
    assert torch.equal(torch.rand(3), expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_every_type_of_peft_is_read_or_refused():
    known = {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert known == TUNERS.keys() | REFUSED.keys() | JOINT.keys()
    assert not TUNERS.keys() & (REFUSED.keys() | JOINT.keys())


def refuse(message: str, base: nn.Module, expert: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(base, expert)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "PREFIX_TUNING",
            "PREFIX_TUNING, which puts learned tokens before the input and changes no weight: it cannot be",
        ),
        ("XLORA", "XLORA, which mixes several adapters for every input"),
        ("FROD", "FROD, which derives its tensors from many modules at once: merge it with peft's"),
        ("BONE", "'BONE', which is not known here: merge it with peft's"),
        (["LORA"], "which is not known here"),
        (None, "None, which is not known here"),
    ],
)
def test_types_that_are_refused(kind, message, tmp_path):
    base = MODELS["bert"]()
    adapt(base, "LOHA", target_modules=["query"], r=3).save_pretrained(tmp_path)
    edit_json(tmp_path / "adapter_config.json", peft_type=kind)
    refuse(f"^expert 'red' .* is a PEFT adapter of type .*{message}", base, tmp_path)


@pytest.mark.parametrize("begun", ["pissa_niter_4", "corda", "loftq", "lora_ga", 1, ["pissa"]])
def test_initialisations_that_are_refused(begun, tmp_path):
    base = MODELS["bert"]()
    adapt(base, "LORA", target_modules=["query"], r=3).save_pretrained(tmp_path)
    edit_json(tmp_path / "adapter_config.json", init_lora_weights=begun)
    refuse(
        "with init_lora_weights=.*, for which the base was changed in a way that its files do not record",
        base,
        tmp_path,
    )


@pytest.mark.parametrize(
    ("kind", "options", "settings", "message"),
    [
        ("LOHA", {"r": 3}, {"r": 4}, "has a 'hada_w1_.' of shape .* for it, but its configuration asks for"),
        (
            "LOHA",
            {"r": 3},
            {"r": 2**40},
            "r of its configuration is 1099511627776, but .*query' has the shape .16, 16.: exp",
        ),
        ("LOHA", {"r": 3}, {"r": "3"}, "r of its configuration must be a whole number above 0, not '3'"),
        ("LOHA", {"r": 3}, {"alpha": float("inf")}, "alpha of its configuration must be a number of at most"),
        (
            "LOHA",
            {"r": 3},
            {"rank_pattern": {"(?i)x": 3}},
            "rank_pattern of its configuration has .* not a plain one",
        ),
        ("LOHA", {"r": 3}, {"target_modules": ["key"]}, "but its configuration does not adapt that module"),
        ("LOHA", {"r": 3}, {"bias": "lora_only"}, "bias of its configuration must be one of none, all, loha_only"),
        ("C3A", {"block_size": 4}, {"block_size": 5}, "adapts .*query', but does not fit it: "),
        ("FOURIERFT", {"n_frequency": 9}, {"n_frequency": 10**12}, "n_frequency of .* expected 256 at most"),
        ("FOURIERFT", {"n_frequency": 9}, {"n_frequency_pattern": {"a|query": 9}}, "has 'a.query', a choice"),
        (
            "WAVEFT",
            {"n_frequency": 9},
            {"wavelet_family": "../x"},
            "wavelet_family of its configuration must be one of",
        ),
        (
            "WAVEFT",
            {"n_frequency": 9},
            {"proportional_parameters": True},
            "proportional_parameters .* must be left out",
        ),
        (
            "VERA",
            {"r": 3, "save_projection": False},
            {"save_projection": True},
            "lacks 'vera_A', which its modules share",
        ),
        (
            "VERA",
            {"r": 3, "save_projection": False},
            {"r": 4},
            "vera_lambda_d' of shape .3,. for it, but .* asks for .4,.",
        ),
        ("VBLORA", {"num_vectors": 6, "vector_length": 4}, {"num_vectors": 2**24}, "has a vector bank of shape .6, 4."),
        (
            "OSF",
            {"effective_rank": 3},
            {"rank_pattern": {"(a+)+": 3}},
            "rank_pattern .* must be left out, because it is not",
        ),
        ("TRAINABLE_TOKENS", {"token_indices": [3]}, {"token_indices": [400]}, "does not fit it: index 400 is out of"),
        (
            "MISS",
            {"r": 4},
            {"init_weights": "x"},
            "init_weights of its configuration must be one of True, False, bat, mini",
        ),
    ],
)
def test_settings_that_are_refused(kind, options, settings, message, tmp_path):
    base = MODELS["bert"]()
    target = "word_embeddings" if kind == "TRAINABLE_TOKENS" else "query"
    adapt(base, kind, target_modules=[target], **options).save_pretrained(tmp_path)
    edit_json(tmp_path / "adapter_config.json", **settings)
    refuse(f"^expert 'red' .*{message}", base, tmp_path)


QUERY = "base_model.model.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("kind", "options", "part", "tensor", "message"),
    [
        (
            "LOHA",
            {"r": 3},
            "hada_w1_a",
            None,
            "adapts 'encoder.layer.0.attention.self.query', but lacks 'hada_w1_a' of it",
        ),
        (
            "LOHA",
            {"r": 3},
            "hada_w9",
            torch.ones(2),
            "has a 'hada_w9' for it, which peft does not make for these settings",
        ),
        ("LOHA", {"r": 3}, "hada_w1_a", torch.ones(16, 3).int(), "dtype torch.int32, expected floating point"),
        (
            "SHIRA",
            {"r": 2},
            "shira_indices",
            torch.full((2, 64), 16).int(),
            "has 'shira_indices' that point outside of its",
        ),
        (
            "SHIRA",
            {"r": 2},
            "shira_indices",
            torch.full((2, 64), -1).int(),
            "has 'shira_indices' that point outside of its",
        ),
        ("SUPERTUNING", {}, "supertuning_indices", torch.tensor([5, 999]).int(), "that point outside of its weight"),
    ],
)
def test_tensors_that_are_refused(kind, options, part, tensor, message, tmp_path):
    base = MODELS["bert"]()
    adapt(base, kind, target_modules=["query"], **options).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file) | {f"{QUERY}.{part}": tensor}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    refuse(message, base, tmp_path)


def test_one_module_is_read_at_a_time(tmp_path, monkeypatch):
    """A tensor costs the base's and the adapter's tensors of its own module."""
    base = MODELS["bert"]()
    adapt(base, "LOHA", target_modules=["query", "dense"], r=3).save_pretrained(tmp_path)
    library = library_of(base)
    source, below = open_source(tmp_path, "red", adapters=True), library.align(base, open_source(base, "the base"))[0]
    read_of_base: list[str] = []
    watched = {
        name: (info, lambda name=name, entry=entry: read_of_base.append(name) or entry())
        for name, (info, entry) in below.items()
    }
    read_of_adapter: list[str] = []
    entries, _ = align_source(library, base, source, watched)
    monkeypatch.setattr(
        source.tensors, "read", lambda name, r=source.tensors.read: read_of_adapter.append(name) or r(name)
    )
    assert not read_of_base
    module = "encoder.layer.1.attention.self.query"
    entries[f"{module}.weight"][1]()
    assert set(read_of_base) == {f"{module}.weight", f"{module}.bias"}
    assert len(read_of_adapter) == 4
    assert all(name.startswith(f"base_model.model.{module}.") for name in read_of_adapter)


def test_a_projection_that_depends_on_a_module_that_is_missing(tmp_path):
    base = MODELS["bert"]()
    options = {"target_modules": ["query", "intermediate.dense"], "r": 3, "save_projection": False}
    adapt(base, "VERA", **options).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layer.1.intermediate" not in name}, file)
    refuse("lacks tensors of 'encoder.layer.1.intermediate.dense', which its configuration adapts", base, tmp_path)


def test_no_compiler_is_run_for_boft(tmp_path, monkeypatch):
    base = MODELS["bert"]()
    adapt(base, "BOFT", target_modules=["query"], boft_block_size=4).save_pretrained(tmp_path)
    runs: list[Any] = []
    monkeypatch.setattr(boft_layer, "_FBD_CUDA", None)
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda **options: runs.append(options))
    read(base, tmp_path)
    assert not runs
    assert boft_layer._FBD_CUDA is None
    file = tmp_path / "adapter_model.safetensors"
    tensors = {
        name: torch.cat([tensor, tensor]) if "boft_R" in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    refuse("has a 'boft_R' of shape .2, 4, 4, 4. for it, but its configuration asks for .1, 4, 4, 4.", base, tmp_path)


def test_the_documents_name_every_type():
    text = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    read = {name for row in rows if "| yes |" in row for name in row.split("|")[1].strip().replace("`", "").split(", ")}
    refused = {
        name for row in rows if "| no |" in row for name in row.split("|")[1].strip().replace("`", "").split(", ")
    }
    assert TUNERS.keys() <= read
    assert REFUSED.keys() | JOINT.keys() <= refused
    assert all(f"`{method}`" in text for method in METHODS)
