"""Eight threads on one model.

Each draws calls at random (forward, generate, identify, predict, recover, save, copy, calls that fail) and now and then
a change (pin a task, add or delete one, sign anew, change routing or execution). Every result must equal, bit by bit,
that of the same call alone on the model in some state between the call's begin and end.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexModel, TaskError

from . import subjects
from .subjects import TASKS, WORDS
from .tally import Tally

THREADS = 8
SECONDS = 60.0  # duration of the long form, per model
TURNS = 4  # calls of the short form, per thread and model
CHANGES = {"short": 0.12, "long": 0.02}  # share of draws that change the model
HEAVY = {"save": 0.1, "copy": 0.2}  # calls that are drawn more rarely
PATIENCE = 120.0  # seconds that a thread may take to end
EXTRA = "extra"
# Makes some of the rows that threads share out-of-distribution, and others not.
SOME_FAR = {"method": "hard", "far": "merged", "quantile": 0.5, "slack": 1.19}
SAY = {"max_new_tokens": 4, "suppress_tokens": [0, 2], "pad_token_id": 0}

Call = Callable[[RetexModel], Any]


@dataclass
class Case:
    """A model to share, the calls that threads draw from, and how it is signed."""

    model: RetexModel
    calls: dict[str, Call]
    references: Callable[[list[str], int], Any]
    extra: nn.Module
    expected_errors: frozenset[str] = frozenset()


# ---- models ----------------------------------------------------------------------------------------------------------


def _gpt2(tokenizer: tf.PreTrainedTokenizerFast) -> nn.Module:
    config = tf.GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2,
        bos_token_id=2, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    base = tf.GPT2LMHeadModel(config).eval()
    subjects.separate(base, tokenizer)
    return base


def _resnet() -> nn.Module:
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=3, layer_type="basic")
    return tf.ResNetForImageClassification(config).eval()


def _experts(base: nn.Module) -> dict[str, nn.Module]:
    return {task: subjects.moved(base, seed) for seed, task in enumerate((*TASKS, EXTRA), start=1)}


def _make(family: str, expert_cache: str | int, options: Mapping[str, Any]) -> tuple[RetexModel, nn.Module]:
    """Make a model of three tasks, not signed yet, and an expert of a fourth."""
    tokenizer = subjects.make_tokenizer()
    if family in subjects.FAMILIES:
        base, experts = subjects.FAMILIES[family](tokenizer)
        experts = {**experts, EXTRA: subjects.moved(experts[TASKS[0]], 9)}
    else:
        base = _gpt2(tokenizer) if family == "gpt2" else _resnet()
        experts = _experts(base)
    model = RetexModel.from_experts(
        base,
        {task: experts[task] for task in TASKS},
        RetexConfig(**{"rank": 4, "feature_layer": 0, **options}),
        expert_cache=expert_cache,
        check_base=False,
        progress=False,
    )
    return model, experts[EXTRA]


def _images(task: str, rows: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    colour = (*TASKS, EXTRA).index(task)
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=draw) + 3 * torch.eye(4, 3)[colour].view(3, 1, 1)}


def _texts(task: str, rows: int, seed: int) -> dict[str, Tensor]:
    """Draw texts of a task; the fourth task uses words of all."""
    named = [task] * rows if task in WORDS else [TASKS[row % len(TASKS)] for row in range(rows)]
    lines = [subjects.texts(name, 1, seed + row)[0] for row, name in enumerate(named)]
    return subjects.batch(subjects.make_tokenizer(), lines)


def make_case(
    family: str, *, expert_cache: str | int = "2GB", work_dir: Path, options: Mapping[str, Any] | None = None
) -> Case:
    """Make a signed model of a family and its calls."""
    torch.manual_seed(0)
    options = dict(options or {})
    model, extra = _make(family, expert_cache, options)
    inputs_of = _images if family == "resnet" else _texts

    def references(tasks: list[str], seed: int) -> Any:
        batches = {task: [inputs_of(task, 24, seed)] for task in tasks}
        return [batch for own in batches.values() for batch in own] if options.get("signatures") else batches

    model.fit_signatures(references(list(TASKS), 0), progress=False)
    parts = [inputs_of(task, 2, 100) for task in TASKS]
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    calls = _calls(family, inputs, work_dir) | _failing_calls(family, inputs)
    return Case(model, calls, references, extra, frozenset(_failing_calls(family, inputs)))


# ---- calls -----------------------------------------------------------------------------------------------------------


def _calls(family: str, inputs: dict[str, Tensor], work_dir: Path) -> dict[str, Call]:
    """Return calls that succeed, by name."""
    whole = dict(inputs)
    if family == "t5":
        whole["decoder_input_ids"] = inputs["input_ids"][:, :3].flip(1)
    rows = len(next(iter(inputs.values())))
    mixed = [TASKS[row % len(TASKS)] for row in range(rows)]
    numbers = itertools.count()

    def weights(model: RetexModel) -> Tensor:
        return torch.softmax(torch.arange(rows * len(model.tasks)).view(rows, -1) / 7.0, dim=1)

    def mixture(model: RetexModel) -> Any:
        for _ in range(20):  # a task may be added or deleted between counting them and the call
            try:
                return model(**whole, task=weights(model))
            except TaskError as error:
                if "has weights for" not in str(error):
                    raise
        raise RuntimeError("the number of tasks changed again and again")

    def merged(model: RetexModel) -> Any:
        with model.disable_adapter():
            return model(**whole)

    def merged_under_a_head(model: RetexModel) -> Any:
        with model.disable_adapter():
            return model(**whole, task="green")

    def saved(model: RetexModel) -> dict[str, str]:
        folder = work_dir / f"saved-{next(numbers)}"
        model.save_pretrained(folder)
        digests = {file.name: _digest(file.read_bytes()) for file in sorted(folder.glob("*.safetensors"))}
        shutil.rmtree(folder)
        return digests

    calls: dict[str, Call] = {
        "routed": lambda model: _with_routing(model(**whole)),
        "named": lambda model: model(**whole, task="green"),
        "per row": lambda model: model(**whole, task=mixed),
        "per row, by number": lambda model: model(**whole, task=torch.arange(rows) % len(TASKS)),
        "hidden states": lambda model: model(**whole, task=mixed[::-1], output_hidden_states=True),
        "one row": lambda model: model(**{name: value[:1] for name, value in whole.items()}),
        "mixture": mixture,
        "merged": merged,
        "merged, with a head": merged_under_a_head,
        "identify": lambda model: vars(model.identify(**inputs)),
        "recover": lambda model: model.recover("blue"),
        "unload": lambda model: model.merge_and_unload("red")(**whole),
        "save": saved,
        "copy": lambda model: copy.deepcopy(model)(**whole, task=mixed),
    }
    if family in ("bert", "resnet"):
        calls["predict"] = lambda model: model.predict(**whole)
    if family == "resnet":
        broken = {"pixel_values": inputs["pixel_values"].index_fill(0, torch.tensor(1), float("nan"))}
        calls["not a number"] = lambda model: model(**broken, task=mixed)
    if family in ("t5", "gpt2"):
        calls |= {
            "generate": lambda model: model.generate(**inputs, **SAY),
            "generate, named": lambda model: model.generate(**inputs, task="red", **SAY),
            "generate, beams": lambda model: model.generate(**inputs, task=mixed, num_beams=2, **SAY),
        }
    return calls


def _failing_calls(family: str, inputs: dict[str, Tensor]) -> dict[str, Call]:
    """Return calls that raise at various points."""
    name, value = next(iter(inputs.items()))
    wrong = torch.zeros(len(value), 5, 16, 16) if family == "resnet" else torch.full_like(value, 1000)
    calls: dict[str, Call] = {
        "no such task": lambda model: model(**inputs, task="nobody"),
        "wrong number of rows": lambda model: model(**inputs, task=["red"]),
        "wrong values, routed": lambda model: model(**{**inputs, name: wrong}),
        "wrong values, per row": lambda model: model(**{**inputs, name: wrong}, task=[*TASKS, *TASKS]),
    }
    if family in ("t5", "gpt2"):
        calls["wrong option"] = lambda model: model.generate(**inputs, task=[*TASKS, *TASKS], no_such_option=1)
    return calls


def _with_routing(output: Any) -> list[Any]:
    return [output, None if output.routing is None else vars(output.routing)]


# ---- results ---------------------------------------------------------------------------------------------------------


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def fingerprint(value: Any) -> str:
    """Return a text that is equal for results that are equal bit by bit."""
    return _digest("|".join(_leaves(value)).encode())


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{_digest(value.detach().contiguous().cpu().numpy().tobytes())}"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, (str, int, float, bool, type(None))):
        yield repr(value)
    else:
        yield type(value).__name__  # a cache of keys and values, for example


@dataclass(frozen=True)
class Answer:
    """The result of a call, and the states that the model may have had meanwhile: from `first` to `last`."""

    name: str
    first: int
    last: int
    found: str


# ---- changes ---------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """The states that a model has had, each as a copy.

    Changes are made one at a time; during a change, the model has its old state or its new one.
    """

    case: Case
    states: list[RetexModel] = field(default_factory=list)
    settled: int = 0
    begun: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.states.append(copy.deepcopy(self.case.model))

    def change(self, draw: random.Random) -> str:
        """Change the model at random; return how."""
        model = self.case.model
        extra_there = EXTRA in model.tasks
        changes: dict[str, Callable[[], Any]] = {
            "set_adapter": partial(model.set_adapter, draw.choice([None, None, *TASKS])),
            "execution": partial(setattr, model, "execution", draw.choice(["auto", "grouped", "mixed"])),
            "routing": partial(setattr, model, "routing", draw.choice([self.states[0].routing, "soft"])),
            "fit_signatures": lambda: model.fit_signatures(
                self.case.references(model.tasks, draw.choice([0, 50])), progress=False
            ),
            "delete_task" if extra_there else "add_task": partial(
                model.delete_task if extra_there else self._add_task, EXTRA
            ),
        }
        name = draw.choice(sorted(changes))
        with self.turn:
            if extra_there != (EXTRA in model.tasks):
                return "overtaken"  # by another thread
            self.begun += 1
            try:
                changes[name]()
            finally:
                self.states.append(copy.deepcopy(model))
                self.settled += 1
        return name

    def _add_task(self, name: str) -> None:
        model = self.case.model
        pooled = model.retex_config.signatures == "weights"
        references = self.case.references([*TASKS, name] if pooled else [name], 7)
        model.add_task(
            name,
            self.case.extra,
            references=references if pooled else references[name],
            tolerance=0.5,
            check_base=False,
            progress=False,
        )

    def expected(self, answer: Answer, memory: dict[tuple[int, str], set[str]]) -> set[str]:
        """Return the results of the call alone, in each of the states.

        `execution="auto"` may choose either mode, which round differently.
        """
        found = set()
        for state in range(answer.first, answer.last + 1):
            if (state, answer.name) not in memory:
                model = self.states[state]
                ways = ["grouped", "mixed"] if model.execution == "auto" else [model.execution]
                memory[state, answer.name] = {self._alone(model, answer.name, way) for way in ways}
            found |= memory[state, answer.name]
        return found

    def _alone(self, model: RetexModel, name: str, execution: str) -> str:
        before, model.execution = model.execution, execution
        try:
            with torch.no_grad():
                return fingerprint(self.case.calls[name](model))
        except Exception as error:  # the model cannot do this in one pass: then no thread may have got a result
            return f"{type(error).__name__}: {error}"
        finally:
            model.execution = before


# ---- the trial -------------------------------------------------------------------------------------------------------


@contextmanager
def _restless() -> Iterator[None]:
    """Make threads switch more often than they would, and each compute on one core."""
    interval, cores = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(cores)


def _until(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield


def share(case: Case, tally: Tally, seconds: float | None, seed: int) -> None:
    """Let threads work on one model, then compare every answer with the one given alone.

    `seconds` limits the time; None runs a few calls per thread.
    """
    model, history = case.model, History(case)
    before = {name: tensor.clone() for name, tensor in model.get_base_model().state_dict().items()}
    answers: list[Answer] = []

    def work(thread: int) -> None:
        draw = random.Random(f"{tally.name}-{seed}-{thread}")
        names = sorted(case.calls)
        shares = [HEAVY.get(name, 1.0) for name in names]
        changes = CHANGES["short" if seconds is None else "long"]
        turns = range(TURNS) if seconds is None else _until(time.monotonic() + seconds)
        with torch.no_grad():  # the switch is per thread
            for _ in turns:
                if draw.random() < changes:
                    try:
                        tally.add(f"changes ({history.change(draw)})")
                    except Exception:
                        tally.add("error", f"a change in thread {thread} raised {traceback.format_exc()}")
                    continue
                name = draw.choices(names, shares)[0]
                first = history.settled
                try:
                    found = fingerprint(case.calls[name](model))
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                answers.append(Answer(name, first, history.begun, found))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    with _restless():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join((seconds or 0) + PATIENCE)
            if thread.is_alive():
                tally.add("hang", f"a thread did not end; it is at {traceback.format_stack(_frame_of(thread))[-1]}")
                return
        memory: dict[tuple[int, str], set[str]] = {}
        for answer in answers:
            _judge(answer, history, memory, tally)
    after = model.get_base_model().state_dict()
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    tally.add("the merged model is as before" if not moved else "changed", f"{moved[0]} has changed" if moved else None)


def _frame_of(thread: threading.Thread) -> Any:
    return sys._current_frames()[thread.ident]


def _judge(answer: Answer, history: History, memory: dict[tuple[int, str], set[str]], tally: Tally) -> None:
    if answer.name in history.case.expected_errors:
        raised = ": " in answer.found
        tally.add("raised, as it should" if raised else "wrong", None if raised else f"{answer.name!r} raised nothing")
    elif answer.found in history.expected(answer, memory):
        tally.add("same as alone")
    else:
        tally.add(
            "mismatch",
            f"{answer.name!r} gave {answer.found}, which it does not alone in any of the states {answer.first} to "
            f"{answer.last}",
        )


# Models that differ in what threads share: heads, generation, buffers, identification, cache size.
CASES: dict[str, dict[str, Any]] = {
    "heads of different widths": {"family": "bert"},
    "room for one expert": {"family": "bert", "expert_cache": "40KB"},
    "encoder-decoder": {"family": "t5"},
    "decoder, no cache": {"family": "gpt2", "expert_cache": 0},
    "batch normalisation": {"family": "resnet"},
    "shared trunk": {"family": "bert", "options": {"shared_trunk": True}},
    "far rows": {"family": "bert", "options": {"routing": SOME_FAR}},
    "signatures of weights": {"family": "bert", "options": {"signatures": "weights"}},
    "features of the base": {"family": "bert", "options": {"feature_source": "pretrained"}},
}


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Return one tally per kind of model."""
    tallies = []
    for name, options in tqdm(CASES.items(), desc="Sharing models", unit="model", disable=not progress):
        tally = Tally(f"{THREADS} threads, {name}")
        share(make_case(work_dir=work_dir, **options), tally, SECONDS if size == "long" else None, seed)
        tallies.append(tally)
    return tallies
