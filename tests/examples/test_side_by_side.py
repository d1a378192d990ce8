"""Main tables of several suites in one: every figure under its own suite, and nothing where a suite has none."""

from __future__ import annotations

import json
import sys

import side_by_side


def method(known: float, unknown: float | None, added: float, oracle: float | None = None) -> dict:
    modes = {"known": {"normalised": {"value": known}}}
    for mode, value in (("unknown", unknown), ("oracle", oracle)):
        if value is not None:
            modes[mode] = {"normalised": {"value": value}}
    return {"modes": modes, "storage": {"added": 1.0, "added_rounded": added}}


def test_a_figure_has_its_spread_over_seeds():
    assert side_by_side.figure({"value": 0.9876, "std": 0.00449}) == "0.988 ± 0.004"
    assert side_by_side.figure({"value": 0.9876}) == "0.988"


def test_every_figure_stands_under_its_suite(tmp_path, monkeypatch, capsys):
    small = {"individual": method(0.5, None, 0.75)}
    tables = {
        "a": {"sizes": {"4": {"methods": small}, "10": {"methods": {"individual": method(1, None, 0.9)}}}},
        "b": {
            "sizes": {
                "8": {
                    "methods": {
                        "individual": method(1, None, 0.875),
                        "Twin-Merging": method(0.962, 0.946, 0.159, 0.986),
                        "ReTeX": method(0.99, 0.981, 0.0351, 0.99),
                    }
                }
            }
        },
    }
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "main_table.json").write_text(json.dumps(table))
    paths = [f"a={tmp_path / 'a'}", f"b={tmp_path / 'b' / 'main_table.json'}"]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *paths])
    side_by_side.main()
    assert capsys.readouterr().out.splitlines() == [
        "| method | a, known | a, unknown | a, oracle | a, added | b, known | b, unknown | b, oracle | b, added |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| individual | 1.000 |  |  | 90.0% | 1.000 |  |  | 87.5% |",
        "| Twin-Merging |  |  |  |  | 0.962 | 0.946 | 0.986 | 15.9% |",
        "| ReTeX |  |  |  |  | 0.990 | 0.981 |  | 3.5% |",  # as with the task known
        "",
    ]
