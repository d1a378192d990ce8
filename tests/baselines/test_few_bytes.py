"""Systems that keep experts in few bytes: their equations against independent computations, and bytes as counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from families import FAMILIES
from helpers import TASKS, make_experts

from retex_hf.baselines import (
    TSVC,
    BitDelta,
    DeltaCoMe,
    LoRAExtraction,
    SparseTernary,
    StoredEMR,
    TaskSVD,
    TwinCompression,
    differences,
    make,
)
from retex_hf.baselines.compressed import Compressed
from retex_hf.baselines.differences import Factors, Whole, differences_from
from retex_hf.data.readout import Classifier
from retex_hf.errors import ConfigError
from retex_hf.evaluation.method import Material
from retex_hf.recovery.closed_form import right_vectors
from retex_hf.recovery.codes import encode, pack
from retex_hf.recovery.components import COMPONENTS, ROUNDED, ComponentGenerator, ComponentLayout, encode_components
from retex_hf.recovery.components import Run as StoredRun

KNOBS = ("svd", "lora_extraction", "twin_compression", "tsv_c", "delta_come", "sparse_ternary")
BITS = (None, 2, 3, 4, 8)
EXCLUDE = ["*embeddings*"]


@pytest.fixture(scope="module")
def bert() -> Material:
    torch.manual_seed(0)
    base = FAMILIES["bert"].make().eval()
    return Material(base, make_experts(base), {}, {}, dict, Classifier())


def fitted(method: Compressed, material: Material) -> Compressed:
    method.fit(material)
    return method


def double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def references(material: Material) -> dict[str, dict[str, np.ndarray]]:
    """The base, the average and Twin-Merging's shared expert, from the models themselves."""
    base = {name: double(tensor) for name, tensor in material.base.state_dict().items() if tensor.is_floating_point()}
    states = [expert.state_dict() for expert in material.experts.values()]
    found = {
        "base": base,
        "merged": {name: np.mean([double(state[name]) for state in states], 0) for name in base},
        "shared": {
            name: tensor + 0.3 * sum(double(state[name]) - tensor for state in states) for name, tensor in base.items()
        },
    }
    return found


def experts_bytes(material: Material) -> int:
    numbers = sum(tensor.numel() for tensor in material.base.state_dict().values() if tensor.is_floating_point())
    return 4 * len(material.experts) * numbers


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


# Rounding


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_factors_are_those_of_retex_with_the_same_components(bits):
    torch.manual_seed(1)
    matrix = torch.randn(12, 20)
    rows = torch.linalg.svd(matrix)[2][:5]
    runs = (StoredRun(5, bits),)
    layout = ComponentLayout((12, 20), COMPONENTS, (runs,), runs, 12, 20)
    codes, _ = encode(rows, bits)
    generator = ComponentGenerator(layout, torch.zeros(0), torch.zeros(0))
    packed = pack(codes, bits)
    generator.codes = torch.nn.Parameter(packed, requires_grad=False)
    generator.scales = torch.nn.Parameter(torch.zeros(0, dtype=torch.bfloat16), requires_grad=False)
    rounded = generator.right().double()
    lefts = torch.linalg.pinv(rounded).T @ matrix.double().T
    stored = encode_components(layout, codes, [lefts.float()])
    expected = ComponentGenerator(layout, stored["codes"], stored["scales"])(torch.ones(1))

    form = Factors(((5, bits),))
    torch.testing.assert_close(form.stored(matrix, rows), expected, rtol=1e-4, atol=1e-4)
    assert form.bytes((1, 12, 20)) == layout.bytes == sum(t.numel() * t.element_size() for t in stored.values())
    assert form.bytes((3, 12, 20)) == 3 * layout.bytes


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("numbers", [64, 100])
def test_whole_tensors_are_those_of_retex(bits, numbers):
    torch.manual_seed(2)
    vector = torch.randn(numbers)
    layout = ComponentLayout((numbers,), ROUNDED, ((StoredRun(1, bits),),))
    stored = encode_components(layout, None, [vector.view(1, -1)])
    expected = ComponentGenerator(layout, stored["codes"], stored["scales"])(torch.ones(1))
    assert torch.equal(Whole(bits).stored(vector), expected)
    assert Whole(bits).bytes(numbers) == layout.bytes


