"""Shared fixtures: everything is seeded and runs on one thread, so that equal computations give equal bits."""

from __future__ import annotations

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that tests start take one thread each too: more threads than cores slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from huggingface_hub import constants

torch.set_num_threads(1)

# Libraries that say in their log what they are about to take away, besides in warnings (which pyproject.toml refuses).
LIBRARIES = ("transformers", "peft", "huggingface_hub", "accelerate", "datasets", "evaluate", "open_clip")
# What transformers says of a call within itself: Whisper's `generate` hands both on to the general one.
NOT_OURS = "Passing `generation_config` together with generation-related arguments"


class Deprecations(logging.Handler):
    """Keeps what a library says is deprecated."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "deprecat" in text.lower() and NOT_OURS not in text:
            self.said.append(f"{record.name}: {text}")


@pytest.fixture(autouse=True, scope="session")
def own_assets(tmp_path_factory):
    """Keep records of begun builds out of the home folder of whoever runs the tests."""
    folder = str(tmp_path_factory.mktemp("assets"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ASSETS_CACHE", folder)
        patch.setattr(constants, "HF_ASSETS_CACHE", folder)
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_deprecated():
    handler = Deprecations()
    for name in LIBRARIES:
        logging.getLogger(name).addHandler(handler)
    yield
    for name in LIBRARIES:
        logging.getLogger(name).removeHandler(handler)
    assert not handler.said, handler.said
