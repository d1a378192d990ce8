"""Text that JSON allows and Python reads, but that no file can hold."""

from __future__ import annotations

import pytest

from retex_hf.errors import ConfigError
from retex_hf.utils.strict_files import parse_json


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\uDFFF": 1}', '{"a": "\\udc00\\ud800"}', '{"a": "\ud800"}'])
def test_half_a_character_is_refused(text):
    with pytest.raises(ConfigError, match=r"^x is not valid JSON: it holds half a character"):
        parse_json(text, "x", ConfigError)


@pytest.mark.parametrize(
    "text, value", [('"\\ud83d\\ude00"', "😀"), ('"\\u00e9 \\\\ud800"', "é \\ud800"), ('"😀"', "😀")]
)
def test_whole_characters_are_read(text, value):
    assert parse_json(f'{{"a": {text}}}', "x", ConfigError) == {"a": value}
