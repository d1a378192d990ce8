"""Running a batch on the experts that its rows need, and putting the outputs back in row order."""

from .assignment import Assignment, Group, Mixture, as_active, parse_adapter_names, parse_task, task_index
from .choice import check_execution
from .expert_cache import ExpertCache, beside_own, copy_with, expert_bytes, is_plain, recover_tensors
from .joining import Joiner
from .outputs import attach_routing, logits_of
from .row_callbacks import RowCallback, announce, for_rows
from .runner import ExpertRunner, call_method, forward_inputs
from .trunk_replay import SharedTrunk, TrunkRecord, replaying, replays_cache

__all__ = [
    "Assignment",
    "ExpertCache",
    "ExpertRunner",
    "Group",
    "Joiner",
    "Mixture",
    "RowCallback",
    "SharedTrunk",
    "TrunkRecord",
    "announce",
    "as_active",
    "attach_routing",
    "beside_own",
    "call_method",
    "check_execution",
    "copy_with",
    "expert_bytes",
    "for_rows",
    "forward_inputs",
    "is_plain",
    "logits_of",
    "parse_adapter_names",
    "parse_task",
    "recover_tensors",
    "replaying",
    "replays_cache",
    "task_index",
]
