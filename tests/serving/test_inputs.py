"""Labels and vectors through HTTP equal those of `RetexModel` itself: alone, and in mixed batches."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import transformers as tf
from families import OPEN_CLIP_VIT
from helpers import TASKS, make_experts
from PIL import Image
from served_models import Endpoint, classifier, encoder, served, texts
from signed import make_tokenizer

from retex_hf import ConfigError, RetexConfig, RetexModel
from retex_hf.workflows.predictor import Predictor, preprocessor_of

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> Iterator[Endpoint]:
    with served(classifier(tmp_path_factory.mktemp("bert")), max_wait_ms=20) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> Iterator[Endpoint]:
    with served(encoder(tmp_path_factory.mktemp("encoder")), max_wait_ms=20) as endpoint:
        yield endpoint


def batch(*given: str) -> dict[str, torch.Tensor]:
    return TOKENIZER(list(given), padding=True, return_tensors="pt")


@torch.no_grad()
@pytest.mark.parametrize("model", [None, "auto", "green"])
def test_labels_are_those_of_predict(labels, model):
    given = [text for text, _ in texts(8)]
    body = {"input": given} | ({} if model is None else {"model": model})
    response = labels.http.post("/classify", json=body)
    found = response.json()["data"]
    task = None if model in (None, "auto") else model
    wanted = labels.model.predict(**batch(*given), task=task)
    assert [(row["retex"]["task"], row["label"]) for row in found] == [(row["task"], row["label"]) for row in wanted]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in wanted], abs=1e-6)
    output = labels.model(**batch(*given), task=task)
    for row, logits, width in zip(found, output.logits, output.routing.num_labels, strict=True):
        assert row["probs"] == pytest.approx(logits[:width].softmax(0).tolist(), abs=1e-6)
        assert row["num_classes"] == width
    if task is None:
        likely = labels.model.identify(**batch(*given)).probabilities.max(1).values.tolist()
        assert [row["retex"]["probability"] for row in found] == pytest.approx(likely, abs=1e-5)
        assert len({row["retex"]["task"] for row in found}) == 3  # a mixed batch
    assert response.headers["x-retex-task"].split(",") == [row["retex"]["task"] for row in found]
    assert response.json()["usage"]["prompt_tokens"] == sum(len(text.split()) for text in given)


@torch.no_grad()
def test_the_merged_model_answers_under_the_head_of_the_nearest_task(labels):
    given = [text for text, _ in texts(5)]
    found = labels.http.post("/classify", json={"input": given, "model": "merged"}).json()["data"]
    tasks = labels.model.identify(**batch(*given)).tasks
    with labels.model.disable_adapter():
        wanted = labels.model.predict(**batch(*given), task=tasks)
    assert [(row["retex"]["task"], row["label"]) for row in found] == [(row["task"], row["label"]) for row in wanted]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in wanted], abs=1e-6)


@torch.no_grad()
def test_concurrent_requests_get_what_each_gets_alone(labels):
    asked = [(text, ["auto", "merged", *TASKS][number % 5]) for number, (text, _) in enumerate(texts(40, seed=2))]

    def run(one: tuple[str, str]) -> tuple[str, str, float]:
        text, model = one
        found = labels.http.post("/classify", json={"input": text, "model": model}).json()["data"][0]
        return found["retex"]["task"], found["label"], found["score"]

    alone = [run(one) for one in asked]
    batches = labels.metric("retex_batch_rows_count")
    with ThreadPoolExecutor(40) as pool:
        together = list(pool.map(run, asked))
    assert [(task, label) for task, label, _ in together] == [(task, label) for task, label, _ in alone]
    assert [score for *_, score in together] == pytest.approx([score for *_, score in alone], abs=1e-5)
    assert labels.metric("retex_batch_rows_count") - batches < 25


def test_pairs_and_long_texts(labels):
    pair, long = ["rose ruby", "wine"], "rose " * 100
    found = labels.http.post("/classify", json={"input": [pair, long, "rose"]}).json()
    assert [row["retex"]["truncated"] for row in found["data"]] == [False, True, False]
    predictor = Predictor(labels.model, preprocessor_of(labels.model))
    wanted = predictor.predict([tuple(pair), long, "rose"])
    assert [row["score"] for row in found["data"]] == pytest.approx([answer.score for answer in wanted], abs=1e-5)
    assert found["usage"]["prompt_tokens"] == 3 + 64 + 1


@torch.no_grad()
@pytest.mark.parametrize("model", ["auto", "blue", "merged"])
def test_vectors_are_pooled_hidden_states(vectors, model):
    given = [text for text, _ in texts(6)]
    answer = vectors.openai.embeddings.create(model=model, input=given)  # the client asks for base64
    plain = vectors.http.post("/v1/embeddings", json={"input": given, "model": model}).json()["data"]
    inputs = batch(*given)
    if model == "merged":
        with vectors.model.disable_adapter():
            output, tasks = vectors.model(**inputs), [None] * 6
    else:
        output = vectors.model(**inputs, task=None if model == "auto" else model)
        tasks = output.routing.tasks
    mask = inputs["attention_mask"].unsqueeze(-1)
    wanted = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    for row, one, task, vector in zip(answer.data, plain, tasks, wanted, strict=True):
        np.testing.assert_allclose(row.embedding, vector.numpy(), atol=1e-5)
        np.testing.assert_allclose(one["embedding"], vector.numpy(), atol=1e-5)
        assert row.retex["task"] == one["retex"]["task"] == task


@torch.no_grad()
def test_sentence_transformers_modules_make_the_vectors(tmp_path):
    pytest.importorskip("sentence_transformers")
    config = tf.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(35))]
    tokenizer = tf.BertTokenizerFast(vocab={word: index for index, word in enumerate(words)}, model_max_length=16)
    base = tf.BertModel(config).eval()
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    for name, model in {"base": base, **make_experts(base, scale=1.0)}.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "modules.json").write_text(json.dumps(listed))
        (tmp_path / name / "1_Pooling").mkdir()
        (tmp_path / name / "2_Normalize").mkdir()
        pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        (tmp_path / name / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    experts = {task: tmp_path / task for task in TASKS}
    model = RetexModel.from_experts(tmp_path / "base", experts, RetexConfig(rank="full"), progress=False)
    model.save_pretrained(tmp_path / "artifact")
    given = ["w1 w2 w3", "w9", "w20 w21"]
    with served(tmp_path / "artifact") as endpoint:
        for task in TASKS:
            answer = endpoint.openai.embeddings.create(model=task, input=given)
            wanted = endpoint.model.as_sentence_transformer(task).encode(given)
            np.testing.assert_allclose([row.embedding for row in answer.data], wanted, atol=1e-5)


def as_png(pixels: np.ndarray) -> str:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def pictures(count: int = 6) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.clip(rng.normal(60 + 70 * (n % 3), 20, (40, 36, 3)), 0, 255).astype(np.uint8) for n in range(count)]


@torch.no_grad()
def test_images_are_classified(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    base = tf.ViTForImageClassification(tf.ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
    base.save_pretrained(tmp_path / "base")
    tf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    model = RetexModel.from_experts(
        tmp_path / "base", make_experts(base, scale=1.0), RetexConfig(rank=4), progress=False
    )
    shades = {
        task: [{"pixel_values": torch.randn(16, 3, 32, 32) / 4 + place}]
        for place, task in zip((-0.5, 0, 0.6), TASKS, strict=True)
    }
    model.fit_signatures(shades, progress=False)
    model.save_pretrained(tmp_path / "artifact")
    encoded = [as_png(picture) for picture in pictures()]
    urls = [f"data:image/png;base64,{one}" if number % 2 else one for number, one in enumerate(encoded)]
    with served(tmp_path / "artifact") as endpoint:
        found = endpoint.http.post("/classify", json={"input": urls}).json()["data"]
        predictor = Predictor(endpoint.model, preprocessor_of(endpoint.model))
        wanted = predictor.predict([Image.fromarray(picture) for picture in pictures()])
        assert [(row["retex"]["task"], row["label"]) for row in found] == [(one.task, one.answer) for one in wanted]
        assert [row["score"] for row in found] == pytest.approx([one.score for one in wanted], abs=1e-5)
        for bad in ("no base64!", "data:image/png;base64,", "file:///etc/passwd", encoded[0][:40], 7):
            refused = endpoint.http.post("/classify", json={"input": bad})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "input[0]", bad


@torch.no_grad()
def test_clip_classifies_among_named_classes(tmp_path):
    text = {**OPEN_CLIP_VIT["text_cfg"], "context_length": 16, "vocab_size": 49408}
    config = {**OPEN_CLIP_VIT, "text_cfg": text}
    base = open_clip.model.CLIP(**config).eval()
    experts = {}
    for task, expert in make_experts(base, scale=1.0).items():
        for name, tensor in expert.state_dict().items():
            if not name.startswith("visual."):
                tensor.copy_(base.state_dict()[name])
        experts[task] = expert
    model = RetexModel.from_experts(base, experts, RetexConfig(rank=4), model_config=config, progress=False)
    model.save_pretrained(tmp_path / "artifact")
    classes = {"red": ["rose", "ruby"], "green": ["moss", "fern", "lime"], "blue": ["sky", "sea"]}
    (tmp_path / "classes.json").write_text(json.dumps(classes))
    with pytest.raises(ConfigError, match="give --classes"), served(tmp_path / "artifact"):
        pass
    with served(tmp_path / "artifact", classes=tmp_path / "classes.json") as endpoint:
        images = [Image.fromarray(picture) for picture in pictures()]
        predictor = Predictor(endpoint.model, preprocessor_of(endpoint.model), classes=classes)
        for task in ("red", "green"):
            body = {"model": task, "input": [as_png(picture) for picture in pictures()]}
            found = endpoint.http.post("/classify", json=body).json()["data"]
            assert [row["label"] for row in found] == [one.answer for one in predictor.predict(images, task)]


def test_settings_of_other_models_are_refused(tmp_path):
    folder = classifier(tmp_path)
    for settings, message in (
        ({"pooling": "first"}, "--pooling is for encoders"),
        ({"prompt": "a {}"}, "--prompt is for --classes"),
    ):
        with pytest.raises(ConfigError, match=message), served(folder, **settings):
            pass


def test_without_signatures_only_named_models_answer(tmp_path: Path):
    base = tf.BertModel(tf.BertConfig(vocab_size=28, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).eval()
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    config = RetexConfig(rank=4, signatures="inputs")
    model = RetexModel.from_experts(tmp_path / "base", make_experts(base), config, progress=False)
    model.save_pretrained(tmp_path / "artifact")
    with served(tmp_path / "artifact") as endpoint:
        names = [entry["id"] for entry in endpoint.http.get("/v1/models").json()["data"]]
        assert names == ["merged", *TASKS]
        refused = endpoint.http.post("/v1/embeddings", json={"input": "rose"})
        assert refused.status_code == 400
        assert "no signatures to route by: run retex sign, or name a task" in refused.json()["error"]["message"]
        assert endpoint.http.post("/v1/embeddings", json={"input": "rose", "model": "red"}).status_code == 200
