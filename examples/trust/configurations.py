"""Hostile configurations: every key that could name a file, a repository or code, at every depth, on composite classes.

Makes a configuration of each composite class of transformers (and of those that wrap timm), and then adds a key that
libraries resolve, with a path, a Hub id, a URL or a class, in the outermost configuration or in a nested one. Plans its
model as that of an artifact. Allowed outcomes:

- refused: a `RetexError` of one sentence;
- ignored: the library gets the same configuration as without the key;
- harmless: the model is made, and no file was opened, no request sent, no prompt shown, no code imported.

Everything else is a problem, including memory or time that nothing in the files needs. The named files are watched by
the system (inotify), which also sees access by native code.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import CONFIG_MAPPING, PreTrainedModel

from retex_hf.backends import containment, hf_transformers
from retex_hf.backends.untrusted_config import vet_transformers_config
from retex_hf.checkpoints.folder_files import FolderFiles
from retex_hf.checkpoints.sources import Source, TensorInfo
from retex_hf.errors import RetexError
from trust.bounded import asks_for_memory
from trust.small_models import default_config
from trust.tally import Tally

REFUSED, ABSENT, HARMLESS, WRONG = "refused", "as if it were not there", "harmless", "wrong"
SECONDS, ROOM = 60, 6 << 30
# Keys that transformers, timm or their readers resolve somewhere, besides the text fields of a class.
KEYS = (
    "auto_map", "transformers_weights", "_name_or_path", "name_or_path", "pretrained_model_name_or_path", "backbone",
    "architecture", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "custom_load", "file", "url",
    "hf_hub_id", "cache_dir", "tokenizer_class", "processor_class", "custom_generate", "quantization_config",
    "configuration_files", "fusion_config", "attn_implementation", "_attn_implementation", "experts_implementation",
    "kernel_config", "base_model_name_or_path", "encoder_pretrained_model_name_or_path", "vocab_file", "index_path",
    "passages_path", "dataset", "torch_dtype", "dtype", "model_type", "distributed_config", "gguf_file", "adapter_path",
)  # fmt: skip
# Nested sections in which libraries look for options.
SECTIONS = ("model_args", "backbone_kwargs", "text_config", "vision_config", "backbone_config", "decoder", "encoder")
CODE = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoBackbone", "AutoModelForSeq2SeqLM")
SHORT = ("EncoderDecoderModel", "TimmWrapperModel")
SIZES = re.compile(r"(num_hidden_layers|num_layers|n_layers?|(encoder|decoder)_layers|depth)$")
# Per nesting level: hostile values of each key, and keys that get a plain word.
VALUES, WORDS = 3, 2
# Number of naming values to try on each class, drawn from all; another seed draws others.
CASES = {"short": 300, "long": 60}
BOMBS = (100_000, 10**9, 2**40)
IN_ACCESS, IN_OPEN, IN_NONBLOCK = 0x1, 0x20, 0o4000
WATCHED = ("builtins.input", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system")


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Try many changes of two classes (`size="short"`), or some of all composite ones (`"long"`)."""
    names, bombs = Tally("hostile values in nested configurations"), Tally("huge numbers in nested configurations")
    classes = composite_classes() if size == "long" else [getattr(transformers, name) for name in SHORT]
    for cls in tqdm(classes, desc="Configurations", unit="class", disable=not progress):
        for kind, outcome, problem in _in_process(cls, work_dir / cls.__name__, seed, CASES[size]):
            (names if kind == "name" else bombs).add(outcome, problem)
    return [names, bombs]


def composite_classes() -> list[type[PreTrainedModel]]:
    """Return one model class for each configuration class that holds others, or names a backbone."""
    found = {}
    for kind in CONFIG_MAPPING.keys():  # noqa: SIM118  (it maps when it is asked)
        config_class = CONFIG_MAPPING[kind]
        fields = {field.name for field in dataclasses.fields(config_class)}
        if config_class.sub_configs or fields & {"backbone", "backbone_config", "architecture", "model_args"}:
            found[config_class] = None
    for name in sorted(dir(transformers)):
        cls = getattr(transformers, name, None) if re.search(r"(Model|For\w+)$", name) else None
        is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and not name.endswith("PreTrainedModel")
        if is_model and found.get(cls.config_class, cls) is None:
            found[cls.config_class] = cls
    chosen = {getattr(transformers, name) for name in SHORT}
    replaced = {cls.config_class: cls for cls in chosen}
    return sorted({replaced.get(key, cls) for key, cls in found.items() if cls}, key=lambda cls: cls.__name__)


