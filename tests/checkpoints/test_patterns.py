"""Patterns of adapters match what peft matches with them, or are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from retex_hf.checkpoints.patterns import MOST_CHARACTERS, Pattern, PatternError, Patterns
from retex_hf.errors import CheckpointError

NAMES = [
    "encoder.layer.0.attention.self.query", "encoder.layer.10.attention.self.query", "encoder.layer.1.output.dense",
    "model.layers.3.self_attn.q_proj", "model.layers.13.self_attn.q_proj", "q_proj", "my_q_proj", "lm_head", "", ".",
    "encoderXlayer", "a.b\n", "a\n.b", "visual.transformer.resblocks.0.attn", "x-y.z", "layers.٣.k",
]  # fmt: skip
# As people write them in rank_pattern and alpha_pattern, as peft's EVA does, and as our own adapters have them.
WRITTEN = [
    "query", "q_proj", "layer.0.*query", "encoder.layer.0.attention.self.query", r"layer\.\d+\.attention.*", "^lm_head",
    "^" + re.escape("model.layers.3.self_attn.q_proj"), ".*q_proj", "(query|dense)", "(?:q|k|v)_proj", "layers.[0-9].*",
    r"layers\.(1[0-9]|2[0-3])\..*", "layer.(0|1).*", "model.layers.3.self_attn.q_proj$", r"\w+_proj", "[^.]+",
    ".+?proj", r"layers\.\d{1,2}\.self_attn\.[qk]_proj", "", "x\\-y.z", "a*", "layer.1?0.*", "((q|k)_)?proj", "b|c",
    "[]a.]b", "a.b", r"layers\.\d.k", "(layer.)*0.*", "[a-z_]{2,}", r".*\bq_proj", r"\bx\b.*\bz",
    r"(?:.*?(?:vision|text).*?(?:attn|mlp).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
]  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN)
def test_matches_what_peft_matches(text):
    for name in NAMES:
        expected = get_pattern_key([text], name) == text and re.match(rf"(.*\.)?({text})$", name) is not None
        assert Pattern(text).matches(name)[0] == expected, name


def test_the_first_pattern_that_matches_counts():
    values = {"q_proj": 2, ".*_proj": 3, "layers.3.*": 4, "lm_head": 5}
    found = Patterns(values, "here")
    for name in NAMES:
        assert found.value(name, 1) == values.get(get_pattern_key(values, name), 1), name


CHARACTERS = st.sampled_from(["a", "b", ".", "0", r"\.", "_", r"\d", r"\w", "[ab]", "[^a.]", "[0-9b]", "é", "-"])
ATOMS = CHARACTERS | st.sampled_from(["(^)", "($)", r"(\b)"])
QUANTIFIERS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "??"])
PATTERNS = st.recursive(
    ATOMS | st.sampled_from(["^", "$", r"\b", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, QUANTIFIERS).map(lambda two: f"(?:{two[0]}){two[1]}"),
        st.tuples(CHARACTERS, QUANTIFIERS).map("".join),
    ),
    max_leaves=6,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(PATTERNS, st.lists(st.text(alphabet="ab.0_é\n", max_size=8), min_size=1, max_size=8))
def test_matches_as_re_does(text, names):
    for name in names:
        assert Pattern(text).matches(name)[0] == (re.match(rf"(.*\.)?({text})$", name) is not None), (text, name)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.text(alphabet="ab.*+?()[]{}|^$\\,0123-d:=!<>iP&~", max_size=12), st.text(alphabet="ab.0", max_size=6))
def test_what_is_accepted_matches_as_re_does(text, name):
    try:
        pattern = Pattern(text)
    except PatternError:
        return
    assert pattern.matches(name)[0] == (re.match(rf"(.*\.)?({text})$", name) is not None)


@pytest.mark.parametrize(
    "text",
    [
        "(?i)query", "(?x:([^!]+) +)!", "(?P<a>q)", r"(q)\1", "q(?=uery)", "(?<!q)uery", "(?>q*)uery", "q*+uery", "q**",
        "*q", "(q", "q)", "q)|(k", "[q", "{2}", "q{2,1}", "q{", "^*", r"\b*", r"\Bq", r"q\Z", r"\x71", "\\", "[[q]]",
        "[a--b]", r"[\b]", "[b-a]", "(" * 30 + "q" + ")" * 30, "q{5000}", "((q{99}){99}){99}",
        "q" * (MOST_CHARACTERS + 1),
    ],
)  # fmt: skip
def test_other_syntax_is_refused_with_a_sentence(text):
    with pytest.raises(CheckpointError, match=r"^here has ['\"].*: expected names, '\.', classes of char") as caught:
        Patterns({"query": 1, text: 2}, "here")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_so_many_patterns_are_refused():
    with pytest.raises(CheckpointError, match=r"^here has 10001 patterns, expected 10000 at most\.$"):
        Patterns({str(number): 1 for number in range(10_001)}, "here")
