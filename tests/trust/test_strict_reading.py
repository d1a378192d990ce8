"""Untrusted JSON and YAML: what has two meanings, no end, or too much of it is refused with one sentence."""

from __future__ import annotations

import json
import os
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retex_hf.artifact.card import sections
from retex_hf.artifact.recipe import Recipe
from retex_hf.errors import ArtifactError, ConfigError
from retex_hf.utils import strict_files
from retex_hf.utils.strict_files import parse_json, parse_yaml, read_json, read_yaml

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def laughs(levels: int = 12) -> str:
    """Nine times nine times nine ..."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merged_laughs(levels: int = 9) -> str:
    """The same by merge keys, which PyYAML multiplies while it reads."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (laughs(), "more than 100000 values, with every alias written out"),
        (merged_laughs(), "more than 100000 values, with every alias written out"),
        ("[" * 1000, "nested too deeply"),
        ("[" * 100 + "]" * 100, "nested too deeply"),
        ("- " * 3000, "nested too deeply"),
        ("a: 1\nb: 2\na: 3", r"the key 'a' appears twice \(line 3\)"),
        ("a: {b: 1, b: 1}", "the key 'b' appears twice"),
        ("a: &a [*a]", "contains itself"),
        ("!!python/object/apply:os.system ['x']", "could not determine a constructor for the tag .*os.system"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: !!bool maybe", "does not fit its tag"),
        ("a: !!timestamp soon", "does not fit its tag"),
        ("a: 2020-99-99", "month must be in 1..12"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 0x" + "f" * 4000, "4300 digits"),
        ("a: 1" + ":1" * 100_000, "4300 digits"),
        ("a: !!omap [b: 1]", "a value with the tag 'omap', which is not read"),
        ("[" + "a," * 100_001, "more than 100000 values"),
        ("? [a]\n: 1", "unhashable key"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: \x07", "special characters are not allowed"),
        ("a: [1", r"but got '<stream end>' \(line 1\)"),
    ],
)
def test_yaml_that_is_refused(text, says):
    with pytest.raises(ConfigError, match=rf"^here is not valid YAML: .*{says}.*\.$") as caught:
        parse_yaml(text, "here", ConfigError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' appears twice"),
        ('{"a": NaN}', "NaN is not a number in JSON"),
        ('{"a": -Infinity}', "-Infinity is not a number in JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ("{" + '"a": {' * 65 + "}" * 66, "nested too deeply"),
        ('["\\"[", ' + "[" * 64 + "]" * 64 + "]", "nested too deeply"),
        ('{"a": 1e999}', "the number 1e999 is too large"),
        ('{"a": -1e400}', "the number -1e400 is too large"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
)
def test_json_that_is_refused(text, says):
    with pytest.raises(ArtifactError, match=rf"^here is not valid JSON: .*{says}.*\.$"):
        parse_json(text, "here", ArtifactError)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(PLAIN)
def test_what_programs_write_is_read(value):
    assert parse_json(json.dumps(value), "here", ConfigError, kind=None) == value
    plain = json.loads(json.dumps(value))
    text = strict_files.yaml.safe_dump(plain, allow_unicode=True)
    assert parse_yaml(text, "here", ConfigError, kind=None) == plain


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text(alphabet="ab:-[]{}&*!<,'\"|>%@#? \n\t0.~", max_size=40))
def test_yaml_is_read_or_refused(text):
    try:
        parse_yaml(text, "here", ConfigError, kind=None)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_brackets_in_texts_are_no_nesting():
    text = json.dumps({"a": "[{" * 1000, 'b"[\\': ["]", '\\"[' * 100]})
    assert parse_json(text, "here", ConfigError) == json.loads(text)
    deepest = "[" * 64 + "]" * 64
    assert parse_json(deepest, "here", ConfigError, kind=None) == json.loads(deepest)


def test_ordinary_aliases_are_read():
    values = parse_yaml("a: &one {x: 1}\nb: *one\nc: {<<: *one, y: 2}", "here", ConfigError)
    assert values == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_infinite_numbers_where_transformers_writes_them(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}', encoding="utf-8")
    assert read_json(tmp_path / "config.json", ConfigError, infinite=True) == {"time_step_limit": [0.0, float("inf")]}


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_files_that_are_refused(read, tmp_path, monkeypatch):
    path = tmp_path / "file"
    with pytest.raises(ConfigError, match="file does not exist"):
        read(path, ConfigError)
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path, ConfigError)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="file is not text in UTF-8"):
        read(path, ConfigError)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"file must hold .*, not a list"):
        read(path, ConfigError)
    assert read(path, ConfigError, kind=list) == [1]
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a file of holes: it must not be read to be refused
    with pytest.raises(ConfigError, match="has 1099511627776 bytes; at most"):
        read(path, ConfigError)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_keep_a_reader_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a file"):
        read_json(tmp_path / "pipe", ConfigError)


def test_recipes_and_cards_are_read_so(tmp_path):
    (tmp_path / "recipe.yaml").write_text("base: a\nbase: b\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^The recipe .*recipe\.yaml is not valid YAML: the key 'base' appears twice"
    ):
        Recipe.read(tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text(laughs(), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^The recipe .*100000 values"):
        Recipe.read(tmp_path / "recipe.yaml")
    with pytest.raises(ArtifactError, match=r"README.md: the block of metadata at the top is not valid YAML: .*100000"):
        sections.split(f"---\n{laughs()}\n---\ntext", "README.md")


def test_a_key_that_stands_twice_among_many_is_found_in_no_time():
    text = "{" + ",".join(f'"k{number}":1' for number in range(200_000)) + ',"k7":2}'
    start = perf_counter()
    with pytest.raises(ConfigError, match="the key 'k7' appears twice"):
        parse_json(text, "config.json", ConfigError)
    assert perf_counter() - start < 20  # it took minutes for a fifth of it


@pytest.mark.parametrize("text", ["{1: a, 0x1: b}", "{1: a, 1.0: b}", "{true: a, yes: b}"])
def test_a_key_stands_twice_however_it_is_spelt(text):
    with pytest.raises(ConfigError, match="appears twice"):
        parse_yaml(text, "recipe.yaml", ConfigError)
