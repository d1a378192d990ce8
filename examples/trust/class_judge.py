"""Test of one model class of transformers with three experts in one model: each row must match its expert alone."""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retex_hf import RetexConfig, RetexError, RetexModel
from trust.row_fields import TOLERANCE, Place, deviations, error, fields, find_places
from trust.small_inputs import find_recipe
from trust.small_models import randomise, small_models
from trust.small_rows import LENGTH, Recipe, collate

TASKS = ("red", "green", "blue")
NOT_MADE, RANDOM, DEPENDENT = "not made", "random by itself", "rows depend on each other"
RIGHT, REFUSED, WRONG, TRACEBACK = "right", "refused", "wrong", "traceback"
# Numbers of rows that equal the number of tokens of a text, of layers, and of channels.
ROWS = (LENGTH, 2, 3)
ORDER = [3, 0, 5, 1, 4, 2]
# Images per row of a batch: as many images as rows, but not one each.
UNEVEN = [1, 2, 0, 1]
MORE_THAN_TEXT = frozenset({"pixel_values", "input_features", "input_values", "pixel_values_videos"})
RESIDUALS = 1e-2
STEPS, SECONDS = 6, 20
GENERATION = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1}

Found = dict[str, Any]


class NotMade(Exception):
    """A small model, inputs for it, or a reference to compare with could not be made."""


class Deviation(Exception):
    """An answer is wrong."""


def judge(cls: type[PreTrainedModel], folder: Path) -> Found:
    """Return the result for a class: an `outcome`, and lists of `problems`, refusals and remarks."""
    found: Found = {"class": cls.__name__, "problems": [], "refusals": [], "notes": [], "done": []}
    try:
        base, recipe = make_base(cls)
    except NotMade as reason:
        return found | {"outcome": NOT_MADE, "notes": [str(reason)]}
    found["inputs"] = {name: list(value.shape) for name, value in {**recipe.row(0, 0), **recipe.shared}.items()}
    if takes_more(base) and not recipe.is_rich:
        found["notes"].append("texts only")
    if not is_deterministic(base, recipe):
        return found | {"outcome": RANDOM}
    Judge(base, recipe, folder, found).run()
    kinds = {problem["kind"] for problem in found["problems"]}
    if kinds:
        outcome = WRONG if WRONG in kinds else TRACEBACK
    elif found.get("no_rows"):
        outcome = DEPENDENT
    else:
        outcome = REFUSED if found["refusals"] else RIGHT
    return found | {"outcome": outcome}


def make_base(cls: type[PreTrainedModel]) -> tuple[PreTrainedModel, Recipe]:
    """Make a small model that runs, and inputs for it: with images or sounds, if any step of the ladder takes them."""
    torch.manual_seed(0)
    problems: list[str] = []
    begun, of_texts = time.monotonic(), None
    try:
        for model in small_models(cls):
            randomise(model, seed=0, scale=1.2)
            start_decoding(model)
            try:
                recipe = find_recipe(model, call)
                if recipe.is_rich or not takes_more(model):
                    return model, recipe
                of_texts = of_texts or (model, recipe)
                problems.append("texts only")
            except ValueError as problem:
                problems.append(str(problem))
            if len(problems) == STEPS or time.monotonic() - begun > SECONDS:
                break
    except Exception as problem:  # any error that a class raises for a configuration
        problems.append(f"no small model: {type(problem).__name__}: {first_line(problem)}")
    if of_texts is None:
        raise NotMade(problems[0] if problems else "no small model")
    return of_texts


def start_decoding(model: PreTrainedModel) -> None:
    """Set the token that a decoder begins with, where the class leaves that to its checkpoints."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.config.is_encoder_decoder:
        generation.pad_token_id = generation.pad_token_id or 0
        if generation.decoder_start_token_id is None:
            generation.decoder_start_token_id = 1


def takes_more(model: nn.Module) -> bool:
    """Return whether a model takes images or sounds."""
    return bool(MORE_THAN_TEXT & set(inspect.signature(model.forward).parameters))


def call(model: nn.Module, inputs: Mapping[str, Any], **options: Any) -> Any:
    """Return the output for copies of the inputs: some models write into them."""
    with torch.no_grad():
        return model(**{name: value.clone() for name, value in inputs.items()}, **options)


def is_deterministic(model: nn.Module, recipe: Recipe) -> bool:
    inputs = collate([recipe.row(row, row) for row in range(3)], recipe.shared)
    first, second = (fields(call(model, inputs)) for _ in range(2))
    return first.keys() == second.keys() and all(error(second[path], first[path]) < TOLERANCE for path in first)


def first_line(problem: BaseException) -> str:
    return next(iter(str(problem).strip().splitlines()), "")[:300]


def place_of(problem: BaseException) -> str:
    """Return our last frame, and the last of all."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = next((frame for frame in reversed(frames) if "retex_hf" in frame.filename), frames[-1])
    short = [re.sub(r".*/(retex_hf|transformers|torch|trust)/", r"\1/", frame.filename) for frame in (ours, frames[-1])]
    return f"{short[0]}:{ours.lineno} > {short[1]}:{frames[-1].lineno}"


