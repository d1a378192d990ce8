"""A recovered task as a PEFT adapter on the merged model: `G_t S` is `lora_B @ lora_A`.

What is not a matrix goes by peft's other means. Not all of them go together, so a plan decides first which tensor takes
which way; the tensors follow it. The plan looks at names and shapes only, never at a task's values: adapters of several
tasks can be loaded into one `PeftModel` only if they treat every module alike.
"""

from __future__ import annotations

import re
import shutil
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .checkpoints import take_inventory
from .checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_STEM, PREFIX, TASK_CLASSES
from .config import CONFIG_NAME
from .errors import ArtifactError, ConfigError, RetexError, shorten
from .execution import is_plain, task_index
from .folders import check_target, move_into_place
from .parts import RetexParts
from .recovery import RecoveryModule
from .recovery.shapes import GENERATED_FIRST, MATRIX

SCOPES = ("all", "batch", "linear")
LINEAR, CONVOLUTION, EMBEDDING, STACK, OTHER = "linear", "convolution", "embedding", "stack", "other"
# Modules of which peft can run several adapters' own copies in one batch.
BATCHED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Directions of a whole difference that are weaker than this, relative to the strongest, are rounding.
NEGLIGIBLE = 1e-6
OWN_FILES = ("adapter_*",)


@dataclass(frozen=True)
class LoraExport:
    """What an exported adapter carries, and how.

    `lora` maps modules to the rank of their factors; `bias` are the biases that ride with them (peft's `lora_bias`),
    `modules_to_save` the modules that are stored whole, `target_parameters` the parameters that have factors without
    being a module's weight. `left_out` maps parameters that the adapter does not carry to the size of their difference
    relative to the parameter, `left_out_share` is their part of the whole difference (both as Frobenius norms).
    `num_outputs` is set where the task's head is of another width than the one in the merged model's folder; such tasks
    cannot share a batch in peft. `mergeable` says whether peft's `merge_and_unload` would give the expert: not where
    tied weights have factors each (it adds both), nor where a layer without a bias gets one (it refuses).
    """

    task: str
    folder: Path
    lora: dict[str, int]
    bias: list[str]
    modules_to_save: list[str]
    target_parameters: list[str]
    left_out: dict[str, float]
    left_out_share: float
    bytes: int
    num_outputs: int | None = None
    mergeable: bool = True

    def __str__(self) -> str:
        ranks = sorted(set(self.lora.values()))
        carried = []
        if ranks:
            rank = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
            carried.append(f"LoRA of {len(self.lora)} modules (rank {rank})")
        for names, what in (
            (self.target_parameters, "LoRA of {} parameters"),
            (self.bias, "{} biases"),
            (self.modules_to_save, "{} modules saved whole"),
        ):
            carried += [what.format(len(names))] if names else []
        lines = [f"Task {self.task!r} in {self.folder}: {', '.join(carried)}; {self.bytes / 1e6:.2f} MB."]
        if self.left_out:
            lines.append(
                f"Left out: {len(self.left_out)} tensors, {self.left_out_share:.2%} of the difference: "
                f"{shorten(self.left_out)}."
            )
        if self.num_outputs is not None:
            lines.append(
                f"Its head has {self.num_outputs} outputs, unlike the merged model's: load that with "
                f"num_labels={self.num_outputs}, ignore_mismatched_sizes=True."
            )
        if not self.mergeable:
            lines.append("Use it as it is: peft cannot merge it. RetexModel.merge_and_unload gives the merged expert.")
        return "\n".join(lines)


@dataclass
class _Plan:
    """Which way every changed tensor goes. `lora` holds modules, `saved` modules, `stacks` and `left` parameters."""

    lora: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    stacks: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    with_bias: bool = False


