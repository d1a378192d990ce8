"""The modules that a SentenceTransformer has after its transformer: pooling, dense layers and the like, as files.

The transformer is merged and recovered; the modules after it are the same for all experts and are copied, so that
`SentenceTransformer(artifact)` works. Their configurations name classes by import path. Nothing named there is imported
here, and only classes of sentence-transformers itself are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoints.folder_files import FolderFiles, private_copy
from ..checkpoints.sources import Source, open_files, weight_files
from ..errors import CheckpointError, RetexError, brief, first_line
from ..utils.strict_files import parse_json
from .containment import contained
from .untrusted_config import LONGEST_WORD, PLAIN

MODULES, TRANSFORMER_CONFIG, MODEL_CONFIG = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
CONFIG, WEIGHTS_STEM = "config.json", "model"
# Attribute that holds these files on a transformers model: `{file name: content}`.
ATTRIBUTE = "sentence_files"
# Modules known to compute only what their configurations and weights say, under the import paths that releases of
# sentence-transformers have used.
KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LayerNorm", "WeightedLayerPooling")
TYPE = re.compile(
    rf"sentence_transformers\.(models|base\.modules|sentence_transformer\.modules)(\.[A-Za-z_]+)?\.({'|'.join(KNOWN)})"
)
WITH_WEIGHTS = ("Dense", "LayerNorm", "WeightedLayerPooling")
ACTIVATION = re.compile(r"torch\.nn\.modules\.[a-z_]+\.([A-Za-z0-9]+)")
# Keys kept from the settings of the model and of its transformer; others name files and loader options.
SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name", "model_type", "__version__")
OF_TRANSFORMERS = (
    "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", "unpad_inputs",
    "query_length", "document_length", "query_expansion", "processing_kwargs",
)  # fmt: skip
# Prompts before a sentence, and versions: free text.
FREE_TEXT = ("prompts", "default_prompt_name", "__version__")
FOLDER = re.compile(r"[0-9]+_[A-Za-z0-9]+")
MOST_MODULES = 16

Files = dict[str, bytes]


def read_modules(files: FolderFiles) -> Files | None:
    """Return the files of a folder's modules, vetted; None where the folder holds no SentenceTransformer."""
    if not files.has(MODULES):
        return None
    path = files.folder / MODULES
    entries = _entries(files, path)
    found: Files = {MODULES: _as_json([entry for entry, _ in entries])}
    for name in (TRANSFORMER_CONFIG, MODEL_CONFIG):
        if files.has(name):
            read = SETTINGS if name == MODEL_CONFIG else OF_TRANSFORMERS
            values = {key: value for key, value in files.json(name).items() if key in read}
            texts = {key: values.pop(key) for key in FREE_TEXT if key in values}
            found[name] = _as_json({**_plain(values, files.folder / name), **texts})
    for entry, kind in entries[1:]:
        found |= _read_module(files, entry["path"], kind)
    return found


