"""How many groups of a batch run at the same time.

A group is small: its matrix products do not keep several cores busy, those of several groups do. Groups run on experts
of their own, which share no state, so they may run in threads wherever a caller could not tell the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registry
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..rows import Proof, numbers_per_row

# Parameters times numbers of the input from which threads pay off. Below, Python takes most of the time, and only one
# thread at a time runs Python.
WORTH = 1e10


def groups_at_once(model: nn.Module, kwargs: Mapping[str, Any], rows: int, groups: int, proof: Proof | None) -> int:
    """Return how many of a batch's groups to run at the same time; 1 where a caller could tell the difference.

    `proof` is that of the call, which says whether it draws random numbers; without one, groups run one by one.
    """
    threads = min(groups, torch.get_num_threads())
    if threads == 1 or proof is None or proof.draws or not _is_worth(model, kwargs, rows):
        return 1
    return threads if _is_ordinary() and not _is_watched(model) else 1


def _is_worth(model: nn.Module, kwargs: Mapping[str, Any], rows: int) -> bool:
    parameters = list(model.parameters())
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return False
    return sum(parameter.numel() for parameter in parameters) * numbers_per_row(kwargs, rows) * rows >= WORTH


def _is_ordinary() -> bool:
    """Return whether a call computes outputs and nothing else: other modes of torch belong to the thread that entered
    them, and gradients may be recorded in ways that do, too."""
    special = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.jit.is_tracing(),
        torch.compiler.is_compiling(),
        torch.autograd._profiler_enabled(),
        torch._C._functorch.peek_interpreter_stack() is not None,
    )
    return not any(special) and not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()


def _is_watched(model: nn.Module) -> bool:
    """Return whether hooks run with the model, which may rely on the order of groups, or is in training."""
    everywhere = registry._global_forward_hooks or registry._global_forward_pre_hooks
    own = (module._forward_hooks or module._forward_pre_hooks or module.training for module in model.modules())
    return bool(everywhere) or any(own)