class Judge:
    """Runs all tests on one class, and collects the results in `found`."""

    def __init__(self, base: PreTrainedModel, recipe: Recipe, folder: Path, found: Found) -> None:
        self.base, self.recipe, self.folder, self.found = base, recipe, folder, found
        self.rows = [recipe.row(row % 3, 10 + row) for row in range(LENGTH)]
        self.tasks = [(row * row + row // 2) % 3 for row in range(LENGTH)]

    def run(self) -> None:
        experts = {
            task: randomise(deepcopy(self.base), seed=seed, scale=0.6).eval()
            for seed, task in enumerate(TASKS, start=1)
        }
        self.model = self.attempt("build", lambda: self._build(experts))
        if self.model is None:
            return
        self.experts = [self.model.merge_and_unload(task).eval() for task in TASKS]
        self.attempt("recover", lambda: self._recover(list(experts.values())))
        self._learn_places()
        for rows in ROWS:
            self.attempt(f"forward {rows}", lambda rows=rows: self._forward(list(range(rows))))
        self.attempt("permuted", lambda: self._forward(ORDER))
        if self.attempt("fit", self._fit):
            self.attempt("identify", self._identify)
            self.attempt("routed", self._routed)
        self._one_pass()
        if self.base.can_generate():
            self.attempt("generate", self._generate)
        if self.recipe.places:
            self.attempt("uneven", self._uneven)
        self.attempt("save", self._save)

    def attempt(self, name: str, do: Callable[[], Any]) -> Any:
        """Run a function, and record its outcome."""
        try:
            answer = do()
            self.found["done"].append(name)
            return answer
        except RetexError as refusal:
            text = str(refusal).strip()
            if "\n" in text:
                self._problem(name, WRONG, f"is refused in several lines: {text[:200]!r}")
            else:
                self.found["refusals"].append({"at": name, "says": text[:400], "type": type(refusal).__name__})
        except Deviation as deviation:
            self._problem(name, WRONG, str(deviation))
        except NotMade as reason:
            self.found["notes"].append(f"{name}: {reason}")
        except Exception as problem:
            says = f"{type(problem).__name__}: {first_line(problem)} [{place_of(problem)}]"
            self._problem(name, TRACEBACK, says)
        return None

    def _problem(self, name: str, kind: str, text: str) -> None:
        self.found["problems"].append({"at": name, "kind": kind, "says": text})

    # ---- tests -------------------------------------------------------------------------------------------------------

    def batch(self, rows: Iterable[int]) -> dict[str, Any]:
        return collate([self.rows[row] for row in rows], self.recipe.shared)

    def alone(self, row: int, task: int) -> dict[str, Tensor]:
        """Return the output of an expert for one row."""
        return fields(call(self.experts[task], self.batch([row])))

    def _build(self, experts: dict[str, PreTrainedModel]) -> RetexModel:
        config = RetexConfig(rank="full")
        return RetexModel.from_experts(
            self.base, experts, config, progress=False, check_base=False, execution="grouped"
        )

    def _recover(self, experts: list[PreTrainedModel]) -> None:
        for expert, recovered in zip(experts, self.experts, strict=True):
            known = recovered.state_dict()
            for name, tensor in expert.state_dict().items():
                if tensor.is_floating_point() and (off := error(known[name], tensor)) > TOLERANCE:
                    raise Deviation(f"{name} is not recovered: off by {off:.1e}")

    def _learn_places(self) -> None:
        """Find out on the plain model where rows are in the output, and each expert's output for each row alone."""
        batch = fields(call(self.base, self.batch(range(LENGTH))))
        alone = [fields(call(self.base, self.batch([row]))) for row in range(LENGTH)]
        self.places, self.found["dependent"] = find_places(batch, alone)
        own = [path for path, place in self.places.items() if place.axis is not None]
        self.found["no_rows"] = not own
        if own and all(error(alone[0][path], alone[1][path]) < TOLERANCE for path in own if path in alone[0]):
            self.found["notes"].append("all rows give the same")
        self.expected = [self.alone(row, task) for row, task in enumerate(self.tasks)]

    def _forward(self, rows: list[int], model: RetexModel | None = None) -> None:
        names = [TASKS[self.tasks[row]] for row in rows]
        output = call(model or self.model, self.batch(rows), task=names)
        self.compare(output, [self.expected[row] for row in rows], self.places)

    def compare(self, output: Any, alone: list[dict[str, Tensor]], places: Mapping[str, Place]) -> None:
        wrong = deviations(fields(output), alone, places)
        if wrong:
            raise Deviation(f"{len(wrong)} of {len(places)} fields: {'; '.join(wrong[:3])}")
        if not any(place.axis is not None for place in places.values()):
            raise Deviation("rows depend on each other, and it is answered")

    def _fit(self) -> bool:
        references = {
            name: [collate([self.recipe.row(task, 100 * task + 50 + row) for row in range(6)], self.recipe.shared)]
            for task, name in enumerate(TASKS)
        }
        self.model.fit_signatures(references, progress=False)
        return True

    def _identify(self) -> None:
        if self.found["no_rows"]:
            raise NotMade("rows depend on each other")
        together = self.model.identify(**self.batch(range(LENGTH))).residuals
        if len(together) != LENGTH:
            raise Deviation(f"{len(together)} identifications for {LENGTH} rows")
        for rows in (ORDER, [0], [4], [0, 1], [0, 1, 2]):
            off = error(self.model.identify(**self.batch(rows)).residuals, together[rows])
            if off > RESIDUALS:
                raise Deviation(f"rows {rows} are identified otherwise than in their order among all: off by {off:.1e}")

    def _routed(self) -> None:
        tasks = self.model.identify(**self.batch(range(LENGTH))).task_ids.tolist()
        output = call(self.model, self.batch(range(LENGTH)))
        if len(tasks) == LENGTH and len(set(tasks)) > 1:
            self.compare(output, [self.alone(row, task) for row, task in enumerate(tasks)], self.places)

    def _one_pass(self) -> None:
        """Run all rows in one pass, which may be refused, unlike group by group."""
        refusals = self.found["refusals"]
        self.found["refusals"] = []
        self.model.execution = "mixed"
        self.attempt("one pass", lambda: self._forward(list(range(LENGTH))))
        self.model.execution = "grouped"
        self.found["one_pass"] = [refusal["says"] for refusal in self.found["refusals"]]
        self.found["refusals"] = refusals

    def _generate(self) -> None:
        rows = [0, 1, 2, 3]

        def generate(model: Any, rows: list[int], **options: Any) -> Any:
            inputs = {name: value for name, value in self.batch(rows).items() if not name.startswith("decoder_")}
            with torch.no_grad():
                return model.generate(**inputs, **GENERATION, **options)

        try:
            batch, parts = generate(self.experts[0], rows), [generate(self.experts[0], [row]) for row in rows]
            alone = [generate(self.experts[self.tasks[row]], [row]) for row in rows]
        except Exception as problem:  # raised by the plain model: many generate in a way of their own
            says = f"{type(problem).__name__}: {first_line(problem)}"
            raise NotMade(f"the plain model does not generate: {says}") from problem
        if not isinstance(batch, Tensor) or len({part.shape for part in alone}) > 1:
            raise NotMade("the plain model generates in another form")
        places, _ = find_places({"": batch}, [{"": part} for part in parts])
        if not places or places[""].axis is None:
            raise NotMade("rows depend on each other when the plain model generates")
        found = generate(self.model, rows, task=[TASKS[self.tasks[row]] for row in rows])
        self.compare({"": found}, [{"": part} for part in alone], places)

    def _uneven(self) -> None:
        """Test rows with one, two and no images."""
        recipe = replace(self.recipe, items=max(UNEVEN))
        rows = [recipe.row(row % 3, 30 + row, items=count) for row, count in enumerate(UNEVEN)]
        tasks = [0, 1, 2, 1]

        def plain(model: nn.Module, taken: list[int]) -> dict[str, Tensor]:
            return fields(call(model, collate([rows[row] for row in taken], recipe.shared)))

        try:
            batch, alone = plain(self.base, [0, 1, 2, 3]), [plain(self.base, [row]) for row in range(4)]
            expected = [plain(self.experts[task], [row]) for row, task in enumerate(tasks)]
        except Exception as problem:  # many take the same number of images in every row
            says = f"{type(problem).__name__}: {first_line(problem)}"
            raise NotMade(f"the plain model does not take them: {says}") from problem
        places, _ = find_places(batch, alone)
        if not any(place.axis is not None for place in places.values()):
            raise NotMade("rows depend on each other")
        for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
            inputs = collate([rows[row] for row in order], recipe.shared)
            output = call(self.model, inputs, task=[TASKS[tasks[row]] for row in order])
            self.compare(output, [expected[row] for row in order], places)

    def _save(self) -> None:
        self.model.save_pretrained(self.folder)
        loaded = RetexModel.from_pretrained(self.folder, execution="grouped")
        for task in TASKS:
            expected = fields(call(self.model, self.batch([0, 1, 2]), task=task))
            found = fields(call(loaded, self.batch([0, 1, 2]), task=task))
            # Some models keep a field of an earlier call, which a model that was just loaded lacks.
            wrong = [path for path in expected if path in found and error(found[path], expected[path]) > TOLERANCE]
            if wrong and not self._is_kept_by_transformers():
                raise NotMade(f"{wrong[0]} is another when transformers loads the plain model again")
            if wrong:
                raise Deviation(f"{wrong[0]} of {task} is another when the model is loaded again")

    def _is_kept_by_transformers(self) -> bool:
        """Return whether transformers reloads the plain model unchanged: loading resets some weights."""
        folder = self.folder.with_name("plain")
        self.base.save_pretrained(folder)
        loaded = type(self.base).from_pretrained(folder).eval()
        outputs = [fields(call(model, self.batch([0, 1, 2]))) for model in (self.base, loaded)]
        return all(error(outputs[1][path], tensor) < TOLERANCE for path, tensor in outputs[0].items())
