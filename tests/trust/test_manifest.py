"""Which files an artifact consists of: recorded when it is saved, compared when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_same
from safetensors.torch import load_file, save_file
from trust.mutations import STRAYS, reseal
from trust.subjects import make_artifact, make_model, make_tokenizer, mixed_batch, texts

from retex_hf import ArtifactError, RetexConfig, RetexModel, verify
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.artifact.reading import read_parts
from retex_hf.checkpoints import manifest
from retex_hf.cli import main

INPUTS = mixed_batch(make_tokenizer())


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """With a tokenizer that is recorded."""
    folder = make_artifact(tmp_path_factory.mktemp("original") / "artifact", feature_source="pretrained")
    RetexModel.from_pretrained(folder).save_description(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "artifact")


def described(folder: Path) -> dict:
    return json.loads((folder / "retex_config.json").read_text())


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def scale(path: Path, tensor: str, by: float) -> None:
    """The same file with one other tensor, and of the same size."""
    tensors = load_file(path)
    tensors[tensor] *= by
    save_file(tensors, path, metadata={"format": "pt"})


WEIGHT = "bert.encoder.layer.0.attention.self.query.weight"


def test_all_files_but_the_configuration_and_the_card_are_recorded(folder):
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name in ("retex_config.json", "README.md"):
        del files[name]
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "retex_pretrained.safetensors"} <= set(files)
    expected = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    assert described(folder)["artifact"]["files"] == expected
    assert described(folder)["artifact"]["format_version"] == 5


def test_a_build_on_disk_records_what_it_wrote(tmp_path):
    base, expert = tmp_path / "base", tmp_path / "expert"
    model = make_model(tasks=("red",))
    model.get_base_model().save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    model.merge_and_unload("red").save_pretrained(expert)
    RetexModel.from_experts(
        base, {"red": expert}, RetexConfig(rank=4), output_dir=tmp_path / "built", max_shard_size="20KB", progress=False
    )
    names = set(described(tmp_path / "built")["artifact"]["files"])
    assert {"model.safetensors.index.json", "tokenizer.json"} <= names
    found = verify(tmp_path / "built", finite=True)
    assert (found.files, found.finite) == (len(names), True)
    assert str(found).startswith(f"{tmp_path / 'built'} is whole.")


@torch.no_grad()
def test_a_changed_file_is_refused_until_it_is_recorded_anew(folder):
    before = RetexModel.from_pretrained(folder)(**INPUTS).logits
    scale(folder / "model.safetensors", WEIGHT, 1.5)
    with pytest.raises(ArtifactError, match=r"model\.safetensors is not the file .* its SHA-256 .*verify=False"):
        RetexModel.from_pretrained(folder)
    meant = RetexModel.from_pretrained(folder, verify=False)
    assert not torch.equal(meant(**INPUTS).logits, before)
    meant.save_description(folder)
    assert_same(RetexModel.from_pretrained(folder)(**INPUTS), meant(**INPUTS), exact=True)


def test_damage_after_loading_is_not_recorded_as_right(folder):
    model = RetexModel.from_pretrained(folder)
    scale(folder / "model.safetensors", WEIGHT, 1.5)
    model.save_description(folder)
    with pytest.raises(ArtifactError, match=r"model\.safetensors is not the file"):
        RetexModel.from_pretrained(folder)


def test_weights_are_not_read_again_for_a_new_description(folder, monkeypatch):
    read = []
    digest = manifest._sha256
    model = RetexModel.from_pretrained(folder)
    monkeypatch.setattr(manifest, "_sha256", lambda path, bar: (read.append(path.name), digest(path, bar))[1])
    model.save_description(folder)
    assert "retex_signatures.safetensors" in read and "tokenizer.json" in read
    assert not {"model.safetensors", "retex_recovery.safetensors", "retex_pretrained.safetensors"} & set(read)


def test_a_changed_configuration_is_refused_but_its_layout_is_free(folder):
    path = folder / "retex_config.json"
    path.write_text(json.dumps(described(folder), indent=7))
    RetexModel.from_pretrained(folder)
    edit_json(path, temperature=2.0)
    with pytest.raises(ArtifactError, match=r"retex_config\.json is not as it was saved"):
        RetexModel.from_pretrained(folder)
    model = RetexModel.from_pretrained(folder, verify=False)
    model.save_description(folder)
    assert RetexModel.from_pretrained(folder).retex_config.temperature == 2.0


@pytest.mark.parametrize("name", ["retex_recovery", "retex_heads", "retex_signatures", "retex_pretrained", "model"])
def test_a_file_of_another_model_of_the_same_shapes_is_named(folder, name):
    path = folder / f"{name}.safetensors"
    tensors = load_file(path)
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"/{name}\.safetensors is not the file"):
        RetexModel.from_pretrained(folder)


def test_a_recorded_tokenizer_is_checked(folder):
    model = RetexModel.from_pretrained(folder)
    load_preprocessor(folder, model.model)
    edit_json(folder / "tokenizer_config.json", model_max_length=7)
    RetexModel.from_pretrained(folder)
    for use in (lambda: load_preprocessor(folder, model.model), lambda: model.save_description(folder)):
        with pytest.raises(ArtifactError, match=r"tokenizer_config\.json is not the file"):
            use()
    RetexModel.from_pretrained(folder, verify=False).save_description(folder)
    assert load_preprocessor(folder, model.model)(texts("red", 1))["input_ids"].shape == (1, 4)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "special_tokens_map.json", "processor_config.json", "other_tokenizer/vocab.txt"]
)
def test_a_tokenizer_file_that_was_added_is_a_mismatch(folder, tmp_path, name):
    """It would be read with the others, and change what the model is given; nothing records it by the way."""
    model = RetexModel.from_pretrained(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    model = RetexModel.from_pretrained(folder)  # which reads no tokenizer
    for use in (lambda: load_preprocessor(folder, model.model), lambda: verify(folder)):
        with pytest.raises(ArtifactError, match=f"{name} would be read with the artifact, but"):
            use()
    model.save_description(folder)
    model.save_pretrained(tmp_path / "copy")
    with pytest.raises(ArtifactError, match="would be read with the artifact"):
        load_preprocessor(folder, model.model)
    assert not (tmp_path / "copy" / name).exists()
    RetexModel.from_pretrained(folder, verify=False).save_description(folder)
    load_preprocessor(folder, model.model)


def test_a_tokenizer_that_was_there_first_is_recorded(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    model = make_model()
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    load_preprocessor(tmp_path, model.model)


@pytest.mark.parametrize("stray", [name for name in STRAYS if name != "retex_pretrained.safetensors"])
@torch.no_grad()
def test_what_lies_beside_is_refused_or_not_read(folder, stray):
    expected = RetexModel.from_pretrained(folder)(**INPUTS)
    (folder / stray).parent.mkdir(exist_ok=True)
    (folder / stray).write_bytes(STRAYS[stray])
    if stray in ("pytorch_model.bin", "modeling_evil.py", "custom_generate/generate.py", "notes.txt"):
        assert_same(RetexModel.from_pretrained(folder)(**INPUTS), expected, exact=True)
    else:
        with pytest.raises(ArtifactError, match=f"also holds '{stray}'"):
            RetexModel.from_pretrained(folder)
    if stray in ("adapter_config.json", ".metadata"):  # what would change the model, or is pickled, is never let in
        with pytest.raises(ArtifactError, match=f"also holds '{stray}'"):
            RetexModel.from_pretrained(folder, verify=False)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "./a", "a\\b", "C:a", "a\0", "a/"]
)
def test_a_name_that_leaves_the_folder_is_refused(name):
    with pytest.raises(ArtifactError, match="which is not the name of a file beside it"):
        manifest.from_json(Path("retex_config.json"), {name: {"size": 1, "sha256": "0" * 64}})


@pytest.mark.parametrize(
    "value", [None, {}, {"size": 1}, {"size": -1, "sha256": "0" * 64}, {"size": True, "sha256": "0" * 64},
              {"size": 1, "sha256": "0" * 63}, {"size": 1, "sha256": "0" * 64, "more": 1}],
)  # fmt: skip
def test_a_wrong_record_is_refused(value):
    with pytest.raises(ArtifactError, match="the entry of 'a' is not valid"):
        manifest.from_json(Path("retex_config.json"), {"a": value})


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_links_lead_out_of_a_folder_only_in_the_cache_of_the_hub(folder, tmp_path):
    weights = folder / "model.safetensors"
    elsewhere = tmp_path / "elsewhere.safetensors"
    weights.rename(elsewhere)
    weights.symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=r"model\.safetensors is a link"):
        RetexModel.from_pretrained(folder)
    weights.unlink()
    (tmp_path / "models--org--x" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--org--x" / "blobs").mkdir()
    snapshot = folder.rename(tmp_path / "models--org--x" / "snapshots" / "abc")
    elsewhere.rename(tmp_path / "models--org--x" / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "123"))
    RetexModel.from_pretrained(snapshot)


@pytest.mark.parametrize("name", ["retex_recovery", "retex_heads", "retex_signatures", "retex_pretrained", "model"])
def test_numbers_that_are_none_are_found_on_request(folder, name):
    path = folder / f"{name}.safetensors"
    tensors = load_file(path)
    key = sorted(tensors)[0]
    tensors[key].flatten()[0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    reseal(folder)
    RetexModel.from_pretrained(folder)
    for check in (lambda: RetexModel.from_pretrained(folder, check_finite=True), lambda: verify(folder, finite=True)):
        with pytest.raises(ArtifactError, match=rf"/{name}\.safetensors: tensor '{key}' holds NaN or infinite"):
            check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, "config.json"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000"),
        ({"num_hidden_layers": 90_000}, "asks for more than"),
        ({"num_labels": 10**9}, "'num_labels' is 1000000000"),
        ({"num_hidden_layers": 3}, r"lacks 16 tensor\(s\) that config.json asks for"),
        ({"num_hidden_layers": 1}, "that config.json asks for does not have"),
        ({"vocab_size": 10**9}, r"config.json asks for \(1000000000, 16\)"),
        ({"max_position_embeddings": 10**12}, r"config.json asks for \(1000000000000, 16\)"),
        ({"architectures": ["BertForever"]}, "'BertForever', which is not a model class"),
        ({"architectures": ["GPT2Model"]}, "config.json"),
    ],
)  # fmt: skip
def test_a_model_that_its_weights_cannot_fill_is_not_made(folder, change, message):
    edit_json(folder / "config.json", **change)
    reseal(folder)
    with pytest.raises(ArtifactError, match=message):
        RetexModel.from_pretrained(folder)


def test_code_named_in_a_configuration_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(folder / "config.json", auto_map={"AutoModelForSequenceClassification": "evil.Evil"})
    reseal(folder)
    RetexModel.from_pretrained(folder)
    edit_json(folder / "config.json", architectures=["Evil"])
    reseal(folder)
    with pytest.raises(ArtifactError, match="not a model class of transformers"):
        RetexModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["labels"]["red"]["id2label"].pop("1"), "names 1 labels of task 'red', whose head has 2 classes"),
        (lambda v: v["labels"].pop("red"), "has labels for"),
        (lambda v: v["labels"]["red"].update(problem_type="poetry"), "labels must be"),
        (
            lambda v: v["artifact"]["signatures"].update(feature_layer="nowhere", layers=["nowhere"]),
            "no module 'nowhere'",
        ),
        (lambda v: v["artifact"]["signatures"].update(layers=["nowhere"]), "signatures are not valid"),
        (lambda v: v["artifact"]["signatures"].update(temperature=0), "signatures are not valid"),
        (lambda v: v["artifact"]["signatures"].update(common=True), "signatures are not valid"),
        (lambda v: v["artifact"]["recovery"][WEIGHT].update(error=-1), "recovery of"),
        (lambda v: v["artifact"]["recovery"][WEIGHT].update(rank=True), "recovery of"),
        (lambda v: v.update(tasks=[f"task {index}" for index in range(100_000)]), "heads for|has shape"),
        (lambda v: v.update(task_embedding_dim=1000, weighting="plain"), "'task_embedding' has shape"),
    ],
)  # fmt: skip
def test_what_the_configuration_says_of_tensors_must_fit_them(folder, change, message):
    values = described(folder)
    change(values)
    (folder / "retex_config.json").write_text(json.dumps(values))
    reseal(folder)
    with pytest.raises(ArtifactError, match=message):
        read_parts(folder)


def test_the_command_says_what_it_checked_or_what_is_wrong(folder, capsys):
    assert main(["verify", str(folder), "--finite"]) == 0
    assert "all finite" in capsys.readouterr().out
    (folder / "retex_heads.safetensors").write_bytes(b"")
    assert main(["verify", str(folder)]) == 2
    assert "retex_heads.safetensors is not the file that retex_config.json records: it has 0 bytes" in (
        capsys.readouterr().err
    )


def test_a_change_that_is_meant_is_recorded_by_the_command(folder, capsys):
    path = folder / "tokenizer_config.json"
    meant = path.read_text() + "\n"
    path.write_text(meant)
    assert main(["verify", str(folder)]) == 2
    assert "tokenizer_config.json is not the file" in capsys.readouterr().err
    assert main(["verify", str(folder), "--record"]) == 0
    assert main(["verify", str(folder)]) == 0
    assert path.read_text() == meant
    assert main(["verify", "org/model", "--record"]) == 2
    assert "--record needs a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("heads", []), ("heads", {"red": 1}), ("signatures", {}), ("signatures", 1)]
)
def test_an_odd_description_is_inspected_with_one_sentence(folder, capsys, key, value):
    path = folder / "retex_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["artifact"][key] = value
    path.write_text(json.dumps(values), encoding="utf-8")
    reseal(folder)
    assert main(["inspect", str(folder)]) == 2
    assert "retex_config.json" in capsys.readouterr().err
