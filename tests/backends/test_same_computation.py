"""Experts must compute alike: settings, activations and hooks that differ are refused; what only training reads may
differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import timm
import torch
from open_clip.model import CLIP
from torch import Tensor, nn
from torch.nn import functional as F

from retex_hf import RetexConfig, RetexModel
from retex_hf.backends.same_computation import structure_difference
from retex_hf.errors import CheckpointError

TEXT = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1}
VIT = {"embed_dim": 8, "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}}
RESNET = {"embed_dim": 8, "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64}}
VIT, RESNET = VIT | {"text_cfg": TEXT}, RESNET | {"text_cfg": TEXT}


class Wrapped(nn.Module):
    """A class of a user's own around one of a library."""

    def __init__(self, inner: nn.Module, **notes: object) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), inner
        for name, value in notes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


def build(base: nn.Module, experts: dict[str, nn.Module], **options: object) -> RetexModel:
    for expert in experts.values():
        if expert is not base:
            expert.load_state_dict(base.state_dict())
    return RetexModel.from_experts(base, experts, RetexConfig(rank=2), check_base=False, progress=False, **options)


def refuse(message: str, base: nn.Module, other: nn.Module, **options: object) -> None:
    with pytest.raises(CheckpointError, match=rf"expert 'b'.*: .*{message} as in the other experts: .*alike\.") as info:
        build(base, {"a": deepcopy(base), "b": other}, **options)
    assert "\n" not in str(info.value)


def layer(heads: int = 2, **options: object) -> nn.Module:
    return nn.TransformerEncoderLayer(8, heads, 16, **options)


def linear_gelu(x: Tensor, slope: float = 1.0) -> Tensor:
    return F.gelu(slope * x)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (layer, lambda: layer(4), r"'num_heads' of module '.*self_attn' \(a MultiheadAttention\) is 4, not 2"),
        (layer, lambda: layer(norm_first=True), r"'norm_first' of .* \(a TransformerEncoderLayer\) is True, not False"),
        (layer, lambda: layer(activation="gelu"), r"'activation_relu_or_gelu' of .* is 2, not 1"),
        (
            lambda: layer(activation=F.silu),
            lambda: layer(activation=F.mish),
            r"'activation' of .* is torch\.nn\.functional\.mish, not torch\.nn\.functional\.silu",
        ),
        (
            lambda: layer(activation=partial(linear_gelu, slope=1.0)),
            lambda: layer(activation=partial(linear_gelu, slope=2.0)),
            r"is partial\(.*linear_gelu, slope=2\.0\), not partial\(.*linear_gelu, slope=1\.0\)",
        ),
        (lambda: layer(activation=nn.SiLU()), lambda: layer(activation=F.mish), r"SiLU"),
        (layer, lambda: layer(batch_first=True), r"'batch_first' of .* is True, not False"),
        (
            lambda: nn.AvgPool1d(3, padding=1),
            lambda: nn.AvgPool1d(3, padding=1, count_include_pad=False),
            r"'count_include_pad' of .* \(a AvgPool1d\) is False, not True",
        ),
        (lambda: nn.AvgPool1d(3), lambda: nn.AvgPool1d(3, ceil_mode=True), "'ceil_mode' of .* is True, not False"),
        (
            lambda: nn.Upsample(scale_factor=2, mode="linear"),
            lambda: nn.Upsample(scale_factor=2, mode="linear", align_corners=True),
            "'align_corners' of .* is True, not None",
        ),
        (
            lambda: nn.EmbeddingBag(9, 8),
            lambda: nn.EmbeddingBag(9, 8, include_last_offset=True),
            "'include_last_offset' of .* is True, not False",
        ),
        (lambda: nn.Sequential(nn.ReLU()), nn.Sequential, r"module 'inner\.0' is missing, not a \S+\.ReLU"),
        (nn.Identity, nn.ReLU, r"module 'inner' is a \S+\.ReLU, not a \S+\.Identity"),
    ],
)
def test_a_setting_of_torch_that_differs_is_refused(one: Callable, other: Callable, message: str, tmp_path: Path):
    base, expert = Wrapped(one()), Wrapped(other())
    refuse(message, base, expert)
    refuse(message, base, expert, output_dir=tmp_path / "built")
    with pytest.raises(CheckpointError, match=message):
        build(base, {"a": base}).add_task("b", expert)
    assert build(base, {"a": Wrapped(one()), "b": Wrapped(one())}).tasks == ["a", "b"]


def test_the_model_itself_is_compared_too():
    refuse(
        r"'norm_first' of the model \(a TransformerEncoderLayer\) is True, not False", layer(), layer(norm_first=True)
    )


