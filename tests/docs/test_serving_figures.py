"""The figures of docs/serve.md and docs/serve-vllm.md are those of the result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "serving"))

import load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "serving" / "results"
PAGES = {"embedded": "serve.md", "vllm": "serve-vllm.md"}


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [path.stem for path in sorted(RESULTS.glob("load_*.json"))])
def test_tables_of_load_are_those_of_the_results(name):
    found = read(f"{name}.json")
    text = load.markdown(found)
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == text
    page = (ROOT / "docs" / PAGES[found["engine"]]).read_text(encoding="utf-8")
    for part in text.strip().split("\n\n"):
        assert part in page
    measured = [
        case for part in ("routed", "batching") for one in found.get(part, []) for case in one["cases"].values()
    ]
    for case in [*measured, *([found["soak"]] if "soak" in found else [])]:
        assert (case["wrong"], case["lost"]) == (0, 0)


def test_answers_of_vllm_are_those_of_the_model():
    page = " ".join((ROOT / "docs" / "serve-vllm.md").read_text(encoding="utf-8").split())
    for name, model in read("vllm_check.json").items():
        ways = {way: counts for way, counts in model.items() if isinstance(counts, dict)}
        assert all(one["equal"] == one["same_task"] == one["prompts"] for one in ways.values())
        asked = ways["completions, one prompt a request"]["prompts"]
        assert f"{name}: {asked} prompts, {sum(one['prompts'] for one in ways.values())} answers" in page


def test_answers_of_ray_are_those_of_the_model():
    found = read("ray_check.json")
    assert all(one["equal"] == one["same_task"] == one["prompts"] for one in found["ways"].values())
    assert [one["prompts"] for one in found["ways"].values()] == [36, 36, 6] and found["replicas"] == 2
