"""Recovery of each expert's weights from the merged ones: shape rules, generator module, exact solver, training."""

from .closed_form import Solution, solve, solve_affine, solve_shared, spectrum
from .components import ComponentGenerator, ComponentLayout
from .design import Design, dirichlet_moments, narrow_basis
from .layout import Layout, effective_rank, plan_layout
from .module import Generator, OffsetGenerator, RecoveryModule, ScaleGenerator
from .samplers import sample_weights
from .solver import plan_layouts, relative_errors, soft_moments, solve_all
from .targets import Targets
from .training import History, TrainingConfig, clear_state, train
from .work_sharing import BuildContext

__all__ = [
    "BuildContext",
    "ComponentGenerator",
    "ComponentLayout",
    "Design",
    "Generator",
    "History",
    "Layout",
    "OffsetGenerator",
    "RecoveryModule",
    "ScaleGenerator",
    "Solution",
    "Targets",
    "TrainingConfig",
    "clear_state",
    "dirichlet_moments",
    "effective_rank",
    "narrow_basis",
    "plan_layout",
    "plan_layouts",
    "relative_errors",
    "sample_weights",
    "soft_moments",
    "solve",
    "solve_affine",
    "solve_all",
    "solve_shared",
    "spectrum",
    "train",
]
