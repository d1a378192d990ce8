"""Compare what vLLM answers to routed requests with `RetexModel`, token for token.

    bash examples/serving/vllm_env.sh my-vllm-env
    python examples/serving/vllm_check.py --vllm my-vllm-env
    python examples/serving/vllm_check.py --vllm my-vllm-env --model smollm2 --base BASE --experts TASK=FOLDER ...

Builds and exports an artifact, starts `vllm serve` on it with the plugin, asks through the `openai` client (completions
of one and of several prompts, chats, plain and streaming), and compares greedy tokens and tasks with `generate` and
`identify` of the artifact in this process; both in float32. Prints one line per way of asking, and exits with code 1
unless all answers are equal. `--model llama` and `qwen` are small random networks, with experts that differ in all
weights that vLLM takes; `smollm2` is SmolLM2-135M with the experts of examples/benchmarks/causal.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from servers import vllm
from tokenizers import Tokenizer, models, pre_tokenizers

from retex_hf import RetexConfig, RetexModel

TASKS = ("law", "code", "news")
WORDS = 96
# Heads of 32 numbers: vLLM's attention on CPUs has none smaller.
SIZES: dict[str, Any] = {
    "vocab_size": 4 + WORDS * len(TASKS), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# vLLM has no place for these in an adapter, so experts keep the merged model's.
UNSERVED = ["*norm*", "*.bias"]
# Characters of a prompt; the server is started for 256 tokens.
LONGEST_TEXT = 400
NEW_TOKENS = 16
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


# ---- artifacts -------------------------------------------------------------------------------------------------------


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"{task}{index}" for task in TASKS for index in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = CHAT
    return made


def make_network(kind: str) -> transformers.PreTrainedModel:
    """Return a random network: a Llama with tied embeddings, or a Qwen3 without."""
    torch.manual_seed(0)
    if kind == "qwen":
        config = transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)
        return transformers.Qwen3ForCausalLM(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()


def texts_of(task: str, count: int, seed: int) -> list[str]:
    draw = random.Random(f"{task}{seed}")
    return [" ".join(f"{task}{draw.randrange(WORDS)}" for _ in range(draw.randint(3, 12))) for _ in range(count)]


def small_prompts() -> dict[str, list[str]]:
    """Return prompts of each task that are no references."""
    return {task: texts_of(task, 12, 1) for task in TASKS}


@torch.no_grad()
def make_small(kind: str, folder: Path) -> None:
    """Save an artifact of random experts that differ in every matrix."""
    base, tokenizer = make_network(kind), make_tokenizer()
    for index in range(len(TASKS)):  # words of a task lie in a direction of their own
        rows = slice(4 + index * WORDS, 4 + (index + 1) * WORDS)
        base.get_input_embeddings().weight[rows] += 0.1 * torch.randn(SIZES["hidden_size"])
    experts = {}
    for seed, task in enumerate(TASKS, start=1):
        noise = torch.Generator().manual_seed(seed)
        expert = make_network(kind)
        expert.load_state_dict(base.state_dict())
        for tensor in expert.parameters():
            tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=noise)
        experts[task] = expert
    config = RetexConfig(rank=16, exclude=UNSERVED, routing={"method": "hard", "far": "merged"})
    model = RetexModel.from_experts(base, experts, config, progress=False)
    sign_and_save(model, tokenizer, {task: texts_of(task, 64, 0) for task in TASKS}, folder)


def real_texts(tasks: Iterable[str]) -> dict[str, list[str]]:
    """Return prompted texts of each task, as its expert was trained on."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import causal

    rows = {task: causal.load_task(task).train_inputs for task in tasks}
    return {task: [f"{text}{causal.CUE}" for text in of if len(text) < LONGEST_TEXT] for task, of in rows.items()}


