"""Run a batch on the experts its rows need, and put every field of the outputs back in row order."""

from .assignment import Assignment, Group, parse_task, task_index
from .batching import Joiner, Splitter, count_rows
from .experts import ExpertCache, copy_with, recover_tensors, tensor_bytes
from .outputs import attach_routing
from .runner import ExpertRunner, call_method

__all__ = [
    "Assignment",
    "ExpertCache",
    "ExpertRunner",
    "Group",
    "Joiner",
    "Splitter",
    "attach_routing",
    "call_method",
    "copy_with",
    "count_rows",
    "parse_task",
    "recover_tensors",
    "task_index",
    "tensor_bytes",
]