def test_bfloat16_takes_two_bytes_per_number_and_no_scales():
    assert Whole(None).bytes(7) == 14
    assert Factors(((3, None),)).bytes((2, 5, 7)) == 2 * 3 * (5 + 7) * 2


# Low rank


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("svd", "merged"),
        ("svd on base", "base"),
        ("lora_extraction", "base"),
        ("twin_compression", "shared"),
        ("tsv_c", "base"),
    ],
)
def test_matrices_are_the_best_of_their_rank_around_their_reference(bert, name, reference):
    options = {"reference": "pretrained"} if "on base" in name else {}
    method = fitted(make(name.split(" ")[0], storage=0.2, exclude=EXCLUDE, **options), bert)
    assert method.setting > 0
    origin, linear = references(bert)[reference], 0
    for task in TASKS:
        body, expert = method.body(task), bert.experts[task].state_dict()
        for tensor_name, form in method.forms.items():
            if isinstance(form, Whole):
                difference = double(expert[tensor_name]) - origin[tensor_name]
                assert relative(double(body[tensor_name]) - origin[tensor_name], difference) < 2**-8
                continue
            linear += 1
            u, s, v = np.linalg.svd(double(expert[tensor_name]) - origin[tensor_name], full_matrices=False)
            best = origin[tensor_name] + (u[:, : form.rank] * s[: form.rank]) @ v[: form.rank]
            np.testing.assert_allclose(double(body[tensor_name]), best, atol=0.02 * s[0])
    assert linear


def test_excluded_tensors_stay_at_the_reference(bert):
    for method in (TaskSVD(1.0, exclude=EXCLUDE), BitDelta(exclude=EXCLUDE), StoredEMR(exclude=EXCLUDE)):
        body = fitted(method, bert).body("red")
        origin = references(bert)["merged" if isinstance(method, TaskSVD) else "base"]
        for name, tensor in body.items():
            if "embeddings" in name:
                np.testing.assert_allclose(double(tensor), origin[name], atol=1e-6)
        assert not any("embeddings" in name for name in method.differences.sides)


@pytest.mark.parametrize("name", ["svd", "twin_compression", "tsv_c"])
def test_at_full_budget_the_experts_are_restored(bert, name):
    method = fitted(make(name, storage=1.0), bert)
    origin = {"svd": "merged", "twin_compression": "shared", "tsv_c": "base"}[name]
    for task in TASKS:
        body, expert = method.body(task), bert.experts[task].state_dict()
        for tensor_name, tensor in body.items():
            difference = double(expert[tensor_name]) - references(bert)[origin][tensor_name]
            left = double(tensor) - double(expert[tensor_name])
            assert np.linalg.norm(left) < 2**-7 * np.linalg.norm(difference) + 1e-6, tensor_name


