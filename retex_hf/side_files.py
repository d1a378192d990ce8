"""Tokenizer and processor files: which they are, where they come from, and whether experts agree on them."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import manifest
from .checkpoints import Source
from .errors import CheckpointError, first_line, shorten
from .manifest import FileRecord
from .reading import check_links, read_json

logger = logging.getLogger(__name__)

# All names under which the tokenizers and processors of transformers and OpenCLIP keep something.
SIDE_FILES = (
    "tokenizer*", "*vocab*", "merges.txt", "bpe.codes", "*.model", "*.spm", "*.tokenizer", "*.tiktoken", "tekken.json",
    "dict.txt", "byte_maps.json", "emoji.json", "word_shape.json", "word_pronunciation.json", "normalizer.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor_config.json",
    "audio_tokenizer_config.json",
)  # fmt: skip
# How such files end; others of these names may be code, or archives.
ENDING = re.compile(r"\.(json|txt|tsv|model|spm|vocab|bpe|codes|tokenizer|tiktoken|jinja)(\.v[0-9]+)?$")
# Folders beside them: named chat templates, and a processor's second tokenizer (InstructBLIP's).
SIDE_FOLDERS = {"additional_chat_templates": ("*.jinja",), "*_tokenizer": SIDE_FILES}
# What says which token is which number; where both have the first, the others repeat it.
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


def side_files(folder: Path) -> Iterator[Path]:
    """The tokenizer and processor files in a folder."""
    yield from _matching(folder, SIDE_FILES)
    for pattern, names in SIDE_FOLDERS.items():
        for inner in sorted(folder.glob(pattern)):
            if inner.is_dir():
                yield from _matching(inner, names)


def is_side_file(name: str) -> bool:
    """Whether a file of an artifact, by its name in there, belongs to a tokenizer or a processor."""
    folder, _, file = name.rpartition("/")
    if not _has_known_ending(file):
        return False
    patterns = [SIDE_FILES] if not folder else [names for of, names in SIDE_FOLDERS.items() if fnmatchcase(folder, of)]
    return any(fnmatchcase(file, pattern) for of in patterns for pattern in of)


def copy_side_files(source: Path, folder: Path, records: Mapping[str, FileRecord] | None = None) -> None:
    """Copy what `folder` does not have yet. What is copied may be published: no file from elsewhere, and no code.

    With `records`, only the files that are recorded are copied, and must be as recorded.
    """
    if not source.is_dir():
        logger.warning(
            "%s is gone, and so is the tokenizer or processor that may have been there: save it again.", source
        )
        return
    files = {file.relative_to(source).as_posix(): file for file in side_files(source)}
    if records is not None:
        files = {name: file for name, file in files.items() if name in records}
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
    """The first folder that has such files, of those that checkpoints lie in or that models were loaded from."""
    folders = [folder for source in sources if (folder := _folder_of(source)) is not None]
    return next((folder for folder in folders if any(side_files(folder))), next(iter(folders), None))


def warn_of_other_tokenizers(base: Source, experts: Mapping[str, Source]) -> None:
    """Say which experts were trained with a tokenizer that is not the base's, the one that is saved with the merge."""
    own = _folder_of(base)
    for task, source in experts.items() if own is not None else ():
        folder = _folder_of(source)
        difference = None if folder is None else tokenizer_difference(own, folder)
        if difference is not None:
            logger.warning(
                "The tokenizer of expert %r is not that of the base: %s. The base's is kept, for all tasks.",
                task,
                difference,
            )


def tokenizer_difference(folder: Path, other: Path) -> str | None:
    """How the vocabulary in another folder differs, in a few words; None where it does not, or one has none."""
    for pattern in VOCABULARIES:
        pairs = [(file, other / file.name) for file in sorted(folder.glob(pattern)) if (other / file.name).is_file()]
        for ours, theirs in pairs:
            if ours.stat().st_size == theirs.stat().st_size and ours.read_bytes() == theirs.read_bytes():
                return None
            if ours.name != "tokenizer.json":
                return f"{ours.name} differs"
            try:
                return _difference(_token_ids(ours), _token_ids(theirs))
            except CheckpointError as error:  # of what is only said, no build may fail
                return f"their tokens cannot be compared ({first_line(error).rstrip('.')})"
    return None


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    new = sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__)
    gone = sorted(ours.keys() - theirs.keys(), key=ours.__getitem__)
    moved = [token for token, number in theirs.items() if ours.get(token, number) != number]
    kinds = {"it has {} token(s) more ({})": new, "it lacks {} ({})": gone, "{} have another number ({})": moved}
    said = [text.format(len(tokens), shorten(tokens)) for text, tokens in kinds.items() if tokens]
    return ", ".join(said) or None


def _token_ids(path: Path) -> dict[str, int]:
    """Token and number of all tokens of a `tokenizer.json`."""
    values = read_json(path, CheckpointError)
    try:
        vocabulary: Any = values.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: [token, score], in the order of their numbers
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        return {**vocabulary, **{entry["content"]: entry["id"] for entry in values.get("added_tokens", [])}}
    except (AttributeError, IndexError, KeyError, TypeError):
        raise CheckpointError(f"{path} is no file of a tokenizer.") from None


def _folder_of(source: Source) -> Path | None:
    """Where a checkpoint lies, or the folder that a model in memory was loaded from; as long as this process runs."""
    if source.folder is not None:
        return source.folder.absolute()
    name = getattr(source.model, "name_or_path", "")
    return Path(name).absolute() if name and Path(name).is_dir() else None


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if _has_known_ending(file.name))


def _has_known_ending(name: str) -> bool:
    return ENDING.search(name) is not None
