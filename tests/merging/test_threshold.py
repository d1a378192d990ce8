"""The streamed threshold is the k-th largest magnitude of the whole vector, whatever the sample says."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from retex_hf.merging import threshold
from retex_hf.merging.threshold import magnitude_thresholds


def spikes(count: int, spread: float) -> Tensor:
    """Almost all entries equal, with a few others so placed that a sample of every n-th entry sees none of them."""
    vector = torch.ones(count)
    vector[1 :: count // 50] = spread * torch.rand(len(vector[1 :: count // 50]))
    return vector


DATA = {
    "random": lambda: [torch.randn(9000), torch.randn(30, 7)],
    "half precision": lambda: [torch.randn(5000).half()],
    "bfloat16": lambda: [torch.randn(5000).bfloat16()],
    "not contiguous": lambda: [torch.randn(80, 60).T, torch.randn(50)[::2]],
    "many equal": lambda: [torch.randint(-3, 4, (5000,)).float()],
    "all equal": lambda: [torch.full((5000,), -0.25)],
    "zeros": lambda: [torch.zeros(3000)],
    "mostly zeros": lambda: [torch.cat([torch.zeros(4995), torch.tensor([-0.0, 1.0, -2.0, 3.0, 1e-3])])],
    "denormals": lambda: [torch.randint(-(2**20), 2**20, (5000,)).float() * 2.0**-149],
    "all magnitudes": lambda: [torch.randn(8000) * 10.0 ** torch.randint(-38, 38, (8000,))],
    "heavy tails": lambda: [torch.randn(8000) / torch.randn(8000) ** 3],
    "neighbours": lambda: [torch.tensor(1.0).view(torch.int32).add(torch.randperm(3000)).int().view(torch.float32)],
    "infinite": lambda: [torch.cat([torch.randn(4000), torch.full((1500,), float("inf"))])],
    "sorted": lambda: [torch.linspace(-3, 5, 7000)],
    "sorted, small tensor first": lambda: [torch.randn(5), torch.linspace(0, 1, 9000).reshape(90, 100)],
    "hidden from the sample": lambda: [spikes(8000, 5.0)],
    "periodic": lambda: [(torch.arange(9000) % 9).float()],
    "one huge tensor among small ones": lambda: [torch.randn(3), 1e-3 * torch.randn(20000), 1e3 * torch.randn(10)],
    "one element": lambda: [torch.tensor([-2.5])],
    "a scalar": lambda: [torch.tensor(3.0)],
    "an empty tensor among others": lambda: [torch.zeros(0), torch.randn(10)],
}


@pytest.fixture(params=["everything is the sample", "a small sample", "a bracket too narrow", "few bins"])
def passes(request, monkeypatch):
    """From the direct answer to every kind of further pass, in chunks that divide nothing evenly."""
    monkeypatch.setattr(threshold, "CHUNK", 999)
    if request.param != "everything is the sample":
        monkeypatch.setattr(threshold, "SAMPLE_SIZE", 256)
    if request.param == "a bracket too narrow":
        monkeypatch.setattr(threshold, "SAMPLE_MARGIN", 0)
    if request.param == "few bins":
        monkeypatch.setattr(threshold, "MOST_BINS", 16)


def whole_threshold(tensors: list[Tensor], density: float) -> float:
    magnitudes = torch.cat([tensor.flatten().float() for tensor in tensors]).abs().sort(descending=True).values
    return magnitudes[max(1, round(density * len(magnitudes))) - 1].item()


def vector_threshold(tensors: list[Tensor], density: float) -> float:
    def read(wanted):
        return ((number, tensor, torch.zeros_like(tensor)) for tensor in tensors for number in wanted)

    (found,) = magnitude_thresholds(read, 1, sum(tensor.numel() for tensor in tensors), density)
    return found


@pytest.mark.parametrize("make", DATA.values(), ids=DATA.keys())
def test_threshold_is_the_kth_largest_magnitude(make, passes):
    tensors = make()
    for density in (1e-4, 0.01, 0.1, 0.2, 0.5, 0.9, 0.99, 1.0):
        assert vector_threshold(tensors, density) == whole_threshold(tensors, density), density


def test_entries_are_differences_from_the_base_and_vectors_do_not_mix(passes):
    bases = [torch.randn(70, 40), torch.randn(900)]
    experts = [[base + scale * torch.randn(base.shape) for base in bases] for scale in (1e-3, 1.0, 50.0)]

    def read(wanted):
        return ((number, experts[number][i], base) for i, base in enumerate(bases) for number in wanted)

    found = magnitude_thresholds(read, 3, 3700, 0.2)
    for number, expert in enumerate(experts):
        differences = [tensor - base for tensor, base in zip(expert, bases, strict=True)]
        assert found[number] == whole_threshold(differences, 0.2)


def test_vectors_without_entries_have_threshold_zero():
    assert magnitude_thresholds(lambda wanted: [], 2, 0, 0.2) == [0.0, 0.0]


@pytest.mark.parametrize(("spread", "expected"), [("smooth", 2), ("misleading", 4)])
def test_a_good_sample_needs_one_further_pass_and_a_bad_one_is_noticed(monkeypatch, spread, expected):
    """The sample, then one count; after a bracket that misses, all floats in wide bins, then one bin's floats."""
    monkeypatch.setattr(threshold, "SAMPLE_SIZE", 1000)
    vector = 0.1 * torch.rand(30_000) + 1
    if spread == "misleading":  # every entry that is sampled is larger than all others
        vector[:: -(-len(vector) // 1000) | 1] += 7
    calls = []

    def read(wanted):
        calls.append(list(wanted))
        return ((number, vector, torch.zeros_like(vector)) for number in wanted)

    assert magnitude_thresholds(read, 1, len(vector), 0.2) == [whole_threshold([vector], 0.2)]
    assert len(calls) == expected


def test_threshold_holds_no_more_than_two_tensors_at_a_time(monkeypatch):
    monkeypatch.setattr(threshold, "SAMPLE_SIZE", 100)
    data = torch.randn(10, 100)
    alive, most = [], 0

    def read(wanted):
        nonlocal most
        for row in data:
            tensor = row.clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield 0, tensor, torch.zeros(100)
            del tensor

    assert magnitude_thresholds(read, 1, 1000, 0.2) == [data.abs().flatten().topk(200).values[-1].item()]
    assert len(alive) >= 20
    assert most <= 2
