"""One seed, one result: every system, fitted and tested twice, gives the same report to the byte."""

from __future__ import annotations

from dataclasses import replace

import torch
from materials import make_material

from retex_hf import RetexConfig
from retex_hf.baselines import BASELINES, make
from retex_hf.baselines.retex import Retex
from retex_hf.evaluation import Report, evaluate

ADAMERGING = {"method": "adamerging", "steps": 3, "rows_per_task": 4, "learning_rate": 0.05}
OPTIONS = {
    "lora": {"rank": 3},
    "id_lora": {"rank": 3},
    "twin_merging": {"epochs": 2, "progress": False},
    "wemoe": {"steps": 2, "rows_per_task": 4, "progress": False},
    "mow": {"static_steps": 2, "epochs": 2, "blocks": 1, "progress": False},
}


def test_two_runs_with_one_seed_write_the_same_report(tmp_path):
    torch.manual_seed(0)
    given = make_material("bert")
    for run, noise in (("first", 1), ("second", 2)):
        torch.manual_seed(noise)  # whatever was drawn before must not matter
        material = replace(given, shared={})
        methods = [make(name, **OPTIONS.get(name, {})) for name in BASELINES]
        methods += [make("merged", merge="consensus"), make("merged", merge=ADAMERGING)]
        methods += [Retex(RetexConfig(rank=3)), Retex(RetexConfig(rank=3, merge=ADAMERGING), name="ReTeX, AdaMerging")]
        evaluations = []
        for method in methods:
            method.fit(material)
            tests = list(given.validation.values())
            evaluations.append(evaluate(method, tests, given.collate, batch_size=7, progress=False))
        Report(evaluations, resamples=50).save(tmp_path / run)
    names = ("results.json", "results.md")
    first, second = ([(tmp_path / run / name).read_bytes() for name in names] for run in ("first", "second"))
    assert first == second
