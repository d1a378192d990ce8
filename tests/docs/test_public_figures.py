"""The figures of docs/benchmarks.md on public fine-tunes are those of the result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import public_experts
from public_weights import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
FILES = ("public_experts", "public_experts_mixed")
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def families(file: str) -> dict:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["families"]


@pytest.mark.parametrize("file", FILES)
def test_the_tables_are_those_of_the_results(file):
    found = families(file)
    assert (RESULTS / f"{file}.md").read_text(encoding="utf-8") == public_experts.markdown(found)
    assert public_experts.summary(found).strip() in PAGE


def test_every_package_is_named_with_its_licence():
    for file in FILES:
        for name, found in families(file).items():
            for model, (package, licence) in found["packages"].items():
                source = FAMILIES[name].sources[model]
                assert (package, licence) == (source.package, source.licence)
                assert f"`{package}` ({licence})" in PAGE
