"""Run a batch on the experts its rows need, and put every field of the outputs back in row order."""

from .assignment import Assignment, Group, parse_task, task_index
from .batching import Joiner, Splitter, count_rows
from .choice import check_execution
from .experts import ExpertCache, copy_with, expert_bytes, in_own_dtypes, is_plain, recover_tensors
from .outputs import attach_routing
from .runner import ExpertRunner, call_method
from .sharing import trunk_cost
from .trunk import TrunkRecord

__all__ = [
    "Assignment",
    "ExpertCache",
    "ExpertRunner",
    "Group",
    "Joiner",
    "Splitter",
    "TrunkRecord",
    "attach_routing",
    "call_method",
    "check_execution",
    "copy_with",
    "count_rows",
    "expert_bytes",
    "in_own_dtypes",
    "is_plain",
    "parse_task",
    "recover_tensors",
    "task_index",
    "trunk_cost",
]
