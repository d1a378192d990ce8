"""Memory of a routed model against the static merged model: OpenCLIP ViT-B/32, 8 tasks, r = 256, batches of 64 images.

    python examples/benchmarks/memory.py                  # --folder retex-memory

The weights are random: memory does not depend on them. Each variant runs in a process of its own, which loads the
artifact, then answers batches whose images belong to all tasks. The table has the peak while serving of anonymous
memory above the level after the imports (RssAnon; experts and activations). Pages of mapped files (RssFile), which the
kernel can drop at any time, are listed beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path

import torch
from synthetic import clip_model, images, retex_model, task_names

from retex_hf import RetexModel
from retex_hf.backends import openclip

TASKS, RANK = task_names(8), 256
BATCH, BATCHES = 64, 4
STATIC = "static merged model"
# Name -> size of the expert cache (an expert takes 351 MB), and execution mode.
VARIANTS: dict[str, tuple[str, str]] = {
    "grouped, one expert cached": ("400MB", "grouped"),
    "grouped, cache off": ("0MB", "grouped"),
    "grouped, all experts cached": ("4GB", "grouped"),
    "mixed in one pass, no expert": ("0MB", "mixed"),
}


def write_artifact(folder: Path) -> None:
    """Write an artifact of a random model with random factors and a frozen text tower."""
    # Features of the last layer make identification as costly as it can be.
    model = retex_model(clip_model(), TASKS, RANK, recovered=lambda name: name.startswith("visual."), feature_layer=-1)
    model.fit_signatures({task: [images(index, 32)] for index, task in enumerate(TASKS)})
    model.save_pretrained(folder)


def resident() -> tuple[float, float]:
    """Return anonymous and mapped memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return tuple(int(values[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile"))


class Watch(threading.Thread):
    """Thread that records the peaks of both."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._stopped = resident(), threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.002):
            self.peak = tuple(map(max, self.peak, resident()))

    def stop(self) -> tuple[float, float]:
        self._stopped.set()
        self.join()
        return self.peak


@torch.inference_mode()
def measure(folder: Path, variant: str) -> dict[str, float]:
    """Load and serve one variant in this process."""
    torch.manual_seed(0)
    start = resident()
    if variant == STATIC:
        model = openclip.load(folder)
    else:
        cache, execution = VARIANTS[variant]
        model = RetexModel.from_pretrained(folder, expert_cache=cache)
        model.execution = execution
    loaded = resident()
    watch = Watch()
    watch.start()
    for _ in range(BATCHES):
        batch = torch.cat([images(task, BATCH // len(TASKS)) for task in range(len(TASKS))])
        model.encode_image(batch)
    peak = watch.stop()
    return {
        "loaded": loaded[0] - start[0],
        "peak": peak[0] - start[0],
        "mapped": peak[1] - start[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("retex-memory"), help="where the artifact is, or goes")
    parser.add_argument("--variant", help="measure this one in this process (the script starts itself this way)")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments.folder, arguments.variant)))
        return
    if not arguments.folder.exists():
        write_artifact(arguments.folder)
    print("| | after loading (MB) | peak while serving (MB) | over static | mapped files (MB) |")
    print("|---|---:|---:|---:|---:|", flush=True)
    static = None
    for variant in (STATIC, *VARIANTS):
        command = [sys.executable, __file__, "--folder", str(arguments.folder), "--variant", variant]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        static = static or found
        ratio = found["peak"] / static["peak"]
        print(f"| {variant} | {found['loaded']:.0f} | {found['peak']:.0f} | {ratio:.2f}x | {found['mapped']:.0f} |")


if __name__ == "__main__":
    main()