def _in_process(cls: type, folder: Path, seed: int, count: int) -> Iterator[tuple[str, str, str | None]]:
    """Try one class in a process of its own, so that a crash, a hang or excessive memory is noticed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try_class, args=(cls, folder, seed, count, theirs), daemon=True)
    process.start()
    theirs.close()
    case = "the class itself"
    try:
        while True:
            if not ours.poll(2 * SECONDS):
                yield "name", WRONG, f"{cls.__name__}: {case} hangs"
                break
            message = ours.recv()
            if isinstance(message, str):
                case = message
            else:
                yield message
    except EOFError:
        process.join(10)
        if process.exitcode:
            yield "name", WRONG, f"{cls.__name__}: {case} ends the process (exit code {process.exitcode})"
    finally:
        process.kill()


def _try_class(cls: type, folder: Path, seed: int, count: int, answers: Connection) -> None:
    """Spoil the configuration of a class in `count` ways, and send the outcome of each."""
    folder.mkdir(parents=True)
    containment._install()
    watcher = _Watcher(folder / "outside")
    made = _make(cls)
    if made is None:  # a class that cannot be made from default values
        return
    values, infos = made
    draw = random.Random(f"{seed} {cls.__name__}")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    trial = _Trial(cls, values, _Described("model.safetensors", infos), folder, watcher)
    every = list(cases(cls, values, watcher.folder, draw))
    names = [case for case in every if case[0] == "name"]
    numbers = [case for case in every if case[0] == "number"]
    for kind, what, spoilt in [*draw.sample(names, min(count, len(names))), *numbers]:
        answers.send(what)
        outcome, problem = trial.judge(spoilt, plan_always=kind == "number")
        answers.send((kind, outcome, None if problem is None else f"{cls.__name__}: {what}: {problem}"))


def cases(
    cls: type, values: dict[str, Any], outside: Path, draw: random.Random
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield spoilt configurations: kind, description, the whole configuration."""
    evil = str(outside / "evil")
    texts = [
        f"{evil}.safetensors", evil, os.path.relpath(f"{evil}.json"), "org/repo", "hf-hub:org/repo",
        f"local-dir:{evil}", "http://127.0.0.1:9/x.safetensors", "evil--evil.Evil",
    ]  # fmt: skip
    shapes = {
        "auto_map": [{name: text for name in CODE} for text in texts],
        "configuration_files": [[text] for text in texts],
        "pretrained_cfg": [{"file": text, "url": text, "hf_hub_id": text, "source": "hf-hub"} for text in texts],
        "quantization_config": [{"quant_method": "gptq", "bits": 4, "path": text} for text in texts],
    }
    for place, fields in _places(cls.config_class, values):
        for key in sorted({*KEYS, *fields}):
            for value in draw.sample(shapes.get(key, texts), VALUES):
                yield "name", f"{'.'.join((*place, key))}={value!r}", _with(values, place, key, value)
        for key in draw.sample(
            sorted({*KEYS, *fields}), WORDS if fields else 0
        ):  # these pass as words, so the model is made
            value = draw.choice(("gpt2", "bert-base-uncased", "resnet50"))
            yield "name", f"{'.'.join((*place, key))}={value!r}", _with(values, place, key, value)
        if place and "model_type" in _at(values, place):
            # Types of a class that does not fit there, so that transformers would look for the code.
            for kind in ("vit", "gpt2", "t5", "wav2vec2", "evil"):
                code = {name: "evil.Evil" for name in CODE}
                spoilt = {"auto_map": code, "model_type": kind, "_name_or_path": str(outside)}
                yield "name", f"{'.'.join(place)}: code, and type {kind}", _with_all(values, place, spoilt)
        numbers = [key for key, value in _at(values, place).items() if isinstance(value, int) and value is not True]
        for key in draw.sample(sorted(numbers), min(1, len(numbers))):
            value = draw.choice(BOMBS)
            yield "number", f"{'.'.join((*place, key))}={value}", _with(values, place, key, value)


