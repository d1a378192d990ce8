"""Models of timm: as objects and as folders that timm writes; heads of their own; what timm itself reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from helpers import perturb
from timm.models import save_for_hf

from retex_hf import RetexConfig, RetexModel
from retex_hf.errors import ArtifactError, CheckpointError

NAME, SIDE = "test_resnet", 32
WIDTHS = {"a": 2, "b": 5}
ROWS = ["a", "b", "b"]


@pytest.fixture(scope="module")
def experts() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    base = timm.create_model(NAME, num_classes=3)
    found = {"base": base.eval()}
    for seed, (task, classes) in enumerate(WIDTHS.items()):
        found[task] = timm.create_model(NAME, num_classes=classes)
        body = {n: t for n, t in perturb(base, seed, scale=0.05).state_dict().items() if not n.startswith("fc.")}
        found[task].load_state_dict(body, strict=False)
        found[task].eval()
    return found


@pytest.fixture(scope="module")
def folders(experts, tmp_path_factory) -> dict[str, Path]:
    places = {task: tmp_path_factory.mktemp("timm") / task for task in experts}
    for task, model in experts.items():
        labels = {"label_names": [f"{task}{n}" for n in range(model.num_classes)]}
        save_for_hf(model, places[task], model_config=labels, safe_serialization=True)
    return places


@torch.no_grad()
def check_rows(model: RetexModel, experts) -> None:
    x = torch.randn(3, 3, SIDE, SIDE)
    output = model(x, task=ROWS)
    assert output.shape == (3, 5)
    for row, task in enumerate(ROWS):
        expected = experts[task](x[row : row + 1])[0]
        torch.testing.assert_close(output[row, : len(expected)], expected, rtol=1e-3, atol=1e-4)
        assert (output[row, len(expected) :] == -torch.inf).all()


@torch.no_grad()
def test_objects_become_an_artifact_that_timm_opens(experts, tmp_path: Path):
    given = {task: experts[task] for task in WIDTHS}
    model = RetexModel.from_experts(experts["base"], given, RetexConfig(rank="full"), progress=False)
    check_rows(model, experts)
    model.save_pretrained(tmp_path / "saved")
    loaded = RetexModel.from_pretrained(tmp_path / "saved")
    check_rows(loaded, experts)
    x = torch.randn(2, 3, SIDE, SIDE)
    plain = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert torch.equal(plain(x), loaded.unload()(x))
    assert loaded.predict(x, task="b")[0]["label"].startswith("LABEL_")
    assert type(loaded.merge_and_unload("b")) is type(experts["b"])


def test_folders_keep_the_names_of_their_labels(experts, folders):
    given = {task: folders[task] for task in WIDTHS}
    model = RetexModel.from_experts(folders["base"], given, RetexConfig(rank="full"), progress=False)
    check_rows(model, experts)
    assert model.predict(torch.randn(1, 3, SIDE, SIDE), task="b")[0]["label"] in {f"b{n}" for n in range(5)}


def test_a_model_made_with_arguments_needs_them():
    base = timm.create_model("test_vit", num_classes=3, img_size=32)
    with pytest.raises(CheckpointError, match=r"does not make this model .*pass model_config="):
        RetexModel.from_experts(base, {"a": base}, progress=False)
    config = {"architecture": "test_vit", "model_args": {"img_size": 32}}
    model = RetexModel.from_experts(base, {"a": base}, progress=False, model_config=config)
    assert model.model.timm_config["model_args"] == {"img_size": 32}


def test_an_expert_with_another_activation_is_refused(experts, folders, tmp_path: Path):
    name = experts["a"].pretrained_cfg["architecture"]
    other = timm.create_model(name, num_classes=experts["a"].num_classes, act_layer=torch.nn.SiLU).eval()
    message = r"module '.*' is a \S*SiLU, not a \S*ReLU as in the other experts"
    with pytest.raises(CheckpointError, match=f"expert 'b'.*: {message}"):
        RetexModel.from_experts(experts["a"], {"a": experts["a"], "b": other}, progress=False)
    save_for_hf(other, tmp_path, model_args={"act_layer": "silu"}, safe_serialization=True)
    with pytest.raises(CheckpointError, match=f"expert 'b'.*: {message}"):
        RetexModel.from_experts(folders["a"], {"a": folders["a"], "b": tmp_path}, progress=False)


def test_modules_of_one_name_are_told_apart():
    base = timm.create_model("test_vit", num_classes=3, norm_layer=torch.nn.LayerNorm)
    with pytest.raises(CheckpointError, match=r"is a torch\.nn\.\S+\.LayerNorm, not a timm\.layers\.\S+\.LayerNorm"):
        RetexModel.from_experts(base, {"a": base}, progress=False)


def test_experts_of_another_architecture_are_refused(experts):
    other = timm.create_model("test_vit", num_classes=3)
    with pytest.raises(CheckpointError, match="is a test_vit, but expert 'a' is a test_resnet"):
        RetexModel.from_experts(experts["base"], {"a": experts["a"], "b": other}, progress=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "hf-hub:somebody/model"}, "not one of timm's own architectures"),
        ({"architecture": "os.system"}, "not one of timm's own architectures"),
        ({"model_args": {"pretrained": True}}, "'pretrained' in model_args"),
        ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "'checkpoint_path' in model_args"),
        ({"model_args": {"features_only": True}}, "'features_only' in model_args"),
        ({"model_args": {"act_layer": "/tmp/x.py"}}, "may name a file"),
        ({"num_classes": "many"}, "num_classes='many'"),
        ({"num_classes": 10**9, "model_args": {}}, "leave room for"),
        ({"num_classes": 10**9, "model_args": {"num_classes": 10**9}}, "leave room for"),
        ({"num_classes": 3, "model_args": {"num_classes": 4}}, "has num_classes=3, but 4 in model_args"),
    ],
)
def test_an_untrusted_configuration_is_vetted(change, said, folders, tmp_path: Path):
    values = json.loads((folders["base"] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((folders["base"] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=said):
        RetexModel.from_experts(tmp_path, {"a": tmp_path}, progress=False)


def test_an_artifact_whose_configuration_was_changed_is_refused(experts, tmp_path: Path):
    RetexModel.from_experts(experts["base"], {"a": experts["base"]}, progress=False).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(path.read_text().replace(NAME, "test_resnet2"))
    with pytest.raises(ArtifactError, match=r"config\.json"):
        RetexModel.from_pretrained(tmp_path / "saved")
