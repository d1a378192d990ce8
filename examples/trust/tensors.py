"""Tensors that differ from their description: read correctly, or refused with a sentence that names file and tensor.

Files of torch whose tensors claim more numbers than there are, by strides, shapes or lengths; archives and pickle
programs that torch never writes; damaged ones; dtypes and layouts of all kinds in files and in memory, as base, expert
and adapter. Each is tried in a process with limited memory and time.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import islice
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints import open_source
from trust import torch_bytes
from trust.bounded import Answer, Bounded
from trust.tally import Tally
from trust.torch_bytes import Tensor

SECONDS, MEGABYTES, ROOM = 60.0, 300, 4 << 30
RIGHT, REFUSED = "right", "refused"
SIZES = (0, 1, 2, 3, 4, 7, 1000, 10**6, 10**9, 2**40, 2**62, 2**63, 2**70, -1)
STRIDES = (0, 0, 1, 2, 3, 7, 2**40, 2**63, -1)
MODEL = {
    "vocab_size": 7, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 5,
    "max_position_embeddings": 4,
}  # fmt: skip
QUERY, COUNTER = "encoder.layer.0.attention.self.query.weight", "embeddings.position_ids"
# Names of dtypes in safetensors files, and the bytes of a number.
DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "U16": 2, "U32": 4, "U64": 8, "F4": 1, "X": 4,
}  # fmt: skip
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# A question: an action, its argument, the required outcome (None: either), and the names that a refusal must mention.
Question = tuple[str, Any, str | None, tuple[str, ...]]

# ---- files of torch --------------------------------------------------------------------------------------------------


def _numbers(count: int) -> bytes:
    return struct.pack(f"<{count}f", *range(1, count + 1))


def _shown(it: Tensor, count: int) -> list[float] | None:
    """Return the numbers that a tensor shows of a storage of `count`; None where there are not so many."""
    sizes = (*it.size, *it.stride, it.offset, it.numel)
    if min(sizes) < 0 or max(sizes) > 2**62 or it.numel > count or prod(it.size) > it.numel:
        return None
    if 0 in it.size:
        return [] if prod(size for size in it.size if size) <= 2**62 else None
    places = [it.offset]
    for size, step in zip(it.size, it.stride, strict=True):
        places = [place + step * index for place in places for index in range(size)]
    return [float(place + 1) for place in places] if max(places) < it.numel else None


def _views(folder: Path, draw: random.Random) -> Iterator[Question]:
    """Yield shapes, strides, offsets and lengths that fit the file, or do not."""
    while True:
        count, axes = draw.choice((1, 4, 12, 20_000)), draw.randint(0, 3)
        fits = draw.random() < 0.4
        size = tuple(draw.choice((1, 1, 2, 3) if fits else SIZES) for _ in range(axes))
        stride = tuple(draw.choice((1, 2, 3) if fits else STRIDES) for _ in range(axes))
        numel = (
            count if fits or draw.random() < 0.7 else draw.choice((count + 1, count * 1000, 2**61, max(0, count - 1)))
        )
        it = Tensor(numel=numel, offset=draw.choice((0, 0, 1, 2 if fits else 2**62)), size=size, stride=stride)
        legacy = draw.random() < 0.5
        expected = _shown(it, count)
        if legacy:
            content = torch_bytes.legacy_file(
                torch_bytes.program({"w": it}, True), {"0": _numbers(count)}, {"0": count}
            )
            expected = expected if numel == count else None
        else:
            content = torch_bytes.archive(torch_bytes.program({"w": it}), {"0": _numbers(count)})
        file = folder / "weights.bin"
        file.write_bytes(content)
        yield "read", (str(file), "w", expected), REFUSED if expected is None else RIGHT, ("weights.bin",)


def _archives(folder: Path, draw: random.Random) -> Iterator[Question]:
    """Yield archives and pickle programs that torch does not write."""
    file, plain = folder / "weights.bin", torch_bytes.program({"w": Tensor()})
    data = {"0": _numbers(4)}
    whole = torch_bytes.archive(plain, data)
    large = torch_bytes.program({"w": Tensor(numel=10**7, size=(10**7,), stride=(1,))})
    twins = {f"w{index}": Tensor(numel=50_000, size=(50_000 - index,), stride=(1,)) for index in range(100)}
    tied = {f"w{index}": Tensor(numel=50_000, size=(50_000,), stride=(1,)) for index in range(100)}
    chain = (
        b"\x80\x02}("
        + b")q\x00"
        + b"".join(b"h" + bytes([n]) * 1 + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    )
    cases: list[bytes] = [
        torch_bytes.archive(plain, data, compressed=True),
        torch_bytes.archive(large, {"0": bytes(4 * 10**7)}, compressed=True),
        torch_bytes.archive(plain, {}),
        torch_bytes.archive(plain, {"0": b""}),
        torch_bytes.archive(plain, {"0": _numbers(3)}),
        torch_bytes.archive(plain, data, more=[("archive/byteorder", b"big")]),
        torch_bytes.archive(plain, data, more=[("other/data.pkl", plain)]),
        torch_bytes.archive(torch_bytes.program(twins), {"0": _numbers(50_000)}),
        torch_bytes.archive(torch_bytes.program(tied), {"0": _numbers(50_000)}),
        whole.replace(b"data/0", b"version", 1),
        whole[: len(whole) // 2],
        whole + b"more",
        b"PK\3\4" + bytes(200),
        torch_bytes.legacy_file(torch_bytes.program({"w": Tensor()}, True), data, {"0": 2**40}),
        torch_bytes.legacy_file(torch_bytes.program({"w": Tensor(numel=2**40)}, True), data, {"0": 2**40}),
        torch_bytes.legacy_file(torch_bytes.program({"w": Tensor(key="1")}, True), data, {"0": 4}),
        torch_bytes.MAGIC + torch_bytes.VERSION,
    ]
    programs = [
        b"\x80\x02cos\nsystem\n" + torch_bytes.text("true") + b"\x85R.",
        b"\x80\x02cbuiltins\neval\n" + torch_bytes.text("1") + b"\x85R.",
        b"\x80\x02}(" + torch_bytes.text("w") + b"c__builtin__\nbytearray\n" + torch_bytes.number(10**12) + b"\x85Ru.",
        chain + b"Nu.",  # a key whose hash takes forever
        b"\x80\x02}(" + b"N" * 1001 + b"u.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02)" + b"\x85" * 200_000 + b".",
        b"\x80\x02h\x05.",
        b"\x80\x02.",
        b"\x80\x02R.",
        b"\x80\x02K\x01}b.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b".",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x04\x8c\x01a.",
        b"S'a'\n.",
        b"\x80\x02}(" + torch_bytes.text("w") + torch_bytes.tensor(Tensor()) + torch_bytes.text("w") + b"Nu.",
        b"\x80\x02]" + b"(" + b"K\x01" * 1000 + b"e.",
        torch_bytes.program({"w": Tensor(kind="ComplexFloatStorage")}),
        torch_bytes.program({"w": Tensor(kind="QInt8Storage")}),
        torch_bytes.program({"w": Tensor(module="torch.storage", kind="UntypedStorage")}),
        torch_bytes.program({"w": Tensor(rebuild="torch._utils\n_rebuild_sparse_tensor")}),
        torch_bytes.program({"w": Tensor(rebuild="torch._utils\n_rebuild_qtensor")}),
        torch_bytes.program({"w": Tensor(rebuild="torch._utils\n_rebuild_wrapper_subclass")}),
        torch_bytes.program({"w" * 5000: Tensor()}),
        torch_bytes.program({"w": Tensor(size=(1,) * 200, stride=(1,) * 200)}),
    ]
    cases += [torch_bytes.archive(pickled, data) for pickled in programs]
    cases += [torch_bytes.legacy_file(pickled, data, {"0": 4}) for pickled in programs]
    draw.shuffle(cases)
    for content in cases:
        file.write_bytes(content)
        yield "read", (str(file), "w", None), REFUSED, ("weights.bin",)


def _damaged(folder: Path, draw: random.Random) -> Iterator[Question]:
    """Yield a valid file with bytes changed, lost or added."""
    file = folder / "weights.bin"
    tensors = {"w": Tensor(), "x": Tensor(key="1", size=(4,), stride=(1,))}
    data, numels = {"0": _numbers(4), "1": _numbers(4)}, {"0": 4, "1": 4}
    wholes = (
        torch_bytes.archive(torch_bytes.program(tensors), data),
        torch_bytes.legacy_file(torch_bytes.program(tensors, True), data, numels),
    )
    while True:
        content = bytearray(draw.choice(wholes))
        for _ in range(draw.choice((1, 1, 2, 20))):
            place = draw.randrange(len(content))
            how = draw.choice(("bit", "byte", "lost", "added"))
            if how == "bit":
                content[place] ^= 1 << draw.randrange(8)
            elif how == "byte":
                content[place] = draw.randrange(256)
            elif how == "lost":
                del content[place : place + draw.choice((1, 8, 100))]
            else:
                content[place:place] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 8, 100))))
            content = content or bytearray(1)
        file.write_bytes(content)
        yield "read", (str(file), "w", None), None, ("weights.bin",)


# ---- dtypes and layouts ----------------------------------------------------------------------------------------------


@cache
def _base() -> nn.Module:
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**MODEL)).eval()


@cache
def _tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of an expert."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=draw) for name, tensor in _base().state_dict().items()
    }


def _safetensors(tensors: dict[str, tuple[str, list[int], bytes]], file: Path) -> None:
    """Write a safetensors file with the given dtypes and shapes."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _dtypes(folder: Path, draw: random.Random) -> Iterator[Question]:
    """Yield one tensor of a base or an expert in another dtype, or of another shape."""
    plain = {name: ("F32", list(tensor.shape), _raw(tensor)) for name, tensor in _tensors().items()}
    while True:
        place = folder / "checkpoint"
        shutil.rmtree(place, ignore_errors=True)
        _base().config.architectures = ["BertModel"]
        _base().config.save_pretrained(place)
        name, dtype = (
            draw.choice([QUERY, "pooler.dense.bias", "embeddings.LayerNorm.weight"]),
            draw.choice(list(DTYPES)),
        )
        tensor = _tensors()[name]
        content, outcome = bytes(tensor.numel() * DTYPES[dtype]), REFUSED
        shape = draw.choice([list(tensor.shape)] * 4 + [[], [0], [*tensor.shape, 1], [tensor.numel() + 1]])
        if shape != list(tensor.shape):
            content = bytes(prod(shape) * DTYPES[dtype])
        elif dtype in FLOATS:
            content, outcome = _raw(tensor.to(FLOATS[dtype])), RIGHT
        _safetensors({**plain, name: (dtype, shape, content)}, place / "model.safetensors")
        role = draw.choice(("base", "expert"))
        if role == "base" and dtype in FLOATS and len(shape) == tensor.ndim == 1 and outcome == REFUSED:
            outcome = None  # with another length it is taken for an output layer, which each expert keeps
        yield "build", (role, str(place), name, dtype), outcome, ("checkpoint", name)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": torch.Tensor.double,
    "expanded": lambda tensor: tensor[:1].expand_as(tensor),
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "complex128": lambda tensor: tensor.to(torch.complex128),
    "uint16": lambda tensor: tensor.to(torch.uint16),
    "uint32": lambda tensor: tensor.to(torch.uint32),
    "uint64": lambda tensor: tensor.to(torch.uint64),
    "int64": lambda tensor: tensor.to(torch.int64),
    "bool": lambda tensor: tensor > 0,
    "float8_e4m3fn": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "float8_e5m2": lambda tensor: tensor.to(torch.float8_e5m2),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "qint8": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1][:2]]),
    "jagged": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1][:2]], layout=torch.jagged),
}
PLAIN_LAYOUTS = ("float64", "expanded", "transposed")


