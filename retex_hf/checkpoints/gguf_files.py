"""GGUF files (llama.cpp) as experts: tensors under llama.cpp's names, dequantised when they are read.

transformers reads the file's header and dequantises its blocks. The mapping of names to those of a model, and of
llama.cpp's reordering of tensors, comes from transformers too, once the model is known. The model configuration in the
file is not used: the base defines the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.integrations.gguf.reader import GgufHeader, LazyGgufTensor, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    GPT2TensorProcessor,
    LlamaTensorProcessor,
    MambaTensorProcessor,
    NemotronTensorProcessor,
    T5TensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_gguf_pytorch_utils import Gemma2TensorProcessor as GemmaTensorProcessor
from transformers.utils.import_utils import is_gguf_available

from ..errors import CheckpointError, brief, first_line
from .sources import LONGEST_NAME, MemorySource, Source, TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIX = ".gguf"
# Processors that map one tensor to one tensor. Others fuse or split a layer's experts.
PROCESSORS = (
    TensorProcessor, LlamaTensorProcessor, GPT2TensorProcessor, MambaTensorProcessor, NemotronTensorProcessor,
    T5TensorProcessor, GemmaTensorProcessor,
)  # fmt: skip
# llama.cpp's names of architectures, where they differ from transformers' model types.
ARCHITECTURES = {
    "mistral": "llama", "cohere": "command-r", "gemma3_text": "gemma3", "umt5": "t5", "gpt2": "gpt2",
}  # fmt: skip
# Tensors that a model computes from its configuration.
CONSTANTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
MOST_AXES = 4


@dataclass
class GgufSource(Source):
    """The tensors of a GGUF file, under its own names; `for_model` maps them to a model's."""

    architecture: str = ""
    tensors: dict[str, LazyGgufTensor] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        stored = tensor[...]
        if tensor.ggml_type in GGML_BLOCK:
            stored = dequantize(stored, tensor.ggml_type)
        return stored.float().reshape(self.infos[name].shape)

    def for_model(self, model: PreTrainedModel) -> NamedTensors:
        """Return the tensors under the names of a transformers model, and in its layout."""
        if not is_gguf_available():
            raise CheckpointError(
                f"{self.label} is a GGUF file, which needs the package gguf: pip install 'retex-hf[gguf]'."
            )
        kind = model.config.model_type
        if self.architecture != ARCHITECTURES.get(kind, kind):
            raise CheckpointError(
                f"{self.label} is a {brief(self.architecture, 60)} model, but the base is a {kind!r}."
            )
        processor_class = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)
        if self.architecture not in GGUF_SUPPORTED_ARCHITECTURES or processor_class not in PROCESSORS:
            raise CheckpointError(
                f"{self.label} is a GGUF file of the architecture {brief(self.architecture, 60)}, which is not read: "
                "give the checkpoint that it was converted from."
            )
        processor = processor_class(config=model.config.to_dict())
        names = get_gguf_hf_weights_map(model, processor, model_type=self.architecture)
        if "lm_head.weight" in model.state_dict():
            names.setdefault("output.weight", "lm_head.weight")
        infos: dict[str, TensorInfo] = {}
        reads: dict[str, Callable[[], Tensor]] = {}
        known = model.state_dict()
        for name in self.infos:
            target = names.get(name, name)
            if target in known:
                infos[target] = TensorInfo(tuple(known[target].shape), torch.float32)
                reads[target] = partial(self._converted, name, processor, known[target].shape)
            elif name not in CONSTANTS:
                infos[name], reads[name] = self.infos[name], partial(self.read, name)
        return NamedTensors(self.label, infos, reads=reads)

    def _converted(self, name: str, processor: TensorProcessor, shape: torch.Size) -> Tensor:
        weights = self.read(name)
        if name != "output.weight":  # no processor changes this one
            found = processor.process(weights=weights.numpy(), name=name)
            weights = torch.from_numpy(np.array(found.weights, dtype=np.float32))
        if weights.shape != shape:
            raise CheckpointError(
                f"{self.label}: tensor {name!r} has shape {tuple(weights.shape)}, but the model has {tuple(shape)}."
            )
        return weights


@dataclass
class NamedTensors(MemorySource):
    """Tensors under a model's own names, computed when they are read."""

    reads: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        return self.reads[name]()


def open_gguf(path: Path, label: str, **kwargs: Any) -> GgufSource:
    """Open a GGUF file. Only its header is read; it is checked against the file's size."""
    try:
        header = GgufHeader.from_file(str(path))
        size = path.stat().st_size
        for info in header.tensors:
            _check(path, info, size - header.data_start)
        tensors = load_gguf_state_dict(header)
    except CheckpointError:
        raise
    except Exception as error:  # an untrusted file can make the reader raise anything
        raise CheckpointError(
            f"{path} is not a GGUF file that can be read: {first_line(error).rstrip('.')}."
        ) from error
    if len(tensors) < len(header.tensors) or not isinstance(header.architecture, str):
        raise CheckpointError(f"{path} is not a GGUF file that can be read: two of its tensors have one name.")
    infos = {info.name: TensorInfo(tuple(info.shape), torch.float32) for info in header.tensors}
    return GgufSource(label, infos, files=(path,), architecture=header.architecture, tensors=tensors, **kwargs)


def _check(path: Path, info: Any, room: int) -> None:
    """Refuse a tensor that is not completely in the file."""
    block, _ = GGML_BLOCK.get(info.ggml_type, (1, 0))
    fits = 1 <= len(info.shape) <= MOST_AXES and prod(info.shape) > 0 and info.shape[-1] % block == 0
    if not fits or len(info.name) > LONGEST_NAME or info.offset + info.nbytes > room:
        raise CheckpointError(
            f"{path}: tensor {brief(info.name, 60)} of shape {brief(info.shape, 60)} is not completely in the file."
        )


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, or None; refuse a folder with several."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds {len(files)} GGUF files: give one of them, such as {files[0]}.")
    return files[0] if files else None
