"""Small models of every OpenCLIP architecture and every timm family: three experts, merged, signed, saved, loaded.

Mixed rows must be answered as by each row's expert alone, the task of every input must be identified, and a loaded
model must answer as the saved one, bit by bit. An architecture may be refused, with a one-sentence error of this
library.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import open_clip
import timm
import torch
from huggingface_hub import constants
from open_clip.coca_model import CoCa
from torch import Tensor, nn
from tqdm.auto import tqdm

from retex_hf import RetexConfig, RetexError, RetexModel

from .oddities import Wrong
from .small_architectures import CONTEXT, VOCABULARY, small_open_clip, small_timm, timm_image_size
from .tally import Tally

TASKS = ("a", "b", "c")
ROWS = ("a", "b", "c", "b", "a")
REFERENCES = 8
# Relative to the largest number of an answer: the effect of rounding in another order.
TOLERANCE = 1e-3
# One small variant of each family of timm's architectures.
FAMILIES = (
    "resnet10t", "resnet26d", "seresnet18", "res2net50_14w_8s", "vit_tiny_patch16_224",
    "vit_relpos_small_patch16_224", "vit_small_patch16_36x1_224", "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224",
    "flexivit_small", "cait_xxs24_224", "xcit_nano_12_p16_224", "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256", "convnext_atto", "convnextv2_atto", "fastvit_t8", "gmlp_ti16_224",
    "efficientnet_lite0", "mobilenetv2_035", "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "mobilevit_xxs",
    "regnety_002", "repvgg_a0", "edgenext_xx_small", "efficientvit_m0", "maxvit_rmlp_pico_rw_256", "davit_tiny",
    "inception_next_atto", "mambaout_femto", "pit_ti_224",
    "pvt_v2_b0", "repvit_m0_9", "starnet_s1", "tiny_vit_5m_224", "lcnet_035", "tinynet_e", "shvit_s1",
    "swiftformer_xs", "test_vit", "test_resnet",
)  # fmt: skip
# Used by the tests: one of every kind of tower, and of every kind of layer.
SHORT_OPEN_CLIP = (
    "ViT-B-32",
    "RN50",
    "coca_ViT-B-32",
    "roberta-ViT-B-32",
    "ViT-B-16-SigLIP",
    "convnext_base",
)
SHORT_TIMM = (
    "test_vit", "test_resnet", "deit_tiny_distilled_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224",
    "fastvit_t8",
)  # fmt: skip


def run(work_dir: Path, *, size: str = "short", seed: int = 0, progress: bool = True) -> list[Tally]:
    """Try the kinds that the tests use; in the long form every name of OpenCLIP and every family of timm."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _sweep("architectures of OpenCLIP", open_clip.list_models() if size == "long" else SHORT_OPEN_CLIP,
                   try_open_clip, work_dir, seed, progress),
            _sweep("kinds of timm's architectures", FAMILIES if size == "long" else SHORT_TIMM,
                   try_timm, work_dir, seed, progress),
        ]  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def _sweep(
    title: str,
    names: Sequence[str],
    attempt: Callable[[str, Path, int], None],
    work_dir: Path,
    seed: int,
    progress: bool,
) -> Tally:
    tally = Tally(title)
    for name in tqdm(names, desc=title, unit="model", disable=not progress):
        outcome, problem = outcome_of(name, attempt, work_dir, seed)
        tally.add(outcome, problem)
    return tally


