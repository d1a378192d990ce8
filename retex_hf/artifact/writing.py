"""Atomic writing of an artifact."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from ..backends import Backend, library_of
from ..checkpoints import manifest
from ..checkpoints.tokenizer_files import TASK_TOKENIZERS, copy_side_files, copy_task_tokenizers, task_tokenizer
from ..config import CONFIG_NAME, read_config_file
from ..errors import ArtifactError
from ..recovery import RecoveryModule
from ..routing import Signatures
from ..utils.atomic_folder import check_movable, check_target, keep_files, link, replacing
from ..utils.byte_sizes import parse_size
from ..utils.strict_files import check_links
from .card import CARD_NAME, FIGURES, FIGURES_FOLDER, write_card
from .export_files import ADAPTERS, EXPORT_NAME, is_export_file
from .reading import recorded_side_files
from .schema import (
    EVALUATION_NAME,
    FOREIGN_MODELS,
    HEADS,
    OWN_FILES,
    PRETRAINED,
    RECIPE_NAME,
    RECOVERY,
    ROWS,
    SIGNATURES,
    TASK_EMBEDDING,
    TRAINING_NAME,
    OtherVersion,
    described_weights,
    head_key,
    read_description,
    read_manifest,
)
from .sealing import FORMAT_VERSION, seal
from .state import RetexParts

# Files that a save replaces; this removes tokenizers of deleted tasks.
REPLACED = (*OWN_FILES, TASK_TOKENIZERS)


def _replaced(folder: Path) -> tuple[str, ...]:
    """Return the patterns of what a save replaces: exported adapters too, which fit the previous weights only."""
    return (*REPLACED, ADAPTERS) if (folder / EXPORT_NAME).exists() else REPLACED


def write(
    parts: RetexParts, folder: str | Path, max_shard_size: str | int, *, name: str | None = None, figures: bool = False
) -> None:
    """Write an artifact atomically; on failure the previous folder stays. Keep files that are not part of it.

    `name` and `figures` are those of `write_card`.
    """
    folder = check_replaceable(folder)
    with replacing(folder, _replaced(folder)) as new:
        write_plain(parts, new, max_shard_size, previous=folder)
        write_card(parts, new, previous=folder, name=name, figures=figures)


def write_plain(parts: RetexParts, folder: Path, max_shard_size: str | int, *, previous: Path | None = None) -> None:
    """Write an artifact without its card into an empty folder, which will replace the `previous` one."""
    library_of(parts.model).save(parts.model, folder, max_shard_size)
    _write_weights(parts, folder, max_shard_size)
    _write_description(parts, folder, previous)


def check_replaceable(folder: str | Path) -> Path:
    """Return the absolute path of a folder to save into; refuse one that holds a model other than an artifact."""
    folder = check_movable(folder)
    if not (folder / CONFIG_NAME).exists():
        found = sorted(file.name for pattern in (*OWN_FILES, *FOREIGN_MODELS) for file in folder.glob(pattern))
        if found:
            raise ArtifactError(
                f"{folder} holds {found[0]}, which belongs to another model and would be lost: expected a separate "
                "folder for the artifact."
            )
    return folder


def rewrite_description(parts: RetexParts, folder: str | Path) -> None:
    """Rewrite an artifact's metadata; weights stay, and must be those of `parts`."""
    folder = check_target(folder)
    # The folder's tokenizer may be newer than the one that the model was built with.
    carry_over(dataclasses.replace(parts, side_folder=folder), folder, folder)


def carry_over(parts: RetexParts, source: Path, folder: Path) -> None:
    """Write an artifact with the merged model and the weights of `source`, which must be those of `parts`.

    The model's configuration is copied, not rewritten, because the model may have been loaded in another dtype than its
    files have. See `write`.
    """
    _, section = read_description(source, verify=not parts.unverified)
    if any(section.get(key) != value for key, value in described_weights(parts).items()):
        raise ArtifactError(f"{source} holds the weights of another model: save this one as a whole.")
    weights = [
        file
        for pattern in OWN_FILES
        for file in source.glob(pattern)
        if ".safetensors" in file.suffixes and not file.name.startswith(SIGNATURES)
    ]
    for file in weights:
        manifest.check_file(source, file.name)
    # A model read without verification may no longer match its recorded files.
    known = {} if parts.unverified else read_manifest(source, section)
    records = {file.name: known[file.name] for file in weights if file.name in known}
    with replacing(folder, _replaced(folder)) as new:
        library_of(parts.model).save_config(parts.model, new)
        _copy_over(source, new, known)
        _link(weights, new)
        # The weights are the same, and so are the adapters made of them.
        link_files(source, new, [name for name in known if is_export_file(name)])
        _write_description(parts, new, folder, records)
        write_card(parts, new, previous=folder)