def make_smollm2(base: str, experts: dict[str, str], folder: Path) -> None:
    """Save an artifact of real experts."""
    config = RetexConfig(rank=16, exclude=["model.embed_tokens.weight", *UNSERVED])
    model = RetexModel.from_experts(base, experts, config, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    sign_and_save(model, tokenizer, {task: of[:64] for task, of in real_texts(experts).items()}, folder)


def sign_and_save(model: RetexModel, tokenizer: Any, texts: dict[str, list[str]], folder: Path) -> None:
    tokenizer.padding_side = "left"
    tokenizer.chat_template = tokenizer.chat_template or CHAT
    batches = {task: [dict(tokenizer(of, padding=True, return_tensors="pt"))] for task, of in texts.items()}
    model.fit_signatures(batches, progress=False)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    RetexModel.from_pretrained(folder, verify=False).save_description(folder)  # records the tokenizer
    print(RetexModel.from_pretrained(folder).export_vllm(folder))


# ---- answers ---------------------------------------------------------------------------------------------------------


class Expected:
    """What the artifact itself answers: tokens without the end token, and the task."""

    def __init__(self, folder: Path) -> None:
        self.model = RetexModel.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.end = self.model.model.generation_config.eos_token_id

    def text(self, prompt: str, **options: Any) -> tuple[list[int], str]:
        return self.tokens(self.tokenizer(prompt)["input_ids"], **options)

    def chat(self, prompt: str) -> tuple[list[int], str]:
        messages = [{"role": "user", "content": prompt}]
        made = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return self.tokens(made["input_ids"])

    def tokens(self, ids: list[int], task: str | None = None, merged: bool = False) -> tuple[list[int], str]:
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        runs = self.model.model if merged else self.model
        named = {} if task is None else {"task": task}
        found = runs.generate(**inputs, **named, max_new_tokens=NEW_TOKENS, do_sample=False)
        name = "merged" if merged else task or self.model.identify(**inputs).tasks[0]
        return without_end(found[0, len(ids) :].tolist(), self.end), name


def without_end(ids: list[int], end: int | list[int] | None) -> list[int]:
    ends = end if isinstance(end, list) else [end]
    return next((ids[:place] for place, token in enumerate(ids) if token in ends), ids)


Answer = tuple[list[int], str | None]


class Asked:
    """Answers of the server through OpenAI's client: tokens, and the task."""

    def __init__(self, address: str, end: Any) -> None:
        from openai import OpenAI

        self.client, self.end = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300), end
        self.options = {"max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": {"return_token_ids": True}}

    def completions(self, prompts: list[str], model: str = "auto") -> list[Answer]:
        done = self.client.completions.create(model=model, prompt=prompts, **self.options)
        return [self._answer(choice.token_ids, choice, done.model) for choice in done.choices]

    def streamed_completions(self, prompts: list[str]) -> list[Answer]:
        stream = self.client.completions.create(model="auto", prompt=prompts, stream=True, **self.options)
        return self._collect(stream, len(prompts))

    def chat(self, prompt: str, model: str = "auto") -> list[Answer]:
        done = self.client.chat.completions.create(model=model, messages=message(prompt), **self.options)
        return [self._answer(choice.token_ids, choice, done.model) for choice in done.choices]

    def streamed_chat(self, prompt: str) -> list[Answer]:
        options = {"model": "auto", "messages": message(prompt), "stream": True, **self.options}
        return self._collect(self.client.chat.completions.create(**options), 1)

    def _collect(self, stream: Any, count: int) -> list[Answer]:
        ids: list[list[int]] = [[] for _ in range(count)]
        tasks: list[str | None] = [None] * count
        for chunk in stream:
            for choice in chunk.choices:
                ids[choice.index] += getattr(choice, "token_ids", None) or []
                tasks[choice.index] = tasks[choice.index] or (getattr(choice, "retex", None) or {}).get("task")
        return [(without_end(own, self.end), task) for own, task in zip(ids, tasks, strict=True)]

    def _answer(self, ids: list[int], choice: Any, model: str) -> Answer:
        routed = getattr(choice, "retex", None)
        return without_end(list(ids), self.end), routed["task"] if routed else model


def message(prompt: str) -> Any:
    return [{"role": "user", "content": prompt}]