def _places(config_class: type, values: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[Any]:
    """Walk over the configuration and the nested ones, with the text fields of each."""
    fields = dataclasses.fields(config_class) if dataclasses.is_dataclass(config_class) else ()
    yield place, {field.name for field in fields if "str" in str(field.type) and "dict" not in str(field.type)}
    for key, value in values.items():
        if isinstance(value, Mapping) and ("model_type" in value or key in SECTIONS):
            kind = value.get("model_type")
            yield from _places(CONFIG_MAPPING.get(kind, object), value, (*place, key))
    if not place:
        for key in SECTIONS:
            if not isinstance(values.get(key), Mapping):
                yield (key,), set()


def _at(values: Any, place: tuple[str, ...]) -> Mapping[str, Any]:
    for key in place:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def _with(values: dict[str, Any], place: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    return _with_all(values, place, {key: value})


def _with_all(values: dict[str, Any], place: tuple[str, ...], entries: dict[str, Any]) -> dict[str, Any]:
    spoilt = deepcopy(values)
    inner = spoilt
    for name in place:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner |= entries
    return spoilt


class _Described(Source):
    """Weights that consist of names and shapes only: a plan needs nothing else."""

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is read")


@dataclasses.dataclass
class _Trial:
    cls: type
    values: dict[str, Any]
    source: Source
    folder: Path
    watcher: _Watcher

    @cached_property
    def plain(self) -> dict[str, Any]:
        """Return the original configuration as it reaches the library."""
        return vet_transformers_config(self.values, self.folder / "config.json", self.cls.config_class)

    def judge(self, spoilt: dict[str, Any], *, plan_always: bool) -> tuple[str, str | None]:
        path = self.folder / "config.json"
        signal.alarm(SECONDS)
        try:
            reaches = vet_transformers_config(spoilt, path, self.cls.config_class)
            if not plan_always and reaches == self.plain:
                return ABSENT, self.watcher.seen()
            files = FolderFiles(self.folder, {"config.json": json.dumps(spoilt).encode()})
            hf_transformers.plan(self.folder, self.source, files=files)
            outcome, problem = HARMLESS, None
        except RetexError as error:
            outcome, problem = REFUSED, None
            if "\n" in str(error) or asks_for_memory(error):
                problem = f"is refused so: {error}"
        except Exception as error:
            outcome, problem = WRONG, f"raises {type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        problem = self.watcher.seen() or problem
        return (WRONG if problem else outcome), problem


class _Watcher:
    """Watches every file of a folder that is opened, and every event that containment lets through."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.through = folder, []
        folder.mkdir()
        for name in ("evil.safetensors", "evil.json", "evil.py", "evil"):
            (folder / name).write_text("raise SystemExit('the code has run')\n", encoding="utf-8")
        libc = ctypes.CDLL(None, use_errno=True)
        self.handle = libc.inotify_init1(IN_NONBLOCK)
        if self.handle < 0 or libc.inotify_add_watch(self.handle, os.fsencode(folder), IN_OPEN | IN_ACCESS) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        # Added after the hook of containment, so that it sees only what containment lets through.
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        foreign = event == "import" and str(arguments[0]).startswith("transformers_modules")
        if event in WATCHED or foreign:
            self.through.append(f"{event} {arguments[:1]}")

    def seen(self) -> str | None:
        try:
            opened = bool(os.read(self.handle, 1 << 16))
        except BlockingIOError:
            opened = False
        through, self.through = self.through, []
        return "a file outside was opened" if opened else f"{through[0]} was let through" if through else None


def _make(cls: type[PreTrainedModel]) -> tuple[dict[str, Any], dict[str, TensorInfo]] | None:
    """Return a small configuration of a class, and names and shapes of its weights."""
    for shrink in (True, False):
        try:
            values = json.loads(json.dumps(default_config(cls.config_class).to_dict(), default=str))
            values = (_shrunk(values) if shrink else values) | {"architectures": [cls.__name__]}
            config = cls.config_class.from_dict(deepcopy(values))
            with torch.device("meta"):
                tensors = cls(config).state_dict()
            return values, {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        except Exception:  # inconsistent defaults raise any kind of error
            continue
    return None


def _shrunk(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {
        key: min(value, 2) if isinstance(value, int) and SIZES.search(key) else _shrunk(value)
        for key, value in values.items()
    }
