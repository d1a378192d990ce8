"""The text-to-text suite: tasks as prompts and answers, and weights out of an ONNX file."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import onnx_weights
import prepare
import text_to_text

FLOAT, UINT8, INT8 = 1, 2, 3


def write_task(folder: Path, name: str, labels: object, compressed: bool) -> None:
    task = folder / "text" / name
    task.mkdir(parents=True)
    (task / "labels.json").write_text(json.dumps(labels))
    for split, label in (("train", 0), ("test", 1)):
        line = json.dumps({"text": f"a {split} text", "label": label}) + "\n"
        if compressed:
            (task / f"{split}.jsonl.gz").write_bytes(gzip.compress(line.encode()))
        else:
            (task / f"{split}.jsonl").write_text(line)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("PlayMusic", "play music"),
        ("SearchScreeningEvent", "search screening event"),
        ("card_payment_wrong_exchange_rate", "card payment wrong exchange rate"),
        ("Refund_not_showing_up", "refund not showing up"),
        ("NUM", "number"),
        ("ham", "not spam"),
        ("clickbait", "clickbait"),
    ],
)
def test_an_answer_is_the_label_in_plain_words(label, words):
    assert text_to_text.answer(label) == words


def test_a_task_is_loaded_as_prompts_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("RETEX_DATA", str(tmp_path))
    write_task(tmp_path, "trec", {"labels": ["ABBR", "HUM"]}, compressed=False)
    write_task(tmp_path, "snips", ["PlayMusic", "GetWeather"], compressed=True)
    task = text_to_text.load_task("trec")
    assert task.train_inputs == ["Name the type of the question: a train text"]
    assert task.test_inputs == ["Name the type of the question: a test text"]
    assert (task.train_labels, task.test_labels) == ([0], [1])
    assert task.label_names == ["abbreviation", "human"]
    assert text_to_text.load_task("snips").label_names == ["play music", "get weather"]
    assert text_to_text.available(text_to_text.TASKS) == ["snips", "trec"]


def test_every_task_has_its_own_question():
    assert len({recipe.question for recipe in text_to_text.TASKS.values()}) == len(text_to_text.TASKS)


def test_missing_data_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("RETEX_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        text_to_text.load_task("trec")
    message = str(error.value)
    assert str(tmp_path / "text" / "trec") in message and "RETEX_DATA" in message and "\n" not in message
    recipe = prepare.__file__.replace("benchmarks/prepare.py", "recipes/experiments/text_to_text.yaml")
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--recipe", recipe, "--work-dir", str(tmp_path / "work")])
    with pytest.raises(SystemExit, match="put the data of task 'snips' there"):
        prepare.main()
    assert not (tmp_path / "work").exists()


@pytest.fixture
def tokenizer():
    words = ["<pad>", "</s>", "<unk>", "play", "music", "weather"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def test_padding_of_answers_does_not_count(tokenizer):
    labels = text_to_text.answer_ids(tokenizer, ["play music", "weather"])
    assert labels.tolist() == [[3, 4, 1], [5, 1, -100]]


def test_inputs_are_cut_to_the_limit_and_keep_their_end(tokenizer):
    batch = text_to_text.collate(tokenizer)(["play " * 100, "music"])
    assert batch["input_ids"].shape == (2, text_to_text.MAX_TOKENS)
    assert batch["input_ids"][0, -2:].tolist() == [3, 1]
    assert batch["attention_mask"][1].sum() == 2


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Protocol buffers' numbers; negative ones as 64-bit complements."""
    value, out = value % 2**64, b""
    while value >= 128:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, *, raw: bytes = b"", floats: bytes = b"", ints: bytes = b""):
    """A TensorProto as the field of a graph."""
    message = b"".join(field(1, size) for size in shape) + field(2, kind)
    for number, value in ((4, floats), (5, ints), (8, name), (9, raw)):
        message += field(number, value) if value else b""
    return field(5, message)


