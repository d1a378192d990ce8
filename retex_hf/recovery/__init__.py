"""From the merged weights back to each expert's: shape rules, generator module, closed-form solver."""

from .closed_form import Solution, solve
from .module import OffsetGenerator, RecoveryModule
from .shapes import Layout, effective_rank, plan_layout

__all__ = [
    "Layout",
    "OffsetGenerator",
    "RecoveryModule",
    "Solution",
    "effective_rank",
    "plan_layout",
    "solve",
]
