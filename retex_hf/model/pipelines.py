"""`transformers.pipeline` with a `RetexModel`: every row is read with the labels of its own task, and says which it is.

transformers' pipelines read the labels of `model.config`, of which there is one, and do not know the class. Those here
run transformers' own steps with something in the model's place: during the forward step what notes the routing of the
call, after it the configuration of the row's task.

>>> from transformers import pipeline
>>> pipe = pipeline("text-classification", model=retex_model, tokenizer=tokenizer)  # doctest: +SKIP
>>> pipe(["what a film", "Is it far to the sea?"], batch_size=2)  # doctest: +SKIP
[{'task': 'reviews', 'label': 'positive', 'score': 0.98}, {'task': 'questions', 'label': 'distance', 'score': 0.91}]

A pipeline's own `task` is its kind; to have all inputs answered by one task, pin it with `model.set_adapter(name)`. The
model must be given as an object: by its name transformers loads the merged model alone, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
from transformers.pipelines import (
    PIPELINE_REGISTRY,
    AudioClassificationPipeline,
    FeatureExtractionPipeline,
    FillMaskPipeline,
    ImageClassificationPipeline,
    ImageFeatureExtractionPipeline,
    Pipeline,
    TextClassificationPipeline,
    TextGenerationPipeline,
    TokenClassificationPipeline,
    ZeroShotImageClassificationPipeline,
)
from transformers.pipelines.text_generation import ReturnType

from ..backends import library_of
from ..config import CONFIG_NAME
from ..errors import InputError, TaskError
from ..routing import Routing
from .retex_model import RetexModel
from .routed_model import GIVEN_AWAY

# Where the names of the rows' tasks travel through the pipeline's taking apart of batches, which takes lists apart too.
# Names, because tasks may come and go meanwhile.
TASK_KEY = "retex_task"
# Likewise, whether rows are far from every task, where the routing asks for it.
FAR_KEY = "retex_far"


class _Recorder:
    """Stands in for a model during one call, and keeps the routing of its output."""

    def __init__(self, model: RetexModel) -> None:
        self.model, self.routing = model, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self.model(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self.model.generate(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _noted(self, output: Any) -> Any:
        self.routing: Routing | None = output.routing
        return output


class RoutedPipeline(Pipeline):
    """What our pipelines have in common; the next class in line is the one of transformers."""

    def _in_place_of_model(self, model: Any) -> Pipeline:
        """transformers' methods of this pipeline, with something else as its model. Of a copy: calls may overlap."""
        view = copy(self)
        view.model = model
        return super(RoutedPipeline, view)

    def check_model_type(self, supported_models: Any) -> None:
        """It is the wrapped model's class that must fit."""
        self._in_place_of_model(self.model.get_base_model()).check_model_type(supported_models)

    def _forward(self, model_inputs: Any, **params: Any) -> Any:
        recorder = _Recorder(self.model)
        outputs = self._in_place_of_model(recorder)._forward(model_inputs, **params)
        if recorder.routing is not None:
            outputs[TASK_KEY] = recorder.routing.tasks
            if recorder.routing.abstained is not None:
                outputs[FAR_KEY] = recorder.routing.abstained.tolist()
        elif self.model.retex_config.labels:
            raise TaskError("Without recovery nothing says which head to use: leave disable_adapter() for a pipeline.")
        return outputs

    def postprocess(self, model_outputs: Any, **params: Any) -> Any:
        parts = model_outputs if isinstance(model_outputs, list) else [model_outputs]
        task = self._task_of(parts)
        if task is None:
            return super().postprocess(model_outputs, **params)
        config = self.model.retex_config
        if task not in config.tasks:
            raise TaskError(f"Task {task!r} was deleted before its answer could be read: give the input again.")
        labels, said = config.labels.get(task), {"task": task, **self._far_of(parts)}
        if labels is None:
            return _saying(super().postprocess(model_outputs, **params), said)
        parts = [_without_padding(part, len(labels["id2label"])) for part in parts]
        outputs = parts if isinstance(model_outputs, list) else parts[0]
        described = SimpleNamespace(config=self.model.config)
        library_of(self.model.get_base_model()).set_labels(described, labels)
        return _saying(self._in_place_of_model(described).postprocess(outputs, **params), said)

    def _far_of(self, parts: list[Mapping[str, Any]]) -> dict[str, bool]:
        """Whether one input, or any of its parts, is far from every task; nothing where that is not asked for."""
        found = [part[FAR_KEY] for part in parts if FAR_KEY in part]
        return {"far": any(far if isinstance(far, bool) else far[0] for far in found)} if found else {}

    def _task_of(self, parts: list[Mapping[str, Any]]) -> str | None:
        """The task of one input, which may have been cut into several parts."""
        # A row of a batch has a name, and a batch of one that was not taken apart a list of one.
        names = (part[TASK_KEY] for part in parts if TASK_KEY in part)
        tasks = {name if isinstance(name, str) else name[0] for name in names}
        if len(tasks) > 1:
            raise InputError(
                f"The parts of one long text were given to different tasks ({sorted(tasks)}): pin one with set_adapter."
            )
        return next(iter(tasks), None)


def _without_padding(outputs: Mapping[str, Any], width: int) -> Any:
    """The outputs of a row with the logits of its own head only."""
    return type(outputs)({**outputs, "logits": outputs["logits"][..., :width]})


def _saying(answer: Any, said: Mapping[str, Any]) -> Any:
    """An answer that says which task gave it, and whether it is far; one that is all numbers has no place for it."""
    if isinstance(answer, list):
        return [_saying(part, said) for part in answer] if answer and isinstance(answer[0], dict | list) else answer
    return {**said, **answer} if isinstance(answer, dict) else answer


