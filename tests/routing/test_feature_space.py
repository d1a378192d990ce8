"""The space of features: what inputs of every task vary in counts less, and everything is held out that is judged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retex_hf.backends.input_forms import Tokens
from retex_hf.routing import FeatureSpace, Signatures
from retex_hf.routing.feature_space import DIRECTIONS, LARGE, top_directions
from retex_hf.routing.perturbation import perturbed_inputs
from retex_hf.routing.signatures import cross_validated, fitted_temperature, identified

WIDTH = 12


def tasks(rows: int, nuisance: float, seed: int = 0) -> list[dict[str, Tensor]]:
    """Three tasks one apart along the first axis, which all vary along the last by `nuisance`."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for task in range(3):
        features = 0.2 * torch.randn(rows, WIDTH, generator=draw)
        features[:, 0] += task
        features[:, -1] += nuisance * torch.randn(rows, generator=draw)
        found.append({"layer": features})
    return found


def test_directions_in_which_every_task_varies_are_shrunk_and_others_stay():
    features = tasks(400, nuisance=5.0)
    space = FeatureSpace.fit(["layer"], features)
    axes = torch.eye(WIDTH) / space.scale
    lengths = space({"layer": axes}).norm(dim=1)
    assert lengths[-1] < 0.3
    torch.testing.assert_close(lengths[:-1], torch.ones(WIDTH - 1), rtol=0, atol=0.1)


def test_corruption_along_a_shared_direction_misleads_less():
    """Means differ a little along the direction that every task varies in, and corruption moves inputs along it."""
    references, inputs = tasks(64, nuisance=1.0), tasks(200, nuisance=1.0, seed=1)
    for task in range(3):
        references[task]["layer"][:, -1] += 0.5 * task
        inputs[task]["layer"][:, -1] += 0.5 * task + 4
    shares = []
    for space in (FeatureSpace.plain("layer"), FeatureSpace.fit(["layer"], references)):
        signatures = Signatures.fit_in(space, [space(task) for task in references], 0)
        shares.append(identified([signatures.residuals(space(task)) for task in inputs]))
    assert shares[0] < 0.5
    assert shares[1] > 0.75


def test_layers_of_any_scale_count_alike():
    features = [{"small": task["layer"], "large": 1000 * task["layer"]} for task in tasks(50, nuisance=1.0)]
    space = FeatureSpace.fit(["small", "large"], features)
    torch.testing.assert_close(space.scale[0] / space.scale[1], torch.tensor(1000.0), rtol=1e-4, atol=0)
    with_both = space(features[0])
    scaled = FeatureSpace(space.layers, space.scale, torch.zeros(0, 0))(features[0])
    torch.testing.assert_close(scaled[:, :WIDTH], scaled[:, WIDTH:])
    assert with_both.shape == (50, 2 * WIDTH)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_references_shrink_no_directions_or_few(rows):
    space = FeatureSpace.fit(["layer"], tasks(rows, nuisance=1.0))
    assert len(space.common) <= rows
    assert torch.isfinite(space(tasks(4, 1.0)[0])).all()


def test_identical_references_stay_finite():
    features = [{"layer": torch.full((8, WIDTH), float(task))} for task in range(3)]
    space = FeatureSpace.fit(["layer"], features)
    assert torch.equal(space(features[1]), features[1]["layer"])


def test_large_sets_have_nearly_the_same_directions():
    generator = torch.Generator().manual_seed(0)
    spectrum = 0.95 ** torch.arange(LARGE + 200)
    rows = torch.randn(LARGE + 100, LARGE + 200, generator=generator) * spectrum
    exact, _ = torch.linalg.svd(rows.double(), full_matrices=False)[1:]
    state = torch.random.get_rng_state()
    values, directions = top_directions(rows, 40)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(values, exact[:40], rtol=1e-3, atol=0)
    torch.testing.assert_close(directions @ directions.T, torch.eye(40).double(), rtol=0, atol=1e-4)
    assert torch.equal(top_directions(rows, 40)[1], directions)


def test_rows_are_judged_by_what_was_fitted_without_them():
    """With as many dimensions as references, a row that was fitted has no residual."""
    features = tasks(8, nuisance=1.0)
    seen = []

    def make(kept, worse):
        assert worse is None
        seen.append([task["layer"] for task in kept])
        return FeatureSpace.fit(["layer"], kept)

    residuals = cross_validated(features, 1.0, make)
    assert [found.shape for found in residuals] == [(8, 3)] * 3
    for fold, kept in enumerate(seen):
        for task in range(3):
            out = features[task]["layer"][fold::4]
            assert not any((row == kept[task]).all(1).any() for row in out)
    assert all((found[:, task] > 0).all() for task, found in enumerate(residuals))


def test_the_temperature_makes_probabilities_right():
    """Residuals whose softmax at temperature 3 is the chance of the task."""
    draw = torch.Generator().manual_seed(0)
    residuals = 6 * torch.rand(30_000, 2, generator=draw)
    chance = torch.softmax(-residuals / 3, 1)[:, 0]
    first = torch.rand(len(chance), generator=draw) < chance
    found = fitted_temperature([residuals[first], residuals[~first]])
    assert found == pytest.approx(3, rel=0.05)


def test_the_temperature_of_nothing_is_one():
    assert fitted_temperature([torch.full((3, 2), torch.inf)] * 2) == 1.0
    assert fitted_temperature([torch.rand(5, 1)]) == 1.0


