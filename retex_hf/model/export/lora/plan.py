"""Plan of how an adapter stores each tensor of a task, decided at once because peft's mechanisms exclude each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....checkpoints import take_inventory
from ....errors import ConfigError
from .vllm_support import HEADS, VERSION, embeddings_of

SCOPES = ("all", "batch", "linear", "vllm")
# Scopes of servers, which want factors of one rank.
ONE_RANK = ("linear", "vllm")
LINEAR, CONVOLUTION, EMBEDDING, STACK, OTHER = "linear", "convolution", "embedding", "stack", "other"
# Modules of which peft can run several adapters' copies in one batch.
BATCHED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Plan:
    """Storage of changed tensors: `lora` and `saved` hold modules, `stacks` and `left` (left out) parameters."""

    lora: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    stacks: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    with_bias: bool = False


def make_plan(model: nn.Module, changed: list[str], heads: list[str], scope: str) -> Plan:
    """Return the plan of the smallest adapter that carries as much as possible.

    peft's `lora_bias`, which gives every adapted layer its own bias, excludes adapted embeddings and parameters. So
    either biases are stored with their layers and embeddings are saved whole, or embeddings have factors and layers
    with biases are saved whole; the smaller one is chosen. (peft's `bias="all"` would be a third way, but only one
    adapter of a model can have it.)
    """
    if scope == "linear":
        plan = _plan_linear(model, changed, heads)
    elif scope == "vllm":
        plan = _plan_vllm(model, changed, heads)
    else:
        plan = _smallest_plan(model, changed, heads, scope)
        if not plan.lora and not plan.stacks and not _adaptable(model, plan):
            # All layers are in modules that are saved whole because of a parameter of their own (BEiT's).
            plan = _smallest_plan(model, changed, heads, scope, with_layers=False)
    if not plan.lora and not plan.stacks:
        # peft refuses an adapter that adapts nothing (experts that differ only in their heads): add zero factors.
        plan.lora.update(_adaptable(model, plan)[:1])
    return plan


def _smallest_plan(
    model: nn.Module, changed: list[str], heads: list[str], scope: str, with_layers: bool = True
) -> Plan:
    plans = [_plan(model, changed, heads, scope, with_bias, with_layers) for with_bias in (False, True)]
    return min(plans, key=lambda plan: (len(plan.left), _numbers(model, plan)))


def _adaptable(model: nn.Module, plan: Plan) -> list[str]:
    """Return the linear layers that are not saved whole."""
    layers = [name for name, _ in model.named_modules() if name and _kind(model, name, "weight") == LINEAR]
    return [name for name in layers if name not in plan.saved and not _inside(name, plan.saved)]


def _plan_linear(model: nn.Module, changed: list[str], heads: list[str]) -> Plan:
    """Plan for the weights of linear layers, without a language model's output layer, which servers refuse."""
    plan = Plan(left={*changed, *heads})
    outputs = _table(model, "get_output_embeddings")
    for name in changed:
        module, _, attribute = name.rpartition(".")
        if attribute != "weight" or _kind(model, module, attribute) != LINEAR:
            continue
        if model.get_submodule(module).weight is not outputs:
            plan.lora.add(module)
            plan.left.discard(name)
    return plan


def _plan_vllm(model: nn.Module, changed: list[str], heads: list[str]) -> Plan:
    """Plan for what vLLM takes of the architecture: linear layers, embeddings, and a classifier's output layer."""
    plan, ties = Plan(), take_inventory(model).aliases
    taken = embeddings_of(type(model).__name__)
    outputs = _table(model, "get_output_embeddings")
    for name in changed:
        slots = [_slot(model, alias) for alias in ties[name]]
        if all(_fits_vllm(model, *slot, taken, outputs) for slot in slots):
            plan.lora.update(module for module, _ in slots)
        else:
            plan.left.add(name)
    for name in heads:
        module = _slot(model, name)[0]
        if module not in HEADS or not isinstance(model.get_submodule(module), nn.Linear):
            raise ConfigError(
                f"The tasks' heads hold {name!r}, and vLLM {VERSION} takes heads that are one linear layer named "
                f"{' or '.join(HEADS)}: serve the artifact with the embedded engine (`retex serve`)."
            )
        plan.saved.add(module)
    return plan


def _fits_vllm(model: nn.Module, module: str, attribute: str, taken: tuple[str, ...], outputs: Tensor | None) -> bool:
    """Return whether vLLM takes factors of a parameter."""
    if attribute != "weight":
        return False
    kind, weight = _kind(model, module, attribute), model.get_submodule(module).get_parameter("weight")
    if kind == EMBEDDING or weight is outputs:
        return module.rpartition(".")[2] in taken
    return kind == LINEAR and not isinstance(model.get_submodule(module), Conv1D)


