"""`transformers.pipeline` for a `RetexModel`: every row uses the labels of its own task, and the answer names the task.

transformers' pipelines read the labels of `model.config`, of which there is only one, and do not know the class. Those
here run transformers' own steps with a substitute for the model: in the forward step one that records the routing of
the call, afterwards one with the configuration of the row's task.

>>> from transformers import pipeline
>>> pipe = pipeline("text-classification", model=retex_model, tokenizer=tokenizer)  # doctest: +SKIP
>>> pipe(["what a film", "Is it far to the sea?"], batch_size=2)  # doctest: +SKIP
[{'task': 'reviews', 'label': 'positive', 'score': 0.98}, {'task': 'questions', 'label': 'distance', 'score': 0.91}]

A pipeline's own `task` is its kind; to have one task answer all inputs, pin it with `model.set_adapter(name)`. The
model must be given as an object: given its name, transformers would load the merged model alone, which is refused.

Importing this module, which the import of `RetexModel` does, changes transformers' registry of pipelines: see
`register_pipelines` and `unregister_pipelines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
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

# Key under which the rows' tasks pass through the pipeline, which splits lists along with the batch. Names instead of
# ids, because tasks may be added or deleted meanwhile.
TASK_KEY = "retex_task"
# Likewise, whether rows are out-of-distribution, if the routing abstains on them.
FAR_KEY = "retex_far"


class _Recorder:
    """A substitute for a model during one call that records the routing of its output."""

    def __init__(self, model: RetexModel) -> None:
        self.model = model
        self.routing: Routing | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self.model(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted(self.model.generate(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _noted(self, output: Any) -> Any:
        self.routing = output.routing
        return output


class RoutedPipeline(Pipeline):
    """The common base of our pipelines; the next class in the MRO is that of transformers."""

    model: RetexModel  # type: ignore[assignment]  # transformers declares a class of its own, but runs any

    def _in_place_of_model(self, model: Any) -> Any:
        """Return transformers' methods of this pipeline with another model, on a copy because calls may overlap."""
        view = copy(self)
        view.model = model
        return super(RoutedPipeline, view)

    def check_model_type(self, supported_models: Any) -> None:
        """Check the wrapped model's class instead of the wrapper's."""
        self._in_place_of_model(self.model.get_base_model()).check_model_type(supported_models)

    def _forward(self, *args: Any, **params: Any) -> Any:
        recorder = _Recorder(self.model)
        outputs = self._in_place_of_model(recorder)._forward(*args, **params)
        if recorder.routing is not None:
            outputs[TASK_KEY] = recorder.routing.tasks
            if recorder.routing.abstained is not None:
                outputs[FAR_KEY] = recorder.routing.abstained.tolist()
        elif self.model.retex_config.labels:
            raise TaskError("Without recovery the head to use is not known: leave disable_adapter() for a pipeline.")
        return outputs

    def postprocess(self, model_outputs: Any, *args: Any, **params: Any) -> Any:
        parts = model_outputs if isinstance(model_outputs, list) else [model_outputs]
        task = self._task_of(parts)
        fields = {} if task is None else {"task": task, **self._abstained_of(parts)}
        config = self.model.retex_config
        model: RetexModel | SimpleNamespace = self.model
        if task is not None and task not in config.tasks:
            raise TaskError(f"Task {task!r} was deleted before its answer could be read: give the input again.")
        labels = None if task is None else config.labels.get(task)
        if labels is not None:
            cut = [_without_padding(part, len(labels["id2label"])) for part in parts]
            model_outputs = cut if isinstance(model_outputs, list) else cut[0]
            model = SimpleNamespace(config=self.model.config)
            library_of(self.model.get_base_model()).set_labels(model, labels)
        answer = self._in_place_of_model(model).postprocess(model_outputs, *args, **params)
        return _add_to(answer, fields) if fields else answer

    def _abstained_of(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
        """Return whether any part of an input is out-of-distribution; empty if the routing does not abstain."""
        found = [part[FAR_KEY] for part in parts if FAR_KEY in part]
        return {"far": any(far if isinstance(far, bool) else far[0] for far in found)} if found else {}

    def _task_of(self, parts: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the task of one input, which may have been split into several parts."""
        # A row of a split batch has a name, an unsplit batch of one has a list of one.
        names = (part[TASK_KEY] for part in parts if TASK_KEY in part)
        tasks = {name if isinstance(name, str) else name[0] for name in names}
        if len(tasks) > 1:
            raise InputError(
                f"The parts of one long text were given to different tasks ({sorted(tasks)}): pin one with set_adapter."
            )
        return next(iter(tasks), None)


def _without_padding(outputs: dict[str, Any], width: int) -> dict[str, Any]:
    """Return the outputs of a row with only the logits of its own head."""
    return type(outputs)({**outputs, "logits": outputs["logits"][..., :width]})


def _add_to(answer: Any, fields: Mapping[str, Any]) -> Any:
    """Add the task, and whether the input is out-of-distribution, to an answer; leave numeric answers unchanged."""
    if isinstance(answer, list):
        return [_add_to(part, fields) for part in answer] if answer and isinstance(answer[0], dict | list) else answer
    return {**fields, **answer} if isinstance(answer, dict) else answer


class RetexTextClassificationPipeline(RoutedPipeline, TextClassificationPipeline):
    """The `"text-classification"` pipeline."""


# transformers' own `postprocess` has another name for the outputs there.
class RetexTokenClassificationPipeline(RoutedPipeline, TokenClassificationPipeline):  # type: ignore[misc]
    """The `"token-classification"` pipeline."""


class RetexImageClassificationPipeline(RoutedPipeline, ImageClassificationPipeline):
    """The `"image-classification"` pipeline."""


class RetexZeroShotImageClassificationPipeline(RoutedPipeline, ZeroShotImageClassificationPipeline):
    """The `"zero-shot-image-classification"` pipeline."""


class RetexFillMaskPipeline(RoutedPipeline, FillMaskPipeline):
    """The `"fill-mask"` pipeline."""


class RetexFeatureExtractionPipeline(RoutedPipeline, FeatureExtractionPipeline):
    """The `"feature-extraction"` pipeline."""


class RetexImageFeatureExtractionPipeline(RoutedPipeline, ImageFeatureExtractionPipeline):
    """The `"image-feature-extraction"` pipeline."""


class RetexAudioClassificationPipeline(RoutedPipeline, AudioClassificationPipeline):
    """The `"audio-classification"` pipeline."""

    def _sanitize_parameters(
        self, top_k: int | None = None, function_to_apply: str | None = None, **params: Any
    ) -> tuple[dict, dict, dict]:
        """Defer `top_k`, which transformers limits to the number of labels before the task is known."""
        *others, postprocess_params = super()._sanitize_parameters(1, function_to_apply, **params)
        return *others, {**postprocess_params, "top_k": top_k}

    def postprocess(  # type: ignore[override]  # transformers annotates every parameter of a step as a dict
        self, model_outputs: Any, top_k: int | None = None, **params: Any
    ) -> Any:
        task = self._task_of([model_outputs])
        labels = None if task is None else self.model.retex_config.labels.get(task)
        width = self.model.config.num_labels if labels is None else len(labels["id2label"])
        return super().postprocess(model_outputs, top_k=min(top_k or width, width), **params)


class RetexTextGenerationPipeline(RoutedPipeline, TextGenerationPipeline):
    """The `"text-generation"` pipeline, also for encoder-decoder models, whose own pipeline transformers has removed.

    Their answer is the decoder's output, greedy by default, without the prompt.
    """

    def __init__(self, model: RetexModel, *args: Any, tokenizer: Any, **kwargs: Any) -> None:
        side = tokenizer.padding_side
        if model.config.is_encoder_decoder:
            self._default_generation_config = GenerationConfig(max_new_tokens=256)
        super().__init__(model, *args, tokenizer=tokenizer, **kwargs)
        if model.config.is_encoder_decoder:
            tokenizer.padding_side = side  # transformers sets it to the left, as decoders need

    def check_model_type(self, supported_models: Any) -> None:
        encoded = self.model.config.is_encoder_decoder
        super().check_model_type(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if encoded else supported_models)

    def postprocess(  # type: ignore[override]  # transformers annotates every parameter of a step as a dict
        self, model_outputs: Any, return_type: ReturnType = ReturnType.FULL_TEXT, **params: Any
    ) -> list[dict[str, Any]]:
        if self.model.config.is_encoder_decoder:
            model_outputs = {**model_outputs, "input_ids": None}  # no prompt to remove
            return_type = ReturnType.NEW_TEXT if return_type == ReturnType.FULL_TEXT else return_type
        return super().postprocess(model_outputs, return_type=return_type, **params)


@dataclass(frozen=True)
class PipelineChoice:
    """A factory that makes our pipeline for a `RetexModel`, and transformers' own for any other model.

    `registered` is transformers' own entry: a class, or from version 5.23 on where to import it from.
    """

    stock: type[Pipeline]
    routed: type[RoutedPipeline]
    registered: type[Pipeline] | str

    def __call__(self, *args: Any, **kwargs: Any) -> Pipeline:
        model = kwargs["model"] if "model" in kwargs else args[0]
        _refuse_merged_by_name(model)
        return (self.routed if isinstance(model, RetexModel) else self.stock)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # `pipeline` asks the class which tokenizers and processors to load.
        if name == "stock":  # not set yet: delegating would recurse
            raise AttributeError(name)
        return getattr(self.stock, name)


def _class_of(registered: type[Pipeline] | str) -> type[Pipeline]:
    """Return the class of an entry of transformers' registry."""
    if not isinstance(registered, str):
        return registered
    module, _, name = registered.rpartition(".")
    return getattr(import_module(module), name)


def _refuse_merged_by_name(model: Any) -> None:
    """Refuse a merged model that transformers loaded from an artifact: it would silently answer without recovery.

    Models obtained from a `RetexModel` are accepted.
    """
    name = getattr(model, "name_or_path", None)
    if not name or isinstance(model, RetexModel) or getattr(model, GIVEN_AWAY, False):
        return
    try:
        found = (Path(name) / CONFIG_NAME).is_file() or isinstance(try_to_load_from_cache(name, CONFIG_NAME), str)
    except (HFValidationError, OSError, ValueError):  # neither a path nor a Hub id
        return
    if found:
        raise InputError(
            f"{name} is a ReTeX artifact, from which transformers has loaded only the merged model: give "
            "pipeline(model=RetexModel.from_pretrained(...)), or, to run the merged model, its get_base_model()."
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
    """Make `transformers.pipeline` use these pipelines for a `RetexModel`; other models are unaffected.

    Importing `RetexModel` does this once; making or loading a model never does. `unregister_pipelines` undoes it.

    The registry's entries are changed in place: `register_pipeline` would warn that the tasks exist, and would make a
    pipeline's `save_pretrained` copy this file into the model's folder.
    """
    for task, routed in ROUTED.items():
        entry = PIPELINE_REGISTRY.supported_tasks[task]
        registered = entry["impl"]
        if not isinstance(registered, PipelineChoice):
            entry["impl"] = PipelineChoice(_class_of(registered), routed, registered)


def unregister_pipelines() -> None:
    """Restore the entries of transformers' registry that `register_pipelines` changed; leave those changed since."""
    for task in ROUTED:
        entry = PIPELINE_REGISTRY.supported_tasks[task]
        if isinstance(entry["impl"], PipelineChoice):
            entry["impl"] = entry["impl"].registered


register_pipelines()
