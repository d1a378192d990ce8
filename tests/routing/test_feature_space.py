"""The space of features: what inputs of every task vary in counts less, and everything is held out that is judged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retex_hf.routing import FeatureSpace, Signatures
from retex_hf.routing.feature_space import DIRECTIONS, LARGE, top_directions
from retex_hf.routing.fitting import perturbed_inputs
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

    def make(kept):
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


def test_perturbed_inputs_keep_their_form():
    mask = torch.ones(16, 30, dtype=torch.long)
    inputs = {
        "input_ids": torch.arange(480).view(16, 30),
        "attention_mask": mask,
        "pixel_values": torch.rand(16, 3, 8, 8),
    }
    found = perturbed_inputs(inputs)
    assert found["attention_mask"] is mask
    changed = (found["input_ids"] != inputs["input_ids"]).float().mean()
    assert 0.05 < changed < 0.15
    assert set(found["input_ids"].flatten().tolist()) <= set(range(480))
    rows, before = found["pixel_values"].flatten(1), inputs["pixel_values"].flatten(1)
    torch.testing.assert_close(rows.mean(1), before.mean(1), rtol=0, atol=0.03)
    torch.testing.assert_close(rows.std(1), (0.5**2 + 0.25**2) ** 0.5 * before.std(1), rtol=0.15, atol=0)
    assert all(
        torch.equal(one, other) for one, other in zip(found.values(), perturbed_inputs(inputs).values(), strict=True)
    )


def test_reserved_tokens_stay_where_they_are():
    tokens = torch.randint(0, 4, (32, 40), generator=torch.Generator().manual_seed(0))
    found = perturbed_inputs({"input_ids": tokens}, {0, 2})["input_ids"]
    assert (found != tokens).any()
    for reserved in (0, 2):
        assert torch.equal(found == reserved, tokens == reserved)


def test_no_more_directions_than_said():
    generator = torch.Generator().manual_seed(0)
    features = [{"layer": torch.randn(300, 400, generator=generator)} for _ in range(3)]
    assert FeatureSpace.fit(["layer"], features).common.shape == (DIRECTIONS, 400)
