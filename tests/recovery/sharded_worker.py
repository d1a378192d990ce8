"""One of several processes that train a sharded recovery module: `sharded_worker.py fsdp|deepspeed NORM MODELS OUTPUT`.

accelerate runs FSDP on GPUs only, and DDP in its place on CPUs. torch itself shards on CPUs, so accelerate is told here
that these processes are of that kind, and from then on takes its own path through `fully_shard`. DeepSpeed has an
accelerator for CPUs; accelerate counts its processes once it is told how they talk to each other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from safetensors.torch import save_file

from retex_hf import RetexConfig, RetexModel, TrainingConfig

TRAINING = {"steps": 6, "warmup_steps": 0, "batch_size": 2, "learning_rate": 0.01, "log_every": 1}
CONFIG = {"rank": 4, "recovery": "affine"}


def fsdp() -> Accelerator:
    """An accelerator of what examples/accelerate/fsdp.yaml says, on CPUs."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["OffsetGenerator"],
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator


def deepspeed() -> Accelerator:
    """An accelerator of what examples/accelerate/deepspeed.yaml says, on CPUs."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    settings = Path(__file__).parents[2] / "examples" / "accelerate" / "zero2.json"
    plugin = DeepSpeedPlugin(hf_ds_config=str(settings))
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


KINDS = {"fsdp": (fsdp, DistributedType.FSDP), "deepspeed": (deepspeed, DistributedType.DEEPSPEED)}


def main(kind: str, max_grad_norm: float | None, models: Path, output: Path) -> None:
    torch.set_num_threads(1)
    make, distributed_type = KINDS[kind]
    accelerator = make()
    assert accelerator.distributed_type == distributed_type and accelerator.num_processes == 2
    experts = {task: models / task for task in ("red", "green", "blue")}
    model = RetexModel.from_experts(
        models / "base",
        experts,
        RetexConfig(**CONFIG),
        solver="adam",
        training=TrainingConfig(**TRAINING, max_grad_norm=max_grad_norm),
        accelerator=accelerator,
        progress=False,
    )
    (output / f"{accelerator.process_index}.json").write_text(json.dumps(model.training_history))
    save_file(model.recovery.state_dict(), output / f"{accelerator.process_index}.safetensors")


if __name__ == "__main__":
    kind, norm, models, output = sys.argv[1:]
    main(kind, json.loads(norm), Path(models), Path(output))
