"""Raw inputs in, answers out: texts and images, classifiers, generators and dual encoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import transformers as tf
from families import OPEN_CLIP_VIT, VISION
from helpers import TASKS, make_experts
from PIL import Image
from signed import WORDS, make_tokenizer, separate, signed_classifier

from retex_hf import ArtifactError, ConfigError, InputError, RetexConfig, RetexModel, TaskError
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.workflows.evaluation import MergedModel
from retex_hf.workflows.predictor import Predictor, preprocessor_of

TEXTS = ["rose ruby", "sky sea denim", "moss fern lime jade", "wine"]
OWN = ["red", "blue", "green", "red"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(text_folder) -> Predictor:
    torch.manual_seed(0)
    model = signed_classifier()
    return Predictor(model, load_preprocessor(text_folder, model.model), batch_size=3)


@torch.no_grad()
def test_classifiers_answer_with_the_labels_of_the_chosen_task(classifier):
    answers = classifier.predict(TEXTS)
    assert [answer.task for answer in answers] == OWN
    rows = classifier.model.predict(**make_tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    routing = classifier.model.identify(**make_tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    for number, (answer, row) in enumerate(zip(answers, rows, strict=True)):
        assert (answer.answer, answer.score) == (row["label"], pytest.approx(row["score"], abs=1e-5))
        assert list(answer.residuals) == TASKS
        assert list(answer.residuals.values()) == pytest.approx(routing.residuals[number].tolist(), rel=1e-4)
        assert sum(answer.probabilities.values()) == pytest.approx(1, abs=1e-5)


@torch.no_grad()
def test_a_named_task_is_obeyed_and_has_no_residuals(classifier):
    tasks = ["blue", "blue", "red", "green"]
    answers = classifier.predict(TEXTS, tasks)
    assert [answer.task for answer in answers] == tasks
    assert all(answer.residuals is None and answer.probabilities is None for answer in answers)
    batch = make_tokenizer()(TEXTS, padding=True, return_tensors="pt")
    assert [answer.answer for answer in answers] == [
        row["label"] for row in classifier.model.predict(**batch, task=tasks)
    ]
    assert [answer.task for answer in classifier.predict(TEXTS, "blue")] == ["blue"] * 4
    with pytest.raises(InputError, match="2 tasks are named for 4 inputs"):
        classifier.predict(TEXTS, ["red", "blue"])


@torch.no_grad()
def test_merged_answers_are_the_merged_models(classifier):
    model = classifier.model
    with model.disable_adapter():
        rows = model.predict(**make_tokenizer()(TEXTS, padding=True, return_tensors="pt"), task=OWN)
    answers = classifier.merged(TEXTS, OWN)
    assert [(a.task, a.answer) for a in answers] == [(row["task"], row["label"]) for row in rows]


def test_the_merged_model_is_evaluated_with_the_task_known_only(classifier):
    method, batch = MergedModel(classifier.model, classifier.readout), classifier.batch(TEXTS)
    labels, answers = classifier.model.retex_config.labels, classifier.merged(TEXTS, OWN)
    classes = method.predict(batch, OWN).answers
    assert [labels[task]["id2label"][str(found)] for task, found in zip(OWN, classes, strict=True)] == [
        answer.answer for answer in answers
    ]
    with pytest.raises(TaskError, match="merged has no router: name the task of every row"):
        method.predict(batch)


@torch.no_grad()
@pytest.mark.parametrize("decoder_only", [False, True])
def test_generators_answer_with_texts(text_folder, decoder_only):
    tokenizer = make_tokenizer()
    if decoder_only:
        config = tf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, eos_token_id=2)
        base = tf.GPT2LMHeadModel(config).eval()
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        base = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=len(tokenizer), **sizes)).eval()
    separate(base.get_input_embeddings(), tokenizer)
    model = RetexModel.from_experts(base, make_experts(base, scale=2.0), RetexConfig(rank="full"), progress=False)
    predictor = Predictor(model, load_preprocessor(text_folder, model.model), max_new_tokens=5)
    answers = predictor.predict(TEXTS, OWN)
    for text, task, answer in zip(TEXTS, OWN, answers, strict=True):
        inputs = tokenizer([text], return_tensors="pt")
        output = model.merge_and_unload(task).generate(**inputs, do_sample=False, max_new_tokens=5)
        new = output[:, inputs["input_ids"].shape[1] :] if decoder_only else output
        assert answer.answer == tokenizer.decode(new[0], skip_special_tokens=True)
        assert answer.score is None
    plain = model.get_base_model().generate(**tokenizer(TEXTS[:1], return_tensors="pt"), max_new_tokens=5)
    start = 2 if decoder_only else 0
    assert predictor.merged(TEXTS[:1], OWN[:1])[0].answer == tokenizer.decode(
        plain[0, start:], skip_special_tokens=True
    )


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (40, 36, 3), dtype=np.uint8)) for _ in range(4)]


CLASSES = {"red": ["rose", "ruby"], "green": ["moss", "fern", "lime"], "blue": ["sky", "sea"]}


@torch.no_grad()
@pytest.mark.parametrize("frozen", [True, False])
def test_open_clip_answers_with_the_nearest_class(frozen):
    text = {**OPEN_CLIP_VIT["text_cfg"], "context_length": 16, "vocab_size": 49408}
    config = {**OPEN_CLIP_VIT, "text_cfg": text}
    base = open_clip.model.CLIP(**config).eval()
    experts = {}
    for task, expert in make_experts(base, scale=1.0).items():
        own = expert.state_dict()
        if frozen:  # the text tower, as usual
            own = {name: tensor for name, tensor in own.items() if name.startswith("visual.")}
        experts[task] = {**base.state_dict(), **own}
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), model_config=config, progress=False)
    model.model.visual.preprocess_cfg = {"size": 32}
    folder = Path(__file__).parent / "none"
    preprocessor = load_preprocessor(folder, model.model)
    preprocessor.encode_texts = lambda texts: {"text": open_clip.SimpleTokenizer(context_length=16)(texts)}
    predictor = Predictor(model, preprocessor, classes=CLASSES)
    images, tasks = pictures(), ["red", "green", "blue", "green"]
    merged = predictor.merged(images, tasks)
    for image, task, *answers in zip(images, tasks, predictor.predict(images, tasks), merged, strict=True):
        prompts = open_clip.SimpleTokenizer(context_length=16)([f"a photo of a {name}." for name in CLASSES[task]])
        expert = open_clip.model.CLIP(**config).eval()
        expert.load_state_dict(experts[task])
        for network, answer in zip((expert, model.model), answers, strict=True):
            features = network.encode_image(preprocessor([image])["image"])
            scores = torch.cosine_similarity(network.encode_text(prompts), features)
            assert answer.answer == CLASSES[task][int(scores.argmax())]
    for prompt in ("no place", "", "{", "{}, {}", "a {name}", "{0.__class__}"):
        with pytest.raises(InputError, match="must have one place for the name of a class"):
            Predictor(model, preprocessor, classes=CLASSES, prompt=prompt)
    with pytest.raises(InputError, match="classes of task 'blue'"):
        Predictor(model, preprocessor, classes={"red": ["a"], "green": ["b"]})
    assert Predictor(model, preprocessor).predict(images, "red")[0].answer is None  # nothing names its classes
    preprocessor.encode_texts = None
    with pytest.raises(InputError, match="makes no batches of texts"):
        Predictor(model, preprocessor, classes=CLASSES)


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3])
def test_images_pass_through_the_stored_processor(tmp_path, channels):
    config = tf.ViTConfig(**VISION, num_channels=channels, num_labels=3)
    base = tf.ViTForImageClassification(config).eval()
    processor = tf.ViTImageProcessor(size={"height": 32, "width": 32}, do_normalize=False)
    processor.save_pretrained(tmp_path)
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank="full"), progress=False)
    predictor = Predictor(model, load_preprocessor(tmp_path, model.model))
    images = pictures()
    mode = "L" if channels == 1 else "RGB"
    for image, answer in zip(images, predictor.predict(images, "red"), strict=True):
        pixels = processor([image.convert(mode)], return_tensors="pt")["pixel_values"]
        assert pixels.shape[1] == channels
        assert answer.answer == model.predict(pixel_values=pixels, task="red")[0]["label"]
    arrays = [np.asarray(image.convert(mode)) for image in images]
    assert predictor.predict(arrays, "red") == predictor.predict(images, "red")


def test_wrong_inputs_and_folders_are_one_sentence(classifier, tmp_path):
    with pytest.raises(InputError, match="Input 2 is a Image, but this model takes a text"):
        classifier.predict(["rose", pictures()[0]])
    with pytest.raises(ArtifactError, match="holds no tokenizer that loads"):
        load_preprocessor(tmp_path, classifier.model.model)
    with pytest.raises(InputError, match="'max_new_tokens' is for models that generate"):
        Predictor(classifier.model, classifier.preprocessor, max_new_tokens=3)


def test_texts_and_pairs_of_texts_go_together(classifier):
    """As in a stream of several tasks: every row is what it is alone, and padding behind it."""
    inputs = ["rose", ("ruby wine", "sea"), "sky ice navy jade leaf"]
    batch = classifier.preprocessor(inputs)
    for row, one in enumerate(inputs):
        alone = classifier.preprocessor([one])
        length = alone["input_ids"].shape[1]
        for name, values in alone.items():
            assert torch.equal(batch[name][row, :length], values[0])
            assert not batch["attention_mask"][row, length:].any()
    answers = classifier.predict(inputs)
    assert [answer.task for answer in answers] == [classifier.predict([one])[0].task for one in inputs]


def test_lengths_that_the_model_cannot_take_are_refused(classifier, text_folder):
    for length in (0, -1, 33):
        with pytest.raises(InputError, match=f"at most 32, which is what the model takes, not {length}"):
            load_preprocessor(text_folder, classifier.model.model, max_length=length)


def test_pairs_and_long_texts(classifier, text_folder):
    pairs = classifier.preprocessor([("rose wine", "sky"), ("ruby", "sea ice")])
    expected = make_tokenizer()(["rose wine", "ruby"], ["sky", "sea ice"], padding=True, return_tensors="pt")
    assert torch.equal(pairs["input_ids"], expected["input_ids"])
    long = " ".join(WORDS["red"] * 20)
    assert classifier.preprocessor([long])["input_ids"].shape[1] == 32  # what the model has positions for
    short = load_preprocessor(text_folder, classifier.model.model, max_length=5)
    assert short([long])["input_ids"].shape[1] == 5


def test_texts_are_cut_as_when_the_model_was_signed(text_folder, classifier):
    model, long = classifier.model, " ".join(WORDS["red"] * 20)
    recipe = RecipeRecord({"base": "b", "max_length": 7})
    parts = replace(model.parts(), side_folder=text_folder, recipe=recipe)
    signed = RetexModel(parts)
    assert preprocessor_of(signed)([long])["input_ids"].shape[1] == 7
    assert preprocessor_of(signed, 5)([long])["input_ids"].shape[1] == 5
    with pytest.raises(ConfigError, match="has no tokenizer or processor"):
        preprocessor_of(RetexModel(replace(parts, side_folder=None)))


def test_a_tokenizer_that_cannot_pad_is_refused(classifier, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="neither a padding token nor one that ends a text"):
        load_preprocessor(tmp_path, classifier.model.model)
