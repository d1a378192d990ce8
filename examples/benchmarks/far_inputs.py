"""Share of rows that `RetexConfig(routing={"method": "hard", "far": ...})` finds out-of-distribution.

    python examples/quickstart.py                 # trains the experts of the text tasks, once
    python examples/quickstart_images.py          # and those of the image tasks
    python examples/benchmarks/far_inputs.py      # --more-text FOLDER --more-images FOLDER: further unknown tasks
    python examples/benchmarks/far_inputs.py --only images --out examples/benchmarks/results

Rows are test rows of the model's tasks and of others. Signatures are fitted on 64 reference inputs of each task. A task
that is left out is left out of the build: the model has never seen it. For every `quantile` the table has the shares of
out-of-distribution rows; its first row holds false alarms (at most `1 - quantile` on inputs like the references), whose
cost follows. `--out` writes `far_inputs_<suite>.{json,md}`.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import quiet, write_json
from experiment import command, markdown_table
from quickstart import load_task
from suites import Suite, image_suite, text_suite

from retex_hf import RetexModel

ROWS, BATCH = 200, 50
QUANTILES = (0.9, 0.95, 0.97, 0.98)
OWN = "the tasks themselves"
ABROAD = (
    "Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung.",
    "Können Sie mir bitte sagen, wo der Bahnhof ist?",
    "Le chat dort sur le toit de la maison rouge.",
    "Nous cherchons un appartement avec deux chambres et un balcon.",
    "El precio de los tomates ha subido mucho esta semana.",
    "¿A qué hora abre la biblioteca los sábados?",
    "Domani andremo al mare con gli amici di mia sorella.",
    "O jogo de ontem terminou empatado no último minuto.",
    "De fietsen staan achter het huis, naast de schuur.",
    "Jutro rano pojedziemy pociągiem do Krakowa.",
    "Hava bugün çok güzel, parkta yürüyelim mi?",
    "Завтра утром мы поедем на дачу за грибами.",
    "今日は天気がいいので、公園で本を読みます。",
    "我们明天早上坐火车去北京看朋友。",
    "الطقس جميل اليوم وسنذهب إلى الحديقة.",
    "오늘 저녁에 친구들과 함께 영화를 볼 거예요.",
)


@torch.no_grad()
def far_share(model: RetexModel, suite: Suite, inputs: Sequence[Any]) -> list[float]:
    """Return the share of rows that are out-of-distribution, at each quantile."""
    batches = [suite.collate(list(inputs[start : start + BATCH])) for start in range(0, len(inputs), BATCH)]
    shares = []
    for quantile in QUANTILES:
        model.routing = {"method": "hard", "far": "merged", "quantile": quantile}
        shares.append(torch.cat([model.identify(**batch).abstained for batch in batches]).float().mean().item())
    return shares


def fitted(suite: Suite) -> RetexModel:
    model = suite.build()
    model.fit_signatures(suite.references(), progress=False)
    return model


@torch.no_grad()
def accuracy(model: RetexModel, suite: Suite) -> float:
    """Return the share of test rows whose task and class are right, in batches of all tasks."""
    right = []
    for row in range(0, ROWS, BATCH // len(suite.tasks)):
        rows = [
            (task, place) for task in suite.tasks for place in range(row, min(row + BATCH // len(suite.tasks), ROWS))
        ]
        answers = model.predict(**suite.collate([task.test_inputs[place] for task, place in rows]))
        for (task, place), answer in zip(rows, answers, strict=True):
            label = task.label_names[task.test_labels[place]]
            right.append(answer["task"] == task.name and answer["label"] == label)
    return float(np.mean(right))


def strange_texts(more: Path | None) -> dict[str, list[str]]:
    draw = random.Random(0)
    words = (Path(__file__).read_text(encoding="utf-8") + Path(json.__file__).read_text(encoding="utf-8")).split()
    kinds = {
        "words of program text": [" ".join(draw.choices(words, k=draw.randint(5, 25))) for _ in range(ROWS)],
        "random characters": [
            "".join(draw.choices(string.printable[:94] + 5 * " ", k=draw.randint(20, 120))) for _ in range(ROWS)
        ],
        "other languages": list(ABROAD),
    }
    for folder in sorted(more.iterdir()) if more is not None else ():
        texts = load_task(folder.name, more).test_inputs[:ROWS]
        kinds[folder.name] = [text if isinstance(text, str) else " ".join(text) for text in texts]
    return kinds


def strange_images(suite: Suite, more: Path | None) -> dict[str, list[np.ndarray]]:
    draw = np.random.default_rng(0)
    own = [task.test_inputs[row] for row in range(ROWS // len(suite.tasks)) for task in suite.tasks]
    kinds = {
        "noise": list(draw.integers(0, 256, (ROWS, 28, 28)).astype(np.uint8)),
        "one shade of grey": [np.full((28, 28), shade, np.uint8) for shade in draw.integers(0, 256, ROWS)],
        "own images, inverted": [255 - image for image in own],
        "own images, upside down": [image[::-1].copy() for image in own],
    }
    for file in sorted(more.glob("*.npz")) if more is not None else ():
        images = np.load(file)["test_x"][:ROWS]
        grey = images if images.ndim == 3 else images.mean(-1).astype(np.uint8)
        kinds[file.stem] = list(grey)
    return kinds


def table(suite: Suite, kinds: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the shares of rows that are out-of-distribution by kind and quantile, and the accuracies of routings."""
    model = fitted(suite)
    known = {task.name for task in suite.tasks}
    alarms = [far_share(model, suite, task.test_inputs[:ROWS]) for task in suite.tasks]
    rows = {OWN: np.mean(alarms, axis=0).tolist()}
    for task in suite.tasks:
        others = replace(suite, tasks=[other for other in suite.tasks if other.name != task.name])
        rows[f"{task.name}, left out"] = far_share(fitted(others), suite, task.test_inputs[:ROWS])
    rows |= {name: far_share(model, suite, inputs) for name, inputs in kinds.items() if name not in known}
    accuracies = {}
    for routing in ("hard", {"method": "hard", "far": "merged"}, {"method": "hard", "far": "soft"}):
        model.routing = routing
        accuracies[json.dumps(routing)] = accuracy(model, suite)
    layers = list(model.signatures.space.layers)
    return {"suite": suite.name, "layers": layers, "rows": rows, "accuracy": accuracies}


