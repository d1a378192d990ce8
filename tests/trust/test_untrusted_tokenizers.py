"""Untrusted tokenizers open no file, and give bounded texts of tokens that the model knows."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import edit_json
from trust import configurations
from trust.mutations import reseal
from trust.subjects import make_artifact

from retex_hf import RetexError, RetexModel
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.backends.untrusted_config import vet_side_config


@pytest.fixture
def artifact(tmp_path) -> Path:
    return make_artifact(tmp_path / "artifact")


def test_files_that_a_tokenizer_names_are_not_opened(tmp_path):
    values = {"vocab_file": "/etc/passwd", "tokenizer_file": "x", "auto_map": {"AutoTokenizer": ["a.B", None]}}
    kept = {"tokenizer_class": "BertTokenizer", "model_max_length": 32, "pad_token": "[PAD]"}
    assert vet_side_config(values | kept) == kept


@pytest.mark.parametrize("length", ["long", -1, 0, [32], None])
def test_an_odd_longest_text_is_refused(artifact, length):
    model = RetexModel.from_pretrained(artifact)
    edit_json(artifact / "tokenizer_config.json", model_max_length=length)
    reseal(artifact)
    if length is None:  # transformers takes it for no limit
        load_preprocessor(artifact, model.model)
    else:
        with pytest.raises(RetexError, match=r"model_max_length|no tokenizer that loads"):
            load_preprocessor(artifact, model.model)


def test_tokens_beyond_the_embedding_are_refused(artifact):
    model = RetexModel.from_pretrained(artifact)
    path = artifact / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["model"]["vocab"]["rose"] = 4000
    path.write_text(json.dumps(values), encoding="utf-8")
    reseal(artifact)
    with pytest.raises(RetexError, match="gives the token 4000, but the model has 21"):
        load_preprocessor(artifact, model.model)(["rose cherry"])


@pytest.mark.parametrize(
    "step",
    [
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}] * 12,
        },
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 100_000},
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 50}] * 4},
        {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 1000},
    ],
)
def test_a_normaliser_that_bursts_is_refused(artifact, step):
    model = RetexModel.from_pretrained(artifact)
    edit_json(artifact / "tokenizer.json", normalizer=step)
    reseal(artifact)
    with pytest.raises(RetexError, match=r"tokenizer\.json (can make a text|has 1003 steps)"):
        load_preprocessor(artifact, model.model)


def test_a_deeply_nested_normaliser_is_refused(artifact):
    model = RetexModel.from_pretrained(artifact)
    step: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(20):
        step = {"type": "Sequence", "normalizers": [step]}
    edit_json(artifact / "tokenizer.json", normalizer=step)
    reseal(artifact)
    with pytest.raises(RetexError, match=r"tokenizer\.json nests steps"):
        load_preprocessor(artifact, model.model)


# ---- files that a tokenizer would open -------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path) -> Callable[[], list[Path]]:
    """A vocabulary outside of every folder, and whether it was opened, by Python or by native code."""
    outside = tmp_path / "outside"
    watcher = configurations._Watcher(outside)
    (outside / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsecret\n", encoding="utf-8")
    watcher.seen()
    return lambda: [outside / "vocab.txt"] if watcher.seen() else []


@pytest.mark.parametrize("kind", ["EsmTokenizer", "BertTokenizer", "PreTrainedTokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("where", ["special tokens", "vocab", "init_inputs", "sp_model_kwargs"])
def test_a_tokenizer_opens_no_other_file(artifact, opened, tmp_path, kind, where):
    model = RetexModel.from_pretrained(artifact)
    outside = str(tmp_path / "outside" / "vocab.txt")
    path = artifact / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": kind}
    match where:
        case "special tokens":
            values.pop("added_tokens_decoder", None)
            named = {"vocab_file": outside, "tokenizer_file": outside, "merges_file": outside, "pad_token": "[PAD]"}
            (artifact / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
        case "vocab":
            values |= {"vocab": outside, "merges": outside}
        case "init_inputs":
            values |= {"init_inputs": [outside]}
        case "sp_model_kwargs":
            values |= {"sp_model_kwargs": {"model_file": outside}}
    path.write_text(json.dumps(values), encoding="utf-8")
    if where != "special tokens":
        (artifact / "tokenizer.json").unlink()
    names = ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"]
    reseal(artifact, *(name for name in names if (artifact / name).exists()))
    try:
        load_preprocessor(artifact, model.model)
    except RetexError as error:
        assert "\n" not in str(error)
    assert opened() == []


def test_a_map_of_characters_that_bursts_is_refused(artifact):
    model = RetexModel.from_pretrained(artifact)
    table = [0] * 512
    table[0], table[353] = 256 << 10, 97 | 1 << 8 | 1 << 10
    packed = struct.pack("<512I", *table)
    text = struct.pack("<I", len(packed)) + packed + b"x" * 100_000 + b"\0"
    edit_json(
        artifact / "tokenizer.json",
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(text).decode()},
    )
    reseal(artifact)
    with pytest.raises(RetexError, match=r"tokenizer\.json can make a text over 1000 times as long"):
        load_preprocessor(artifact, model.model)


def test_a_template_that_bursts_is_refused(artifact):
    model = RetexModel.from_pretrained(artifact)
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, *[{"SpecialToken": {"id": "[X]", "type_id": 0}}] * 2000]
    special = {"[X]": {"id": "[X]", "ids": [1] * 2000, "tokens": ["x"] * 2000}}
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    edit_json(artifact / "tokenizer.json", post_processor=template)
    reseal(artifact)
    with pytest.raises(RetexError, match=r"tokenizer\.json can add \d+ tokens to a text"):
        load_preprocessor(artifact, model.model)


def test_the_configuration_that_chooses_a_tokenizer_is_the_recorded_one(artifact):
    model = RetexModel.from_pretrained(artifact)
    edit_json(artifact / "config.json", tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(RetexError, match=r"config\.json is not the file that .* records"):
        load_preprocessor(artifact, model.model)
