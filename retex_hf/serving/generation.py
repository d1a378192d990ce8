"""Answers by a model that generates text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..utils.devices import as_model_takes
from ..workflows.predictor import Predictor
from .decoding import Decoding, Prompt
from .errors import ApiError
from .metrics import Metrics
from .options import ServeOptions
from .rows import AUTO, MERGED, Decision, Row
from .sampling import Sampling
from .shared_tokenizer import SharedTokenizer
from .turns import Turns

# Whatever the model's own settings are: one answer per row, its tokens chosen by `Decoding`.
PLAIN = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}


class TextGeneration:
    """Continues prompts, each by its own expert, in batches of any tasks and settings."""

    def __init__(self, predictor: Predictor, options: ServeOptions, metrics: Metrics) -> None:
        self.predictor, self.model, self.options, self.metrics = predictor, predictor.model, options, metrics
        wrapped = self.model.model
        assert isinstance(wrapped, PreTrainedModel)  # others do not generate
        self.wrapped, self.continues = wrapped, not wrapped.config.is_encoder_decoder
        self.turns, self.vocabulary = Turns(), self.model.retex_config.vocabulary
        positions = getattr(wrapped.config.get_text_config(), "max_position_embeddings", None)
        self.context = positions if isinstance(positions, int) and positions > 0 else None

    # ---- before the queue --------------------------------------------------------------------------------------------

    def tokenizer(self, task: str | None) -> SharedTokenizer:
        """Return the tokenizer of a task, if it has one of its own, else that of the merged model."""
        return SharedTokenizer(self.predictor.own.get(task or "", self.predictor.preprocessor))

    def owner(self, task: str | None) -> str | None:
        """Return the task whose tokenizer a task uses: itself, or None for that of the merged model."""
        return task if task in self.predictor.own else None

    def rows(self, prompt: Prompt, model: str, copies: int) -> list[Row]:
        """Return the rows of a prompt; refuse one that does not fit the model or the limits."""
        task = None if model in (AUTO, MERGED) else model
        count = len(self.encoded(prompt, task))
        limit = self.options.max_prompt_tokens
        if self.context is not None:
            limit = min(limit, self.context - (1 if self.continues else 0))
        if count > limit:
            raise ApiError(
                400,
                f"The prompt has {count} tokens; at most {limit} are read.",
                param="prompt",
                code="context_length_exceeded",
            )
        size = count + prompt.max_tokens
        if self.continues and self.context is not None and size > self.context:
            raise ApiError(
                400,
                f"The prompt has {count} tokens and max_tokens is {prompt.max_tokens}; the model takes "
                f"{self.context} together.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        mode = model if model in (AUTO, MERGED) else "task"
        key = ("generate", mode, self.owner(task))
        return [Row(_copy(prompt, number), model, key, size=size, tokens=count) for number in range(copies)]

    def encoded(self, prompt: Prompt, task: str | None) -> list[int]:
        """Return the token ids of a prompt for a task; refuse those that the task does not have."""
        ids, known = prompt.encode(self.owner(task)), self._vocabulary(task)
        if not ids:
            raise ApiError(400, "The prompt has no tokens: expected a text that is not empty.", param="prompt")
        if not 0 <= min(ids) <= max(ids) < known:
            raise ApiError(400, f"The prompt has the token {max(ids)}; there are {known}, from 0.", param="prompt")
        return ids

    def _vocabulary(self, task: str | None) -> int:
        own = self.vocabulary.get(task or "", {}).get("size")
        return own or len(self.wrapped.get_input_embeddings().get_parameter("weight"))

    def room(self, count: int) -> int:
        """Return how many tokens may follow on a prompt of so many."""
        most = self.options.max_tokens
        return most if not self.continues or self.context is None else max(1, min(most, self.context - count))

    def default_sampling(self) -> Sampling:
        """Return how the model's own settings choose tokens: the likeliest, unless they ask for sampling."""
        own = self.wrapped.generation_config
        if own is None or not own.do_sample:
            return Sampling()
        return Sampling(own.temperature or 1.0, own.top_p or 1.0, own.top_k or None)

    # ---- in a batch --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, rows: list[Row]) -> None:
        """Answer rows of one key."""
        model = rows[0].model
        with self.turns:
            if model == MERGED:
                with self.model.disable_adapter():
                    self._generate(rows, None, None, [Decision(None)] * len(rows))
            elif model != AUTO:
                tasks = [row.model for row in rows]
                self._generate(rows, self.owner(tasks[0]), tasks, [Decision(task) for task in tasks])
            elif self.predictor.own:
                self._identify_first(rows)
            else:
                self._generate(rows, None, None, None)

    def _identify_first(self, rows: list[Row]) -> None:
        """Identify tasks from the merged model's tokens, then generate from each task's own."""
        routing = self.model.identify(**self._batch([self.encoded(row.value, None) for row in rows], None))
        if routing.weights is not None:  # a mixture of tasks cannot use the tokens of a single one
            self._generate(rows, None, None, None)
            return
        decisions = [Decision.of(routing, index) for index in range(len(rows))]
        owners = [self.owner(decision.task) for decision in decisions]
        for owner in dict.fromkeys(owners):
            places = [index for index, found in enumerate(owners) if found == owner]
            tasks = [routing.tasks[place] for place in places]
            self._generate([rows[place] for place in places], owner, tasks, [decisions[place] for place in places])

    def _generate(
        self, rows: list[Row], owner: str | None, tasks: list[str] | None, decisions: list[Decision] | None
    ) -> None:
        prompts = [self.encoded(row.value, owner) for row in rows]
        followed: Sequence[Sequence[int]] = prompts if self.continues else [()] * len(rows)
        decoding = Decoding(rows, self.tokenizer(owner), followed, self._ends, self.metrics, self.turns, decisions)
        longest = max(row.value.max_tokens for row in rows)
        self.model.generate(
            **self._batch(prompts, owner), **PLAIN, max_new_tokens=longest, task=tasks, **decoding.callbacks
        )

    def _batch(self, prompts: list[list[int]], owner: str | None) -> dict[str, Tensor]:
        """Pad token ids to a batch: on the left where new tokens follow on them."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.tokenizer(owner).pad_token_id)
        mask = torch.zeros_like(ids)
        for index, prompt in enumerate(prompts):
            place = slice(longest - len(prompt), None) if self.continues else slice(len(prompt))
            ids[index, place], mask[index, place] = torch.tensor(prompt), 1
        return as_model_takes({"input_ids": ids, "attention_mask": mask}, self.wrapped)

    def _ends(self, task: str | None) -> frozenset[int]:
        """Return the tokens that end a text of a task."""
        own = self.vocabulary.get(task or "", {}).get("token_ids") or {}
        found = own.get("eos_token_id", getattr(self.wrapped.generation_config, "eos_token_id", None))
        return frozenset(found if isinstance(found, (list, tuple)) else () if found is None else (found,))


def _copy(prompt: Prompt, number: int) -> Prompt:
    """Return one of the copies of a prompt: each draws with a seed of its own."""
    seed = (prompt.sampling.seed + number) % 2**63
    return replace(prompt, sampling=replace(prompt.sampling, seed=seed))