def _layouts(folder: Path, draw: random.Random) -> Iterator[Question]:
    """Yield one tensor of a state dict in memory: plain ones with any strides are read, all others refused."""
    while True:
        layout, role = draw.choice(list(LAYOUTS)), draw.choice(("expert", "factor"))
        yield (
            "memory",
            (role, layout),
            RIGHT if layout in PLAIN_LAYOUTS else REFUSED,
            (QUERY,) if role == "expert" else ("lora",),
        )


# ---- adapters --------------------------------------------------------------------------------------------------------

RANKS = (2, 2, 2, 1, 0, -1, 3, 10**9, 10**400, 2.0, 2.5, True, "2", None, [], float("inf"), float("nan"))
ALPHAS = (8, 4, 0.5, 1, 0, 1e30, 1e31, 1e308, 10**400, float("inf"), float("nan"), True, "8", None, {})
PATTERNS: tuple[Any, ...] = (
    {}, {"query": 2}, {"^encoder.*query": 2}, {"(?i)QUERY": 2}, {"query": 0}, {"query": True}, {"query": "2"}, [], 5,
    {"query": 10**400}, {"(a*)*b": 2}, {".*.*.*.*!": 2}, {"(?x:([^!]+) +)!": 2}, None, {"x" * 600: 2},
)  # fmt: skip
MODULE = "base_model.model.encoder.layer.0.attention.self.query"
NAMES = (
    MODULE, MODULE, MODULE, MODULE + ".base_layer" * 20_000, MODULE + ".base_layer" * 50, "base_model.model.nowhere",
    "", ".", "a\n", "\x00", "é" * 400, "base_model.model." + "1" * 4000 + ".query",
)  # fmt: skip
FACTORS = (
    torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn,
)  # fmt: skip


