"""From many experts to one model, tensor by tensor. `register_merge` adds a method."""

from . import methods  # noqa: F401  (registers the built-in methods)
from .registry import Merger, TaskTensors, get_merger, merge_methods, register_merge

__all__ = ["Merger", "TaskTensors", "get_merger", "merge_methods", "register_merge"]
