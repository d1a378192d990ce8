"""Main tables of several suites in one: the table in docs/benchmarks.md.

    python examples/benchmarks/side_by_side.py vision=retex-vision text=retex-text t5=retex-text-to-text

Reads the `main_table.json` that main_table.py left in each work dir, or the result file that is named, and prints, for
the largest number of tasks, accuracy relative to the individual experts with the task known, unknown and under oracle
routing (with the standard deviation over seeds where there are several), and the storage beyond one model as a share of
all experts, where every number of 32 bits counts as one of 8. Oracle routing is shown where it differs from the task
known: systems that mix by a router go on mixing when they are told the task, all others run the part of the named task
either way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import read_json
from experiment import markdown_table

COLUMNS = ("known", "unknown", "oracle", "added")


def column(methods: dict[str, Any], name: str) -> list[str]:
    """Return the figures of one method in one suite; empty where the suite or a mode does not have it."""
    if name not in methods:
        return [""] * len(COLUMNS)
    modes = methods[name]["modes"]
    known, unknown, oracle = (
        figure(modes[mode]["normalised"]) if mode in modes else "" for mode in ("known", "unknown", "oracle")
    )
    return [known, unknown, "" if oracle == known else oracle, f"{methods[name]['storage']['added_rounded']:.1%}"]


def figure(found: dict[str, float]) -> str:
    """Format a mean, with the standard deviation over seeds where there is one.

    >>> figure({"value": 0.98, "std": 0.004}), figure({"value": 0.98})
    ('0.980 ± 0.004', '0.980')
    """
    spread = f" ± {found['std']:.3f}" if "std" in found else ""
    return f"{found['value']:.3f}{spread}"


def read(file: Path) -> dict[str, Any]:
    """Return the methods of the largest number of tasks of a result file."""
    sizes = read_json(file)["sizes"]
    return sizes[max(sizes, key=int)]["methods"]


def table(suites: dict[str, dict[str, Any]]) -> str:
    """Format the table; `suites` holds the methods of each suite, by its name."""
    names = list(dict.fromkeys(name for methods in suites.values() for name in methods))
    header = ["method", *(f"{suite}, {what}" for suite in suites for what in COLUMNS)]
    return markdown_table(
        header, [[name, *(cell for m in suites.values() for cell in column(m, name))] for name in names]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Main tables of several suites in one.")
    parser.add_argument("suites", nargs="+", metavar="NAME=PATH", help="work dirs of main_table.py, or result files")
    suites = {}
    for suite in parser.parse_args().suites:
        name, path = suite.split("=", 1)
        suites[name] = read(Path(path) / "main_table.json" if Path(path).is_dir() else Path(path))
    print(table(suites))


if __name__ == "__main__":
    main()
