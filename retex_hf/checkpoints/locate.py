"""Resolution of the user's input (a folder, a file, a Hub id, a module, a state dict) to a `Source`."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from accelerate.utils import extract_model_from_parallel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, HubError, first_line
from ..utils.hub_errors import HUB_ERRORS, check_token, explain, without_secrets
from ..utils.paths import as_path
from ..utils.strict_files import check_links, read_json
from ..utils.terminal import visible
from .adapters import ADAPTER_CONFIG, ADAPTER_STEM, is_adapter, open_adapter
from .gguf_files import SUFFIX as GGUF_SUFFIX
from .gguf_files import find_gguf, open_gguf
from .peft_models import open_peft_model
from .quantized import FLOAT8, unpack
from .sources import Source, check_module, open_files, open_state_dict, weight_files

TRANSFORMERS_CONFIG, OPEN_CLIP_CONFIG = "config.json", "open_clip_config.json"
# The last is the name that diffusers uses.
TRANSFORMERS_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
OPEN_CLIP_STEMS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
# Everything that a tokenizer or processor may need; the card, which states the licence; and this library's recipe.
DOWNLOADED = (
    "*.json", "*.txt", "*.model", "*.jinja", "*.spm", "*.codes", "*.tokenizer", "*.tiktoken", "tokenizer*", "*vocab*",
    "chat_template*", "README.md", "retex_*.yaml",
)  # fmt: skip
# Code is never run, so it is not downloaded either.
CODE = (".py", ".pyc", ".so", ".dll", ".dylib", ".pkl", ".pickle")
# The weights that are read (including the layers of a SentenceTransformer after its transformer), without duplicates in
# other formats (`consolidated.safetensors`, `onnx/`).
WEIGHTS = (
    "model*",
    "pytorch_model*",
    "diffusion_pytorch_model*",
    "open_clip*",
    "[0-9]*_*/model*",
    "retex_*",
    f"{ADAPTER_STEM}*",
)


# Errors by which a system refuses a file name.
NAME_ERRORS = (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


def open_source(
    spec: Any, label: str, *, token: str | None = None, cache_dir: str | None = None, adapters: bool = False
) -> Source:
    """Open a base or expert checkpoint.

    `spec` is a folder of transformers, OpenCLIP, timm or diffusers, a Hub id (`org/name`, `org/name@revision`,
    `org/name/subfolder`), OpenCLIP's `local-dir:PATH` or `hf-hub:org/name`, a weight file (also `org/name/file.gguf`),
    a module, or a state dict. `label` names it in messages.
    With `adapters` it may also be a PEFT adapter: a folder or a Hub id, see `align_source`, or a `PeftModel`.
    """
    if isinstance(spec, nn.Module):
        spec = extract_model_from_parallel(spec, keep_torch_compile=False)  # of DDP and of torch.compile
    if isinstance(spec, PeftModel):
        return open_peft_model(spec, label) if adapters else _refuse_adapter(label, "a PeftModel")
    if isinstance(spec, nn.Module):
        whole = spec if _is_sentence_transformer(spec) else None
        spec = spec if whole is None else _transformer_in(whole, label)
        check_module(spec, label)
        tensors = spec.state_dict()
        origin = getattr(getattr(spec, "config", None), "_name_or_path", "") or type(spec).__name__
        provenance = {"source": "memory", "id": Path(origin).name if Path(origin).is_absolute() else origin}
        return open_state_dict(tensors, label, model=spec, provenance=provenance, whole=whole)
    if isinstance(spec, Mapping):
        return open_state_dict(spec, label, provenance={"source": "memory", "id": "state_dict"})
    if not isinstance(spec, (str, Path)):
        raise CheckpointError(
            f"{label} must be a folder, a file, a Hub id, a module or a state dict, not a {type(spec).__name__}."
        )
    path, provenance = locate(spec, label, token=token, cache_dir=cache_dir)
    label = f"{label} ({path})"
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return open_gguf(path, label, provenance=provenance)
    if path.is_file():
        return open_files([path], label, provenance=provenance)
    if (gguf := _only_gguf(path)) is not None:
        return open_gguf(gguf, label, provenance=provenance)
    if is_adapter(path):
        if not adapters:
            _refuse_adapter(label, "a PEFT adapter")
        tensors = open_files(weight_files(path, (ADAPTER_STEM,)), label)
        folder = path if (path / TRANSFORMERS_CONFIG).is_file() else None  # the config may name the labels
        settings = read_json_object(path / ADAPTER_CONFIG)
        return open_adapter(tensors, settings, folder=folder, provenance=provenance)
    if is_open_clip(path):
        return open_files(weight_files(path, OPEN_CLIP_STEMS), label, folder=path, provenance=provenance)
    files, config = weight_files(path, TRANSFORMERS_STEMS), read_json_object(path / TRANSFORMERS_CONFIG)
    if config.get("quantization_config") is None:
        return open_files(files, label, folder=path, provenance=provenance)
    return unpack(open_files(files, label, more_dtypes=FLOAT8, folder=path, provenance=provenance), config)


def _is_sentence_transformer(module: nn.Module) -> bool:
    package = sys.modules.get("sentence_transformers")  # an instance exists only if it was imported
    return package is not None and isinstance(module, package.SentenceTransformer)


def _transformer_in(model: Any, label: str) -> PreTrainedModel:
    """Return the transformers model of a SentenceTransformer, which is in its first module."""
    found = getattr(model[0], "auto_model", None)
    if not isinstance(found, PreTrainedModel):
        raise CheckpointError(
            f"{label} is a SentenceTransformer that begins with a {type(model[0]).__name__}: expected a Transformer."
        )
    return found


def locate(
    spec: str | Path, label: str, *, token: str | None = None, cache_dir: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """Return the local file or folder of a path or Hub id (downloaded if necessary), and its provenance."""
    text = str(spec)
    if "://" in text:
        raise CheckpointError(f"{label}: {without_secrets(text, token)} is an address: expected a path or a Hub id.")
    path = typed_path(text, label, token)
    if path.is_file():
        return path, {"source": "local", "id": path.name}
    if path.is_dir():
        check_checkpoint_folder(path, label)
        return path, {"source": "local", "id": path.resolve().name}
    if text.startswith("local-dir:") or isinstance(spec, Path) or text.startswith((".", "/")):
        raise CheckpointError(f"{label}: {path} does not exist.")
    name, _, revision = text.removeprefix("hf-hub:").partition("@")
    owner, *rest = name.split("/")
    repo_id, subfolder = "/".join([owner, *rest[:1]]), "/".join(rest[1:])
    if subfolder and Path(owner).is_dir():  # a mistyped path, not a repository
        raise CheckpointError(f"{label}: {path} does not exist.")
    options = {"revision": revision or None, "token": token, "cache_dir": cache_dir}
    if subfolder.endswith(GGUF_SUFFIX):
        snapshot = download(repo_id, label, file=subfolder, **options)
        if not (snapshot / subfolder).is_file():
            raise CheckpointError(f"{label}: the repository {repo_id!r} has no file {subfolder!r}.")
        check_links([snapshot / subfolder], snapshot, CheckpointError)
        return snapshot / subfolder, {"source": "hub", "id": name, "revision": snapshot.name}
    snapshot = download(repo_id, label, subfolder=subfolder or None, **options)
    folder = snapshot / subfolder
    if not folder.is_dir():
        raise CheckpointError(f"{label}: the repository {repo_id!r} has no folder {subfolder!r}.")
    check_checkpoint_folder(folder, label)
    return folder, {"source": "hub", "id": name, "revision": snapshot.name}


def typed_path(text: str, label: str, token: str | None = None) -> Path:
    """Return user input as a path, though it may turn out to be a Hub id; `label` says in messages what it is for."""
    try:
        return as_path(text.removeprefix("local-dir:"), CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {without_secrets(str(error), token)}") from None


def download(repo_id: str, label: str, *, token: str | None = None, **kwargs: Any) -> Path:
    """Call `fetch` and turn its errors into a `CheckpointError`; `label` says what the repository is for."""
    check_token(token)
    try:
        return fetch(repo_id, token=token, **kwargs)
    except HFValidationError:
        shown = without_secrets(repr(repo_id), token)
        raise CheckpointError(f"{label}: {shown} is neither an existing path nor a Hub id.") from None
    except HUB_ERRORS as error:
        reason = explain(error, repo_id, token)
        raise CheckpointError(f"{label}: {repo_id!r} is not a local path, and the Hub says: {reason}") from None


def fetch(repo_id: str, *, subfolder: str | None = None, file: str | None = None, **kwargs: Any) -> Path:
    """Download a snapshot of a Hub repository: config files and safetensors, or `.bin` if there are no safetensors.
    With `subfolder`, download that folder only; with `file`, that file only."""
    if file is not None:
        with _named_files(repo_id):
            return Path(snapshot_download(repo_id, allow_patterns=[plain_subfolder(file)], **kwargs))
    inside = "" if subfolder is None else f"{plain_subfolder(subfolder)}/"
    for suffix in (".safetensors", ".bin"):
        patterns = [inside + pattern for pattern in (*DOWNLOADED, *(stem + suffix for stem in WEIGHTS))]
        ignored = [f"*{ending}" for ending in CODE]
        with _named_files(repo_id):
            folder = Path(snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=ignored, **kwargs))
        if any(folder.glob(f"{inside}*{suffix}")):
            break
    return folder


def plain_subfolder(name: str) -> str:
    """Return the normalised name of a folder within a repository; refuse patterns and paths that lead elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or any(sign in name for sign in "*?[\\"):
        raise CheckpointError(f"{name!r} is not the name of a folder within a repository.")
    return "/".join(parts)


