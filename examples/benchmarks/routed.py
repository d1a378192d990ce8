"""A routed forward pass against the static merged model: OpenCLIP ViT-B/32, r = 256, batches of 64 images.

    python examples/benchmarks/routed.py                  # --repeats 5 --threads 2

The weights are random: time does not depend on them. Images of 8 (or 50) tasks are mixed in every batch, and their
tasks are identified. All variants alternate in one process; the table has the best time of each, as a ratio.
"""

from __future__ import annotations

from copy import copy

import torch
from synthetic import clip_model, images, retex_model, seconds, task_names, timing_arguments

from retex_hf import RetexModel

BATCH, RANK = 64, 256


def is_visual(name: str) -> bool:
    return name.startswith("visual.")  # fine-tuned CLIPs keep their text tower


def fitted(model: torch.nn.Module, number: int, **options) -> RetexModel:
    """Return a routed model of `number` tasks, with signatures that separate their images."""
    tasks = task_names(number)
    retex = retex_model(model, tasks, RANK, recovered=is_visual, **options)
    retex.fit_signatures({task: [images(index, 16)] for index, task in enumerate(tasks)}, progress=False)
    return variant(retex, "auto", "0MB")


def variant(retex: RetexModel, execution: str, cache: str) -> RetexModel:
    """Return the same model (and tensors) with another cache and execution mode."""
    other = copy(retex)
    other.expert_cache = cache
    other.execution = execution
    return other


def mixed_batch(number: int) -> torch.Tensor:
    rows = [images(index % number, 1) for index in range(BATCH)]
    return torch.cat(rows)


@torch.inference_mode()
def main() -> None:
    arguments = timing_arguments(__doc__)
    model = clip_model()
    few, many = mixed_batch(8), mixed_batch(50)

    routed = fitted(model, 8)
    middle = fitted(model, 8, feature_layer=5)
    last = fitted(model, 8, feature_layer=-1)
    trunk = fitted(model, 8, shared_trunk=True, feature_layer=5)
    fifty = fitted(model, 50)
    layer = routed.signatures.feature_layer
    print(f"{arguments.threads} threads, {arguments.repeats} repeats; feature_layer=auto picked {layer}\n")
    models = {
        "cache of all experts": variant(routed, "auto", "4000MB"),
        "cache of all experts, features after half the blocks": variant(middle, "auto", "4000MB"),
        "cache of all experts, features of the last block": variant(last, "auto", "4000MB"),
        "cache of all experts, shared trunk of half the blocks": variant(trunk, "auto", "4000MB"),
        "cache of one expert": variant(routed, "auto", "400MB"),
        "cache off": routed,
        "cache off, group by group": variant(routed, "grouped", "0MB"),
        "cache off, one pass": variant(routed, "mixed", "0MB"),
        "cache of all experts, one pass": variant(routed, "mixed", "4000MB"),
    }
    calls = {"static merged model": lambda: model.encode_image(few)}
    calls |= {name: lambda retex=retex: retex.encode_image(few) for name, retex in models.items()}
    calls["50 tasks, cache off"] = lambda: fifty.encode_image(many)
    times = seconds(calls, arguments.repeats)

    static = times["static merged model"]
    right = sum(int(name.split()[1]) == row % 8 for row, name in enumerate(routed.encode_image(few).routing.tasks))
    print("| 8 tasks, batch of 64 | ms per image | over static |")
    print("|---|---:|---:|")
    for name, value in times.items():
        print(f"| {name} | {1e3 * value / BATCH:.2f} | {value / static:.2f}x |")
    print(f"\nTasks identified: {right} of {BATCH}.")
    print(f"50 tasks against 8, cache off: {times['50 tasks, cache off'] / times['cache off']:.2f}x per image.")


if __name__ == "__main__":
    main()
