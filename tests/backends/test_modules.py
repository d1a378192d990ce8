"""Any `nn.Module` as base and experts: built, run, saved, loaded with a function, changed."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import perturb
from safetensors.torch import save_file
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel, verify
from retex_hf.cli import main
from retex_hf.errors import ArtifactError, CheckpointError, ConfigError, InputError

ROWS = ["a", "b", "c", "b"]
Pair = namedtuple("Pair", ["hidden", "scores"])


@dataclass(frozen=True)
class Record:
    hidden: Tensor
    scores: Tensor
    name: str = "record"


class Net(nn.Module):
    """Two inputs, normalisation with statistics, a tied matrix, and outputs of every kind."""

    def __init__(self, width: int = 8, classes: int = 3, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.inner = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.blocks.append(self.blocks[0])  # tied
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, offset: float = 0.0):
        hidden = self.inner(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.norm(hidden)
        scores = self.head(hidden) + offset
        if scale is not None:
            scores = scores * scale[:, None]
        return {
            "tensor": lambda: scores,
            "tuple": lambda: (hidden, scores),
            "list": lambda: [hidden, scores],
            "dict": lambda: {"hidden": hidden, "scores": scores},
            "dataclass": lambda: Record(hidden, scores),
            "namedtuple": lambda: Pair(hidden, scores),
        }[self.form]()


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 8)


def scores_of(output) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["scores"]
    return output.scores if hasattr(output, "scores") else output[1]


def experts_of(base: nn.Module) -> dict[str, nn.Module]:
    return {task: perturb(base, seed) for seed, task in enumerate("abc")}


@pytest.fixture
def base() -> Net:
    return Net().eval()


@pytest.fixture
def built(base: Net) -> tuple[RetexModel, dict[str, nn.Module]]:
    experts = experts_of(base)
    return RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False), experts


def references() -> dict[str, list[Tensor]]:
    return {task: [torch.randn(16, 6) + 4 * index] for index, task in enumerate("abc")}


@pytest.mark.parametrize("execution", ["grouped", "auto"])
@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "dataclass", "namedtuple"])
def test_mixed_rows_are_those_of_each_expert_alone(form: str, execution: str):
    base = Net(form=form).eval()
    experts = experts_of(base)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False, execution=execution)
    x, scale = torch.randn(4, 6), torch.rand(4)
    output = model(x, scale, offset=0.5, task=ROWS)
    alone = [experts[task](x[i : i + 1], scale[i : i + 1], offset=0.5) for i, task in enumerate(ROWS)]
    torch.testing.assert_close(scores_of(output), torch.cat([scores_of(one) for one in alone]), rtol=1e-4, atol=1e-4)
    assert isinstance(output, type(alone[0]))
    assert output.routing.tasks == ROWS


def test_saved_and_loaded_with_a_function(built, tmp_path: Path):
    model, experts = built
    model.fit_signatures(references(), progress=False)
    x = torch.cat([torch.randn(2, 6) + 4 * index for index in range(3)])
    assert model.identify(x).tasks == ["a", "a", "b", "b", "c", "c"]
    model.save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net" / "config.json").exists()
    assert "make_model=lambda: Net(...)" in (tmp_path / "net" / "README.md").read_text()
    loaded = RetexModel.from_pretrained(tmp_path / "net", make_model=Net)
    assert loaded.identify(x).tasks == model.identify(x).tasks
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    expert = loaded.merge_and_unload("b")
    assert type(expert) is Net
    torch.testing.assert_close(expert(x), experts["b"](x), rtol=1e-4, atol=1e-4)
    assert expert.blocks[2] is expert.blocks[0]


def test_half_precision_comes_back_as_it_was(base: Net, tmp_path: Path):
    base = base.bfloat16()
    RetexModel.from_experts(base, {"a": base}, progress=False).save_pretrained(tmp_path / "net")
    loaded = RetexModel.from_pretrained(tmp_path / "net", make_model=Net)
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}
    loaded = RetexModel.from_pretrained(tmp_path / "net", make_model=Net, dtype="float32")
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.float32}


def test_without_the_function_it_says_what_to_give(built, tmp_path: Path):
    built[0].save_pretrained(tmp_path / "net")
    with pytest.raises(ArtifactError, match=r"make_model=lambda: YourModule"):
        RetexModel.from_pretrained(tmp_path / "net")
    with pytest.raises(ArtifactError, match=r"but the Net of make_model asks for \((3, )?9"):
        RetexModel.from_pretrained(tmp_path / "net", make_model=lambda: Net(9))
    with pytest.raises(ArtifactError, match="lacks 2 tensor"):
        RetexModel.from_pretrained(tmp_path / "net", make_model=Longer)
    with pytest.raises(ConfigError, match="must be a function that makes a module, not a Net"):
        RetexModel.from_pretrained(tmp_path / "net", make_model=Net())
    with pytest.raises(ConfigError, match=r"must make an nn\.Module, not a int"):
        RetexModel.from_pretrained(tmp_path / "net", make_model=lambda: 3)
    with pytest.raises(ArtifactError, match="takes no option 'offload_folder'"):
        RetexModel.from_pretrained(tmp_path / "net", make_model=Net, offload_folder="there")


def test_experts_as_state_dicts_and_files(base: Net, tmp_path: Path):
    experts = experts_of(base)
    tensors = {name: tensor.clone() for name, tensor in experts["b"].state_dict().items()}
    save_file(tensors, tmp_path / "b.safetensors")
    parallel = {f"module.{name}": tensor for name, tensor in experts["c"].state_dict().items()}
    given = {"a": experts["a"].state_dict(), "b": str(tmp_path / "b.safetensors"), "c": parallel}
    model = RetexModel.from_experts(base, given, RetexConfig(rank="full"), progress=False)
    x = torch.randn(4, 6)
    expected = torch.cat([experts[task](x[i : i + 1]) for i, task in enumerate(ROWS)])
    torch.testing.assert_close(model(x, task=ROWS), expected, rtol=1e-4, atol=1e-4)


def test_built_into_a_folder_it_is_what_saving_gives(base: Net, built, tmp_path: Path):
    model, experts = built
    streamed = RetexModel.from_experts(
        base, experts, RetexConfig(rank="full"), output_dir=tmp_path / "net", max_shard_size="1KB", progress=False
    )
    loaded = RetexModel.from_pretrained(tmp_path / "net", make_model=Net)
    for task in "abc":
        for one in (streamed, loaded):
            expected = model.recover(task)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in one.recover(task).items())


def test_tasks_come_and_go(base: Net, built, tmp_path: Path):
    model, _ = built
    model.fit_signatures(references(), progress=False)
    new = perturb(base, 7)
    model.add_task("d", new, references=[torch.randn(16, 6) - 8], tolerance=0.0, progress=False)
    model.delete_task("a")
    model.save_pretrained(tmp_path / "net")
    loaded = RetexModel.from_pretrained(tmp_path / "net", make_model=Net)
    x = torch.randn(3, 6)
    torch.testing.assert_close(loaded(x, task="d"), new(x), rtol=1e-4, atol=1e-4)
    assert loaded.identify(torch.randn(2, 6) - 8).tasks == ["d", "d"]


def test_heads_of_different_widths(tmp_path: Path):
    base = Net(classes=3).eval()
    experts = {"a": Net(classes=2), "b": Net(classes=5), "c": Net(classes=3)}
    for seed, expert in enumerate(experts.values()):
        body = {n: t for n, t in perturb(base, seed).state_dict().items() if not n.startswith("head")}
        expert.load_state_dict(body, strict=False)
        expert.eval()
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    model.save_pretrained(tmp_path / "net")
    x = torch.randn(4, 6)
    for one in (model, RetexModel.from_pretrained(tmp_path / "net", make_model=Net)):
        for execution in ("grouped", "auto"):
            one.execution = execution
            output = one(x, task=ROWS)
            assert output.shape == (4, 5)
            for row, task in enumerate(ROWS):
                expected = experts[task](x[row : row + 1])[0]
                torch.testing.assert_close(output[row, : len(expected)], expected, rtol=1e-4, atol=1e-4)
                assert (output[row, len(expected) :] == -torch.inf).all()  # never the largest


def test_verify_and_inspect_need_no_function(built, tmp_path: Path, capsys):
    model, _ = built
    model.fit_signatures(references(), progress=False)
    model.save_pretrained(tmp_path / "net")
    assert verify(tmp_path / "net", finite=True).finite
    assert main(["inspect", str(tmp_path / "net")]) in (0, None)
    assert "torch" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "net"), "a", str(tmp_path / "a")]) == 2
    assert "make_model" in capsys.readouterr().err


def test_a_feature_layer_by_name(base: Net):
    config = RetexConfig(rank="full", feature_layer="blocks.1.1")  # which has no tensors of its own
    model = RetexModel.from_experts(base, experts_of(base), config, progress=False)
    model.fit_signatures(references(), progress=False)
    assert model.signatures.feature_layer == "blocks.1.1"
    assert model.identify(torch.randn(2, 6) + 8).tasks == ["c", "c"]


class Nameless(nn.Linear):
    def forward(self, *inputs):
        return super().forward(inputs[0])


def test_arguments_without_names_are_refused():
    base = Nameless(3, 3)
    model = RetexModel.from_experts(base, {"a": base}, progress=False)
    with pytest.raises(InputError, match="'inputs' by position"):
        model(torch.randn(2, 3), task="a")


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle '_thread.lock' object")


def test_a_module_that_cannot_be_copied_is_refused():
    base = Uncopied(3, 3)
    with pytest.raises(CheckpointError, match="this Uncopied cannot be copied: cannot pickle"):
        RetexModel.from_experts(base, {"a": base}, progress=False)


class WithArray(nn.Linear):
    def forward(self, x: Tensor) -> dict:
        y = super().forward(x)
        return {"y": y, "array": y.detach().numpy()}


@torch.no_grad()
@pytest.mark.parametrize("execution", ["grouped", "auto", "mixed"])
def test_a_numpy_array_among_the_outputs_is_refused_for_several_experts(execution: str):
    base = WithArray(3, 3).eval()
    model = RetexModel.from_experts(base, experts_of(base), progress=False, execution=execution)
    with pytest.raises(InputError, match=r"^The output 'array' is a numpy array"):
        model(torch.randn(4, 3), task=ROWS)
    assert model(torch.randn(4, 3), task="a")["array"].shape == (4, 3)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # which is deprecated, and still in use
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: torch.jit.script(plain()), "is"),
        (lambda: torch.jit.trace(plain(), torch.randn(2, 3)), "is"),
        (lambda: nn.Sequential(torch.jit.script(plain())), "holds"),
    ],
    ids=["scripted", "traced", "within"],
)
def test_torchscript_is_refused(made, says: str, tmp_path: Path):
    base = plain()
    for folder in (None, tmp_path / "built"):
        with pytest.raises(CheckpointError, match=f"^the base {says} a TorchScript module, .*: give the module that"):
            RetexModel.from_experts(made(), {"a": made()}, progress=False, output_dir=folder)
        with pytest.raises(CheckpointError, match=f"^expert 'b' {says} a TorchScript module"):
            RetexModel.from_experts(base, {"a": base, "b": made()}, progress=False, output_dir=folder)
    model = RetexModel.from_experts(base, {"a": base}, progress=False)
    with pytest.raises(CheckpointError, match=f"^expert 'b' {says} a TorchScript module"):
        model.add_task("b", made(), progress=False)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ArtifactError, match=f"of make_model {says} a TorchScript module"):
        RetexModel.from_pretrained(tmp_path / "saved", make_model=made)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def test_lazy_modules_are_refused_until_they_have_run(tmp_path: Path):
    base = Lazy()
    base(torch.randn(2, 3))
    experts = experts_of(base.eval())
    says = "tensor 'layer.weight' has no shape yet: run the module once first"
    for folder in (None, tmp_path / "built"):
        with pytest.raises(CheckpointError, match=f"^the base: {says}"):
            RetexModel.from_experts(Lazy(), experts, progress=False, output_dir=folder)
        with pytest.raises(CheckpointError, match=f"^expert 'b': {says}"):
            RetexModel.from_experts(base, experts | {"b": Lazy()}, progress=False, output_dir=folder)
        with pytest.raises(CheckpointError, match=f"^expert 'b': {says}"):
            RetexModel.from_experts(base, experts | {"b": Lazy().state_dict()}, progress=False, output_dir=folder)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    x = torch.randn(2, 3)
    torch.testing.assert_close(model(x, task="b"), experts["b"](x), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ArtifactError, match=f"the Lazy of make_model: {says}"):
        RetexModel.from_pretrained(tmp_path / "saved", make_model=Lazy)


class Both(nn.Module):
    """Takes a list of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return self.layers[0](inputs[0]) - self.layers[1](inputs[1])


@torch.no_grad()
def test_a_list_of_inputs_has_as_many_rows_as_tasks_are_named():
    base = Both().eval()
    experts = {task: perturb(base, seed) for seed, task in enumerate("abc")}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    inputs = [torch.randn(4, 6), torch.randn(4, 6)]
    output = model(inputs, task=ROWS)
    for row, task in enumerate(ROWS):
        torch.testing.assert_close(output[row], experts[task](inputs)[row], rtol=1e-4, atol=1e-5)
