"""An artifact on several machines: a Ray Serve application with the router ahead of replicas.

    pip install 'ray[serve]' retex-hf
    cd examples/serving && RETEX_ARTIFACT=/path/to/my-retex serve run ray_app:app
    curl localhost:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "auto", "prompt": ["..."], "max_tokens": 16}'

Two deployments, which Ray scales apart. `Endpoint` tokenises prompts and identifies their tasks, with the merged model
up to the feature layer only; it is small and many of them run on one machine. `Expert` holds the artifact, and
generates. A request goes to a replica that has answered its task before (Ray's model multiplexing, with the task as the
model), so that a recovered expert stays in memory; prompts of one request may go to several replicas. Replicas on other
machines need the artifact under the same path, or a Hub id.

The artifact must have been exported (`retex export my-retex --all --for vllm`), because the router reads the export.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers import AutoTokenizer, GenerationConfig

from retex_hf import RetexModel
from retex_hf.artifact.export_files import AUTO, MERGED
from retex_hf.serving.vllm.exported import read_exported
from retex_hf.serving.vllm.hooks import is_auto
from retex_hf.serving.vllm.micro_batches import MicroBatches
from retex_hf.serving.vllm.router import Router

ARTIFACT = os.environ.get("RETEX_ARTIFACT", "my-retex")
# Recovered experts that a replica keeps; Ray sends a task to a replica that has it.
EXPERTS_PER_REPLICA = 4
MOST_PROMPTS, MOST_NEW_TOKENS = 64, 1024


@serve.deployment(
    max_ongoing_requests=16,
    autoscaling_config={
        "min_replicas": int(os.environ.get("RETEX_MIN_REPLICAS", "1")),
        "max_replicas": int(os.environ.get("RETEX_MAX_REPLICAS", "8")),
        "target_ongoing_requests": 4,
        "upscale_delay_s": 10,
        "downscale_delay_s": 300,
    },
    ray_actor_options={"num_cpus": float(os.environ.get("RETEX_EXPERT_CPUS", "1"))},
)
class Expert:
    """Generates with the experts of the artifact; concurrent prompts of one task share a batch."""

    def __init__(self, artifact: str) -> None:
        self.model = RetexModel.from_pretrained(artifact)
        self.pad = self.model.model.generation_config.pad_token_id or 0

    @serve.multiplexed(max_num_models_per_replica=EXPERTS_PER_REPLICA)
    async def expert(self, task: str) -> str:
        """Tell Ray that this replica has the task; the model itself keeps recovered experts."""
        return task

    async def __call__(self, ids: list[int], options: dict[str, Any]) -> list[int]:
        """Return the tokens that follow a prompt."""
        task = await self.expert(serve.get_multiplexed_model_id())
        return await self.generate((task, ids, tuple(sorted(options.items()))))

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.005)
    async def generate(self, rows: list[tuple[str, list[int], Any]]) -> list[list[int]]:
        """Answer prompts that arrived together: one call for those of the same options, of any tasks."""
        found: dict[int, list[int]] = {}
        for options in {row[2] for row in rows}:
            places = [place for place, row in enumerate(rows) if row[2] == options]
            answers = await asyncio.to_thread(self._run, [rows[place] for place in places], dict(options))
            found.update(zip(places, answers, strict=True))
        return [found[place] for place in range(len(rows))]

    def _run(self, rows: list[tuple[str, list[int], Any]], options: dict[str, Any]) -> list[list[int]]:
        merged = [place for place, row in enumerate(rows) if row[0] == MERGED]
        routed = [place for place in range(len(rows)) if place not in merged]
        found: dict[int, list[int]] = {}
        for places, runs in ((merged, self.model.model), (routed, self.model)):
            if not places:
                continue
            inputs = self._padded([rows[place][1] for place in places])
            named = {"task": [rows[place][0] for place in places]} if runs is self.model else {}
            with torch.inference_mode():
                output = runs.generate(**inputs, **named, **options)
            for place, row in zip(places, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                found[place] = row
        return [found[place] for place in range(len(rows))]

    def _padded(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        width = max(map(len, prompts))
        ids = [[self.pad] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@serve.deployment(
    max_ongoing_requests=256,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64},
    ray_actor_options={"num_cpus": float(os.environ.get("RETEX_ROUTER_CPUS", "0.5"))},
)
class Endpoint:
    """The endpoint: OpenAI's completions, each prompt routed to a replica by its task."""

    def __init__(self, artifact: str, experts: Any) -> None:
        self.exported = read_exported(Path(artifact))
        self.route = MicroBatches(Router(self.exported))
        self.tokenizer = AutoTokenizer.from_pretrained(artifact)
        end = GenerationConfig.from_pretrained(artifact).eos_token_id
        self.ends = set(end if isinstance(end, list) else [end])
        self.experts = experts

    async def __call__(self, request: Request) -> JSONResponse:
        if request.url.path == "/health":
            return JSONResponse({"status": "ok"})
        if request.url.path == "/v1/models":
            names = [AUTO, MERGED, *self.exported.tasks]
            return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
        if request.method != "POST" or request.url.path != "/v1/completions":
            return refused(404, f"There is no {request.method} {request.url.path}.")
        try:
            return await self.complete(await request.json())
        except (ValueError, TypeError) as error:  # also of JSON, and of prompts that cannot be routed
            return refused(400, str(error))

    async def complete(self, body: dict[str, Any]) -> JSONResponse:
        """Answer a request for completions."""
        prompts = body.get("prompt")
        prompts = [prompts] if isinstance(prompts, str) else prompts
        limit = body.get("max_tokens", 16)
        if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts) or not prompts:
            raise ValueError("prompt must be a text or a list of texts.")
        if len(prompts) > MOST_PROMPTS or not isinstance(limit, int) or not 0 < limit <= MOST_NEW_TOKENS:
            raise ValueError(f"At most {MOST_PROMPTS} prompts, and 1 to {MOST_NEW_TOKENS} max_tokens, are answered.")
        if body.get("stream") or body.get("temperature", 0) != 0:
            raise ValueError("This application answers whole and greedily: leave out stream and temperature.")
        ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        routing, models = await self.models(body.get("model"), ids)
        options = {"max_new_tokens": limit, "do_sample": False}
        answers = await asyncio.gather(
            *(
                self.experts.options(multiplexed_model_id=model).remote(prompt, options)
                for prompt, model in zip(ids, models, strict=True)
            )
        )
        choices = [
            {"index": index, "logprobs": None, **self.answer(tokens), "retex": routing[index]}
            for index, tokens in enumerate(answers)
        ]
        name = models[0] if len(set(models)) == 1 else AUTO
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        return JSONResponse({**head, "model": name, "choices": choices})

    async def models(self, model: str | None, ids: list[list[int]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the routing of each prompt, and what answers it: a task, or the merged model."""
        if is_auto(model):
            decisions = await self.route(ids)
            return [one.body() for one in decisions], [one.model or MERGED for one in decisions]
        if model not in (MERGED, *self.exported.tasks):
            raise ValueError(f"There is no model {model!r}; the models are {[AUTO, MERGED, *self.exported.tasks]}.")
        named = {"task": None if model == MERGED else model, "probability": None, "abstained": False}
        return [named] * len(ids), [str(model)] * len(ids)

    def answer(self, tokens: list[int]) -> dict[str, Any]:
        """Return the text of an answer up to its end."""
        length = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        text = self.tokenizer.decode(tokens[:length], skip_special_tokens=True)
        reason = "length" if length == len(tokens) else "stop"
        return {"text": text, "token_ids": tokens[:length], "finish_reason": reason}


def refused(status: int, message: str) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


app = Endpoint.bind(ARTIFACT, Expert.bind(ARTIFACT))
