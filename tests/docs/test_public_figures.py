"""The figures of docs/benchmarks.md on public fine-tunes are those of the result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import public_experts
from public_weights import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
FILES = ("public_experts", "public_experts_mixed")
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def families(file: str) -> dict:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["families"]


@pytest.mark.parametrize("file", FILES)
def test_the_tables_are_those_of_the_results(file):
    found = families(file)
    assert (RESULTS / f"{file}.md").read_text(encoding="utf-8") == public_experts.markdown(found)
    assert public_experts.summary(found).strip() in PAGE


def test_every_package_is_named_with_its_licence():
    for file in FILES:
        for name, found in families(file).items():
            for model, (package, licence) in found["packages"].items():
                source = FAMILIES[name].sources[model]
                assert (package, licence) == (source.package, source.licence)
                assert f"`{package}` ({licence})" in PAGE


def rows(found: dict) -> list[tuple[str, float, dict[str, dict[str, float]]]]:
    """Return every expert at every budget, with the figures of all systems."""
    return [
        (
            expert,
            budget,
            {point["system"]: point["experts"][expert] for point in family["points"] if point["budget"] == budget},
        )
        for family in found.values()
        for expert in family["updates"]
        for budget in sorted({point["budget"] for point in family["points"] if point["budget"]})
    ]


def leads(found: list) -> tuple[list[float], list[float]]:
    """Return how many times nearer in embeddings ReTeX is than the best SVD, and its lead in neighbours, by row."""
    pairs = [(systems["ReTeX"], [systems[rival] for rival in public_experts.SVDS]) for _, _, systems in found]
    return (
        [min(rival["embeddings"] for rival in rivals) / retex["embeddings"] for retex, rivals in pairs],
        [retex["neighbour"] - max(rival["neighbour"] for rival in rivals) for retex, rivals in pairs],
    )


def test_the_page_says_who_leads():
    said, found = " ".join(PAGE.split()), rows(families("public_experts"))
    factors, ahead = leads(found)
    assert (
        f"than every SVD in all {len(found)} rows of the first table, by a factor of {min(factors):.1f} to "
        f"{max(factors):.1f}, and"
    ) in said
    assert (
        f"the best SVD in {sum(lead >= 0 for lead in ahead)} rows; in the others, on rxnfp up to 1 %, "
        f"SVD on merged is up to {-100 * min(ahead):.1f} points ahead"
    ) in said
    behind = [(expert, budget) for (expert, budget, _), lead in zip(found, ahead, strict=True) if lead < 0]
    assert all(expert.startswith("bert_ft") and budget <= 0.01 for expert, budget in behind)
    for _, _, systems in found:
        rivals = [systems[rival]["embeddings"] for rival in public_experts.SVDS if "base" in rival]
        assert systems["ReTeX on the base"]["embeddings"] < min(rivals)


def test_the_page_says_who_leads_with_four_experts():
    factors, ahead = leads(rows(families("public_experts_mixed")))
    assert (
        f"in all {len(factors)} rows of the second table, by a factor of {min(factors):.1f} to {max(factors):.1f}, and "
        f"keeps more neighbours than the best SVD in {sum(lead > 0 for lead in ahead)}."
    ) in " ".join(PAGE.split())


def test_the_page_says_what_large_updates_cost():
    said, results = " ".join(PAGE.split()), families("public_experts")
    updates = {name: [f"{100 * update:.1f}" for update in found["updates"].values()] for name, found in results.items()}
    kept = {
        name: [f"{systems['ReTeX']['neighbour']:.3f}" for _, budget, systems in rows({name: found}) if budget == 0.04]
        for name, found in results.items()
    }
    update, share = ({name: " and ".join(values) for name, values in of.items()} for of in (updates, kept))
    assert (
        f"moved farther from their base ({update['rxnfp']} %) than those of MiniLM ({update['MiniLM']} %), and take "
        f"more bytes: at 4 % they keep {share['rxnfp']} of their neighbours, those of MiniLM {share['MiniLM']}."
    ) in said


def test_the_page_says_how_far_the_average_is():
    errors = []
    for family in families("public_experts").values():
        smaller = min(family["updates"], key=family["updates"].__getitem__)
        point = next(point for point in family["points"] if point["system"] == public_experts.MERGED)
        errors.append(f"{point['experts'][smaller]['error']:.3f}")
    assert f"relative errors of weights of {' and '.join(errors)}" in " ".join(PAGE.split())
