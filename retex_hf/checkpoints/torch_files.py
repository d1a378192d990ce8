"""Reading of `torch.save` files without unpickling them.

A pickle is a program. Only the instructions that describe plain values and tensors are interpreted here, and the
functions that they name are never looked up or called: a tensor is recorded as a storage, a shape and strides. These
are then checked against the bytes in the file, and mapped. So a tensor never takes more memory than the file holds for
it, whatever the program says.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError, brief, first_line
from ..utils.terminal import visible

# Limits of the pickle and of the archive's directory. A shard of the largest models has a tenth of that.
MOST_PICKLE_BYTES, MOST_DIRECTORY_BYTES = 16_000_000, 32_000_000
# A tensor takes about thirty instructions.
MOST_INSTRUCTIONS = 2_000_000
MOST_AXES, LARGEST_NUMBER = 64, 2**62
# How many names may share the same bytes: a model whose layers are all tied has a name for each.
MOST_TIED = 64
LEGACY_START = [0x1950A86A20F9469CFC6C, 1001]

STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
ORDERED_DICT, FROM_TYPE = "collections.OrderedDict", "torch._tensor._rebuild_from_type_v2"
TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"}
PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
PLAIN_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
# Other names that torch writes. Values that are not plain tensors are recorded, and refused if they are weights.
OTHERS = PLAIN_CLASSES | {
    ORDERED_DICT, FROM_TYPE, "torch.Size", "torch.device", "torch.serialization._get_layout",
    "torch.storage.UntypedStorage", "collections.Counter",
    "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex", "__builtin__.bytearray",
    "__builtin__.set", "__builtin__.complex",
}  # fmt: skip
DAMAGED = "it is damaged, or another kind of file"


class _Refusal(Exception):
    """The reason why a file is not read."""


@dataclass(frozen=True)
class _Global:
    """A global name that the pickle mentions."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A contiguous run of numbers in the file."""

    kind: str
    key: str
    numel: int

    @property
    def dtype(self) -> torch.dtype | None:
        return STORAGES.get(self.kind)

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number, of a dtype that is read."""
        return STORAGES[self.kind].itemsize


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a storage."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)


@dataclass(frozen=True)
class _Other:
    """A value that is not a plain tensor."""

    what: str


@dataclass(frozen=True)
class _Number:
    """A number as a key, hashed as text: hashes of numbers are easy to make collide, which takes quadratic time."""

    text: str

    def __repr__(self) -> str:
        return self.text


def read_torch_file(file: Path) -> dict[Any, Any]:
    """Return the named tensors of a file, mapped into memory; values of other types are returned unchanged."""
    try:
        with file.open("rb") as stream:
            zipped = stream.read(4) == b"PK\3\4"
            loaded, places = (_read_zip if zipped else _read_legacy)(stream)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist.") from None
    except _Refusal as refusal:
        raise CheckpointError(f"{file} cannot be read as a file of plain tensors: {refusal}.") from None
    except (zipfile.BadZipFile, struct.error, EOFError, ValueError, NotImplementedError, OverflowError):
        raise CheckpointError(f"{file} cannot be read as a file of plain tensors: {DAMAGED}.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or first_line(error)}.") from None
    # OpenCLIP's training checkpoints keep the weights under this key, beside the optimiser.
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        kind = "Tensor" if isinstance(loaded, _View) else type(loaded).__name__.lstrip("_")
        raise CheckpointError(f"{file} holds a {kind}, not named tensors.")
    return _mapped(file, loaded, places)


# ---- the layout of the file ------------------------------------------------------------------------------------------

# Offset and length in bytes, by storage.
Places = Mapping[str, tuple[int, int]]


def _read_zip(stream: BinaryIO) -> tuple[Any, Places]:
    size = os.fstat(stream.fileno()).st_size
    if _directory_bytes(stream, size) > MOST_DIRECTORY_BYTES:
        raise _Refusal("its table of contents is too long")
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise _Refusal("two of its parts have one name")
    roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise _Refusal(DAMAGED)
    places = {
        name.removeprefix(f"{roots[0]}/"): _place(stream, entry, size)
        for name, entry in entries.items()
        if name.startswith(f"{roots[0]}/")
    }
    _check_apart(places)
    order = _part(stream, *places["byteorder"]) if "byteorder" in places else sys.byteorder.encode()
    if order != sys.byteorder.encode():
        raise _Refusal("its numbers are in another byte order than this machine's")
    program = _part(stream, *places["data.pkl"])
    stored = {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}
    return _run(io.BytesIO(program)), stored


def _directory_bytes(stream: BinaryIO, size: int) -> int:
    """Return the declared length of the directory at the end of an archive. torch writes nothing after it."""
    stream.seek(max(0, size - 98))
    tail = stream.read(98).rjust(98, b"\0")
    record, locator, end = tail[:56], tail[56:76], tail[76:]
    if end[:4] != b"PK\5\6":
        raise _Refusal(DAMAGED)
    (length,) = struct.unpack("<L", end[12:16])
    return struct.unpack("<Q", record[40:48])[0] if locator[:4] == b"PK\6\7" else length


def _place(stream: BinaryIO, entry: zipfile.ZipInfo, size: int) -> tuple[int, int]:
    """Return offset and length of a part of an archive. Refuse compressed parts, which torch never writes."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise _Refusal(f"its part {brief(entry.filename)} is compressed, which torch never does")
    stream.seek(entry.header_offset)
    header = stream.read(30)
    if header[:4] != b"PK\3\4":
        raise _Refusal(DAMAGED)
    start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
    if start + entry.file_size > size:
        raise _Refusal(DAMAGED)
    return start, entry.file_size