def _plan(
    model: nn.Module, changed: list[str], heads: list[str], scope: str, with_bias: bool, with_layers: bool
) -> Plan:
    """Plan for all tensors; `with_layers` allows saving whole a module that contains linear layers."""
    plan = Plan(with_bias=with_bias)
    ties = take_inventory(model).aliases
    slots = [(name, *_slot(model, alias)) for name in changed for alias in ties[name]]
    biased = {module for _, module, attribute in slots if attribute == "bias"}
    layered = {name for name, *slot in slots if _kind(model, *slot) in (LINEAR, CONVOLUTION, EMBEDDING)}
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    words = _table(model, "get_input_embeddings")
    for name, module, attribute in slots:
        kind = _kind(model, module, attribute)
        if kind in (LINEAR, CONVOLUTION):
            way = "saved" if module in biased and not with_bias else "lora"
        elif kind == EMBEDDING:
            # Position embeddings and the like are looked up once for all rows, which peft cannot split by row.
            if scope == "batch" and model.get_submodule(module).weight is not words:
                way = "left"
            else:
                way = "saved" if with_bias else "lora"
        elif kind == STACK and scope == "all" and not with_bias and not transposed:
            way = "stacks"
        else:
            way = "saved"
        if way == "saved" and not _can_save(model, module, scope, with_layers):
            if kind == OTHER and name in layered:
                continue  # a layer also has and uses it (BERT's output bias); this module only holds it
            way = "left"
        getattr(plan, way).add(module if way in ("lora", "saved") else name)
    for name in heads:
        module = _slot(model, name)[0]
        if _can_save(model, module, scope, with_layers):
            plan.saved.add(module)
        else:
            plan.left.add(name)
    for module in _clashing(model, plan.saved):
        plan.saved.discard(module)
        plan.left.update(name for name in (*changed, *heads) if _slot(model, name)[0] == module)
    plan.saved = plan.saved.union(*(_named_like(model, name) for name in plan.saved))
    plan.saved = {name for name in plan.saved if not _inside(name, plan.saved)}
    plan.lora = {name for name in plan.lora if name not in plan.saved and not _inside(name, plan.saved)}
    plan.stacks = {name for name in plan.stacks if not _inside(name, plan.saved)}
    plan.with_bias = with_bias and bool(biased & plan.lora)
    return plan


def _table(model: nn.Module, method: str) -> Tensor | None:
    """Return the weight of a model's input or output embeddings, or None."""
    try:
        return getattr(getattr(model, method)(), "weight", None)
    except (AttributeError, NotImplementedError):  # an image model, or one of OpenCLIP
        return None


def _slot(model: nn.Module, name: str) -> tuple[str, str]:
    """Return the module whose forward uses a tensor, and the tensor's name in it."""
    module, _, attribute = name.rpartition(".")
    parent = module.rpartition(".")[0]
    # Attention uses its output layer's weights without calling the layer.
    if module and isinstance(model.get_submodule(parent), nn.MultiheadAttention):
        return parent, name.removeprefix(f"{parent}.")
    return module, attribute


def _kind(model: nn.Module, module: str, attribute: str) -> str:
    owner = model.get_submodule(module)
    parent = model.get_submodule(module.rpartition(".")[0])
    if isinstance(owner, (nn.Linear, Conv1D)) and not isinstance(parent, nn.MultiheadAttention):
        return LINEAR
    if isinstance(owner, nn.Conv2d):  # speech models access attributes of other convolutions that peft's wrapper hides
        # peft's factors are convolutions with the same stride and padding, but no other options.
        plain = owner.groups == 1 and set(owner.dilation) == {1} and owner.padding_mode == "zeros"
        return CONVOLUTION if plain else OTHER
    if isinstance(owner, nn.Embedding):
        return EMBEDDING if owner.max_norm is None else OTHER
    parameter = owner._parameters.get(attribute)
    if module and parameter is not None and parameter.ndim == 3 and min(parameter.shape) > 1:
        return STACK
    return OTHER


def _can_save(model: nn.Module, name: str, scope: str, with_layers: bool) -> bool:
    """Return whether peft can store a module whole, along with all others whose names end in its name.

    peft does not tell such modules apart. Refuse modules that contain the model's layers, which would be half the
    model.
    """
    others = _named_like(model, name)
    if not name or any(_inside(other, [name]) for other in others):
        return False
    for found in (name, *others):
        module = model.get_submodule(found)
        if scope == "batch" and not isinstance(module, BATCHED):
            return False
        if any(isinstance(inner, (nn.ModuleList, nn.Sequential)) for inner in module.modules()):
            return False
        if not with_layers and any(isinstance(inner, (nn.Linear, Conv1D)) for inner in list(module.modules())[1:]):
            return False
    return True


def _named_like(model: nn.Module, name: str) -> set[str]:
    """Return the other modules that peft stores along with a module of this name."""
    return {other for other, _ in model.named_modules() if other.endswith(name) and other != name}


def _clashing(model: nn.Module, saved: set[str]) -> list[str]:
    """Return modules that peft cannot store, because it would also store part of another module's copy.

    peft's copies do not nest. One example is ConvNeXt's last `layernorm`, which shares its name with norms in the
    layers.
    """
    outer = {name for name in saved if not _inside(name, saved)}
    return [name for name in outer if any(_inside(other, outer) for other in _named_like(model, name))]


def is_mergeable(model: nn.Module, plan: Plan) -> bool:
    for names in take_inventory(model).aliases.values():
        if sum(name.removesuffix(".weight") in plan.lora for name in names) > 1:
            return False
    biases = (getattr(model.get_submodule(module), "bias", None) for module in plan.lora if plan.with_bias)
    return all(bias is not None for bias in biases)


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _numbers(model: nn.Module, plan: Plan) -> int:
    """Return how many numbers a plan stores besides factors."""
    return sum(tensor.numel() for name in plan.saved for tensor in model.get_submodule(name).state_dict().values())
