"""Every model class that transformers' auto classes know, small and random, as three experts in one model.

    python examples/trust/classes.py --output classes.jsonl                      all of them, an hour or two on one core
    python examples/trust/classes.py --only LlavaModel "Qwen2.*" --verbose       those whose names match

Compares the model's output for every row of a mixed batch with the expert's output for that row alone, field by field.
Also tests identification, one pass, generation, rows with different numbers of images, and the reloaded model
(`class_judge.py`). Every class runs in a process of its own. Results are stored as they come, so that an interrupted
run resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find `trust` from any working folder

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from trust.class_judge import NOT_MADE, TRACEBACK, WRONG, Found, first_line, judge, place_of
from trust.small_models import class_mappings
from trust.tally import Tally

SECONDS = 60
MEMORY = 6 << 30
# The hardest ones: images and prompts, patches, packed images, positions that depend on the content, decoders with an
# interface of their own, weights that are in no file.
SHORT = (
    "AlignModel", "BlipForQuestionAnswering", "ColModernVBertForRetrieval", "DetrModel", "FlavaModel", "Florence2Model",
    "Glm4vVisionModel", "LightGlueForKeypointMatching", "MarianMTModel", "OneFormerModel", "Qwen3VLModel",
    "SmolVLMModel", "XCLIPModel",
)  # fmt: skip


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Judge the hardest classes, or the headless classes of all kinds of models."""
    work_dir.mkdir(parents=True, exist_ok=True)
    classes = prepare(SHORT if size == "short" else None)
    names = [name for name in classes if size == "short" or name.endswith("Model")]
    return [tally(in_child(classes[name], work_dir) for name in tqdm(names, disable=not progress))]


def tally(findings: Iterable[Found]) -> Tally:
    """Count the outcomes."""
    counted = Tally("classes of transformers")
    for found in findings:
        problems = [f"{found['class']} at {problem['at']}: {problem['says']}" for problem in found["problems"]]
        counted.add(found["outcome"], "; ".join(problems) or None)
    return counted


def kept(path: Path) -> list[Tally]:
    """Count the results of an earlier run, the last of each class."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [tally({found["class"]: found for found in lines}.values())]


def prepare(names: tuple[str, ...] | None = None) -> dict[str, type[PreTrainedModel]]:
    """Return the classes, and import everything that every child needs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if names is not None:
        return {name: getattr(transformers, name) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return class_mappings()


def in_child(cls: type[PreTrainedModel], work: Path) -> Found:
    """Judge a class in a process of its own, with limits of time and memory."""
    reader, writer = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(_limited(cls, work)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    found = json.loads(answer) if answer else _failed(cls, f"ended with {os.waitstatus_to_exitcode(status)}")
    return {**found, "took": round(time.monotonic() - begun, 1)}


def _limited(cls: type[PreTrainedModel], work: Path) -> Found:
    warnings.simplefilter("ignore")
    # Processor time, so that other work on the machine changes nothing.
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = MEMORY + pages * resource.getpagesize()  # beyond the memory that the parent has mapped
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            return judge(cls, Path(folder) / "saved")
    except BaseException as problem:  # a child must not continue as its parent
        return _failed(cls, f"the trial itself: {type(problem).__name__}: {first_line(problem)} [{place_of(problem)}]")


def _failed(cls: type[PreTrainedModel], note: str) -> Found:
    return {"class": cls.__name__, "outcome": NOT_MADE, "problems": [], "refusals": [], "notes": [note], "done": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file of lines, one per class; a run goes on where it ends")
    parser.add_argument("--only", nargs="+", help="names of classes, or patterns of them")
    parser.add_argument("--verbose", action="store_true", help="print everything that was found")
    arguments = parser.parse_args()
    classes = prepare()
    if arguments.only:
        wanted = [name for pattern in arguments.only for name in classes if re.fullmatch(pattern, name)]
        classes = {name: classes[name] for name in wanted}
    known = set()
    if arguments.output and arguments.output.is_file():
        known = {json.loads(line)["class"] for line in arguments.output.read_text(encoding="utf-8").splitlines()}
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as work:
        for name in (name for name in classes if name not in known):
            found = in_child(classes[name], Path(work))
            outcomes[found["outcome"]] += 1
            if arguments.output:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
            print(f"{name}: {found['outcome']} ({found['took']} s) {dict(outcomes)}", flush=True)
            if arguments.verbose:
                print(json.dumps(found, indent=1), flush=True)
    return 1 if outcomes[WRONG] + outcomes[TRACEBACK] else 0


if __name__ == "__main__":
    sys.exit(main())
