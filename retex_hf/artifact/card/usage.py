"""The use of a model, in the Hub's terms, and sample code that runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...backends import library_of, openclip, plain_modules, timm_models
from ...config import RetexConfig

CLASSIFIER, GENERATOR, DUAL, FEATURES = "classifier", "generator", "dual", "features"
TEXT, IMAGE, OTHER = "text", "image", "other"
TEXT_TAGS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
}
FEATURES_TAG = "image-feature-extraction"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Use:
    """A model's kind of answer (`kind`), its input (`reads`), and the Hub's name for that, if there is one."""

    kind: str
    reads: str
    pipeline_tag: str | None


def use_of(model: nn.Module) -> Use:
    """Return the use of a wrapped model."""
    library = library_of(model)
    if library is openclip or library.is_dual_encoder(model):
        images = library is openclip or "pixel_values" in library.main_inputs(model)
        return Use(DUAL, IMAGE, "zero-shot-image-classification") if images else Use(FEATURES, OTHER, None)
    if library is timm_models:
        classifies = library.num_labels(model) is not None
        return Use(CLASSIFIER, IMAGE, "image-classification") if classifies else Use(FEATURES, IMAGE, FEATURES_TAG)
    if not isinstance(model, PreTrainedModel):
        return Use(FEATURES, OTHER, None)
    name = type(model).__name__
    if model.main_input_name == "pixel_values":
        if name.endswith("ForImageClassification"):
            return Use(CLASSIFIER, IMAGE, "image-classification")
        return Use(FEATURES, IMAGE, FEATURES_TAG)
    if model.main_input_name != "input_ids":
        return Use(FEATURES, OTHER, "automatic-speech-recognition" if model.can_generate() else None)
    for ending, tag in TEXT_TAGS.items():
        if name.endswith(ending):
            return Use(CLASSIFIER if tag == "text-classification" else FEATURES, TEXT, tag)
    if model.can_generate():
        # Also for encoder-decoders: the Hub no longer lists models under text2text-generation, and transformers 5 has
        # no such pipeline. Whether experts summarise or translate, which have tags of their own, is not known here.
        return Use(GENERATOR, TEXT, "text-generation")
    return Use(FEATURES, TEXT, "feature-extraction")


def snippet(model: nn.Module, config: RetexConfig, folder: Path, name: str, identifies: bool) -> str | None:
    """Return Python code that loads the model as `name` and runs it; None for models that read neither text nor images.

    `folder` is where the artifact is written: the code uses a tokenizer or processor if one is there.
    """
    use = use_of(model)
    if library_of(model) is plain_modules:
        return _own_module(model, name)
    if use.reads == OTHER:
        return None
    imports, inputs = _inputs(model, use, folder, literal(name))
    task = f"task={literal(config.tasks[0])}"
    asked = "" if identifies else f", {task}"
    if use.kind == CLASSIFIER and config.labels:
        lines = [f"print(model.predict(**inputs{asked}))  # for each input: task, label, score"]
        if identifies:
            lines.append(f"print(model.predict(**inputs, {task}))  # the task is known")
    elif use.kind == GENERATOR:
        lines = [f"output = model.generate(**inputs, max_new_tokens=20{asked})"]
        lines += ["print(model.identify(**inputs).tasks)"] if identifies else []
        has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
        lines.append(
            "print(tokenizer.batch_decode(output, skip_special_tokens=True))" if has_tokenizer else "print(output)"
        )
    else:
        call = "model.encode_image" if library_of(model) is openclip else "model"
        imports = [*imports, "import torch"] if "import torch" not in imports else imports
        lines = ["with torch.no_grad():", f"    output = {call}(**inputs{asked})"]
        if library_of(model) is openclip:
            lines += ["print(model.identify(**inputs).tasks)"] if identifies else []
            lines.append("print(output.shape)  # features of the images")
        elif library_of(model) is timm_models:
            lines.append("print(output.shape)")
        else:
            lines += ["print(output.routing.tasks)"] if identifies else []
            lines.append("print({name: value.shape for name, value in output.items() if torch.is_tensor(value)})")
    # Third-party imports, a blank line, then ours, as import sorters do.
    plain = sorted(line for line in imports if line.startswith("import "))
    others = sorted(line for line in imports if line.startswith("from "))
    head = [*plain, *others, *([""] if imports else []), "from retex_hf import RetexModel", ""]
    return "\n".join([*head, f"model = RetexModel.from_pretrained({literal(name)})", *inputs, *lines])


def _own_module(model: nn.Module, name: str) -> str:
    """Return code that loads a module of a user-defined class; its inputs are known only to its author."""
    maker = f"lambda: {type(model).__name__}(...)"
    return "\n".join(
        [
            "from retex_hf import RetexModel",
            "",
            f"# {type(model).__name__}: the class of the experts, with the arguments that they were made with",
            f"model = RetexModel.from_pretrained({literal(name)}, make_model={maker})",
        ]
    )


def _inputs(model: nn.Module, use: Use, folder: Path, name: str) -> tuple[list[str], list[str]]:
    """Return the imports, and the lines that define `inputs`."""
    if library_of(model) is openclip:
        imports = [
            "import torch",
            "from PIL import Image",
            "from open_clip.transform import PreprocessCfg, image_transform_v2",
        ]
        return imports, [
            "settings = PreprocessCfg(**model.get_base_model().visual.preprocess_cfg)",
            "preprocess = image_transform_v2(settings, is_train=False)",
            'images = [Image.new("RGB", (224, 224))]  # yours: Image.open("photo.jpg")',
            'inputs = {"image": torch.stack([preprocess(image) for image in images])}',
        ]
    if library_of(model) is timm_models:
        size = getattr(model, timm_models.CONFIG_ATTRIBUTE)["pretrained_cfg"].get("input_size")
        known = isinstance(size, list) and all(type(number) is int for number in size)
        shape = ", ".join(map(str, (2, *(size if known else (3, 224, 224)))))
        return ["import torch"], [f'inputs = {{"x": torch.rand({shape})}}  # preprocessed as for the experts']
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    has_processor = any((folder / file).is_file() for file in PROCESSOR_FILES)
    if use.reads == TEXT:
        return _text_inputs(model, name) if has_tokenizer else _bare_text()
    if not has_processor:
        return _bare_images(model)
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    imports = ["from PIL import Image"]
    lines = [f'images = [Image.new("{mode}", (224, 224))]  # yours: Image.open("photo.jpg")']
    if use.kind != DUAL or not has_tokenizer:
        imports.append("from transformers import AutoImageProcessor")
        lines.append(f"processor = AutoImageProcessor.from_pretrained({name})")
        return imports, [*lines, 'inputs = processor(images, return_tensors="pt")']
    imports.append("from transformers import AutoImageProcessor, AutoTokenizer")
    return imports, [
        *lines,
        'classes = ["a photo of a cat", "a photo of a dog"]',
        f"processor = AutoImageProcessor.from_pretrained({name})",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        'inputs = {**processor(images, return_tensors="pt"), **tokenizer(classes, padding=True, return_tensors="pt")}',
    ]


def _text_inputs(model: nn.Module, name: str) -> tuple[list[str], list[str]]:
    in_place = isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder
    side = ', padding_side="left"' if in_place else ""
    lines = [f"tokenizer = AutoTokenizer.from_pretrained({name}{side})"]
    if in_place:
        lines.append("tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token")
    lines.append('texts = ["A first text.", "And a second one."]')
    lines.append('inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")')
    return ["from transformers import AutoTokenizer"], lines


def _bare_text() -> tuple[list[str], list[str]]:
    ids = "torch.tensor([[1, 2, 3], [3, 2, 1]])"
    return ["import torch"], [f'inputs = {{"input_ids": {ids}}}  # from the tokenizer of the experts']


def _bare_images(model: nn.Module) -> tuple[list[str], list[str]]:
    config = getattr(model.config, "vision_config", model.config)
    size: Any = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = f"2, {getattr(config, 'num_channels', 3)}, {height}, {width}"
    return ["import torch"], [f'inputs = {{"pixel_values": torch.rand({shape})}}  # preprocessed as for the experts']


def literal(text: str) -> str:
    """Return a string as Python code that cannot close the code block around it."""
    return json.dumps(text).replace("`", "\\x60").replace("<", "\\x3c")