def ways(asked: Asked, expected: Expected, prompts: list[str]) -> Iterator[tuple[str, list[Answer], list[Answer]]]:
    """Yield each way of asking, with the server's answers and those of the artifact."""
    texts = [expected.text(prompt) for prompt in prompts]
    chats = [expected.chat(prompt) for prompt in prompts]

    def each(ask: Callable[[Any], list[Answer]]) -> list[Answer]:
        return [answer for prompt in prompts for answer in ask(prompt)]

    yield "completions, one prompt a request", each(lambda prompt: asked.completions([prompt])), texts
    yield "completions, all prompts in one request", asked.completions(prompts), texts
    yield "completions, streaming, one prompt", each(lambda prompt: asked.streamed_completions([prompt])), texts
    yield "completions, streaming, all prompts", asked.streamed_completions(prompts), texts
    yield "chat", each(asked.chat), chats
    yield "chat, streaming", each(asked.streamed_chat), chats
    for task in expected.model.tasks:
        own = [expected.text(prompt, task=task) for prompt in prompts[:6]]
        yield f"completions that name {task}", asked.completions(prompts[:6], task), own
    merged = [expected.text(prompt, merged=True) for prompt in prompts[:6]]
    yield "completions that name merged", asked.completions(prompts[:6], "merged"), merged


def compare(artifact: Path, prompts: dict[str, list[str]], args: argparse.Namespace) -> dict[str, Any]:
    """Return, for each way of asking, how many answers were equal."""
    log = args.work_dir / f"{artifact.name}.log"
    mixed = [prompt for row in zip(*prompts.values(), strict=True) for prompt in row]
    expected = Expected(artifact)
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        address = args.address
        if address is None:
            address = stack.enter_context(vllm(args.vllm, artifact, log, args.port, args.api_servers)).address
        for way, found, wanted in ways(Asked(address, expected.end), expected, mixed):
            equal = sum(one[0] == other[0] for one, other in zip(found, wanted, strict=True))
            tasks = sum(one[1] == other[1] for one, other in zip(found, wanted, strict=True))
            result[way] = {"prompts": len(wanted), "equal": equal, "same_task": tasks}
            print(f"{way}: {equal} of {len(wanted)} answers equal, {tasks} of the same task", flush=True)
    routed = [expected.text(prompt)[1] for prompt in mixed]
    right = [task for row in zip(*([task] * len(own) for task, own in prompts.items()), strict=True) for task in row]
    own = [[tuple(expected.text(prompt, task=task)[0]) for task in prompts] for prompt in mixed[:6]]
    result["distinct_answers"] = sum(len(set(answers)) for answers in own) / len(own)  # of all tasks to one prompt
    result["identified"] = sum(one == other for one, other in zip(routed, right, strict=True)) / len(right)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="the environment that vllm_env.sh made")
    parser.add_argument("--address", help="a server of the artifact that already runs, instead of --vllm")
    parser.add_argument("--model", choices=["llama", "qwen", "smollm2"], nargs="+", default=["llama", "qwen"])
    parser.add_argument("--base", help="for smollm2: folder of the base")
    parser.add_argument("--experts", nargs="*", default=[], metavar="TASK=FOLDER", help="for smollm2: the experts")
    parser.add_argument("--work-dir", type=Path, default=Path("retex-vllm"))
    parser.add_argument("--port", type=int, default=8331)
    parser.add_argument("--api-servers", type=int, default=1, help="processes of the API server; each has a router")
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file")
    args = parser.parse_args()
    if args.vllm is None and args.address is None:
        parser.error("--vllm names the environment in which the server is started")
    results = {}
    for kind in args.model:
        folder = args.work_dir / kind
        experts = dict(item.split("=", 1) for item in args.experts)
        if not (folder / "retex_vllm.json").exists():  # else it is that of an earlier run
            make_smollm2(args.base, experts, folder) if kind == "smollm2" else make_small(kind, folder)
        real = {task: of[64:70] for task, of in real_texts(experts).items()} if kind == "smollm2" else {}
        prompts = real or small_prompts()
        print(f"{kind}: {sum(map(len, prompts.values()))} prompts of {len(prompts)} tasks")
        results[kind] = compare(folder, prompts, args)
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n")
    ways_asked = [way for result in results.values() for way in result.values() if isinstance(way, dict)]
    sys.exit(any(way["equal"] != way["prompts"] or way["same_task"] != way["prompts"] for way in ways_asked))


if __name__ == "__main__":
    main()