@torch.no_grad()
def export_lora(parts: RetexParts, task: str, save_directory: str | Path, *, scope: str = "all") -> LoraExport:
    """Write a task as an adapter on the merged model. See `RetexModel.export_lora`."""
    model, recovery = parts.model, parts.recovery
    index, heads = task_index(task, parts.config.tasks), parts.heads[task]
    if scope not in SCOPES:
        raise ConfigError(f"scope must be one of {list(SCOPES)}, not {scope!r}.")
    if any(recovery.scale(name) is not None for name in recovery):
        raise ConfigError(
            'An affine recovery scales the merged weights, which no LoRA adapter can: build with recovery="offset", or '
            "save merge_and_unload(task)."
        )
    folder = _check_folder(Path(save_directory))
    _check_plain(model, [*recovery, *heads])
    offsets = _Offsets(model, recovery, heads, recovery.task_embedding[index])
    plan = make_plan(model, list(recovery), list(heads), scope)
    tensors, ranks = _lora_tensors(offsets, plan, uniform=scope == "linear")
    stacks, stack_ranks = _stack_tensors(offsets, plan)
    tensors |= stacks | _saved_tensors(offsets, plan)
    config = _config(model, plan, ranks, stack_ranks, list(heads), scope, base_name(parts.side_folder))
    _write(tensors, config, folder)
    left_out = {name: offsets.relative_size(name) for name in sorted(plan.left)}
    export = LoraExport(
        task,
        folder,
        lora=ranks,
        bias=sorted(offsets.biases(plan)),
        modules_to_save=sorted(plan.saved),
        target_parameters=sorted(plan.stacks),
        left_out=left_out,
        left_out_share=offsets.share(plan.left),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        num_outputs=offsets.other_width() if plan.saved else None,
        mergeable=_is_mergeable(model, plan),
    )
    if left_out and scope == "all":
        warnings.warn(
            f"The adapter of task {task!r} does not carry {shorten(left_out)}, for which peft has no means: "
            f"{export.left_out_share:.2%} of the difference.",
            stacklevel=3,
        )
    return export


def make_plan(model: nn.Module, changed: list[str], heads: list[str], scope: str) -> _Plan:
    """The smallest adapter that carries all it can.

    peft's `lora_bias`, which gives every adapted layer a bias of its own, excludes adapted embeddings and parameters.
    So either biases ride with their layers and the embeddings are saved whole, or embeddings have factors and the
    layers with biases are saved whole; whichever is fewer numbers. (peft's `bias="all"` would be a third way, but only
    one adapter of a model can have it.)
    """
    if scope == "linear":
        plan = _plan_linear(model, changed, heads)
    else:
        plan = _smallest_plan(model, changed, heads, scope)
        if not plan.lora and not plan.stacks and not _adaptable(model, plan):
            # All layers are in modules that are saved whole for the sake of a parameter of their own (BEiT's).
            plan = _smallest_plan(model, changed, heads, scope, with_layers=False)
    if not plan.lora and not plan.stacks:
        # peft refuses an adapter that adapts nothing (of experts that differ in their heads alone): factors of zero.
        plan.lora.update(_adaptable(model, plan)[:1])
    return plan


def _smallest_plan(
    model: nn.Module, changed: list[str], heads: list[str], scope: str, with_layers: bool = True
) -> _Plan:
    plans = [_plan(model, changed, heads, scope, with_bias, with_layers) for with_bias in (False, True)]
    return min(plans, key=lambda plan: (len(plan.left), _numbers(model, plan)))


def _adaptable(model: nn.Module, plan: _Plan) -> list[str]:
    """Linear layers that are not saved whole."""
    layers = [name for name, _ in model.named_modules() if name and _kind(model, name, "weight") == LINEAR]
    return [name for name in layers if name not in plan.saved and not _inside(name, plan.saved)]


def _plan_linear(model: nn.Module, changed: list[str], heads: list[str]) -> _Plan:
    """The weights of linear layers, without the output layer of a language model, which servers refuse."""
    plan = _Plan(left={*changed, *heads})
    outputs = _table(model, "get_output_embeddings")
    for name in changed:
        module, _, attribute = name.rpartition(".")
        if attribute != "weight" or _kind(model, module, attribute) != LINEAR:
            continue
        if model.get_submodule(module).weight is not outputs:
            plan.lora.add(module)
            plan.left.discard(name)
    return plan


def _plan(
    model: nn.Module, changed: list[str], heads: list[str], scope: str, with_bias: bool, with_layers: bool
) -> _Plan:
    """One way for everything; `with_layers` lets modules be saved whole that hold linear layers."""
    plan = _Plan(with_bias=with_bias)
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
            # Positions and the like are looked up once for all rows, which peft cannot split by row.
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
                continue  # a layer has it too and uses it (BERT's output bias); the module above holds it only
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
    """The weight of a model's input or output embeddings."""
    try:
        return getattr(getattr(model, method)(), "weight", None)
    except (AttributeError, NotImplementedError):  # a model of images, or of OpenCLIP
        return None


