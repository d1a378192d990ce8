"""A mixed batch gives every row the answer that it gets among rows of its own task only."""

from __future__ import annotations

import pytest
import torch
from helpers import TASKS, rows_of, take
from materials import make_material, mixed_batch

from retex_hf import RetexConfig
from retex_hf.baselines import EMR, IdEMR, IdLoRA, Individual, LoRA, Merged, SiM, ZeroShotBase
from retex_hf.baselines.retex import Retex

METHODS = {
    "individual": Individual,
    "zero-shot": ZeroShotBase,
    "average": Merged,
    "identified head": lambda: Merged(head="identifier"),
    "EMR": EMR,
    "ID-EMR": IdEMR,
    "LoRA": lambda: LoRA(3),
    "ID-LoRA": lambda: IdLoRA(3),
    "SiM": SiM,
    "ReTeX": lambda: Retex(RetexConfig(rank=3)),
    "soft ReTeX": lambda: Retex(RetexConfig(rank=3, routing="soft")),
}


@pytest.mark.parametrize("kind", ["bert", "resnet", "clip", "t5"])
def test_rows_do_not_see_each_other(kind):
    material = make_material(kind)
    inputs, tasks = mixed_batch(material)
    for name, make in METHODS.items():
        method = make()
        method.fit(material)
        with torch.inference_mode():
            for known in (True, False) if "unknown" in method.modes else (True,):
                mixed = method.predict(inputs, tasks if known else None)
                assert len(mixed.answers) == len(tasks)
                for task in TASKS:
                    rows = rows_of(task, tasks)
                    alone = method.predict(take(inputs, rows), [task] * len(rows) if known else None)
                    assert [mixed.answers[row] for row in rows] == alone.answers, (name, known)
                    if mixed.tasks is not None:
                        assert [mixed.tasks[row] for row in rows] == alone.tasks, (name, known)
