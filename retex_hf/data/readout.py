"""Read a model's outputs as answers. The kind of a task's head, and its location, differ between kinds of models.

A classifier has its head inside; CLIP's head is a matrix of class embeddings beside the model; a generator answers in
words and has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..execution import attach_routing, call_method

Answer = int | str
Model = Callable[..., Any]


class Readout(ABC):
    """A way to query a model for answers and to read them from its output. `tasks` names the head of each row."""

    chooses_head = True
    """Whether a row's answer is meaningful only together with its task."""

    def call(self, model: nn.Module, inputs: Mapping[str, Tensor], **options: Any) -> Any:
        """Run a model on a batch; `options` (such as `task=`) go with the inputs."""
        return model(**inputs, **options)

    @abstractmethod
    def answers(self, output: Any, tasks: Sequence[str]) -> list[Answer]:
        """Return the answer of each row of an output of `call`: a class index, or a text."""

    @abstractmethod
    def logits(self, model: nn.Module, inputs: Mapping[str, Tensor], task: str) -> Tensor:
        """Return scores (rows, choices) under the head of one task, with gradients where the model carries them."""


class Classifier(Readout):
    """Models with a classification head of their own: the answer is the largest of `output.logits`."""

    def answers(self, output: Any, tasks: Sequence[str]) -> list[Answer]:
        return output.logits.argmax(-1).tolist()

    def logits(self, model: nn.Module, inputs: Mapping[str, Tensor], task: str) -> Tensor:
        return self.call(model, inputs).logits


class ZeroShot(Readout):
    """CLIP image towers: the answer is the class whose text embedding is nearest to the image's.

    Args:
        heads: Class embeddings (classes, d) of each task, as computed by the base's text tower.
        features: Function that takes the image embeddings (rows, d) out of a model's output.
        scale: CLIP's `exp(logit_scale)`.
    """

    def __init__(
        self,
        heads: Mapping[str, Tensor],
        features: Callable[[Any], Tensor] = lambda output: output.image_embeds,
        scale: float = 100.0,
    ) -> None:
        self.heads = {task: nn.functional.normalize(head.float(), dim=-1) for task, head in heads.items()}
        self.features, self.scale = features, scale

    def answers(self, output: Any, tasks: Sequence[str]) -> list[Answer]:
        rows = zip(self.features(output), tasks, strict=True)
        return [int((self.heads[task].to(row.device) @ row.float()).argmax()) for row, task in rows]

    def logits(self, model: nn.Module, inputs: Mapping[str, Tensor], task: str) -> Tensor:
        features = nn.functional.normalize(self.features(self.call(model, inputs)).float(), dim=-1)
        return self.scale * features @ self.heads[task].to(features.device).T


class Generator(Readout):
    """Models that answer in words: the answer is the generated text.

    Args:
        tokenizer: Tokenizer that turns token ids into text.
        options: Options of `generate`.
    """

    chooses_head = False

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer, self.options = tokenizer, {"do_sample": False, "num_beams": 1, **options}

    def call(self, model: nn.Module, inputs: Mapping[str, Tensor], **options: Any) -> Any:
        generated = call_method(model, "generate", dict(**inputs, **self.options, **options))
        config: Any = model.config
        if config.is_encoder_decoder:
            return generated
        answered = generated[:, inputs["input_ids"].shape[1] :]
        return attach_routing(answered, getattr(generated, "routing", None))

    def answers(self, output: Any, tasks: Sequence[str]) -> list[Answer]:
        return [text.strip() for text in self.tokenizer.batch_decode(output, skip_special_tokens=True)]

    def logits(self, model: nn.Module, inputs: Mapping[str, Tensor], task: str) -> Tensor:
        """Return the scores of the first token, from which the entropy is computed."""
        config: Any = model.config
        if not config.is_encoder_decoder:
            return model(**inputs).logits[:, -1]
        first = next(iter(inputs.values()))
        begun = torch.full((len(first), 1), config.decoder_start_token_id, device=first.device)
        return model(**inputs, decoder_input_ids=begun).logits[:, 0]


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy (rows,) of the distribution given by logits; classes at -inf do not count.

    >>> import torch
    >>> from retex_hf.data.readout import entropy
    >>> entropy(torch.tensor([[0.0, 0.0], [50.0, 0.0]])).round(decimals=3)
    tensor([0.6930, 0.0000])
    """
    log_probabilities = logits.float().log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities.nan_to_num(neginf=0.0)).sum(-1)
