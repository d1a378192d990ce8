"""Where artifacts are saved, and from where they are read: the current folder, relative paths, layers, the Hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import transformers as tf
from helpers import assert_same, make_experts
from small_disks import small_disk
from trust import killed
from trust.mutations import reseal
from trust.subjects import SIZES, batch, bert, make_artifact, make_tokenizer, mixed_batch, texts

from retex_hf import ArtifactError, RetexConfig, RetexModel, verify
from retex_hf.artifact import reading
from retex_hf.checkpoints.locate import CODE, DOWNLOADED
from retex_hf.checkpoints.tokenizer_files import SIDE_FILES
from retex_hf.errors import CheckpointError, WriteError
from retex_hf.utils.atomic_folder import replacing

INPUTS = mixed_batch(make_tokenizer())


@torch.no_grad()
def answers(model: RetexModel) -> dict[str, torch.Tensor]:
    return {task: model(**INPUTS, task=task).logits for task in model.tasks} | {"routed": model(**INPUTS).logits}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = make_artifact(tmp_path_factory.mktemp("original") / "artifact")
    RetexModel.from_pretrained(folder).save_description(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "artifact")


def test_a_process_may_save_into_the_folder_that_it_works_in(folder, monkeypatch):
    (folder / "notes").mkdir()
    (folder / "notes" / "mine").write_text("kept")
    monkeypatch.chdir(folder)
    model = RetexModel.from_pretrained(".")
    expected = answers(model)
    model.save_pretrained(".")
    assert Path.cwd() == folder
    assert {"retex_config.json", "notes"} <= set(os.listdir("."))
    monkeypatch.chdir("notes")
    model.save_description("..")
    assert Path("mine").read_text() == "kept"
    assert_same(answers(RetexModel.from_pretrained("..")), expected, exact=True)


def test_a_model_that_is_replaced_where_it_was_loaded_from_goes_on(folder):
    one, two = (RetexModel.from_pretrained(folder) for _ in range(2))
    expected = answers(one)
    one.save_pretrained(folder, max_shard_size="10KB")
    assert_same(answers(two), expected, exact=True)
    two.save_pretrained(folder)
    assert_same(answers(RetexModel.from_pretrained(folder)), expected, exact=True)


def test_tokenizers_are_found_from_another_current_folder(folder, tmp_path, monkeypatch):
    base, experts = bert(make_tokenizer())
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    loaded = RetexModel.from_pretrained("artifact")
    built = RetexModel.from_experts("base", experts, RetexConfig(rank=4), check_base=False, progress=False)
    monkeypatch.chdir("/")
    for name, model in {"loaded": loaded, "built": built}.items():
        model.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_is_gone_is_missed(folder, tmp_path, caplog):
    model = RetexModel.from_pretrained(folder)
    shutil.rmtree(folder)
    model.save_pretrained(tmp_path / "again")
    assert f"{folder} no longer exists, nor does a tokenizer" in caplog.text


def test_a_new_description_keeps_the_tokenizer_that_was_recorded_last(tmp_path):
    tokenizer, folder = make_tokenizer(), tmp_path / "artifact"
    base, experts = bert(tokenizer)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = RetexConfig(rank=4, feature_layer=0)
    model = RetexModel.from_experts(str(tmp_path / "base"), experts, config, check_base=False, progress=False)
    model.save_pretrained(folder)
    tokenizer.add_tokens(["teal"])
    tokenizer.save_pretrained(folder)
    model.fit_signatures({task: [batch(tokenizer, texts(task, 8))] for task in experts}, progress=False)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is not the file that .* records"):
        model.save_description(folder)
    RetexModel.from_pretrained(folder, verify=False).save_description(folder)
    model.save_description(folder)
    assert "teal" in (folder / "tokenizer.json").read_text()
    verify(folder)


@pytest.mark.parametrize("verify", [True, False])
def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(folder, verify, monkeypatch):
    """Else the recovery would be of one artifact and the merged model of another."""
    other = RetexModel.from_pretrained(folder)
    with torch.no_grad():
        for parameter in (*other.model.parameters(), *other.recovery.parameters()):
            parameter.mul_(1.1)
    load, times = reading._load_model, []

    def late(*arguments):
        if not times:
            other.save_pretrained(folder)
        times.append(1)
        return load(*arguments)

    monkeypatch.setattr(reading, "_load_model", late)
    read = RetexModel.from_pretrained(folder, verify=verify)
    assert len(times) == 2
    assert_same(answers(read), answers(other), exact=True)


def test_a_folder_that_is_replaced_all_the_time_is_given_up(folder, monkeypatch):
    numbers = iter(range(1000))
    monkeypatch.setattr(reading, "_generation", lambda _: next(numbers))
    with pytest.raises(ArtifactError, match="was replaced 10 times while it was read"):
        RetexModel.from_pretrained(folder)


def test_a_folder_in_a_layer_below_is_refused(tmp_path):
    (tmp_path / "image" / "artifact").mkdir(parents=True)
    (tmp_path / "image" / "artifact" / "old").write_text("old")
    with small_disk(tmp_path / "disk") as disk:
        for name in ("upper", "work", "merged"):
            (disk.folder / name).mkdir()
        merged = disk.folder / "merged"
        layers = f"lowerdir={tmp_path / 'image'},upperdir={disk.folder / 'upper'},workdir={disk.folder / 'work'}"
        try:
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, merged], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no overlay can be mounted here: {error}")
        try:
            with pytest.raises(WriteError, match="read-only layer"), replacing(merged / "artifact") as new:
                (new / "new").write_text("new")
            assert os.listdir(merged) == ["artifact"]
            assert (merged / "artifact" / "old").read_text() == "old"
            with replacing(merged / "another") as new:
                (new / "new").write_text("new")
        finally:
            subprocess.run(["umount", "--lazy", merged], check=True, capture_output=True)


@pytest.mark.parametrize(
    "config",
    [
        tf.BertConfig(vocab_size=21, num_train_samples=1_281_167, n_ctx=131_072, block_size=131_072, **SIZES),
        tf.BertConfig(vocab_size=21, layer_rope_theta=500_000.0, **SIZES),
    ],
    ids=["notes", "theta"],
)
def test_numbers_of_real_configurations_are_no_counts_of_layers(config, tmp_path):
    base = tf.BertForSequenceClassification(config)
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=2), progress=False)
    model.save_pretrained(tmp_path / "artifact")
    verify(tmp_path / "artifact")


def test_a_layer_that_is_repeated_a_million_times_is_refused(tmp_path):
    """GPT-Neo has its own way to say how many layers there are."""
    layers = [[["global", "local"], 1]]
    config = tf.GPTNeoConfig(vocab_size=21, hidden_size=16, num_layers=2, num_heads=2, attention_types=layers)
    base = tf.GPTNeoForCausalLM(config)
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=2), progress=False)
    model.save_pretrained(tmp_path / "artifact")
    verify(tmp_path / "artifact")
    path = tmp_path / "artifact" / "config.json"
    values = json.loads(path.read_text()) | {"attention_types": [[["global", "local"], 10**6]]}
    path.write_text(json.dumps(values))
    reseal(tmp_path / "artifact")
    with pytest.raises(ArtifactError, match=r"config\.json: 'attention_types' is 1000000"):
        verify(tmp_path / "artifact")


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize(
    ("layers", "message"),
    [(10**6, r"config\.json: 'num_hidden_layers' is 1000000"), (2_000, r"config\.json asks for more than \d+ layers")],
)
def test_a_checkpoint_that_its_weights_cannot_fill_is_not_made(layers, message, on_disk, tmp_path):
    _, experts = bert(make_tokenizer())
    for task in ("red", "green"):
        experts[task].save_pretrained(tmp_path / task)
        path = tmp_path / task / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": layers}))
    folders = {task: str(tmp_path / task) for task in ("red", "green")}
    place = tmp_path / "artifact" if on_disk else None
    with pytest.raises(CheckpointError, match=message):
        RetexModel.from_experts(folders["red"], folders, RetexConfig(rank=4), output_dir=place, progress=False)


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: mit\nlicense: mit\n---\n",
        b"---\nlicense: mit\nx: " + b"y" * 600_000 + b"\n---\n",
        b"\xff\xfe\x00",
    ],
    ids=["twice", "large", "bytes"],
)
def test_a_strange_card_of_the_base_does_not_keep_a_model_from_being_saved(card, tmp_path, caplog):
    base, experts = bert(make_tokenizer())
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_bytes(card)
    config = RetexConfig(rank=4)
    model = RetexModel.from_experts(str(tmp_path / "base"), experts, config, check_base=False, progress=False)
    model.save_pretrained(tmp_path / "artifact")
    assert "licence of the base is not known" in caplog.text and "base/README.md" in caplog.text
    assert "license" not in (tmp_path / "artifact" / "README.md").read_text().split("\n---\n")[0]


@pytest.mark.parametrize("text", ['{"model": 1}', '{"model": {}, "model": {}}', "{", '{"added_tokens": [{}]}'])
def test_a_strange_tokenizer_of_an_expert_does_not_stop_a_build(text, tmp_path, caplog):
    base, experts = bert(make_tokenizer())
    for name, model in {"base": base, "red": experts["red"], "green": experts["green"]}.items():
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "red" / "tokenizer.json").write_text(text)
    folders = {task: str(tmp_path / task) for task in ("red", "green")}
    RetexModel.from_experts(str(tmp_path / "base"), folders, RetexConfig(rank=4), check_base=False, progress=False)
    assert "tokenizer of expert 'red' differs from that of the base: their tokens cannot be compared" in caplog.text


@pytest.mark.parametrize("pattern", SIDE_FILES)
def test_what_is_kept_beside_a_model_is_also_fetched(pattern):
    """Else an artifact would come from the Hub without files that it records."""
    name = pattern.replace("*", "x")
    assert any(fnmatchcase(name, fetched) for fetched in DOWNLOADED)
    assert not name.endswith(CODE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the children that are killed are forks")
def test_a_job_that_hangs_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(killed, "LONGEST", 1)
    job = killed.Job(lambda _: signal.pause(), killed.folder_state, None)
    place = killed.begin(job, tmp_path / "trial", tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="the job hangs"):
        killed.trial(job, place, None, seconds=None, at_change=None)


def test_only_what_the_client_leaves_is_overlooked(tmp_path):
    place = killed.begin(killed.Job(print, start=None), tmp_path / "trial", tmp_path, tmp_path)
    cache = place.folder / "cache" / "models--me--template"
    left = ("blobs/0a.0b.incomplete", "refs/main.45c4424d.tmp")
    found = ("blobs/0a", "refs/main", "snapshots/0a/x.incomplete", ".artifact.saving", "new.tmp")
    for name in (*left, *found):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).touch()
    listed = {name.partition("models--me--template/")[2] for name in killed._listing(place)}
    assert set(found) <= listed
    assert not set(left) & listed
