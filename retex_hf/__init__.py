"""Merge many fine-tuned experts into one Hugging Face checkpoint, and recover each expert from it on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RetexConfig
    from .errors import (
        ArtifactError,
        CheckpointError,
        ConfigError,
        HubError,
        InputError,
        RetexError,
        TaskError,
        WriteError,
    )
    from .merging import merge_methods, register_merge
    from .model.retex_model import RetexModel
    from .recovery import TrainingConfig
    from .routing import Routing
    from .workflows.verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "ConfigError",
    "HubError",
    "InputError",
    "RetexConfig",
    "RetexError",
    "RetexModel",
    "Routing",
    "TaskError",
    "TrainingConfig",
    "Verification",
    "WriteError",
    "merge_methods",
    "register_merge",
    "verify",
]
_HOMES = {
    "RetexConfig": "config",
    "RetexModel": "model.retex_model",
    "Routing": "routing",
    "TrainingConfig": "recovery",
    "Verification": "workflows.verification",
    "merge_methods": "merging",
    "register_merge": "merging",
    "verify": "workflows.verification",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `retex --help` does not wait for torch and transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