def _slot(model: nn.Module, name: str) -> tuple[str, str]:
    """The module whose forward uses a tensor, and the tensor's name in it."""
    module, _, attribute = name.rpartition(".")
    parent = module.rpartition(".")[0]
    # Attention calls its output layer's weights, not the layer.
    if module and isinstance(model.get_submodule(parent), nn.MultiheadAttention):
        return parent, name.removeprefix(f"{parent}.")
    return module, attribute


def _kind(model: nn.Module, module: str, attribute: str) -> str:
    owner = model.get_submodule(module)
    parent = model.get_submodule(module.rpartition(".")[0])
    if isinstance(owner, (nn.Linear, Conv1D)) and not isinstance(parent, nn.MultiheadAttention):
        return LINEAR
    if isinstance(owner, nn.Conv2d):  # of other convolutions, models of speech ask for what peft's wrapper hides
        # peft's factors are convolutions themselves, with stride and padding, but without the rest.
        plain = owner.groups == 1 and set(owner.dilation) == {1} and owner.padding_mode == "zeros"
        return CONVOLUTION if plain else OTHER
    if isinstance(owner, nn.Embedding):
        return EMBEDDING if owner.max_norm is None else OTHER
    parameter = owner._parameters.get(attribute)
    if module and parameter is not None and parameter.ndim == 3 and min(parameter.shape) > 1:
        return STACK
    return OTHER


def _can_save(model: nn.Module, name: str, scope: str, with_layers: bool) -> bool:
    """Whether peft can store a module whole, with all others whose names end alike, which it does not tell apart. A
    module that holds layers of the model would be half the model."""
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
    """Other modules that peft stores with a module of this name."""
    return {other for other, _ in model.named_modules() if other.endswith(name) and other != name}


def _clashing(model: nn.Module, saved: set[str]) -> list[str]:
    """Modules that peft cannot store because it would store a part of another one's copy too: its copies do not nest.
    ConvNeXt's last `layernorm` is one, because the norms in its layers are called so too."""
    outer = {name for name in saved if not _inside(name, saved)}
    return [name for name in outer if any(_inside(other, outer) for other in _named_like(model, name))]


def _is_mergeable(model: nn.Module, plan: _Plan) -> bool:
    for names in take_inventory(model).aliases.values():
        if sum(name.removesuffix(".weight") in plan.lora for name in names) > 1:
            return False
    biases = (getattr(model.get_submodule(module), "bias", None) for module in plan.lora if plan.with_bias)
    return all(bias is not None for bias in biases)


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _numbers(model: nn.Module, plan: _Plan) -> int:
    """Numbers that a plan stores besides factors."""
    return sum(tensor.numel() for name in plan.saved for tensor in model.get_submodule(name).state_dict().values())


