"""Ratios, spectra and storage curves against direct computations on small models."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, TEXT
from helpers import TASKS, build_retex, make_experts
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from retex_hf import CheckpointError, RetexConfig, RetexError, RetexModel, TaskError
from retex_hf.workflows.analysis import Analysis, analyse, average_ratios, energy_ratio


def differences(model: RetexModel, experts: dict[str, nn.Module], name: str) -> list[Tensor]:
    merged = model.model.state_dict()[name].double()
    return [expert.state_dict()[name].double() - merged for expert in experts.values()]


def matrices(name: str, tensor: Tensor) -> Tensor:
    """A tensor as the shape rules see it: (batch, rows, columns)."""
    convolution = tensor.ndim == 4 or ("conv" in name and tensor.ndim > 2)
    seen = tensor.flatten(1) if convolution else tensor.squeeze()
    return seen.reshape(-1, *seen.shape[-2:])


@pytest.fixture(scope="module")
def built() -> tuple[RetexModel, dict[str, nn.Module], Analysis]:
    torch.manual_seed(0)
    model, experts = build_retex("bert", scale=0.3, rank=3)
    return model, experts, analyse(model, experts, progress=False)


# ---- rho_q -----------------------------------------------------------------------------------------------------------


# Square matrices of one size, of two sizes, in tied models, and among convolutions.
@pytest.mark.parametrize("name", ["bert", "swin", "gpt2", "llama-tied", "open_clip-vit"])
def test_energy_ratios_are_those_of_the_singular_values(name):
    model, experts = build_retex(name, scale=0.3, rank=2)
    analysis = analyse(model, experts, progress=False)
    square = [n for n, s in model.model.state_dict().items() if s.ndim == 2 and s.shape[0] == s.shape[1] > 1]
    assert list(analysis.energy_ratios) == TASKS and square
    largest = max(len(model.model.state_dict()[n]) for n in square)
    for task, found in analysis.energy_ratios.items():
        expected = torch.zeros(largest, dtype=torch.float64)
        for n in square:
            energies = torch.linalg.svdvals(differences(model, experts, n)[TASKS.index(task)]).square()
            for q in range(1, largest + 1):
                expected[q - 1] += energies[:q].sum() / energies.sum()
        torch.testing.assert_close(found, expected / len(square), rtol=0, atol=1e-5)


def test_a_model_without_square_matrices_has_no_ratios():
    model, experts = build_retex("convnext", scale=0.3, rank=2)
    analysis = analyse(model, experts, progress=False)
    assert analysis.energy_ratios == {}
    assert analysis.spectra


def test_ratio_of_known_matrices():
    rotation, _ = torch.linalg.qr(torch.randn(5, 5))
    matrix = rotation @ torch.diag(torch.tensor([4.0, 2.0, 2.0, 1.0, 0.0]))
    expected = torch.tensor([16, 20, 24, 25, 25], dtype=torch.float64) / 25
    torch.testing.assert_close(energy_ratio(matrix), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(energy_ratio(1e-9 * matrix), expected, rtol=0, atol=1e-6)
    assert energy_ratio(torch.zeros(3, 3)) is None
    assert energy_ratio(torch.ones(2, 2)).tolist() == pytest.approx([1.0, 1.0])


def test_smaller_matrices_are_complete_beyond_their_size():
    mean = average_ratios([torch.tensor([0.5, 1.0]), torch.tensor([0.1, 0.2, 0.3, 1.0])])
    assert mean.tolist() == pytest.approx([0.3, 0.6, 0.65, 1.0])
    assert len(average_ratios([])) == 0


def test_a_task_that_does_not_differ_is_left_out_of_the_ratios():
    base = BertModel(BertConfig(**TEXT)).eval()
    experts = make_experts(base) | {"green": base}
    config = RetexConfig(rank=3, merge={"method": "task_arithmetic", "scale": 0.0})
    model = RetexModel.from_experts(base, experts, config, progress=False)
    assert list(analyse(model, experts, progress=False).energy_ratios) == ["red", "blue"]


# ---- spectra ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["generated_first", "shared_first"])
@pytest.mark.parametrize("name", ["bert", "resnet", "whisper", "mixtral", "llama-tied"])
def test_spectra_are_those_of_the_stacked_differences(name, order):
    model, experts = build_retex(name, scale=0.3, rank=2, factor_order=order)
    spectra = analyse(model, experts, progress=False).spectra
    assert set(model.recovery) == set(spectra)
    kinds = set()
    for parameter, found in spectra.items():
        kinds.add(found.layout.kind)
        parts = differences(model, experts, parameter)
        energy = sum(part.square().sum().item() for part in parts)
        assert found.values.sum().item() == pytest.approx(energy, rel=1e-5)
        if found.layout.kind == "matrix":
            stacks = [matrices(parameter, part) for part in parts]
            stacks = [stack.mT for stack in stacks] if order == "shared_first" else stacks
            expected = torch.linalg.svdvals(torch.cat(stacks, dim=1)).square().sum(0)
            torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-5 * energy)
        else:
            assert len(found.values) == 1
    assert {"matrix", "vector"} <= kinds


def test_experts_read_from_folders_give_the_same(built, tmp_path):
    model, experts, analysis = built
    for task, expert in experts.items():
        expert.save_pretrained(tmp_path / task)
    again = analyse(model, {task: str(tmp_path / task) for task in reversed(TASKS)}, progress=False)
    assert again.tasks == TASKS
    assert again.expert_bytes == analysis.expert_bytes
    for name, found in analysis.spectra.items():
        assert torch.equal(again.spectra[name].values, found.values)
    for task in TASKS:
        assert torch.equal(again.energy_ratios[task], analysis.energy_ratios[task])


def test_heads_are_left_out_and_excluded_parameters_are_not():
    model, experts = build_retex("bert-classifier", scale=0.3, rank=2, exclude=["*embeddings*"])
    analysis = analyse(model, experts, progress=False)
    names = [name for name in model.model.state_dict() if not name.startswith("classifier")]
    assert list(analysis.spectra) == names
    assert analysis.expert_bytes == sum(4 * model.model.state_dict()[name].numel() for name in names)
    chosen = analyse(model, experts, names=list(model.recovery), progress=False)
    assert list(chosen.spectra) == list(model.recovery)
    assert chosen.expert_bytes == analysis.expert_bytes


def test_parameters_in_which_no_expert_differs_are_left_out():
    base = BertModel(BertConfig(**TEXT)).eval()
    experts = make_experts(base)
    for expert in experts.values():
        expert.pooler.load_state_dict(base.pooler.state_dict())
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False)
    spectra = analyse(model, experts, progress=False).spectra
    assert list(spectra) == [name for name in base.state_dict() if not name.startswith("pooler")]


# ---- error against storage -------------------------------------------------------------------------------------------


def measured(model: RetexModel, experts: dict[str, nn.Module]) -> tuple[float, float]:
    """Share of the experts' bytes and relative error of a built model, from its tensors alone."""
    missed = energy = 0.0
    for task, expert in experts.items():
        recovered = model.recover(task)
        for name, merged in model.model.state_dict().items():
            wanted = expert.state_dict()[name].double()
            missed += (recovered[name].double() - wanted).square().sum().item()
            energy += (merged.double() - wanted).square().sum().item()
    stored = sum(tensor.numel() * tensor.element_size() for tensor in model.recovery.state_dict().values())
    stored -= 4 * model.recovery.task_embedding.numel()
    whole = len(experts) * sum(4 * tensor.numel() for tensor in model.model.state_dict().values())
    return stored / whole, (missed / energy) ** 0.5


