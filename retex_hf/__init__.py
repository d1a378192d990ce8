"""Merge many fine-tuned experts into one Hugging Face checkpoint, and recover each expert from it on demand."""

from .config import RetexConfig
from .errors import ArtifactError, CheckpointError, ConfigError, InputError, RetexError, TaskError
from .merging import merge_methods, register_merge
from .model import RetexModel
from .recovery import TrainingConfig
from .routing import Routing

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "ConfigError",
    "InputError",
    "RetexConfig",
    "RetexError",
    "RetexModel",
    "Routing",
    "TaskError",
    "TrainingConfig",
    "merge_methods",
    "register_merge",
]
