"""Models that other people fine-tuned and published in packages, as experts of ReTeX; measured without labels.

    python examples/benchmarks/public_experts.py --families MiniLM rxnfp
    python examples/benchmarks/public_experts.py --families MiniLM-mixed --shares 0.5

Three families (see public_weights.py): MiniLM with two fine-tunes of other authors; the same two beside two experts of
the quickstart, which are trained here; and rxnfp, a BERT of chemical reactions, with its two fine-tunes. MiniLM reads
test texts of the tasks that ship with the examples, rxnfp reactions made from templates (see reactions.py). Every
expert is compared with what a system restores of it: ReTeX on the average of the experts and on the base, and a
truncated SVD of each difference, on either, in as many bytes: rounded as ReTeX rounds, with and without embeddings, or
in bfloat16.

- error: distance of the weights from the expert's, relative to the size of its update (the base has 1)
- embeddings: distance of the embeddings from the expert's, relative to how far fine-tuning moved them (the base has 1)
- cosine: mean cosine distance between both embeddings of an input
- neighbour: share of inputs whose nearest neighbour among all others is the same as by the expert's embeddings

Writes `public_experts.{json,md}`. Finished cells are kept in the work dir.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bytes_bench import AROUND_BASE, BASE_MERGE, MERGED, ON_BASE, ON_MERGED
from common import quiet, train_experts, whole_folder
from experiment import RETEX, markdown_table, run, write
from measuring import Batch, gather, recovery_bytes, run_each
from public_weights import BASE, FAMILIES, Family, folder_of, write_family
from quickstart import TASKS, fine_tune_expert, load_task
from reactions import reactions
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from retex_hf import RetexConfig, RetexModel
from retex_hf.baselines import expert_weights, make
from retex_hf.baselines.compressed import BEST, Compressed
from retex_hf.baselines.merges import source_body
from retex_hf.data.readout import Classifier
from retex_hf.evaluation import Material
from retex_hf.merging.expert_weights import Weights

SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
ROWS = 200
BATCH = 64
MAX_TOKENS = 128
# Their digits in tables.
FIGURES = {"error": ".3f", "embeddings": ".3f", "cosine": ".4f", "neighbour": ".3f"}
# One rank for all matrices spends most bytes on word embeddings, which matter little: rivals may leave them out.
WITHOUT = "without embeddings"
SVDS: dict[str, dict[str, Any]] = {
    f"SVD on {of}{form}": {**reference, **options}
    for of, reference in (("merged", ON_MERGED), ("base", ON_BASE))
    for form, options in (
        ("", {"bits": BEST}),
        (", bfloat16", {"bits": None}),
        (f", {WITHOUT}", {"bits": BEST, "exclude": ["*embeddings*"]}),
    )
}
WHOLE = {BASE: "pretrained", MERGED: "average"}
MERGES: dict[str, dict[str, Any]] = {RETEX: {}, AROUND_BASE: {"merge": BASE_MERGE}}


def texts(count: int) -> list[str]:
    """Return as many test texts of every shipped task, in all `count`."""
    each = count // len(TASKS)
    return [text for name in TASKS for text in load_task(name).test_inputs[:each]]


INPUTS: dict[str, Callable[[int], list[str]]] = {"MiniLM": texts, "MiniLM-mixed": texts, "rxnfp": reactions}


def pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Return an embedding (rows, d) of hidden states (rows, tokens, d): the mean over tokens, or the first token's.

    >>> hidden, mask = torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]])
    >>> pooled(hidden, mask, "mean").item(), pooled(hidden, mask, "first").item()
    (2.0, 1.0)
    """
    if pooling == "first":
        return hidden[:, 0]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def neighbours(embeddings: Tensor) -> Tensor:
    """Return the row of the nearest neighbour of every row, by cosine.

    >>> neighbours(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])).tolist()
    [2, 2, 0]
    """
    normalised = functional.normalize(embeddings, dim=-1)
    return (normalised @ normalised.T).fill_diagonal_(-2).argmax(-1)