def test_directions_along_which_perturbation_moves_inputs_are_shrunk():
    """Contrast, say, moves inputs of a task along one axis, along which its references do not vary."""
    features = tasks(100, nuisance=0.2)
    moved = torch.zeros(WIDTH)
    moved[3] = 4.0
    draw = torch.Generator().manual_seed(2)
    perturbed = [{"layer": task["layer"] + torch.rand(100, 1, generator=draw) * moved} for task in features]
    for space, least, most in (
        (FeatureSpace.fit(["layer"], features), 0.9, 1.1),
        (FeatureSpace.fit(["layer"], features, perturbed), 0.0, 0.3),
    ):
        lengths = space({"layer": torch.eye(WIDTH) / space.scale}).norm(dim=1)
        assert least < lengths[3] < most
        assert lengths[0] > 0.8


def test_perturbed_references_keep_identification_under_corruption():
    """Tasks differ a little along the axis that corruption moves inputs along, and clearly along another."""
    references, inputs = tasks(64, nuisance=0.2), tasks(200, nuisance=0.2, seed=1)
    corruption = torch.zeros(WIDTH)
    corruption[3] = 5.0
    for task in range(3):
        for features in (references, inputs):
            features[task]["layer"][:, 3] += 0.7 * task
    draw = torch.Generator().manual_seed(2)
    perturbed = [{"layer": task["layer"] + torch.rand(64, 1, generator=draw) * corruption} for task in references]
    worse = [{"layer": task["layer"] + 0.6 * corruption} for task in inputs]
    shares = []
    for given in (None, perturbed):
        space = FeatureSpace.fit(["layer"], references, given)
        signatures = Signatures.fit_in(space, [space(task) for task in references], 1)
        shares.append([identified([signatures.residuals(space(task)) for task in some]) for some in (inputs, worse)])
    assert shares[0][0] > 0.95
    assert shares[0][1] < 0.6
    assert shares[1][0] > 0.9
    assert shares[1][1] > 0.9


def test_held_out_perturbed_inputs_are_judged_in_their_place():
    features = tasks(16, nuisance=1.0)
    perturbed = [{"layer": task["layer"] + 100} for task in features]
    seen = []

    def make(kept, worse):
        seen.append([(one["layer"] + 100 == other["layer"]).all() for one, other in zip(kept, worse, strict=True)])
        return FeatureSpace.plain("layer")

    clean = cross_validated(features, 2, make, perturbed)
    far = cross_validated(features, 2, make, perturbed, judge_perturbed=True)
    assert len(seen) == 8
    assert all(map(all, seen))
    assert max(found.max() for found in clean) < 20
    assert min(found.min() for found in far) > 50


def test_perturbed_inputs_keep_their_form():
    mask = torch.ones(64, 30, dtype=torch.long)
    mask[:32, :10] = 0
    inputs = {
        "input_ids": torch.randint(1000, 2000, (64, 30), generator=torch.Generator().manual_seed(0)),
        "attention_mask": mask,
        "pixel_values": torch.rand(64, 3, 8, 8),
        "other": torch.ones(64, 5),
    }
    form = Tokens("input_ids", 30_000)
    found = perturbed_inputs(inputs, form)
    assert found["other"] is inputs["other"]
    changed = (found["input_ids"] != inputs["input_ids"]).float().mean(1)
    assert changed.mean() == pytest.approx(0.3, abs=0.05)
    assert changed.min() < 0.1
    assert changed.max() > 0.45
    assert found["input_ids"].max() > 20_000
    assert torch.equal(perturbed_inputs(inputs)["input_ids"], inputs["input_ids"])  # of an unknown vocabulary
    rows, before = found["pixel_values"].flatten(1), inputs["pixel_values"].flatten(1)
    torch.testing.assert_close(rows.mean(1), before.mean(1), rtol=0, atol=0.05)
    contrast = rows.std(1) / before.std(1)
    assert 0.2 < contrast.min() < 0.45
    assert 0.85 < contrast.max() < 1.2
    later = perturbed_inputs({name: value[40:50] for name, value in inputs.items()}, form, 40)
    assert all(torch.equal(one[40:50], other) for one, other in zip(found.values(), later.values(), strict=True))


def test_texts_are_cut_at_their_end():
    mask = torch.ones(64, 30, dtype=torch.long)
    mask[:32, :10] = 0
    ids = torch.full((64, 30), 7)
    ids[:, -1] = 2
    form = Tokens("input_ids", 10, reserved=frozenset({2}))
    cut = perturbed_inputs({"input_ids": ids, "attention_mask": mask}, form)["attention_mask"]
    assert (cut <= mask).all()
    assert (cut[:, -1] == 1).all()  # reserved
    inner, left = cut[:, :-1], cut[:, :-1].sum(1)
    assert 3 <= left.min() < 9
    assert left.max() > 24
    kept = inner.cumsum(1)  # the first tokens that were there stay, and no others
    assert torch.equal(inner.bool(), (mask[:, :-1].cumsum(1) <= left.unsqueeze(1)) & mask[:, :-1].bool())
    assert torch.equal(kept[:, -1], left)


def test_reserved_tokens_stay_where_they_are():
    tokens = torch.randint(0, 4, (32, 40), generator=torch.Generator().manual_seed(0))
    found = perturbed_inputs({"input_ids": tokens}, Tokens("input_ids", 50, reserved=frozenset({0, 2})))["input_ids"]
    assert (found > 3).any()  # others of the vocabulary
    for reserved in (0, 2):
        assert torch.equal(found == reserved, tokens == reserved)


def test_no_more_directions_than_said():
    generator = torch.Generator().manual_seed(0)
    features = [{"layer": torch.randn(300, 400, generator=generator)} for _ in range(3)]
    assert FeatureSpace.fit(["layer"], features).common.shape == (DIRECTIONS, 400)
