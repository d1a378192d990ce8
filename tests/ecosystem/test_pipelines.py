"""`transformers.pipeline` with a `RetexModel` answers each row as a pipeline of the row's own expert would."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as tf
from families import FAMILIES, TEXT, VISION, images
from helpers import TASKS, build_retex, make_experts
from materials_of_pipelines import LABELS, TEXTS, make_tokenizer, references, text_classifier, with_heads
from PIL import Image
from transformers import pipeline
from transformers.pipelines import base as transformers_base

from retex_hf import InputError, RetexConfig, RetexModel, TaskError
from retex_hf.model.pipelines import ROUTED, PipelineChoice, register_pipelines, unregister_pipelines


@pytest.fixture(autouse=True)
def nothing_logged_as_error(monkeypatch):
    """transformers logs an error for models that a pipeline does not know, and goes on."""

    def fail(message: str, *args: object) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(transformers_base.logger, "error", fail)


@pytest.fixture(scope="module")
def texts():
    model, experts = text_classifier()
    return model, experts, make_tokenizer()


def assert_answers(actual, expected, task: str | None = None) -> None:
    """Answers agree, numbers to tolerance; with `task` they are to name it besides."""
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_answers(one, other, task)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys() | ({"task"} if task else set())
        assert task is None or actual["task"] == task
        for key, value in expected.items():
            assert_answers(actual[key], value)
    elif isinstance(expected, float | np.floating):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert actual == expected


def identified(model: RetexModel, **inputs) -> list[str]:
    tasks = model.identify(**inputs).tasks
    assert len(set(tasks)) > 1  # else a row's own labels would not differ from the batch's
    return tasks


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_k": None}, {"function_to_apply": "none"}], ids=str)
def test_every_text_has_the_labels_of_its_own_task(texts, batch_size, options):
    model, experts, tokenizer = texts
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer)
    tasks = identified(model, **tokenizer(TEXTS, padding=True, return_tensors="pt"))
    answers = pipe(TEXTS, batch_size=batch_size, **options)
    streamed = list(pipe((text for text in TEXTS), batch_size=batch_size, **options))
    assert len(answers) == len(streamed) == len(TEXTS)
    for text, task, answer, same in zip(TEXTS, tasks, answers, streamed, strict=True):
        stock = pipeline("text-classification", model=experts[task], tokenizer=tokenizer)
        expected = stock([text], **options)[0]
        assert_answers(answer, expected, task)
        assert_answers(same, expected, task)
        if "top_k" in options:
            assert len(answer) == min(options["top_k"] or 4, len(LABELS[task]))


def test_one_text_and_one_pair(texts):
    model, experts, tokenizer = texts
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer)
    for given in ("blue4 blue5", {"text": "red1 red2", "text_pair": "blue3"}):
        encoded = (
            tokenizer(**given, return_tensors="pt")
            if isinstance(given, dict)
            else tokenizer(given, return_tensors="pt")
        )
        (task,) = model.identify(**encoded).tasks
        stock = pipeline("text-classification", model=experts[task], tokenizer=tokenizer)
        assert_answers(pipe(given), stock(given), task)


def test_a_pinned_task_answers_everything(texts):
    model, experts, tokenizer = texts
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer)
    stock = pipeline("text-classification", model=experts["green"], tokenizer=tokenizer)
    model.set_adapter("green")
    try:
        assert_answers(pipe(TEXTS, batch_size=3), stock(TEXTS), "green")
    finally:
        model.set_adapter(None)
    with model.disable_adapter(), pytest.raises(TaskError, match="the head to use is not known"):
        pipe(TEXTS[0])


def test_other_models_get_what_they_always_got(texts):
    _, experts, tokenizer = texts
    register_pipelines()  # twice is once
    pipe = pipeline("text-classification", model=experts["red"], tokenizer=tokenizer)
    assert type(pipe) is tf.TextClassificationPipeline
    assert set(pipe(TEXTS[0])[0]) == {"label", "score"}
    for task in ROUTED:
        assert issubclass(transformers_task(task).stock, tf.Pipeline)


def test_the_registry_changes_when_the_class_is_imported_and_not_when_a_model_is_made(texts, tmp_path):
    model, _, tokenizer = texts
    registered = {task: transformers_task(task) for task in ROUTED}
    assert all(isinstance(choice, PipelineChoice) for choice in registered.values())
    stock = {task: choice.registered for task, choice in registered.items()}
    assert all(issubclass(choice.routed, choice.stock) for choice in registered.values())
    unregister_pipelines()
    try:
        unregister_pipelines()  # twice is once
        assert {task: transformers_task(task) for task in ROUTED} == stock
        model.save_pretrained(tmp_path)
        loaded = RetexModel.from_pretrained(tmp_path)
        text_classifier()
        assert {task: transformers_task(task) for task in ROUTED} == stock
    finally:
        register_pipelines()
    assert {task: transformers_task(task) for task in ROUTED} == registered
    assert "task" in pipeline("text-classification", model=loaded, tokenizer=tokenizer)(TEXTS[0])[0]


def test_an_entry_that_another_library_has_changed_stays():
    entry = tf.pipelines.PIPELINE_REGISTRY.supported_tasks["fill-mask"]
    before, entry["impl"] = entry["impl"], tf.Pipeline
    try:
        unregister_pipelines()
        assert entry["impl"] is tf.Pipeline
    finally:
        entry["impl"] = before
        register_pipelines()


def test_the_import_of_the_class_is_all_that_a_pipeline_needs():
    code = (
        "from transformers.pipelines import PIPELINE_REGISTRY as registry\n"
        "import retex_hf\n"
        "names = [type(registry.supported_tasks['fill-mask']['impl']).__name__]\n"
        "from retex_hf import RetexModel\n"
        "print(*names, type(registry.supported_tasks['fill-mask']['impl']).__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = said.split()
    assert before in ("ABCMeta", "str") and after == "PipelineChoice"  # a class, from 5.23 on its name


def transformers_task(task: str):
    return tf.pipelines.PIPELINE_REGISTRY.check_task(task)[1]["impl"]


def test_a_saved_pipeline_is_an_artifact(texts, tmp_path):
    model, _, tokenizer = texts
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer)
    pipe.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    loaded = pipeline(
        "text-classification", model=RetexModel.from_pretrained(tmp_path), tokenizer=str(tmp_path), batch_size=2
    )
    assert_answers(loaded(TEXTS), pipe(TEXTS))


def test_the_name_of_an_artifact_alone_is_refused(texts, tmp_path):
    model, _, tokenizer = texts
    model.save_pretrained(tmp_path / "artifact")
    tokenizer.save_pretrained(tmp_path / "artifact")
    with pytest.raises(InputError, match="transformers has loaded only the merged model"):
        pipeline("text-classification", model=str(tmp_path / "artifact"))
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    for given in (loaded.get_base_model(), loaded.unload(), loaded.merge_and_unload("red")):
        assert pipeline("text-classification", model=given, tokenizer=tokenizer)(TEXTS[0])


def test_images():
    model, experts = with_heads(
        lambda: tf.ViTModel(tf.ViTConfig(**VISION), add_pooling_layer=False),
        lambda **names: tf.ViTForImageClassification(tf.ViTConfig(**VISION, **names)),
    )
    model.fit_signatures({task: [images(8)] for task in TASKS}, progress=False)
    processor = tf.ViTImageProcessor(size={"height": 32, "width": 32})
    shown = [Image.fromarray(np.random.default_rng(n).integers(0, 255, (40, 36, 3), np.uint8)) for n in range(6)]
    tasks = identified(model, **processor(shown, return_tensors="pt"))
    pipe = pipeline("image-classification", model=model, image_processor=processor)
    for batch_size, top_k in ((1, 5), (4, 2)):
        answers = pipe(shown, batch_size=batch_size, top_k=top_k)
        for image, task, answer in zip(shown, tasks, answers, strict=True):
            stock = pipeline("image-classification", model=experts[task], image_processor=processor)
            assert_answers(answer, stock(image, top_k=top_k), task)


def test_tokens_and_the_parts_of_long_texts():
    model, experts = with_heads(
        lambda: tf.BertModel(tf.BertConfig(**TEXT), add_pooling_layer=False),
        lambda **names: tf.BertForTokenClassification(tf.BertConfig(**TEXT, **names)),
    )
    tokenizer = make_tokenizer()
    model.fit_signatures(references(tokenizer), progress=False)
    tasks = identified(model, **tokenizer(TEXTS, padding=True, return_tensors="pt"))
    answers = pipeline("token-classification", model=model, tokenizer=tokenizer)(TEXTS, batch_size=4)
    for text, task, answer in zip(TEXTS, tasks, answers, strict=True):
        stock = pipeline("token-classification", model=experts[task], tokenizer=tokenizer)
        assert_answers(answer, stock(text), task)
    short = make_tokenizer()
    short.model_max_length = 4
    stride = {"stride": 0, "aggregation_strategy": "simple"}
    pipe = pipeline("token-classification", model=model, tokenizer=short, **stride)
    apart = next(text for text, task in zip(TEXTS, tasks, strict=True) if task != tasks[0]).split()[:2]
    with pytest.raises(InputError, match="parts of one long text were given to different tasks"):
        pipe(" ".join([*TEXTS[0].split()[:2], *(apart * 2)[:2]]))
    model.set_adapter("blue")
    stock = pipeline("token-classification", model=experts["blue"], tokenizer=short, **stride)
    assert_answers(pipe(TEXTS[3]), stock(TEXTS[3]), "blue")


GENERATE = {"max_new_tokens": 4, "do_sample": False, "no_repeat_ngram_size": 1}


def test_text_generation_continues_the_prompt():
    model, experts = build_retex("gpt2")
    tokenizer = make_tokenizer(padding_side="left")
    model.fit_signatures(references(tokenizer), progress=False)
    tasks = identified(model, **tokenizer(TEXTS, padding=True, return_tensors="pt"))
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    for options in ({}, {"return_full_text": False}, {"num_return_sequences": 2, "num_beams": 2}):
        answers = pipe(TEXTS, batch_size=4, **GENERATE, **options)
        stock = {
            task: pipeline("text-generation", model=expert, tokenizer=tokenizer)(
                TEXTS, batch_size=4, **GENERATE, **options
            )
            for task, expert in experts.items()
        }
        for row, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            assert_answers(answer, stock[task][row], task)
        assert any(stock[task] != stock["red"] for task in tasks)


def test_text_generation_of_an_encoder_decoder_is_what_the_decoder_writes():
    """Where transformers' own pipeline would cut the answer to the length of the prompt, and pad on the left."""
    model, experts = build_retex("bart")
    tokenizer = make_tokenizer()
    model.fit_signatures(references(tokenizer), progress=False)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    tasks = identified(model, **encoded)
    answers = pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, batch_size=6, **GENERATE)
    for row, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
        own = experts[task].generate(**{name: value[row : row + 1] for name, value in encoded.items()}, **GENERATE)
        assert answer == [{"task": task, "generated_text": tokenizer.decode(own[0], skip_special_tokens=True)}]
    assert len({answer[0]["generated_text"] for answer in answers}) > 1
    assert tokenizer.padding_side == "right"


