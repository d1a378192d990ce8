"""A whole build from disk to disk: 8 experts with the shapes of CLIP ViT-B/32's vision tower, merged by average.

    python examples/benchmarks/build.py --mergekit mergekit-yaml        # --folder retex-build --rank 256
    python examples/benchmarks/build.py --storage 2%                    # the library's default, instead of one rank

Each line is one command in a process of its own, start to end. Anonymous memory (RssAnon) is the peak of the process's
memory without mapped files; the level after the imports is the lower bound of any build. mergekit only merges: it
solves for no recovery. Give its command with --mergekit to compare with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import write_clip_experts

TASKS = [f"task-{index}" for index in range(8)]


@dataclass
class Run:
    """Cost of a command: seconds, and its peak of anonymous memory in bytes."""

    seconds: float
    memory: int
    output: str


def measure(command: list[str]) -> Run:
    """Run a command to its end, and watch its memory."""
    started = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    output, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return Run(seconds, peak, output)


def anonymous(process: int | str = "self") -> int:
    """Return the anonymous memory of a process in bytes."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # the process has just ended
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def build(folder: Path, settings: dict[str, Any]) -> None:
    """Build, and print the time of the build alone and the memory before it."""
    from retex_hf import RetexConfig
    from retex_hf.build.build import build_folder

    level, started = anonymous(), time.perf_counter()
    experts = {task: folder / "experts" / task for task in TASKS}
    build_folder(folder / "base", experts, RetexConfig(**settings), folder / "artifact", resume=False, progress=False)
    print(json.dumps({"seconds": time.perf_counter() - started, "level": level}))


def mergekit_recipe(folder: Path) -> Path:
    """Write mergekit's configuration for the mean of all experts."""
    models = [{"model": str(folder / "experts" / task), "parameters": {"weight": 1 / len(TASKS)}} for task in TASKS]
    path = folder / "mergekit.yaml"
    path.write_text(json.dumps({"merge_method": "linear", "models": models, "dtype": "float32"}))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("retex-build"), help="where experts and results go")
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--storage", help="a budget of bytes instead of a rank")
    parser.add_argument("--mergekit", default=None, help="the command mergekit-yaml, or its path")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.child:
        build(folder, {"storage": arguments.storage} if arguments.storage else {"rank": arguments.rank})
        return
    if not (folder / "experts" / TASKS[-1] / "model.safetensors").is_file():
        write_clip_experts(folder, TASKS)
    setting = f"--storage={arguments.storage}" if arguments.storage else f"--rank={arguments.rank}"
    ours = measure([sys.executable, __file__, "--child", f"--folder={folder}", setting])
    told = json.loads(ours.output.splitlines()[-1])
    size = sum(file.stat().st_size for file in (folder / "artifact").iterdir())
    lines = [
        "| | whole command | of which the build | peak anonymous memory | of which after the imports |",
        "|---|---:|---:|---:|---:|",
        f"| retex_hf: average, {setting.lstrip('-')}, artifact of {size / 1e9:.2f} GB "
        f"| {ours.seconds:.1f} s | {told['seconds']:.1f} s "
        f"| {ours.memory / 1e6:.0f} MB | {told['level'] / 1e6:.0f} MB |",
    ]
    command = shutil.which(arguments.mergekit) if arguments.mergekit else None
    if command is None:
        lines.append("\nmergekit was not run: give its command with --mergekit.")
    else:
        out = folder / "mergekit"
        shutil.rmtree(out, ignore_errors=True)
        theirs = measure([command, str(mergekit_recipe(folder)), str(out), "--no-copy-tokenizer"])
        lines.append(f"| mergekit: linear merge only | {theirs.seconds:.1f} s | | {theirs.memory / 1e6:.0f} MB | |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
