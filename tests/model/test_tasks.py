"""Tasks come and go: `add_task` and `delete_task` through the model's public interface."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import FAMILIES, ROWS, TEXT, VOCAB, Family, tokens
from helpers import MIXED, TASKS, assert_same, build_from, leaves, make_experts, perturb, rows_of, take
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from retex_hf import CheckpointError, ConfigError, RetexConfig, RetexError, RetexModel, TaskError
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.model.components import extractor_of
from retex_hf.model.trunk_references import TaskReferences
from retex_hf.recovery import TrainingConfig
from retex_hf.routing import RIDGES, fit_signature

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
OLD, NEW = ["red", "green"], "blue"
CHOSEN = ("bert-classifier", "t5", "gpt2", "vit", "resnet", "open_clip-vit")


def words(task: str, rows: int) -> dict[str, Tensor]:
    """Texts whose vocabulary tells the task."""
    first = 3 + 12 * TASKS.index(task)
    return {"input_ids": torch.randint(first, first + 12, (rows, 8)), "attention_mask": torch.ones(rows, 8).long()}


def build(name: str = "bert", low_rank: bool = False, **options) -> tuple[RetexModel, nn.Module, Family]:
    """A model of two tasks, the expert of a third, and the family."""
    family = FAMILIES[name]
    base = family.make().eval()
    experts = make_experts(base, low_rank=low_rank)
    new = experts.pop(NEW)
    model, _ = build_from(base, experts, family.model_config, **options)
    return model, new, family


def state(model: RetexModel) -> dict:
    """All that can be seen of a model without running it."""
    return {
        "tasks": list(model.tasks),
        "config": model.retex_config.to_dict(),
        "recovery": {name: tensor.clone() for name, tensor in model.recovery.state_dict().items()},
        "merged": {name: tensor.clone() for name, tensor in model.get_base_model().state_dict().items()},
        "errors": dict(model.recovery_errors),
        "signatures": copy.deepcopy(model.signatures),
        "recipe": copy.deepcopy(model.recipe),
    }


def assert_state(model: RetexModel, before: dict) -> None:
    now = state(model)
    for part in ("tasks", "config", "errors", "recipe"):
        assert now[part] == before[part], part
    for part in ("recovery", "merged"):
        assert_same(now[part], before[part], exact=True)
    if before["signatures"] is not None:
        assert torch.equal(now["signatures"].basis, before["signatures"].basis)


@torch.no_grad()
@pytest.mark.parametrize("name", CHOSEN)
def test_an_expert_joins_and_leaves(name, tmp_path):
    model, new, family = build(name, rank=3)
    inputs = family.inputs(ROWS)
    before = {task: model(**inputs, task=task) for task in OLD}
    merged = {n: tensor.clone() for n, tensor in model.get_base_model().state_dict().items()}
    added = model.add_task(NEW, new, tolerance=0, progress=False)
    assert model.tasks == TASKS
    assert max(added.errors.values()) < 1e-4
    assert_same(model.get_base_model().state_dict(), merged, exact=True)
    for task in OLD:
        assert_same(model(**inputs, task=task), before[task], rtol=1e-5, atol=1e-5)
    assert_same(model(**inputs, task=NEW), new(**inputs), **CLOSE)

    for execution in ("grouped", "auto"):
        model.execution = execution
        together = dict(leaves(model(**inputs, task=MIXED)))
        for task in TASKS:
            for leaf, expected in leaves(model(**inputs, task=task)):
                if expected.ndim and len(expected) == ROWS and "per_text" not in leaf:
                    rows = rows_of(task)
                    torch.testing.assert_close(together[leaf][rows], expected[rows], **CLOSE)

    model.save_pretrained(tmp_path / "grown")
    loaded = RetexModel.from_pretrained(tmp_path / "grown")
    for task in TASKS:
        assert_same(loaded.recover(task), model.recover(task), exact=True)
    assert loaded.recovery_errors == model.recovery_errors

    loaded.delete_task(NEW)
    assert loaded.tasks == OLD
    for task in OLD:
        assert_same(loaded(**inputs, task=task), before[task], rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path / "shrunk")
    assert_same(RetexModel.from_pretrained(tmp_path / "shrunk").recover("green"), loaded.recover("green"), exact=True)


VARIANTS = {
    "full": {"rank": "full"},
    "reversed": {"rank": 3, "factor_order": "shared_first"},
    "inner": {"rank": 4, "inner_rank": 2},
    "narrow": {"rank": 3, "task_embedding_dim": 1},
    "wide": {"rank": 3, "task_embedding_dim": 5},
    "affine": {"rank": 3, "recovery": "affine"},
    "shared": {"rank": 3, "share_layers": True},
    "soft": {"rank": 3, "soft_training": "dirichlet"},
    "bfloat16": {"rank": 3, "recovery_dtype": "bfloat16"},
    "int8": {"rank": 3, "recovery_dtype": "int8"},
    "int8-reversed": {"rank": 3, "recovery_dtype": "int8", "factor_order": "shared_first"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_of_the_recovery(options, tmp_path):
    model, new, family = build(**options)
    inputs = family.inputs(ROWS)
    before = {task: model.recover(task) for task in OLD}
    errors = dict(model.recovery_errors)
    added = model.add_task(NEW, new, progress=False)
    for task in OLD:
        assert_same(model.recover(task), before[task], rtol=0, atol=1e-6)
    recovered, target, merged = model.recover(NEW), new.state_dict(), model.get_base_model().state_dict()
    for name, error in added.errors.items():
        missed = (recovered[name] - target[name]).norm() / (target[name] - merged[name]).norm()
        assert error == pytest.approx(missed.item(), abs=1e-4), name
        if "share_layers" not in options:  # of layers that share an offset, it is the mean that is recovered so
            slack = 0.02 if "recovery_dtype" in options else 1e-5
            assert error <= errors[name] + slack, name
        assert model.recovery_errors[name] == max(errors[name], error)
    assert set(added.errors) == set(errors)
    model.save_pretrained(tmp_path / "grown")
    loaded = RetexModel.from_pretrained(tmp_path / "grown")
    for task in TASKS:
        assert_same(loaded.recover(task), model.recover(task), exact=True)
    assert_same(loaded(**inputs, task=MIXED), model(**inputs, task=MIXED), **CLOSE)
    for task in ("red", "green"):
        loaded.delete_task(task)
        assert_same(loaded.recover(NEW), model.recover(NEW), exact=True)
    loaded.save_pretrained(tmp_path / "shrunk")
    assert_same(RetexModel.from_pretrained(tmp_path / "shrunk").recover(NEW), model.recover(NEW), exact=True)


def test_a_trained_recovery():
    family = FAMILIES["bert"]
    base = family.make().eval()
    experts = make_experts(base)
    new = experts.pop(NEW)
    model = RetexModel.from_experts(
        base,
        experts,
        RetexConfig(rank=3),
        solver="adam",
        training=TrainingConfig(steps=5, learning_rate=1e-2, warmup_steps=1),
        progress=False,
    )
    before = {task: model.recover(task) for task in OLD}
    assert all(model.recovery[name].bias is not None for name in model.recovery)
    added = model.add_task(NEW, new, tolerance=0.2, progress=False)
    assert max(added.errors.values()) <= 0.2 + 1e-3
    for task in OLD:
        assert_same(model.recover(task), before[task], rtol=0, atol=1e-6)
    model.delete_task("red")
    assert model.retex_config.task_embedding_dim == 3  # dense embeddings have no dimension to spare
    assert_same(model.recover("green"), before["green"], rtol=0, atol=1e-6)


def test_what_is_excluded_stays_merged_and_what_nobody_changed_joins():
    family = FAMILIES["bert"]
    base = family.make().eval()
    experts = make_experts(base)
    new = experts.pop(NEW)
    untouched = ["encoder.layer.0.attention.self.query.weight", "encoder.layer.1.output.dense.bias"]
    for expert in experts.values():
        expert.load_state_dict(expert.state_dict() | {name: base.state_dict()[name] for name in untouched})
    model, _ = build_from(base, experts, rank=3, exclude=["*embeddings*"])
    assert not set(untouched) & set(model.recovery)
    added = model.add_task(NEW, new, progress=False)
    assert sorted(added.joined) == sorted(untouched)
    assert not [name for name in model.recovery if "embeddings" in name]
    merged, recovered, target = model.get_base_model().state_dict(), model.recover(NEW), new.state_dict()
    assert torch.equal(recovered["embeddings.word_embeddings.weight"], merged["embeddings.word_embeddings.weight"])
    torch.testing.assert_close(recovered[untouched[1]], target[untouched[1]])
    assert torch.equal(model.recover("red")[untouched[0]], merged[untouched[0]])
    assert "2 were as merged for all tasks before" in str(added)
    model.delete_task(NEW)
    assert not set(untouched) & set(model.recovery)

    never, _ = build_from(base, experts, rank=3, exclude=["*embeddings*"])
    assert never.add_task(NEW, new, tolerance=1, progress=False).joined == [untouched[1]]  # vectors are exact always


def test_more_tolerance_takes_less_storage():
    sizes = []
    for tolerance in (0.0, 0.3, 0.6, 1.0):
        model, new, _ = build("gpt2", rank=3)
        size = model.recovery.stored_numbers()
        added = model.add_task(NEW, new, tolerance=tolerance, progress=False)
        assert added.added_bytes == 4 * (model.recovery.stored_numbers() - size)
        assert max(added.errors.values()) <= max(tolerance, 1e-5)
        sizes.append(added.added_bytes)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert not added.grown and not added.whole


# ---- heads -----------------------------------------------------------------------------------------------------------


def classifier(base: nn.Module, task: str, width: int, folder: Path) -> nn.Module:
    config = tf.BertConfig(**TEXT, id2label={i: f"{task}-{i}" for i in range(width)})
    expert = tf.BertForSequenceClassification(config).eval()
    body = perturb(base, TASKS.index(task) + 1, scale=1.0)
    expert.bert.load_state_dict(body.state_dict(), strict=False)
    nn.init.normal_(expert.classifier.weight)
    expert.save_pretrained(folder / task)
    return expert


@pytest.fixture
def classifiers(tmp_path):
    """A model of two classifiers from folders, and the folder of a third; other widths, other labels."""
    base = tf.BertModel(tf.BertConfig(**TEXT))
    base.save_pretrained(tmp_path / "base")
    experts = {task: classifier(base, task, width, tmp_path) for task, width in zip(TASKS, (2, 5, 7), strict=True)}
    paths = {task: str(tmp_path / task) for task in OLD}
    model = RetexModel.from_experts(str(tmp_path / "base"), paths, RetexConfig(rank="full"), progress=False)
    return model, experts, tmp_path


@torch.no_grad()
def test_a_head_of_another_width(classifiers):
    model, experts, folder = classifiers
    model.add_task(NEW, folder / NEW, progress=False)
    inputs = tokens(ROWS)
    output = model(**inputs, task=MIXED)
    assert output.logits.shape == (ROWS, 7)
    for task, width in zip(TASKS, (2, 5, 7), strict=True):
        expected, rows = experts[task](**inputs).logits, rows_of(task)
        torch.testing.assert_close(output.logits[rows, :width], expected[rows], **CLOSE)
    best = experts[NEW](**inputs).logits.argmax(-1).tolist()
    assert [row["label"] for row in model.predict(**inputs, task=NEW)] == [f"blue-{index}" for index in best]
    assert model.retex_config.experts[NEW] == {"source": "local", "id": "blue"}


@torch.no_grad()
def test_the_merged_model_takes_the_head_of_the_next_first_task(classifiers, tmp_path):
    model, experts, folder = classifiers
    inputs = tokens(ROWS)
    merged = model.get_base_model()
    body = {name: tensor.clone() for name, tensor in merged.state_dict().items() if name.startswith("bert.")}
    expected = experts["green"](**inputs).logits
    model.delete_task("red")
    torch.testing.assert_close(model(**inputs, task="green").logits, expected, **CLOSE)
    model.save_pretrained(tmp_path / "saved")
    plain = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(plain.classifier.weight, experts["green"].classifier.weight)
    assert plain.config.id2label == experts["green"].config.id2label
    assert_same({name: plain.state_dict()[name] for name in body}, body, exact=True)
    loaded = RetexModel.from_pretrained(tmp_path / "saved")
    assert loaded.tasks == ["green"]
    torch.testing.assert_close(loaded(**inputs, task="green").logits, expected, **CLOSE)
    loaded.add_task("red", folder / "red", progress=False)
    torch.testing.assert_close(loaded(**inputs, task="red").logits, experts["red"](**inputs).logits, **CLOSE)


# ---- signatures ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("source", ["merged", "pretrained"])
def test_a_signature_joins_the_others(source):
    model, new, _ = build(feature_layer=0, feature_source=source, signature_rank=2)
    model.fit_signatures({task: [words(task, 64)] for task in OLD}, progress=False)
    rows = {task: words(task, 10) for task in TASKS}
    before = model.identify(**rows["red"]).residuals
    references = words(NEW, 80)
    model.add_task(NEW, new, references=[references], progress=False)
    assert torch.equal(model.identify(**rows["red"]).residuals[:, :2], before)
    for task in TASKS:
        assert model.identify(**rows[task]).tasks.count(task) >= 9
    # The same as fitting the new task's features alone, of its first 64 rows.
    space = model.signatures.space
    features = extractor_of(model.parts(), list(space.layers))(take(references, list(range(64))))
    mean, basis = fit_signature(space(features), 2)
    torch.testing.assert_close(model.signatures.mean[2], mean)
    torch.testing.assert_close(model.signatures.basis[2], basis)
    assert model(**rows[NEW]).routing.tasks == model.identify(**rows[NEW]).tasks
    model.delete_task("red")
    assert model.signatures.mean.shape[0] == 2
    assert model.identify(**rows[NEW]).tasks.count(NEW) >= 9


def test_signatures_of_different_rank_are_padded():
    model, new, _ = build(feature_layer=0, signature_rank=4)
    model.fit_signatures({task: [words(task, 3)] for task in OLD}, progress=False)
    inputs = words("red", 5)
    before = model.identify(**inputs).residuals
    assert model.signatures.basis.shape[1] == 2
    model.add_task(NEW, new, references=words(NEW, 20), progress=False)
    assert model.signatures.basis.shape[1] == 4
    torch.testing.assert_close(model.identify(**inputs).residuals[:, :2], before)


def test_references_are_given_where_they_are_needed_and_only_there():
    model, new, _ = build(feature_layer=0)
    with pytest.raises(TaskError, match="no signatures that references= could join"):
        model.add_task(NEW, new, references=words(NEW, 8), progress=False)
    model.fit_signatures({task: [words(task, 8)] for task in OLD}, progress=False)
    before = state(model)
    with pytest.raises(TaskError, match="tells its tasks apart by reference inputs: give some of 'blue'"):
        model.add_task(NEW, new, progress=False)
    with pytest.raises(RetexError, match="'blue' has no reference inputs"):
        model.add_task(NEW, new, references=[], progress=False)
    assert_state(model, before)


@torch.no_grad()
def test_tasks_known_by_their_weights():
    model, new, _ = build(signatures="weights", rank=3)
    inputs = words("red", 4)
    with pytest.raises(TaskError, match="needs no reference inputs"):
        model.add_task(NEW, new, references=words(NEW, 8), progress=False)
    scores = model.identify(**inputs).residuals
    model.add_task(NEW, new, progress=False)
    found = model.identify(**inputs).residuals
    assert found.shape == (4, 3)
    torch.testing.assert_close(found[:, :2], scores, rtol=1e-4, atol=1e-4)
    model.delete_task("red")
    torch.testing.assert_close(model.identify(**inputs).residuals, found[:, 1:], rtol=1e-4, atol=1e-4)

    centred, new, _ = build(signatures="weights", rank=3)
    pool = [words(task, 8) for task in TASKS]
    centred.fit_signatures(pool)
    with pytest.raises(TaskError, match="give a pool as references="):
        centred.add_task(NEW, new, progress=False)
    centred.add_task(NEW, new, references=pool, progress=False)
    assert centred.signatures.lead.shape == (3,)
    residuals = torch.cat([centred.identify(**batch).residuals for batch in pool])
    torch.testing.assert_close(residuals.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    centred.delete_task("green")
    assert centred.signatures.lead.shape == (2,)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert-classifier", "resnet"])
def test_a_shared_trunk_is_aligned_with_the_new_task(name, tmp_path):
    model, new, family = build(name, shared_trunk=True, feature_layer=0)
    references = {task: [family.inputs(8)] for task in TASKS}
    model.fit_signatures({task: references[task] for task in OLD}, progress=False)
    model.add_task(NEW, new, references=references[NEW], progress=False)
    inputs = family.inputs(ROWS)
    assert_same(model(**inputs, task=NEW), new(**inputs), **CLOSE)  # named, it is the whole expert
    trunk, alignment = model.retex_config.trunk, model.signatures.alignment
    folds = TaskReferences(model.parts(), NEW, references[NEW]).moments(trunk["junction"])
    moments = sum(folds[1:], folds[0])
    candidates = [moments.no_correction(), *(moments.correction(ridge) for ridge in RIDGES)]
    assert any(torch.allclose(alignment.shift[-1], one.shift, **CLOSE) for one in candidates)
    assert list(trunk["cost"]) == TASKS and trunk["cost"][NEW]["change"] > 0
    outputs = {}
    for model.execution in ("grouped", "auto"):
        outputs[model.execution] = model(**inputs)
    assert_same(outputs["grouped"], outputs["auto"], **CLOSE)
    model.delete_task("red")
    assert list(model.retex_config.trunk["cost"]) == ["green", NEW]
    assert torch.equal(model.signatures.alignment.shift, alignment.shift[1:])
    model.save_pretrained(tmp_path / "saved")
    assert_same(RetexModel.from_pretrained(tmp_path / "saved")(**inputs), model(**inputs), **CLOSE)


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def wrong_experts(new: nn.Module) -> dict[str, tuple[object, type[Exception], str]]:
    tensors = new.state_dict()
    name = "encoder.layer.1.output.dense.weight"
    shapes = {**TEXT, "intermediate_size": 12}
    return {
        "missing": ({n: t for n, t in tensors.items() if n != name}, CheckpointError, f"lacks 1 tensor.*{name}"),
        "extra": ({**tensors, "odd": torch.ones(1)}, CheckpointError, "has 1 tensor.*'odd'"),
        "nan": ({**tensors, name: tensors[name] * float("nan")}, CheckpointError, f"{name}' holds NaN"),
        "shape": (tf.BertModel(tf.BertConfig(**shapes)), CheckpointError, "has shape .* another architecture"),
        "vocabulary": (
            tf.BertModel(tf.BertConfig(**{**TEXT, "vocab_size": VOCAB + 2})),
            CheckpointError,
            "word_embeddings.*storing it whole for every task takes a build",
        ),
        "class": (FAMILIES["gpt2"].make(), CheckpointError, "is a GPT2LMHeadModel, but the other experts are a Bert"),
        "unrelated": (FAMILIES["bert"].make(), CheckpointError, "does not descend from the merged model"),
        "path": ("/no/such/folder", CheckpointError, "does not exist"),
        "kind": (3, CheckpointError, "must be a folder"),
    }


def test_a_wrong_expert_leaves_the_model_as_it_was():
    model, new, family = build(rank=3)
    before, inputs = state(model), family.inputs(ROWS)
    expected = model(**inputs, task="red")
    for wrong, error, message in wrong_experts(new).values():
        with pytest.raises(error, match=message):
            model.add_task(NEW, wrong, progress=False)
    assert_state(model, before)
    assert_same(model(**inputs, task="red"), expected, exact=True)
    unrelated = FAMILIES["bert"].make()
    model.add_task(NEW, unrelated, tolerance=0, check_base=False, progress=False)
    assert_same(model.recover(NEW), unrelated.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("red", {}, TaskError, "has a task 'red' already"),
        ("", {}, ConfigError, "non-empty string"),
        ("__base__", {}, ConfigError, "A task cannot be called '__base__': in adapter_names"),
        (NEW, {"tolerance": 1.5}, ConfigError, "tolerance must be a relative error between 0 and 1, not 1.5"),
        (NEW, {"tolerance": "0"}, ConfigError, "tolerance must be"),
        (NEW, {"base": "folder"}, ConfigError, "base= is for experts that are adapters"),
    ],
)
def test_wrong_requests(name, options, error, message):
    model, new, _ = build()
    before = state(model)
    with pytest.raises(error, match=message):
        model.add_task(name, new, progress=False, **options)
    assert_state(model, before)


def test_weights_that_are_not_there_are_not_built_on():
    model, new, _ = build()
    layer = model.get_base_model().encoder.layer[0].output.dense
    layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
    with pytest.raises(RetexError, match=r"0\.output\.dense\.weight' of the merged model is quantised"):
        model.add_task(NEW, new, progress=False)
    assert model.tasks == OLD


def test_deleting_what_cannot_be_deleted():
    model, _, _ = build()
    with pytest.raises(TaskError, match=r"Unknown task 'blue'; the tasks are \['red', 'green'\]"):
        model.delete_task(NEW)
    model.delete_task("red")
    with pytest.raises(TaskError, match="'green' is the only task"):
        model.delete_task("green")
    assert model.tasks == ["green"]


# ---- bookkeeping -----------------------------------------------------------------------------------------------------


def test_a_pinned_task_is_unpinned_when_it_goes():
    model, _, family = build(feature_layer=0)
    model.set_adapter("red")
    model.delete_task("green")
    assert model.active_adapter == "red"
    model, _, family = build(feature_layer=0, signatures="inputs")
    model.set_adapter("red")
    model.delete_task("red")
    assert model.active_adapter is None
    with pytest.raises(RetexError, match="no task signatures"):
        model(**family.inputs(2))


def test_a_task_is_not_pinned_while_it_goes():
    model, _, _ = build()
    with ThreadPoolExecutor(1) as pool:
        with model._change.lock:  # as a change that is just being made
            pinned = pool.submit(model.set_adapter, "red")
            wait([pinned], timeout=0.1)
            assert model.active_adapter is None
        pinned.result()
    assert model.active_adapter == "red"


def test_recipe_and_evaluation(classifiers):
    model, experts, folder = classifiers
    built = copy.deepcopy(model.recipe)
    model.evaluation = {"accuracy": 1.0}
    model.add_task(NEW, folder / NEW, tolerance=0.5, progress=False)
    assert model.evaluation is None
    added = {"add": NEW, "expert": str(folder / NEW), "tolerance": 0.5}
    assert dict(model.recipe) == {**built, "changes": [added]}
    model.delete_task("red")
    assert model.recipe["changes"] == [added, {"remove": "red"}]
    assert "red" not in {**model.retex_config.experts, **model.retex_config.labels, **model.heads}
    model.add_task("purple", experts["red"], progress=False)
    assert model.recipe is None


def test_what_was_recovered_before_is_not_used_again():
    model, new, family = build()
    inputs = family.inputs(ROWS)
    expected = {task: model(**inputs, task=task).last_hidden_state for task in OLD}
    model.delete_task("red")
    assert torch.equal(model(**inputs, task=["green"] * ROWS).last_hidden_state, expected["green"])
    model.add_task(NEW, new, progress=False)
    assert_same(model(**inputs, task=NEW), new(**inputs), **CLOSE)
    twin = copy.deepcopy(model)
    twin.delete_task(NEW)
    assert model.tasks == ["green", NEW] and twin.tasks == ["green"]


@torch.no_grad()
def test_calls_beside_a_change_see_the_old_model_or_the_new_one():
    model, new, family = build(rank=3)
    inputs = family.inputs(ROWS)
    expected = {task: model(**inputs, task=task).last_hidden_state for task in OLD}
    stop = threading.Event()

    def call() -> int:
        calls = 0
        while not stop.is_set():
            for task in ("green", ["green"] * ROWS):
                torch.testing.assert_close(model(**inputs, task=task).last_hidden_state, expected["green"], **CLOSE)
            calls += 1
        return calls

    with ThreadPoolExecutor(3) as pool:
        callers = [pool.submit(call) for _ in range(3)]
        try:
            for _ in range(3):
                model.add_task(NEW, new, progress=False)
                model.delete_task("red")
                model.add_task("red", new, progress=False)
                model.delete_task(NEW)
        finally:
            stop.set()
        assert all(caller.result() > 0 for caller in callers)
    assert model.tasks == ["green", "red"]


@torch.no_grad()
def test_a_call_goes_on_with_the_model_it_began_with():
    model, _, _ = build(feature_layer=0)
    changes = []
    # Hooks act on the copies that are made afterwards: this one runs while rows are being identified.
    model.get_base_model().encoder.layer[0].register_forward_hook(lambda *_: changes.pop()() if changes else None)
    model.fit_signatures({task: [words(task, 16)] for task in OLD}, progress=False)
    inputs = {name: torch.cat([words(task, 3)[name] for task in OLD]) for name in words("red", 1)}
    expected = model(**inputs)
    assert set(expected.routing.tasks) == set(OLD)
    changes.append(lambda: model.delete_task("red"))
    found = model(**inputs)
    assert not changes and model.tasks == ["green"]
    assert found.routing.tasks == expected.routing.tasks
    assert_same(found, expected, exact=True)
    assert model(**inputs).routing.tasks == ["green"] * 6


def test_two_changes_at_once_do_not_undo_each_other():
    model, new, _ = build(feature_layer=0)
    model.fit_signatures({task: [words(task, 8)] for task in OLD}, progress=False)
    started, go_on = threading.Event(), threading.Event()

    def batches():
        started.set()
        assert go_on.wait(60)
        yield words(NEW, 8)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(model.add_task, NEW, new, references=batches(), progress=False)
        assert started.wait(60)
        model.delete_task("red")
        go_on.set()
        with pytest.raises(RetexError, match="changed by another thread meanwhile"):
            slow.result()
    assert model.tasks == ["green"]


# ---- adapters --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_expert_given_as_adapter(tmp_path):
    base = FAMILIES["gpt2"].make().eval()
    model, _ = build_from(base, {task: perturb(base, seed) for seed, task in enumerate(OLD)}, rank=3)
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match="is an adapter: say with base= which model it was trained on"):
        model.add_task(NEW, tmp_path / "adapter", progress=False)
    model.recipe = RecipeRecord({"base": str(tmp_path / "base")})  # which the artifact's author chose, not the caller
    with pytest.raises(CheckpointError, match=r"say with base= which model it was trained on \(the recipe names "):
        model.add_task(NEW, tmp_path / "adapter", progress=False)
    model.recipe = None
    model.add_task(NEW, tmp_path / "adapter", base=tmp_path / "base", tolerance=0, progress=False)
    inputs = tokens(ROWS)
    expected = adapted.merge_and_unload()(**inputs).logits
    torch.testing.assert_close(model(**inputs, task=NEW).logits, expected, **CLOSE)
