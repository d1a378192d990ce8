"""Every knob: what it takes, what it refuses and how it says so, and the way through a JSON file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from retex_hf import ConfigError, RetexConfig, RetexError
from retex_hf.config import DEFAULT_STORAGE, OF_RANKS, matches, overridden, storage_bytes

NAN, INF = float("nan"), float("inf")

TRUNK = {"junction": "layer.1", "axis": -1, "parameters": ["w"], "cached": False, "replayed": True,
         "cost": {"red": {"change": 0.1}}}  # fmt: skip
ALLOWED = {
    "rank": [None, 1, 256, "full"],
    "inner_rank": [None, 1, 64],
    "storage": ["2%", 0.01, 1, "1%", "0.25 %", "50MB", "3GiB", "0.5", "1e-2"],
    "weighting": [None, "tasks", "plain"],
    "recovery": ["offset", "affine"],
    "recovery_dtype": ["float32", "bfloat16", "float16", "int8"],
    "factor_order": ["generated_first", "shared_first"],
    "share_layers": [False, True],
    "soft_training": [None, "dirichlet", {"method": "dirichlet", "alpha": 0.1}, "uniform_softmax", "gaussian_softmax"],
    "task_embedding_dim": [None, 1, 64],
    "merge": ["average", "org/merged", {"method": "ties"}, {"method": "ties", "density": 0.1}],
    "exclude": [[], ["*embeddings*", "lm_head"]],
    "heads": ["auto", [], ["classifier", "*.score"]],
    "routing": ["hard", "soft"],
    "temperature": [None, 1, 0.01, 50.0],
    "signatures": ["auto", "inputs", "weights"],
    "identification": ["whitened", "residual"],
    "shared_trunk": [True, False, "auto"],
    "trunk_tolerance": [0, 0.01, 1],
    "task_bytes": [None, 1, 12_500.5],
    "trunk": [None, TRUNK, {**TRUNK, "cost": {"red": {"change": 0.1, "agreement": 1.0}}}],
    "feature_layer": ["auto", "encoder.layer.3", 0, -1],
    "feature_pooling": ["mean", "first", "last"],
    "feature_source": ["merged", "pretrained"],
    "num_reference": [1, 64],
    "signature_rank": [1, 6, 0.1, 1.0],
    "tasks": [[], ["a", "b"]],
    "base_model": [None, {"id": "org/base", "revision": "0" * 40}],
    "experts": [{}, {"a": {"id": "org/a"}}],
    "labels": [{}, {"a": {"id2label": {"0": "no"}}}],
    "vocabulary": [
        {},
        {"a": {"size": 9, "token_ids": {"pad_token_id": 8, "eos_token_id": [1, 2]}, "tokenizer": True}},
    ],
}
REFUSED = {
    "rank": [0, -1, 1.0, True, "all", [4]],
    "inner_rank": [0, 2.0, True, "4"],
    "storage": [0, 1.5, -0.1, NAN, INF, True, "", "all", "0%", "101%", "0MB", "5mb", "50", "1.5", "0", []],
    "weighting": ["task", "", 1],
    "recovery": ["scale", None],
    "recovery_dtype": ["int4", "fp16", "torch.float16", None, 8],
    "factor_order": ["reversed", None],
    "share_layers": [None, 1, "yes"],
    "soft_training": ["beta", {"method": "dirichlet", "alpha": 0}, {"method": "uniform_softmax", "alpha": 1}, 1],
    "task_embedding_dim": [0, -3, 2.0, False, "8"],
    "merge": ["", None, 3, {}, {"density": 0.2}, {"method": 1}, ["average"]],
    "exclude": ["*embeddings*", [1], None, {"a": 1}],
    "heads": ["classifier", [None], None, {"a": 1}],
    "routing": ["Hard", "", None, 0],
    "temperature": [0, -1.0, NAN, INF, "1", True],
    "identification": ["white", "", None],
    "signatures": ["weight", "", None, True],
    "shared_trunk": [1, "yes", None],
    "trunk_tolerance": [-0.1, 1.1, "1%", None],
    "task_bytes": [0, -1, NAN, INF, True, "1KB"],
    "trunk": [
        {},
        {"replayed": True},
        True,
        [],
        {**TRUNK, "cached": 1},
        {**TRUNK, "axis": 1},
        {**TRUNK, "axis": True},
        {**TRUNK, "parameters": [1]},
        {**TRUNK, "junction": None},
        {**TRUNK, "cost": {"red": {}}},
    ],
    "feature_layer": ["", None, 1.5, True],
    "feature_pooling": ["max", None],
    "feature_source": ["base", None],
    "num_reference": [0, 64.0, True, None],
    "signature_rank": [0, -1, 0.0, 1.5, NAN, "0.1", True, None],
    "tasks": [["a", "a"], ["a", 1], "ab", None],
    "base_model": ["org/base", []],
    "experts": [["a"], {"a": "org/a"}, {1: {}}, None],
    "labels": [["a"], {"a": ["no", "yes"]}, {1: {}}, None],
    "vocabulary": [
        None,
        {"a": 9},
        {"a": {"size": 9}},
        {"a": {"size": 0, "token_ids": {}, "tokenizer": False}},
        {"a": {"size": 9, "token_ids": {"pad_token_id": 9}, "tokenizer": False}},
        {"a": {"size": 9, "token_ids": {"__class__": 1}, "tokenizer": False}},
        {"a": {"size": 9, "token_ids": {}, "tokenizer": "/etc"}},
    ],
}


def cases(table: dict[str, list]) -> list:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


def test_every_field_has_cases():
    names = {field.name for field in fields(RetexConfig)}
    assert set(ALLOWED) == set(REFUSED) == names


@pytest.mark.parametrize(("name", "value"), cases(ALLOWED))
def test_allowed_value_survives_json(name, value, tmp_path):
    needed = {"rank": 64} if name in OF_RANKS and value != RetexConfig.__dataclass_fields__[name].default else {}
    config = RetexConfig(**{name: value, **needed})
    assert getattr(config, name) == value
    config.save_pretrained(tmp_path)
    assert RetexConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_refused_value_is_named_with_its_field(name, value):
    with pytest.raises(ConfigError) as caught:
        RetexConfig(**{name: value})
    assert str(caught.value).startswith(f"RetexConfig.{name} must be ")
    assert str(caught.value).endswith(f", not {value!r}.")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("rank", 0, '"full"'),
        ("routing", "x", "'hard', 'soft'"),
        ("feature_pooling", "x", "'mean', 'first', 'last'"),
        ("feature_source", "x", "'merged', 'pretrained'"),
        ("signature_rank", 2.0, "ratio in (0, 1]"),
        ("heads", "x", '"auto" or a list of patterns'),
    ],
)
def test_message_says_what_is_allowed(name, value, hint):
    with pytest.raises(ConfigError) as caught:
        RetexConfig(**{name: value})
    assert hint in str(caught.value)


def test_the_default_is_a_share_of_storage_and_the_paper_has_one_rank():
    default, paper = RetexConfig(), RetexConfig.paper()
    assert (default.storage, default.rank) == (DEFAULT_STORAGE, None)
    assert (paper.rank, paper.storage, paper.weighting, paper.recovery_dtype) == (256, None, "plain", "float32")
    assert RetexConfig.paper(rank=8, factor_order="shared_first").rank == 8
    with pytest.raises(ConfigError, match="exclude each other"):
        RetexConfig.paper(storage="1%")


@pytest.mark.parametrize(
    ("options", "solver", "weighting"),
    [
        ({}, "closed_form", "tasks"),
        ({"rank": 8}, "closed_form", "tasks"),
        ({"rank": 8, "weighting": "plain"}, "closed_form", "plain"),
        ({"rank": 8}, "adam", "plain"),
        ({"rank": 8, "recovery": "affine"}, "closed_form", "plain"),
        ({"rank": 8, "soft_training": "dirichlet"}, "closed_form", "plain"),
    ],
)
def test_the_weighting_is_that_of_the_solver_where_none_is_given(options, solver, weighting):
    assert RetexConfig(**options).with_weighting(solver).weighting == weighting


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ({"storage": "1%"}, {"rank": 4}, {"rank": 4}),
        ({"rank": 8, "inner_rank": 2}, {"storage": "1%"}, {"storage": "1%"}),
        ({"rank": 8, "merge": "ties"}, {"rank": 4}, {"rank": 4, "merge": "ties"}),
        ({"storage": "1%"}, {"merge": "ties"}, {"storage": "1%", "merge": "ties"}),
    ],
)
def test_a_rank_and_a_budget_replace_each_other(given, options, expected):
    assert overridden(given, options) == expected


def test_a_share_may_be_text():
    assert storage_bytes("0.5", 2000) == storage_bytes("50%", 2000) == storage_bytes(0.5, 2000) == 1000


def test_training_has_no_weighted_tasks():
    with pytest.raises(ConfigError, match="is for the exact solver"):
        RetexConfig(rank=8, weighting="tasks").with_weighting("adam")


def test_errors_are_value_errors_too():
    with pytest.raises(ValueError):
        RetexConfig(rank=0)
    assert issubclass(ConfigError, RetexError)


def test_paths_and_tuples_become_json_values():
    config = RetexConfig(merge=Path("merged") / "model", exclude=("a",), heads=("b",), tasks=("c",))
    assert config.merge == str(Path("merged") / "model")
    assert (config.exclude, config.heads, config.tasks) == (["a"], ["b"], ["c"])
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_lists_are_copies():
    patterns = ["a"]
    config = RetexConfig(exclude=patterns)
    patterns.append("b")
    assert config.exclude == ["a"]
    assert RetexConfig().exclude is not RetexConfig().exclude


def test_unknown_field_is_an_error():
    with pytest.raises(ConfigError, match=r"no field 'ranks'.*'rank'"):
        RetexConfig.from_dict({"ranks": 3})


def test_artifact_section_is_not_a_field(tmp_path):
    text = json.dumps({**RetexConfig(rank=7).to_dict(), "artifact": {"format_version": 1}})
    (tmp_path / "retex_config.json").write_text(text, encoding="utf-8")
    assert RetexConfig.from_pretrained(tmp_path) == RetexConfig(rank=7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"[1]", "must hold a JSON object, not a list"),
    ],
)
def test_unreadable_file_is_named(content, message, tmp_path):
    path = tmp_path / "retex_config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        RetexConfig.from_pretrained(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("encoder.layer.1", ["encoder.layer.1.weight"]),
        ("encoder.layer.1.weight", ["encoder.layer.1.weight"]),
        ("encoder.layer.1*", ["encoder.layer.1.weight", "encoder.layer.10.weight"]),
        ("*.weight", ["encoder.layer.1.weight", "encoder.layer.10.weight", "head.weight"]),
        ("layer.1", []),
        ("Head", []),
    ],
)
def test_patterns_name_modules_or_globs(pattern, matched):
    names = ["encoder.layer.1.weight", "encoder.layer.10.weight", "head.weight", "head.bias"]
    assert [name for name in names if matches(name, [pattern])] == matched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 8, "inner_rank": 9}, r"inner_rank must not exceed rank \(8\), not 9"),
        ({"storage": 0.1, "rank": 4}, "rank and storage exclude each other"),
        ({"storage": 0.1, "recovery": "affine"}, "recovery is for factors of one rank: give rank too"),
        ({"recovery_dtype": "int8"}, "recovery_dtype is for factors of one rank: give rank too"),
        ({"rank": 8, "soft_training": "dirichlet", "weighting": "tasks"}, "soft_training exclude each other"),
        ({"rank": "full", "share_layers": True}, "which layers that share one offset .* cannot have"),
        ({"rank": 8, "recovery": "affine", "soft_training": "dirichlet"}, "exclude each other"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RetexConfig(**options)
