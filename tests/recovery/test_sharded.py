"""FSDP2 and DeepSpeed in real processes: parameters, gradients and Adam's state are sharded, as one process trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from classifiers import make_encoders
from safetensors.torch import load_file
from sharded_worker import CONFIG, TRAINING

from retex_hf import RetexConfig, RetexModel, TrainingConfig


@pytest.mark.parametrize(("kind", "max_grad_norm"), [("fsdp", None), ("deepspeed", None), ("deepspeed", 0.5)])
def test_two_sharding_processes_give_the_losses_of_one(kind, max_grad_norm, tmp_path):
    if kind == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed compiles its own code: installed by hand")
    torch.manual_seed(0)
    models = make_encoders(tmp_path)
    worker = Path(__file__).with_name("sharded_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*launch, str(worker), kind, json.dumps(max_grad_norm), str(models), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = RetexModel.from_experts(
        models / "base",
        {task: models / task for task in ("red", "green", "blue")},
        RetexConfig(**CONFIG),
        solver="adam",
        training=TrainingConfig(**TRAINING, max_grad_norm=max_grad_norm),
        device="cpu",
        progress=False,
    )
    for process in ("0", "1"):
        records = json.loads((tmp_path / f"{process}.json").read_text())
        for record, expected in zip(records, alone.training_history, strict=True):
            assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert record["gamma"] == pytest.approx(expected["gamma"], rel=1e-4)
        for name, tensor in load_file(tmp_path / f"{process}.safetensors").items():
            torch.testing.assert_close(tensor, alone.recovery.state_dict()[name], rtol=1e-3, atol=1e-5)
