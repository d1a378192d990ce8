"""Methods that merge many experts into one model, tensor by tensor. `register_merge` adds a method."""

from . import adamerging, consensus, geometry, methods, sce, sparse  # noqa: F401  (registers the built-in methods)
from .registry import (
    Merger,
    TaskTensors,
    check_calibration,
    get_merger,
    learn_options,
    merge_methods,
    options_to_learn,
    register_merge,
)

__all__ = [
    "Merger",
    "TaskTensors",
    "check_calibration",
    "get_merger",
    "learn_options",
    "merge_methods",
    "options_to_learn",
    "register_merge",
]
