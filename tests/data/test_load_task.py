"""Tasks from every kind of source, by value; and what is said of data that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image
from toys import Toy, toy_collate

from retex_hf import RetexError
from retex_hf.data import datasets as task_datasets
from retex_hf.evaluation import evaluate, load_task

ROWS = {"text": ["good film", "bad film", "fine"], "label": [1, 0, 1]}
NAMES = ["neg", "pos"]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def named(rows=ROWS, names=NAMES) -> Dataset:
    return Dataset.from_dict(rows, features=Features({"text": Value("string"), "label": ClassLabel(names=names)}))


def values(task):
    return list(task.inputs), list(task.answers), task.label_names


EXPECTED = (ROWS["text"], ROWS["label"], NAMES)


def test_datasets_in_memory():
    assert values(load_task("a", named())) == EXPECTED
    both = DatasetDict(train=named({"text": ["x"], "label": [0]}), test=named())
    assert values(load_task("a", both)) == EXPECTED
    assert list(load_task("a", both, split="train").inputs) == ["x"]
    with pytest.raises(RetexError, match=r"Task 'a': the data has no split 'dev', only \['test', 'train'\]"):
        load_task("a", both, split="dev")
    with pytest.raises(RetexError, match="not list"):
        load_task("a", [1, 2])


def test_folders_that_save_to_disk_wrote(tmp_path):
    named().save_to_disk(tmp_path / "one")
    DatasetDict(test=named()).save_to_disk(tmp_path / "both")
    assert values(load_task("a", tmp_path / "one")) == values(load_task("a", str(tmp_path / "both"))) == EXPECTED


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_folders_with_files(ending, tmp_path):
    file = tmp_path / f"test.{ending}"
    if ending.startswith("jsonl"):
        lines = "".join(
            json.dumps(dict(zip(ROWS, row, strict=True))) + "\n" for row in zip(*ROWS.values(), strict=True)
        )
        file.write_bytes(gzip.compress(lines.encode()) if ending.endswith("gz") else lines.encode())
    elif ending == "csv":
        Dataset.from_dict(ROWS).to_csv(file)
    else:
        Dataset.from_dict(ROWS).to_parquet(file)
    (tmp_path / "labels.json").write_text(json.dumps({"labels": NAMES}))
    assert values(load_task("a", tmp_path)) == values(load_task("a", file)) == EXPECTED


def test_the_data_of_the_examples():
    task = load_task("snips", EXAMPLES / "text" / "snips")
    assert task.inputs[0] == "Add give us rest to my 70s Smash Hits playlist." and task.answers[0] == 0
    assert task.label_names[0] == "AddToPlaylist"
    task = load_task("mnist", EXAMPLES / "image" / "mnist.npz", split="train")
    assert task.inputs.shape == (2000, 28, 28) and task.label_names == list("0123456789")
    arrays = np.load(EXAMPLES / "image" / "mnist.npz")
    assert task.answers == arrays["train_y"].tolist() and (task.inputs[7] == arrays["train_x"][7]).all()
    with pytest.raises(RetexError, match=r"mnist\.npz has no array 'dev_x', only \['test_x'"):
        load_task("mnist", EXAMPLES / "image" / "mnist.npz", split="dev")


def test_folders_of_images(tmp_path):
    for label, shade in (("cat", 10), ("dog", 200)):
        for number in range(2):
            path = tmp_path / "test" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), shade + number).save(path)
    task = load_task("pets", tmp_path)
    assert task.label_names == ["cat", "dog"]
    assert sorted((label, image.getpixel((0, 0))) for image, label in zip(task.inputs, task.answers, strict=True)) == [
        (0, 10), (0, 11), (1, 200), (1, 201)
    ]  # fmt: skip


def test_hub_names_with_configuration_and_revision(monkeypatch):
    calls = []

    def load(path, config=None, **options):
        calls.append((path, config, options["split"], options["revision"]))
        return named()

    monkeypatch.setattr(task_datasets, "load_dataset", load)
    for name in ("org/data", "org/data:en", "org/data@v1", "data:en@refs/convert/parquet"):
        assert values(load_task("a", name)) == EXPECTED
    assert calls == [
        ("org/data", None, "test", None),
        ("org/data", "en", "test", None),
        ("org/data", None, "test", "v1"),
        ("data", "en", "test", "refs/convert/parquet"),
    ]

    def fail(*arguments, **options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(task_datasets, "load_dataset", fail)
    for name in ("org/data", "misspelt"):
        with pytest.raises(RetexError) as caught:
            load_task("a", name)
        assert str(caught.value) == (
            f"Task 'a': {name} is neither a local file or folder, nor a Hub dataset whose split 'test' can be loaded "
            "(no route)."
        )


def test_names_of_labels_decide_over_their_order():
    turned = named({"text": ["x", "y", "z"], "label": [0, 1, 0]}, ["pos", "neg"])
    assert values(load_task("a", turned, label_names=NAMES)) == (["x", "y", "z"], [1, 0, 1], NAMES)
    words = Dataset.from_dict({"text": ["x", "y"], "label": ["pos", "neg"]})
    assert values(load_task("a", words, label_names=NAMES)) == (["x", "y"], [1, 0], NAMES)
    assert values(load_task("a", words)) == (["x", "y"], ["pos", "neg"], None)  # texts, for a generator
    with pytest.raises(RetexError, match=r"Task 'a': row 1 has label 'neg', which is not one of \['pos', 'meh'\]"):
        load_task("a", words, label_names=["pos", "meh"])


def test_columns_are_found_or_asked_for():
    pair = {"premise": ["a"], "hypothesis": ["b"], "label": [0]}
    assert load_task("nli", Dataset.from_dict(pair)).inputs == [("a", "b")]
    both = Dataset.from_dict({**pair, "text": ["a. b"]})
    with pytest.raises(
        RetexError, match=r"any of 'text', 'premise' with 'hypothesis' could be the input .* input_column"
    ):
        load_task("nli", both)
    assert load_task("nli", both, input_column="text").inputs == ["a. b"]
    assert load_task("nli", both, input_column=["hypothesis", "premise"]).inputs == [("b", "a")]
    assert load_task("nli", both, input_column="{premise} so {hypothesis}?").inputs == ["a so b?"]
    assert load_task("a", Dataset.from_dict({"tweet": ["x"], "id": [3], "label": [0]})).inputs == ["x"]
    with pytest.raises(RetexError, match=r"the data have no column 'claim', only \['premise'"):
        load_task("nli", both, input_column="{claim}")
    with pytest.raises(RetexError, match="no column looks like an input"):
        load_task("a", Dataset.from_dict({"id": [3], "label": [0]}))
    with pytest.raises(
        RetexError, match=r"Task 'a': there is no label column among \['text'\]; say which with label_column"
    ):
        load_task("a", Dataset.from_dict({"text": ["x"]}))
    with pytest.raises(RetexError, match="any of 'label', 'target' could be the label"):
        load_task("a", Dataset.from_dict({"text": ["x"], "label": [0], "target": [1]}))
    assert load_task("a", Dataset.from_dict({"text": ["x"], "topic": [4]}), label_column="topic").answers == [4]


@pytest.mark.parametrize(("rows", "found"), [("good,1\nbad,\n", "None|nan"), ("good,1\nbad,-1\n", "-1")])
def test_missing_labels_are_refused_by_row(rows, found, tmp_path):
    (tmp_path / "test.csv").write_text("text,label\n" + rows)
    task = load_task("a", tmp_path)
    assert task.answers[0] == 1 and isinstance(task.answers[0], int)
    with pytest.raises(RetexError, match=rf"Row 1 of task 'a' has no label \(({found})\)"):
        evaluate(Toy(), [task], toy_collate, progress=False)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RetexError, match=r"holds no test file \(.jsonl, .json, .csv, .parquet\), no images"):
        load_task("a", tmp_path)
    with pytest.raises(RetexError, match=r"none\.csv does not exist"):
        load_task("a", tmp_path / "none.csv")
    with pytest.raises(RetexError, match=r"none\.npz does not exist"):
        load_task("a", tmp_path / "none.npz")
    (tmp_path / "test.jsonl").write_text("")
    with pytest.raises(RetexError, match=r"test\.jsonl is empty"):
        load_task("a", tmp_path)
    (tmp_path / "test.jsonl").write_text("{not json")
    with pytest.raises(RetexError, match=r"test\.jsonl cannot be read"):
        load_task("a", tmp_path)
    (tmp_path / "test.csv").write_text("text,label\nx,1\n")
    with pytest.raises(RetexError, match=r"holds test\.csv and test\.jsonl"):
        load_task("a", tmp_path)
    (tmp_path / "labels.json").write_text("[1, 2]")
    with pytest.raises(RetexError, match=r"labels\.json must hold the names of the classes"):
        load_task("a", tmp_path / "test.csv")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RetexError, match=r"notes\.txt is not one of .jsonl"):
        load_task("a", tmp_path / "notes.txt")
