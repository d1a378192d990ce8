"""The parameters that a model has used by the time its features are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functions
from torch.func import functional_call

from .features import Entry, FeatureExtractor, first_tensor, ordinary

# Output fields for the state of later calls; a pass that is skipped does not fill them.
CACHE_FIELDS = ("past_key_values", "cache_params")


def trunk_parameters(extractor: FeatureExtractor, inputs: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return the names (in `model`, of which the extractor has a copy) of the tensors that the features depend on.

    The autograd graph gives them for any architecture. It is traversed, not run: autograd does not run in a process
    that was forked from one where it has run. The statistics of batch normalisation are not in the graph; they follow
    the weights of the same module.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaves = {
            name: ordinary(tensor).detach().requires_grad_() for name, tensor in extractor.entry.named_parameters()
        }
        kwargs = {name: ordinary(value) for name, value in extractor.select(inputs).items()}
        collected = extractor.collect(lambda **values: functional_call(extractor.entry, leaves, (), values), kwargs)
        hidden = first_tensor(collected[extractor.layers[-1]])
    reached = _leaves_of_graph(hidden)
    used = {name for name, leaf in leaves.items() if id(leaf) in reached}
    touched = {name.rpartition(".")[0] for name in used}
    used |= {name for name, _ in extractor.entry.named_buffers() if name.rpartition(".")[0] in touched}
    # The copy shares its parameters with the model; it has its own buffers, which are matched by name.
    full = {name.removeprefix("model.") for name in used}
    tensors = dict(extractor.model.state_dict(keep_vars=True))
    shared = {id(tensors[name]) for name in full if name in tensors}
    return [name for name in model.state_dict() if name in full or id(tensors[name]) in shared]


def _leaves_of_graph(tensor: Tensor) -> set[int]:
    """Return the ids of the leaves that a tensor was computed from."""
    seen, leaves, waiting = set(), set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _functions.AccumulateGrad):
            leaves.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return leaves


@torch.no_grad()
def keeps_cache(extractor: FeatureExtractor, inputs: Mapping[str, Any], model: nn.Module) -> bool:
    """Return whether a pass of the model leaves a cache for the next one (a decoder's keys and values)."""
    accepted = {name: value for name, value in extractor.select(inputs).items() if name != "use_cache"}
    output = Entry(model)(**accepted)
    return any(getattr(output, name, None) is not None for name in CACHE_FIELDS)


def answers(output: Any) -> Tensor:
    """Return the main tensor of a model's output: logits, or the first tensor."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    return first_tensor(output) if logits is None else logits


def describe_trunk(trunk: Mapping[str, Any]) -> str:
    """Describe the cost of a shared trunk in words."""
    costs = trunk["cost"]
    change = sum(cost["change"] for cost in costs.values()) / len(costs)
    text = (
        f"Shared trunk up to {trunk['junction']}: outputs move by {change:.1%} of the way back to the merged model "
        "(mean over tasks, on held-out reference inputs)"
    )
    agreements = {task: cost["agreement"] for task, cost in costs.items() if "agreement" in cost}
    if agreements:
        worst = min(agreements, key=agreements.__getitem__)
        text += f"; {sum(agreements.values()) / len(agreements):.1%} of the answers stay the same"
        text += f", fewest in {worst!r} ({agreements[worst]:.1%})"
    lost = [cost["lost"] for cost in costs.values() if "lost" in cost]
    if lost:
        text += f"; {sum(lost) / len(lost):.1%} of right answers are expected to be lost"
    if not trunk["replayed"]:
        text += "; the trunk still runs twice, because what its layers leave in the cache cannot be passed on"
    return text + "."
