"""Mixed-task `generate` against the static merged model: T5-small, 7 tasks, 28 rows, 32 new tokens, r = 64.

    python examples/benchmarks/generate.py                # --repeats 5 --threads 2

The weights are random: time does not depend on them. PEFT runs the same factors as LoRA adapters, one per task, with
`adapter_names`; it recovers linear layers only (no norms, embeddings or position biases), and is given the tasks.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from peft import LoraConfig, get_peft_model
from synthetic import retex_model, seconds, sentences, t5_model, task_names, timing_arguments
from torch import nn

from retex_hf import RetexModel

TASKS = task_names(7)
ROWS, LENGTH, NEW_TOKENS, RANK = 28, 32, 32, 64


def peft_model(retex: RetexModel) -> nn.Module:
    """Return the merged model with the recovery of every linear layer as one LoRA adapter per task."""
    model = deepcopy(retex.get_base_model())
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=linear)
    adapted = get_peft_model(model, config, adapter_name=TASKS[0])
    for task in TASKS[1:]:
        adapted.add_adapter(task, config)
    modules = dict(adapted.base_model.model.named_modules())
    for name in linear:
        generator = retex.recovery[f"{name}.weight"]
        for index, task in enumerate(TASKS):
            embedding = retex.recovery.task_embedding[index]
            modules[name].lora_A[task].weight.data.copy_(generator.shared[0])
            modules[name].lora_B[task].weight.data.copy_(generator.generated(embedding)[0])
    return adapted.eval()


@torch.inference_mode()
def main() -> None:
    arguments = timing_arguments(__doc__)
    model = t5_model()
    references = {task: [{"input_ids": sentences(index, 64, LENGTH)}] for index, task in enumerate(TASKS)}
    retex = retex_model(model, TASKS, RANK)
    lean = retex_model(model, TASKS, RANK, recovered=lambda name: name != "shared.weight")
    for one in (retex, lean):
        one.fit_signatures(references, progress=False)
    ids = torch.cat([sentences(row % len(TASKS), 1, LENGTH) for row in range(ROWS)])
    tasks = [TASKS[row % len(TASKS)] for row in range(ROWS)]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}

    def routed(execution: str, task: list[str] | None = None) -> torch.Tensor:
        retex.execution = execution
        return retex.generate(**inputs, task=task)

    adapted = peft_model(retex)
    calls = {
        "static merged model": lambda: model.generate(**inputs),
        "ReTeX, auto": lambda: routed("auto"),
        "ReTeX, auto, embeddings left merged": lambda: lean.generate(**inputs),
        "ReTeX, one pass, tasks named": lambda: routed("mixed", tasks),
        "ReTeX, group by group, experts cached": lambda: routed("grouped"),
        "PEFT adapter_names (linear layers only, tasks named)": lambda: adapted.generate(**inputs, adapter_names=tasks),
    }
    times = seconds(calls, arguments.repeats)
    static = times["static merged model"]
    print(f"{arguments.threads} threads, {arguments.repeats} repeats; features of {retex.signatures.feature_layer}\n")
    print("| 7 tasks, 28 rows, 32 new tokens | seconds | over static |")
    print("|---|---:|---:|")
    for name, value in times.items():
        print(f"| {name} | {value:.2f} | {value / static:.2f}x |")
    right = sum(found == task for found, task in zip(routed("auto").routing.tasks, tasks, strict=True))
    same = torch.equal(routed("mixed"), routed("grouped"))
    print(f"\nTasks identified: {right} of {ROWS}. One pass and group by group give the same tokens: {same}.")


if __name__ == "__main__":
    main()
