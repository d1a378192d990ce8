"""Run the Ray Serve application on this machine, in several processes, and compare its answers with `RetexModel`.

    python examples/serving/ray_check.py --artifact retex-vllm/llama --replicas 2

The artifact is one that vllm_check.py made. Requests go over HTTP, many at a time, of one prompt and of several, named
and routed. Exits with code 1 unless all answers are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray import serve
from vllm_check import TASKS, Expected, texts_of


def ask(port: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--port", type=int, default=8341)
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file")
    args = parser.parse_args()
    os.environ |= {
        "RETEX_ARTIFACT": str(args.artifact.resolve()),
        "RETEX_MIN_REPLICAS": str(args.replicas),
        "RETEX_MAX_REPLICAS": str(args.replicas),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
    }
    import ray_app  # reads the environment

    expected = Expected(args.artifact)
    prompts = [text for row in zip(*(texts_of(task, 12, 1) for task in TASKS), strict=True) for text in row]
    wanted = [expected.text(prompt) for prompt in prompts]
    ray.init(num_cpus=args.replicas + 2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        serve.run(ray_app.app, name="retex", route_prefix="/")
        ok = check(args, prompts, wanted, expected)
    finally:
        serve.shutdown()
        ray.shutdown()
    sys.exit(not ok)


def check(args: argparse.Namespace, prompts: list[str], wanted: list[Any], expected: Expected) -> bool:
    """Ask in every way, and print how many answers are equal."""
    bodies = [{"model": "auto", "prompt": prompt, "max_tokens": 16} for prompt in prompts]
    with ThreadPoolExecutor(args.clients) as clients:
        alone = list(clients.map(lambda body: ask(args.port, body)[1]["choices"][0], bodies))
    whole = ask(args.port, {"prompt": prompts, "max_tokens": 16})[1]
    pinned = ask(args.port, {"model": "code", "prompt": prompts[:6], "max_tokens": 16})[1]["choices"]
    own = [expected.text(prompt, task="code") for prompt in prompts[:6]]
    ways = {
        f"one prompt a request, {args.clients} clients": (alone, wanted),
        "all prompts in one request": (whole["choices"], wanted),
        "that name a task": (pinned, own),
    }
    good, counted = True, {}
    for way, (found, right) in ways.items():
        equal = sum(one["token_ids"] == other[0] for one, other in zip(found, right, strict=True))
        tasks = sum(one["retex"]["task"] == other[1] for one, other in zip(found, right, strict=True))
        print(f"{way}: {equal} of {len(right)} answers equal, {tasks} of the same task")
        counted[way] = {"prompts": len(right), "equal": equal, "same_task": tasks}
        good = good and equal == tasks == len(right)
    status, refused = ask(args.port, {"model": "nothing", "prompt": "a"})
    print(f"an unknown model: {status}, {refused['error']['message']}")
    replicas = serve.status().applications["retex"].deployments["Expert"].replica_states
    print(f"replicas: {dict(replicas)}; response model of all prompts: {whole['model']}")
    if args.output:
        args.output.write_text(json.dumps({"replicas": args.replicas, "ways": counted}, indent=2) + "\n")
    return good and status == 400 and sum(replicas.values()) == args.replicas


if __name__ == "__main__":
    main()