def compare(found: Tensor, expert: Tensor, base: Tensor) -> dict[str, float]:
    """Compare embeddings with the expert's; `base` are those before fine-tuning."""
    return {
        "embeddings": ((found - expert).norm() / (base - expert).norm()).item(),
        "cosine": (1 - functional.cosine_similarity(found, expert)).mean().item(),
        "neighbour": (neighbours(found) == neighbours(expert)).float().mean().item(),
    }


def distance(first: Weights, second: Weights) -> float:
    """Return the distance between two bodies."""
    return sum((first[name] - second[name]).double().square().sum().item() for name in second) ** 0.5


@dataclass(frozen=True)
class Restored:
    """What a system restores of every expert, the bytes that it adds to one model, and its settings."""

    bodies: Iterator[tuple[str, Weights]]
    size: int
    state: dict[str, Any]


class Bench:
    """The experts of a family, and their embeddings of all inputs."""

    def __init__(self, family: Family, work: Path, inputs: Sequence[str]) -> None:
        self.family, self.inputs = family, inputs
        self.tokenizer = AutoTokenizer.from_pretrained(folder_of(BASE, work))
        experts = {name: str(folder_of(name, work)) for name in family.names}
        base = str(folder_of(BASE, work))
        self.material = Material(base, experts, {}, {}, self.collate, Classifier())
        self.weights = expert_weights(self.material)
        self.experts_bytes = len(experts) * self.weights.body_bytes()
        self.base = self.embeddings(self.weights.base)
        self.own = {name: self.embeddings(self.weights.expert_body(name)) for name in family.names}

    def collate(self, inputs: Sequence[str]) -> Batch:
        """Return a batch of inputs, padded to its longest member."""
        options = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
        return dict(self.tokenizer(list(inputs), **options))

    @torch.inference_mode()
    def embeddings(self, body: Weights) -> Tensor:
        """Return the embeddings of all inputs by a body."""
        module = self.weights.module(body, self.family.names[0])
        return gather(lambda batch: self._embed(module, batch), self.inputs, self.collate, BATCH)

    def _embed(self, module: nn.Module, batch: Batch) -> Tensor:
        return pooled(module(**batch).last_hidden_state, batch["attention_mask"], self.family.pooling)

    def updates(self) -> dict[str, float]:
        """Return the size of every expert's update, relative to the base."""
        size = distance(self.weights.base, dict.fromkeys(self.weights.base, torch.zeros(())))
        return {name: distance(self.weights.expert_body(name), self.weights.base) / size for name in self.family.names}

    def measure(self, restored: Restored) -> dict[str, Any]:
        """Compare what a system restores with every expert."""
        found = {name: self.figures(name, body) for name, body in restored.bodies}
        return {"share": restored.size / self.experts_bytes, "state": restored.state, "experts": found}

    def figures(self, name: str, body: Weights) -> dict[str, float]:
        """Compare a body with one expert."""
        expert = self.weights.expert_body(name)
        error = distance(body, expert) / distance(self.weights.base, expert)
        return {"error": error, **compare(self.embeddings(body), self.own[name], self.base)}

    def whole(self, source: str) -> Restored:
        """Return one body for all experts: the base, or their average."""
        body = source_body(self.weights, source)
        return Restored(((name, body) for name in self.family.names), 0, {})

    def retex(self, share: float, options: Mapping[str, Any]) -> Restored:
        """Return ReTeX at a share of the experts' bytes, with its defaults otherwise."""
        config = RetexConfig(storage=share, **options)
        model = RetexModel.from_experts(self.material.base, self.material.experts, config, progress=False)
        bodies = ((name, self._recovered(model, name)) for name in self.family.names)
        return Restored(bodies, recovery_bytes(model), {})

    def _recovered(self, model: RetexModel, name: str) -> Weights:
        state = model.recover(name)
        return {name: state[name].float() for name in self.weights.base}

    def svd(self, share: float, options: Mapping[str, Any]) -> Restored:
        """Return a truncated SVD of every expert's difference, at a share of the experts' bytes."""
        method = make("svd", storage=share, **options)
        assert isinstance(method, Compressed)
        method.fit(self.material)
        return Restored(((name, method.body(name)) for name in self.family.names), method.added_bytes(), method.state())

    def restored(self, system: str, share: float | None) -> Restored:
        """Return a system at a share of the experts' bytes; None where it adds none."""
        if share is None:
            return self.whole(WHOLE[system])
        if system in MERGES:
            return self.retex(share, MERGES[system])
        return self.svd(share, SVDS[system])


