"""Tokenizers and processors travel with the artifact, whatever files they have."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from families import FAMILIES, TEXT
from helpers import make_experts
from materials_of_pipelines import make_tokenizer

from retex_hf import RetexConfig, RetexModel
from retex_hf.checkpoints.locate import DOWNLOADED
from retex_hf.checkpoints.tokenizer_files import is_other_tokenizer, side_files, tokenizer_difference

MERGES = {"vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4, "Ġab": 5}, "merges": [("a", "b"), ("Ġ", "ab")]}
PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)]


def with_chat_templates() -> tf.PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    return tokenizer


def whisper() -> tf.WhisperProcessor:
    return tf.WhisperProcessor(tf.WhisperFeatureExtractor(feature_size=8), tf.WhisperTokenizer(**MERGES))


def text(auto: Any, folder: Path) -> Any:
    return auto.from_pretrained(folder)("a b red1 ab").input_ids


def image(auto: Any, folder: Path) -> Any:
    shown = np.random.default_rng(0).integers(0, 255, (3, 40, 40), np.uint8)
    return auto.from_pretrained(folder)(images=shown, return_tensors="np")["pixel_values"].tolist()


def both(auto: Any, folder: Path) -> Any:
    processor = auto.from_pretrained(folder)
    return processor(text="a red1", images=np.ones((3, 40, 40), np.uint8), return_tensors="np")["input_ids"].tolist()


def sound(auto: Any, folder: Path) -> Any:
    processor = auto.from_pretrained(folder)
    features = processor.feature_extractor(np.arange(800.0), sampling_rate=16000).input_features[0].tolist()
    return features, processor.tokenizer("ab ab").input_ids


def chat(auto: Any, folder: Path) -> Any:
    messages = [{"role": "user", "content": "red1"}]
    tokenizer = auto.from_pretrained(folder)
    return [tokenizer.apply_chat_template(messages, chat_template=name, tokenize=False) for name in (None, "tool_use")]


def second_tokenizer(auto: Any, folder: Path) -> Any:
    return auto.from_pretrained(folder).qformer_tokenizer("red1 blue2").input_ids


def video(auto: Any, folder: Path) -> Any:
    return auto.from_pretrained(folder).to_dict()


KINDS: dict[str, tuple[Callable[[], Any], Any, Callable[..., Any]]] = {
    "words": (make_tokenizer, tf.AutoTokenizer, text),
    "WordPiece": (
        lambda: tf.BertTokenizer(vocab={w: n for n, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}),
        tf.AutoTokenizer,
        text,
    ),
    "byte-level BPE": (lambda: tf.GPT2Tokenizer(**MERGES), tf.AutoTokenizer, text),
    "Unigram": (lambda: tf.T5Tokenizer(vocab=PIECES), tf.AutoTokenizer, text),
    "bytes": (lambda: tf.ByT5Tokenizer(), tf.AutoTokenizer, text),
    "chat templates": (with_chat_templates, tf.AutoTokenizer, chat),
    "images": (lambda: tf.ViTImageProcessor(size={"height": 8, "width": 8}), tf.AutoImageProcessor, image),
    "images and texts": (
        lambda: tf.CLIPProcessor(tf.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8), make_tokenizer()),
        tf.AutoProcessor,
        both,
    ),
    "sounds": (whisper, tf.AutoProcessor, sound),
    "two tokenizers": (
        lambda: tf.InstructBlipProcessor(tf.BlipImageProcessor(), make_tokenizer(), make_tokenizer()),
        tf.AutoProcessor,
        second_tokenizer,
    ),
    "video": (lambda: tf.LlavaOnevisionVideoProcessor(), tf.AutoVideoProcessor, video),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_folder_has_is_kept_through_two_saves(kind, tmp_path):
    make, auto, use = KINDS[kind]
    base = FAMILIES["bert"].make()
    base.save_pretrained(tmp_path / "base")
    make().save_pretrained(tmp_path / "base")
    experts = make_experts(base)
    model = RetexModel.from_experts(str(tmp_path / "base"), experts, RetexConfig(rank=2), progress=False)
    model.save_pretrained(tmp_path / "first")
    RetexModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    expected = use(auto, tmp_path / "base")
    kept = {file.relative_to(tmp_path / "base") for file in side_files(tmp_path / "base")}
    assert kept
    for copy in ("first", "second"):
        assert use(auto, tmp_path / copy) == expected
        for file in kept:
            assert (tmp_path / copy / file).read_bytes() == (tmp_path / "base" / file).read_bytes()


def test_files_of_earlier_versions_and_of_slow_tokenizers(tmp_path):
    """Every name that a tokenizer or processor of transformers can have is known, here and where the Hub is asked."""
    sources = Path(inspect.getfile(tf)).parent.glob("models/*/tokenization_*.py")
    tables = [
        table
        for source in sources
        for table in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", source.read_text(encoding="utf-8"), re.DOTALL)
    ]
    names = {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}
    assert {"tokenizer.json", "spiece.model", "source.spm", "bpe.codes", "normalizer.json"} <= names
    names |= {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"}
    names |= {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
    names |= {"audio_tokenizer_config.json", "tokenizer.model", "tekken.json", "qwen.tiktoken"}
    foreign = {"model.safetensors", "config.json", "README.md", "modules.json", "training_args.bin"}
    for name in names | foreign:
        (tmp_path / name).touch()
    assert {file.name for file in side_files(tmp_path)} == names
    assert all(any(Path(name).match(pattern) for pattern in DOWNLOADED) for name in names)


def test_the_folder_of_a_model_in_memory(tmp_path):
    base = FAMILIES["bert"].make()
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    loaded = tf.BertModel.from_pretrained(tmp_path / "base")
    RetexModel.from_experts(
        loaded, make_experts(loaded), RetexConfig(rank=2), progress=False, output_dir=tmp_path / "artifact"
    )
    assert text(tf.AutoTokenizer, tmp_path / "artifact") == text(tf.AutoTokenizer, tmp_path / "base")


def test_a_base_without_a_tokenizer_takes_an_experts(tmp_path):
    base = FAMILIES["bert"].make()
    base.save_pretrained(tmp_path / "base")
    folders = {}
    for task, expert in make_experts(base).items():
        folders[task] = str(tmp_path / task)
        expert.save_pretrained(folders[task])
    make_tokenizer().save_pretrained(folders["green"])
    model = RetexModel.from_experts(str(tmp_path / "base"), folders, RetexConfig(rank=2), progress=False)
    assert model.side_folder == Path(folders["green"])


def test_generation_settings_are_kept(tmp_path):
    base = FAMILIES["t5"].make()
    base.generation_config.update(num_beams=3, length_penalty=0.5)
    base.save_pretrained(tmp_path / "base")
    loaded = tf.T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    model = RetexModel.from_experts(loaded, make_experts(loaded), RetexConfig(rank=2), progress=False)
    model.save_pretrained(tmp_path / "artifact")
    settings = RetexModel.from_pretrained(tmp_path / "artifact").generation_config
    assert (settings.num_beams, settings.length_penalty) == (3, 0.5)


def test_experts_with_another_tokenizer_keep_it(tmp_path, caplog):
    """One that cannot be read is named, and left behind."""
    base = tf.BertModel(tf.BertConfig(**TEXT))
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    folders = {}
    for task, expert in make_experts(base).items():
        folders[task] = str(tmp_path / task)
        expert.save_pretrained(folders[task])
    make_tokenizer().save_pretrained(folders["red"])
    other = make_tokenizer()
    other.add_tokens(["magenta", "cyan"])
    other.save_pretrained(folders["green"])
    with caplog.at_level(logging.WARNING, "retex_hf"):
        model = RetexModel.from_experts(str(tmp_path / "base"), folders, RetexConfig(rank=2), progress=False)
        assert not [record for record in caplog.records if record.name.startswith("retex_hf")]
        assert model.tokenizer_folder("green") == tmp_path / "green"
        assert model.tokenizer_folder("red") == model.tokenizer_folder("blue") == tmp_path / "base"
        (tmp_path / "green" / "tokenizer.json").write_text('{"model": {"vocab": 3}}', encoding="utf-8")
        model = RetexModel.from_experts(str(tmp_path / "base"), folders, RetexConfig(rank=2), progress=False)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("retex_hf")]
    assert said.startswith(
        "The tokenizer of expert 'green' differs from that of the base: their tokens cannot be compared"
    )
    assert model.tokenizer_folder("green") == tmp_path / "base"


def test_steps_of_a_tokenizer_count_too(tmp_path):
    """The same words, read in lower case: other tokens of a text."""
    for name in ("ours", "theirs"):
        make_tokenizer().save_pretrained(tmp_path / name)
    path = tmp_path / "theirs" / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values, indent=8), encoding="utf-8")
    assert not is_other_tokenizer(tmp_path / "ours", tmp_path / "theirs")
    path.write_text(json.dumps({**values, "normalizer": {"type": "Lowercase"}}), encoding="utf-8")
    assert is_other_tokenizer(tmp_path / "ours", tmp_path / "theirs")


def test_how_vocabularies_differ(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, pieces in ((ours, PIECES), (theirs, [*PIECES[:3], ("c", -1.0), ("▁a", -1.0)])):
        tf.T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder)
    assert tokenizer_difference(ours, ours) is None
    assert tokenizer_difference(ours, theirs) == (
        "it has 1 token(s) more ('c'), it lacks 1 ('b'), 1 have another id ('▁a')"
    )
    # The same tokens written differently are the same tokens.
    values = json.loads((ours / "tokenizer.json").read_text(encoding="utf-8"))
    (theirs / "tokenizer.json").write_text(json.dumps(values, indent=8), encoding="utf-8")
    assert tokenizer_difference(ours, theirs) is None
    for folder, words in ((ours, "a\nb\n"), (theirs, "a\nc\n")):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text(words, encoding="utf-8")
    assert tokenizer_difference(ours, theirs) == "vocab.txt differs"
    (theirs / "vocab.txt").unlink()
    assert tokenizer_difference(ours, theirs) is None
