"""Untrusted files run no code, fetch nothing, and name nothing outside of their folder.

Each trial plants something that would leave a marker behind, and answers yes to every question on the keyboard.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as tf
from checkpoints import writers
from families import FAMILIES
from trust.subjects import TASKS, bert, make_artifact, make_tokenizer

from retex_hf import RetexConfig, RetexError, RetexModel, TrainingConfig
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.artifact.schema import seal
from retex_hf.checkpoints import manifest as recorded
from retex_hf.checkpoints import open_source
from retex_hf.checkpoints.tokenizer_files import copy_side_files
from retex_hf.data.datasets import load_inputs
from retex_hf.recovery import training as module

CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\ndef generate(*a, **k): pass\n"


class Opened:
    """Pickled, it creates a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """A base, an expert and an artifact, to be copied and spoilt."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("originals")
    base, experts = bert(make_tokenizer())
    writers.folder(base, folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    writers.folder(experts["red"], folder / "red")
    make_artifact(folder / "artifact")
    family = FAMILIES["open_clip-vit"]
    config = family.model_config
    writers.open_clip_folder(family.make(), folder / "open_clip", config, "open_clip_model.safetensors")
    return folder


@pytest.fixture
def place(originals, tmp_path, monkeypatch) -> Path:
    """A copy of them. Every question is answered yes; whoever tries to reach the network fails the test."""
    for folder in originals.iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    reached: list[Any] = []

    def refuse(self: socket.socket, address: Any) -> None:
        reached.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield tmp_path
    assert reached == []


@pytest.fixture
def marker(tmp_path) -> Iterator[Path]:
    """A file that must not be there at the end."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def build(place: Path, **config: Any) -> RetexModel:
    config = RetexConfig(rank=2, **config)
    return RetexModel.from_experts(place / "base", {"red": place / "red"}, config, progress=False, check_base=False)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def record_again(folder: Path) -> None:
    """What an attacker who changes an artifact does: the new files are the recorded ones."""
    path = folder / "retex_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["artifact"]["files"] = recorded.to_json(recorded.record(folder, values["artifact"]["files"]))
    values["artifact"]["seal"] = seal(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def refused(call: Callable[[], Any], *parts: str) -> str:
    """One sentence or two of ours, that names these."""
    with pytest.raises(RetexError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "trust_remote_code=True" not in message
    for part in parts:
        assert part in message
    return message


def test_the_markers_work(tmp_path):
    """Read without the safeguard, what is planted below runs."""
    torch.save({"x": Opened(tmp_path / "pickled")}, tmp_path / "file.bin")
    torch.load(tmp_path / "file.bin", weights_only=False)
    assert (tmp_path / "pickled").exists()
    exec(CODE.format(marker=str(tmp_path / "run")), {})
    assert (tmp_path / "run").exists()


# ---- pickles ---------------------------------------------------------------------------------------------------------


def plant(folder: Path, marker: Path, name: str = "pytorch_model.bin") -> None:
    """Weights that hold an object beside the tensors; the safe ones are taken away."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": torch.zeros(2), "evil": Opened(marker)}, folder / name)


@pytest.mark.parametrize("which", ["base", "red"])
def test_a_pickle_as_base_or_expert(place, marker, which):
    plant(place / which, marker)
    refused(partial(build, place), "pytorch_model.bin", "io.open, which could run code")


def test_a_pickle_as_adapter(place, marker):
    folder = place / "red"
    plant(folder, marker, "adapter_model.bin")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}', encoding="utf-8")
    refused(partial(build, place), "adapter_model.bin")


def test_a_pickle_as_finished_merge(place, marker):
    plant(shutil.copytree(place / "base", place / "merged"), marker)
    refused(partial(build, place, merge=str(place / "merged")), "pytorch_model.bin")


@pytest.mark.parametrize("name", ["open_clip_pytorch_model.bin", "model.pth", "evil.bin"])
def test_a_pickle_as_open_clip_checkpoint(place, marker, name):
    folder = place / "open_clip"
    plant(folder, marker, name)
    refused(lambda: RetexModel.from_experts(folder, {"red": folder}, progress=False), "open_clip")


@pytest.mark.parametrize("shards", [False, True])
def test_a_pickle_in_an_artifact(place, marker, shards):
    folder = place / "artifact"
    plant(folder, marker)
    if shards:
        index = {"weight_map": {"weight": "pytorch_model.bin"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for verify in (True, False):
        refused(lambda verify=verify: RetexModel.from_pretrained(folder, verify=verify), "artifact")


def test_a_pickle_in_the_hub_cache(place, marker):
    plant(place / "base", marker)
    writers.into_hub_cache(place / "base", place / "hub", "org/base", "a" * 40)
    refused(lambda: open_source("org/base", "the base", cache_dir=str(place / "hub")), "could run code")


def test_a_pickle_as_data(place, marker):
    torch.save({"x": Opened(marker)}, place / "data.npz")
    refused(lambda: load_inputs("red", place / "data.npz"), "data.npz")
    (place / "data").mkdir()
    torch.save({"x": Opened(marker)}, place / "data" / "train.pkl")
    refused(lambda: load_inputs("red", place / "data"), "data")


@pytest.mark.parametrize(
    "name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "scaler.pt", "custom_checkpoint_0.pkl"]
)
def test_a_pickle_in_the_state_of_a_training(place, marker, name, monkeypatch):
    options = {"steps": 4, "warmup_steps": 1, "checkpoint_every": 2, "checkpoint_dir": place / "run"}
    experts = {"red": place / "red", "blue": place / "base"}
    options = {"solver": "adam", "training": TrainingConfig(**options), "progress": False, "check_base": False}
    train = partial(RetexModel.from_experts, place / "base", experts, RetexConfig(rank=2), **options)
    save = module._Checkpoint.save

    def save_and_stop(self: Any, *arguments: Any) -> None:
        save(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Checkpoint, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train()
    monkeypatch.undo()
    (state,) = [file.parent for file in (place / "run").rglob("retex_progress.json")]
    assert not list(state.glob("custom_checkpoint*"))
    torch.save({"x": Opened(marker)}, state / name)
    if name in ("optimizer.bin", "custom_checkpoint_0.pkl"):
        refused(train, str(state), "cannot be resumed from")
    else:  # not read, or of no consequence: every step draws with a generator of its own
        train()


# ---- code of a checkpoint --------------------------------------------------------------------------------------------


def code(folder: Path, marker: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE.format(marker=str(marker)), encoding="utf-8")


@pytest.mark.parametrize("kind", ["known", "unknown", "no class"])
def test_a_config_with_code(place, marker, kind):
    """Where transformers has the class itself, the code is left alone; where not, the checkpoint is refused."""
    code(place / "base", marker, "evil.py")
    values = {"auto_map": {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}}
    values |= {
        "known": {},
        "unknown": {"model_type": "evil"},
        "no class": {"architectures": None, "model_type": "evil"},
    }[kind]
    change(place / "base" / "config.json", **values)
    if kind != "no class":
        build(place).save_pretrained(place / "new")
        assert not list((place / "new").glob("*.py"))
    else:
        shutil.copytree(place / "base", place / "red", dirs_exist_ok=True)
        refused(partial(build, place), "red")


def test_an_artifact_with_code(place, marker):
    folder = place / "artifact"
    code(folder, marker, "evil.py", "custom_generate/generate.py")
    change(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})
    record_again(folder)
    RetexModel.from_pretrained(folder)
    refused(lambda: RetexModel.from_pretrained(folder, trust_remote_code=True), "trust_remote_code is not supported")


def test_generation_code(tmp_path, marker, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    folder = make_artifact(tmp_path / "t5", "t5")
    code(folder, marker, "custom_generate/generate.py")
    model = RetexModel.from_pretrained(folder)
    model.generate(torch.tensor([[4, 5]]), task=TASKS[0], max_new_tokens=1)


def test_a_tokenizer_with_code(place, marker):
    folder = place / "artifact"
    code(folder, marker, "evil.py")
    model = RetexModel.from_pretrained(folder)
    values = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    change(folder / "tokenizer_config.json", **values)
    try:  # the class may be unknown; the vocabulary is still there
        load_preprocessor(folder, model.model)
    except RetexError as error:
        assert "\n" not in str(error)


def test_a_chat_template_is_rendered_in_a_sandbox(place, marker):
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "artifact")
    tokenizer.chat_template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch x') }}"
    )
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attn_implementation": "org/kernel"}, "asks for attn_implementation='org/kernel'"),
        ({"_attn_implementation": "kernels-community/flash-attn3"}, "kernels-community/flash-attn3"),
        ({"attn_implementation": {"": "sdpa", "text": "org/kernel:f"}}, "org/kernel:f"),
        ({"_attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ({"text_config": {"experts_implementation": "org/kernel"}}, "experts_implementation='org/kernel'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "has a quantization_config"),
        ({"backbone": "org/backbone"}, "asks for backbone='org/backbone'"),
        ({"backbone_config": {"architecture": "hf-hub:org/model"}}, "hf-hub:org/model"),
    ],
)
def test_a_config_that_would_fetch_something(place, marker, values, says):
    for folder in ("red", "artifact"):
        change(place / folder / "config.json", **values)
    record_again(place / "artifact")
    refused(partial(build, place), "red/config.json", says)
    for verify in (True, False):
        refused(
            lambda verify=verify: RetexModel.from_pretrained(place / "artifact", verify=verify), "config.json", says
        )


def test_an_adapter_beside_a_model(place, marker):
    """transformers would put it on the model, and look for its base."""
    for folder in ("red", "artifact"):
        settings = {"peft_type": "LORA", "base_model_name_or_path": "org/elsewhere", "r": 2}
        (place / folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        torch.save({"x": Opened(marker)}, place / folder / "adapter_model.bin")
    refused(partial(build, place), "adapter_config.json")
    for verify in (True, False):
        refused(
            lambda verify=verify: RetexModel.from_pretrained(place / "artifact", verify=verify), "adapter_config.json"
        )


def in_open_clip(place: Path, tower: str = "text_cfg", **values: Any) -> Callable[[], Any]:
    path = place / "open_clip" / "open_clip_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model_cfg"][tower] |= values
    path.write_text(json.dumps(config), encoding="utf-8")
    folder = path.parent
    return lambda: RetexModel.from_experts(folder, {"red": folder}, progress=False)


def test_an_open_clip_tokenizer_with_code(place, marker):
    folder = place / "open_clip"
    code(folder, marker, "evil.py")
    values = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    options = {"hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    refused(in_open_clip(place, **options), "open_clip_config.json", "tokenizer option 'trust_remote_code'")
    model = FAMILIES["open_clip-vit"].make()
    model.visual.preprocess_cfg = {"size": 32}
    refused(lambda: load_preprocessor(folder, model), "tokenizer option 'trust_remote_code'")


def test_the_tokenizer_of_open_clip_would_run_it(place, tmp_path):
    """Why that option is refused."""
    folder, ran = place / "open_clip", tmp_path / "ran"
    code(folder, ran, "evil.py")
    values = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    in_open_clip(place, hf_tokenizer_name="x", tokenizer_kwargs={"trust_remote_code": True})
    with pytest.raises(Exception, match="Evil"):
        open_clip.get_tokenizer(f"local-dir:{folder}")
    assert ran.exists()


@pytest.mark.parametrize(
    ("tower", "values", "says"),
    [
        (
            "text_cfg",
            {"hf_model_name": "org/tower"},
            "names the text tower 'org/tower', which is not in the local cache",
        ),
        ("text_cfg", {"hf_model_name": "../base"}, "which is not a Hub id"),
        ("vision_cfg", {"timm_model_name": "hf-hub:org/model"}, "timm_model_name='hf-hub:org/model'"),
        ("text_cfg", {"tokenizer_kwargs": {"bpe_path": "/etc/passwd"}}, "tokenizer option 'bpe_path'"),
        ("text_cfg", {"tokenizer_kwargs": [1]}, "tokenizer_kwargs must hold keys and values"),
    ],
)
def test_an_open_clip_config_that_would_fetch_something(place, marker, tower, values, says):
    refused(in_open_clip(place, tower, **values), "open_clip_config.json", says)


# ---- names and links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../red/model.safetensors", "/etc/passwd", "..", "", "a/../b.safetensors", "C:\\x.safetensors", "x\0.safetensors"],
)
@pytest.mark.parametrize("where", ["base", "red", "artifact"])
def test_names_in_an_index_stay_in_the_folder(place, where, name):
    folder = place / where
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    call = partial(RetexModel.from_pretrained, folder, verify=False) if where == "artifact" else partial(build, place)
    refused(call, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_out_of_a_checkpoint_are_refused(place, name):
    (place / "elsewhere").mkdir()
    shutil.move(place / "base" / name, place / "elsewhere" / name)
    (place / "base" / name).symlink_to(place / "elsewhere" / name)
    refused(partial(build, place), f"base/{name}", "is a link to", "put the file itself there")


def test_links_out_of_an_adapter_are_refused(place):
    folder = place / "red"
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").symlink_to("/etc/hostname")
    refused(partial(build, place), "is a link to")


def test_links_within_a_checkpoint_and_of_the_cache_are_not(place):
    (place / "red" / "model.safetensors").rename(place / "red" / "weights")
    (place / "red" / "model.safetensors").symlink_to("weights")
    build(place)
    writers.into_hub_cache(place / "base", place / "hub", "org/base", "a" * 40)
    assert open_source("org/base", "the base", cache_dir=str(place / "hub")).infos


def test_no_foreign_file_and_no_code_is_copied_beside_a_model(place, marker):
    """What a link names would be published with the next push."""
    source, target = place / "base", place / "new"
    target.mkdir()
    code(source, marker, "tokenizer_evil.py")
    (source / "chat_template.jinja").symlink_to("/etc/hostname")
    refused(lambda: copy_side_files(source, target), "chat_template.jinja is a link to")
    assert list(target.iterdir()) == []
    (source / "chat_template.jinja").unlink()
    (source / "additional_chat_templates").symlink_to("/etc")
    copy_side_files(source, target)
    assert sorted(file.name for file in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_linked_folder_of_side_files_is_refused(place):
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "secret.jinja").write_text("x", encoding="utf-8")
    (place / "base" / "additional_chat_templates").symlink_to(place / "elsewhere")
    refused(lambda: copy_side_files(place / "base", place / "new"), "secret.jinja is a link to")


@pytest.mark.parametrize("name", ["README.md", "figures/losses.png"])
def test_no_foreign_file_is_taken_for_a_card_or_a_figure(place, name):
    """Cards and figures go along with what is saved, and with what is pushed."""
    (place / "secret").write_text("secret", encoding="utf-8")
    linked = place / "artifact" / name
    linked.parent.mkdir(exist_ok=True)
    linked.unlink(missing_ok=True)
    linked.symlink_to(place / "secret")
    model = RetexModel.from_pretrained(place / "artifact")
    refused(lambda: model.save_pretrained(place / "new"), f"{name} is a link to")
    assert not (place / "new").exists()


def test_a_prompt_asks_for_columns_only(tmp_path):
    """An untrusted recipe may hold a prompt: it reaches no attributes, and makes no giant texts."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "{b}"}\n', encoding="utf-8")
    read = partial(load_inputs, "red", tmp_path / "train.jsonl")
    assert read(input_column="say {text}!") == ["say a!", "say {b}!"]
    assert read(input_column="{text}{text.__class__}{text:>999999999999}") == [
        "a{text.__class__}{text:>999999999999}",
        "{b}{text.__class__}{text:>999999999999}",
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank_pattern": {"(?=a)b": 2}}, "'(?=a)b', which has a group that is not a plain one: expected names"),
        ({"rank_pattern": {"(.*.*.*.*.*x": 2}}, "expected names"),
        ({"alpha_pattern": {"(": 2}}, "expected names"),
        ({"rank_pattern": {"a": "x"}}, "the value 'x', expected a whole number above 0"),
        ({"rank_pattern": [1]}, "rank_pattern of its configuration must be names and numbers"),
        ({"r": "2"}, "r of its configuration must be a whole number above 0, and at most 2147483648, not '2'"),
        ({"auto_mapping": [1]}, "auto_mapping of its configuration must be keys and values"),
        ({"task_type": ["x"]}, "task_type of its configuration must be a text"),
    ],
)
def test_settings_of_an_adapter_are_what_peft_writes(place, settings, says):
    folder = place / "red"
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 2} | settings
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    refused(partial(build, place), "red", says)


def test_a_recipe_writes_where_it_is_told(place, monkeypatch):
    """Whoever builds from an untrusted recipe reads what it names, and writes to the folder of the flag only."""
    from retex_hf.cli import main

    recipe = {"base": str(place / "base"), "experts": {"red": str(place / "red")}, "check_base": False}
    recipe["output_dir"] = str(place / "planted")
    (place / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # which is YAML too
    before = {path for path in place.rglob("*") if path.is_file()}
    assert main(["build", str(place / "recipe.yaml"), "--output-dir", str(place / "mine")]) == 0
    new = {path.relative_to(place).parts[0] for path in place.rglob("*") if path.is_file() and path not in before}
    assert new == {"mine"}
    assert not os.path.exists(place / "planted")