def _entries(files: FolderFiles, path: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the modules in order, each with its class name."""
    try:
        values = parse_json(files.read(MODULES).decode(), str(path), CheckpointError, kind=list)
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not text in UTF-8.") from None
    if not 1 <= len(values) <= MOST_MODULES:
        raise CheckpointError(f"{path} lists {len(values)} modules: expected 1 to {MOST_MODULES}.")
    entries = []
    for index, value in enumerate(values):
        value = value if isinstance(value, dict) else {}
        known = TYPE.fullmatch(value["type"]) if isinstance(value.get("type"), str) else None
        if known is None or (known[3] == "Transformer") != (index == 0):
            expected = "a Transformer" if index == 0 else f"one of {list(KNOWN[1:])}"
            raise CheckpointError(
                f"{path} asks for {brief(value.get('type'))} as module {index}: expected {expected} of "
                "sentence-transformers' own."
            )
        folder = value.get("path")
        if not isinstance(folder, str) or not (folder == "" if index == 0 else FOLDER.fullmatch(folder)):
            raise CheckpointError(
                f"{path} keeps module {index} in {brief(folder)}: expected a folder such as '1_Pooling'."
            )
        entry = {"idx": index, "name": str(index), "path": folder, "type": value["type"]}
        entries.append((entry, known[3]))
    if len({entry["path"] for entry, _ in entries}) < len(entries):
        raise CheckpointError(f"{path} keeps two modules in one folder.")
    return entries


def _read_module(files: FolderFiles, folder: str, kind: str) -> Files:
    found: Files = {}
    name, path = f"{folder}/{CONFIG}", files.folder / folder
    values: dict[str, Any] = {}
    if files.has(name):
        values = files.json(name)
        kept = dict(values)
        activation = kept.pop("activation_function", None)
        kept = _plain(kept, path / CONFIG)
        if activation is not None:
            kept["activation_function"] = _activation(activation, path / CONFIG)
        found[name] = _as_json(kept)
    if kind in WITH_WEIGHTS:
        tensors = _read_weights(files, folder)
        for key, tensor in tensors.items():
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise CheckpointError(f"{path}: tensor {key!r} must hold finite numbers.")
        if kind == "Dense":
            _check_dense(path, values, tensors)
        found[f"{folder}/{WEIGHTS_STEM}.safetensors"] = save(tensors, metadata={"format": "pt"})
    return found


def _read_weights(files: FolderFiles, folder: str) -> dict[str, Tensor]:
    kept = getattr(files, "tensors", {}).get(f"{folder}/{WEIGHTS_STEM}.safetensors")
    if kept is not None:  # from an artifact, already checked against its records
        return {name: tensor.contiguous().clone() for name, tensor in kept.items()}
    where = files.folder / folder
    source = open_files(weight_files(where, (WEIGHTS_STEM, "pytorch_model")), str(where))
    return {name: source.read(name).contiguous().clone() for name in source.infos}


def _check_dense(path: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    shapes: dict[str, tuple[Any, ...]] = {"linear.weight": (values.get("out_features"), values.get("in_features"))}
    if values.get("bias", True):
        shapes["linear.bias"] = (values.get("out_features"),)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise CheckpointError(f"{path} holds tensors of the shapes {found}, but {CONFIG} asks for {shapes}.")


def _activation(value: Any, path: Path) -> str:
    named = ACTIVATION.fullmatch(value) if isinstance(value, str) else None
    found = getattr(torch.nn, named[1], None) if named else None
    is_module = isinstance(found, type) and issubclass(found, nn.Module)
    if named is None or not is_module or f"{found.__module__}.{named[1]}" != value:
        raise CheckpointError(f"{path} asks for the activation {brief(value)}, which is not a module of torch.nn.")
    return value


def _plain(value: Any, path: Path, key: str = "") -> Any:
    """Return a value unchanged if it holds only numbers and plain words; refuse what may name a file, an address or a
    class."""
    if isinstance(value, dict):
        return {name: _plain(entry, path, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry, path, key) for entry in value]
    if isinstance(value, str) and (len(value) > LONGEST_WORD or PLAIN.fullmatch(value) is None):
        raise CheckpointError(f"{path} has {key}={brief(value)}: expected a plain word, or none.")
    return value


def _as_json(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def modules_of(source: Source) -> Files | None:
    """Return the files of the modules after a checkpoint's transformer; None for a bare transformer."""
    if source.folder is not None:
        return read_modules(FolderFiles(source.folder))
    return None if source.whole is None else _written(source.whole, source.label)


def _written(model: Any, label: str) -> Files:
    """Return the files that a SentenceTransformer in memory is saved as, without its transformer."""
    entries = []
    with TemporaryDirectory() as place:
        folder = Path(place)
        try:
            for index, module in enumerate(model):
                kind = type(module)
                path = "" if index == 0 else f"{index}_{kind.__name__}"
                entries.append({"path": path, "type": f"{kind.__module__}.{kind.__name__}"})
                if index:
                    (folder / path).mkdir()
                    module.save(str(folder / path))
            model[0].save_config(str(folder), filename=TRANSFORMER_CONFIG)
        except Exception as error:  # custom modules may raise anything when they are saved
            raise CheckpointError(f"{label}: its modules cannot be saved: {first_line(error)}") from error
        (folder / MODULES).write_bytes(_as_json(entries))
        settings = {key: getattr(model, key, None) for key in ("prompts", "default_prompt_name", "similarity_fn_name")}
        (folder / MODEL_CONFIG).write_bytes(_as_json({"model_type": "SentenceTransformer", **settings}))
        found = read_modules(FolderFiles(folder))
    assert found is not None
    return found


def common_modules(sources: Iterable[Source]) -> Files | None:
    """Return the modules that all checkpoints with modules share; refuse checkpoints whose modules differ."""
    first: tuple[Source, Files] | None = None
    for source in sources:
        found = modules_of(source)
        if found is None:
            continue
        if first is None:
            first = source, found
        else:
            _check_same(first[1], first[0].label, found, source.label)
    return None if first is None else first[1]


def check_modules(model: nn.Module, source: Source) -> None:
    """Refuse a checkpoint whose modules differ from those that a model carries."""
    found, own = modules_of(source), getattr(model, ATTRIBUTE, None)
    if found is not None and own is not None:
        _check_same(own, "the merged model", found, source.label)


def _check_same(one: Files, label: str, other: Files, other_label: str) -> None:
    # Prompts and versions may differ; the computation may not.
    for name in sorted({*one, *other} - {TRANSFORMER_CONFIG, MODEL_CONFIG}):
        if not _same(name, one.get(name), other.get(name)):
            raise CheckpointError(
                f"{other_label}: {name} differs from that of {label}. The modules after the transformer are kept once, "
                "for all tasks: expected the same ones in base and experts."
            )


def _same(name: str, one: bytes | None, other: bytes | None) -> bool:
    if name != MODULES or one is None or other is None:
        return one == other
    kinds = [[(entry["path"], entry["type"].rpartition(".")[2]) for entry in json.loads(data)] for data in (one, other)]
    return kinds[0] == kinds[1]  # releases keep the same class under different import paths


def attach(model: nn.Module, files: Files | None) -> None:
    """Attach the files of the modules after a model to it."""
    if files is not None:
        setattr(model, ATTRIBUTE, files)


def write(model: nn.Module, folder: Path) -> None:
    """Write the files that a model carries."""
    for name, data in getattr(model, ATTRIBUTE, {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def sentence_transformer(transformer: PreTrainedModel, runs: nn.Module, side_files: Mapping[str, Any]) -> Any:
    """Create a SentenceTransformer from a transformers model and the modules that it carries.

    Args:
        transformer: The model that carries the modules.
        runs: The module that runs in its place: the model itself, or one that routes.
        side_files: The files of its tokenizer, vetted.
    """
    files = getattr(transformer, ATTRIBUTE, None)
    if files is None:
        raise RetexError("Only a model that was built from SentenceTransformers has modules after its transformer.")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise RetexError(
            "A SentenceTransformer needs sentence-transformers: pip install sentence-transformers."
        ) from None
    with private_copy({**side_files, **files}) as folder:
        try:
            transformer.save_pretrained(folder)  # the library only accepts a folder
            with contained(folder):
                made = SentenceTransformer(
                    str(folder),
                    device=str(transformer.device),
                    local_files_only=True,
                    trust_remote_code=False,
                )
        except RetexError:
            raise
        except Exception as error:  # vetted files may still make sentence-transformers raise anything
            raise RetexError(f"sentence-transformers cannot make a model of this one: {first_line(error)}") from error
    # The attribute's name depends on the release; the other name is a property.
    name = "model" if "model" in made[0]._modules else "auto_model"
    setattr(made[0], name, runs)
    return made.eval()
