"""Untrusted image processors make images of a bounded size, or are refused in a sentence that names their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from families import FAMILIES
from helpers import edit_json
from PIL import Image
from trust.uploads import image_model

from retex_hf import ArtifactError, InputError, RetexModel
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.backends import openclip
from retex_hf.backends.untrusted_config import vet_open_clip_config, vet_side_config
from retex_hf.backends.untrusted_processor import CheckedProcessor, check_sizes
from retex_hf.errors import CheckpointError

PHOTO = Image.new("RGB", (40, 30))
FILE = "preprocessor_config.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> RetexModel:
    return image_model(tmp_path_factory.mktemp("processor"))


@pytest.fixture
def folder(tmp_path) -> Path:
    tf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"height": 20_000, "width": 20_000}},
        {"size": {"shortest_edge": 10, "longest_edge": 10**9}},
        {"size": -1},
        {"do_pad": True, "pad_size": {"height": 30_000, "width": 30_000}},
        {"do_center_crop": True, "crop_size": {"height": 30_000, "width": 30_000}},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 1e-6},
        {"image_processor_type": "Pix2StructImageProcessor", "max_patches": 10**8},
        {"image_processor_type": "Pix2StructImageProcessor", "patch_size": {"height": 4000, "width": 4000}},
        {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[10**5, 10**5]]},
        {"image_processor_type": "LlavaNextImageProcessor", "crop_size": 1, "size": {"shortest_edge": 4000}},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 384, "width": 384}, "max_patches": 4000},
        {"image_processor_type": "DPTImageProcessor", "ensure_multiple_of": 10**6},
        {"rescale_factor": 1e308},
    ],
    ids=str,
)
def test_sizes_beyond_reason_are_refused_when_loaded(model, folder, settings):
    edit_json(folder / FILE, **settings)
    with pytest.raises(ArtifactError, match=f"{FILE} (has .*: expected a number|makes up to [0-9]* pixels)"):
        load_preprocessor(folder, model.model)


@pytest.mark.parametrize(
    "settings", [{"resample": 99}, {"resample": "x"}, {"image_mean": [0.5, 0.5]}, {"image_mean": "x"}], ids=str
)
def test_what_a_processor_raises_is_a_sentence(model, folder, settings):
    edit_json(folder / FILE, **settings)
    with pytest.raises(ArtifactError, match=f"{FILE} describes an image processor that fails|no image processor that"):
        load_preprocessor(folder, model.model)([PHOTO])


def test_sizes_in_the_other_file_are_found_too(model, folder):
    values = json.loads((folder / FILE).read_text(encoding="utf-8"))
    (folder / FILE).unlink()
    values["size"] = {"height": 20_000, "width": 32}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": values}), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"processor_config.json has 20000 under 'size.height'"):
        load_preprocessor(folder, model.model)


def test_a_processor_computes_where_the_person_says(model, folder):
    edit_json(folder / FILE, device="meta")
    assert load_preprocessor(folder, model.model)([PHOTO])["pixel_values"].device.type == "cpu"
    assert vet_side_config({"device": "cuda", "size": 3}) == {"size": 3}


@pytest.mark.parametrize(
    "name",
    [
        "Bit", "Blip", "CLIP", "ConvNext", "DPT", "DeiT", "Detr", "Donut", "EfficientNet", "Flava", "LayoutLMv3",
        "LlavaNext", "LlavaOnevision", "Mask2Former", "MobileNetV2", "MobileViT", "Nougat", "Owlv2", "Pix2Struct",
        "PoolFormer", "Sam", "Segformer", "Siglip", "Siglip2", "SuperPoint", "Swin2SR", "ViT", "VitMatte", "ZoeDepth",
    ],
)  # fmt: skip
def test_real_processors_are_let_through(name):
    check_sizes(Path(FILE), getattr(tf, f"{name}ImageProcessor")().to_dict())


def test_a_line_of_pixels_is_refused(tmp_path):
    """Of which a processor that keeps its shape would make 224 x 13,440,000 pixels."""
    processor = tf.CLIPImageProcessor()
    checked = CheckedProcessor(tmp_path / FILE, processor.to_dict(), lambda images: dict(processor(images)))
    assert len(checked([Image.new("RGB", (2000, 2))])["pixel_values"]) == 1
    with pytest.raises(
        InputError, match="Input 2 is an image of 1 x 60000 pixels: expected one side to be at most 1992"
    ):
        checked([PHOTO, Image.new("RGB", (1, 60_000))])


@pytest.mark.parametrize(
    "settings",
    [
        {"interpolation": "x"}, {"resize_mode": "x"}, {"mode": "L"}, {"mean": "x"}, {"mean": [0, 0, 0, 0]},
        {"std": [0, 0, 0]}, {"size": 20_000}, {"size": -1}, {"size": "x"}, {"other": 1},
    ],
    ids=str,
)  # fmt: skip
def test_odd_settings_of_open_clip_are_a_sentence(tmp_path, settings: dict[str, Any]):
    model = FAMILIES["open_clip-vit"].make()
    model.visual.preprocess_cfg = {"size": 32} | settings
    with pytest.raises(ArtifactError, match=openclip.CONFIG):
        load_preprocessor(tmp_path, model)([PHOTO])


def test_texts_in_the_norms_of_open_clip_are_refused():
    for tower in ("vision_cfg", "text_cfg"):
        with pytest.raises(CheckpointError, match="eps='x' in norm_kwargs: expected a number"):
            vet_open_clip_config({"model_cfg": {tower: {"norm_kwargs": {"eps": "x"}}}}, Path(openclip.CONFIG))
    vet_open_clip_config({"model_cfg": {"vision_cfg": {"norm_kwargs": {"eps": 1e-6}}}}, Path(openclip.CONFIG))
