"""Ways to damage or to forge an artifact, for `mutants.py`.

A mutation changes a copy of an artifact's folder, and lists the names of which a refusal must mention one. *Stale*
mutations leave the recorded checksums as they were: damage, mixed-up files. *Resealed* ones record them anew, as a
malicious author would. Resealed are only changes of structure: names, shapes, dtypes, types, sizes, references. Other
numbers in well-formed files make another model, which its author may publish.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retex_hf.artifact.schema import seal
from retex_hf.checkpoints import manifest
from retex_hf.checkpoints.tokenizer_files import is_side_file
from retex_hf.config import CONFIG_NAME

CARD = "README.md"
# Replacement values: of other types, huge, negative, empty, or leading out of the folder.
VALUES = (
    None, True, False, 0, -1, 3, 10**9, 2**31, 2**63, -(2**63), 10**30, 1e308, 0.5, "", "x", "../../x", "/etc/passwd",
    "a\0b", "x" * 5000, [], [1], [None], {}, {"a": 1}, [[[]]], "float16", "int8",
)  # fmt: skip
# Keys of model configurations that determine shapes. All other keys are up to the model.
SHAPE_KEYS = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size",
    "max_position_embeddings", "type_vocab_size", "d_model", "d_ff", "d_kv", "num_layers", "num_decoder_layers",
    "id2label", "embed_dim", "width", "layers", "patch_size", "image_size", "context_length", "vision_cfg", "text_cfg",
    "model_cfg", "weight_map", "relative_attention_num_buckets", "tie_word_embeddings",
)  # fmt: skip
# Keys of our configuration that describe files and tensors, and how they are checked.
OWN_KEYS = (
    "artifact", "tasks", "labels", "rank", "task_embedding_dim", "recovery", "recovery_dtype", "factor_order",
    "routing", "signatures", "feature_source", "feature_pooling", "trunk", "experts", "heads", "temperature",
    "num_reference",
)  # fmt: skip
# Files that would be read with an artifact if nothing checked for them.
STRAYS = {
    "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "target_modules": ["query"]}',
    "adapter_model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "generation_config.json": b'{"max_new_tokens": 1}',
    "retex_evaluation.json": b"{}",
    "retex_training.json": b"[]",
    "retex_pretrained.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "retex_recovery.safetensors.index.json": b'{"weight_map": {}}',
    "config.4.0.0.json": b"{}",
    ".metadata": b"cos\nsystem\n(S'exit 1'\ntR.",
    "pytorch_model.bin": b"cos\nsystem\n(S'exit 1'\ntR.",
    "modeling_evil.py": b"raise SystemExit(1)",
    "custom_generate/generate.py": b"raise SystemExit(1)",
    "notes.txt": b"mine",
}


@dataclass(frozen=True)
class Mutant:
    """One change of an artifact: `apply` makes it in a folder; a refusal must mention one of `mentions`."""

    family: str
    what: str
    apply: Callable[[Path], None]
    mentions: tuple[str, ...]
    resealed: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.what}{' (resealed)' if self.resealed else ''}"


def reseal(folder: Path, *names: str) -> None:
    """Record files of a folder as they are now (without names: all recorded ones), and the configuration."""
    path = folder / CONFIG_NAME
    values = json.loads(path.read_text(encoding="utf-8"))
    names = tuple(name for name in names or values["artifact"]["files"] if name != CONFIG_NAME)
    if names:
        values["artifact"]["files"] |= manifest.to_json(manifest.record(folder, names))
    values["artifact"]["seal"] = seal(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def files_of(folder: Path) -> list[str]:
    """Return all files of an artifact, except its card, which is not read."""
    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    return [name for name in names if name != CARD and not name.startswith("figures/")]


def mutants(folder: Path, other: Path, count: int, seed: int) -> Iterator[Mutant]:
    """Yield `count` mutants of an artifact, alternating all kinds; `other` has the same shapes and other numbers."""
    draw = random.Random(seed)
    kinds = [*KINDS]
    for index in range(count):
        yield kinds[index % len(kinds)](folder, other, random.Random(draw.getrandbits(64)))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _bytes(folder: Path, other: Path, draw: random.Random) -> Mutant:
    """Change, add, remove or move a few bytes of a file."""
    name = draw.choice(files_of(folder))
    content = (folder / name).read_bytes()
    length, start, size = len(content), draw.randrange(len(content)), draw.choice((1, 2, 7, 64, 512))
    end = min(length, start + size)
    piece, elsewhere = content[start:end], draw.randrange(length)
    changed = {
        "a bit flipped": content[:start] + bytes([content[start] ^ 1 << draw.randrange(8)]) + content[start + 1 :],
        "bytes inserted": content[:start] + draw.randbytes(size) + content[start:],
        "bytes deleted": content[:start] + content[end:],
        "cut off": content[:start],
        "a block zeroed": content[:start] + bytes(end - start) + content[end:],
        "a block doubled": content[:end] + piece + content[end:],
        "a block overwritten": content[:start] + draw.randbytes(end - start) + content[end:],
        "a block copied over another": (content[:elsewhere] + piece + content[elsewhere + len(piece) :])[:length],
        "bytes appended": content + draw.randbytes(size),
    }
    how = draw.choice(list(changed))
    return Mutant("bytes", f"{name}: {how} at {start}", _write(name, changed[how]), (name,))


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return apply


# ---- files -----------------------------------------------------------------------------------------------------------


def _files(folder: Path, other: Path, draw: random.Random) -> Mutant:
    """Remove, exchange or add whole files, or replace them by something that is not a file."""
    names = files_of(folder)
    name, second = draw.sample(names, 2)
    same = [found for found in names if (other / found).is_file() and found != CONFIG_NAME]
    stray = draw.choice([found for found in STRAYS if found not in names])
    foreign = draw.choice([found for found in same if (other / found).read_bytes() != (folder / found).read_bytes()])

    def swap(copy: Path) -> None:
        contents = (copy / name).read_bytes(), (copy / second).read_bytes()
        (copy / second).write_bytes(contents[0])
        (copy / name).write_bytes(contents[1])

    def replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
        def apply(copy: Path) -> None:
            (copy / name).unlink()
            make(copy / name)

        return apply

    choices = [
        Mutant("files", f"{name} deleted", lambda copy: (copy / name).unlink(), (name,)),
        Mutant("files", f"{name} emptied", _write(name, b""), (name,)),
        Mutant("files", f"{name} a folder", replaced(Path.mkdir), (name,)),
        Mutant("files", f"{name} a pipe", replaced(os.mkfifo), (name,)),
        Mutant("files", f"{name} a link to itself", replaced(lambda path: path.symlink_to(path.name)), (name,)),
        Mutant("files", f"{name} a link to nothing", replaced(lambda path: path.symlink_to("nowhere")), (name,)),
        Mutant(
            "files", f"{name} a link out of the folder", replaced(lambda path: path.symlink_to(folder / name)), (name,)
        ),
        Mutant("files", f"{name} and {second} exchanged", swap, (name, second)),
        Mutant("files", f"{foreign} of another artifact", _write(foreign, (other / foreign).read_bytes()), (foreign,)),
        Mutant("files", f"{stray} added", _write(stray, STRAYS[stray]), (stray,)),
    ]
    return draw.choice(choices)


# ---- headers of safetensors ------------------------------------------------------------------------------------------


def _headers(folder: Path, other: Path, draw: random.Random) -> Mutant:
    """Make a header disagree with its tensors."""
    name = draw.choice([found for found in files_of(folder) if found.endswith(".safetensors")])
    content = (folder / name).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    tensors = [key for key in header if key != "__metadata__"]
    key = draw.choice(tensors)
    entry, resealed = header[key], draw.random() < 0.6
    how = draw.choice(("shape", "dtype", "offsets", "name", "lost", "length", "twice", "metadata", "entry"))
    text = None
    if how == "shape":
        shape = list(entry["shape"])
        new = [
            [*shape, 1], [1, *shape], shape[::-1], shape[:-1], [2**62, 4], [-1], [10**9, 10**9], [0],
            [size + 1 for size in shape], "wide", None, [1.5],
        ]  # fmt: skip
        entry["shape"] = draw.choice([value for value in new if value != shape])
    elif how == "dtype":
        kinds = ("F64", "F16", "I32", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "nonsense", 7, None)
        entry["dtype"] = draw.choice([kind for kind in kinds if kind != entry["dtype"]])
    elif how == "offsets":
        start, end = entry["data_offsets"]
        new = ([start + 4, end + 4], [end, start + 1], [0, 2**63], [start, end + 4], [-4, end], [start], "all")
        entry["data_offsets"] = draw.choice(new)
    elif how == "name":
        header[draw.choice(("ghost", "../x", key + ".", key.upper() + "x", "x" * 3000, ""))] = header.pop(key)
    elif how == "lost":
        del header[key]
    elif how == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(entry)}}}"
    elif how == "metadata":
        header["__metadata__"] = draw.choice((None, [], {"format": 7}, {"format": "tf"}, "pt"))
    elif how == "entry":
        header[key] = draw.choice((None, [], 7, {}, {"dtype": "F32"}))
    encoded = (json.dumps(header) if text is None else text).encode()
    said = len(encoded)
    if how == "length":
        said = draw.choice((0, 1, len(encoded) - 1, len(encoded) + 8, 2**40, 2**63, 2**64 - 1, len(content)))
    apply = _write(name, struct.pack("<Q", said) + encoded + data)
    mutant = Mutant("headers", f"{name}: {how} of {key}: {brief(header.get(key))}", apply, _named(name))
    return _resealed(mutant, name) if resealed else mutant


# ---- values of JSON --------------------------------------------------------------------------------------------------


def _values(folder: Path, other: Path, draw: random.Random) -> Mutant:
    """Replace, remove, rename or repeat a value of a configuration."""
    resealed = draw.random() < 0.6
    names = [found for found in files_of(folder) if found.endswith(".json") and not (resealed and is_side_file(found))]
    # Prefer our configuration, which has the most keys.
    name = CONFIG_NAME if draw.random() < 0.5 else draw.choice(names)
    values = json.loads((folder / name).read_text(encoding="utf-8"))
    allowed = OWN_KEYS if name == CONFIG_NAME else SHAPE_KEYS
    keys = [key for key in values if key in allowed or not resealed]
    if not keys:
        return _values(folder, other, draw)
    path: list[Any] = [draw.choice(keys)]
    place: Any = values
    while isinstance(place[path[-1]], (dict, list)) and place[path[-1]] and draw.random() < 0.85:
        place = place[path[-1]]
        path.append(draw.choice(list(place) if isinstance(place, dict) else range(len(place))))
    key, text = path[-1], None
    how = draw.choice(("replaced", "replaced", "replaced", "lost", "renamed", "twice", "constant", "deep"))
    if how == "replaced" or not isinstance(place, dict):
        how, old = "replaced", place[key]
        place[key] = draw.choice([value for value in VALUES if type(value) is not type(old) or value != old])
    elif how == "lost":
        del place[key]
    elif how == "renamed":
        place[draw.choice((key + "x", "", "../" + key))] = place.pop(key)
    else:
        marker = "\ue000marker"
        added = {
            "twice": f"{json.dumps(key)}: {json.dumps(place[key])}, {json.dumps(key)}: {json.dumps(place[key])}",
            "constant": f"{json.dumps(key)}: {draw.choice(('NaN', 'Infinity', '1e999', '-0', '1' * 5000))}",
            "deep": f"{json.dumps(key)}: {'[' * 100_000}{']' * 100_000}",
        }[how]
        place[marker] = 0
        del place[key]
        text = json.dumps(values).replace(f"{json.dumps(marker)}: 0", added)
        resealed = False  # readers disagree on such a text, so there is nothing to seal
    encoded = json.dumps(values) if text is None else text
    where = ".".join(map(str, path))
    what = f"{name}: {brief(where)} {how}" + (f" by {brief(place[key])}" if how == "replaced" else "")
    mutant = Mutant("values", what, _write(name, encoded.encode()), (*_named(name), CONFIG_NAME, str(key)))
    return _resealed(mutant, name) if resealed else mutant


def brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _named(name: str) -> tuple[str, ...]:
    """Return the names that a refusal may mention: the file, or the shards that it is one of."""
    stem = name.split(".")[0].split("-0")[0]
    return (name, f"{stem}*", f"{stem}.")


def _resealed(mutant: Mutant, name: str) -> Mutant:
    def apply(folder: Path) -> None:
        mutant.apply(folder)
        values = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        if isinstance(values, dict) and isinstance(values.get("artifact"), dict):
            reseal(folder, name)

    return replace(mutant, apply=apply, resealed=True)


KINDS = (_bytes, _files, _headers, _values, _bytes, _headers, _values, _values)


def copy_artifact(folder: Path, copy: Path) -> None:
    """Make a fresh copy, replacing the last one."""
    if copy.is_symlink() or copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(folder, copy, symlinks=True, copy_function=shutil.copyfile)
