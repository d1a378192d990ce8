"""Export of a recovered expert as a plain checkpoint, with tokenizer or processor."""

from __future__ import annotations

from pathlib import Path

from ...backends import library_of
from ...checkpoints.tokenizer_files import copy_side_files
from ...errors import ArtifactError
from ...utils.atomic_folder import check_movable, replacing
from ..retex_model import RetexModel


def export_checkpoint(
    model: RetexModel, task: str, save_directory: str | Path, *, max_shard_size: str | int = "5GB"
) -> None:
    """Write a recovered expert in its own library's format, atomically.

    Args:
        model: The model.
        task: Name of the task.
        save_directory: A folder that does not exist yet, or is empty.
        max_shard_size: Size above which weights are stored in several files.
    """
    folder = check_movable(Path(save_directory))
    if folder.exists() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} is not empty: an export needs a folder of its own.")
    expert = model.merge_and_unload(task)
    with replacing(folder) as new:
        library_of(expert).save(expert, new, max_shard_size)
        tokenizer = model.tokenizer_folder(task)
        if tokenizer is not None:
            copy_side_files(tokenizer, new)
