"""Backend for transformers: loading, saving, names in files, heads and labels, and the source of features."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils.generic import is_timm_config_dict

from ..checkpoints.adapters import ADAPTER_CONFIG, AdapterSource
from ..checkpoints.folder_files import FolderFiles, private_copy
from ..checkpoints.gguf_files import GgufSource
from ..checkpoints.inventory import Inventory, computed_names
from ..checkpoints.sources import MemorySource, Source, TensorInfo
from ..errors import CheckpointError, RetexError, brief, first_line, shorten
from . import sentence_modules
from .config_limits import check_counts, check_weights, limited_pieces
from .containment import contained
from .input_forms import TOKEN_ID, InputForm, transformers_form
from .not_supported import describe as describe
from .untrusted_config import check_options, vet_generation_config, vet_transformers_config

NAME = "transformers"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS_STEM, SHARDED = "model", True
# `forward` returns named fields, or with `return_dict=False` a tuple of them.
NAMES_FIELDS = True
# Classes whose output layer belongs to the task, not to the language or the image.
TASK_CLASS = re.compile(r"For(\w*Classification\w*|QuestionAnswering|MultipleChoice|XVector|NextSentencePrediction)$")
# Heads of the few such classes that do not nest their backbone under `base_model_prefix`.
HEAD_MODULES = ("classifier", "score", "qa_outputs", "classification_head")
# Counts that configurations read although they are not among their fields.
OTHER_COUNTS = {"num_labels", "num_classes", "num_experts", "first_k_dense_replace"}
# Options of the caller for which transformers may download something.
MAY_FETCH = {
    "attn_implementation", "experts_implementation", "quantization_config", "use_kernels", "kernel_config",
}  # fmt: skip
# Names of the inputs that carry the content of a row.
INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "input_values",
          "past_values", "flattened_patches", "bbox")  # fmt: skip
# Names of the similarities that a dual encoder returns, and of its methods that encode anything but text.
SIMILARITY = re.compile(r"^logits_(per_\w+|\w+_text)$")
ENCODERS = tuple(
    f"get_{kind}_{what}" for kind in ("image", "video", "audio", "speech") for what in ("features", "embeds")
)
# Configuration fields that no output in evaluation depends on, or that may differ with heads and vocabularies.
LABEL_MAPS = ("id2label", "label2id", "task_specific_params", "quantization_config", "auto_map")
NOT_COMPUTED = re.compile(
    r"_.*|architectures|transformers_version|(torch_)?dtype|name_or_path|num_labels|num_classes|label_names|problem_type|"
    r"finetuning_task|tokenizer_class|use_cache|return_dict|output_\w+|\w*drop(out|_rate|_path|_prob|layer|_rates?)?\w*|"
    r"\w*layerdrop|initializer_\w+|init_\w+|\w*init_(std|scale|range|value|method)\w*|gradient_checkpointing|\w*vocab_size|"
    r"(attn|experts)_implementation|pruned_heads|chunk_size_feed_forward|max_position_embeddings|n_positions|n_ctx|"
    r"model_max_length|max_length|min_length|mask_(time|feature)_\w+|apply_spec_augment|\w*loss\w*|\w*aux\w*|label_smoothing|"
    r"keys_to_ignore_at_inference|pretrained_cfg|tie_word_embeddings|reference_compile|pad_to_multiple_of|pretraining_tp"
)
logger = logging.getLogger(__name__)
# Constants that earlier versions of transformers saved and that models now compute.
CONSTANTS = re.compile(r"(^|\.)(position_ids|token_type_ids|relative_position_index|masked_bias|inv_freq)$")
# Attribute by which transformers marks what has its values already.
INITIALISED = "_is_hf_initialized"


def owns(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel)


def architecture(folder: Path) -> str:
    """Return the class name that a folder's `config.json` asks for."""
    return _architecture(FolderFiles(folder).json(CONFIG))


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModel"


