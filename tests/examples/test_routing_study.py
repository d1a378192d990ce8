"""The study of rules of identification: corrupted texts, calibration error, and rules on features that are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import routing_rules
from routing_features import PERTURBED, StudyFeatures
from text_corruptions import KINDS, corrupt_texts

TEXT = "Where is the dog now, and what do the patients need from the bank?"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_higher_severity_is_more_of_the_same_and_texts_do_not_depend_on_others(kind):
    changed = []
    for severity in (1, 3, 5):
        (found,) = corrupt_texts([TEXT], kind, severity, 1)
        assert corrupt_texts([TEXT, "another"], kind, severity, 1)[0] == found
        before, after = TEXT.split(), found.split()
        changed.append({i for i, word in enumerate(before) if i >= len(after) or after[i] != word})
    assert changed[0] <= changed[1] <= changed[2]
    assert len(changed[2]) >= 5


def test_texts_keep_two_words_and_other_languages_are_as_said():
    assert corrupt_texts(["a b c d e"], "truncation", 5, 0) == ["a b"]
    assert corrupt_texts(["the"] * 50, "german", 5, 0).count("die") == pytest.approx(40, abs=8)
    assert "дог" in corrupt_texts([20 * "dog "], "cyrillic", 5, 0)[0]
    with pytest.raises(ValueError, match="no corruption 'rain'"):
        corrupt_texts(["a"], "rain", 1, 0)
    with pytest.raises(ValueError, match="from 1 to 5, not 6"):
        corrupt_texts(["a"], "typos", 6, 0)


def test_the_calibration_error_is_the_gap_between_probability_and_accuracy():
    """At temperature 1, rows are given a probability of 3/4, and half of them are right."""
    gap = torch.log(torch.tensor(3.0))
    rows = torch.tensor([[0.0, gap], [gap, 0.0]] * 10)
    assert routing_rules.calibration_error([rows, rows], 1.0) == pytest.approx(0.25, abs=1e-6)
    assert routing_rules.calibration_error([rows, rows], 1e6) == pytest.approx(0.0, abs=1e-4)


def study(rows: int = 40) -> StudyFeatures:
    """Three tasks that two layers tell apart; corruption moves rows along an axis that perturbation shows."""
    draw = torch.Generator().manual_seed(0)

    def features(task: int, moved: float) -> dict[str, torch.Tensor]:
        found = torch.randn(rows, 12, generator=draw)
        found[:, task] += 8
        found[:, 5] += 3 * task + moved * torch.rand(rows, generator=draw)
        return {"first": found, "middle": 2 * found, "last": found + torch.randn(rows, 12, generator=draw)}

    tasks = ["a", "b", "c"]
    pool = {}
    for number, name in enumerate(tasks):
        clean = features(number, 0)
        pool[name] = {"clean": clean, PERTURBED: {layer: one + shift(one, draw) for layer, one in clean.items()}}
    test = {name: {"clean": features(i, 0), "rain 5": features(i, 40)} for i, name in enumerate(tasks)}
    far = {layer: one + 60 for layer, one in features(0, 0).items()}
    return StudyFeatures(["first", "middle", "last"], pool, test, {"elsewhere": far})


def shift(features: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    moved = torch.zeros_like(features)
    moved[:, 5] = 40 * torch.rand(len(features), generator=draw)
    return moved


def test_rules_are_compared_on_the_same_rows():
    found = routing_rules.shares(study(), ["a", "b", "c"], 32, list(routing_rules.RULES))
    assert set(found) == set(routing_rules.RULES)
    assert all(row["clean"] > 0.95 for row in found.values())
    assert found[routing_rules.DEFAULT]["rain 5"] > 0.9 > found[routing_rules.PAPER]["rain 5"]
    for row in found.values():
        assert row["corrupted"] == row["worst"] == row["rain 5"]


def test_doubt_finds_rows_of_no_task_at_a_known_rate():
    found = routing_rules.doubt(study(), ["a", "b", "c"], 32)
    assert found["unseen"] == {"elsewhere": 1.0}
    assert found["false alarms"] < 0.2
    assert found["calibration error"]["test, fitted"] < 0.1
    results = {
        "suite": "toy", "tasks": ["a", "b", "c"],
        "conditions": routing_rules.shares(study(), ["a", "b", "c"], 32, [routing_rules.PAPER, routing_rules.DEFAULT]),
        "references": {"32": routing_rules.shares(study(), ["a", "b", "c"], 32, [routing_rules.PAPER])},
        "sizes": {"2": routing_rules.shares(study(), ["a", "b"], 32, [routing_rules.PAPER])}, "doubt": found,
    }  # fmt: skip
    text = routing_rules.markdown(results)
    assert "| rows of elsewhere | 1.000 |" in text