def _adapters(folder: Path, draw: random.Random) -> Iterator[Question]:
    """Yield settings, names, shapes and dtypes of a LoRA adapter."""
    while True:
        place = folder / "adapter"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        odd = draw.choice(("r", "lora_alpha", "rank_pattern", "name", "dtype", "shape", "many", "rslora"))
        settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": 2, "lora_alpha": 4}
        module, dtype, shapes = MODULE, torch.float32, [(2, 6), (6, 2)]
        outcome: str | None = RIGHT
        if odd == "r":
            settings["r"] = draw.choice(RANKS)
            outcome = RIGHT if settings["r"] == 2 and type(settings["r"]) is int else REFUSED
        elif odd == "lora_alpha":
            alpha = settings["lora_alpha"] = draw.choice(ALPHAS)
            is_number = type(alpha) in (int, float) and alpha <= 1e30 and isfinite(alpha)
            outcome = RIGHT if is_number else REFUSED
        elif odd == "rank_pattern":
            settings[draw.choice(("rank_pattern", "alpha_pattern"))] = draw.choice(PATTERNS)
            outcome = None
        elif odd == "name":
            module = draw.choice(NAMES)
            outcome = RIGHT if module == MODULE else REFUSED if "encoder" not in module or len(module) > 2000 else None
        elif odd == "dtype":
            dtype = draw.choice(FACTORS)
            outcome = RIGHT if dtype.is_floating_point and dtype.itemsize > 1 else REFUSED
        elif odd == "shape":
            shapes = [draw.choice(((2, 6), (2,), (), (0, 6), (2, 6, 1), (2, 0), (2, 6, 2), (12,))), draw.choice(
                ((6, 2), (6,), (), (0, 2), (6, 2, 1), (6, 2, 2), (6, 0), (12,)))]  # fmt: skip
            outcome = RIGHT if shapes == [(2, 6), (6, 2)] else None
        elif odd == "rslora":
            settings["use_rslora"] = draw.choice((True, False, "false", 1, None))
            outcome = RIGHT if settings["use_rslora"] in (True, False, None) and settings["use_rslora"] != 1.0 else None
        numbers = torch.Generator().manual_seed(2)
        a, b = (torch.randn(shape, generator=numbers).to(dtype) for shape in shapes)
        tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        if odd == "many":
            tensors |= {f"base_model.model.x{index}.lora_A.weight": torch.ones(1) for index in range(20_000)}
            outcome = REFUSED
        save_file(tensors, place / "adapter_model.safetensors")
        text = json.dumps(settings)
        (place / "adapter_config.json").write_text(text, encoding="utf-8")
        yield "adapter", (str(place), settings, [a.tolist(), b.tolist()]), outcome, ("adapter",)