@contextmanager
def _named_files(repo_id: str) -> Iterator[None]:
    """Turn the Hub client's errors about invalid file names into a `HubError`.

    The client writes no file outside of its folder; the class of its error depends on what is wrong with the name.
    """
    try:
        yield
    except HUB_ERRORS:
        raise
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NAME_ERRORS:
            raise
        reason = visible(getattr(error, "strerror", None) or first_line(error)).rstrip(".")
        raise HubError(
            f"The repository {repo_id!r} lists a file with a name that cannot be stored here: {reason}."
        ) from None


def check_checkpoint_folder(folder: Path, label: str) -> None:
    """Refuse a folder that holds no checkpoint, or links to files outside of it."""
    check_links((file for file in folder.iterdir() if file.is_file()), folder, CheckpointError)
    if is_adapter(folder) or _only_gguf(folder) is not None:
        return
    if not is_open_clip(folder) and not (folder / TRANSFORMERS_CONFIG).is_file():
        if inner := sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}")):
            raise CheckpointError(
                f"{label}: {folder} holds adapters in folders {inner}: append the name of one, as in '.../{inner[0]}'."
            )
        raise CheckpointError(f"{label}: {folder} has neither {TRANSFORMERS_CONFIG} nor {OPEN_CLIP_CONFIG}.")


def _only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that holds no weights in another format, or None."""
    others = (folder.glob(f"{stem}*{suffix}") for stem in OPEN_CLIP_STEMS for suffix in (".safetensors", ".bin"))
    if any(next(files, None) is not None for files in others):
        return None
    return find_gguf(folder)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a configuration file of a checkpoint."""
    return read_json(path, CheckpointError, infinite=True)


def _refuse_adapter(label: str, kind: str) -> NoReturn:
    raise CheckpointError(f"{label} is {kind}; merge it into its base model first.")


def is_open_clip(folder: Path) -> bool:
    return (folder / OPEN_CLIP_CONFIG).is_file()
