"""The time of a routed call over the static merged model's, with and without a shared trunk.

    python examples/benchmarks/routing_cost.py            # --repeats 9 --threads 2 --only MiniLM

Batches mix the rows of all tasks, which are identified from the inputs; experts are cached. Weights are random, in real
shapes: time does not depend on them. All variants alternate in one process; the table has the median of the ratios to
the static pass of the same round, and their quartiles. Run it on an idle machine. Writes `--out`, and beside it
`.md`; shapes that are in this file already, measured with the same settings, stay in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import quiet
from experiment import markdown_table
from synthetic import clip_model, images, retex_model, sentences, t5_model, task_names

from retex_hf import RetexModel

RANK, REFERENCES = 32, 16
CACHE = "8GB"


@dataclass(frozen=True)
class Shape:
    """A model, the tasks and rows of a batch, how many of its blocks are shared, and the inputs of a task."""

    make: Callable[[], nn.Module]
    tasks: int
    rows: int
    layer: int
    inputs: Callable[[int, int], dict[str, Tensor]]
    call: str = "forward"
    options: Mapping[str, Any] | None = None
    recovered: Callable[[str], bool] = bool

    def batch(self) -> dict[str, Any]:
        """Return the arguments of a call whose rows are of all tasks in turn."""
        one = [self.inputs(row % self.tasks, 1) for row in range(self.rows)]
        return {name: torch.cat([row[name] for row in one]) for name in one[0]} | dict(self.options or {})


def tokens(length: int, vocabulary: int) -> Callable[[int, int], dict[str, Tensor]]:
    def draw(task: int, rows: int) -> dict[str, Tensor]:
        ids = sentences(task, rows, length, vocabulary)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return draw


def minilm() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return transformers.BertModel(config)


def tiny_vit() -> nn.Module:
    return timm.create_model("tiny_vit_5m_224", pretrained=False, num_classes=0)


def smollm() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def generating(new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}


SHAPES = {
    "MiniLM-L6, 8 tasks, 64 rows of 32 tokens": Shape(minilm, 8, 64, 3, tokens(32, 30_000)),
    "TinyViT-5M, 8 tasks, 64 images": Shape(tiny_vit, 8, 64, 0, lambda task, rows: {"x": images(task, rows)}),
    "CLIP ViT-B/32, 8 tasks, 64 images": Shape(
        clip_model, 8, 64, 3, lambda task, rows: {"image": images(task, rows)}, "encode_image",
        recovered=lambda name: name.startswith("visual."),
    ),
    "T5-small, generate, 7 tasks, 28 rows, 32 new tokens": Shape(
        t5_model, 7, 28, 3, tokens(32, 32_000), "generate", generating(32), lambda name: name != "shared.weight"
    ),
    "Llama of 135M, generate, 5 tasks, 16 rows, 16 new tokens": Shape(
        smollm, 5, 16, 14, tokens(48, 40_000), "generate", generating(16), lambda name: "embed_tokens" not in name
    ),
}  # fmt: skip


def timing_parser(description: str | None, out: Path) -> argparse.ArgumentParser:
    """Return the command line of a benchmark that measures times of shapes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def main() -> None:
    arguments = timing_parser(__doc__, Path("routing_cost.json")).parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    chosen = {name: shape for name, shape in SHAPES.items() if arguments.only in name}
    settings = {"threads": arguments.threads, "repeats": arguments.repeats, "rank": RANK}
    command = {"command": f"python examples/benchmarks/routing_cost.py --repeats {arguments.repeats}"}
    found: dict[str, Any] = finished(arguments.out, settings)
    for name, shape in tqdm(chosen.items(), desc="shapes"):
        found[name] = measure(shape, arguments.repeats)
        found = {one: found[one] for one in SHAPES if one in found}
        arguments.out.write_text(
            json.dumps({**command, **settings, "shapes": found}, indent=1) + "\n", encoding="utf-8"
        )
        arguments.out.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    print("\n" + markdown(found))


def finished(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes that an earlier run with these settings has measured."""
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if {key: before.get(key) for key in settings} != settings:
        return {}
    found = before["shapes"].items()
    return {name: one for name, one in found if name in SHAPES and one["layer"] == SHAPES[name].layer}


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """Return the ratios of every variant to the static merged model, round by round."""
    torch.manual_seed(0)
    model = shape.make().eval().requires_grad_(False)
    tasks = task_names(shape.tasks)
    retex = retex_model(model, tasks, RANK, recovered=shape.recovered)
    references = {task: [shape.inputs(number, REFERENCES)] for number, task in enumerate(tasks)}
    batch = shape.batch()
    models = {"routed": fitted(retex, references, feature_layer=shape.layer)}
    models["routed, shared trunk"] = fitted(retex, references, feature_layer=shape.layer, shared_trunk=True)
    merged = models["routed"].get_base_model()
    calls: dict[str, Callable[[], Any]] = {"static": lambda: call(merged, shape.call, batch)}
    calls |= {name: lambda each=each: call(each, shape.call, batch) for name, each in models.items()}
    times = rounds(calls, repeats)
    right = models["routed"].identify(**{name: value for name, value in batch.items() if isinstance(value, Tensor)})
    identified = sum(task == tasks[row % shape.tasks] for row, task in enumerate(right.tasks)) / shape.rows
    ratios = {name: [own / static for own, static in zip(times[name], times["static"], strict=True)] for name in models}
    return {"layer": shape.layer, "static": times["static"], "ratios": ratios, "identified": identified}


def fitted(retex: RetexModel, references: Mapping[str, Any], **options: Any) -> RetexModel:
    """Return a model of the same parts with other signatures."""
    parts = retex.parts()
    found = RetexModel(replace(parts, config=replace(parts.config, **options)))
    found.fit_signatures(references, progress=False)
    found.expert_cache = CACHE
    return found


def call(model: nn.Module, method: str, inputs: Mapping[str, Any]) -> Any:
    return model(**inputs) if method == "forward" else getattr(model, method)(**inputs)


@torch.inference_mode()
def rounds(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the times of calls that alternate, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, run in calls.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(values: list[float]) -> str:
    """Format the median of ratios, with their quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def markdown(found: Mapping[str, Any]) -> str:
    """Format the medians of the ratios, with their quartiles."""
    columns = ["model and batch", "routed over static", "with a shared trunk", "tasks identified"]
    rows = [[name, *map(ratio, one["ratios"].values()), one["identified"]] for name, one in found.items()]
    return markdown_table(columns, rows)


if __name__ == "__main__":
    main()