def test_a_task_that_goes_before_its_answer_is_read(monkeypatch):
    """The other tasks' labels would not be its own."""
    model, _ = text_classifier()
    pipe = pipeline("text-classification", model=model, tokenizer=make_tokenizer())
    model.set_adapter("green")
    forward = pipe.forward

    def forward_and_delete(*args, **kwargs):
        output = forward(*args, **kwargs)
        model.delete_task("green")
        return output

    monkeypatch.setattr(pipe, "forward", forward_and_delete)
    with pytest.raises(TaskError, match="Task 'green' was deleted before its answer could be read"):
        pipe(TEXTS[0])


@torch.no_grad()
def test_zero_shot_images():
    model, experts = build_retex("clip", identification="residual", signature_rank=1)
    tokenizer, processor = make_tokenizer(), tf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    model.fit_signatures({task: [images(8)] for task in TASKS}, progress=False)
    shown = [Image.fromarray(np.random.default_rng(n).integers(0, 255, (40, 40, 3), np.uint8)) for n in range(6)]
    tasks = identified(model, **processor(shown, return_tensors="pt"))
    parts = {"tokenizer": tokenizer, "image_processor": processor}
    pipe = pipeline("zero-shot-image-classification", model=model, **parts)
    classes = {"candidate_labels": ["red1", "blue2", "green3"], "hypothesis_template": "{}"}
    for image, task, answer in zip(shown, tasks, pipe(shown, batch_size=3, **classes), strict=True):
        stock = pipeline("zero-shot-image-classification", model=experts[task], **parts)
        assert_answers(answer, stock(image, **classes), task)