def quantised(name: str, values: np.ndarray, kind: int, scale: float, zero_point: int) -> bytes:
    return (
        tensor(f"{name}_quantized", values.shape, kind, raw=values.tobytes())
        + tensor(f"{name}_scale", (), FLOAT, floats=struct.pack("<f", scale))
        + tensor(f"{name}_zero_point", (), kind, ints=varint(zero_point))
    )


def multiplication(module: str, weight: str) -> bytes:
    inputs = b"".join(field(1, name) for name in ("x", f"{weight}_quantized", "x_zero", f"{weight}_zero_point"))
    return field(1, inputs + field(2, "y") + field(3, f"/{module}/MatMul_quant") + field(4, "MatMulInteger"))


def test_dequantisation_is_the_formula():
    weight = onnx_weights.dequantise(np.array([0, 138, 255], np.uint8), np.float32(0.5), np.array(138, np.uint8))
    assert weight.dtype == torch.float32
    assert weight.tolist() == [-69.0, 0.0, 58.5]


def test_weights_are_read_under_their_own_names():
    table = np.array([[0, 10, 255], [138, 1, 2]], np.uint8)
    linear = np.array([[-127, 5], [0, 127], [3, -3]], np.int8)  # stored as (in, out)
    norm = np.array([1.5, -2.0], np.float32)
    graph = (
        multiplication("m/decoder/block.0/layer.0/SelfAttention/q", "onnx::MatMul_7")
        + field(1, field(2, "z") + field(3, "/m/Add") + field(4, "Add"))
        + tensor("m.norm.weight", (2,), FLOAT, raw=norm.tobytes())
        + quantised("m.shared.weight", table, UINT8, 0.25, 138)
        + quantised("onnx::MatMul_7", linear, INT8, 0.5, -1)
    )
    weights = onnx_weights.read_weights(field(1, 8) + field(2, "exporter") + field(7, graph))
    assert set(weights) == {"m.norm.weight", "m.shared.weight", "m.decoder.block.0.layer.0.SelfAttention.q.weight"}
    assert weights["m.norm.weight"].tolist() == [1.5, -2.0]
    assert weights["m.shared.weight"].tolist() == [[-34.5, -32.0, 29.25], [0.0, -34.25, -34.0]]
    query = weights["m.decoder.block.0.layer.0.SelfAttention.q.weight"]
    assert query.tolist() == [[-63.0, 0.5, 2.0], [3.0, 64.0, -1.0]]
    assert query.is_contiguous()


def test_weights_in_float32_are_read_under_their_own_names():
    linear = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)  # stored as (in, out)

    def product(module: str, *inputs: str) -> bytes:
        names = b"".join(field(1, name) for name in inputs)
        return field(1, names + field(2, "y") + field(3, f"/{module}/MatMul") + field(4, "MatMul"))

    graph = (
        product("encoder/layer.0/query", "x", "onnx::MatMul_7")
        + product("encoder/layer.0", "queries", "keys")  # two activations
        + field(1, field(2, "z") + field(3, "/Constant") + field(4, "Constant"))
        + tensor("encoder.layer.0.query.bias", (2,), FLOAT, raw=linear[0].tobytes())
        + tensor("onnx::MatMul_7", linear.shape, FLOAT, raw=linear.tobytes())
    )
    weights = onnx_weights.read_weights(field(7, graph))
    assert {name: weight.tolist() for name, weight in weights.items()} == {
        "encoder.layer.0.query.bias": [1.0, 2.0],
        "encoder.layer.0.query.weight": [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]],
    }


def test_an_unknown_data_type_is_named():
    graph = multiplication("m/q", "w") + tensor("m.half.weight", (1,), 10, raw=b"\0\0")
    with pytest.raises(ValueError, match=r"m\.half\.weight: ONNX data type 10; expected float32, uint8 or int8"):
        onnx_weights.read_weights(field(7, graph))


def test_what_is_no_onnx_file_is_said():
    with pytest.raises(ValueError, match="not an ONNX file"):
        onnx_weights.read_weights(b"\x0b\x00")