@dataclasses.dataclass(frozen=True)
class _Description:
    """Vetted description of a folder's model: nothing in it makes transformers open or download anything.

    `cls` is None for `AutoModel`, with which the configuration decides.
    """

    path: Path
    name: str
    cls: type[PreTrainedModel] | None
    values: dict[str, Any]
    generation: dict[str, Any] | None

    @classmethod
    def read(cls, files: FolderFiles, packed: bool = False) -> _Description:
        """Read the files; `packed`: the weights are quantised on disk and dequantised when they are read."""
        path, values = files.folder / CONFIG, files.json(CONFIG)
        if packed:
            values.pop("quantization_config", None)
        if files.has(ADAPTER_CONFIG):
            raise CheckpointError(
                f"{files.folder} holds a model and an adapter ({ADAPTER_CONFIG}), which would change it."
            )
        name = _architecture(values)
        model_class = _model_class(name, path)
        config_class = getattr(model_class, "config_class", None) or _config_class(values, path)
        generation = None
        if files.has(GENERATION_CONFIG):
            generation = vet_generation_config(files.json(GENERATION_CONFIG), files.folder / GENERATION_CONFIG)
        return cls(path, name, model_class, vet_transformers_config(values, path, config_class), generation)

    @property
    def config_class(self) -> type[PreTrainedConfig] | None:
        return None if self.cls is None else self.cls.config_class

    def config(self) -> PreTrainedConfig:
        """Create the configuration."""
        config_class = self.config_class or AutoConfig
        try:
            with contained(self.path), private_copy({CONFIG: self.values}) as folder:
                config = config_class.from_pretrained(folder)
        except RetexError:
            raise
        except Exception as error:  # an untrusted file may make transformers raise anything
            raise CheckpointError(f"{self.path} cannot be read: {first_line(error)}") from error
        config.name_or_path = str(self.path.parent)
        return config

    def generation_config(self) -> GenerationConfig:
        """Create the generation settings from their own file, or from the old place for them in the configuration."""
        own: dict[str, Any] = {}
        name, values = GENERATION_CONFIG, self.generation
        if values is None:
            name, values = CONFIG, self.values
            own = {"config_file_name": CONFIG, "_from_model_config": True}
        path = self.path.with_name(name)
        try:
            with contained(path), private_copy({name: values}) as folder:
                return GenerationConfig.from_pretrained(folder, **own)
        except RetexError:
            raise
        except Exception as error:  # an untrusted file may make transformers raise anything
            raise CheckpointError(f"{path} holds incompatible settings: {first_line(error)}") from error


def _config_class(values: dict[str, Any], path: Path) -> type[PreTrainedConfig]:
    """Return the class of a configuration that names no architecture."""
    kind = "timm_wrapper" if is_timm_config_dict(values) else values.get("model_type")
    # Checked here, because transformers would guess the type from the name of the folder.
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(f"{path} asks for the model type {brief(kind)}, which transformers does not have.")
    return CONFIG_MAPPING[kind]


