"""From reference inputs to the task of each row, through the model's public interface."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from families import FAMILIES, TEXT, VOCAB, images, tokens
from helpers import TASKS, assert_same, build_from, build_retex, make_experts
from torch import Tensor
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from retex_hf import ConfigError, InputError, RetexError, RetexModel, TaskError
from retex_hf.backends import library_of
from retex_hf.routing import fitting, shallowest_good
from retex_hf.routing.perturbation import perturbed_inputs


def words(task: str, rows: int) -> dict[str, Tensor]:
    """Texts whose vocabulary tells the task, with padding."""
    first = 3 + 12 * TASKS.index(task)
    ids = torch.randint(first, first + 12, (rows, 8))
    mask = (torch.arange(8) < torch.randint(4, 9, (rows, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def joined(*batches: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def fitted(**options) -> RetexModel:
    model, _ = build_retex("bert", **{"feature_layer": 0, **options})
    model.fit_signatures({task: [words(task, 40), words(task, 40)] for task in TASKS}, progress=False)
    return model


@torch.no_grad()
def layer_features(model, inputs: dict[str, Tensor]) -> Tensor:
    hidden = model(**inputs, output_hidden_states=True).hidden_states[1]
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)


def test_each_row_is_given_to_its_task():
    model = fitted()
    inputs = joined(*(words(task, 10) for task in TASKS))
    routing = model.identify(**inputs)
    expected = [task for task in TASKS for _ in range(10)]
    assert sum(a == b for a, b in zip(routing.tasks, expected, strict=True)) >= 28
    assert routing.task_ids.tolist() == [TASKS.index(task) for task in routing.tasks]
    assert torch.equal(routing.task_ids, routing.residuals.argmin(1))
    temperature = model.signatures.temperature
    torch.testing.assert_close(routing.probabilities, torch.softmax(-routing.residuals / temperature, 1))


@pytest.mark.parametrize("rank", [6, 0.1])
@pytest.mark.parametrize("source", ["merged", "pretrained"])
def test_residuals_equal_the_formula_on_the_models_hidden_states(source, rank):
    base = FAMILIES["bert"].make().eval()
    model, _ = build_from(
        base, make_experts(base, scale=1.0), feature_layer=0, feature_source=source, signature_rank=rank,
        identification="residual",
    )  # fmt: skip
    references = {task: words(task, 64) for task in TASKS}
    model.fit_signatures({task: [batch] for task, batch in references.items()}, progress=False)
    inputs = joined(*(words(task, 3) for task in TASKS))
    observer = base if source == "pretrained" else model.get_base_model()
    z = layer_features(observer, inputs).double()
    columns = []
    for batch in references.values():
        features = layer_features(observer, batch).double()
        mean = features.mean(0)
        dimension = rank if isinstance(rank, int) else 1  # a tenth of 16 features
        vectors = torch.linalg.svd(features - mean).Vh[:dimension].T
        columns.append(((z - mean) @ (torch.eye(16, dtype=torch.float64) - vectors @ vectors.T)).norm(dim=1))
    torch.testing.assert_close(
        model.identify(**inputs).residuals, torch.stack(columns, 1).float(), rtol=1e-3, atol=1e-4
    )


@torch.no_grad()
def test_whitened_residuals_equal_the_formula_on_the_models_hidden_states():
    model = fitted(feature_layer=1, signature_rank=2)
    batches = {task: joined(words(task, 40), words(task, 40)) for task in TASKS}
    model.fit_signatures({task: [batch] for task, batch in batches.items()}, progress=False)
    assert model.signatures.space.layers == ("encoder.layer.0", "encoder.layer.1")
    merged = model.get_base_model()

    def features(inputs):
        states = merged(**inputs, output_hidden_states=True).hidden_states[1:]
        mask = inputs["attention_mask"].unsqueeze(-1)
        return [((hidden * mask).sum(1) / mask.sum(1)).double() for hidden in states]

    form = library_of(merged).input_form(merged)
    references = [[part[:64] for part in features(batch)] for batch in batches.values()]
    perturbed = [[part[:64] for part in features(perturbed_inputs(batch, form))] for batch in batches.values()]
    within = [torch.cat([task[layer] - task[layer].mean(0) for task in references]) for layer in (0, 1)]
    scales = [1 / part.square().mean().sqrt() for part in within]
    for layer in (0, 1):
        changes = [worse[layer] - task[layer] for task, worse in zip(references, perturbed, strict=True)]
        within[layer] = torch.cat([within[layer], *changes])
    rows = torch.cat([part * scale for part, scale in zip(within, scales, strict=True)], 1)
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    values, vectors = 0.7 * values.flip(0) + 0.3 * values.mean(), vectors.flip(1)
    kept = 31  # of 32 directions, the last sets the floor
    weights = torch.cat([(values[kept] / values[:kept]).sqrt(), torch.ones(1, dtype=torch.float64)])
    whiten = vectors * weights @ vectors.T
    inputs = joined(*(words(task, 3) for task in TASKS))

    def placed(parts):
        return torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)], 1) @ whiten

    columns = []
    for task in references:
        own = placed(task)
        basis = torch.linalg.svd(own - own.mean(0)).Vh[:2].T
        away = placed(features(inputs)) - own.mean(0)
        columns.append((away - away @ basis @ basis.T).norm(dim=1))
    found = model.identify(**inputs).residuals
    torch.testing.assert_close(found, torch.stack(columns, 1).float(), rtol=1e-2, atol=1e-3)


def test_a_tenth_of_64_references_is_six_dimensions():
    config = FAMILIES["bert"].make().config
    config.hidden_size, config.num_attention_heads = 64, 4
    base = type(FAMILIES["bert"].make())(config).eval()
    model, _ = build_from(base, make_experts(base), feature_layer=0)
    model.fit_signatures({task: [words(task, 70)] for task in TASKS}, progress=False)
    assert model.signatures.basis.shape == (3, 6, 64)


def test_padding_changes_no_decision():
    model = fitted()
    inputs = joined(*(words(task, 5) for task in TASKS))
    longer = {name: torch.cat([value, torch.zeros(15, 4, dtype=value.dtype)], 1) for name, value in inputs.items()}
    torch.testing.assert_close(
        model.identify(**longer).residuals, model.identify(**inputs).residuals, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_hard_routing_runs_each_row_on_the_identified_expert():
    model = fitted()
    inputs = joined(*(words(task, 3) for task in TASKS))
    output = model(**inputs)
    assert output.routing.weights is None
    assert output.routing.tasks == model.identify(**inputs).tasks
    assert torch.equal(output.routing.residuals, model.identify(**inputs).residuals)
    assert_same(output, model(**inputs, task=output.routing.tasks), exact=True)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_soft_routing_mixes_by_the_probabilities(temperature):
    model = fitted(routing="soft", temperature=temperature)
    inputs = joined(*(words(task, 2) for task in TASKS))
    output = model(**inputs)
    weights = output.routing.weights
    torch.testing.assert_close(weights, torch.softmax(-output.routing.residuals / temperature, 1))
    assert ((weights > 0.01).sum(1) > 1).any()  # real mixtures
    assert_same(output, model(**inputs, task=weights), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def late_model() -> RetexModel:
    """Its first block attends to nothing: the last token learns of the first one in the second block only."""
    base = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2, n_positions=32)).eval()
    experts = make_experts(base)
    for module in (base, *experts.values()):
        for parameter in module.transformer.h[0].attn.c_proj.parameters():
            parameter.zero_()
    model, _ = build_from(base, experts, feature_pooling="last")
    return model


def test_auto_takes_the_shallowest_layer_that_tells_the_tasks_apart():
    model = late_model()
    rest = torch.randint(3, VOCAB, (1, 5)).expand(8, 5)
    references = {task: [torch.cat([torch.full((8, 1), 10 + i), rest], 1)] for i, task in enumerate(TASKS)}
    accuracies = model.fit_signatures(references, progress=False)
    assert list(accuracies) == [f"transformer.h.{index}" for index in range(3)]
    assert list(accuracies.values()) == pytest.approx([1 / 3, 1.0, 1.0])
    assert model.signatures.feature_layer == "transformer.h.1"
    for task in TASKS:
        assert set(model.identify(references[task][0]).tasks) == {task}


def test_fitting_reports_accuracies_and_takes_the_layer_that_they_and_perturbed_references_point_to(monkeypatch):
    judged = []

    def noted(values: list[float]) -> int:
        judged.append(values)
        return shallowest_good(values)

    monkeypatch.setattr(fitting, "shallowest_good", noted)
    torch.manual_seed(0)
    base = BertModel(BertConfig(**TEXT | {"num_hidden_layers": 4})).eval()
    model, _ = build_from(base, make_experts(base, scale=1.0), feature_layer="auto")
    accuracies = model.fit_signatures({task: [words(task, 64)] for task in TASKS}, progress=False)
    assert list(accuracies) == [f"encoder.layer.{number}" for number in range(4)]
    assert all(0.9 < accuracy <= 1 for accuracy in accuracies.values())
    ((*means,),) = judged
    # A mean of two shares, of which one is reported: the other is a share of the 192 references, too.
    later = dict(list(accuracies.items())[2:])  # features do not end in the first half
    others = [2 * mean - clean for mean, clean in zip(means, later.values(), strict=True)]
    assert all(0 <= share <= 1 and 192 * share == pytest.approx(round(192 * share)) for share in others)
    assert model.signatures.feature_layer == list(later)[shallowest_good(means)]
    assert model.signatures.space.layers[0] == "encoder.layer.1"  # nor begin in the first third


@pytest.mark.parametrize("layer", [-1, "encoder.layer.1"])
def test_a_given_layer_is_taken(layer):
    assert fitted(feature_layer=layer).signatures.feature_layer == "encoder.layer.1"


def test_refitting_replaces_what_was_learned():
    model = fitted()
    inputs = words("red", 5)
    before = model.identify(**inputs).tasks
    swapped = dict(zip(TASKS, TASKS[::-1], strict=True))
    model.fit_signatures({task: [words(swapped[task], 64)] for task in TASKS}, progress=False)
    assert before == ["red"] * 5
    assert model.identify(**inputs).tasks == [swapped["red"]] * 5


def test_references_beyond_the_number_are_not_read():
    model, _ = build_retex("bert", num_reference=20, feature_layer=0)
    read = dict.fromkeys(TASKS, 0)

    def endless(task):
        for _ in count():
            read[task] += 1
            yield words(task, 8)

    model.fit_signatures({task: endless(task) for task in TASKS}, progress=False)
    assert read == dict.fromkeys(TASKS, 3)  # three batches of eight hold twenty rows


def test_rows_beyond_the_number_do_not_count():
    model, _ = build_retex("bert", num_reference=20, feature_layer=0)
    references = {task: words(task, 30) for task in TASKS}
    model.fit_signatures({task: [batch] for task, batch in references.items()}, progress=False)
    mean = model.signatures.mean.clone()
    cut = {task: [{k: v[:20] for k, v in batch.items()}] for task, batch in references.items()}
    model.fit_signatures(cut, progress=False)
    torch.testing.assert_close(model.signatures.mean, mean, rtol=1e-5, atol=1e-6)


def test_labels_in_a_batch_are_ignored_and_a_batch_may_stand_alone():
    model, _ = build_retex("bert-classifier", feature_layer=0)
    references = {task: words(task, 30) for task in TASKS}
    model.fit_signatures({task: [batch] for task, batch in references.items()}, progress=False)
    mean = model.signatures.mean.clone()
    labels = torch.zeros(30, dtype=torch.long)
    model.fit_signatures({task: batch | {"labels": labels} for task, batch in references.items()}, progress=False)
    assert torch.equal(model.signatures.mean, mean)


@pytest.mark.parametrize("name", ["vit", "open_clip-resnet", "clip", "whisper"])
def test_a_bare_tensor_is_the_main_input(name):
    model, _ = build_retex(name)
    main = {"vit": "pixel_values", "clip": "pixel_values", "whisper": "input_features"}.get(name, "image")
    value = torch.randn(9, 8, 32) if name == "whisper" else images(9)["pixel_values"]
    tensors = {task: value[index::3] for index, task in enumerate(TASKS)}
    model.fit_signatures({task: [tensor] for task, tensor in tensors.items()}, progress=False)
    mean = model.signatures.mean.clone()
    model.fit_signatures({task: [{main: tensor}] for task, tensor in tensors.items()}, progress=False)
    assert torch.equal(model.signatures.mean, mean)


@pytest.mark.parametrize(
    ("references", "error", "message"),
    [
        ({"red": [0], "green": [0]}, TaskError, r"every task; \['blue'\] have none"),
        ({"red": [0], "green": [0], "blue": [0], "purple": [0]}, TaskError, r"'purple'; the tasks are \['red'"),
        ({"red": [0], "green": [], "blue": [0]}, InputError, "'green' has no reference inputs"),
        ({"red": [0], "green": iter(()), "blue": [0]}, InputError, "'green' has no reference inputs"),
        ({"red": ["text"], "green": [0], "blue": [0]}, InputError, "a dict of keyword arguments or a tensor"),
        ({"red": [{"labels": torch.zeros(2)}], "green": [0], "blue": [0]}, InputError, "cannot be identified from"),
    ],
    ids=["missing", "unknown", "empty", "exhausted", "not a batch", "labels only"],
)
def test_references_that_do_not_fit_are_refused(references, error, message):
    model, _ = build_retex("bert")
    batches = {
        task: [words("red", 4) if batch == 0 else batch for batch in given] if isinstance(given, list) else given
        for task, given in references.items()
    }
    with pytest.raises(error, match=message):
        model.fit_signatures(batches, progress=False)
    assert model.signatures is None


@pytest.mark.parametrize("references", [None, 3, "red", [], torch.zeros(2, 3), iter(())])
def test_references_are_named_by_task(references):
    model, _ = build_retex("bert")
    kind = type(references).__name__
    with pytest.raises(InputError, match=rf"^fit_signatures takes a dict of task name to batches, not {kind}; the "):
        model.fit_signatures(references, progress=False)
    with pytest.raises(
        InputError, match=r"^Batches must be dicts or tensors, one or an iterable of them, not NoneType"
    ):
        model.fit_signatures(dict.fromkeys(TASKS), progress=False)
    assert model.signatures is None


@pytest.mark.parametrize("pool", [None, 3])
def test_a_pool_is_made_of_batches(pool):
    model, _ = build_retex("bert", signatures="weights")
    with pytest.raises(InputError, match=r"^Batches must be dicts or tensors, one or an iterable of them, not "):
        model.fit_signatures(pool, progress=False)


def test_references_that_give_no_numbers_are_refused():
    model, _ = build_retex("vit")
    pictures = images(4)["pixel_values"]
    pictures[1, 0, 3, 3] = float("nan")
    with pytest.raises(RetexError, match="NaN or infinite"):
        model.fit_signatures({task: [pictures] for task in TASKS}, progress=False)


def test_without_signatures_the_error_says_what_to_do():
    model, _ = build_retex("gpt2", signatures="inputs")
    for call in (model.identify, model, model.generate):
        with pytest.raises(
            RetexError, match=r"no task signatures yet: call fit_signatures, or name the task with task="
        ):
            call(**tokens(2))


def test_a_wrong_feature_layer_is_refused_when_fitting():
    model, _ = build_retex("bert", feature_layer="encoder.layer.9")
    with pytest.raises(ConfigError, match=r"no module 'encoder.layer.9'"):
        model.fit_signatures({task: [words(task, 4)] for task in TASKS}, progress=False)


@pytest.mark.parametrize("name", ["clip", "open_clip-vit", "vit"])
def test_texts_for_an_image_model_are_refused(name):
    model, _ = build_retex(name)
    pictures = images(6)["pixel_values"]
    model.fit_signatures({task: [pictures] for task in TASKS}, progress=False)
    texts = {"text" if name == "open_clip-vit" else "input_ids": torch.ones(2, 8, dtype=torch.long)}
    with pytest.raises(InputError, match="cannot be identified from"):
        model.identify(**texts)


@torch.no_grad()
def test_signatures_of_the_encoder_route_generation_and_forward_alike():
    model, _ = build_retex("t5", feature_layer=0)
    model.fit_signatures({task: [words(task, 40)] for task in TASKS}, progress=False)
    inputs = joined(*(words(task, 2) for task in TASKS))
    tasks = model.identify(**inputs).tasks
    assert len(set(tasks)) == 3
    assert model(**inputs, decoder_input_ids=torch.ones(6, 2, dtype=torch.long)).routing.tasks == tasks
    assert model.generate(**inputs, max_new_tokens=2).routing.tasks == tasks


def test_names_of_the_room_are_no_modules_of_it():
    """They are imported on first use; a module of the same name would take the place of the function."""
    from importlib.util import find_spec

    from retex_hf import routing

    assert not [name for name in routing.__all__ if find_spec(f"retex_hf.routing.{name}")]