def planned(shares: Sequence[float]) -> list[tuple[str, float | None]]:
    """Return all systems and sizes. Those of one reference together: its singular vectors are computed once."""
    return [(system, None) for system in WHOLE] + [(system, share) for system in (*MERGES, *SVDS) for share in shares]


def train_missing(family: Family, folder: Path) -> None:
    """Train the family's own experts that are missing, and save their bodies beside the public ones."""
    base, trained = folder_of(BASE, folder), folder / "trained"
    tasks = [load_task(name) for name in family.trained if not folder_of(name, folder).exists()]
    if tasks:
        train_experts(tasks, trained, {}, lambda task, where: fine_tune_expert(base, task, TASKS[task.name], where))
    for task in tasks:
        with whole_folder(folder_of(task.name, folder)) as partial:
            AutoModel.from_pretrained(trained / "experts" / task.name).save_pretrained(partial)


def measure_family(name: str, work: Path, rows: int, shares: Sequence[float]) -> dict[str, Any]:
    """Return all figures of a family."""
    family, folder = FAMILIES[name], work / name
    write_family(family, folder, work / "downloads")
    train_missing(family, folder)
    inputs = INPUTS[name](rows)
    bench = Bench(family, folder, inputs)
    packages = {model: [source.package, source.licence] for model, source in family.sources.items()}
    plan = [(system, None if share is None else share / 100) for system, share in planned(shares)]
    cells = {
        f"{system}, {share}": ([system, share], lambda one=(system, share): bench.measure(bench.restored(*one)))
        for system, share in plan
    }
    found = run_each(work, name, cells, {"packages": packages, "experts": family.names, "inputs": len(inputs)})
    points = [
        {"system": system, "budget": share, **value}
        for (system, share), value in zip(plan, found.values(), strict=True)
    ]
    return {"packages": packages, "inputs": len(inputs), "updates": bench.updates(), "points": points}


def summary(families: Mapping[str, Any]) -> str:
    """Format one table of all experts: `embeddings / neighbour` of every rounded system at every budget."""
    systems = (MERGED, *MERGES, *(system for system, options in SVDS.items() if options["bits"] == BEST))
    rows = []
    for name, found in families.items():
        points = {(point["system"], point["budget"]): point["experts"] for point in found["points"]}
        budgets = sorted({budget for _, budget in points if budget is not None})
        for expert, update in found["updates"].items():
            for budget in budgets:
                figures = [points[system, None if system in WHOLE else budget][expert] for system in systems]
                cells = [f"{one['embeddings']:.3f} / {one['neighbour']:.3f}" for one in figures]
                rows.append([f"{name}: {expert}", f"{100 * update:.1f}", f"{100 * budget:g}", *cells])
    return markdown_table(["expert", "update (%)", "added (%)", *systems], rows)


def markdown(families: Mapping[str, Any]) -> str:
    """Format the table of all experts, and one per expert."""
    parts = ["# Public fine-tunes as experts", f"Embeddings / neighbour:\n\n{summary(families).strip()}"]
    for name, found in families.items():
        packages = [f"{model}: {package} ({licence})" for model, (package, licence) in found["packages"].items()]
        parts.append(f"## {name}\n\n{', '.join(packages)}. {found['inputs']} inputs.")
        for expert, update in found["updates"].items():
            rows = [
                [point["system"], f"{100 * point['share']:.3g}"]
                + [f"{point['experts'][expert][key]:{digits}}" for key, digits in FIGURES.items()]
                for point in found["points"]
            ]
            table = markdown_table(["kept", "added (%)", *FIGURES], rows)
            parts.append(f"### {expert}\n\nIts update is {100 * update:.1f} % of the base.\n\n{table.strip()}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("retex-public"), help="packages, models, cells, results")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="added bytes, in per cent of the experts'"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="inputs of each family")
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    found = {
        name: measure_family(name, arguments.work_dir, arguments.rows, arguments.shares) for name in arguments.families
    }
    write(arguments.work_dir, "public_experts", {"families": found}, markdown(found), None)


if __name__ == "__main__":
    run(main)
