"""Damaged and forged artifacts: each is refused with a sentence that names the file, or loads with the same outputs.

Every mutant (`mutations.py`) is loaded in a process of its own, so that a crash or a hang is noticed, under a limit of
memory. Allowed outcomes:

- refused: a `RetexError` that names the file (for forged ones: the file, or the key of the configuration);
- harmless: it loads, and all outputs are the same, bit for bit;
- another model (forged ones only): it loads, runs, and its outputs are finite numbers. Its author could have saved it.

Everything else is a problem: other outputs, another exception, a crash, a hang, memory that nothing in the files needs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from open_clip.model import CLIP
from torch import Tensor
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexModel
from retex_hf.artifact.preprocess import load_preprocessor
from trust.bounded import Answer, Bounded
from trust.mutations import Mutant, copy_artifact, mutants
from trust.subjects import TASKS, make_model, make_tokenizer, moved, texts
from trust.tally import Tally

REFUSED, HARMLESS, ANOTHER = "refused", "harmless", "another model"
# Limit of the time to load a mutant, and of memory beyond that of the warm worker.
SECONDS, MEGABYTES = 60.0, 500
ROOM = 8 << 30
IMAGE = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8}
TEXT = {"context_length": 8, "vocab_size": 21, "width": 16, "heads": 2, "layers": 2}
OPEN_CLIP = {"embed_dim": 8, "vision_cfg": IMAGE, "text_cfg": TEXT}


@dataclass(frozen=True)
class Subject:
    """An artifact to make mutants of: how to make it with other numbers (by seed), and the number of mutants."""

    name: str
    make: Callable[[Path, int], None]
    short: int
    long: int


def _saved(family: str, shard_size: str = "5GB", **config: Any) -> Callable[[Path, int], None]:
    def make(folder: Path, seed: int) -> None:
        model = make_model(family, **config)
        with torch.no_grad():
            for parameter in (*model.model.parameters(), *model.recovery.parameters()):
                if seed and parameter.is_floating_point():
                    parameter.mul_(1 + 0.01 * seed)
        make_tokenizer().save_pretrained(folder)  # before saving, which records all files in the folder
        model.save_pretrained(folder, max_shard_size=shard_size)

    return make


def _open_clip(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    base = CLIP(**OPEN_CLIP).eval()
    experts = {task: moved(base, index) for index, task in enumerate(TASKS, start=1)}
    config = RetexConfig(rank=4, feature_layer=0)
    model = RetexModel.from_experts(base, experts, config, model_config=OPEN_CLIP, check_base=False, progress=False)
    model.fit_signatures(
        {task: [torch.randn(8, 3, 8, 8) + 3 * index] for index, task in enumerate(TASKS)}, progress=False
    )
    model.save_pretrained(folder)


SUBJECTS = (
    Subject("BERT", _saved("bert"), 144, 600),
    Subject("T5 in shards, int8", _saved("t5", "20KB", recovery_dtype="int8"), 64, 500),
    Subject("BERT, a budget of bytes", _saved("bert", rank=None, storage=0.3), 64, 500),
    Subject("T5", _saved("t5"), 0, 400),
    Subject("BERT, ReTeX-E, features of the base", _saved("bert", inner_rank=2, feature_source="pretrained"), 0, 400),
    Subject("OpenCLIP", _open_clip, 0, 400),
)


def run(
    work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True, artifact: Path | None = None
) -> list[Tally]:
    """Try mutants of small artifacts of several kinds, and in the long form of `artifact` too, if given."""
    tallies = []
    subjects = [subject for subject in SUBJECTS if getattr(subject, size)]
    if artifact is not None:
        subjects.append(Subject(artifact.name, _copies_of(artifact), 40, 300))
    with Bounded(outputs, seconds=SECONDS, room=ROOM) as worker:
        for subject in subjects:
            folder, other = work_dir / "artifact", work_dir / "other"
            for place, number in ((folder, 0), (other, 1)):
                shutil.rmtree(place, ignore_errors=True)
                subject.make(place, number)
            tally = Tally(f"mutants of {subject.name}")
            _try_all(tally, worker, folder, other, getattr(subject, size), seed, progress)
            tallies.append(tally)
    return tallies


def _copies_of(artifact: Path) -> Callable[[Path, int], None]:
    def make(folder: Path, seed: int) -> None:
        if seed == 0:
            shutil.copytree(artifact, folder)
            return
        model = RetexModel.from_pretrained(artifact)
        with torch.no_grad():
            for parameter in (*model.model.parameters(), *model.recovery.parameters()):
                parameter.mul_(1.01)
        model.save_pretrained(folder)

    return make


def _try_all(tally: Tally, worker: Bounded, folder: Path, other: Path, count: int, seed: int, progress: bool) -> None:
    expected = worker.ask(folder)
    if expected.get("digest") is None:
        raise RuntimeError(f"The artifact itself does not load: {expected}")
    copy = folder.parent / "mutant"
    for mutant in tqdm(mutants(folder, other, count, seed), desc=tally.name, total=count, disable=not progress):
        copy_artifact(folder, copy)
        mutant.apply(copy)
        outcome, problem = judge(mutant, worker.ask(copy), expected["digest"])
        tally.add(outcome, problem)
    shutil.rmtree(copy, ignore_errors=True)


def judge(mutant: Mutant, answer: dict[str, Any], expected: str) -> tuple[str, str | None]:
    """Return the outcome of a mutant, and the problem, if any."""
    wrong = answer.get("wrong")
    if wrong is None and answer["megabytes"] > MEGABYTES:
        wrong = f"took {answer['megabytes']} MB"
    if wrong is not None:
        return "wrong", f"{mutant}: {wrong}"
    if "refusal" in answer:
        text = answer["refusal"]
        if "\n" in text or not any(mention in text for mention in mutant.mentions):
            return "wrong", f"{mutant}: the refusal names none of {mutant.mentions[:3]}: {text[:300]}"
        return REFUSED, None
    if answer["digest"] == expected:
        return HARMLESS, None
    if mutant.resealed and answer["finite"]:
        return ANOTHER, None
    return "wrong", f"{mutant}: loads with other outputs"


@torch.no_grad()
def outputs(folder: Path) -> Answer:
    """Return a `digest` of a model's answers to a few inputs, and whether all numbers are `finite`.

    Rows are identified, recovered with a given task, labelled, and generated; texts pass through the tokenizer in the
    folder.
    """
    model = RetexModel.from_pretrained(folder)
    seen: list[Any] = [model.tasks]
    tensors: list[Tensor] = []
    if hasattr(model.model, "encode_image"):
        inputs = {"image": torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8)}
        tensors += [model.encode_image(**inputs), *(model.encode_image(**inputs, task=task) for task in model.tasks)]
    else:
        rows = [text for task in TASKS for text in texts(task, 1, seed=3)]
        batch = load_preprocessor(folder, model.model)(rows)
        seen += [{name: value.tolist() for name, value in batch.items()}]
        if model.model.can_generate():
            seen += [model.generate(**batch, max_new_tokens=3, do_sample=False).tolist()]
            batch["decoder_input_ids"] = torch.zeros(len(rows), 1, dtype=torch.long)
        else:
            seen += [model.predict(**batch)]
        for task in (None, *model.tasks):
            answer = model(**batch, task=task)
            tensors += [torch.where(answer.logits == -torch.inf, 0, answer.logits)]
    tensors += [model.identify(**(inputs if hasattr(model.model, "encode_image") else batch)).residuals]
    digest = hashlib.sha256(json.dumps(seen).encode())
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    return {"digest": digest.hexdigest(), "finite": finite}
