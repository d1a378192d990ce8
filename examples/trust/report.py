"""Run the trials in their long form, by hand, and write the table of their outcomes.

    python examples/trust/report.py                                  all of them, about two hours on 2 cores
    python examples/trust/report.py --only mutants --size short      one of them, in seconds, without touching the table

The long form stores the outcomes in `results.json` and writes the table of `README.md` from it, so that one kind can be
repeated alone. A failed trial is printed with the steps to reproduce it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find `trust` from any working folder

from retex_hf.utils.tables import Table
from trust import (
    architectures,
    classes,
    configurations,
    kills,
    links,
    matchers,
    mutants,
    odd_inputs,
    tensors,
    threads,
    uploads,
)
from trust.tally import Tally

TRIALS: dict[str, Callable[..., list[Tally]]] = {
    "mutants": mutants.run,
    "kills": kills.run,
    "threads": threads.run,
    "odd_inputs": odd_inputs.run,
    "configurations": configurations.run,
    "links": links.run,
    "matchers": matchers.run,
    "tensors": tensors.run,
    "uploads": uploads.run,
    "classes": classes.run,
    "architectures": architectures.run,
}
HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.json", HERE / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
LIBRARIES = ("torch", "transformers", "safetensors", "huggingface_hub")


def table(results: Mapping[str, Any]) -> Table:
    """Return one row per kind of trial, and one for all trials of a sort."""
    header = ["what was tried", "times", "came out as", "wrong"]
    rows, bold = [], set()
    for trial in (name for name in TRIALS if name in results):
        tallies = results[trial]["tallies"]
        rows += [_row(tally["name"], tally["outcomes"], tally["problems"]) for tally in tallies]
        outcomes = sum((Counter(tally["outcomes"]) for tally in tallies), Counter())
        bold |= {(len(rows), column) for column in range(len(header))}
        rows.append(_row(f"all {trial.replace('_', ' ')}", outcomes, sum(tally["problems"] for tally in tallies)))
    return Table(header, rows, frozenset(bold), words=(2,))


def _row(name: str, outcomes: Mapping[str, int], problems: int) -> list[str]:
    kinds: Counter[str] = Counter()
    for outcome, count in outcomes.items():
        kinds[outcome.partition(" (")[0]] += count  # the part in brackets is a detail for readers of the results
    said = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    return [name, f"{sum(outcomes.values()):,}", said, str(problems)]


def page(results: Mapping[str, Any]) -> str:
    """Return the page with the table of these results."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    ways = sorted({entry["versions"] for entry in results.values()})
    return f"{before}{BEGIN}\n{table(results).markdown()}\n\n{'; '.join(ways)}.\n{END}{after}"


def describe(tallies: list[Tally]) -> dict[str, Any]:
    """Return the stored values of a trial."""
    return {
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in LIBRARIES)]
        ),
        "tallies": [
            {"name": tally.name, "outcomes": dict(tally.outcomes), "problems": len(tally.problems)} for tally in tallies
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), help="the kinds of trials to do")
    parser.add_argument("--size", choices=("short", "long"), default="long", help="short: as the tests do")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other trials")
    parser.add_argument("--work-dir", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--lines", type=Path, help="with --only classes: what classes.py --output has written already")
    arguments = parser.parse_args()
    if arguments.lines and arguments.only != ["classes"]:
        parser.error("--lines goes with --only classes.")
    found, problems = {}, []
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as work:
        for trial in arguments.only:
            options = {"size": arguments.size, "seed": arguments.seed}
            tallies = classes.kept(arguments.lines) if arguments.lines else TRIALS[trial](Path(work) / trial, **options)
            found[trial] = describe(tallies)
            problems += [problem for tally in tallies for problem in tally.problems]
    print(table(found).text(), *problems, sep="\n")
    if arguments.size == "long":
        # Read only now: another kind may have run in the meantime.
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        known |= found
        RESULTS.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        PAGE.write_text(page(known), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
