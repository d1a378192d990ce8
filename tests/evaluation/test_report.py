"""Reports: figures by hand, modes apart, the same file for the same seed, entries that a card accepts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub import ModelCard, ModelCardData
from toys import Toy, toy_collate, toy_tasks

from retex_hf import RetexError
from retex_hf.evaluation import Report, evaluate
from retex_hf.evaluation.figures import plot_report

SIZES = (20, 10, 40)


def evaluation(name, *, seed=0, modes=("known", "unknown"), routes=True, sizes=SIZES, **options):
    method = Toy(name, **options)
    method.modes, method.routes = modes, routes
    return evaluate(method, toy_tasks(sizes), toy_collate, seed=seed, progress=False)


def evaluations():
    """Accuracies: individual 0.75, 1, 1; ReTeX 0.6, 1, 0.9 and blind for green; merged 0.5, 1, 1."""
    return [
        evaluation("individual", wrong={"red": range(5)}, modes=("known",), routes=False, storage=3000),
        evaluation("ReTeX", wrong={"red": range(8), "blue": range(4)}, blind=["green"], storage=1400),
        evaluation("merged", wrong={"red": range(10)}, routes=False, storage=1000),
    ]


def test_figures_are_those_computed_by_hand():
    methods = Report(evaluations()).summary()["methods"]
    known, unknown = (methods["ReTeX"]["modes"][mode] for mode in ("known", "unknown"))
    assert [of["value"] for of in known["accuracy"]["tasks"].values()] == [0.6, 1.0, 0.9]
    assert known["accuracy"]["mean"]["value"] == pytest.approx(2.5 / 3, abs=1e-6)
    assert known["normalised"]["value"] == pytest.approx((0.6 / 0.75 + 1 + 0.9) / 3, abs=1e-6)
    assert unknown["normalised"]["value"] == pytest.approx((0.6 / 0.75 + 0 + 0.9) / 3, abs=1e-6)
    assert [of["value"] for of in unknown["identification"]["tasks"].values()] == [1, 0, 1]
    assert unknown["identification"]["mean"]["value"] == pytest.approx(2 / 3, abs=1e-6)
    assert "identification" not in known
    # Three experts of 1000 bytes each.
    shares = {"total": 1400, "added": 400, "added_rounded": 100}
    assert methods["ReTeX"]["storage"] == {name: round(size / 3000, 6) for name, size in shares.items()}
    assert methods["merged"]["storage"]["added"] == 0
    assert list(methods["individual"]["modes"]) == ["known"] and "oracle" not in methods["merged"]["modes"]


def test_intervals_hold_the_figure_and_are_paired_with_the_experts():
    methods = Report(evaluations()).summary()["methods"]
    assert methods["individual"]["modes"]["known"]["normalised"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    red = methods["ReTeX"]["modes"]["known"]["accuracy"]["tasks"]["red"]
    assert (red["high"] - red["low"]) / 2 == pytest.approx(1.96 * (0.6 * 0.4 / 20) ** 0.5, rel=0.1)
    assert red["low"] < red["value"] < red["high"]


def test_a_reference_is_compared_in_pairs():
    report = Report(evaluations(), reference="merged")
    methods = report.summary()["methods"]
    difference = methods["ReTeX"]["modes"]["known"]["difference"]
    assert difference["value"] == pytest.approx((0.6 - 0.5 + 0.9 - 1) / 3, abs=1e-6)
    alone = report.difference("ReTeX", "merged", "known")
    assert [difference[key] for key in ("low", "high")] == pytest.approx([alone.low, alone.high], abs=1e-6)
    assert "difference" not in methods["merged"]["modes"]["known"]
    assert report.difference("ReTeX", "merged", "unknown").excludes_zero
    with pytest.raises(RetexError, match="no evaluation of 'merged' in mode 'oracle'"):
        report.difference("ReTeX", "merged", "oracle")


def test_seeds_are_averaged_and_their_spread_is_shown():
    first, *others = evaluations()
    again = evaluation("ReTeX", seed=1, wrong={"red": range(4), "blue": range(4)}, storage=1400)
    report = Report([first, *others, again])
    entry = report.summary()["methods"]["ReTeX"]
    assert entry["seeds"] == [0, 1] and entry["state"] == {"0": {"blind": ["green"]}, "1": {"blind": []}}
    known = entry["modes"]["known"]
    assert known["accuracy"]["tasks"]["red"]["value"] == pytest.approx(0.7)
    means = [(0.6 + 1 + 0.9) / 3, (0.8 + 1 + 0.9) / 3]
    assert known["accuracy"]["mean"]["value"] == pytest.approx(np.mean(means), abs=1e-6)
    assert known["accuracy"]["mean"]["std"] == pytest.approx(np.std(means, ddof=1), abs=1e-6)
    ratios = [(0.6 / 0.75 + 1.9) / 3, (0.8 / 0.75 + 1.9) / 3]
    assert known["normalised"]["std"] == pytest.approx(np.std(ratios, ddof=1), abs=1e-6)
    assert entry["modes"]["unknown"]["identification"]["mean"]["std"] == pytest.approx(
        np.std([2 / 3, 1], ddof=1), abs=1e-6
    )
    assert "std" not in report.summary()["methods"]["merged"]["modes"]["known"]["accuracy"]["mean"]
    assert f"{100 * np.mean(means):.1f} ± {100 * np.std(means, ddof=1):.1f}" in report.markdown()


def test_bytes_that_hold_less_than_32_bits_per_number_are_not_rounded_again():
    one, retex, merged = evaluations()
    report = Report([one, replace(retex, packed_bytes=300), merged])
    assert report.summary()["methods"]["ReTeX"]["storage"]["added_rounded"] == round((300 + 100 / 4) / 3000, 6)


def test_experts_that_are_trained_again_normalise_the_methods_of_their_seed():
    first, *others = evaluations()
    trained_again = evaluation(
        "individual", seed=1, wrong={"red": range(10)}, modes=("known",), routes=False, storage=3000
    )
    again = evaluation("ReTeX", seed=1, wrong={"red": range(8), "blue": range(4)}, storage=1400)
    methods = Report([first, *others, trained_again, again]).summary()["methods"]
    both, alone = (methods[name]["modes"]["known"]["normalised"] for name in ("ReTeX", "merged"))
    ratios = [(0.6 / 0.75 + 1.9) / 3, (0.6 / 0.5 + 1.9) / 3]
    assert both["std"] == pytest.approx(np.std(ratios, ddof=1), abs=1e-6)
    assert both["value"] == pytest.approx((0.6 / 0.625 + 1.9) / 3, abs=1e-6)
    assert alone["value"] == pytest.approx((0.5 / 0.75 + 2) / 3, abs=1e-6)  # its own seed's experts


def test_two_runs_with_one_seed_write_identical_json(tmp_path):
    paths = [Report(evaluations()).save(tmp_path / name) for name in ("one", "two")]
    first, second = (path["json"].read_bytes() for path in paths)
    assert first == second
    other = Report(evaluations(), seed=1).save(tmp_path / "three")["json"].read_bytes()
    assert other != first and json.loads(other)["tasks"] == json.loads(first)["tasks"]
    assert json.loads(first) == Report(evaluations()).summary()
    assert paths[0]["md"].read_text() == paths[1]["md"].read_text()
    assert paths[0]["png"].stat().st_size > 1000


def test_markdown_keeps_the_modes_apart_and_marks_the_best():
    sections = Report(evaluations()).markdown().split("\n## ")
    assert [section.splitlines()[0] for section in sections[1:]] == ["Task known", "Task unknown", "Oracle routing"]
    known, unknown, oracle = sections[1:]
    assert "| individual | 91.7 | 100.0 [100.0, 100.0] | 100.0 | 66.7 |" in known  # the best of all does not compete
    assert "| ReTeX | **83.3** |" in known and "| merged | **83.3** |" in known  # a tie
    assert "| ReTeX | **60.0** | **100.0** | 90.0 | **83.3** |" in known
    assert "| ReTeX | 60.0 |" not in unknown and "| ReTeX | **60.0** | 0.0 | 90.0 | 50.0 |" in unknown
    assert "| ReTeX | **100.0** | 0.0 | **100.0** | 66.7 |" in unknown  # identification by task
    assert "individual |" not in unknown and "merged" not in oracle


def test_the_terminal_has_one_line_per_method():
    lines = str(Report(evaluations())).splitlines()
    titles, header, _, individual, retex, merged = lines[:6]
    assert titles.split() == ["task", "known", "task", "unknown", "oracle", "routing", "storage"]
    assert header.split() == [
        "method",
        *["accuracy", "normalised"] * 2,
        "identified",
        "accuracy",
        "normalised",
        "total",
        "added",
    ]
    assert individual.split()[0] == "individual" and individual.split()[-2:] == ["100.0", "66.7"]
    assert "50.0" in retex and "66.7" in retex and merged.split()[-2:] == ["33.3", "0.0"]


def test_without_individual_experts_nothing_is_normalised():
    report = Report(evaluations()[1:], individual=None)
    assert "normalised" not in report.summary()["methods"]["ReTeX"]["modes"]["known"]
    assert "normalised" not in str(report) and "| ReTeX | **83.3** | 0.0 |" in report.markdown()  # 1400 bytes in MB
    assert plot_report(report.summary()).axes[0].get_title() == "Task known"


def test_the_figure_has_a_panel_per_mode_and_a_bar_per_method():
    figure = plot_report(Report(evaluations()).summary())
    assert [axes.get_title() for axes in figure.axes] == ["Task known", "Task unknown", "Oracle routing"]
    widths = [bar.get_width() for bar in figure.axes[1].patches]
    assert widths == pytest.approx([100 * (0.8 + 0.9) / 3, 100 * (0.5 / 0.75 + 2) / 3], abs=1e-3)


def test_a_card_takes_the_results_and_gives_them_back():
    report = Report(evaluations())
    names = {"red": "org/red", "green": "org/green", "blue": "org/blue"}
    results = report.eval_results(names, task_type="text-classification")
    card = ModelCard.from_template(
        ModelCardData(model_name="retex", eval_results=results), template_str="---\n{{ card_data }}\n---\n"
    )
    read = ModelCard(card.content).data.eval_results
    found = {(of.dataset_type, of.metric_name): of.metric_value for of in read}
    assert len(read) == len(results) == 3 * 4
    assert found["org/red", "Accuracy (task known)"] == 0.6
    assert found["org/green", "Accuracy (task known)"] == 1.0
    assert found["org/green", "Accuracy (task unknown)"] == 0.0
    assert found["org/green", "Task identification"] == 0.0
    assert {(of.task_type, of.dataset_split) for of in read} == {("text-classification", "test")}
    with pytest.raises(RetexError, match="does not say which data set task 'green' is"):
        report.eval_results({"red": "org/red"})
    with pytest.raises(RetexError, match="no method 'EMR' in the report"):
        report.eval_results(names, method="EMR")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: [], "no evaluations to report"),
        (lambda of: of[1:], r"individual method 'individual' is not among the methods \['ReTeX', 'merged'\]"),
        (lambda of: [*of, of[1]], "two evaluations of 'ReTeX' with seed 0"),
        (lambda of: [*of, evaluation("other", sizes=(20, 10, 41))], "'other' .* were not given the same rows"),
        (lambda of: [*of, evaluation("merged", seed=1)], "'merged' was evaluated in other modes with seed 1"),
        (
            lambda of: [evaluation("individual", wrong={"green": range(10)}, storage=3)],
            "individual expert of task 'green' answers no row correctly",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused(change, message):
    with pytest.raises(RetexError, match=message):
        Report(change(evaluations()))