def _check_apart(places: Places) -> None:
    """Refuse parts that share bytes, so that copying each part once takes no more memory than the file."""
    end = 0
    for start, length in sorted(places.values()):
        if start < end:
            raise _Refusal("two of its parts overlap")
        end = start + length


def _part(stream: BinaryIO, start: int, length: int) -> bytes:
    if length > MOST_PICKLE_BYTES:
        raise _Refusal(f"it takes {length} bytes to describe its tensors; at most {MOST_PICKLE_BYTES} are read")
    stream.seek(start)
    return stream.read(length)


def _read_legacy(stream: BinaryIO) -> tuple[Any, Places]:
    """Read the format of torch before 1.6: four pickles, a fifth with the storage keys, then storages with lengths."""
    size = os.fstat(stream.fileno()).st_size
    stream.seek(0)
    programs = io.BytesIO(stream.read(MOST_PICKLE_BYTES))
    if [_run(programs), _run(programs)] != LEGACY_START:
        raise _Refusal(DAMAGED)
    order = _run(programs)
    if not isinstance(order, dict) or order.get("little_endian", True) is not (sys.byteorder == "little"):
        raise _Refusal("its numbers are in another byte order than this machine's")
    storages: dict[str, _Storage] = {}
    loaded, keys = _run(programs, storages), _run(programs)
    place, places = programs.tell(), {}
    for key in keys if isinstance(keys, list) else ():
        storage = storages.get(key) if isinstance(key, str) else None
        stream.seek(place)
        numel = int.from_bytes(stream.read(8), "little")
        if storage is None or numel != storage.numel:
            raise _Refusal(DAMAGED)
        if storage.dtype is None:
            break  # its length is unknown, and so is where the next one begins
        length = numel * storage.itemsize
        if place + 8 + length > size:
            raise _Refusal(DAMAGED)
        places[key] = (place + 8, length)
        place += 8 + length
    return loaded, places


# ---- the pickle ------------------------------------------------------------------------------------------------------

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
MADE: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": lambda: _Other("a set")}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(stream: BinaryIO, storages: dict[str, _Storage] | None = None) -> Any:
    """Interpret a pickle to its end and return the value it describes; `storages` collects the storages it names."""
    try:
        return _follow(stream, {} if storages is None else storages)
    except (IndexError, KeyError):  # the stack or the memo lacks an entry
        raise _Refusal(DAMAGED) from None


