"""Writing of a recovered task as a PEFT adapter on the merged model."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....artifact.state import RetexParts
from ....checkpoints import take_inventory
from ....checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_STEM, PREFIX, TASK_CLASSES
from ....config import CONFIG_NAME
from ....errors import ArtifactError, ConfigError, RetexError, shorten
from ....execution import is_plain, task_index
from ....execution.vocabulary_rows import with_own_rows
from ....utils.atomic_folder import check_movable, replacing
from .factors import Offsets, lora_tensors, saved_tensors, stack_tensors
from .plan import ONE_RANK, SCOPES, Plan, is_mergeable, make_plan

OWN_FILES = ("adapter_*",)


@dataclass(frozen=True)
class LoraExport:
    """The contents of an exported adapter.

    `lora` maps modules to the rank of their factors; `bias` are the biases stored with them (peft's `lora_bias`),
    `modules_to_save` the modules that are stored whole, `target_parameters` the parameters that have factors without
    being a module's weight. `left_out` maps parameters that the adapter does not carry to the size of their difference
    relative to the parameter, `left_out_share` is their share of the whole difference (both as Frobenius norms).
    `num_outputs` is set if the width of the task's head differs from that in the merged model's folder; such tasks
    cannot share a batch in peft. `vocabulary` is set if the task has another number of tokens. `mergeable` says whether
    peft's `merge_and_unload` gives the expert: not if tied weights have separate factors (it adds both), nor if a layer
    without a bias gets one (it refuses).
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
    vocabulary: int | None = None

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
        if self.vocabulary is not None:
            lines.append(
                f"It has {self.vocabulary} tokens, unlike the merged model: call "
                f"resize_token_embeddings({self.vocabulary}) on that before the adapter is loaded."
            )
        if not self.mergeable:
            lines.append("Use it as it is: peft cannot merge it. RetexModel.merge_and_unload gives the merged expert.")
        return "\n".join(lines)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory: tensors under peft's names, peft's configuration, and a summary without a folder."""

    tensors: dict[str, Tensor]
    config: LoraConfig
    summary: LoraExport


def export_lora(parts: RetexParts, task: str, save_directory: str | Path, *, scope: str = "all") -> LoraExport:
    """Write a task as an adapter on the merged model. See `RetexModel.export_lora`."""
    task_index(task, parts.config.tasks)  # before the folder is looked at
    folder = _check_folder(Path(save_directory))
    adapter = make_adapter(parts, task, scope, base=base_name(parts.side_folder))
    with replacing(folder, OWN_FILES) as new:
        write_adapter(adapter, new)
    export = replace(adapter.summary, folder=folder)
    if scope == "all":
        warn_of_losses(export)
    return export


def warn_of_losses(export: LoraExport) -> None:
    """Warn of what an adapter that should carry everything does not carry."""
    if export.left_out:
        warnings.warn(
            f"The adapter of task {export.task!r} does not carry {shorten(export.left_out)}, which peft cannot "
            f"represent: {export.left_out_share:.2%} of the difference.",
            stacklevel=4,
        )


@torch.no_grad()
def make_adapter(parts: RetexParts, task: str, scope: str, *, base: str | None = None, alike: bool = False) -> Adapter:
    """Return a task as an adapter on the merged model, which is called `base` in the adapter's configuration. Adapters
    that are loaded together must be `alike`: with all modules that any task changes."""
    model, recovery = parts.model, parts.recovery
    index, heads = task_index(task, parts.config.tasks), parts.heads[task]
    if scope not in SCOPES:
        raise ConfigError(f"scope must be one of {list(SCOPES)}, not {scope!r}.")
    if any(recovery.scale(name) is not None for name in recovery):
        raise ConfigError(
            'An affine recovery scales the merged weights, which no LoRA adapter can: build with recovery="offset", or '
            "save merge_and_unload(task)."
        )
    _check_plain(model, [*recovery, *heads])
    tokens = _other_vocabulary(parts, task)
    offsets = Offsets(model, recovery, {**heads, **tokens}, recovery.task_embedding[index])
    is_changed = offsets.is_changed_by_any if alike else offsets.is_changed
    changed = [name for name in recovery if name not in tokens and is_changed(name)]
    plan = make_plan(model, changed, [*heads, *_all_names(model, tokens)], scope)
    tensors, ranks = lora_tensors(offsets, plan, uniform=scope in ONE_RANK)
    stacks, stack_ranks = stack_tensors(offsets, plan)
    tensors |= stacks | saved_tensors(offsets, plan)
    # Of a budget of bytes, the task itself may have nothing to lose.
    left = {name for name in plan.left if name not in recovery or offsets.is_changed(name)}
    summary = LoraExport(
        task,
        Path(),
        lora=ranks,
        bias=sorted(offsets.biases(plan)),
        modules_to_save=sorted(plan.saved),
        target_parameters=sorted(plan.stacks),
        left_out={name: offsets.relative_size(name) for name in sorted(left)},
        left_out_share=offsets.share(left),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        num_outputs=offsets.other_width(heads) if plan.saved else None,
        vocabulary=parts.config.vocabulary[task]["size"] if tokens and plan.saved else None,
        mergeable=is_mergeable(model, plan),
    )
    return Adapter(tensors, _config(model, plan, ranks, stack_ranks, list(heads), scope, base), summary)


def _other_vocabulary(parts: RetexParts, task: str) -> dict[str, Tensor]:
    """Return the task's tensors with a row per token if its vocabulary differs; an adapter stores them whole."""
    if task not in parts.rows:
        return {}
    index, merged = task_index(task, parts.config.tasks), parts.model.state_dict()
    embedding, shared = parts.recovery.task_embedding[index], {}
    for name in parts.rows[task]:
        shared[name] = merged[name]
        if name in parts.recovery:
            shared[name] = parts.recovery.recover(name, merged[name], embedding).to(merged[name].dtype)
    return with_own_rows(shared, parts.rows[task], parts.config.vocabulary[task]["size"])


def _all_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return all names of tensors, because peft saves each module that has a tied one."""
    ties = take_inventory(model).aliases
    return [alias for name in names for alias in ties[name]]


def _config(
    model: nn.Module,
    plan: Plan,
    ranks: dict[str, int],
    stack_ranks: dict[str, int],
    heads: list[str],
    scope: str,
    base: str | None,
) -> LoraConfig:
    all_ranks = {**ranks, **stack_ranks}
    rank = Counter(all_ranks.values()).most_common(1)[0][0] if all_ranks else 1
    # Anchored, because peft matches the ends of module names.
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
    """Return peft's task type of a model, or None.

    Task types with heads make peft save modules of certain names, so use them only if exactly those are saved anyway.
    """
    name, modules = type(model).__name__, {head.rpartition(".")[0] for head in heads}
    for task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
        if name in TASK_CLASSES[task_type].values() and not heads:
            return task_type
    for task_type, usual in (("SEQ_CLS", {"classifier", "score"}), ("TOKEN_CLS", {"classifier", "score"})):
        if scope != "linear" and name in TASK_CLASSES[task_type].values() and modules and modules <= usual:
            return task_type
    return None


def base_name(folder: Path | None) -> str | None:
    """Return the Hub id or path of the artifact that the merged model was loaded from, or None."""
    if folder is None or not (folder / CONFIG_NAME).is_file():
        return None
    cached = re.fullmatch(r"models--(.+)", folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return cached[1].replace("--", "/") if cached else str(folder)


def _check_folder(folder: Path) -> Path:
    folder = check_movable(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ADAPTER_CONFIG).is_file():
        raise ArtifactError(f"{folder} holds other files and no adapter: expected a new folder, or an adapter's.")
    return folder


def _check_plain(model: nn.Module, names: list[str]) -> None:
    tensors = model.state_dict()
    for name in names:
        if name not in tensors or not is_plain(tensors[name]):
            raise RetexError(f"The merged model is quantised or offloaded (its {name!r} is): load it as it is stored.")


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter into a folder, as peft does."""
    plain = {PREFIX + name: tensor.cpu().contiguous().clone() for name, tensor in adapter.tensors.items()}
    save_file(plain, folder / f"{ADAPTER_STEM}.safetensors", metadata={"format": "pt"})
    adapter.config.save_pretrained(str(folder))
