"""The learned path: settings, resuming, accumulation, objectives. Several processes are in test_processes.py."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from families import TEXT
from helpers import assert_same, make_experts
from transformers import BertConfig, BertModel

import retex_hf.recovery.training as training_module
from retex_hf import ConfigError, RetexConfig, RetexError, RetexModel, TrainingConfig
from retex_hf.recovery import sample_weights

LONG = {"steps": 150, "batch_size": 3}
SHORT = {"steps": 20, "warmup_steps": 4, "learning_rate": 1e-2, "log_every": 1}


@pytest.fixture(scope="module")
def base() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**TEXT | {"num_hidden_layers": 1})).eval()


@pytest.fixture(scope="module")
def experts(base) -> dict[str, BertModel]:
    return make_experts(base)


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def fit(base, experts, config=None, accelerator=None, **options) -> RetexModel:
    return RetexModel.from_experts(
        base,
        experts,
        config or RetexConfig(rank=4),
        solver="adam",
        training=TrainingConfig(**{**SHORT, **options}),
        accelerator=accelerator,
        progress=False,
    )


def column(model: RetexModel, name: str) -> list[float]:
    return [record[name] for record in model.training_history]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1), ("steps", 0), ("soft_steps", -1), ("warmup_steps", 1.5), ("batch_size", 0), ("log_every", 0),
        ("learning_rate", 0), ("learning_rate", math.inf), ("l2_weight", -1), ("max_grad_norm", 0),
        ("objective", "l1"), ("initialise", "zeros"), ("seed", "x"), ("checkpoint_every", 0),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(name, value):
    with pytest.raises(ConfigError, match=rf"TrainingConfig\.{name} must be"):
        TrainingConfig(**{name: value})


def test_defaults_are_the_papers():
    config = TrainingConfig()
    assert (config.steps, config.learning_rate, config.warmup_steps) == (5000, 2e-4, 600)
    assert (config.objective, config.initialise) == ("l2", "paper")


def test_first_loss_is_the_energy_of_the_drawn_task(base, experts):
    model = fit(base, experts)
    merged = model.get_base_model().state_dict()
    energies = [
        sum((expert.state_dict()[name] - merged[name]).square().sum().item() for name in model.recovery)
        for expert in experts.values()
    ]
    # Offsets start at zero, so the first loss is ||D_t||^2 of the task drawn first.
    assert min(abs(column(model, "loss")[0] - energy) / energy for energy in energies) < 1e-5
    assert column(model, "relative_error")[0] == pytest.approx(1.0, abs=1e-5)


def test_training_lowers_the_loss(base, experts):
    losses = column(fit(base, experts, **LONG), "loss")
    assert losses[-1] < 0.7 * losses[0]


def test_learning_rate_warms_up_and_falls_to_zero_as_a_cosine(base, experts):
    rates = column(fit(base, experts), "learning_rate")
    assert rates[3] == pytest.approx(1e-2)
    expected = [5e-3 * (1 + math.cos(math.pi * (step - 4) / 16)) for step in range(4, 21)]
    assert rates[3:] == pytest.approx(expected, abs=1e-9)


def test_seeds_decide(base, experts):
    losses = [column(fit(base, experts, seed=seed), "loss") for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_accumulated_parts_make_one_batch(base, experts):
    whole = fit(base, experts, batch_size=4)
    fresh = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = fit(base, experts, batch_size=4, accelerator=fresh)
    assert column(parts, "loss") == pytest.approx(column(whole, "loss"), rel=1e-4)
    assert_same(dict(parts.recovery.state_dict()), dict(whole.recovery.state_dict()), rtol=1e-3, atol=1e-4)


def test_a_batch_that_cannot_be_divided_is_refused(base, experts):
    with pytest.raises(ConfigError, match=r"batch_size \(3\) must be a multiple .* \(1 x 2\)"):
        fit(base, experts, batch_size=3, accelerator=Accelerator(cpu=True, gradient_accumulation_steps=2))


def interrupt(monkeypatch, at: int) -> None:
    draw = training_module._draw

    def stop(method, training, step, num_tasks):
        if step == at:
            raise KeyboardInterrupt
        return draw(method, training, step, num_tasks)

    monkeypatch.setattr(training_module, "_draw", stop)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(base, experts, tmp_path, monkeypatch):
    whole = fit(base, experts)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 6}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupt(patched, at=15)
        fit(base, experts, **options)
    assert (tmp_path / "state" / "retex_progress.json").is_file()
    fresh_steps = []
    draw = training_module._draw
    monkeypatch.setattr(training_module, "_draw", lambda *a: fresh_steps.append(a[2]) or draw(*a))
    resumed = fit(base, experts, **options)
    assert fresh_steps == list(range(12, 20))
    assert_same(dict(resumed.recovery.state_dict()), dict(whole.recovery.state_dict()), exact=True)
    assert resumed.training_history == whole.training_history
    assert not list(tmp_path.iterdir())  # nothing to resume is left


def test_resuming_with_another_configuration_is_refused(base, experts, tmp_path, monkeypatch):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 6}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupt(patched, at=15)
        fit(base, experts, **options)
    with pytest.raises(RetexError, match=r"another configuration \(learning_rate: 0.01 there, 0.02 here in training\)"):
        fit(base, experts, **options, learning_rate=2e-2)
    with pytest.raises(RetexError, match=r"rank: 4 there, 5 here in config"):
        fit(base, experts, RetexConfig(rank=5), **options)


def test_resuming_with_other_experts_is_refused(base, experts, tmp_path, monkeypatch):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 6}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupt(patched, at=15)
        fit(base, experts, **options)
    other, task = list(experts)[:2]
    with pytest.raises(RetexError, match=rf"another configuration \({task}: '\w+' there, '\w+' here in experts\)"):
        fit(base, {**experts, task: experts[other]}, **options)


def test_starting_from_the_closed_form_stays_at_its_loss(base, experts):
    exact = RetexModel.from_experts(base, experts, RetexConfig.paper(rank=4), progress=False)
    tuned = fit(base, experts, initialise="closed_form", learning_rate=1e-6)
    for name, error in exact.recovery_errors.items():
        assert tuned.recovery_errors[name] == pytest.approx(error, abs=1e-4)


def test_clipping_bounds_the_update(base, experts):
    def moved(model: RetexModel) -> float:
        return sum(model.recovery[name].shared.norm().item() for name in model.recovery)  # starts at zero

    config = RetexConfig(rank=4, exclude=["*LayerNorm*", "*bias", "*token_type*"])
    # Adam divides by the gradient's size, so clipping to nearly nothing shows through its epsilon of 1e-8.
    clipped = fit(base, experts, config, max_grad_norm=1e-10)
    assert moved(clipped) < 0.05 * moved(fit(base, experts, config))


@pytest.mark.parametrize("objective", ["cosine", "cosine_l2"])
def test_cosine_objectives_turn_offsets_towards_the_differences(base, experts, objective):
    model = fit(base, experts, objective=objective, **LONG)
    merged = model.get_base_model().state_dict()
    for index, expert in enumerate(experts.values()):
        offsets = model.recovery(torch.eye(3)[index])
        wanted = torch.cat([(expert.state_dict()[name] - merged[name]).flatten() for name in offsets])
        found = torch.cat([offset.flatten() for offset in offsets.values()])
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.4
    if objective == "cosine":
        assert column(model, "loss")[0] <= 1.0 + 1e-5
        assert column(model, "loss")[-1] < 0.6


@pytest.mark.parametrize("sampler", ["dirichlet", "uniform_softmax", "gaussian_softmax"])
def test_the_second_stage_draws_mixtures(base, experts, sampler, monkeypatch):
    seen = []
    sample = training_module.sample_weights
    monkeypatch.setattr(training_module, "sample_weights", lambda *a: seen.append(sample(*a)) or seen[-1])
    fit(base, experts, RetexConfig(rank=4, soft_training=sampler), steps=5, soft_steps=5)
    assert all(weights.max() == 1 for weights in seen[:5])
    assert all(weights.max() < 1 for weights in seen[5:])


def test_a_second_stage_without_mixtures_is_refused(base, experts):
    with pytest.raises(ConfigError, match=r"soft_steps needs RetexConfig\.soft_training"):
        fit(base, experts, soft_steps=5)


def test_gammas_are_recorded_for_the_affine_variant(base, experts):
    model = fit(base, experts, RetexConfig(rank=4, recovery="affine"))
    gammas = model.training_history[-1]["gamma"]
    assert set(gammas) == {name for name in model.recovery if model.recovery[name].layout.kind == "matrix"}
    assert any(abs(value - 1) > 1e-3 for value in gammas.values())
    assert all(abs(value - 1) < 0.5 for value in gammas.values())


@pytest.mark.parametrize(
    ("method", "second_moment"),
    [
        (None, 1 / 4),
        ({"method": "dirichlet", "alpha": 1.0}, 2 / 20),  # (alpha + 1) / (T (T alpha + 1))
        ({"method": "dirichlet", "alpha": 0.1}, 1.1 / (4 * 1.4)),
    ],
)
def test_samplers_have_the_right_moments(method, second_moment):
    weights = sample_weights(method, 200_000, 4, torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(weights.sum(1), torch.ones(200_000, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert weights.mean(0).tolist() == pytest.approx([0.25] * 4, abs=5e-3)
    assert weights.square().mean(0).tolist() == pytest.approx([second_moment] * 4, abs=5e-3)


def test_mixed_precision_trains(base, experts):
    model = fit(base, experts, accelerator=Accelerator(cpu=True, mixed_precision="bf16"), **LONG)
    assert column(model, "loss")[-1] < 0.7 * column(model, "loss")[0]
    assert model.recovery.task_embedding.dtype == torch.float32


class Notebook(GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int, dict]] = []

    @property
    def tracker(self):
        return self.pages

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.pages.append((step, values))


def test_trackers_get_every_record(base, experts):
    notebook = Notebook()
    accelerator = Accelerator(cpu=True, log_with=notebook)
    accelerator.init_trackers("retex")
    model = fit(base, experts, accelerator=accelerator, log_every=5)
    assert [step for step, _ in notebook.pages] == [5, 10, 15, 20]
    assert [page["loss"] for _, page in notebook.pages] == column(model, "loss")
    assert set(notebook.pages[0][1]) == {"loss", "relative_error", "learning_rate"}


def test_a_record_is_the_mean_since_the_last_one(base, experts):
    single, window = fit(base, experts), fit(base, experts, log_every=5)
    losses = column(single, "loss")
    assert column(window, "loss") == pytest.approx([sum(losses[i : i + 5]) / 5 for i in range(0, 20, 5)], rel=1e-5)