def write_export(source: Path, folder: Path, write: Callable[[Path], None]) -> None:
    """Write the artifact of `source` into `folder`, which may be the same, with files for a server beside it.

    `write` writes these into an empty folder; they are recorded like all others, and replace those of an earlier
    export.
    """
    values = read_config_file(source / CONFIG_NAME)
    _, section = read_description(source)
    if (folder / ADAPTERS).exists() and not (folder / EXPORT_NAME).exists():
        raise ArtifactError(f"{folder / ADAPTERS} is no export of the artifact, and would be lost: move it elsewhere.")
    known = {name: found for name, found in read_manifest(source, section).items() if not is_export_file(name)}
    same = source == folder
    with replacing(folder, (EXPORT_NAME, ADAPTERS) if same else _replaced(folder)) as new:
        write(new)
        added = manifest.record(new, _files_in(new))
        if not same:
            card = [name for name in (CARD_NAME, *FIGURES) if (source / name).is_file()]
            link_files(source, new, [name for name in (*known, *card) if name not in added])
        section["files"] = manifest.to_json(dict(sorted({**known, **added}.items())))
        _write_config({key: value for key, value in values.items() if key != "artifact"}, section, new)


def link_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Hard-link files into a folder, under their relative names."""
    for name in names:
        manifest.check_file(source, name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        link((source / name).resolve(), folder / name)


def _copy_over(source: Path, folder: Path, known: Mapping[str, manifest.FileRecord]) -> None:
    """Replace the files of a folder by those of the same name in another; verify those that are recorded."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    names = [name for name in names if (source / name).exists()]
    check_links([source / name for name in names], source, ArtifactError)
    for name in names:
        manifest.check_file(source, name)
        recorded = name in known
        data = manifest.read_verified(source, name, known[name]) if recorded else (source / name).read_bytes()
        (folder / name).write_bytes(data)


def rewrite_card(parts: RetexParts, folder: str | Path) -> None:
    """Rewrite the card and its figures; leave everything else in the folder unchanged."""
    folder = check_target(folder)
    with replacing(folder) as new:
        if folder.is_dir():
            keep_files(folder, new, (CARD_NAME, FIGURES_FOLDER))  # the card states file sizes
        write_card(parts, new, previous=folder, figures=True)


def finish(parts: RetexParts, weights: Iterable[Path], folder: Path) -> None:
    """Write an artifact whose `weights` are already on disk, by hard links; see `write`."""
    with replacing(folder, _replaced(folder)) as new:
        assemble(parts, weights, new, previous=folder)
        write_card(parts, new, previous=folder)


def assemble(parts: RetexParts, weights: Iterable[Path], folder: Path, *, previous: Path | None = None) -> None:
    """Write an artifact without its card into an empty folder; see `finish` and `write_plain`."""
    _link(weights, folder)
    library_of(parts.model).save_config(parts.model, folder)
    _write_description(parts, folder, previous)


def _link(weights: Iterable[Path], folder: Path) -> None:
    for file in weights:
        link(file.resolve(), folder / file.name)


def stems(library: Backend, max_shard_size: str | int) -> dict[str, tuple[str, int | None]]:
    """Return the file names of each part of an artifact's weights, and the size above which a part is sharded."""
    limit = parse_size(max_shard_size, "max_shard_size")
    return {
        "model": (library.WEIGHTS_STEM, limit if library.SHARDED else None),
        "recovery": (RECOVERY, limit),
        "heads": (HEADS, None),
        "rows": (ROWS, None),
        "pretrained": (PRETRAINED, None),
    }