def test_masks_and_features():
    model, experts = build_retex("roberta")
    tokenizer = make_tokenizer()
    model.fit_signatures(references(tokenizer), progress=False)
    texts = [f"{text} [MASK]" for text in TEXTS]
    tasks = identified(model, **tokenizer(texts, padding=True, return_tensors="pt"))
    answers = pipeline("fill-mask", model=model, tokenizer=tokenizer)(texts, batch_size=3)
    features = pipeline("feature-extraction", model=model, tokenizer=tokenizer)(texts)
    for text, task, answer, feature in zip(texts, tasks, answers, features, strict=True):
        assert_answers(answer, pipeline("fill-mask", model=experts[task], tokenizer=tokenizer)(text), task)
        assert_answers(feature, pipeline("feature-extraction", model=experts[task], tokenizer=tokenizer)(text))


SOUND = {
    **{name: TEXT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "max_length": 32,
    "num_mel_bins": 16,
}


def test_sounds():
    model, experts = with_heads(
        lambda: tf.ASTModel(tf.ASTConfig(**SOUND)),
        lambda **names: tf.ASTForAudioClassification(tf.ASTConfig(**SOUND, **names)),
    )
    extractor = tf.ASTFeatureExtractor(num_mel_bins=16, max_length=32)

    def noise(loudness: float, number: int) -> list[np.ndarray]:
        random = np.random.default_rng(number)
        return [(loudness * random.normal(size=5000)).astype(np.float32) for _ in range(number)]

    def encoded(sounds: list[np.ndarray]) -> dict[str, torch.Tensor]:
        return dict(extractor(sounds, sampling_rate=16000, return_tensors="pt"))

    loudness = dict(zip(TASKS, (1e-4, 1e-2, 1.0), strict=True))
    model.fit_signatures({task: [encoded(noise(loud, 8))] for task, loud in loudness.items()}, progress=False)
    sounds = [sound for loud in loudness.values() for sound in noise(loud, 2)]
    tasks = identified(model, **encoded(sounds))
    pipe = pipeline("audio-classification", model=model, feature_extractor=extractor)
    for options in ({"top_k": 3}, {}):
        for sound, task, answer in zip(sounds, tasks, pipe(sounds, batch_size=4, **options), strict=True):
            stock = pipeline("audio-classification", model=experts[task], feature_extractor=extractor)
            assert_answers(answer, stock(sound, **options), task)


def test_sounds_of_tasks_that_share_their_labels():
    base = tf.ASTForAudioClassification(tf.ASTConfig(**SOUND, num_labels=3)).eval()
    experts = make_experts(base)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full", heads=[]), progress=False)
    assert not model.retex_config.labels
    model.set_adapter("red")
    extractor = tf.ASTFeatureExtractor(num_mel_bins=16, max_length=32)
    pipe, stock = (
        pipeline("audio-classification", model=own, feature_extractor=extractor) for own in (model, experts["red"])
    )
    sound = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    for options in ({"top_k": 2}, {"top_k": 9}, {}):
        assert_answers(pipe(sound, **options), stock(sound, **options), "red")
    with model.disable_adapter():
        assert len(pipe(sound)) == 3
    outputs = pipe.forward(pipe.preprocess(sound))
    model.set_adapter(None)
    model.delete_task("red")
    with pytest.raises(TaskError, match="Task 'red' was deleted before its answer could be read"):
        pipe.postprocess(outputs)


def test_image_features():
    model, experts = build_retex("vit")
    model.fit_signatures({task: [FAMILIES["vit"].inputs(8)] for task in TASKS}, progress=False)
    processor = tf.ViTImageProcessor(size={"height": 32, "width": 32})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8))
    (task,) = model.identify(**processor(image, return_tensors="pt")).tasks
    pipes = [
        pipeline("image-feature-extraction", model=own, image_processor=processor) for own in (model, experts[task])
    ]
    assert_answers(pipes[0](image), pipes[1](image))