# ---- answers ---------------------------------------------------------------------------------------------------------


def answer(question: tuple[str, Any]) -> Answer:
    kind, given = question
    ANSWERS[kind](*given)
    return {"outcome": RIGHT}


def _read(file: str, name: str, expected: list[float] | None) -> None:
    source = open_source(Path(file), "expert 'red'")
    found = {known: source.read(known) for known in source.infos}
    for tensor in found.values():
        tensor.clone()
    if expected is not None and found[name].flatten().tolist() != expected:
        raise AssertionError(f"reads {found[name].flatten().tolist()[:9]}, not {expected[:9]}")


def _recovered(base: Any, expert: Any) -> dict[str, torch.Tensor]:
    model = RetexModel.from_experts(base, {"red": expert}, RetexConfig(rank="full"), progress=False, check_base=False)
    return model.recover("red")


def _check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    if not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
        raise AssertionError(f"recovers {found.flatten()[:4].tolist()}, not {expected.flatten()[:4].tolist()}")


def _build(role: str, place: str, name: str, dtype: str) -> None:
    folder = Path(place)
    found = _recovered(folder, _base()) if role == "base" else _recovered(_base(), folder)
    expected = _base().state_dict()[name] if role == "base" else _tensors()[name].to(FLOATS.get(dtype, torch.float32))
    _check(found[name], expected, 1e-2 if dtype in ("F16", "BF16") else 1e-5)