def test_lora_at_full_rank_restores_linear_layers_and_nothing_else(bert):
    method = fitted(LoRAExtraction(1.0), bert)
    body, expert, base = method.body("blue"), bert.experts["blue"].state_dict(), bert.base.state_dict()
    linear = {f"{n}.weight" for n, module in bert.base.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(method.forms) == linear & set(body)
    for name, tensor in body.items():
        if name in linear:
            assert relative(double(tensor - base[name]), double(expert[name] - base[name])) < 0.02
        else:
            assert torch.equal(tensor, base[name])


def test_conv1d_of_gpt2_is_a_linear_layer():
    base = FAMILIES["gpt2"].make().eval()
    method = fitted(LoRAExtraction(1.0), Material(base, make_experts(base), {}, {}, dict, Classifier()))
    assert any(name.endswith("attn.c_attn.weight") for name in method.forms)


@pytest.mark.parametrize("family", ["resnet", "mixtral"])
def test_convolutions_and_stacked_experts_are_matrices(family):
    base = FAMILIES[family].make().eval()
    material = Material(base, make_experts(base), {}, {}, dict, Classifier())
    method = fitted(TaskSVD(0.25, reference="pretrained"), material)
    factored = {name: form for name, form in method.forms.items() if isinstance(form, Factors)}
    assert any(base.state_dict()[name].ndim > 2 for name in factored)
    for name, form in factored.items():
        origin, expert = (double(model.state_dict()[name]) for model in (base, material.experts["red"]))
        found = double(method.body("red")[name]) - origin
        sides = method.differences.matrices[name]
        for matrix, approximation in zip(
            (expert - origin).reshape(sides), found.reshape(sides), strict=True
        ):  # the energy of the discarded singular values, up to the rounding to bfloat16
            energies = np.square(np.linalg.svd(matrix, compute_uv=False))
            missed = np.square(matrix - approximation).sum()
            assert missed == pytest.approx(energies[form.rank :].sum(), abs=1e-3 * energies.sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fewer_bits_leave_room_for_more_rank(bert, bits):
    rounded, floating = (fitted(TaskSVD(0.1, bits=width, exclude=EXCLUDE), bert) for width in (bits, None))
    assert rounded.setting >= floating.setting
    assert rounded.added_bytes() <= 0.1 * experts_bytes(bert)


def test_tsv_c_keeps_one_of_t_by_default(bert):
    method = fitted(TSVC(), bert)
    for name, form in method.forms.items():
        sides = method.differences.matrices.get(name)
        if isinstance(form, Factors):
            assert form.rank == math.ceil(min(sides[1:]) / 3)
    assert all(name in method.forms for name in method.differences.vectors)


def test_ranks_by_share_follow_the_smaller_side(bert):
    method = fitted(TwinCompression(0.15), bert)
    step, further = divmod(method.setting, len(method.differences.matrices))
    for place, (name, sides) in enumerate(method.differences.matrices.items()):
        if isinstance(method.forms[name], Factors):
            ratio = (step + (place < further)) / method.largest()
            assert method.forms[name].rank == math.ceil(ratio * min(sides[1:]) - 1e-9)


def test_what_one_rank_leaves_over_goes_to_the_first_matrices(bert):
    method = fitted(TaskSVD(0.1, bits=4, exclude=EXCLUDE), bert)
    ranks = [form.rank for form in method.forms.values() if isinstance(form, Factors)]
    assert ranks == sorted(ranks, reverse=True)
    assert max(ranks) - min(ranks) <= 1
    larger = 3 * method.differences.bytes(method.forms_at(method.setting + 1, 4, method.vectors))
    assert method.added_bytes() <= 0.1 * experts_bytes(bert) < larger


def left_error(method: TaskSVD, material: Material) -> float:
    """The error of a system's weights as ReTeX counts it, from the weights themselves."""
    average = references(material)["merged"]
    missed, energies = {}, {}
    for task in TASKS:
        body, expert = method.body(task), material.experts[task].state_dict()
        for name in method.differences.sides:
            missed[task, name] = np.square(double(body[name]) - double(expert[name])).sum()
            energies[task, name] = np.square(average[name] - double(expert[name])).sum()
    totals = {task: sum(energy for (other, _), energy in energies.items() if other == task) for task in TASKS}
    weights = {key: 1 / (totals[key[0]] * (energy / totals[key[0]]) ** 0.5) for key, energy in energies.items()}
    return sum(weights[key] * missed[key] for key in missed)


@pytest.mark.parametrize("reference", ["average", "pretrained"])
@pytest.mark.parametrize("storage", [0.02, 0.1])
def test_the_best_bits_leave_the_least_error(bert, reference, storage):
    def svd(bits: int | str | None) -> TaskSVD:
        method = TaskSVD(storage, bits=bits, reference=reference, exclude=EXCLUDE)
        fitted(method, bert)
        return method

    best = svd("best")
    errors = {bits: left_error(svd(bits), bert) for bits in (None, 2, 3, 4, 5, 6, 8)}
    assert best.bits in errors and best.added_bytes() <= storage * experts_bytes(bert)
    assert left_error(best, bert) == pytest.approx(errors[best.bits])
    assert errors[best.bits] <= 1.02 * min(errors.values())  # the choice is by expected errors
    expected = best.differences.expected_error(best.forms)
    assert expected == pytest.approx(left_error(best, bert), rel=0.1)


def test_vectors_are_kept_at_the_bits_that_pay(bert):
    """At a small budget eight bits for vectors would leave no rank for matrices."""
    small, large = (TaskSVD(storage, bits=4, exclude=EXCLUDE) for storage in (0.006, 0.3))
    for method in (small, large):
        fitted(method, bert)
        for vectors in (None, Whole(2), Whole(8)):
            assert method.differences.expected_error(method.forms) <= method.fitting(4, vectors).error
    assert large.vectors == Whole(8)
    assert small.vectors != Whole(8)
    assert large.state()["vectors"] == 8


def test_the_best_bits_of_no_budget_are_refused():
    with pytest.raises(ConfigError, match="needs a storage"):
        TSVC(bits="best")
    with pytest.raises(ConfigError, match="bits must be"):
        StoredEMR(bits="best")


def test_delta_come_has_falling_precision():
    method = DeltaCoMe()
    assert method.runs((1, 4096, 4096), 1002, 2) == ((2, 8), (32, 3), (968, 2))  # the authors' 1/16
    assert method.runs((1, 384, 384), 20, 2) == ((2, 8), (18, 3))
    assert method.runs((1, 384, 384), 1, 2) == ((1, 8),)
    scaled = DeltaCoMe(scaled=True)
    assert scaled.runs((1, 4096, 11008), 1002, 2) == ((2, 8), (32, 3), (968, 2))
    assert scaled.runs((1, 384, 1536), 20, 2) == ((1, 8), (3, 3), (16, 2))
    assert Factors(method.runs((1, 4096, 4096), 1002, 2)).bytes((1, 4096, 4096)) == pytest.approx(4096**2 / 8, rel=0.01)


def test_delta_come_rounds_every_component_at_its_bits(bert):
    method = fitted(DeltaCoMe(0.3, scaled=True, exclude=EXCLUDE), bert)
    name, form = next((n, f) for n, f in method.forms.items() if isinstance(f, Factors) and len(f.runs) > 2)
    difference = double(bert.experts["red"].state_dict()[name]) - references(bert)["base"][name]
    _, _, v = np.linalg.svd(difference, full_matrices=False)
    rows, first = [], 0
    for count, bits in form.runs:
        part = torch.tensor(v[first : first + count]).float()
        codes, scale = encode(part, bits)
        levels = torch.sort(torch.unique(codes))[0]
        assert len(levels) <= 2**bits
        rows.append(Factors(((count, bits),)))
        first += count
        assert scale.shape == (count,)
    assert form.bytes((1, *difference.shape)) == sum(part.bytes((1, *difference.shape)) for part in rows)
    found = double(method.body("red")[name]) - references(bert)["base"][name]
    assert np.linalg.matrix_rank(found, tol=1e-5 * np.linalg.norm(found)) <= form.rank
    assert relative(found, difference) < relative(0 * found, difference)


# Signs


@pytest.mark.parametrize(("reference", "origin"), [("pretrained", "base"), ("average", "merged")])
def test_bitdelta_is_the_mean_magnitude_times_signs(bert, reference, origin):
    method = fitted(BitDelta(reference=reference), bert)
    start = references(bert)[origin]
    expected = 0
    for name, tensor in method.body("green").items():
        difference = double(bert.experts["green"].state_dict()[name]) - start[name]
        found = double(tensor) - start[name]
        if difference.ndim == 1:
            assert relative(found, difference) < 2**-8
            expected += 2 * difference.size
            continue
        signs = np.where(difference > 0, 1, -1)
        scale = (difference * signs).sum() / difference.size  # least squares for these signs
        np.testing.assert_allclose(found, scale * signs, rtol=2**-8, atol=1e-6)
        expected += -(-difference.size // 8) + 2
    assert method.added_bytes() == 3 * expected
    assert method.storage_bytes() == 3 * expected + experts_bytes(bert) // 3


def test_sparse_ternary_keeps_the_largest_of_the_whole_vector(bert):
    method = fitted(SparseTernary(0.01, exclude=EXCLUDE), bert)
    base = references(bert)["base"]
    names = [name for name in method.body("red") if "embeddings" not in name]
    vector = np.concatenate([(double(bert.experts["red"].state_dict()[n]) - base[n]).ravel() for n in names])
    found = np.concatenate([(double(method.body("red")[n]) - base[n]).ravel() for n in names])
    kept = np.argsort(-np.abs(vector))[: method.kept]
    expected = np.zeros_like(vector)
    expected[kept] = np.abs(vector[kept]).mean() * np.sign(vector[kept])
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=1e-6)
    density = method.kept / len(vector)
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    size = math.ceil((len(vector) * entropy + method.kept) / 8) + 2
    assert method.added_bytes() == 3 * size
    density = (method.kept + 1) / len(vector)  # one more would not fit
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    assert 3 * (math.ceil((len(vector) * entropy + method.kept + 1) / 8) + 2) > 0.01 * experts_bytes(bert)


@pytest.mark.parametrize("bits", BITS)
def test_stored_emr_has_the_equations_of_emr(bert, bits):
    method = fitted(StoredEMR(bits=bits), bert)
    base = references(bert)["base"]
    vectors = {
        name: np.stack([double(bert.experts[task].state_dict()[name]) - base[name] for task in TASKS]) for name in base
    }
    own, masked, unified, masks = np.zeros(3), np.zeros(3), {}, {}
    for name in method.unified:
        gamma = np.where(vectors[name].mean(0) > 0, 1, -1)
        masks[name] = vectors[name] * gamma > 0
        exact = gamma * np.max(np.where(masks[name], np.abs(vectors[name]), 0), 0)
        unified[name] = double(Whole(bits).stored(torch.tensor(exact).float()))
        own += np.abs(vectors[name]).reshape(3, -1).mean(1)
        masked += np.abs(masks[name] * unified[name]).reshape(3, -1).mean(1)
    for index, task in enumerate(TASKS):
        for name, tensor in method.body(task).items():
            expected = own[index] / masked[index] * masks[name][index] * unified[name]
            np.testing.assert_allclose(double(tensor) - base[name], expected, rtol=0.01, atol=1e-3)
    sizes = [tensor.numel() for tensor in method.unified.values()]
    vector = sum(2 * size if bits is None else bits * 8 * -(-size // 64) + 2 * -(-size // 64) for size in sizes)
    assert method.added_bytes() == vector + 3 * sum(-(-size // 8) for size in sizes) + 3 * 2


# Bytes


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("storage", [0.0025, 0.01, 0.04, 0.16, 0.5, "2KB"])
def test_bytes_never_exceed_the_storage(bert, name, storage):
    for bits in BITS if name not in ("delta_come", "sparse_ternary") else (None,):
        options = {} if bits is None else {"bits": bits}
        method = fitted(make(name, storage=storage, exclude=EXCLUDE, **options), bert)
        most = 2000 if isinstance(storage, str) else storage * experts_bytes(bert)
        assert 0 <= method.added_bytes() <= most
        assert method.storage_bytes() == method.added_bytes() + experts_bytes(bert) // 3


def test_nothing_affordable_is_the_reference(bert):
    method = fitted(TaskSVD(1e-6), bert)
    assert method.added_bytes() == 0
    for name, tensor in method.body("red").items():
        np.testing.assert_allclose(double(tensor), references(bert)["merged"][name], atol=1e-6)


def test_singular_vectors_are_computed_once_per_reference(bert, monkeypatch):
    calls = []
    monkeypatch.setattr(differences, "right_vectors", lambda *given: calls.append(given) or right_vectors(*given))
    material = Material(bert.base, bert.experts, {}, {}, dict, Classifier())
    counts = []
    for bits in (2, 2, "best", "best"):
        fitted(TaskSVD(0.1, bits=bits), material).body("red")
        counts.append(len(calls))
    matrices = len(differences_from(material, "average", ()).matrices)
    assert 0 < counts[0] == counts[1] <= counts[2] == counts[3] <= 3 * matrices
    fitted(TaskSVD(0.1, reference="pretrained"), material).body("red")
    assert len(calls) > counts[-1]


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match=r"TaskSVD: bits must be None \(bfloat16\) or one of .*, not 7"):
        TaskSVD(bits=7)
    with pytest.raises(ConfigError, match="storage"):
        TaskSVD(storage=0)
    with pytest.raises(ConfigError, match="DeltaCoMe: scaled must be True or False, not 3"):
        DeltaCoMe(scaled=3)