def test_points_are_what_models_of_that_rank_and_budget_reach(built):
    model, experts, analysis = built
    base = BertModel(model.config).eval()
    base.load_state_dict(model.model.state_dict())  # any relative will do: the average does not depend on it
    points = analysis.storage_curve([1, 3, 6])
    assert [point.rank for point in points] == [1, 3, 6]
    embedding = 4 * len(TASKS) ** 2 / (len(TASKS) * analysis.expert_bytes)
    for point in points:
        uniform = RetexModel.from_experts(base, experts, RetexConfig.paper(rank=point.rank), progress=False)
        share, error = measured(uniform, experts)
        assert point.uniform_share == pytest.approx(share, rel=1e-9)
        assert point.uniform_error == pytest.approx(error, rel=1e-4)
        config = RetexConfig(storage=point.uniform_share + embedding)
        share, error = measured(RetexModel.from_experts(base, experts, config, progress=False), experts)
        assert point.budgeted_share == pytest.approx(share, rel=1e-9)
        # Columns are fitted to rounded directions, and rows of a tiny model are too short to be normal.
        assert point.budgeted_error == pytest.approx(error, rel=0.1, abs=1e-3)
        assert point.budgeted_share <= point.uniform_share
        assert point.budgeted_error < point.uniform_error


def test_default_ranks_are_the_powers_of_two_of_the_model(built):
    assert [point.rank for point in built[2].storage_curve()] == [1, 2, 4, 8]


# ---- wrong input -----------------------------------------------------------------------------------------------------


def test_experts_must_be_those_of_the_model(built):
    model, experts, _ = built
    for wrong in ({"red": experts["red"]}, experts | {"purple": experts["red"]}):
        with pytest.raises(TaskError, match=r"\['red', 'green', 'blue'\]"):
            analyse(model, wrong, progress=False)


def test_names_must_be_merged_parameters(built):
    model, experts, _ = built
    with pytest.raises(RetexError, match=r"'no\.such\.weight', which the model does not merge"):
        analyse(model, experts, names=["no.such.weight"], progress=False)


def test_damaged_experts_are_named(built):
    model, experts, _ = built
    state = dict(experts["green"].state_dict())
    name = "encoder.layer.1.output.dense.weight"
    damaged = {
        "lacks": {key: value for key, value in state.items() if key != name},
        "has shape": state | {name: state[name][:, :-1]},
        "holds NaN": state | {name: torch.full_like(state[name], torch.nan)},
    }
    for message, tensors in damaged.items():
        with pytest.raises(CheckpointError, match=f"expert 'green'.*{message}|expert 'green'.*{name}.*{message}"):
            analyse(model, experts | {"green": tensors}, progress=False)


@pytest.mark.parametrize("rank", [0, -1, 2.0, "8"])
def test_ranks_are_positive_integers(built, rank):
    with pytest.raises(RetexError, match="integers above 0"):
        built[2].storage_curve([1, rank])


def test_no_difference_is_an_error():
    base = FAMILIES["bert"].make().eval()
    model = RetexModel.from_experts(base, dict.fromkeys(TASKS, base), RetexConfig(rank=2), progress=False)
    analysis = analyse(model, dict.fromkeys(TASKS, base), progress=False)
    assert (analysis.spectra, analysis.energy_ratios) == ({}, {})
    with pytest.raises(RetexError, match="No expert differs"):
        analysis.storage_curve()