def _memory(role: str, layout: str) -> None:
    if role == "factor":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(deepcopy(_base()), LoraConfig(r=2, lora_alpha=4, target_modules=["query"]))
        layer = model.base_model.model.encoder.layer[0].attention.self.query
        draw = torch.Generator().manual_seed(3)
        a, b = torch.randn(2, 6, generator=draw), torch.randn(6, 2, generator=draw)
        layer.lora_A["default"].weight = nn.Parameter(LAYOUTS[layout](a), requires_grad=False)
        layer.lora_B["default"].weight = nn.Parameter(b, requires_grad=False)
        found = _recovered(_base(), model)[QUERY]
        _check(found, _base().state_dict()[QUERY] + 2 * b @ LAYOUTS[layout](a).float())
        return
    tensor = LAYOUTS[layout](_tensors()[QUERY])
    found = _recovered(_base(), {**_tensors(), QUERY: tensor})[QUERY]
    _check(found, tensor)


def _adapter(place: str, settings: dict[str, Any], factors: list[Any]) -> None:
    a, b = (torch.tensor(factor) for factor in factors)
    found = _recovered(_base(), Path(place))[QUERY]
    rank, alpha = settings["r"], settings["lora_alpha"]
    for key, values in (
        ("rank_pattern", settings.get("rank_pattern")),
        ("alpha_pattern", settings.get("alpha_pattern")),
    ):
        for pattern, value in (values or {}).items():
            if "query" in pattern and key == "alpha_pattern":
                alpha = value
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    _check(found, _base().state_dict()[QUERY] + scale * b.flatten(1) @ a.flatten(1), 1e-2)


ANSWERS: dict[str, Callable[..., None]] = {"read": _read, "build": _build, "memory": _memory, "adapter": _adapter}
# Number of trials of each kind in the short form, and in the long one.
KINDS: dict[str, tuple[Callable[[Path, random.Random], Iterator[Question]], int, int]] = {
    "tensors of torch files": (_views, 60, 1500),
    "archives and programs of torch files": (_archives, 70, 70),
    "damaged torch files": (_damaged, 60, 1500),
    "dtypes of bases and experts": (_dtypes, 12, 400),
    "tensors in memory": (_layouts, 12, 150),
    "LoRA adapters": (_adapters, 16, 500),
}


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Try a number of cases of each kind."""
    work_dir.mkdir(parents=True, exist_ok=True)
    tallies = []
    with Bounded(answer, seconds=SECONDS, room=ROOM) as process, tempfile.TemporaryDirectory(dir=work_dir) as folder:
        for name, (make, short, long) in KINDS.items():
            tally, draw, count = Tally(name), random.Random(f"{name} {seed}"), short if size == "short" else long
            questions = islice(make(Path(folder), draw), count)
            for kind, given, outcome, mentions in tqdm(questions, desc=name, total=count, disable=not progress):
                found, problem = judge(process.ask((kind, given)), outcome, mentions)
                tally.add(found, problem and f"{kind} {str(given)[:300]}: {problem} (seed {seed})")
            tallies.append(tally)
    return tallies


def judge(found: Answer, outcome: str | None, mentions: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the outcome of a question, and the problem, if any."""
    if "wrong" in found:
        return "wrong", found["wrong"]
    if found["megabytes"] > MEGABYTES:
        return "wrong", f"takes {found['megabytes']} MB"
    if "refusal" not in found:
        return (RIGHT, None) if outcome != REFUSED else ("wrong", "is read, and should be refused")
    if outcome == RIGHT:
        return "wrong", f"is refused, and should be read: {found['refusal'][:300]}"
    if not any(mention in found["refusal"] for mention in mentions):
        return "wrong", f"the refusal names none of {mentions}: {found['refusal'][:300]}"
    return REFUSED, None
