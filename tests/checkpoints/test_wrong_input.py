"""Wrong input: one clear sentence that names the task, the file or the tensor, and nothing is written."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import writers
from families import FAMILIES, OPEN_CLIP_VIT, TEXT
from helpers import TASKS, make_experts, perturb
from open_clip.model import CLIP
from safetensors.torch import load_file, save_file
from torch import nn

from retex_hf import CheckpointError, ConfigError, RetexConfig, RetexModel
from retex_hf.backends import openclip

QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture(scope="module")
def base() -> tf.BertModel:
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**TEXT)).eval()


@pytest.fixture(scope="module")
def experts(base) -> dict[str, nn.Module]:
    return make_experts(base)


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path, monkeypatch):
    elsewhere = tmp_path / "working directory"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    yield
    assert list(elsewhere.iterdir()) == []


def refuse(
    message: str, base: Any, experts: Any, error: type = CheckpointError, model_config: Any = None, **options
) -> None:
    config = RetexConfig(**options)
    with pytest.raises(error, match=message) as caught:
        RetexModel.from_experts(base, experts, config, progress=False, model_config=model_config)
    assert "\n" not in str(caught.value).strip()


def changed(model: nn.Module, **changes: Any) -> dict[str, Any]:
    """A state dict with some values replaced; None removes one. `__` stands for a dot."""
    tensors: dict[str, Any] = writers.tensors_of(model)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    return tensors


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_missing_tensor(base, experts):
    green = changed(experts["green"], pooler__dense__bias=None)
    refuse("^expert 'green' lacks 1 tensor.* 'pooler.dense.bias'", base, experts | {"green": green})


def test_missing_tensor_in_the_file_that_the_model_is_made_from(base, experts, tmp_path):
    path = writers.folder(experts["red"], tmp_path / "red")
    tensors = load_file(path / "model.safetensors")
    del tensors["pooler.dense.bias"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    refuse(r"^expert 'red' \(.*red\) lacks 1 tensor.* 'pooler.dense.bias'", base, experts | {"red": path})


def test_many_missing_tensors_are_counted_and_not_all_listed(base, experts):
    refuse("^expert 'blue' lacks 39 tensor.*'embeddings.word.* and 36 more", base, experts | {"blue": {}})


def test_extra_tensor(base, experts):
    blue = changed(experts["blue"], adapter__weight=torch.ones(2))
    refuse("^expert 'blue' has 1 tensor.* the model does not: 'adapter.weight'", base, experts | {"blue": blue})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [QUERY, "pooler.dense.bias"])
def test_not_finite_in_an_expert(base, experts, name, value):
    blue = writers.tensors_of(experts["blue"])
    blue[name].view(-1)[3] = value
    refuse(f"^expert 'blue': tensor '{name}' holds NaN or infinite", base, experts | {"blue": blue})


@pytest.mark.parametrize("merge", ["average", "ties", {"method": "task_arithmetic"}])
def test_not_finite_in_a_file(base, experts, merge, tmp_path):
    blue = perturb(base, 3)
    blue.pooler.dense.weight.data[2, 2] = float("nan")
    path = writers.sharded(blue, tmp_path / "blue")
    refuse(
        r"^expert 'blue' \(.*blue\): tensor 'pooler.dense.weight' holds", base, experts | {"blue": path}, merge=merge
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_in_the_base(base, experts, value):
    broken = perturb(base, 0, scale=0.0)
    broken.get_parameter(QUERY).data[0, 0] = value
    refuse(f"^the base: tensor '{QUERY}' holds NaN or infinite", broken, experts)


def test_not_finite_in_a_head_and_in_a_statistic(base):
    classifier = FAMILIES["bert-classifier"].make().eval()
    experts = make_experts(classifier)
    experts["green"].classifier.weight.data[0] = float("nan")
    refuse("^expert 'green': tensor 'classifier.weight' holds", classifier, experts)
    resnet = FAMILIES["resnet"].make().eval()
    experts = make_experts(resnet)
    statistic = "embedder.embedder.normalization.running_var"
    experts["green"].get_buffer(statistic)[0] = float("inf")
    refuse(f"^expert 'green': tensor '{statistic}' holds", resnet, experts)


@pytest.mark.parametrize(("value", "found"), [(1.5, "float"), ([1.0], "list"), (None, "NoneType")])
def test_values_that_are_not_tensors(base, experts, value, found):
    red = dict(experts["red"].state_dict()) | {"pooler.dense.bias": value}
    refuse(f"^expert 'red': 'pooler.dense.bias' must be a tensor, not a {found}", base, experts | {"red": red})


def test_names_that_are_not_strings(base, experts):
    refuse("^expert 'red': a tensor's name must be a string, not 7", base, experts | {"red": {7: torch.ones(1)}})


# ---- other models ----------------------------------------------------------------------------------------------------


def test_experts_of_two_classes(base, experts, tmp_path):
    other = tf.BertForTokenClassification(tf.BertConfig(**TEXT))
    message = "is a BertForTokenClassification, but expert 'red' is a BertModel: experts must share one architecture"
    refuse(f"^expert 'blue' {message}", base, experts | {"blue": other})
    path = writers.folder(other, tmp_path / "blue")
    refuse(rf"^expert 'blue' \(.*blue\) {message}", base, experts | {"blue": path})


def test_experts_of_two_libraries(base, experts):
    other = FAMILIES["open_clip-vit"].make()
    refuse("^expert 'blue' is a CLIP, but expert 'red' is a BertModel", base, experts | {"blue": other})


def test_another_hidden_size(base, experts):
    other = tf.BertModel(tf.BertConfig(**TEXT | {"hidden_size": 32}))
    message = r"tensor 'embeddings.word_embeddings.weight' has shape \(40, 32\), but the base has \(40, 16\)"
    refuse(f"^expert 'green': {message}", base, experts | {"green": other})
    refuse(r"^expert 'red': .*has shape \(40, 16\), but the base has \(40, 32\): another arch", other, experts)


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers_in_one_expert(base, experts, layers):
    other = tf.BertModel(tf.BertConfig(**TEXT | {"num_hidden_layers": layers}))
    what = "lacks 16 tensor.*'encoder.layer.1" if layers == 1 else "has 16 tensor.*'encoder.layer.2"
    refuse(f"^expert 'blue' {what}", base, experts | {"blue": other})


def test_more_layers_in_all_experts_than_in_the_base(base, experts):
    shallow = tf.BertModel(tf.BertConfig(**TEXT | {"num_hidden_layers": 1}))
    shallow.load_state_dict(base.state_dict(), strict=False)
    refuse("^the base lacks 'encoder.layer.1.* the experts have more layers than it", shallow, experts)


@pytest.mark.parametrize("family", ["gpt2", "vit", "open_clip-vit"])
def test_a_base_of_another_architecture(experts, family):
    refuse(r"^the base has only \d of the 39 tensors .*another architecture", FAMILIES[family].make(), experts)


@pytest.mark.parametrize("family", ["bert", "resnet", "open_clip-vit", "mixtral"])
def test_another_base_of_the_same_shapes(family):
    base, other = FAMILIES[family].make().eval(), FAMILIES[family].make().eval()
    experts = make_experts(base)
    options = {"model_config": FAMILIES[family].model_config, "progress": False}
    config = RetexConfig(rank=2)
    with pytest.raises(CheckpointError, match=r"^expert 'red' does not descend from the base: .*check_base=False"):
        RetexModel.from_experts(other, experts, config, **options)
    experts["blue"] = perturb(other, 3)
    with pytest.raises(CheckpointError, match=r"^expert 'blue' does not descend from the base"):
        RetexModel.from_experts(base, experts, config, **options)
    assert RetexModel.from_experts(base, experts, config, check_base=False, **options).tasks == TASKS


def test_nothing_says_which_model_it_is(base, experts):
    tensors = {task: expert.state_dict() for task, expert in experts.items()}
    refuse("^Bare tensors do not say which model they belong to", base.state_dict(), tensors)


# ---- files -----------------------------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("task", ["base", "red", "blue"])
def test_truncated_safetensors(base, experts, task, tmp_path):
    path = writers.folder(experts["blue"], tmp_path / task)
    truncate(path / "model.safetensors")
    message = rf"{task}/model\.safetensors is not a valid safetensors file"
    refuse(message, *((path, experts) if task == "base" else (base, experts | {task: path})))


def test_truncated_shard(base, experts, tmp_path):
    path = writers.sharded(experts["blue"], tmp_path / "blue")
    shard = sorted(path.glob("*.safetensors"))[1]
    truncate(shard)
    refuse(rf"{shard.name} is not a valid safetensors file", base, experts | {"blue": path})


def test_missing_shard(base, experts, tmp_path):
    path = writers.sharded(experts["blue"], tmp_path / "blue")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    refuse(rf"{shard.name} is missing, but model\.safetensors\.index\.json lists it", base, experts | {"blue": path})


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "is not a valid shard index"),
        ('{"weight_map": {}}', "is not a valid shard index"),
        ('{"weight_map": {"a": "../m.safetensors"}}', r"names '\.\./m\.safetensors', which is not a "),
        ('{"weight_map": {"a": "m.bin"}}', r"names 'm\.bin', which is not a \.safetensors file beside it"),
        ('{"weight_map": {"a": 3}}', r"names 3, which is not a \.safetensors file beside it"),
    ],
)
def test_broken_shard_index(base, experts, index, message, tmp_path):
    path = writers.sharded(experts["blue"], tmp_path / "blue")
    (path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    refuse(rf"model\.safetensors\.index\.json {message}", base, experts | {"blue": path})


@pytest.mark.parametrize("write", [writers.bin_folder, writers.legacy_bin_folder])
def test_truncated_bin(base, experts, write, tmp_path):
    path = write(experts["blue"], tmp_path / "blue")
    truncate(path / "pytorch_model.bin")
    message = r"blue/pytorch_model\.bin cannot be read as a file of plain tensors: ."
    refuse(message, base, experts | {"blue": path})


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x00" * 100])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors", ".pt"])
def test_a_file_of_something_else(base, experts, content, suffix, tmp_path):
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(content)
    message = "is not a valid safetensors file" if suffix == ".safetensors" else "cannot be read as a file of plain"
    refuse(rf"weights\{suffix} {message}", base, experts | {"blue": file})


def test_a_bin_file_without_names(base, experts, tmp_path):
    torch.save([torch.ones(2)], tmp_path / "list.bin")
    refuse(r"list\.bin holds a list, not named tensors", base, experts | {"blue": tmp_path / "list.bin"})
    torch.save({"epoch": 3, "weight": torch.ones(2)}, tmp_path / "mixed.bin")
    refuse(r"mixed\.bin\): 'epoch' must be a tensor, not a int", base, experts | {"blue": tmp_path / "mixed.bin"})


def test_unsupported_dtype(base, experts, tmp_path):
    save_file({"packed": torch.zeros(2, dtype=torch.uint32)}, tmp_path / "w.safetensors")
    message = r"w\.safetensors: tensor 'packed' has the unsupported dtype 'U32'"
    refuse(message, base, experts | {"blue": tmp_path / "w.safetensors"})


# ---- folders and configurations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [Path("nowhere"), Path("a/b"), Path("a/b/c"), "./nowhere", "/no/where", "local-dir:nowhere"], ids=str
)
def test_missing_folder(base, experts, spec):
    refuse("^expert 'blue': .* does not exist", base, experts | {"blue": spec})
    refuse("^the base: .* does not exist", spec, experts)


def test_neither_a_folder_nor_on_the_hub(base, experts):
    refuse("^the base: 'org/nowhere' is not a local path, and the Hub says: .+", "org/nowhere", experts)
    refuse("^expert 'red': 'org/nowhere' is not a local path, and the Hub says: .+", base, {"red": "org/nowhere/part"})
    refuse("^expert 'red': 'not an id' is neither an existing path nor a Hub id", base, {"red": "not an id"})


@pytest.mark.parametrize(("spec", "found"), [(None, "NoneType"), (3, "int"), (["a"], "list")])
def test_something_else_than_a_checkpoint(base, experts, spec, found):
    message = f"must be a folder, a file, a Hub id, a module or a state dict, not a {found}"
    refuse(f"^expert 'blue' {message}", base, experts | {"blue": spec})
    refuse(f"^the base {message}", spec, experts)


def test_folder_without_config(base, experts, tmp_path):
    path = writers.folder(experts["blue"], tmp_path / "blue")
    (path / "config.json").unlink()
    refuse("^expert 'blue': .*blue has neither config.json nor open_clip_config.json", base, experts | {"blue": path})


def test_folder_without_weights(base, experts, tmp_path):
    path = writers.folder(experts["blue"], tmp_path / "blue")
    (path / "model.safetensors").unlink()
    refuse("blue holds no weights: expected model.safetensors", base, experts | {"blue": path})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not valid JSON: Expecting property name"),
        ("[]", r"config\.json must hold a JSON object, not a list"),
        ('{"architectures": ["Nonesuch"]}', r"config\.json asks for 'Nonesuch', which is not a model class"),
        ('{"architectures": ["pipeline"]}', r"config\.json asks for 'pipeline', which is not a model class"),
        (
            '{"architectures": ["BertModel"], "model_type": "bert", "hidden_size": "x"}',
            "config.json cannot be read: .*hidden_size",
        ),
    ],
)
def test_unreadable_config(base, experts, text, message, tmp_path):
    path = writers.folder(experts["red"], tmp_path / "red")
    (path / "config.json").write_text(text, encoding="utf-8")
    refuse(f"red.*{message}", base, {"red": path})


def test_config_of_another_size_than_the_weights(base, experts, tmp_path):
    path = writers.folder(experts["red"], tmp_path / "red")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}), encoding="utf-8")
    message = r"red: tensor '.*intermediate.dense.bias' has shape \(24,\), but config.json asks for \(48,\)"
    refuse(message, base, {"red": path})


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "does not describe an OpenCLIP model")],
)
def test_unreadable_open_clip_config(text, message, tmp_path):
    family = FAMILIES["open_clip-vit"]
    base = family.make()
    path = writers.open_clip_folder(base, tmp_path / "red", family.model_config, "open_clip_model.safetensors")
    (path / "open_clip_config.json").write_text(text, encoding="utf-8")
    refuse(f"red.*{message}", base, {"red": path})


def test_open_clip_config_of_another_size_than_the_weights(tmp_path):
    family = FAMILIES["open_clip-vit"]
    base = family.make()
    config = family.model_config | {"embed_dim": 13}
    path = writers.open_clip_folder(base, tmp_path / "red", config, "open_clip_model.safetensors")
    refuse("red does not load as an OpenCLIP model: .*size mismatch for text_projection", base, {"red": path})


# ---- what the caller wrote -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [{}, [], None, "red", ["red"]])
def test_no_experts(base, tasks):
    refuse("^experts must be a non-empty dict of task name to checkpoint", base, tasks, error=ConfigError)


@pytest.mark.parametrize(
    "name", ["", " ", " red", "red ", 3, None, ("red",), "red\x1b[2J", "a\nb", "\u202eder", "x" * 201]
)
def test_bad_task_name(base, experts, name):
    message = "^A task name must be a non-empty string of at most 200 characters, without surrounding spaces "
    refuse(message, base, {name: experts["red"]}, error=ConfigError)


def test_the_merged_models_name_is_no_task(base, experts):
    message = "^A task cannot be called '__base__': in adapter_names that means the merged model.$"
    refuse(message, base, {"red": experts["red"], "__base__": experts["green"]}, error=ConfigError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooler__dense__bias": None}, " lacks tensor 'pooler.dense.bias'"),
        ({"pooler__dense__bias": torch.ones(3)}, r": tensor 'pooler.dense.bias' has shape \(3,\), not \(16,\)"),
        ({"pooler__dense__bias": torch.full((16,), float("nan"))}, ": tensor 'pooler.dense.bias' holds NaN"),
    ],
)
def test_a_finished_merge_that_does_not_fit(base, experts, change, message, tmp_path):
    file = tmp_path / "merged.safetensors"
    save_file(changed(base, **change), file)
    refuse(rf"^the merged checkpoint \(.*merged\.safetensors\){message}", base, experts, merge=str(file))


# ---- what experts must have in common --------------------------------------------------------------------------------


LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_parameters.rope_theta", {"rope_theta": 1e6}), ("rms_norm_eps", 1e-2), ("hidden_act", "gelu")],
)
def test_an_expert_that_computes_otherwise_is_refused(key, value, tmp_path):
    base = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    other = deepcopy(base)
    setattr(other.config, key.split(".")[0], {**other.config.rope_parameters, **value} if "." in key else value)
    message = f"expert 'blue'.* has {key}=.* in its configuration, and the other experts have"
    refuse(message, base, {"red": base, "blue": other})
    other.save_pretrained(tmp_path / "other")
    refuse(f"other.* has {key}=.* in its configuration", base, {"red": base, "blue": tmp_path / "other"})


def test_settings_of_training_and_of_labels_may_differ(tmp_path):
    base = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    other = deepcopy(base)
    other.config.attention_dropout, other.config.initializer_range, other.config.use_cache = 0.3, 0.5, False
    model = RetexModel.from_experts(base, {"red": base, "blue": other}, RetexConfig(rank=2))
    assert model.tasks == ["red", "blue"]


class Permuted(nn.Module):
    """A module with whole numbers in its state."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return self.linear(x)[:, self.order]


