"""The folder on disk: whole or not at all, and checked before it is used."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from families import FAMILIES, TEXT, tokens
from helpers import TASKS, assert_same, make_experts, perturb
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)
from trust.mutations import reseal

from retex_hf import ArtifactError, RetexConfig, RetexModel
from retex_hf.artifact import writing
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.utils import atomic_folder

WIDTHS = {"red": 2, "green": 5, "blue": 3}


def make_classifier(rank: int | str = 3, **options) -> RetexModel:
    """BERT experts with heads of different widths over a headless base."""
    torch.manual_seed(0)
    base = BertModel(BertConfig(**TEXT)).eval()
    experts = {}
    for seed, (task, width) in enumerate(WIDTHS.items(), start=1):
        names = {index: f"{task}-{index}" for index in range(width)}
        expert = BertForSequenceClassification(BertConfig(**TEXT, id2label=names)).eval()
        expert.bert.load_state_dict(perturb(base, seed).state_dict())
        experts[task] = expert
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=rank, **options), progress=False)
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    return model


@pytest.fixture
def model() -> RetexModel:
    return make_classifier()


@pytest.fixture
def folder(model: RetexModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "artifact")
    return tmp_path / "artifact"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def edit_config(folder: Path, change) -> None:
    path = folder / "retex_config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    if "artifact" in values:
        reseal(folder)


def test_files_are_those_of_the_design(folder):
    assert names(folder) == {
        "config.json", "model.safetensors", "retex_config.json", "retex_recovery.safetensors",
        "retex_signatures.safetensors", "retex_heads.safetensors", "README.md",
    }  # fmt: skip


@torch.no_grad()
def test_plain_load_is_the_merged_body_with_the_first_head(model, folder):
    plain, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert plain.config.id2label == {0: "red-0", 1: "red-1"}
    inputs = tokens(4)
    with model.disable_adapter():
        assert_same(plain.eval()(**inputs), model(**inputs), exact=True)
        assert_same(plain(**inputs), model(**inputs, task="red"), exact=True)


@torch.no_grad()
def test_heads_and_labels_survive(model, folder):
    loaded = RetexModel.from_pretrained(folder)
    inputs = tokens(4)
    for task, width in WIDTHS.items():
        assert loaded(**inputs, task=task).logits.shape == (4, width)
    assert loaded.retex_config == model.retex_config
    assert loaded.predict(**inputs, task="green")[0]["label"].startswith("green-")


@torch.no_grad()
def test_shards_load_bit_identically_and_stale_shards_go(model, tmp_path):
    folder = tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="10KB")
    assert "retex_recovery.safetensors.index.json" in names(folder)
    assert sum(name.startswith("retex_recovery-") for name in names(folder)) > 1
    inputs = tokens(6)
    assert_same(RetexModel.from_pretrained(folder)(**inputs), model(**inputs), exact=True)
    model.save_pretrained(folder)
    assert not any("-of-" in name or "index" in name for name in names(folder))
    assert_same(RetexModel.from_pretrained(folder)(**inputs), model(**inputs), exact=True)


def test_task_names_may_hold_any_characters(tmp_path):
    base = BertModel(BertConfig(**TEXT)).eval()
    tasks = ["a/b.c", "ünï cödé", "task_embedding"]
    experts = {task: perturb(base, seed) for seed, task in enumerate(tasks)}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=3, heads=["pooler"]), progress=False)
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    assert loaded.tasks == tasks
    for task in tasks:
        assert_same(loaded.recover(task), model.recover(task), exact=True)


@torch.no_grad()
def test_pretrained_feature_source_survives(tmp_path):
    model = make_classifier(feature_source="pretrained")
    model.save_pretrained(tmp_path / "artifact")
    inputs = tokens(6)
    expected = model.identify(**inputs).residuals
    assert torch.equal(RetexModel.from_pretrained(tmp_path / "artifact").identify(**inputs).residuals, expected)


def test_tokenizer_files_travel_with_the_artifact(tmp_path):
    base = BertModel(BertConfig(**TEXT)).eval()
    base.save_pretrained(tmp_path / "base")
    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello"])}
    BertTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path / "base")
    model = RetexModel.from_experts(tmp_path / "base", make_experts(base), RetexConfig(rank=3), progress=False)
    model.save_pretrained(tmp_path / "one")
    RetexModel.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert AutoTokenizer.from_pretrained(tmp_path / "two")("hello")["input_ids"] == [2, 5, 3]


def test_saving_keeps_what_is_not_ours(model, folder):
    (folder / "README.md").write_text("written by hand")
    (folder / "figures").mkdir()
    (folder / "figures" / "plot.png").write_bytes(b"png")
    model.save_pretrained(folder)
    assert "written by hand" in (folder / "README.md").read_text()
    assert (folder / "figures" / "plot.png").read_bytes() == b"png"


@torch.no_grad()
@pytest.mark.parametrize(
    ("module", "stage"),
    [(writing, "save_torch_state_dict"), (writing, "_save"), (atomic_folder, "keep_files")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_save_leaves_the_previous_artifact_and_no_litter(model, folder, monkeypatch, module, stage):
    inputs = tokens(6)
    expected = model(**inputs)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(module, stage, fail)
    with pytest.raises(OSError, match="disk full"):
        make_classifier(rank=2).save_pretrained(folder)
    with pytest.raises(OSError, match="disk full"):
        if stage != "keep_files":
            model.save_pretrained(folder.parent / "new")
        else:
            model.save_pretrained(folder)
    monkeypatch.undo()
    assert names(folder.parent) == {"artifact"}
    assert_same(RetexModel.from_pretrained(folder)(**inputs), expected, exact=True)


def test_saving_onto_a_file_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_only_the_main_process_writes(model, tmp_path):
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_a_foreign_folder_is_refused(tmp_path):
    BertModel(BertConfig(**TEXT)).save_pretrained(tmp_path / "plain")
    with pytest.raises(ArtifactError, match=r"plain is not a ReTeX artifact: it has no retex_config\.json"):
        RetexModel.from_pretrained(tmp_path / "plain")
    with pytest.raises(ArtifactError, match="does not exist"):
        RetexModel.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["retex_recovery", "retex_signatures", "retex_heads", "model"])
def test_a_missing_or_truncated_file_is_named(folder, name):
    path = folder / f"{name}.safetensors"
    content = path.read_bytes()
    for size in (len(content) // 2, 20, 0):
        path.write_bytes(content[:size])
        for verify in (True, False):
            with pytest.raises(ArtifactError, match=rf"/{name}\.safetensors is not"):
                RetexModel.from_pretrained(folder, verify=verify)
    path.unlink()
    with pytest.raises(ArtifactError, match=rf"/{name}\.safetensors is missing"):
        RetexModel.from_pretrained(folder)
    with pytest.raises(ArtifactError, match=f"holds no weights: expected {name}"):
        RetexModel.from_pretrained(folder, verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("artifact"), "no \"artifact\" section"),
        (lambda v: v["artifact"].update(format_version=99), "format version 99"),
        (lambda v: v["artifact"].update(library="keras"), "library 'keras'"),
        (lambda v: v.update(surprise=1), "no field 'surprise'"),
        (lambda v: v.update(rank=-1), "rank must be"),
        (lambda v: v.update(tasks=[]), "names no tasks"),
        (lambda v: v.update(tasks=["red", "green"]), "'task_embedding' has shape"),
        (lambda v: v["artifact"]["heads"].pop("red"), "heads for"),
        (lambda v: v["artifact"].update(recovery=[]), "'recovery' must be an object"),
        (lambda v: v["artifact"]["recovery"].popitem(), "does not list"),
        (lambda v: v["artifact"]["recovery"].update(ghost={"kind": "vector", "shape": [4]}), "lacks 'ghost.shared'"),
        (lambda v: v["artifact"]["recovery"].update(ghost={"kind": "spiral", "shape": [4]}), "recovery of 'ghost'"),
        (lambda v: v["artifact"]["recovery"].update(ghost=None), "recovery of 'ghost'"),
        (lambda v: v["artifact"]["signatures"].update(width="wide"), "signatures are not valid"),
        (lambda v: v["artifact"]["signatures"].update(width=3), "'basis' has shape|'mean' has shape"),
        (lambda v: v["artifact"]["heads"]["red"].update({"classifier.bias": [7]}), "'red/classifier.bias' has shape"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_in_one_sentence(folder, change, message):
    edit_config(folder, change)
    with pytest.raises(ArtifactError, match=message) as caught:
        RetexModel.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_configuration_that_is_not_json_is_refused(folder):
    (folder / "retex_config.json").write_text("{")
    with pytest.raises(ArtifactError, match="not valid JSON"):
        RetexModel.from_pretrained(folder)


def test_recovery_of_another_model_is_refused(folder, tmp_path):
    other = FAMILIES["roberta"].make().eval()
    RetexModel.from_experts(other, make_experts(other), RetexConfig(rank=3), progress=False).save_pretrained(
        tmp_path / "other"
    )
    shutil.copy(tmp_path / "other" / "retex_recovery.safetensors", folder / "retex_recovery.safetensors")
    with pytest.raises(ArtifactError, match=r"retex_recovery\.safetensors is not the file that"):
        RetexModel.from_pretrained(folder)
    with pytest.raises(ArtifactError, match=r"retex_recovery\.safetensors lacks"):
        RetexModel.from_pretrained(folder, verify=False)


def test_merged_weights_of_another_architecture_are_refused(folder):
    other = BertForSequenceClassification(BertConfig(**TEXT | {"hidden_size": 8}))
    other.save_pretrained(folder)
    with pytest.raises(ArtifactError, match="is not the file that"):
        RetexModel.from_pretrained(folder)
    reseal(folder)
    with pytest.raises(ArtifactError, match="of the merged model has shape"):
        RetexModel.from_pretrained(folder)


def test_merged_weights_that_are_not_all_there_are_refused(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["bert.encoder.layer.0.attention.self.query.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    reseal(folder)
    with pytest.raises(ArtifactError, match=r"lacks 1 tensor.*query\.weight"):
        RetexModel.from_pretrained(folder)


def test_integer_factors_are_refused(folder):
    path = folder / "retex_recovery.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if name.endswith(".weight"))
    tensors[first] = tensors[first].to(torch.int32)
    save_file(tensors, path)
    reseal(folder)
    with pytest.raises(ArtifactError, match=r"asks for torch\.float32"):
        RetexModel.from_pretrained(folder)


def test_a_description_is_written_again_without_the_weights(model, tmp_path):
    folder = tmp_path / "retex"
    model.save_pretrained(folder, max_shard_size="20KB")
    weights = {file.name: file.stat().st_ino for file in folder.glob("*.safetensors")}
    loaded = RetexModel.from_pretrained(folder)
    loaded.fit_signatures({task: [tokens(12)] for task in TASKS}, progress=False)
    loaded.recipe = RecipeRecord({"base": "b", "experts": {"a": "e"}})
    (folder / "mine.txt").write_text("kept")
    loaded.save_description(folder)
    inputs = tokens(6)
    again = RetexModel.from_pretrained(folder)
    assert torch.equal(again.identify(**inputs).residuals, loaded.identify(**inputs).residuals)
    assert again.recipe == loaded.recipe
    assert (folder / "mine.txt").read_text() == "kept"
    after = {file.name: file.stat().st_ino for file in folder.glob("*.safetensors")}
    assert len(weights) > 3
    # The very files, not copies of them.
    assert {name: node for name, node in after.items() if "signatures" not in name} == {
        name: node for name, node in weights.items() if "signatures" not in name
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["retex"]


def test_a_description_leaves_the_files_of_the_merged_model(model, tmp_path):
    """Loaded in another dtype, the configuration would no longer be that of the weights beside it."""
    folder = tmp_path / "retex"
    model.save_pretrained(folder)
    kept = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    expected = RetexModel.from_pretrained(folder).recover(TASKS[1])
    loaded = RetexModel.from_pretrained(folder, dtype="float16")
    loaded.fit_signatures({task: [tokens(12)] for task in TASKS}, progress=False)
    loaded.save_description(folder)
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert_same(RetexModel.from_pretrained(folder).recover(TASKS[1]), expected, exact=True)


def test_a_description_of_another_model_is_refused(model, tmp_path):
    folder = tmp_path / "retex"
    model.save_pretrained(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    loaded = RetexModel.from_pretrained(folder)
    loaded.delete_task(TASKS[0])
    with pytest.raises(ArtifactError, match="holds the weights of another model"):
        loaded.save_description(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_an_artifact_of_another_version_is_built_again_in_its_place(tmp_path):
    base = FAMILIES["bert"].make().eval()
    base.save_pretrained(tmp_path / "base")
    for task, expert in make_experts(base).items():
        expert.save_pretrained(tmp_path / task)
    experts = {task: tmp_path / task for task in TASKS}
    build = partial(RetexModel.from_experts, tmp_path / "base", experts, RetexConfig(rank=2), progress=False)
    build(output_dir=tmp_path / "artifact")
    path = tmp_path / "artifact" / "retex_config.json"
    values = json.loads(path.read_text())
    values["artifact"]["format_version"] -= 1
    path.write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match="build it again from its experts"):
        RetexModel.from_pretrained(tmp_path / "artifact")
    build(output_dir=tmp_path / "artifact")
    assert RetexModel.from_pretrained(tmp_path / "artifact").tasks == TASKS
