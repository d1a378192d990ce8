"""The metrics, loaded from the package by path and without a network, as a user would."""

from __future__ import annotations

import evaluate
import pytest

from retex_hf import RetexError
from retex_hf.evaluation import metric_path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path))


def test_exact_match_ignores_case_and_outer_space_and_more_where_asked():
    metric = evaluate.load(str(metric_path("exact_match")))
    pair = {"predictions": [" Yes", "The end.", "no"], "references": ["yes", "end", "maybe"]}
    assert metric.compute(**pair) == {"exact_match": pytest.approx(1 / 3)}
    assert metric.compute(**pair, ignore_case=False) == {"exact_match": 0}
    assert metric.compute(**pair, ignore_punctuation=True) == {"exact_match": pytest.approx(1 / 3)}
    squad = {"ignore_punctuation": True, "ignore_articles": True}
    assert metric.compute(**pair, **squad) == {"exact_match": pytest.approx(2 / 3)}


def test_normalised_accuracy_is_a_mean_of_ratios():
    metric = evaluate.load(str(metric_path("normalised_accuracy")))
    found = metric.compute(predictions=[0.5, 0.9], references=[1.0, 0.6])
    assert found == {"normalised_accuracy": pytest.approx((0.5 + 1.5) / 2)}  # not the ratio of means, 0.875
    with pytest.raises(ValueError, match="accuracy above 0"):
        metric.compute(predictions=[0.5], references=[0.0])


def test_task_identification_weighs_tasks_alike():
    metric = evaluate.load(str(metric_path("task_identification")))
    found = metric.compute(predictions=["a", "b", "b", "b", "b"], references=["a", "a", "a", "a", "b"])
    assert found == {"task_identification": pytest.approx((0.25 + 1) / 2), "by_task": {"a": 0.25, "b": 1.0}}


def test_a_metric_that_does_not_exist_is_refused():
    with pytest.raises(RetexError, match="no metric 'bleu'; the metrics are exact_match"):
        metric_path("bleu")
