"""Rows that are far from every task: how that is asked for, decided and told."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from helpers import perturb
from transformers import pipeline
from trust.subjects import TASKS, batch, make_artifact, make_model, make_tokenizer, texts

from retex_hf import ConfigError, InputError, RetexConfig, RetexModel
from retex_hf.cli import main
from retex_hf.cli.build import BuildOptions
from retex_hf.demo.cards import card_html
from retex_hf.routing import FeatureSpace, decide
from retex_hf.routing.signatures import Signatures, held_out_residuals
from retex_hf.workflows.predictor import Predictor

FAR = {"method": "hard", "far": "merged"}
# Words of all tasks in one text: near none of them.
STRAY = "rose grass sky cherry"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("artifacts") / "far", routing=FAR)


@pytest.fixture(scope="module")
def model(artifact) -> RetexModel:
    return RetexModel.from_pretrained(artifact)


def near_texts() -> list[str]:
    return [texts(task, 1, seed=5)[0] for task in TASKS]


@pytest.mark.parametrize(
    "routing",
    [FAR, {"method": "hard"}, {"method": "hard", "far": "soft", "quantile": 1}, {"method": "soft", "far": "merged"},
     {**FAR, "quantile": 0.5, "slack": 3}],
)  # fmt: skip
def test_options_are_kept_as_they_are_given(routing, tmp_path):
    config = RetexConfig(routing=routing)
    config.save_pretrained(tmp_path)
    assert RetexConfig.from_pretrained(tmp_path).routing == routing


@pytest.mark.parametrize(
    "routing",
    ["far", None, 3, {}, {"far": "merged"}, {"method": "hard", "far": "no"}, {"method": "mild", "far": "merged"},
     {"method": "soft", "far": "soft"}, {"method": "hard", "slack": 2.0}, {**FAR, "quantile": 0},
     {**FAR, "quantile": 2}, {**FAR, "slack": 0}, {**FAR, "slack": float("inf")},
     {**FAR, "slack": float("nan")}, {**FAR, "slack": True},
     {**FAR, "threshold": 1.0}, {"method": ["hard"], "far": "merged"}, {"method": "hard", "far": ["merged"]}],
    ids=str,
)  # fmt: skip
def test_other_options_are_refused(routing):
    with pytest.raises(ConfigError, match=r"RetexConfig\.routing"):
        RetexConfig(routing=routing)


def test_far_is_what_exceeds_the_threshold_of_the_nearest_task():
    residuals = torch.tensor([[1.0, 5.0, 9.0], [2.1, 2.0, 9.0], [9.0, 9.0, 3.0], [3.0, 3.0, 3.0]])
    thresholds = torch.tensor([1.0, 1.5, torch.inf])
    found = decide(residuals, ["a", "b", "c"], FAR, 1.0, thresholds)
    assert found.tasks == ["a", "b", "c", "a"]  # of equal ones the first
    assert found.abstained.tolist() == [False, True, False, True]
    assert found.weights.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]
    mixed = decide(residuals, ["a", "b", "c"], {"method": "hard", "far": "soft"}, 1.0, thresholds)
    assert torch.equal(mixed.weights[[1, 3]], torch.softmax(-residuals[[1, 3]], 1))
    assert mixed.weights[[0, 2]].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert decide(residuals, ["a", "b", "c"], "hard", 1.0).abstained is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_residual_has_no_task(value):
    residuals = torch.tensor([[1.0, 2.0], [value, 1.0], [2.0, 1.0]])
    for routing in ("hard", "soft", {"method": "hard", "far": "soft"}):
        with pytest.raises(InputError, match="row 1 "):
            decide(residuals, ["a", "b"], routing, 1.0, torch.ones(2))
    found = decide(residuals, ["a", "b"], FAR, 1.0, torch.ones(2))
    assert found.abstained.tolist() == [False, True, False]
    assert found.residuals[1].tolist() == [float("inf")] * 2
    assert found.probabilities[1].tolist() == [0.5, 0.5]
    assert torch.equal(found.residuals[[0, 2]], residuals[[0, 2]])


def test_held_out_residuals_are_of_inputs_that_were_not_fitted():
    features = torch.randn(16, 64)
    # With as many dimensions as inputs, those that were fitted have no residual at all.
    fitted = Signatures.fit([features], 1.0, "layer")
    assert fitted.residuals(features).max() < 1e-4
    assert held_out_residuals(features, 1.0).min() > 1
    assert torch.equal(fitted.held_out[0], held_out_residuals(features, 1.0).sort().values)
    expected = torch.zeros(16)
    for fold in range(4):
        out = torch.arange(16) % 4 == fold
        # Half of 16 dimensions, as the signature of all inputs has, not half of 12.
        expected[out] = Signatures.fit([features[~out]], 8, "layer").residuals(features[out]).flatten()
    torch.testing.assert_close(held_out_residuals(features, 0.5), expected)


def test_tasks_of_different_numbers_of_references_have_thresholds_of_their_own():
    features = [torch.randn(rows, 8) for rows in (3, 5, 20)]
    signatures = Signatures.fit(features, 2, "layer")
    found = signatures.thresholds(0.8, 1.5)
    assert found[0] == float("inf")
    for task in (1, 2):
        own = held_out_residuals(features[task], 2).sort().values
        # Of 5 residuals the fifth, of 20 the seventeenth: ceil(0.8 * 6) and ceil(0.8 * 21).
        torch.testing.assert_close(found[task], 1.5 * own[{1: 4, 2: 16}[task]])
    joined = signatures.without(1).joined_by(Signatures.fit([features[1]], 2, "layer"))
    torch.testing.assert_close(joined.thresholds(0.8, 1.5), found[[0, 2, 1]])


@pytest.mark.parametrize(("references", "quantile", "rate"), [(19, 0.9, 0.1), (64, 0.97, 1 / 65), (9, 0.97, 0.1)])
def test_the_rate_of_false_alarms_is_known_with_few_references_too(references, quantile, rate):
    """Over draws of the references and one more input, which a plain quantile would alarm for too often."""
    drawn = torch.rand(20_000, references + 1, generator=torch.Generator().manual_seed(0))
    held_out, row = drawn[:, 1:].sort(1).values, drawn[:, 0]
    space = FeatureSpace.plain("layer")
    mean, basis = torch.zeros(len(drawn), 1), torch.zeros(len(drawn), 0, 1)
    signatures = Signatures(mean, basis, mean, basis, held_out, space)
    far = row > signatures.thresholds(quantile, 1.0)
    assert far.float().mean().item() == pytest.approx(rate, abs=0.007)
    assert rate <= max(1 - quantile, 1 / (references + 1)) + 1e-9


def test_about_as_many_rows_of_a_task_are_far_as_the_quantile_says():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 16, generator=draw)
    signatures = Signatures.fit([features[:400]], 0.1, "layer")
    for quantile in (0.5, 0.8, 0.95):
        far = signatures.residuals(features[400:])[:, 0] > signatures.thresholds(quantile, 1.0)[0]
        assert far.float().mean().item() == pytest.approx(1 - quantile, abs=0.05)


def test_routing_is_changed_on_the_model_and_saved_with_it(tmp_path):
    model = make_model()
    assert model.routing == "hard"
    before = model.retex_config
    model.routing = FAR
    assert before.routing == "hard"  # which calls that are running go by
    assert model.retex_config.routing == FAR
    with pytest.raises(ConfigError, match=r"RetexConfig\.routing"):
        model.routing = "softly"
    assert model.routing == FAR
    model.save_pretrained(tmp_path)
    assert RetexModel.from_pretrained(tmp_path).routing == FAR


def test_options_that_were_given_are_not_shared_with_the_model():
    model, given = make_model(), dict(FAR)
    model.routing = given
    given["far"] = "nowhere"
    assert model.routing == FAR == RetexConfig(routing=model.routing).routing


def test_answers_say_what_is_far(model):
    rows = batch(make_tokenizer(), [*near_texts(), STRAY])
    output = model(**rows)
    assert output.routing.abstained.tolist() == [False, False, False, True]
    assert output.routing.num_labels == [len(model.retex_config.labels[t]["id2label"]) for t in output.routing.tasks]
    assert [answer["far"] for answer in model.predict(**rows)] == [False, False, False, True]
    assert "far" not in model.predict(**rows, task="red")[0]
    assert model(**rows, task="red").routing.abstained is None
    merged = Predictor.from_pretrained(model.side_folder).merged([STRAY], [output.routing.tasks[3]])[0]
    assert (merged.answer, merged.far) == (model.predict(**rows)[3]["label"], None)


def test_predictors_and_the_page_say_what_is_far(artifact):
    predictor = Predictor.from_pretrained(artifact)
    near, far = predictor.predict([near_texts()[0], STRAY])
    assert (near.far, far.far) == (False, True)
    assert predictor.predict([STRAY], task="red")[0].far is None
    assert predictor.predict([]) == []
    assert "Out of distribution" in card_html(1, STRAY, far, far)
    assert "Out of distribution" not in card_html(1, STRAY, near, near)


def test_pipelines_say_what_is_far(model):
    pipe = pipeline("text-classification", model=model, tokenizer=make_tokenizer())
    for size in (1, 4):
        found = pipe([*near_texts(), STRAY], batch_size=size)
        assert [answer["far"] for answer in found] == [False, False, False, True]
        assert [answer["task"] for answer in found[:3]] == list(TASKS)
    assert pipe(STRAY)[0]["far"] is True


def test_the_command_line_says_what_is_far(artifact, monkeypatch, capsys):
    command = ["predict", str(artifact), "--text", near_texts()[0], "--text", STRAY]
    assert main(command) == 0
    assert [json.loads(line)["far"] for line in capsys.readouterr().out.splitlines()] == [False, True]
    assert main([*command, "--routing", "{method: hard, far: merged, slack: 1000}"]) == 0
    assert [json.loads(line)["far"] for line in capsys.readouterr().out.splitlines()] == [False, False]
    assert main([*command, "--routing", "soft"]) == 0
    assert "far" not in json.loads(capsys.readouterr().out.splitlines()[0])
    assert main([*command, "--routing", "{method: hard, far: away}"]) == 2
    assert "RetexConfig.routing" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["predict", str(artifact)]) == 0
    assert capsys.readouterr().out == ""


def test_a_build_takes_the_options_as_one_value():
    options = ["--base", "b", "--expert", "a=b", "--output-dir", "o", "--routing", "{method: hard, far: soft}"]
    assert BuildOptions.parse("retex build", options).as_recipe().config == {
        "routing": {"method": "hard", "far": "soft"}
    }


def test_the_card_says_what_becomes_of_far_inputs(artifact):
    text = (artifact / "README.md").read_text(encoding="utf-8")
    assert "Out-of-distribution inputs are answered by the merged model" in " ".join(text.split())


def test_generated_rows_are_those_of_each_row_alone():
    model, tokenizer = make_model("t5", routing=FAR), make_tokenizer()
    rows = batch(tokenizer, [STRAY, *near_texts(), "sea leaf brick ice"])
    options = {"max_new_tokens": 5, "do_sample": False}
    assert model.identify(**rows).abstained.tolist() == [True, False, False, False, True]
    with model.disable_adapter():
        merged = model.generate(**rows, **options)
    for execution in ("grouped", "mixed"):
        model.execution = execution
        found = model.generate(**rows, **options)
        assert found.routing.abstained.tolist() == [True, False, False, False, True]
        assert torch.equal(found[[0, 4]], merged[[0, 4], : found.shape[1]])
        named = model.generate(**{k: v[1:4] for k, v in rows.items()}, task=list(TASKS), **options)
        assert torch.equal(found[1:4, : named.shape[1]], named)


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
@torch.no_grad()
def test_beams_of_a_far_row_are_those_of_the_merged_model(execution):
    model = make_model("t5", routing=FAR)
    model.execution = execution
    rows = batch(make_tokenizer(), [near_texts()[0], STRAY])
    options = {
        "max_new_tokens": 4,
        "suppress_tokens": [0, 2],
        "pad_token_id": 0,
        "num_beams": 2,
        "num_return_sequences": 2,
    }
    found = model.generate(**rows, **options)
    assert found.routing.abstained.tolist() == [False, True]
    with model.disable_adapter():
        merged = model.generate(**rows, **options)
    named = model.generate(**rows, task="red", **options)
    assert torch.equal(found[2:], merged[2:, : found.shape[1]])
    assert torch.equal(found[0], named[0, : found.shape[1]])
    assert not torch.equal(named[[0, 2]], merged[[0, 2]])


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
@torch.no_grad()
def test_images_that_are_far_have_the_features_of_the_merged_model(execution):
    torch.manual_seed(0)
    base = FAMILIES["clip"].make().eval()
    experts = {}
    for seed, task in enumerate(TASKS):
        experts[task] = perturb(base, seed)
        texts_of_base = {name: value for name, value in base.state_dict().items() if "vision" not in name}
        experts[task].load_state_dict(texts_of_base, strict=False)
    model = RetexModel.from_experts(
        base, experts, RetexConfig(rank=2, feature_layer=0, routing=FAR), execution=execution, progress=False
    )
    size = base.config.vision_config.image_size
    colours = 4 * torch.eye(3).view(3, 1, 3, 1, 1)
    images = torch.randn(3, 24, 3, size, size) + colours
    model.fit_signatures(
        {task: [{"pixel_values": own}] for task, own in zip(TASKS, images, strict=True)}, progress=False
    )
    rows = torch.cat([images[:, 0], torch.full((1, 3, size, size), -30.0)])

    def features(**options) -> torch.Tensor:
        return model.get_image_features(pixel_values=rows, **options)

    found = features()
    assert found.routing.tasks[:3] == list(TASKS)
    assert found.routing.abstained.tolist() == [False, False, False, True]
    with model.disable_adapter():
        merged = features().pooler_output
    named = features(task=[*TASKS, "red"]).pooler_output
    torch.testing.assert_close(found.pooler_output[3], merged[3])
    torch.testing.assert_close(found.pooler_output[:3], named[:3])
    assert not torch.allclose(named, merged, atol=1e-3)


def test_far_rows_teach_nothing_and_a_batch_of_them_is_refused():
    model = make_model(routing=FAR)
    model.recovery.requires_grad_(True)
    model.train()
    for module in model.get_base_model().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rows = batch(make_tokenizer(), [near_texts()[0], STRAY])
    far = {name: value[1:] for name, value in rows.items()}
    answer = torch.zeros(1, dtype=torch.long)

    def gradient(inputs, **options) -> torch.Tensor:
        model.zero_grad()
        model(**inputs, **options).loss.backward()
        return model.recovery.task_embedding.grad

    near = gradient(rows, labels=torch.tensor([0, -100]), task="red")
    # The mean loss is of two rows now, and the far one has no part in the gradient.
    torch.testing.assert_close(gradient(rows, labels=torch.tensor([0, 0])) * 2, near, rtol=1e-4, atol=1e-6)
    with pytest.raises(InputError, match="All rows of this batch are out of distribution"):
        model(**far, labels=answer)
    assert gradient(far, labels=answer, task="red").abs().sum() > 0
    model.routing = {"method": "hard", "far": "soft"}
    assert gradient(far, labels=answer).abs().sum() > 0
    model.eval()
    model.routing = FAR
    assert model(**far, labels=answer).loss.isfinite()


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_gradients_of_inputs_that_are_far_are_those_of_the_merged_model(execution):
    model = make_model(routing=FAR)
    model.execution = execution
    rows = batch(make_tokenizer(), [near_texts()[0], STRAY])
    embedded = model.get_base_model().bert.embeddings.word_embeddings(rows.pop("input_ids")).detach()

    def gradient(**options) -> torch.Tensor:
        given = embedded.clone().requires_grad_()
        logits = model(inputs_embeds=given, **rows, **options).logits
        return torch.autograd.grad(logits[:, :2].sum(), given)[0]

    found, named = gradient(), gradient(task=["red", "red"])
    tasks = model(inputs_embeds=embedded, **rows).routing.tasks
    with model.disable_adapter():
        merged = gradient(task=tasks)
    torch.testing.assert_close(found, torch.stack([named[0], merged[1]]), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[1], named[1], atol=1e-4)