def test_a_base_that_computes_otherwise_is_refused():
    base, expert = Wrapped(layer(4)), Wrapped(layer())
    expert.load_state_dict(base.state_dict())
    with pytest.raises(CheckpointError, match=r"base.*: 'num_heads' of .* is 4, not 2 as in the experts:"):
        RetexModel.from_experts(base, {"a": expert}, RetexConfig(rank=2), progress=False)
    expert = timm.create_model("test_resnet", num_classes=3)
    base = timm.create_model("test_resnet", num_classes=0)
    base.load_state_dict(expert.state_dict(), strict=False)
    structure = partial(structure_difference, base, expert)
    assert structure(heads=False) is None


def test_heads_of_open_clip_are_refused():
    wide = VIT | {"vision_cfg": VIT["vision_cfg"] | {"head_width": 8}}
    message = r"'num_heads' of module 'visual\..*attn' \(a MultiheadAttention\) is 4, not 2"
    refuse(message, CLIP(**VIT), CLIP(**wide), model_config=VIT)
    with pytest.raises(CheckpointError, match=rf"model_config does not make this model \({message}"):
        build(CLIP(**wide), {"a": CLIP(**wide)}, model_config=VIT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 4}, r"'num_heads' of module 'blocks\.0\.attn' \(a Attention\) is 4, not 2"),
        (
            {"global_pool": "avg", "fc_norm": False},
            r"'global_pool' of the model \(a VisionTransformer\) is 'avg', not 't",
        ),
    ],
)
def test_settings_of_timm_are_refused(change: dict, message: str):
    base, other = timm.create_model("test_vit", num_classes=3), timm.create_model("test_vit", num_classes=3, **change)
    with pytest.raises(CheckpointError, match=rf"expert 'b'.*: {message}"):
        build(base, {"a": deepcopy(base), "b": other})


def test_the_configuration_that_forward_reads_is_compared_in_diffusers(tmp_path: Path):
    diffusers = pytest.importorskip("diffusers")
    base, other = unet(diffusers), unet(diffusers, center_input_sample=True)
    message = r"'config\.center_input_sample' of the model \(a UNet2DModel\) is True, not False"
    refuse(message, base, other)
    for name, model in {"base": base, "other": other}.items():
        model.save_pretrained(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"expert 'b'.*: {message}"):
        RetexModel.from_experts(tmp_path / "base", {"a": tmp_path / "base", "b": tmp_path / "other"}, progress=False)
    assert build(base, {"a": deepcopy(base)}).tasks == ["a"]


def double(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return 2 * output


def halve(module: nn.Module, inputs: tuple) -> Tensor:
    return inputs[0] / 2


def scaled(factor: float) -> Callable:
    return lambda module, inputs, output: factor * output


def test_hooks_that_differ_are_refused():
    base, other = Wrapped(nn.ReLU()), Wrapped(nn.ReLU())
    other.inner.register_forward_hook(double)
    refuse(r"module 'inner' \(a ReLU\) has forward hooks \(\S+\.double\), not \(\)", base, other)
    other = Wrapped(nn.ReLU())
    other.register_forward_pre_hook(halve)
    refuse(r"the model \(a Wrapped\) has forward pre-hooks \(\S+\.halve\), not \(\)", base, other)
    base.linear.register_forward_hook(scaled(2.0))
    other = Wrapped(nn.ReLU())
    other.linear.register_forward_hook(scaled(3.0))
    refuse(r"module 'linear' \(a Linear\) has forward hooks \(\S+<lambda>\), not \(\S+<lambda>\)", base, other)
    other = Wrapped(nn.ReLU())
    other.linear.register_forward_hook(scaled(2.0))
    assert build(base, {"a": deepcopy(base), "b": other}).tasks == ["a", "b"]


def test_a_hook_that_records_is_the_same_whatever_it_saw():
    def recording() -> nn.Module:
        seen: list[float] = []
        module = Wrapped(nn.ReLU())
        module.inner.register_forward_hook(lambda *arguments: seen.append(1.0))
        return module

    base, other = recording(), recording()
    other(torch.randn(2, 8))
    assert build(base, {"a": deepcopy(base), "b": other}).tasks == ["a", "b"]


def test_a_forward_that_was_replaced_is_refused():
    base, other = Wrapped(nn.ReLU()), Wrapped(nn.ReLU())
    other.forward = MethodType(lambda self, x: self.linear(x), other)
    refuse(r"'forward' of the model \(a Wrapped\) is \S+<lambda>, not \S+Wrapped\.forward", base, other)
    other.forward = MethodType(Wrapped.forward, other)
    assert build(base, {"a": deepcopy(base), "b": other}).tasks == ["a", "b"]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "all experts get the latter" in record.getMessage()]


