"""The table of experts per stored byte: points on small suites, figures with intervals, and resumption."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TASKS
from materials import make_material

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import growing
from bytes_bench import MERGED, ONE_RANK, RIVALS, Bench, RetexModel, measure_all, planned
from bytes_table import FLOAT, FORMS, Point, as_hex, as_json, compare, figure, markdown, summary, tabulate
from experiment import RETEX, Study
from recipes import Recipe

from retex_hf.errors import ConfigError


@pytest.fixture
def bench_of(tmp_path):
    def make(kind: str, exclude: tuple[str, ...] = ()) -> Bench:
        torch.manual_seed(0)
        material = make_material(kind, rows=8)
        experts = {}
        for name, model in {"base": material.base, **material.experts}.items():
            experts[name] = str(tmp_path / kind / name)
            model.save_pretrained(experts[name])
        material = replace(material, base=experts.pop("base"), experts=experts, shared={})
        recipe = Recipe(suite="text", config={"exclude": list(exclude)}, batch_size=5)
        study = Study(recipe, material, list(material.validation.values()))
        return Bench(study, study.tests, "test", tmp_path / "work", None)

    return make


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_systems_with_enough_bytes_answer_as_the_experts(bench_of, kind):
    bench = bench_of(kind)
    points = measure_all(bench, [RETEX, "SVD on merged", "Twin-Merging"], [0.6], ["float"])
    assert [point.method for point in points] == [MERGED, RETEX, "SVD on merged", "Twin-Merging"]
    merged, *others = points
    assert merged.share == 0 and merged.error == pytest.approx(1)
    assert not all(rows.all() for rows in merged.agrees.values())
    for point in others:
        assert 0.2 < point.share <= 0.6 and point.error < 0.01
        assert all(rows.all() for rows in point.agrees.values()), point.method
    rows = tabulate(points, bench.experts_correct)
    assert [row.results["agreement"].value for row in rows[1:]] == [1.0, 1.0, 1.0]


def test_retex_is_built_at_the_size_of_rivals_that_have_one(bench_of):
    bench = bench_of("bert")
    points = measure_all(bench, [RETEX, "BitDelta", "EMR"], [0.05], FORMS)
    rows = tabulate(points, bench.experts_correct)
    fixed = [row for row in rows if row.point.method in ("BitDelta", "EMR")]
    assert sorted(row.point.width for row in fixed) == ["", "3", "float"]
    for row in fixed:
        (ours,) = (
            other.point for other in rows if other.point.method == RETEX and other.point.budget == row.point.budget
        )
        assert ours.share <= row.point.budget == row.point.share
        assert "lead" in row.results


def test_a_second_run_computes_nothing(bench_of, monkeypatch):
    arguments = [RETEX, "SVD on base"], [0.1, 0.2], FORMS
    bench = bench_of("bert")
    first = measure_all(bench, *arguments)
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(Bench, "answers", lambda *_: pytest.fail("answered again"))
    again = Bench(bench.study, bench.study.tests, "test", bench.cells.parent, None)
    second = measure_all(again, *arguments)
    assert [point.as_dict() for point in first] == [point.as_dict() for point in second]


def test_excluded_tensors_do_not_count_in_the_error(bench_of):
    bench = bench_of("bert", ("*embeddings*",))
    point = bench.rival("SVD on merged", "float", 0.6)
    assert point is not None and point.error < 0.01
    method = bench.fit(RIVALS["SVD on merged"], FLOAT, 0.01)
    assert not any("embeddings" in name for name in method.differences.sides)


def point(method: str, width: str, correct: list[list[int]], agrees: list[list[int]], budget: float = 0.1):
    rows = [dict(zip(TASKS, np.array(found, dtype=bool), strict=False)) for found in (correct, agrees)]
    return Point(method, width, budget, budget, 0.0, {}, *rows)


EXPERTS = {"red": np.array([1, 1, 1, 0], dtype=bool), "green": np.array([1, 1, 0, 0], dtype=bool)}


def test_figures_are_means_over_tasks_relative_to_the_experts():
    ours = point(RETEX, "", [[1, 1, 1, 0], [1, 1, 0, 0]], [[1, 1, 1, 1], [1, 1, 1, 0]])
    other = point("x", "", [[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 1, 0, 1], [1, 1, 0, 1]])
    found = compare(other, ours, EXPERTS)
    assert found["normalised"].value == pytest.approx((2 / 3 + 3 / 2) / 2)
    assert found["worst"].value == pytest.approx(2 / 3)
    assert found["agreement"].value == pytest.approx(0.75)
    assert found["lead"]["normalised"].value == pytest.approx(1 - (2 / 3 + 3 / 2) / 2)
    assert found["lead"]["agreement"].value == pytest.approx(7 / 8 - 3 / 4)
    assert found["lead"]["agreement"].low <= 1 / 8 <= found["lead"]["agreement"].high


def test_differences_are_paired_by_rows():
    """The same rows right: the difference is zero in every resample, however wide each interval is."""
    right = [[1, 0, 1, 0], [1, 1, 0, 0]]
    found = compare(point("x", "", right, right), point(RETEX, "", right, right), EXPERTS)
    assert found["agreement"].low < found["agreement"].high
    for lead in found["lead"].values():
        assert (lead.value, lead.low, lead.high) == (0, 0, 0)


def test_the_summary_counts_who_is_ahead():
    right, wrong = [[1] * 40, [1] * 40], [[0] * 40, [0] * 40]
    experts = {task: np.ones(40, dtype=bool) for task in TASKS[:2]}
    ours = point(RETEX, "", right, right)
    others = [point("behind", "3", wrong, wrong), point("level", "float", right, right)]
    text = summary(tabulate([*others, ours], experts))
    assert text.splitlines()[-1] == "| agreement | 1 | 0 | 0 |"  # bfloat16 is no other rival
    text = summary(tabulate([*others, point("level", "4", right, right), ours], experts))
    assert text.splitlines()[-1] == "| agreement | 1 | 1 | 0 |"
    text = summary(tabulate([point("ahead", "", right, right), point(RETEX, "", wrong, wrong)], experts))
    assert text.splitlines()[-1] == "| agreement | 0 | 0 | 1 |"


def test_a_form_is_a_line_of_its_own():
    right = [[1, 1, 1, 0], [1, 1, 0, 0]]
    points = [point("x", "4", right, right), point("x", "float", right, right), point(RETEX, "", right, right)]
    rows = tabulate(points, EXPERTS)
    assert [row.point.line for row in rows] == [RETEX, "x", "x, bfloat16"]
    lines = markdown(rows, "t").splitlines()
    assert lines[-1].startswith("| x | 16 | 10 | 10 | 3.2 | 1.000 | 1.000 | 0.625 | 0.000 | +0.0 [+0.0, +0.0] |"), (
        lines[-1]
    )
    assert len(figure(rows).axes) == 2


def test_every_rival_fits_its_share(bench_of):
    bench = bench_of("bert")
    for label, form, share in planned(list(RIVALS), [0.05], FORMS):
        method = bench.fit(RIVALS[label], form, share)
        assert method.added_bytes() >= 0
        assert share is None or method.added_bytes() <= share * bench.experts_bytes
        if RIVALS[label].has_bits:
            assert (method.bits is None) == (form == FLOAT)


def test_around_the_base_the_merged_model_is_the_base(bench_of, monkeypatch):
    bench, built = bench_of("bert"), []
    make = RetexModel.from_experts
    monkeypatch.setattr(
        RetexModel,
        "from_experts",
        lambda *args, **options: built.append(make(*args, **options)) or built[-1],
    )
    found = bench.around_base(0.6)
    assert found is not None and found.share <= 0.6 and found.error < 0.01
    for name, tensor in bench.weights.base.items():
        assert torch.equal(built[0].model.state_dict()[name], tensor), name


def test_rivals_of_an_earlier_run_are_taken(bench_of, tmp_path, monkeypatch):
    bench = bench_of("bert")
    arguments = ["SVD on base", "BitDelta"], [0.1], FORMS
    first = measure_all(bench, *arguments)
    file = tmp_path / "bytes.json"
    rows = tabulate(first, bench.experts_correct)
    results = {
        "experts_correct": as_hex(bench.experts_correct),
        "points": [as_json(row) for row in rows],
    }
    results["recipe"] = {"config": {"exclude": []}}
    file.write_text(json.dumps(results))
    again = Bench(bench.study, bench.study.tests, "test", tmp_path / "elsewhere", None)
    again.learn(file)
    again.merged()
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured again"))
    second = measure_all(again, *arguments)
    assert [point.as_dict() for point in first] == [point.as_dict() for point in second]
    joined = [Point.from_dict(point) for point in again.read(file)["points"]]
    assert [as_json(row) for row in tabulate(joined, again.experts_correct)] == results["points"]
    results["recipe"]["config"]["exclude"] = ["*bias"]
    file.write_text(json.dumps(results))
    with pytest.raises(ConfigError, match="recover other tensors"):
        again.learn(file)
    results["experts_correct"]["red"] = "1"
    file.write_text(json.dumps(results))
    with pytest.raises(ConfigError, match="its experts answered other rows"):
        again.learn(file)


def test_one_rank_is_the_largest_that_fits(bench_of):
    bench = bench_of("bert")
    found, more = bench.one_rank(0.2), bench.one_rank(0.4)
    assert found is not None and more is not None and bench.one_rank(1e-6) is None
    assert 0.1 < found.share <= 0.2 < more.share <= 0.4
    assert found.state["rank"] < more.state["rank"] and found.error > more.error


def test_growing_numbers_of_tasks(bench_of, tmp_path):
    study = bench_of("bert").study
    rows = []
    for size in (2, 3):
        found = growing.points_of(study.subset(size), 0.3, tmp_path, None)
        assert [point.method for point, _ in found] == [
            MERGED,
            RETEX,
            ONE_RANK,
            "SVD on merged",
        ]
        rows += [growing.row(point, experts, study.tasks[:2]) for point, experts in found]
        merged, _ = found[0]
        shares = [merged.agrees[task].mean() for task in study.tasks[:size]]
        last = rows[-len(found)]
        assert last["tasks"] == size
        assert last["agreement"]["value"] == pytest.approx(np.mean(shares))
        assert last["first"]["agreement"]["value"] == pytest.approx(np.mean(shares[:2]))
    assert growing.markdown(rows, 2).count("\n| ") == 1 + len(rows)
    assert len(growing.figure(rows).axes) == 2