def test_experts_with_other_whole_numbers_are_refused():
    base, other = Permuted([0, 1, 2, 3]), Permuted([3, 2, 1, 0])
    other.load_state_dict({**base.state_dict(), "order": other.order})
    same = deepcopy(base)
    message = "expert 'blue'.*: tensor 'order' holds other integers than in .*expert 'red'"
    refuse(message, base, {"red": same, "blue": other})
    model = RetexModel.from_experts(base, {"red": same, "blue": deepcopy(same)}, RetexConfig(rank=2))
    with pytest.raises(CheckpointError, match="tensor 'order' holds other integers than in the merged model"):
        model.add_task("green", other)


class Activated(nn.Module):
    """A module that computes with more than its state."""

    def __init__(self, eps: float = 1e-5, act: type[nn.Module] = nn.ReLU, scale: float = 1.0, drop: float = 0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=eps), act(), nn.Dropout(drop))
        self.register_buffer("scale", torch.full((2,), scale), persistent=False)

    def forward(self, x):
        return self.layers(x) * self.scale[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 1.0}, r"module 'layers\.1' is a LayerNorm\(.*eps=1\.0.*, not \(.*eps=1e-05"),
        ({"act": nn.GELU}, r"module 'layers\.2' is a torch\..*GELU, not a torch\..*ReLU"),
        ({"scale": 2.0}, "buffer 'scale', which is not part of the state dict"),
    ],
)
def test_a_module_that_computes_otherwise_is_refused(change, message, tmp_path):
    base, other = Activated(), Activated(**change)
    other.load_state_dict(base.state_dict())
    experts = {"red": deepcopy(base), "blue": other}
    refuse(rf"expert 'blue'.*: {message}.*experts must compute alike", base, experts)
    with pytest.raises(CheckpointError, match=message):
        RetexModel.from_experts(base, experts, RetexConfig(rank=2), output_dir=tmp_path / "built")
    model = RetexModel.from_experts(base, {"red": base}, RetexConfig(rank=2), progress=False)
    with pytest.raises(CheckpointError, match=message):
        model.add_task("blue", other)


