"""A build of large matrices: four experts in bfloat16 with the shapes of a Llama of 1.1B parameters, from disk to disk.

    python examples/benchmarks/large_build.py                     # about 20 GB of disk, deleted afterwards
    python examples/benchmarks/large_build.py --layers 2 --solvers krylov exact --threads 1

Experts are random, with differences of decaying spectrum (`shapes.py`), merged by average. Every line is a process of
its own. `krylov` is what a build does; `exact` decomposes a Gram matrix of every parameter, and reads whole spectra for
a budget of bytes. The last column is what the build itself states of its distance from the least possible error.
Memory is the peak of the process without mapped files, of which the imports are a part.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from build import anonymous, measure
from safetensors.torch import save_file
from shapes import make_base, make_differences
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TASKS = [f"task-{index}" for index in range(4)]
SETTINGS = {"rank": {"rank": 64}, "storage": {"storage": 0.01}}
SOLVERS = ("krylov", "exact")
STATED = "times the least possible"


def llama_config(layers: int) -> LlamaConfig:
    """Return the shapes of TinyLlama: 1.1B parameters in 22 layers."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32_000,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def write_experts(folder: Path, layers: int, seed: int = 0) -> None:
    """Write a base and its experts below `folder`, one file per layer; the process holds one layer at a time."""
    config = llama_config(layers)
    targets = {"base": folder / "base", **{task: folder / "experts" / task for task in TASKS}}
    files: dict[str, str] = {}
    for target in targets.values():
        target.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(target)
    for number, shapes in enumerate(_files(config)):
        file = f"model-{number:05d}.safetensors"
        parts: dict[str, dict[str, Tensor]] = {who: {} for who in targets}
        for name, shape in shapes.items():
            files[name] = file
            generator = torch.Generator().manual_seed(seed * 100_003 + len(files))
            base = make_base(name, shape, generator)
            parts["base"][name] = base.bfloat16()
            for task, difference in zip(TASKS, make_differences(shape, len(TASKS), generator), strict=True):
                parts[task][name] = (base + difference).bfloat16()
        for who, target in targets.items():
            save_file(parts[who], target / file, {"format": "pt"})
    for target in targets.values():
        size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _files(config: LlamaConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield names and shapes of the parameters, by file: a layer, or a tensor outside the layers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else name
        files.setdefault(layer, {})[name] = tuple(tensor.shape)
    yield from files.values()


def build(folder: Path, setting: str, solver: str, threads: int) -> None:
    """Build, and print its costs and what it states."""
    from retex_hf import RetexConfig
    from retex_hf.build.build import build_folder
    from retex_hf.recovery import krylov, storage

    torch.set_num_threads(threads)
    if solver == "exact":
        krylov.SIDES_PER_BLOCK = 1 << 30
        storage.first_count = lambda *_: 1 << 30
    level, started, cpu = anonymous(), time.perf_counter(), time.process_time()
    experts = {task: folder / "experts" / task for task in TASKS}
    with redirect_stderr(StringIO()) as log:
        build_folder(folder / "base", experts, RetexConfig(**SETTINGS[setting]), folder / "artifact", resume=False)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "level": level,
        "stated": next((line for line in log.getvalue().splitlines() if STATED in line), ""),
    }
    print(json.dumps(found))


def report(folder: Path, arguments: argparse.Namespace) -> None:
    """Print a line for every setting and solver."""
    print(f"{len(TASKS)} experts of {arguments.layers} layers, {arguments.threads} threads\n")
    print("| | solver | seconds | CPU seconds | peak memory | of which imports | recovery | stated |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for setting in arguments.settings:
        for solver in arguments.solvers:
            child = [f"--child={setting}", f"--solvers={solver}", f"--threads={arguments.threads}"]
            run = measure([sys.executable, __file__, f"--folder={folder}", *child])
            told = json.loads(run.output.splitlines()[-1])
            size = sum(path.stat().st_size for path in (folder / "artifact").glob("retex_recovery*"))
            memory = f"{run.memory / 1e9:.2f} GB | {told['level'] / 1e9:.2f} GB"
            print(
                f"| {SETTINGS[setting]} | {solver} | {told['seconds']:.0f} | {told['cpu']:.0f} | {memory} "
                f"| {size / 1e6:.0f} MB | {told['stated']} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("retex-large-build"), help="where experts and results go")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=["krylov"])
    parser.add_argument("--keep", action="store_true", help="keep the experts, and use those that are there")
    parser.add_argument("--child", choices=SETTINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.child:
        build(folder, arguments.child, arguments.solvers[0], arguments.threads)
        return
    try:
        if not (folder / "experts" / TASKS[-1] / "model.safetensors.index.json").is_file():
            write_experts(folder, arguments.layers)
        report(folder, arguments)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
