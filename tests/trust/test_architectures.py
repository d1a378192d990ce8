"""The sweep over architectures of OpenCLIP and timm, in its short form."""

from __future__ import annotations

from pathlib import Path

import pytest
from trust import architectures

from retex_hf.errors import CheckpointError


@pytest.mark.parametrize("name", architectures.SHORT_OPEN_CLIP)
def test_an_architecture_of_open_clip(name: str, tmp_path: Path):
    assert architectures.outcome_of(name, architectures.try_open_clip, tmp_path) == ("right", None)


@pytest.mark.parametrize("name", architectures.SHORT_TIMM)
def test_an_architecture_of_timm(name: str, tmp_path: Path):
    assert architectures.outcome_of(name, architectures.try_timm, tmp_path) == ("right", None)


def test_what_goes_wrong_is_told_apart(tmp_path: Path):
    def raising(error: Exception):
        def attempt(name: str, work_dir: Path, seed: int) -> None:
            raise error

        return architectures.outcome_of("x", attempt, tmp_path)

    assert raising(CheckpointError("no")) == ("refused (x: no)", None)
    assert raising(architectures.Wrong("off"))[0] == "wrong"
    assert raising(ZeroDivisionError("0/0"))[0] == "traceback"
    assert "ZeroDivisionError" in raising(ZeroDivisionError("0/0"))[1]