def test_modules_that_differ_in_training_only_are_taken():
    base, other = Activated(), Activated(drop=0.5)
    other.load_state_dict(base.state_dict())
    assert RetexModel.from_experts(base, {"red": base, "blue": other}, RetexConfig(rank=2)).tasks == ["red", "blue"]


def test_clip_with_another_activation_is_refused(tmp_path):
    plain, quick = (CLIP(**OPEN_CLIP_VIT, quick_gelu=quick) for quick in (False, True))
    quick.load_state_dict(plain.state_dict())
    message = r"module '.*' is a open_clip\..*QuickGELU, not a torch\..*GELU"
    refuse(f"expert 'blue'.*: {message}", plain, {"red": deepcopy(plain), "blue": quick}, model_config=OPEN_CLIP_VIT)
    refuse(rf"model_config does not make this model \({message}", quick, {"red": quick}, model_config=OPEN_CLIP_VIT)
    refuse(r"model_config does not make this model \(", plain, {"red": plain}, model_config="ViT-B-32")
    model = RetexModel.from_experts(plain, {"red": plain}, RetexConfig(rank=2), model_config=OPEN_CLIP_VIT)
    folder = tmp_path / "quick"
    openclip.describe(quick, OPEN_CLIP_VIT | {"quick_gelu": True}, None, None)
    folder.mkdir()
    openclip.save(quick, folder, "5GB")
    with pytest.raises(CheckpointError, match=rf"quick.*: {message}"):
        model.add_task("blue", folder)
