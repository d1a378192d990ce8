"""Tokenizer and processor files: finding, copying, and comparing them between experts."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_line, shorten
from ..utils.strict_files import check_links, read_json
from . import Source, manifest
from .manifest import FileRecord

logger = logging.getLogger(__name__)

# All file names that the tokenizers and processors of transformers and OpenCLIP use.
SIDE_FILES = (
    "tokenizer*", "*vocab*", "merges.txt", "bpe.codes", "*.model", "*.spm", "*.tokenizer", "*.tiktoken", "tekken.json",
    "dict.txt", "byte_maps.json", "emoji.json", "word_shape.json", "word_pronunciation.json", "normalizer.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor_config.json",
    "audio_tokenizer_config.json",
)  # fmt: skip
# The endings of such files; others with these names may be code, or archives.
ENDING = re.compile(r"\.(json|txt|tsv|model|spm|vocab|bpe|codes|tokenizer|tiktoken|jinja)(\.v[0-9]+)?$")
# Folders beside them: named chat templates, and the second tokenizer of a processor (InstructBLIP's).
SIDE_FOLDERS = {"additional_chat_templates": ("*.jinja",), "*_tokenizer": SIDE_FILES}
# The folders of the tasks' own tokenizers; see `task_tokenizer`.
TASK_TOKENIZERS = f"task_{'[0-9a-f]' * 16}_tokenizer"
# Files that map tokens to ids; where both folders have the first, the others repeat it.
TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "vocab.txt", "vocab.json", "*.model")
# The other sections of a `tokenizer.json` that affect tokenisation.
STEPS = ("normalizer", "pre_tokenizer", "post_processor")


def side_files(folder: Path) -> Iterator[Path]:
    """Yield the tokenizer and processor files in a folder."""
    yield from _matching(folder, SIDE_FILES)
    for pattern, names in SIDE_FOLDERS.items():
        for inner in sorted(folder.glob(pattern)):
            if inner.is_dir():
                yield from _matching(inner, names)


def is_side_file(name: str) -> bool:
    """Return whether a file of an artifact, by its relative name, belongs to a tokenizer or a processor."""
    folder, _, file = name.rpartition("/")
    if not _has_known_ending(file):
        return False
    patterns = [SIDE_FILES] if not folder else [names for of, names in SIDE_FOLDERS.items() if fnmatchcase(folder, of)]
    return any(fnmatchcase(file, pattern) for of in patterns for pattern in of)


def copy_side_files(
    source: Path, folder: Path, records: Mapping[str, FileRecord] | None = None, tokenizers_of: Iterable[str] = ()
) -> None:
    """Copy the side files that `folder` does not have yet; no code and no links to elsewhere: they may be published.

    With `records`, copy only recorded files, and refuse those that have changed. Of the tasks' own tokenizers, copy
    those of the tasks in `tokenizers_of`.
    """
    if not source.is_dir():
        logger.warning(
            "%s no longer exists, nor does a tokenizer or processor that was in it: save that again.", source
        )
        return
    files = {file.relative_to(source).as_posix(): file for file in side_files(source)}
    if records is not None:
        files = {name: file for name, file in files.items() if name in records}
    wanted = {task_tokenizer(task) for task in tokenizers_of}
    files = {
        name: file
        for name, file in files.items()
        if name.partition("/")[0] in wanted or not is_task_tokenizer(name.partition("/")[0])
    }
    check_links(files.values(), source, CheckpointError)
    for name, file in files.items():
        target = folder / name
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            if records is None:
                shutil.copyfile(file, target)
            else:
                target.write_bytes(manifest.read_verified(source, name, records[name]))


def find_side_folder(sources: Iterable[Source]) -> Path | None:
    """Return the first folder of the sources that has side files, or else their first folder, if there is any."""
    folders = [folder for source in sources if (folder := _folder_of(source)) is not None]
    return next((folder for folder in folders if any(side_files(folder))), next(iter(folders), None))


def warn_of_other_tokenizers(base: Source, experts: Mapping[str, Source], kept: Iterable[str] = ()) -> None:
    """Warn of experts trained with another tokenizer than the base's, which is the one saved with the merge.

    The tokenizers of the tasks in `kept` are saved too.
    """
    own = _folder_of(base)
    if own is None:
        return
    for task, source in experts.items():
        if task in kept:
            continue
        folder = _folder_of(source)
        difference = None if folder is None else tokenizer_difference(own, folder)
        if difference is not None:
            logger.warning(
                "The tokenizer of expert %r differs from that of the base: %s. The base's is kept for all tasks.",
                task,
                difference,
            )


def tokenizer_difference(folder: Path, other: Path) -> str | None:
    """Describe briefly how the vocabulary in another folder differs; None if it does not, or one has none."""
    for pattern in VOCABULARIES:
        pairs = [(file, other / file.name) for file in sorted(folder.glob(pattern)) if (other / file.name).is_file()]
        for ours, theirs in pairs:
            if _same_bytes(ours, theirs):
                return None
            if ours.name != TOKENIZER:
                return f"{ours.name} differs"
            try:
                return _difference(_token_ids(ours), _token_ids(theirs))
            except CheckpointError as error:  # this only feeds a warning: never fail the build over it
                return f"their tokens cannot be compared ({first_line(error).rstrip('.')})"
    return None


def moved_tokens(folder: Path, other: Path, *, new: bool = False) -> list[str] | None:
    """Return the tokens of another folder's tokenizer that have another id than here; with `new`, also new tokens.

    Return None if one of them does not list its tokens in a `tokenizer.json`.
    """
    files = [path / TOKENIZER for path in (folder, other)]
    if not all(file.is_file() for file in files):
        return None
    if _same_bytes(*files):
        return []
    ours, theirs = map(_token_ids, files)
    return [token for token, number in theirs.items() if ours.get(token, None if new else number) != number]


def is_other_tokenizer(folder: Path, other: Path) -> bool:
    """Return whether the tokenizer in another folder tokenises differently, by its vocabulary or its steps.

    A `tokenizer.json` that cannot be read counts as the same: `warn_of_other_tokenizers` reports it. Tokenizers without
    a file in common count as different.
    """
    files = [path / TOKENIZER for path in (folder, other)]
    if not all(file.is_file() for file in files):
        named = [file.name for pattern in VOCABULARIES for file in folder.glob(pattern)]
        shared = [name for name in named if (other / name).is_file()]
        return not shared or not all(_same_bytes(folder / name, other / name) for name in shared)
    if _same_bytes(*files):
        return False
    try:
        if _token_ids(files[0]) != _token_ids(files[1]):
            return True
    except CheckpointError:
        return False
    ours, theirs = (read_json(file, CheckpointError) for file in files)
    return any(ours.get(step) != theirs.get(step) for step in STEPS)


def tokenizer_folder(source: Source) -> Path | None:
    """Return the folder of a checkpoint's tokenizer; None if it has none."""
    folder = _folder_of(source)
    return folder if folder is not None and any(folder.glob("tokenizer*.json")) else None


