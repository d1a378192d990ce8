"""Every variant of the paper: solved exactly, saved, loaded, used; and never beaten by training."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, TEXT, tokens
from helpers import TASKS, assert_same, make_experts
from torch import Tensor
from transformers import BertConfig, BertModel

from retex_hf import ConfigError, RetexConfig, RetexModel, TrainingConfig

VARIANTS = {
    "offset": {},
    "retex-e": {"inner_rank": 2},
    "affine": {"recovery": "affine"},
    "reversed": {"factor_order": "shared_first"},
    "reversed-retex-e": {"factor_order": "shared_first", "inner_rank": 2},
    "shared-layers": {"share_layers": True},
    "narrow": {"task_embedding_dim": 1},
    "wide": {"task_embedding_dim": 8},
    "dirichlet": {"soft_training": "dirichlet"},
    "uniform": {"soft_training": "uniform_softmax"},
    "gaussian": {"soft_training": "gaussian_softmax"},
    "affine-shared": {"recovery": "affine", "share_layers": True},
    "affine-reversed": {"recovery": "affine", "factor_order": "shared_first"},
    "narrow-soft": {"task_embedding_dim": 1, "soft_training": "dirichlet", "merge": "task_arithmetic"},
    "narrow-shared": {"task_embedding_dim": 1, "share_layers": True},
    "narrow-retex-e": {"task_embedding_dim": 1, "inner_rank": 2},
    "narrow-reversed": {"task_embedding_dim": 1, "factor_order": "shared_first"},
}


@pytest.fixture(scope="module")
def base() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**TEXT)).eval()


@pytest.fixture(scope="module")
def experts(base) -> dict[str, BertModel]:
    return make_experts(base)


def build(base, experts, **options) -> RetexModel:
    return RetexModel.from_experts(base, experts, RetexConfig.paper(**{"rank": 4, **options}), progress=False)


@torch.no_grad()
def squared_error(model: RetexModel, experts: dict[str, BertModel], names=None) -> float:
    """What recovery misses, over all tasks and parameters."""
    total = 0.0
    for task, expert in experts.items():
        recovered, target = model._state.expert(task).state_dict(), expert.state_dict()
        for name in names or target:
            total += (recovered[name] - target[name]).double().square().sum().item()
    return total


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_variant_is_saved_loaded_and_used(base, experts, options, tmp_path):
    model = build(base, experts, **options)
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    inputs = tokens(6)
    mixed = ["green", "red", "blue", "red", "red", "blue"]
    assert_same(loaded(**inputs, task=mixed), model(**inputs, task=mixed), exact=True)
    with model.disable_adapter():
        merged = model(**inputs).last_hidden_state
    assert not torch.allclose(model(**inputs, task="red").last_hidden_state, merged)
    assert loaded.retex_config == model.retex_config
    assert loaded.recovery_errors == model.recovery_errors


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_reported_errors_are_the_achieved_ones(base, experts, options):
    model = build(base, experts, **options)
    merged = model.get_base_model().state_dict()
    groups: dict[str, list[str]] = {}
    for name in model.recovery:
        groups.setdefault(model.recovery.generator_name(name), []).append(name)
    for names in groups.values():
        energy = sum(
            (experts[task].state_dict()[name] - merged[name]).double().square().sum().item()
            for task in TASKS
            for name in names
        )
        missed = squared_error(model, experts, names)
        assert model.recovery_errors[names[0]] == pytest.approx((missed / energy) ** 0.5, abs=1e-3)


def test_retex_e_spans_what_its_inner_rank_spans(base, experts):
    inner, plain = build(base, experts, inner_rank=2), build(base, experts, rank=2)
    for task in TASKS:
        ours, theirs = inner.recover(task), plain.recover(task)
        for name in inner.recovery:
            if inner.recovery[name].layout.kind == plain.recovery[name].layout.kind == "matrix":
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_reversed_order_is_the_transposed_problem(base, experts):
    name = "encoder.layer.0.intermediate.dense.weight"
    model = build(base, experts, factor_order="shared_first")
    merged = model.get_base_model().state_dict()[name].double()
    side_by_side = torch.cat([experts[task].state_dict()[name].double() - merged for task in TASKS], dim=1)
    discarded = torch.linalg.svdvals(side_by_side)[4:].square().sum().item()
    assert squared_error(model, experts, [name]) == pytest.approx(discarded, rel=1e-4)


def test_shared_layers_fit_the_mean_difference(base, experts):
    model = build(base, experts, share_layers=True)
    names = [f"encoder.layer.{i}.attention.self.{p}.weight" for i in range(2) for p in ("query", "key", "value")]
    assert len({model.recovery.generator_name(name) for name in names}) == 1
    merged = model.get_base_model().state_dict()
    offsets = {name: model.recover("red")[name] - merged[name] for name in names}
    for name in names[1:]:
        torch.testing.assert_close(offsets[name], offsets[names[0]], rtol=1e-4, atol=1e-5)
    square = [n for n in model.recovery if model.recovery.generator_name(n) == model.recovery.generator_name(names[0])]
    means = [
        torch.stack([experts[task].state_dict()[name] - merged[name] for name in square]).double().mean(0)
        for task in TASKS
    ]
    left, values, right = torch.linalg.svd(torch.cat(means), full_matrices=False)
    best = (left[:, :4] * values[:4]) @ right[:4]
    torch.testing.assert_close(offsets[names[0]].double(), best[: len(means[0])], rtol=1e-3, atol=1e-4)


def test_affine_is_never_worse_than_offset_and_its_scales_are_best(base, experts):
    affine, offset = build(base, experts, recovery="affine"), build(base, experts)
    assert squared_error(affine, experts) < squared_error(offset, experts)
    merged = affine.get_base_model().state_dict()
    name = "encoder.layer.0.output.dense.weight"
    generator, scale = affine.recovery[name], affine.recovery.scale(name)
    for index, task in enumerate(TASKS):
        embedding = affine.recovery.task_embedding[index]
        low_rank = generator(embedding)
        residual = experts[task].state_dict()[name] - low_rank - scale(embedding) * merged[name]
        # At the optimum the residual has nothing left along the merged weights.
        along = (residual * merged[name]).sum() / (residual.norm() * merged[name].norm())
        assert abs(along.item()) < 2e-2


def moments_loss(model: RetexModel, experts: dict[str, BertModel], moments: Tensor, name: str) -> float:
    misses = torch.stack(
        [(model.recover(task)[name] - experts[task].state_dict()[name]).double().flatten() for task in TASKS]
    )
    return torch.einsum("st,sd,td->", moments, misses, misses).item()


@pytest.mark.parametrize("alpha", [0.01, 1.0, 5.0])
def test_dirichlet_and_one_hot_optima_coincide_for_the_average(base, experts, alpha):
    soft = build(base, experts, soft_training={"method": "dirichlet", "alpha": alpha})
    hard = build(base, experts)
    for task in TASKS:
        assert_same(soft.recover(task), hard.recover(task), rtol=1e-4, atol=1e-5)


def test_dirichlet_optimum_differs_for_task_arithmetic_and_is_better_on_mixtures(base, experts):
    from retex_hf.recovery import dirichlet_moments

    options = {"merge": {"method": "task_arithmetic", "scale": 0.1}}
    soft, hard = build(base, experts, soft_training="dirichlet", **options), build(base, experts, **options)
    name = "encoder.layer.0.output.dense.weight"
    moments = dirichlet_moments(3, 1.0)
    assert moments_loss(soft, experts, moments, name) < 0.999 * moments_loss(hard, experts, moments, name)
    assert squared_error(soft, experts, [name]) > 1.001 * squared_error(hard, experts, [name])


def test_a_narrow_embedding_is_between_one_offset_for_all_and_free_ones(base, experts):
    errors = [squared_error(build(base, experts, task_embedding_dim=d), experts) for d in (1, 2, 3)]
    assert errors[0] > errors[1] * 1.01
    # With a bias, T - 1 dimensions already make all tasks free.
    assert errors[1] == pytest.approx(errors[2], rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "resnet", "open_clip-resnet", "mamba"])
def test_variants_work_beyond_plain_matrices(family):
    family = FAMILIES[family]
    base = family.make().eval()
    experts = make_experts(base)
    for name in ("affine", "reversed-retex-e", "affine-shared", "narrow-soft"):
        options = VARIANTS[name]
        config = RetexConfig(**{"rank": 4, **options})
        model = RetexModel.from_experts(base, experts, config, model_config=family.model_config, progress=False)
        merged = squared_error_of_merged(model, experts)
        assert squared_error(model, experts, list(model.recovery)) < merged


def squared_error_of_merged(model: RetexModel, experts) -> float:
    merged = model.get_base_model().state_dict()
    return sum(
        (expert.state_dict()[name] - merged[name]).double().square().sum().item()
        for expert in experts.values()
        for name in model.recovery
    )


ADAM = TrainingConfig(steps=80, warmup_steps=8, learning_rate=3e-2, batch_size=3, log_every=80)


@pytest.mark.parametrize(
    "options",
    [VARIANTS[name] for name in ("offset", "retex-e", "affine", "reversed", "shared-layers", "narrow")],
    ids=["offset", "retex-e", "affine", "reversed", "shared-layers", "narrow"],
)
def test_exact_is_never_worse_than_adam(base, experts, options):
    exact = build(base, experts, **options)
    config = RetexConfig(**{"rank": 4, **options})
    trained = RetexModel.from_experts(base, experts, config, solver="adam", training=ADAM, progress=False)
    assert squared_error(exact, experts) <= squared_error(trained, experts) * (1 + 1e-6)


def test_a_narrow_embedding_of_experts_that_equal_the_merge(base):
    model = build(base, dict.fromkeys(TASKS, base), task_embedding_dim=1)
    assert len(model.recovery) == 0
    assert model.recovery.task_embedding.shape == (len(TASKS), 1)
    assert squared_error(model, dict.fromkeys(TASKS, base)) == 0


def test_affine_with_a_narrow_embedding_is_left_to_training(base, experts):
    with pytest.raises(ConfigError, match='solver="adam"'):
        build(base, experts, recovery="affine", task_embedding_dim=1)


def test_a_narrow_retex_e_is_the_narrow_solution_of_its_inner_rank(base, experts):
    inner = build(base, experts, task_embedding_dim=1, inner_rank=2)
    plain = build(base, experts, task_embedding_dim=1, rank=2)
    names = [n for n in inner.recovery if inner.recovery[n].layout.kind == plain.recovery[n].layout.kind == "matrix"]
    # The alternation may stop a little earlier or later: up to its tolerance.
    assert squared_error(inner, experts, names) == pytest.approx(squared_error(plain, experts, names), rel=1e-2)
