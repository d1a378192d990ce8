"""Text of a model card for its template: tables, lists and code."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...config import RetexConfig, routing_options
from ...routing import Signatures
from ...utils.terminal import visible
from ..sizes import bytes_of_experts, sizes_of
from ..state import RetexParts
from .usage import IMAGE, snippet, use_of

SHOWN_LABELS = 4


def context(
    parts: RetexParts, folder: Path, name: str, results: Mapping[str, Mapping[str, float | None]]
) -> dict[str, Any]:
    """Return the values for the template; `folder` holds the artifact, the others are as in `write_card`.

    All text is escaped for Markdown, so that untrusted text is never markup. It is inserted into a template that is
    rendered once, so it is never a template either.
    """
    config, routing = parts.config, routing_options(parts.config.routing)
    identifies = parts.identified_by is not None
    use = use_of(parts.model)
    return {
        "title": plain(name.rpartition("/")[2]),
        "num_tasks": len(config.tasks),
        "base": plain(str((config.base_model or {}).get("id", "one base model"))),
        "architecture": type(parts.model).__name__,
        "identifies": identifies,
        "soft": routing["method"] == "soft",
        "far": {None: None, "merged": "the merged model", "soft": "a mixture of experts"}[routing["far"]],
        "usage": _fenced(snippet(parts.model, config, folder, name, identifies), "python"),
        "shell": _fenced(_shell(name, config, use.reads == IMAGE), "bash"),
        "task_table": _task_table(config),
        "result_table": _result_table(results, config.tasks),
        "rows": sum((parts.evaluation or {}).get("tasks", {}).get(task, 0) for task in config.tasks),
        "contents": _contents(parts),
        "storage_table": _storage_table(parts),
        "recipe": None
        if parts.recipe is None
        else _fenced(yaml.safe_dump(dict(parts.recipe), sort_keys=False, allow_unicode=True).strip(), "yaml"),
        "unrecorded": [plain(str(what)) for what in ([] if parts.recipe is None else parts.recipe.unrecorded)],
        "provenance_table": _provenance_table(config),
    }


def plain(text: str) -> str:
    """Escape untrusted text so that Markdown shows it literally, also in a table."""
    text = html.escape(visible(" ".join(text.split())), quote=False)
    text = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # within words it is no markup


def _fenced(code: str | None, language: str) -> str | None:
    if code is None:
        return None
    code = visible(code, keep="\n")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with names in the first column and numbers in the others."""
    rule = [":--", *("--:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _shell(name: str, config: RetexConfig, images: bool) -> str:
    asked = "photo.jpg" if images else '--text "A first text."'
    name = shlex.quote(" ".join(name.split()))
    lines = ["pip install retex-hf", f"retex predict {name} {asked}", f"retex inspect {name}"]
    task = next((task for task in config.tasks if re.fullmatch(r"[\w./-]+", task)), None)
    if task is not None:
        lines.append(f"retex export {name} {task} expert  # one expert as a plain checkpoint")
    return "\n".join(lines)


def _task_table(config: RetexConfig) -> str:
    rows = []
    for task in config.tasks:
        labels = list(config.labels.get(task, {}).get("id2label", {}).values())
        shown = ", ".join(plain(str(label)) for label in labels[:SHOWN_LABELS])
        more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
        rows.append([plain(task), str(len(labels)) if labels else "–", shown + more])
    if not config.labels:
        return _table(["task"], [row[:1] for row in rows])
    # Left-align class names, which are text.
    return _table(["task", "classes", "which"], rows).replace("--: |\n", ":-- |\n", 1)


def _result_table(results: Mapping[str, Mapping[str, float | None]], tasks: Sequence[str]) -> str | None:
    if not results:
        return None
    rows = [[plain(task), *(_percent(shares[task]) for shares in results.values())] for task in tasks]
    known = [[share for share in shares.values() if share is not None] for shares in results.values()]
    if [len(shares) for shares in known] == [len(shares) for shares in results.values()]:
        means = [sum(shares) / len(shares) for shares in known]
        rows.append(["**mean**", *(f"**{_percent(mean)}**" for mean in means)])
    return _table(["task", *results], rows)


def _contents(parts: RetexParts) -> list[str]:
    config, recovery = parts.config, parts.recovery
    merge = config.merge if isinstance(config.merge, str) else str(config.merge.get("method", "given"))
    layouts = [recovery[name].layout for name in recovery]
    ranks = [layout.solved_rank for layout in layouts if layout.is_factored]
    model = f"`{type(parts.model).__name__}`, merged by {plain(merge)}"
    lines = [f"A merged model ({model}), which loads by itself as a plain checkpoint."]
    offsets = f"Offsets of {len(layouts)} parameters for each task"
    if ranks:
        spread = f"rank {min(ranks)}" if min(ranks) == max(ranks) else f"ranks {min(ranks)} to {max(ranks)}"
        offsets += f": {len(ranks)} as low-rank products ({spread}), {len(layouts) - len(ranks)} whole"
    errors = [error for error in parts.errors.values() if error is not None]
    if errors:
        offsets += f". Relative error of the recovered differences, mean over tensors: {sum(errors) / len(errors):.3f}"
    lines.append(f"{offsets}.")
    if any(parts.heads.values()):
        lines.append("The output layer of each task, as its expert has it.")
    if parts.rows:
        lines.append("Embeddings of the tokens that only some tasks have, and the tokenizers of these.")
    lines.append(_signatures(parts))
    return lines


def _signatures(parts: RetexParts) -> str:
    found = parts.signatures
    if parts.identified_by == "weights":
        return (
            "Tasks are told apart by how strongly each one's own update responds to an input, without reference inputs "
            "of each."
        )
    if not isinstance(found, Signatures):
        return "No signatures: tasks cannot be told apart from inputs yet."
    return (
        f"Signatures that tell tasks apart: mean and a subspace of {found.basis.shape[1]} dimensions per task, of the "
        f"{found.mean.shape[1]} features up to `{found.feature_layer}`."
    )


def _storage_table(parts: RetexParts) -> str:
    sizes = sizes_of(parts)
    total, experts = sum(sizes.values()), bytes_of_experts(sizes, len(parts.config.tasks))
    rows = [[part, f"{size / 1e6:.2f}", _percent(size / experts)] for part, size in sizes.items()]
    rows.append(["**everything**", f"**{total / 1e6:.2f}**", f"**{_percent(total / experts)}**"])
    rows.append(["the experts, for comparison", f"{experts / 1e6:.2f}", "100.0"])
    return _table(["", "MB", "% of the experts"], rows)


def _provenance_table(config: RetexConfig) -> str:
    origins = {"base": config.base_model or {}} | {plain(task): config.experts.get(task, {}) for task in config.tasks}
    rows = []
    for part, origin in origins.items():
        where = {"hub": "Hub", "local": "local folder", "memory": "in memory"}.get(str(origin.get("source")), "–")
        rows.append([part, plain(str(origin.get("id", "–"))), where, plain(str(origin.get("revision", "–")))])
    return _table(["", "name", "from", "commit"], rows).replace("--:", ":--")
