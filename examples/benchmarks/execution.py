"""Check of the cost model behind `execution="auto"`: predicted against measured times, by group and in one pass.

    python examples/benchmarks/execution.py               # --repeats 3 --threads 2

Ratios are one pass over group by group: below 1, one pass is faster. Weights are random: time does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from routed import is_visual
from synthetic import clip_model, images, retex_model, seconds, sentences, t5_model, task_names, timing_arguments

from retex_hf import RetexModel
from retex_hf.execution import parse_task


def bert_model() -> transformers.BertModel:
    """Make a model of MiniLM's shape."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval().requires_grad_(False)


def gpt2_model() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)).eval().requires_grad_(False)


def compare(name: str, retex: RetexModel, method: str, inputs: Mapping[str, Any], rows: int, repeats: int) -> str:
    """Return a line of the table."""
    tasks = [row % len(retex.tasks) for row in range(rows)]
    call = getattr(retex, method)

    def run(execution: str) -> object:
        retex.execution = execution
        return call(**inputs, task=tasks)

    times = seconds({"grouped": lambda: run("grouped"), "mixed": lambda: run("mixed")}, repeats)
    grouped, mixed = retex._state.runner().costs(method, inputs, parse_task(tasks, retex.tasks, rows))
    measured, predicted = times["mixed"] / times["grouped"], mixed / grouped
    # Where both take about as long, either choice is right.
    verdict = "yes" if (measured < 1) == (predicted < 1) else ("close" if 0.8 < measured < 1.25 else "NO")
    return f"| {name} | {predicted:.2f} | {measured:.2f} | {verdict} |"


@torch.inference_mode()
def main() -> None:
    arguments = timing_arguments(__doc__, repeats=3)
    print(f"{arguments.threads} threads, {arguments.repeats} repeats\n")
    print("| | predicted | measured | right choice |")
    print("|---|---:|---:|---|", flush=True)

    def show(name: str, retex: RetexModel, method: str, inputs: Mapping[str, Any], rows: int) -> None:
        print(compare(name, retex, method, inputs, rows, arguments.repeats), flush=True)

    bert = bert_model()
    for number, rank, rows, length in ((4, 64, 64, 32), (4, 16, 8, 16), (16, 16, 16, 16), (16, 64, 64, 64)):
        ids = sentences(0, rows, length, 30_000)
        retex = retex_model(bert, task_names(number), rank, recovered=lambda name: "embeddings" not in name)
        case = f"BERT 6x384, {number} tasks, r = {rank}, {rows} x {length} tokens"
        show(f"{case}, cached", retex, "forward", {"input_ids": ids}, rows)
    retex.expert_cache = 0
    show(f"{case}, cache off", retex, "forward", {"input_ids": ids}, rows)

    for model, name in ((t5_model(), "T5-small"), (gpt2_model(), "GPT-2, 6 layers")):
        for number, rank, rows in ((7, 64, 28), (2, 64, 32), (7, 16, 7)):
            retex = retex_model(model, task_names(number), rank)
            ids = sentences(0, rows, 32)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            inputs |= {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
            show(f"{name}, generate 16, {number} tasks, r = {rank}, {rows} rows", retex, "generate", inputs, rows)

    clip, batch = clip_model(), {"image": images(0, 16)}
    for rank in (256, 16):
        retex = retex_model(clip, task_names(4), rank, recovered=is_visual)
        show(f"ViT-B/32, 4 tasks, r = {rank}, 16 images, cached", retex, "encode_image", batch, 16)
        retex.expert_cache = 0
        show(f"ViT-B/32, 4 tasks, r = {rank}, 16 images, cache off", retex, "encode_image", batch, 16)


if __name__ == "__main__":
    main()