def markdown(found: dict[str, Any]) -> str:
    """Format the two tables."""
    shares = markdown_table(["rows", *map(str, QUANTILES)], [[name, *row] for name, row in found["rows"].items()])
    routings = [[f"`{routing}`", share] for routing, share in found["accuracy"].items()]
    right = markdown_table(["routing", "accuracy on the tasks themselves, task unknown"], routings)
    return f"# Out-of-distribution rows: {found['suite']}\n\n{shares}\n{right}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-dir", type=Path, default=Path("retex-quickstart"))
    parser.add_argument("--image-dir", type=Path, default=Path("retex-quickstart-images"))
    parser.add_argument("--more-text", type=Path, help="a folder of text tasks in the form of examples/data/text")
    parser.add_argument("--more-images", type=Path, help="a folder of image tasks in the form of examples/data/image")
    parser.add_argument("--only", choices=("text", "images"), help="default: both")
    parser.add_argument("--out", type=Path, help="folder of result files; default: print only")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    found = {}
    if arguments.only != "images":
        found["text"] = table(text_suite(arguments.text_dir), strange_texts(arguments.more_text))
    if arguments.only != "text":
        images = image_suite(arguments.image_dir)
        found["images"] = table(images, strange_images(images, arguments.more_images))
    for name, results in found.items():
        print(markdown(results))
        if arguments.out is not None:
            write_json(arguments.out / f"far_inputs_{name}.json", {"command": command(), **results})
            (arguments.out / f"far_inputs_{name}.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