def _follow(stream: BinaryIO, storages: dict[str, _Storage]) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    steps = 0
    argument: Any  # its type depends on the instruction

    def take(count: int) -> None:
        nonlocal steps
        steps += count
        if steps > MOST_INSTRUCTIONS:
            raise _Refusal(f"it takes over {MOST_INSTRUCTIONS} instructions to describe its tensors")

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(stream):
        take(1)
        name = opcode.name
        if name in LITERALS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in MADE:
            stack.append(MADE[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_named(argument))
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            _extend(stack[-1], items)
        elif name in ("SETITEM", "SETITEMS"):
            items = since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
            _update(stack[-1], items)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = stack.pop()
            stack.append(_call(stack.pop(), arguments, take))
        elif name == "BUILD":
            stack.pop()  # attributes, none of which are needed
            if not isinstance(stack[-1], (dict, _Other, _View)):
                raise _Refusal(DAMAGED)
        elif name == "BINPERSID":
            storage = _storage(stack.pop())
            storages[storage.key] = storage
            stack.append(storage)
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise _Refusal(f"it has the instruction {name}, which plain tensors do not need")
    raise _Refusal(DAMAGED)


def _named(argument: str) -> _Global:
    module, _, name = argument.partition(" ")
    full = f"{module}.{name}"
    is_torch = module == "torch" and (
        name.endswith("Storage") or isinstance(vars(torch).get(name), (torch.dtype, torch.layout, torch.qscheme))
    )
    if not is_torch and full not in OTHERS and not (module == "torch._utils" and name.startswith("_rebuild_")):
        raise _Refusal(f"it also holds {visible(full[:200])}, which could run code")
    return _Global(full)


def _extend(values: Any, items: list[Any]) -> None:
    if isinstance(values, list):
        values.extend(items)
    elif not isinstance(values, _Other):
        raise _Refusal(DAMAGED)


def _update(values: Any, items: list[Any]) -> None:
    if isinstance(values, _Other):
        return
    if not isinstance(values, dict) or len(items) % 2:
        raise _Refusal(DAMAGED)
    for key, value in zip(items[::2], items[1::2], strict=True):
        # No tuples: hashing takes exponential time if each tuple holds the previous one twice.
        if not isinstance(key, (str, int, float, bytes)) and key is not None:
            raise _Refusal("it has keys that are neither texts nor numbers")
        key = _Number(repr(key)) if isinstance(key, (int, float)) else key
        if key in values:
            raise _Refusal(f"it holds {brief(key)} twice")
        values[key] = value


def _call(function: Any, arguments: Any, take: Callable[[int], None]) -> Any:
    """Return a record of the value that a call would give; `take` counts the steps of calls that take many."""
    if not isinstance(function, _Global) or not isinstance(arguments, tuple):
        raise _Refusal(DAMAGED)
    name = function.name
    if name == ORDERED_DICT:
        return _ordered(arguments[0] if arguments and isinstance(arguments[0], list) else [], take)
    if name in TENSORS:
        storage, offset, size, stride, *rest = arguments if len(arguments) > 3 else (None,) * 4
        lazy = bool(rest[2:])  # a conjugate or negative view, computed on access
        if not isinstance(storage, _Storage) or lazy:
            return _Other(name)
        if not isinstance(offset, int) or not _is_numbers(size) or not _is_numbers(stride):
            raise _Refusal(DAMAGED)
        return _View(storage, offset, size, stride)
    if name in PARAMETERS or name == "torch.nn.parameter.Parameter":
        return arguments[0]
    if name == FROM_TYPE and len(arguments) == 4 and isinstance(arguments[1], _Global):
        inner, kind, values, _ = arguments
        return _call(inner, values, take) if kind.name in PLAIN_CLASSES and inner != function else _Other(kind.name)
    # For dtypes without a storage class of their own, the seventh argument is the dtype.
    dtype = next((argument for argument in arguments[6:7] if isinstance(argument, _Global)), None)
    return _Other(name if dtype is None else dtype.name)


def _ordered(pairs: list[Any], take: Callable[[int], None]) -> dict[Any, Any]:
    """Return a dict of pairs. One list may be given to many calls, so the pairs of each call are counted."""
    take(len(pairs))
    values: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _Refusal(DAMAGED)
        _update(values, list(pair))
    return values


def _storage(key: Any) -> _Storage:
    """Return the storage named by torch's persistent id: kind, key, device (ignored), and number of elements."""
    if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage" or key[5:] not in ((), (None,)):
        raise _Refusal(DAMAGED)
    kind, name, _, numel = key[1:5]
    if not isinstance(kind, _Global) or not isinstance(name, str) or not _is_count(numel):
        raise _Refusal(DAMAGED)
    return _Storage(kind.name, name, numel)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_NUMBER


def _is_numbers(values: Any) -> bool:
    """Return whether a value is a tuple of integers only."""
    return isinstance(values, tuple) and all(isinstance(value, int) for value in values)


# ---- from records to tensors -----------------------------------------------------------------------------------------


def _mapped(file: Path, values: Mapping[Any, Any], places: Places) -> dict[Any, Any]:
    for name, value in values.items():
        _check_kind(f"{file}: tensor {brief(name)}", value)
    for name, value in values.items():
        if isinstance(value, _View):
            _check_place(f"{file}: tensor {brief(name)}", value, places)
    views, size = [value for value in values.values() if isinstance(value, _View)], file.stat().st_size
    # Tied tensors, one of which may be transposed, share the same numbers.
    distinct = {(view.storage.key, view.offset, view.numel): view for view in views}.values()
    if _bytes(distinct) > size or _bytes(views) > MOST_TIED * size:
        raise CheckpointError(f"{file} has {size} bytes, but its tensors have {_bytes(views)}: they overlap.")
    try:
        whole = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size)
    except RuntimeError as error:  # the file has changed meanwhile, or exceeds what the process may map
        raise CheckpointError(f"{file} cannot be mapped into memory: {first_line(error)}.") from None
    # One storage per key, whatever dtypes and lengths the tensors declare, so that each is copied at most once.
    widest: dict[str, int] = {}
    for storage in {view.storage for view in views}:
        widest[storage.key] = max(widest.get(storage.key, 1), storage.itemsize)
    storages: dict[str, torch.UntypedStorage] = {}
    for key, itemsize in widest.items():
        start, length = places[key]
        part = whole[start : start + length]
        storages[key] = part.clone() if start % itemsize else part
    return {
        name: _tensor(value, storages[value.storage.key]) if isinstance(value, _View) else value
        for name, value in values.items()
    }


