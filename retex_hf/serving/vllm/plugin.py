"""The endpoint plugin: `VLLM_PLUGINS=retex vllm serve ARTIFACT --enable-lora ...`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from ...artifact.export_files import AUTO
from ...errors import RetexError
from .exported import Exported, read_exported
from .headers import RoutingHeaders
from .hooks import hook_generation, hook_pooling
from .micro_batches import MicroBatches
from .router import Router

logger = logging.getLogger("vllm.retex")

# Where the router runs; the API server has no GPU of its own.
DEVICE = "RETEX_ROUTER_DEVICE"
GENERATION = ("openai_serving_completion", "openai_serving_chat")
POOLING = ("serving_embedding", "serving_classification", "serving_pooling")


class RetexPlugin:
    """Routes every prompt whose request names the model "auto", or none, to the adapter of its task.

    vLLM makes one per API server process. The router's weights, the merged model up to the feature layer, are loaded
    in each.
    """

    name = "retex"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the headers that name the task; routes stay vLLM's own."""
        app.add_middleware(RoutingHeaders)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Load the router and the adapters, and hook the handlers that exist for this model."""
        if engine_client is None:
            raise RetexError("The plugin of retex_hf needs an engine: leave VLLM_PLUGINS unset for `vllm render`.")
        exported = read_exported(Path(args.model))
        check_slots(engine_client.vllm_config, len(exported.tasks))
        models = state.openai_serving_models
        await load_adapters(models, exported)
        route = MicroBatches(Router(exported, os.environ.get(DEVICE, "cpu")))
        hooked = []
        for name in GENERATION:
            if (handler := getattr(state, name, None)) is not None:
                hook_generation(handler, route)
                hooked.append(name)
        for name in POOLING:
            if (handler := getattr(state, name, None)) is not None:
                hook_pooling(handler, route, exported.labels)
                hooked.append(name)
        if not hooked:
            raise RetexError("vLLM serves this model by no endpoint that can be routed.")
        _list_auto(models)
        logger.info("retex routes %s by %s.", ", ".join(hooked), ", ".join(exported.signatures.space.layers))


def check_slots(config: Any, tasks: int) -> None:
    """Refuse a server on CPUs without an empty slot for adapters.

    vLLM 0.32 gives prompts without an adapter the slot -1. Its kernels for CPUs take that for the last slot: with an
    adapter there, the merged model answers wrongly.
    """
    slots = config.lora_config.max_loras if config.lora_config is not None else None
    if slots is None:
        raise RetexError("The tasks are adapters: start vLLM with --enable-lora.")
    if config.device_config.device_type == "cpu" and slots <= tasks:
        raise RetexError(
            f"On CPUs, {tasks} tasks need one slot more than that: start vLLM with --max-loras {tasks + 1}."
        )


async def load_adapters(models: Any, exported: Exported) -> None:
    """Load the adapters that the server was not started with.

    The order is the same in every API server process, because vLLM numbers adapters as they are loaded.
    """
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    for task, folder in exported.adapters.items():
        if task in models.lora_requests:
            continue
        result = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=task, lora_path=str(folder)))
        if error := getattr(result, "error", None):
            raise RetexError(f"vLLM did not take the adapter of task {task!r}: {error.message}")


def _list_auto(models: Any) -> None:
    """Add "auto" to the models that the server lists, at their head."""
    show = models.show_available_models

    async def shown() -> Any:
        listed = await show()
        first = listed.data[0]
        listed.data.insert(0, first.model_copy(update={"id": AUTO, "parent": first.id}))
        return listed

    models.show_available_models = shown