def _write_weights(parts: RetexParts, folder: Path, max_shard_size: str | int) -> None:
    """Write all weights except the merged model's."""
    save_torch_state_dict(
        _recovery_tensors(parts.recovery),
        folder,
        filename_pattern=RECOVERY + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    _save(parts.base_tensors, folder / f"{PRETRAINED}.safetensors")
    for stem, groups in ((HEADS, parts.heads), (ROWS, parts.rows)):
        tensors = {head_key(task, name): tensor for task, own in groups.items() for name, tensor in own.items()}
        _save(tensors, folder / f"{stem}.safetensors")


def _write_description(
    parts: RetexParts, folder: Path, previous: Path | None, known: Mapping[str, manifest.FileRecord] | None = None
) -> None:
    """Write all small files: configuration, signatures, recipe, measurements and tokenizers.

    The configuration is last, because it records all others (except the card, which people edit). Tokenizers come from
    the model's origin, or else from the `previous` folder. Those of an artifact must match its records; files added
    there later are not recorded silently.
    """
    for source in (parts.side_folder, previous):
        if source is not None and (source == parts.side_folder or source.is_dir()):
            try:
                records = None if parts.unverified else recorded_side_files(source)
            except OtherVersion:
                if source == parts.side_folder:
                    raise
                continue  # it is being replaced, as it must be, and its tokenizer files are those of its base
            own = [task for task, place in parts.tokenizers.items() if place == source / task_tokenizer(task)]
            copy_side_files(source, folder, records, own)
    copy_task_tokenizers(parts.tokenizers, folder)
    section: dict[str, Any] = {"format_version": FORMAT_VERSION, **described_weights(parts), "signatures": None}
    if parts.signatures is not None:
        signatures = parts.signatures
        description = signatures.description if isinstance(signatures, Signatures) else {}
        section["signatures"] = {"feature_layer": signatures.feature_layer, **description}
        _save(signatures.tensors, folder / f"{SIGNATURES}.safetensors")
    if parts.history:
        (folder / TRAINING_NAME).write_text(json.dumps(parts.history) + "\n", encoding="utf-8")
    if parts.recipe is not None:
        text = yaml.safe_dump(dict(parts.recipe), sort_keys=False, allow_unicode=True)
        (folder / RECIPE_NAME).write_text(text, encoding="utf-8")
    if parts.evaluation is not None:
        (folder / EVALUATION_NAME).write_text(json.dumps(parts.evaluation, indent=2) + "\n", encoding="utf-8")
    section["files"] = manifest.to_json(manifest.record(folder, _files_in(folder), known))
    _write_config(parts.config.to_dict(), section, folder)


def _files_in(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _write_config(values: dict[str, Any], section: dict[str, Any], folder: Path) -> None:
    values = json.loads(json.dumps({**values, "artifact": section}))
    section = {**section, "seal": seal(values)}
    text = config_text({**values, "artifact": section})
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def config_text(values: Any, levels: int = 3) -> str:
    """Return the JSON of a configuration, indented down to some levels: a line for every parameter and file.

    Indented to the end, the layout of a recovery of few bytes would be as large as the recovery.

    >>> print(config_text({"rank": 8, "artifact": {"recovery": {"weight": {"left": [[2, 5], [9, 3]]}}}}))
    {
      "rank": 8,
      "artifact": {
        "recovery": {
          "weight": {"left":[[2,5],[9,3]]}
        }
      }
    }
    """
    if levels == 0 or not isinstance(values, dict) or not values:
        return json.dumps(values, separators=(",", ":"), allow_nan=False)
    entries = (f"{json.dumps(key)}: {config_text(value, levels - 1)}" for key, value in values.items())
    return "{\n" + textwrap.indent(",\n".join(entries), "  ") + "\n}"


def _recovery_tensors(recovery: RecoveryModule) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {TASK_EMBEDDING: recovery.task_embedding}
    for name in recovery:
        scale = recovery.scale(name)
        modules: dict[str, nn.Module] = {f"{name}.scale": scale} if scale is not None else {}
        if recovery.generator_name(name) == name:
            modules[name] = recovery[name]
        for prefix, module in modules.items():
            tensors |= {f"{prefix}.{part}": parameter for part, parameter in module.named_parameters()}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    if tensors:
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, path, metadata={"format": "pt"})