@dataclass
class _Offsets:
    """The differences of one task from the merged model."""

    model: nn.Module
    recovery: RecoveryModule
    heads: Mapping[str, Tensor]
    embedding: Tensor

    def __post_init__(self) -> None:
        self.merged = self.model.state_dict()
        ties = take_inventory(self.model).aliases
        self.leaders = {alias: name for name, aliases in ties.items() for alias in aliases}

    def offset(self, alias: str) -> Tensor:
        return self.recovery.offset(self.leaders.get(alias, alias), self.embedding)

    def value(self, alias: str) -> Tensor:
        """The task's own tensor."""
        name = self.leaders.get(alias, alias)
        if name in self.heads:
            return self.heads[name]
        merged = self.merged[alias]
        if name not in self.recovery:
            return merged
        return self.recovery.recover(name, merged, self.embedding).to(merged.dtype)

    def factors(self, alias: str, stacked: bool = False) -> tuple[Tensor, Tensor]:
        """The offset of a parameter as a batch of products `left @ right`, of one where it is not `stacked`; zeros of
        rank 1 where it is not changed."""
        name = self.leaders[alias]
        shape = tuple(self.merged[alias].shape)
        rows, columns = shape[1:] if stacked else (shape[0], prod(shape[1:]))
        if name not in self.recovery:
            return torch.zeros(1, rows, 1), torch.zeros(1, 1, columns)
        layout = self.recovery[name].layout
        if layout.kind == MATRIX and (layout.rows, layout.columns) == (rows, columns):
            return self._stored_factors(name)
        return factor(self.offset(name).reshape(-1, rows, columns), self.merged[alias])

    def _stored_factors(self, name: str) -> tuple[Tensor, Tensor]:
        generator = self.recovery[name]
        generated, shared, inner = (
            generator.generated(self.embedding),
            generator.factor("shared"),
            generator.factor("inner"),
        )
        if generator.layout.order == GENERATED_FIRST:
            return generated, (shared if inner is None else inner @ shared)
        return (shared if inner is None else shared @ inner), generated

    def _energy(self, name: str) -> float:
        """The squared norm of an offset, without the offset where it has factors."""
        if self.recovery[name].layout.kind != MATRIX:
            return self.offset(name).double().square().sum().item()
        left, right = (part.double() for part in self._stored_factors(name))
        return ((left.mT @ left) * (right @ right.mT)).sum().item()

    def biases(self, plan: _Plan) -> set[str]:
        names = {f"{module}.bias" for module in plan.lora} if plan.with_bias else set()
        return {name for name in names if self.leaders.get(name) in self.recovery}

    def relative_size(self, name: str) -> float:
        merged = self.merged[name].float()
        if name in self.heads:
            head = self.heads[name].float()
            difference = head - merged if head.shape == merged.shape else head
        else:
            difference = self.offset(name)
        return (difference.norm() / merged.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()

    def share(self, names: set[str]) -> float:
        """The part that some parameters have in the whole difference; heads do not count, they are no difference."""
        energies = {name: self._energy(name) for name in self.recovery} if names else {}
        total = sum(energies.values())
        return (sum(energies[name] for name in names if name in energies) / total) ** 0.5 if total else 0.0

    def other_width(self) -> int | None:
        """The number of outputs of the task's head, where it is not that of the merged model."""
        widths = [head.shape[0] for name, head in self.heads.items() if head.shape != self.merged[name].shape]
        return widths[-1] if widths else None


def factor(stack: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices (n, a, b) as products of the least rank that gives them to rounding: of float32, and of the `weight`
    that they are differences of.

    >>> import torch
    >>> from retex_hf.lora import factor
    >>> matrix = torch.ones(1, 3, 4)
    >>> [tuple(part.shape) for part in factor(matrix, matrix)]
    [(1, 3, 1), (1, 1, 4)]
    """
    tall = stack.shape[1] > stack.shape[2]
    wide = (stack.mT if tall else stack).double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    rounding = torch.finfo(torch.float32).eps * weight.float().square().mean().sqrt().item() / 2
    rounding *= sum(size**0.5 for size in stack.shape[1:])  # the norm of a random matrix of rounding errors
    least = (NEGLIGIBLE**2 * values[:, -1:]).clamp(min=rounding**2)
    rank = max(1, int((values > least).sum(1).max()))
    left = vectors[:, :, -rank:]
    right = (left.mT @ wide).float()
    left = left.float()
    return (right.mT, left.mT) if tall else (left, right)


def _lora_tensors(offsets: _Offsets, plan: _Plan, uniform: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Factors and biases of modules as peft names them, and the modules' ranks; all of one rank if `uniform`."""
    factors = {name: [part[0] for part in offsets.factors(f"{name}.weight")] for name in sorted(plan.lora)}
    if uniform and factors:
        rank = max(right.shape[0] for _, right in factors.values())
        factors = {name: _padded(left, right, rank) for name, (left, right) in factors.items()}
    tensors: dict[str, Tensor] = {}
    carried = offsets.biases(plan)
    for name, (left, right) in factors.items():
        module = offsets.model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            tensors[f"{name}.lora_embedding_A"], tensors[f"{name}.lora_embedding_B"] = left.T, right.T
            continue
        a, b = (left.T, right.T) if isinstance(module, Conv1D) else (right, left)
        if module.weight.ndim > 2:  # a convolution, then one of width 1
            a, b = a.unflatten(1, module.weight.shape[1:]), b.reshape(*b.shape, *[1] * (module.weight.ndim - 2))
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        if plan.with_bias:
            bias = f"{name}.bias"
            tensors[f"{name}.lora_B.bias"] = offsets.offset(bias) if bias in carried else torch.zeros(b.shape[0])
    return tensors, {name: right.shape[0] for name, (_, right) in factors.items()}


def _stack_tensors(offsets: _Offsets, plan: _Plan) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Factors of stacked parameters as peft names and arranges them, and their ranks."""
    tensors, ranks = {}, {}
    for name in sorted(plan.stacks):
        left, right = offsets.factors(name, stacked=True)
        ranks[name] = right.shape[1]
        module, _, attribute = name.rpartition(".")
        owner = offsets.model.get_submodule(module)
        if getattr(owner, "is_transposed", False):
            left, right = right.mT, left.mT
        # peft wraps the parameters of a module one around the other, the first innermost.
        wrapped = [parameter for parameter in owner._parameters if f"{module}.{parameter}" in plan.stacks]
        module += ".base_layer" * (len(wrapped) - 1 - wrapped.index(attribute))
        tensors[f"{module}.lora_A.weight"] = right.flatten(0, 1)
        # The columns of B are numbered by rank first and by expert second.
        tensors[f"{module}.lora_B.weight"] = left.permute(1, 2, 0).flatten(1)
    return tensors, ranks


def _saved_tensors(offsets: _Offsets, plan: _Plan) -> dict[str, Tensor]:
    names = [f"{module}.{name}" for module in plan.saved for name in offsets.model.get_submodule(module).state_dict()]
    return {name: offsets.value(name) for name in sorted(names)}


def _padded(left: Tensor, right: Tensor, rank: int) -> list[Tensor]:
    missing = rank - right.shape[0]
    return [
        torch.cat([left, left.new_zeros(left.shape[0], missing)], 1),
        torch.cat([right, right.new_zeros(missing, right.shape[1])]),
    ]


def _config(
    model: nn.Module,
    plan: _Plan,
    ranks: dict[str, int],
    stack_ranks: dict[str, int],
    heads: list[str],
    scope: str,
    base: str | None,
) -> LoraConfig:
    all_ranks = {**ranks, **stack_ranks}
    rank = Counter(all_ranks.values()).most_common(1)[0][0] if all_ranks else 1
    # Anchored, because peft looks for modules whose names end so.
    own = {f"^{re.escape(name)}": own for name, own in all_ranks.items() if own != rank}
    task_type = _task_type(model, heads, scope)
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=own,
        alpha_pattern=dict(own),
        target_modules=sorted(ranks),
        target_parameters=sorted(plan.stacks) or None,
        modules_to_save=sorted(plan.saved) or None,
        lora_bias=plan.with_bias,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in ranks),
        task_type=task_type,
        auto_mapping=None if task_type else {
            "base_model_class": type(model).__name__,
            "parent_library": type(model).__module__,
        },
        base_model_name_or_path=base,
        inference_mode=True,
    )  # fmt: skip


def _task_type(model: nn.Module, heads: list[str], scope: str) -> str | None:
    """peft's task type of a model. Those with heads make peft save modules of certain names, so only where they are
    what is saved anyway."""
    name, modules = type(model).__name__, {head.rpartition(".")[0] for head in heads}
    for task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
        if name in TASK_CLASSES[task_type].values() and not heads:
            return task_type
    for task_type, usual in (("SEQ_CLS", {"classifier", "score"}), ("TOKEN_CLS", {"classifier", "score"})):
        if scope != "linear" and name in TASK_CLASSES[task_type].values() and modules and modules <= usual:
            return task_type
    return None


def base_name(folder: Path | None) -> str | None:
    """What an adapter calls the merged model: Hub id or path of the artifact it was loaded from, None if it was not."""
    if folder is None or not (folder / CONFIG_NAME).is_file():
        return None
    cached = re.fullmatch(r"models--(.+)", folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return cached[1].replace("--", "/") if cached else str(folder)


def _check_folder(folder: Path) -> Path:
    folder = check_target(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ADAPTER_CONFIG).is_file():
        raise ArtifactError(f"{folder} holds other files and no adapter: expected a new folder, or an adapter's.")
    return folder


def _check_plain(model: nn.Module, names: list[str]) -> None:
    tensors = model.state_dict()
    for name in names:
        if name not in tensors or not is_plain(tensors[name]):
            raise RetexError(f"The merged model is quantised or offloaded (its {name!r} is): load it as it is stored.")


def _write(tensors: dict[str, Tensor], config: LoraConfig, folder: Path) -> None:
    scratch = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir()
    try:
        plain = {PREFIX + name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, scratch / f"{ADAPTER_STEM}.safetensors", metadata={"format": "pt"})
        config.save_pretrained(scratch)
        move_into_place(scratch, folder, OWN_FILES)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
