"""Experts per stored byte: accuracy, and agreement with the experts' own answers, against the bytes that are added.

    python examples/benchmarks/bytes.py --recipe examples/recipes/experiments/text8.yaml --plot
    python examples/benchmarks/bytes.py --rows 50 --shares 0.5 2 --methods ReTeX "SVD on merged" --tasks 4

ReTeX with `storage=` and all systems that keep experts in few bytes (`retex_hf.baselines`), task known. Bytes are those
beside one model and the heads, as a share (in per cent) of the bytes of all experts; rules in
`retex_hf/baselines/compressed.py`. Systems with a knob take the largest setting that fits each of `--shares`; those
without have one size, and ReTeX is built at that size too. Systems that leave the number of bits open run in bfloat16,
which is close to how they were published, and rounded as ReTeX rounds: at the bits, of factors and of vectors, that
leave the least error as ReTeX counts it (those without a knob at 3 bits). Nothing is chosen by rows. "ReTeX on the
base" is ReTeX with the base in place of the merged model. It stands in for ADAMIX, which also allocates bits to the
singular vectors of task vectors.

Accuracy is relative to each expert's; agreement is the share of rows with the expert's own answer (the same text, where
answers are texts). Differences are paired by rows, with 95 % bootstrap intervals. Every size is a cell with all its
rows, so interrupted runs resume. Writes `--out` (default `<work>/bytes.json`) and beside it `.md`, and with `--plot`
`.png`. `--known` takes rivals from such a file of an earlier run, if its experts answered the same rows alike: they are
fitted, but need not answer. `--join` takes all points of such files as they are, so that parts of a study can run apart
(`--methods` without a value measures nothing else).
"""

from __future__ import annotations

import json
from pathlib import Path

from bytes_bench import AROUND_BASE, RIVALS, Bench, measure_all, rows_of
from bytes_table import FORMS, Point, as_hex, as_json, figure, markdown, tabulate
from experiment import RETEX, command, load, parse, run

from retex_hf.artifact.plots import DPI
from retex_hf.errors import ConfigError

SHARES = (0.25, 0.5, 1, 2, 4, 8, 16)


def main() -> None:
    names = [RETEX, AROUND_BASE, *RIVALS]
    recipe, arguments = parse(
        __doc__,
        split={"choices": ("validation", "test"), "default": "test", "help": "rows to answer"},
        shares={"type": float, "nargs": "+", "default": SHARES, "help": "added bytes, in per cent of the experts'"},
        methods={"nargs": "*", "default": names, "choices": names, "metavar": "METHOD", "help": f"of {names}"},
        forms={"nargs": "+", "default": FORMS, "choices": FORMS, "help": "of rivals that leave their bits open"},
        tasks={"type": int, "help": "the first so many tasks; default: all"},
        out={"type": Path, "help": "results; default: bytes.json in the work dir"},
        known={"type": Path, "help": "results of an earlier run, to take rivals from"},
        join={"type": Path, "nargs": "+", "default": [], "metavar": "FILE", "help": "results to put into this table"},
        plot={"action": "store_true", "help": "draw the curves"},
    )
    study = load(recipe, arguments.work_dir, mirror=arguments.mirror)
    if arguments.tasks is not None:
        if not 0 < arguments.tasks <= len(study.tasks):
            raise ConfigError(f"--tasks must be between 1 and {len(study.tasks)}, not {arguments.tasks}.")
        study = study.subset(arguments.tasks)
    bench = Bench(study, rows_of(study, arguments.split), arguments.split, arguments.work_dir, arguments.only)
    if arguments.known is not None:
        bench.learn(arguments.known)
    joined = [bench.read(file) for file in arguments.join]
    points = [Point.from_dict(point) for results in joined for point in results["points"]]
    shares = [share / 100 for share in arguments.shares]
    points += measure_all(bench, arguments.methods, shares, arguments.forms)
    rows = tabulate(points, bench.experts_correct)
    title = f"{arguments.recipe.stem}, {len(study.tasks)} tasks, {arguments.split} rows"
    text, out = markdown(rows, title), arguments.out or arguments.work_dir / "bytes.json"
    results = {
        "command": command(),
        **({"joined": [results["command"] for results in joined]} if joined else {}),
        "recipe": recipe.to_dict(),
        "tasks": study.tasks,
        "split": arguments.split,
        "experts_bytes": bench.experts_bytes,
        "experts_correct": as_hex(bench.experts_correct),
        "points": [as_json(row) for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    if arguments.plot:
        figure(rows).savefig(out.with_suffix(".png"), dpi=DPI)
    print("\n" + text)


if __name__ == "__main__":
    run(main)