def load(
    folder: Path,
    source: Source,
    *,
    files: FolderFiles | None = None,
    copy: bool = True,
    strict: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a folder's weights (`source`) into the class it was saved from.

    Args:
        folder: Folder with the configuration.
        source: The weights. transformers gets tensors, never a file name.
        files: The files beside the weights; default: those on disk.
        copy: Copy the tensors, so that writing to the model does not write to the source.
        strict: Refuse incomplete weights.
        kwargs: Passed on to transformers' own `from_pretrained`.
    """
    tensors = {name: source.read(name).clone() if copy else source.read(name) for name in source.infos}
    return _load(_Description.read(files or FolderFiles(folder), source.packed), tensors, strict, kwargs)


def load_on_meta(folder: Path, source: Source) -> PreTrainedModel:
    """Create the model that `load` returns, without values: names, shapes, dtypes, ties and configuration."""
    tensors = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in source.infos.items()}
    return _load(_Description.read(FolderFiles(folder), source.packed), tensors, False, {"device_map": "meta"})


def _load(
    description: _Description, tensors: dict[str, Tensor], strict: bool, kwargs: dict[str, Any]
) -> PreTrainedModel:
    check_options(kwargs)
    folder, name, config = description.path.parent, description.name, description.config()
    options = {**kwargs, "trust_remote_code": False, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with contained(description.path, network=not MAY_FETCH.isdisjoint(kwargs)):
            cls = description.cls
            if cls is None:
                with torch.device("meta"):
                    cls = type(AutoModel.from_config(deepcopy(config), trust_remote_code=False))
            loaded: Any = cls.from_pretrained(None, config=config, state_dict=tensors, **options)
    except (RetexError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an untrusted file may make transformers raise anything; the cause stays attached
        raise CheckpointError(f"{folder} does not load as a {name}: {first_line(error)}") from error
    model, report = loaded  # a pair, because of `output_loading_info`
    for key, shape, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{folder}: tensor {key!r} has shape {tuple(shape)}, but config.json asks for {tuple(expected)}."
        )
    missing = sorted(report["missing_keys"])
    if strict and missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensor(s) of {name}: {shorten(missing)}.")
    if model.can_generate() and kwargs.get("generation_config") is None:
        model.generation_config = description.generation_config()
    model.name_or_path = model.config.name_or_path = str(folder)
    return model.eval()


def plan(folder: Path, source: Source, *, files: FolderFiles | None = None) -> PreTrainedModel:
    """Create a folder's model on the meta device, after comparing its weights (`source`) with its configuration.

    No weight is read, and no module is created that the weights could not fill.
    """
    description = _Description.read(files or FolderFiles(folder))
    path, name, cls = description.path, description.name, description.cls
    _check_counts(description, source)
    config = description.config()
    try:
        with (
            contained(path),
            limited_pieces(path, source),
            torch.device("meta"),
            init.meta_device_safe_creation_ops(),
            init.no_init_weights(),
        ):
            model = AutoModel.from_config(config, trust_remote_code=False) if cls is None else cls(config)
        model.tie_weights()
        aligned, unexpected = align(model, source)
    except RetexError:
        raise
    except Exception as error:  # an untrusted file may make transformers raise anything
        raise CheckpointError(f"{path} does not describe a {name}: {first_line(error)}") from error
    if unexpected:
        raise CheckpointError(
            f"{source.label} holds {shorten(unexpected)}, which the {name} that {path.name} asks for does not have."
        )
    check_weights(path, model, source, {key: info for key, (info, _) in aligned.items()})
    if model.can_generate():
        description.generation_config()  # refuse invalid settings before anything is loaded
    return model.eval()


@contextmanager
def limited(folder: Path, source: Source) -> Iterator[None]:
    """Within this context, create a folder's model only if its weights (`source`) could fill it."""
    description = _Description.read(FolderFiles(folder), source.packed)
    _check_counts(description, source)
    with limited_pieces(description.path, source):
        yield


def _check_counts(description: _Description, source: Source) -> None:
    config_class, values = description.config_class, description.values
    check_counts(description.path, values if config_class is None else _understood(config_class, values), source)


def _understood(config_class: type[PreTrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that its class reads.

    Users add other fields (`num_train_samples`), which transformers keeps.
    """
    known = (
        {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys() | OTHER_COUNTS
    )
    return {key: value for key, value in values.items() if key in known or isinstance(value, (dict, list))}


def _model_class(name: str, asked_by: Path | str) -> type[PreTrainedModel] | None:
    """Return a model class of transformers by its name; None for `AutoModel`."""
    if name == AutoModel.__name__:
        return None
    # Filter names before `getattr`, which would import any module of transformers with that name.
    cls = getattr(transformers, name, None) if name.isidentifier() and not name.islower() else None
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and not name.endswith("PreTrainedModel")
    if cls is None or not is_model or cls.config_class is None:
        raise CheckpointError(f"{asked_by} asks for {brief(name)}, which is not a model class of transformers.")
    return cls


def load_config(source: Source) -> PreTrainedConfig:
    """Return the configuration in a source's folder."""
    assert source.folder is not None
    path, values = source.folder / CONFIG, FolderFiles(source.folder).json(CONFIG)
    if source.packed:
        values.pop("quantization_config", None)
    vetted = vet_transformers_config(values, path, _config_class(values, path))
    return _Description(path, "AutoModel", None, vetted, None).config()


def vetted_config(folder: Path, files: FolderFiles | None = None) -> dict[str, Any]:
    """Return the vetted configuration of a folder's model."""
    return _Description.read(files or FolderFiles(folder)).values


def from_config(
    architecture: str, config: PreTrainedConfig, dtype: torch.dtype | None, on_meta: bool
) -> PreTrainedModel:
    """Create a model of a class, without trained weights: an adapter's class may have a head that its base lacks."""
    cls = _model_class(architecture, "the adapter")
    if cls is None:
        raise CheckpointError(
            f"the adapter asks for {brief(architecture)}, which is not a model class of transformers."
        )
    with torch.device("meta" if on_meta else "cpu"), contained(Path(config.name_or_path or "the adapter")):
        model = cls._from_config(deepcopy(config), dtype=dtype or torch.float32)
    return model.eval()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model in place, as `from_pretrained(dtype=dtype)` does.

    Constants that the model computes keep their dtype, and so does what its class keeps in float32.
    """
    kept = [re.escape(name).replace(r"\*", r"[^.]+") for name in model._get_dtype_plan(dtype)]
    pattern = re.compile(rf"(^|\.)({'|'.join(kept)})(\.|$)") if kept else None
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            own = torch.float32 if pattern is not None and pattern.search(name) else dtype
            tensor.data = tensor.data.to(own)
    model.config.dtype = dtype


def save(model: PreTrainedModel, folder: Path, max_shard_size: str | int) -> None:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    sentence_modules.write(model, folder)


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write everything that `save` writes except the weights."""
    # In a separate folder, because transformers deletes shards of any other save.
    with TemporaryDirectory(dir=folder) as own:
        model.save_pretrained(own, state_dict={})
        for file in Path(own).iterdir():
            file.replace(folder / file.name)
    sentence_modules.write(model, folder)


def saved_names(model: PreTrainedModel) -> list[str]:
    """Return the model's names of the tensors that `save` writes: tied tensors once, computed constants not at all."""
    ignored = computed_names(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    return list(remove_tied_weights_from_state_dict(tensors, model))


def file_form(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the model's tensors to the names and shapes used in files (for example, one tensor per MoE expert)."""
    return revert_weight_conversion(model, tensors)


def index_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """Return the metadata for the index of sharded weights."""
    return {"total_parameters": model.num_parameters()}


def head_names(model: PreTrainedModel, names: list[str]) -> set[str]:
    """Return the parameters of the head of a classification or question-answering class; empty for other classes."""
    if not TASK_CLASS.search(type(model).__name__):
        return set()
    if model.base_model is not model:
        return {name for name in names if not name.startswith(model.base_model_prefix + ".")}
    return {name for name in names if name.startswith(tuple(f"{module}." for module in HEAD_MODULES))}


def align(
    model: PreTrainedModel, source: Source
) -> tuple[dict[str, tuple[TensorInfo, Callable[[], Tensor]]], list[str]]:
    """Map a source's tensors to the model's names as `from_pretrained` would (prefixes, legacy names, fused experts).

    Returns `{model name: (info, read)}` and the source's names that the model does not have. Conversions are planned on
    meta tensors, so no tensor is read before it is asked for.
    """
    if isinstance(source, GgufSource):
        source = source.for_model(model)
    known = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    aligned: dict[str, tuple[TensorInfo, Callable[[], Tensor]]] = {}
    fused: dict[str, list[tuple[str, str]]] = {}
    unexpected = []
    for key in sorted(source.infos, key=dot_natural_key):
        # A module in memory has the model's own names already; a file may hold the original ones.
        if isinstance(source, MemorySource) and key in known:
            name, pattern = key, None
        else:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            if name not in known:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            unexpected.append(key)
        elif pattern is None:
            aligned[name] = (source.infos[key], partial(source.read, key))
        else:
            fused.setdefault(name, []).append((key, pattern))

    for first_name, parts in fused.items():
        convert = partial(_convert, model, by_pattern[parts[0][1]], first_name, parts)
        try:
            planned = convert(
                lambda key: torch.empty(source.infos[key].shape, dtype=source.infos[key].dtype, device="meta")
            )
        except Exception as error:  # conversions do not check their inputs
            raise CheckpointError(
                f"{source.label}: the {len(parts)} tensors that make up {first_name!r} do not fit each other: "
                f"{first_line(error)}"
            ) from error
        for name, tensor in planned.items():
            info = TensorInfo(tuple(tensor.shape), tensor.dtype)
            if info.shape != known[name].shape:
                raise CheckpointError(
                    f"{source.label}: the {len(parts)} tensors that make up {name!r} have shape {info.shape}, "
                    f"but the model has {tuple(known[name].shape)}."
                )
            aligned[name] = (info, partial(_converted, name, convert, source.read))
    for name in computed_names(model) & aligned.keys():
        _check_constant(model, name, source.label, aligned.pop(name)[1]())
    unexpected = [key for key in unexpected if key not in source.optional]
    ignored = [CONSTANTS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    return aligned, [key for key in unexpected if not any(pattern.search(key) for pattern in ignored)]


def _check_constant(model: PreTrainedModel, name: str, label: str, found: Tensor) -> None:
    """Refuse a constant whose numbers differ from those that the class computes when it is loaded."""
    path, _, own = name.rpartition(".")
    module = deepcopy(model.get_submodule(path)).to_empty(device="cpu")
    for tensor in (module, *module.parameters()):
        setattr(tensor, INITIALISED, False)
    with torch.no_grad():
        model._init_weights(module)
    expected = getattr(module, own).detach()
    same = found.shape == expected.shape and torch.allclose(found.float().cpu(), expected.float(), atol=1e-2)
    if not same:
        raise CheckpointError(
            f"{label}: {name!r} is computed by {type(model).__name__} and stored in no file, but differs here."
        )


def _convert(
    model: PreTrainedModel,
    converter: WeightConverter,
    first_name: str,
    parts: list[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    converter = deepcopy(converter)
    for key, pattern in parts:
        # Only futures are annotated, but functions are called too.
        converter.add_tensor(first_name, key, pattern, partial(read, key))  # type: ignore[arg-type]
    converted = converter.convert(first_name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _converted(
    name: str,
    convert: Callable[[Callable[[str], Tensor]], dict[str, Tensor]],
    read: Callable[[str], Tensor],
) -> Tensor:
    return convert(read)[name]


def labels_of(source: Source) -> dict[str, Any]:
    """Return the label names and the problem type in a checkpoint's config, as far as they are there."""
    if source.folder is not None:
        config = FolderFiles(source.folder).json(CONFIG)
    elif isinstance(source.model, PreTrainedModel):
        config = source.model.config.to_dict()
    else:
        return {}
    labels = {key: config[key] for key in ("id2label", "problem_type") if config.get(key) is not None}
    if config.get("label_names") is not None:  # how transformers writes the labels of timm's models
        labels["id2label"] = dict(enumerate(config["label_names"]))
    if "id2label" in labels:
        labels["id2label"] = {str(key): str(value) for key, value in labels["id2label"].items()}
    return labels


def num_labels(model: PreTrainedModel) -> int | None:
    """Return the output width of the model's head, or None for classes without one."""
    return getattr(model, "num_labels", None) if TASK_CLASS.search(type(model).__name__) else None


def set_labels(model: PreTrainedModel, labels: dict[str, Any]) -> None:
    """Set the label names and the problem type of a task on a model, where loss functions read them."""
    model.config = copy(model.config)
    model.config.id2label = {int(key): value for key, value in labels["id2label"].items()}
    model.config.label2id = {value: key for key, value in model.config.id2label.items()}
    model.config.problem_type = labels.get("problem_type")
    model.num_labels = len(model.config.id2label)  # type: ignore[assignment]  # torch's says tensors and modules only


def vocabulary_names(model: PreTrainedModel, inventory: Inventory) -> list[str]:
    """Return the names of tensors with a row per token: input embeddings, output layer and its bias, tied ones once."""
    try:
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
    except NotImplementedError:  # image and audio models have no such methods
        return []
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    kinds = (nn.Embedding, nn.Linear)
    own = {id(tensor) for module in modules if isinstance(module, kinds) for tensor in module.parameters()}
    tensors = model.state_dict(keep_vars=True)
    return [name for name in inventory.shapes if id(tensors[name]) in own and len(tensors[name]) == size]


def resize_vocabulary(model: PreTrainedModel, size: int, widest: int, base: Source) -> None:
    """Set a model's vocabulary size to that of its tensors; reset special tokens beyond it to those of the base.

    `widest` is the largest vocabulary of a task. Numbers beyond it belong to no task (they are defaults of a
    configuration with a smaller vocabulary), and stay.
    """
    config = _config_of(base)
    own = {} if config is None else _token_ids(config)

    def is_added(value: Any) -> bool:
        return any(size <= number < widest for number in _as_list(value))

    for holder in filter(None, (model.config, getattr(model, "generation_config", None))):
        added = [key for key, value in _token_ids(holder).items() if is_added(value)]
        _set_token_ids(holder, {key: own[key] if key in own and not is_added(own[key]) else None for key in added})
    set_vocabulary(model, size, {})
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (module.padding_idx or 0) >= len(module.weight):
            module.padding_idx = None  # affects gradients only


def set_vocabulary(model: PreTrainedModel, size: int, token_ids: Mapping[str, Any]) -> None:
    """Set the vocabulary size and the special tokens of a task on a model, where loss functions read them."""
    old, new = model.config, deepcopy(model.config)
    new.get_text_config().vocab_size = size
    _set_token_ids(new, token_ids)
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new  # type: ignore[assignment]  # torch's says tensors and modules only
    if token_ids and getattr(model, "generation_config", None) is not None:
        model.generation_config = deepcopy(model.generation_config)
        _set_token_ids(model.generation_config, token_ids)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, nn.Embedding):
            module.num_embeddings = len(module.weight)
        elif isinstance(module, nn.Linear):
            module.out_features = len(module.weight)


def own_token_ids(model: PreTrainedModel, source: Source, size: int) -> dict[str, Any]:
    """Return the special tokens whose numbers differ between a checkpoint's configuration and the model's.

    Numbers outside of the checkpoint's `size` tokens are left out.
    """
    config, found = _config_of(source), {}
    known = _token_ids(model.config)
    for key, value in ({} if config is None else _token_ids(config)).items():
        inside = [number for number in _as_list(value) if 0 <= number < size]
        if known.get(key) != value and inside:
            found[key] = inside if isinstance(value, (list, tuple)) else inside[0]
    return found


def check_configuration(model: PreTrainedModel, source: Source, *, is_base: bool = False) -> None:
    """Refuse a checkpoint whose configuration computes something else (other rotary angles, another activation).

    Experts share one configuration. Different special tokens cause a warning only. The base may be of another class,
    and so of another configuration.
    """
    if is_base:
        return
    config = _config_of(source)
    if config is None or type(config) is not type(model.config):
        return
    own, shared = _flat(config.to_dict()), _flat(model.config.to_dict())
    for key in sorted(own.keys() & shared.keys()):
        name = key.rpartition(".")[2]
        if own[key] == shared[key] or NOT_COMPUTED.fullmatch(name):
            continue
        found = f"{source.label} has {key}={brief(own[key])} in its configuration, and the other experts have "
        if not TOKEN_ID.search(name):
            raise CheckpointError(f"{found}{brief(shared[key])}: experts must compute alike.")
        logger.warning("%s%s, which all of them get.", found, brief(shared[key]))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping to values by path, without `LABEL_MAPS`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in LABEL_MAPS:
            flat |= _flat(value, f"{prefix}{key}.")
        elif key not in LABEL_MAPS:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def _config_of(source: Source) -> PreTrainedConfig | None:
    if isinstance(source, AdapterSource) and not source.own_base:  # a config beside an adapter holds labels at most
        return None
    if source.folder is not None and (source.folder / CONFIG).is_file():
        return load_config(source)
    return source.model.config if isinstance(source.model, PreTrainedModel) else None


def _token_ids(config: Any) -> dict[str, Any]:
    """Return the special tokens of a configuration that have one or several numbers."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {key: value for key, value in text.to_dict().items() if key.endswith("_token_id")}
    return {key: v for key, v in found.items() if v not in (None, []) and all(type(i) is int for i in _as_list(v))}


def _set_token_ids(config: Any, ids: Mapping[str, Any]) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key, value in ids.items():
        setattr(text, key, value)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_dual_encoder(model: PreTrainedModel) -> bool:
    """Return whether a model encodes texts separately from images (or audio, or video) and returns all similarities.

    The rows of the two sides need not correspond.
    """
    has_text_tower = hasattr(model, "text_model") or hasattr(model, "get_text_features")
    kind: type = type(model)
    return has_text_tower and any(SIMILARITY.match(field) for field in _output_fields(kind))


@cache
def _output_fields(model_class: type[PreTrainedModel]) -> frozenset[str]:
    """Return the field names of the output class that `forward` is annotated with."""
    forward = inspect.unwrap(model_class.forward)
    try:
        returned = get_type_hints(forward).get("return")
    except NameError:  # the annotation names something that is imported for type checkers only
        return frozenset()
    classes = [cls for cls in (returned, *get_args(returned)) if dataclasses.is_dataclass(cls)]
    return frozenset(field.name for cls in classes for field in dataclasses.fields(cls))


def is_text_parameter(name: str) -> bool:
    """Return whether a parameter of a dual encoder belongs to its text side."""
    return name.startswith("text_")


def feature_root(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes features: a dual encoder's image side, an encoder-decoder's encoder, or the
    whole model."""
    if is_dual_encoder(model):
        towers = [module for name, module in model.named_children() if not is_text_parameter(name)]
        return max(towers, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))
    return model.get_encoder() if model.config.is_encoder_decoder else model


def feature_call(model: PreTrainedModel) -> tuple[str, str]:
    """Return the path of the submodule that computes features, and the name of the method to call."""
    encoder = next((name for name in ENCODERS if hasattr(model, name)), None)
    if is_dual_encoder(model) and encoder is not None:
        return "", encoder
    root = feature_root(model)
    if root is model or not (is_dual_encoder(model) or _takes_all_inputs(root, model)):
        return "", "forward"
    return next(name for name, module in model.named_modules() if module is root), "forward"


def _takes_all_inputs(encoder: nn.Module, model: PreTrainedModel) -> bool:
    """Return whether an encoder accepts all content inputs of its model: texts, images, audio."""
    accepted = inspect.signature(encoder.forward).parameters
    taken = inspect.signature(model.forward).parameters
    return all(name in accepted for name in (*main_inputs(model), *INPUTS) if name in taken)


def main_inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the model's main inputs; for a dual encoder, the one that is not text."""
    if is_dual_encoder(model):
        path, method = feature_call(model)
        return tuple(inspect.signature(getattr(model.get_submodule(path), method)).parameters)[:1]
    names = model.main_input_name
    return (names,) if isinstance(names, str) else tuple(names)


def row_inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of inputs that determine the number of rows of a batch; the first one present counts."""
    # Texts first, because a text may have several images or none; a dual encoder's texts are no rows.
    texts = () if is_dual_encoder(model) else ("input_ids", "inputs_embeds")
    return (*texts, *main_inputs(model), *INPUTS, "inputs")


def input_form(model: PreTrainedModel) -> InputForm | None:
    """Return what the main input looks like, as far as the configuration says."""
    return transformers_form(model, main_inputs(model)[0])
