"""The examples are scripts, not a package: their folders go on the path, behind everything else."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "benchmarks")]


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` makes of the files of a test goes with the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "dataset-cache")
