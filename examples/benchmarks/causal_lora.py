"""The causal suite with LoRA experts: the base, tasks and answers of causal.py, and an adapter per task.

    python examples/benchmarks/prepare.py --recipe examples/recipes/experiments/causal_lora.yaml --work-dir retex-lora

Adapters of rank 16 on all linear layers, saved as PEFT saves them.
"""

from __future__ import annotations

from pathlib import Path

import causal
import torch
from common import Task
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS, available, load_task = causal.TASKS, causal.available, causal.load_task
fetch_base, make_collate, make_readout = causal.fetch_base, causal.make_collate, causal.make_readout
RANK, LEARNING_RATE = 16, 1e-3


def fine_tune_expert(base: Path, task: Task, folder: Path) -> None:
    """Train one adapter on the training part of `split_validation`."""
    torch.manual_seed(0)
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    causal.learn_answers(model, AutoTokenizer.from_pretrained(base), task, folder, LEARNING_RATE)