def outcome_of(
    name: str, attempt: Callable[[str, Path, int], None], work_dir: Path, seed: int = 0
) -> tuple[str, str | None]:
    """Return the outcome of one architecture, and the problem, if any."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(name, work_dir / name, seed)
    except Wrong as wrong:
        return "wrong", f"{name} (seed={seed}): {wrong}"
    except RetexError as error:
        return f"refused ({name}: {error})", None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return "traceback", f"{name} (seed={seed}): {type(error).__name__} at {where}: {error}"
    finally:
        rmtree(work_dir / name, ignore_errors=True)
    return "right", None


def try_open_clip(name: str, work_dir: Path, seed: int) -> None:
    """Try both towers of an OpenCLIP architecture."""
    with patch.object(constants, "HF_HUB_CACHE", str(work_dir / "cache")):
        written, given = small_open_clip(name, work_dir / "cache")
        key = f"small-{name}"
        with patch.dict(open_clip.factory._MODEL_CONFIGS, {key: given}):
            torch.manual_seed(seed)
            base = open_clip.create_model(key, load_weights=False, pretrained_hf=False).eval()
        initialise(base)
        experts = experts_of(base, seed)
        model = RetexModel.from_experts(
            base, experts, RetexConfig(rank="full"), model_config=written, check_base=False, progress=False
        )
        side = written["vision_cfg"]["image_size"]
        images, references = pictures((3, side, side), seed)
        texts = torch.randint(3, VOCABULARY, (len(ROWS), CONTEXT), generator=torch.Generator().manual_seed(seed))
        calls = {"encode_image": (images,), "encode_text": (texts,)}
        if isinstance(base, CoCa):
            calls["forward"] = (images, texts)
        check(model, experts, calls, {task: [{"image": rows}] for task, rows in references.items()}, images, work_dir)


def try_timm(name: str, work_dir: Path, seed: int) -> None:
    """Try a classifier of timm."""
    small, side = small_timm(name), timm_image_size(name)
    torch.manual_seed(seed)
    base = timm.create_model(small, num_classes=6).eval()
    experts = experts_of(base, seed)
    model = RetexModel.from_experts(
        base, experts, RetexConfig(rank="full"), model_config=small, check_base=False, progress=False
    )
    images, references = pictures((3, side, side), seed)
    calls = {"forward": (images,)}
    check(model, experts, calls, {task: [rows] for task, rows in references.items()}, images, work_dir)


@torch.no_grad()
def initialise(base: nn.Module) -> None:
    """Fill tensors that an architecture leaves uninitialised (an unused projection of CoCa)."""
    for tensor in base.state_dict().values():
        if tensor.is_floating_point() and not (tensor.isfinite().all() and tensor.abs().max() < 1e3):
            tensor.normal_(std=0.02)


@torch.no_grad()
def experts_of(base: nn.Module, seed: int) -> dict[str, nn.Module]:
    """Make three experts, each a little off the base in every number."""
    experts = {}
    for number, task in enumerate(TASKS):
        random = torch.Generator().manual_seed(1000 * seed + number)
        expert = deepcopy(base)
        for tensor in expert.state_dict().values():
            if tensor.is_floating_point() and tensor.numel():
                scale = 0.05 * float(tensor.abs().mean()) + 1e-3
                noise = torch.randn(tensor.shape, generator=random).abs()  # variances stay positive
                tensor.add_((scale * noise).to(tensor.dtype))
        experts[task] = expert.eval()
    return experts


def pictures(shape: tuple[int, ...], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw a batch of all tasks, and references of each: every task has a pattern of its own, with a little noise."""
    random = torch.Generator().manual_seed(seed + 7)
    patterns = {task: torch.randn(shape, generator=random) for task in TASKS}

    def draw(task: str, rows: int) -> Tensor:
        return patterns[task] + 0.05 * torch.randn((rows, *shape), generator=random)

    references = {task: draw(task, REFERENCES) for task in TASKS}
    return torch.cat([draw(task, 1) for task in ROWS]), references


@torch.no_grad()
def check(
    model: RetexModel,
    experts: dict[str, nn.Module],
    calls: dict[str, tuple[Tensor, ...]],
    references: dict[str, list[Any]],
    images: Tensor,
    work_dir: Path,
) -> None:
    """Check everything that must hold of a model that was just built."""
    for execution in ("grouped", "auto"):
        model.execution = execution
        for method, inputs in calls.items():
            alone = [_call(experts[task], method, _row(inputs, row)) for row, task in enumerate(ROWS)]
            together = _tensors(getattr(model, method)(*inputs, task=list(ROWS)))
            _compare(f"{method} ({execution})", together, [_tensors(answer) for answer in alone])
    model.fit_signatures(references, progress=False)
    found = model.identify(images).tasks
    if found != list(ROWS):
        raise Wrong(f"rows of {list(ROWS)} are taken for {found} by features of {model.signatures.feature_layer!r}")
    model.save_pretrained(work_dir / "saved")
    loaded = RetexModel.from_pretrained(work_dir / "saved")
    for method, inputs in calls.items():
        given = {} if method == "forward" else {"task": list(ROWS)}
        first, second = (_tensors(getattr(one, method)(*inputs, **given)) for one in (model, loaded))
        if [name for name in first if not torch.equal(first[name], second[name])] or first.keys() != second.keys():
            raise Wrong(f"{method} of what was loaded differs from what was saved")
    for task in TASKS:
        answer, expected = (
            _tensors(_call(one, *_first(calls))) for one in (loaded.merge_and_unload(task), experts[task])
        )
        _close(f"the expert {task!r} alone", answer, expected)


def _first(calls: dict[str, tuple[Tensor, ...]]) -> tuple[str, tuple[Tensor, ...]]:
    return next(iter(calls.items()))


def _call(model: nn.Module, method: str, inputs: tuple[Tensor, ...]) -> Any:
    return model(*inputs) if method == "forward" else getattr(model, method)(*inputs)


def _row(inputs: tuple[Tensor, ...], row: int) -> tuple[Tensor, ...]:
    return tuple(value[row : row + 1] for value in inputs)


def _tensors(output: Any) -> dict[str, Tensor]:
    if isinstance(output, Tensor):
        return {"output": output}
    items = output.items() if isinstance(output, dict) else enumerate(output)
    return {str(name): value for name, value in items if isinstance(value, Tensor)}


def _compare(what: str, together: dict[str, Tensor], alone: list[dict[str, Tensor]]) -> None:
    """Compare a batch with its rows alone; a scalar output of an expert is repeated for each of its rows."""
    for name in alone[0]:
        rows = [answer[name] if answer[name].ndim else answer[name][None] for answer in alone]
        _close(what, {name: together[name]}, {name: torch.cat(rows)})


def _close(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise Wrong(f"{name} of {what} has shape {tuple(found[name].shape)}, not {tuple(value.shape)}")
        if not value.isfinite().all():
            raise Wrong(f"{name} of {what} is not finite in the expert itself, so nothing is compared")
        error, largest = float((found[name] - value).abs().max()), float(value.abs().max())
        if error > TOLERANCE * max(largest, 1e-6):
            raise Wrong(f"{name} of {what} is off by {error:.1e}, of {largest:.1e}")