def test_attributes_of_a_users_own_class_are_warned_of(caplog):
    base, other = Wrapped(nn.ReLU(), k=3, title="x"), Wrapped(nn.ReLU(), k=4, title="y")
    with caplog.at_level(logging.WARNING):
        model = build(base, {"a": Wrapped(nn.ReLU(), k=3, title="x"), "b": other})
    assert model.tasks == ["a", "b"]
    (said,) = warnings_of(caplog)
    assert "expert 'b'" in said
    assert "'k' of the model (a Wrapped) is 4, not 3 as in the other experts (and 1 more)" in said


def test_a_note_on_a_librarys_module_is_warned_of(caplog):
    base, other = Wrapped(nn.ReLU()), Wrapped(nn.ReLU())
    base.linear.task_title, other.linear.task_title = "x", "y"
    with caplog.at_level(logging.WARNING):
        build(base, {"a": deepcopy(base), "b": other})
    assert len(warnings_of(caplog)) == 1


def unet(diffusers, **options: object) -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    return diffusers.UNet2DModel(**blocks, **sizes, **options)


def timm_model(name: str, **options: object) -> Callable[[float], nn.Module]:
    return lambda drop: timm.create_model(name, num_classes=3, drop_rate=drop, **options)


def diffusion(drop: float) -> nn.Module:
    return unet(pytest.importorskip("diffusers"), dropout=drop)


def clip(config: dict) -> Callable[[float], nn.Module]:
    return lambda drop: CLIP(**config)


IMAGES = (2, 3, 160, 160)
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
SAME = {
    "encoder layer": (lambda drop: layer(dropout=drop), [(2, 4, 8)], None),
    "transformer": (lambda drop: nn.Transformer(8, 2, 1, 1, 16, drop), [(2, 4, 8)] * 2, None),
    "lstm": (lambda drop: nn.LSTM(8, 8, 2, dropout=drop), [(2, 4, 8)], None),
    "vit": (timm_model("test_vit", proj_drop_rate=0.1), [IMAGES], None),
    "resnet": (timm_model("test_resnet", drop_path_rate=0.1), [IMAGES], None),
    "convnext": (timm_model("test_convnext"), [IMAGES], None),
    "efficientnet": (timm_model("test_efficientnet"), [IMAGES], None),
    "swin": (
        timm_model("swin_tiny_patch4_window7_224", **SWIN),
        [(2, 3, 32, 32)],
        {"architecture": "swin_tiny_patch4_window7_224", "model_args": SWIN},
    ),
    "clip vit": (clip(VIT), [(2, 3, 16, 16), "text"], VIT),
    "clip resnet": (clip(RESNET), [(2, 3, 32, 32), "text"], RESNET),
    "unet": (diffusion, [(2, 3, 8, 8), "step"], None),
}


def train_a_step(model: nn.Module, shapes: list) -> None:
    special = {"text": torch.randint(1, 32, (2, 8)), "step": torch.tensor([1, 5])}
    inputs = [special[shape] if isinstance(shape, str) else torch.randn(shape) for shape in shapes]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    output = model.train()(*inputs)
    output = output.sample if hasattr(output, "sample") else output
    first = output[0] if isinstance(output, tuple) else output
    first.float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", SAME)
def test_what_inference_does_not_depend_on_may_differ(name: str, tmp_path: Path, caplog):
    make, shapes, config = SAME[name]
    torch.manual_seed(0)
    base, trained, dropping = make(0.0).eval(), make(0.0), make(0.5)
    trained.load_state_dict(base.state_dict())
    train_a_step(trained, shapes)
    dropping.load_state_dict(base.state_dict())
    dropping.eval()
    options = {"model_config": config} if config is not None else {}
    for number, order in enumerate(([base, trained, dropping], [dropping, base, trained], [trained, dropping, base])):
        with caplog.at_level(logging.WARNING):
            given = dict(zip("abc", order, strict=True))
            place = {"output_dir": tmp_path / "built"} if number == 2 else {}
            model = RetexModel.from_experts(base, given, RetexConfig(rank=2), progress=False, **options, **place)
            assert model.tasks == ["a", "b", "c"]
    assert not warnings_of(caplog)


def test_losses_may_differ():
    base, other = (Wrapped(nn.ReLU(), loss=nn.CrossEntropyLoss(label_smoothing=s)) for s in (0.0, 0.1))
    assert build(base, {"a": deepcopy(base), "b": other}).tasks == ["a", "b"]