class RetexTextClassificationPipeline(RoutedPipeline, TextClassificationPipeline):
    """`"text-classification"`"""


class RetexTokenClassificationPipeline(RoutedPipeline, TokenClassificationPipeline):
    """`"token-classification"`"""


class RetexImageClassificationPipeline(RoutedPipeline, ImageClassificationPipeline):
    """`"image-classification"`"""


class RetexZeroShotImageClassificationPipeline(RoutedPipeline, ZeroShotImageClassificationPipeline):
    """`"zero-shot-image-classification"`"""


class RetexFillMaskPipeline(RoutedPipeline, FillMaskPipeline):
    """`"fill-mask"`"""


class RetexFeatureExtractionPipeline(RoutedPipeline, FeatureExtractionPipeline):
    """`"feature-extraction"`"""


class RetexImageFeatureExtractionPipeline(RoutedPipeline, ImageFeatureExtractionPipeline):
    """`"image-feature-extraction"`"""


class RetexAudioClassificationPipeline(RoutedPipeline, AudioClassificationPipeline):
    """`"audio-classification"`"""

    def _sanitize_parameters(self, top_k: int | None = None, **params: Any) -> tuple[dict, dict, dict]:
        """transformers limits `top_k` to the number of labels here, which is not known before the task is."""
        *others, postprocess_params = super()._sanitize_parameters(top_k=1, **params)
        return *others, {**postprocess_params, "top_k": top_k}

    def postprocess(self, model_outputs: Any, top_k: int | None = None, **params: Any) -> Any:
        width = len(self.model.retex_config.labels[self._task_of([model_outputs])]["id2label"])
        return super().postprocess(model_outputs, top_k=min(top_k or width, width), **params)


class RetexTextGenerationPipeline(RoutedPipeline, TextGenerationPipeline):
    """`"text-generation"`, for encoder-decoder models too, whose own pipeline transformers has given up: their answer
    is what the decoder writes, greedily unless asked otherwise, and does not repeat the prompt."""

    def __init__(self, model: RetexModel, *args: Any, tokenizer: Any, **kwargs: Any) -> None:
        side = tokenizer.padding_side
        if model.config.is_encoder_decoder:
            self._default_generation_config = GenerationConfig(max_new_tokens=256)
        super().__init__(model, *args, tokenizer=tokenizer, **kwargs)
        if model.config.is_encoder_decoder:
            tokenizer.padding_side = side  # transformers has turned it to the left, as decoders need it

    def check_model_type(self, supported_models: Any) -> None:
        encoded = self.model.config.is_encoder_decoder
        super().check_model_type(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if encoded else supported_models)

    def postprocess(
        self, model_outputs: Any, return_type: ReturnType = ReturnType.FULL_TEXT, **params: Any
    ) -> list[dict[str, Any]]:
        if self.model.config.is_encoder_decoder:
            model_outputs = {**model_outputs, "input_ids": None}  # no prompt to cut off
            return_type = ReturnType.NEW_TEXT if return_type == ReturnType.FULL_TEXT else return_type
        return super().postprocess(model_outputs, return_type=return_type, **params)


@dataclass(frozen=True)
class PipelineChoice:
    """Makes our pipeline of a `RetexModel`, and transformers' own of any other model."""

    stock: type[Pipeline]
    routed: type[RoutedPipeline]

    def __call__(self, *args: Any, **kwargs: Any) -> Pipeline:
        model = kwargs["model"] if "model" in kwargs else args[0]
        _refuse_merged_by_name(model)
        return (self.routed if isinstance(model, RetexModel) else self.stock)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # `pipeline` asks the class which tokenizers and processors to load.
        if name == "stock":  # not set yet: looking further would recurse
            raise AttributeError(name)
        return getattr(self.stock, name)


def _refuse_merged_by_name(model: Any) -> None:
    """Refuse the merged model that transformers has loaded from an artifact: it would answer without recovery, and
    nobody would be told. Models that a `RetexModel` has given away are what was asked for."""
    name = getattr(model, "name_or_path", None)
    if not name or isinstance(model, RetexModel) or getattr(model, GIVEN_AWAY, False):
        return
    try:
        found = (Path(name) / CONFIG_NAME).is_file() or isinstance(try_to_load_from_cache(name, CONFIG_NAME), str)
    except (HFValidationError, OSError, ValueError):  # neither a path nor a Hub id
        return
    if found:
        raise InputError(
            f"{name} is a ReTeX artifact, of which transformers has loaded the merged model alone: give "
            "pipeline(model=RetexModel.from_pretrained(...)), or, if it is meant, its get_base_model()."
        )


ROUTED: dict[str, type[RoutedPipeline]] = {
    "audio-classification": RetexAudioClassificationPipeline,
    "feature-extraction": RetexFeatureExtractionPipeline,
    "fill-mask": RetexFillMaskPipeline,
    "image-classification": RetexImageClassificationPipeline,
    "image-feature-extraction": RetexImageFeatureExtractionPipeline,
    "text-classification": RetexTextClassificationPipeline,
    "text-generation": RetexTextGenerationPipeline,
    "token-classification": RetexTokenClassificationPipeline,
    "zero-shot-image-classification": RetexZeroShotImageClassificationPipeline,
}


def register_pipelines() -> None:
    """Let `transformers.pipeline` make these for a `RetexModel`; other models get what they always got.

    The registry's entries are changed in place: `register_pipeline` would warn that the tasks exist, and would have a
    pipeline's `save_pretrained` copy this file into the model's folder.
    """
    for task, routed in ROUTED.items():
        entry = PIPELINE_REGISTRY.supported_tasks[task]
        if not isinstance(entry["impl"], PipelineChoice):
            entry["impl"] = PipelineChoice(entry["impl"], routed)