def _check_kind(what: str, value: Any) -> None:
    """Refuse tensors that are not plain: sparse, quantised, complex, of a custom class, or on the meta device."""
    if isinstance(value, _Other):
        raise CheckpointError(f"{what} is not a dense tensor of a supported dtype: the file has {brief(value.what)}.")
    if isinstance(value, _View) and value.storage.dtype is None:
        raise CheckpointError(f"{what} is in a {brief(value.storage.kind)}, which is not read.")


def _check_place(what: str, view: _View, places: Places) -> None:
    """Refuse a tensor that reaches beyond its storage."""
    storage, axes = view.storage, (*view.size, *view.stride, view.offset)
    is_shape = all(map(_is_count, axes)) and len(view.size) == len(view.stride) <= MOST_AXES
    # Axes of size 0 are left out, because torch computes strides from the others.
    if not is_shape or prod(size for size in view.size if size) > LARGEST_NUMBER:
        raise CheckpointError(f"{what} has an invalid shape: {brief(view.size)} with strides {brief(view.stride)}.")
    _, length = places.get(storage.key, (0, -1))
    there = length // storage.itemsize
    last = view.offset + sum((size - 1) * step for size, step in zip(view.size, view.stride, strict=True))
    if storage.numel > there or view.numel > storage.numel or (view.numel and last >= storage.numel):
        raise CheckpointError(
            f"{what} has shape {view.size}, which is {view.numel} numbers, but the file holds {max(there, 0)} for it."
        )


def _bytes(views: Iterable[_View]) -> int:
    return sum(view.numel * view.storage.itemsize for view in views)


def _tensor(view: _View, storage: torch.UntypedStorage) -> Tensor:
    if not view.numel:
        return torch.empty(view.size, dtype=view.storage.dtype)
    return torch.empty(0, dtype=view.storage.dtype).set_(storage, view.offset, view.size, view.stride)