def task_tokenizer(task: str) -> str:
    """Return the folder of a task's own tokenizer in an artifact; a hash, as task names need not be folder names."""
    return f"task_{hashlib.blake2b(task.encode(), digest_size=8).hexdigest()}_tokenizer"


def is_task_tokenizer(name: str) -> bool:
    """Return whether a folder of an artifact is that of a task's own tokenizer."""
    return fnmatchcase(name, TASK_TOKENIZERS)


def copy_task_tokenizers(tokenizers: Mapping[str, Path], folder: Path) -> None:
    """Copy the tasks' own tokenizers into an artifact, except those that are already there."""
    for task, source in tokenizers.items():
        target = folder / task_tokenizer(task)
        if not target.exists():
            target.mkdir()
            files = _matching(source, SIDE_FILES) if source.is_dir() else []
            if not files:
                raise CheckpointError(
                    f"{source} no longer holds the tokenizer of task {task!r}, which is saved with the model."
                )
            check_links(files, source, CheckpointError)
            for file in files:
                shutil.copyfile(file, target / file.name)


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    new = sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__)
    gone = sorted(ours.keys() - theirs.keys(), key=ours.__getitem__)
    moved = [token for token, number in theirs.items() if ours.get(token, number) != number]
    kinds = {"it has {} token(s) more ({})": new, "it lacks {} ({})": gone, "{} have another id ({})": moved}
    parts = [text.format(len(tokens), shorten(tokens)) for text, tokens in kinds.items() if tokens]
    return ", ".join(parts) or None


def _same_bytes(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def _token_ids(path: Path) -> dict[str, int]:
    """Return all tokens of a `tokenizer.json` with their ids."""
    values = read_json(path, CheckpointError)
    try:
        vocabulary: Any = values.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: [token, score], in the order of the ids
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        return {**vocabulary, **{entry["content"]: entry["id"] for entry in values.get("added_tokens", [])}}
    except (AttributeError, IndexError, KeyError, TypeError):
        raise CheckpointError(f"{path} is not a tokenizer file.") from None


def _folder_of(source: Source) -> Path | None:
    """Return the folder of a checkpoint, or the one that a model in memory was loaded from, if it still exists."""
    if source.folder is not None:
        return source.folder.absolute()
    name = getattr(source.model, "name_or_path", "")
    return Path(name).absolute() if name and Path(name).is_dir() else None


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if _has_known_ending(file.name))


def _has_known_ending(name: str) -> bool:
    return ENDING.search(name) is not None
