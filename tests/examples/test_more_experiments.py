"""Experiments on ReTeX itself: what is measured, by value, and every script from its command line to its table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import ablations
import corrupted
import flips
import identifiers
import identify
import measuring
import merges
import numpy as np
import pytest
import torch
import unseen
import yaml
from experiment import Study
from families import FAMILIES
from helpers import perturb
from mirror import write_mirror
from PIL import Image
from recipes import Recipe, read_recipe

from retex_hf import RetexModel
from retex_hf.baselines import expert_weights
from retex_hf.baselines.retex import Retex
from retex_hf.data.readout import Classifier
from retex_hf.errors import ConfigError, InputError
from retex_hf.evaluation import Material, TaskData
from retex_hf.evaluation.run import evaluate

TASKS = ["low", "middle", "high"]


def collate(rows):
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def token_rows(number, count, seed):
    """Rows of one task: tokens of a range that overlaps with its neighbours', of several lengths."""
    rng = np.random.default_rng([number, seed])
    return [rng.integers(3 + 9 * number, 19 + 9 * number, size=4 + row % 4).tolist() for row in range(count)]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    """Three small classifiers; the right answers are those of the experts, so that an expert is always right."""
    torch.manual_seed(0)
    base = FAMILIES["bert-classifier"].make().eval()
    experts = {task: perturb(base, seed, scale=1.0) for seed, task in enumerate([*TASKS, "other"], start=1)}
    folder = tmp_path_factory.mktemp("models")
    for name, model in {"base": base, **experts}.items():
        model.save_pretrained(folder / name)
    parts = {}
    for part, (seed, count) in {"train": (0, 20), "validation": (1, 8), "test": (2, 12)}.items():
        for number, task in enumerate(experts):
            rows = token_rows(number % 3, count, seed)
            with torch.inference_mode():
                answers = experts[task](**collate(rows)).logits.argmax(-1).tolist()
            parts[part, task] = TaskData(task, rows, answers)

    def material(tasks):
        chosen = [{task: parts[part, task] for task in tasks} for part in ("train", "validation")]
        return Material(folder / "base", {task: folder / task for task in tasks}, *chosen, collate, Classifier())

    return Study(
        Recipe(config={"rank": 4, "num_reference": 8}, batch_size=5),
        material(TASKS),
        [parts["test", task] for task in TASKS],
        material(["other"]),
        (parts["test", "other"],),
    )


def build(study: Study, **options) -> RetexModel:
    model = RetexModel.from_experts(
        study.material.base, study.material.experts, study.config(**options), progress=False
    )
    measuring.fit_signatures(model, study)
    return model


# What is measured


def test_rows_agree_with_the_mixed_stream(study):
    model = build(study)
    method = Retex(model=model)
    method.fit(study.material)
    expected = evaluate(method, study.tests, collate, batch_size=7, progress=False)
    known = measuring.recovered(model, study)
    unknown = measuring.routed(model, study, known)
    for task in TASKS:
        assert (known[task].correct == expected.scores["known"][task].correct).all()
        assert (unknown[task].correct == expected.scores["unknown"][task].correct).all()
        assert (unknown[task].identified == expected.scores["unknown"][task].identified).all()
    shares = [score.correct.mean() for score in known.values()]
    assert min(shares) > 0 and max(shares) < 1  # rank 4 loses something, or this test would show nothing


def test_experts_are_the_measure(study):
    experts = measuring.individual(study)
    assert all(score.correct.all() for score in experts.scores["known"].values())
    base = FAMILIES["bert-classifier"].make()
    body = sum(p.numel() for name, p in base.named_parameters() if not name.startswith("classifier"))
    assert experts.storage_bytes == 3 * 4 * body


def test_gather_keeps_the_order_of_the_inputs():
    rows = [[5] * length for length in (3, 1, 4, 1, 5, 9, 2, 6)]
    found = measuring.gather(lambda batch: batch["attention_mask"].sum(1), rows, collate, 3)
    assert found.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]


# Ablations


def test_point_of_full_rank_is_the_expert(study):
    found = ablations.measure(study, ablations.Point("", 0, {"rank": "full"}, routed=True))
    record = ablations.as_record(ablations.Point("", 0, {}), found, measuring.individual(study))
    assert record["known"] == 1
    assert record["relative_error"] < 1e-6
    assert record["unknown"] == pytest.approx(record["identified"])  # every identified row is right


def test_storage_of_a_point(study):
    point = ablations.Point("", 4, {"rank": 4})
    record = ablations.as_record(point, ablations.measure(study, point), measuring.individual(study))
    numbers = build(study, rank=4).recovery.stored_numbers()
    assert record["storage"] == pytest.approx(numbers / (3 * expert_weights(study.material).numbers()))


def test_axis_is_measured_once(study, tmp_path, monkeypatch):
    axis = ablations.embedding_axis(study)
    assert {point.x for point in axis.points} == {1, 2, 3}
    first = ablations.measure_axis(study, tmp_path, axis)
    monkeypatch.setattr(ablations, "measure", lambda *_: pytest.fail("a finished cell was measured again"))
    assert ablations.measure_axis(study, tmp_path, axis) == first
    errors = {record["x"]: record["relative_error"] for record in first}
    assert errors[1] > errors[2]
    assert errors[2] == pytest.approx(errors[3], rel=1e-5)  # T - 1 dimensions and the bias carry T tasks


def test_point_over_the_budget_of_a_recipe(study):
    study = replace(study, recipe=replace(study.recipe, config={"storage": 0.5, "num_reference": 8}))
    found = ablations.measure(study, ablations.Point("", 0, {"rank": 2, "share_layers": True}))
    assert found.state["relative_error"] > 0


def test_unknown_axis_is_refused(study, tmp_path):
    with pytest.raises(ConfigError, match="no axis with 'width' in its name; the axes are merge, embedding"):
        ablations.chosen_axes(study, tmp_path, "width", 10, ["average"])


# Merges


def test_learned_merges_have_numbers_and_are_learned_once(study, tmp_path, monkeypatch):
    quick = {**merges.MERGES["AdaMerging"], "steps": 2}
    monkeypatch.setitem(merges.MERGES, "AdaMerging", quick)
    found = merges.learn_merges(study, tmp_path)
    assert list(found) == list(merges.MERGES)
    assert set(found["AdaMerging"]["coefficients"]) == set(TASKS)
    assert 0 < found["consensus"]["scale"] <= 1
    for merge in found.values():
        build(study, merge=merge)
    monkeypatch.setattr(merges, "learned_merge", lambda *_: pytest.fail("a finished merge was learned again"))
    assert merges.learn_merges(study, tmp_path) == found


# Identification


def test_residual_sees_what_means_do_not():
    generator = torch.Generator().manual_seed(0)

    def along(axis, count):  # two tasks of mean zero that vary in different directions
        rows = 0.01 * torch.randn(count, 4, generator=generator)
        rows[:, axis] += 3 * (-1) ** torch.arange(count)
        return rows

    references, test = [along(0, 32), along(1, 32)], [along(0, 50), along(1, 50)]
    assert identifiers.identified(identifiers.by_residual(references, 1), test) == 1
    assert identifiers.identified(identifiers.by_mean(references), test) < 0.8


def test_regression_is_at_its_minimum():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 5, generator=generator) * torch.tensor([1.0, 10.0, 0.1, 1.0, 1.0]) + 3
    labels = torch.randint(3, (60,), generator=generator)
    score = identifiers.fit_linear(features, labels, 3, penalty=0.1)
    # The function is affine: read its weights off, on standardised features.
    scaled = (features - features.mean(0)) / features.std(0, unbiased=False)
    mean, deviation = features.mean(0), features.std(0, unbiased=False)
    bias = score(mean[None])[0]
    weight = torch.stack([score((mean + deviation * unit)[None])[0] - bias for unit in torch.eye(5)], 1)
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(scaled @ weight.T + bias, labels) + 0.05 * weight.square().sum()
    loss.backward()
    assert weight.grad.abs().max() < 1e-3 and bias.grad.abs().max() < 1e-3
    assert weight.abs().max() > 0.05


def test_table_of_features_agrees_with_the_model(study, tmp_path):
    pool, test = identify.stored_features(study, tmp_path, "average", "average", 8)
    block = identify.chosen_block(pool)
    # The rule of the script.
    model = build(study, feature_layer=block, identification="residual", signature_rank=identify.RANK)
    assert block == model.signatures.feature_layer
    rule = identifiers.by_residual(identify.first(pool[block], 8), identify.RANK)
    known = measuring.recovered(model, study)
    expected = measuring.routed(model, study, known)
    shares = [score.identified.mean() for score in expected.values()]
    assert identifiers.identified(rule, test[block]) == pytest.approx(np.mean(shares))
    evaluation = measuring.Evaluation("ReTeX", {"known": known, "unknown": expected}, 0)
    experts = measuring.individual(study)
    assert identify.unknown_accuracy(rule, test[block], evaluation, experts) == pytest.approx(
        measuring.normalised_accuracy(evaluation, "unknown", experts)
    )
    again, _ = identify.stored_features(replace(study, tests=study.tests), tmp_path, "average", "average", 8)
    assert torch.equal(again[block][0], pool[block][0])


def test_draws_differ_but_stay_in_the_pool():
    pool = [torch.arange(20.0).view(20, 1)]
    draws = [identify.drawn(pool, 8, draw)[0].flatten().tolist() for draw in range(3)]
    assert draws[0] == list(range(8))
    assert all(len(set(draw)) == 8 and set(draw) <= set(range(20)) for draw in draws)
    assert draws[1] != draws[2]


# Unseen tasks


def test_taken_heads_show_what_enters_them(study):
    model, rows = build(study), study.tests[0].inputs[:6]
    mixture = torch.softmax(torch.randn(6, 3), 1)
    with torch.inference_mode():
        hard = {task: model(**collate(rows), task=task).logits for task in TASKS}
        soft = model(**collate(rows), task=mixture).logits
    heads = unseen.take_heads(model)
    with torch.inference_mode():
        for task in TASKS:
            features = model(**collate(rows), task=task).logits
            assert features.shape == (6, 16)
            torch.testing.assert_close(heads[task](features), hard[task], rtol=1e-4, atol=1e-5)
        features = model(**collate(rows), task=mixture).logits
    for row, task in enumerate(mixture.argmax(1).tolist()):  # the library reads a mixture under its likeliest head
        torch.testing.assert_close(heads[TASKS[task]](features[row]), soft[row], rtol=1e-4, atol=1e-5)


def test_ways_of_mixing(study):
    body = unseen.Body(study, build(study), probe_rows=8)
    test = study.tests[0]
    hard, cold, hot = (body.mixture("test", test, how) for how in (unseen.HARD, 1e-4, 1e4))
    torch.testing.assert_close(hard, cold)
    torch.testing.assert_close(hot, torch.full_like(hot, 1 / 3), rtol=1e-2, atol=1e-2)
    residuals = body.residuals("test", test)
    odds = body.mixture("test", test, 1.0).log()
    torch.testing.assert_close(odds[:, 0] - odds[:, 1], (residuals[:, 1] - residuals[:, 0]) / body.gap)


def test_seen_accuracy_is_that_of_the_chosen_body(study):
    model = build(study)
    with model.disable_adapter(), torch.inference_mode():
        alone = {t.name: model(**collate(t.inputs), task=t.name).logits.argmax(-1) for t in study.tests}
    expected = {t.name: (alone[t.name] == torch.tensor(t.answers)).float().mean().item() for t in study.tests}
    full = unseen.Body(study, build(study, rank="full"), probe_rows=8)
    assert unseen.Body(study, model, probe_rows=8).seen(unseen.ALONE) == pytest.approx(expected)
    identified = {t.name: full.mixture("test", t, unseen.HARD)[:, TASKS.index(t.name)] for t in study.tests}
    for task, share in full.seen(unseen.HARD).items():  # rows of the right expert are right; others may be
        assert share >= identified[task].mean().item()
    assert full.unseen(unseen.HARD).keys() == {"other"}


def test_experts_themselves_are_right(study):
    assert unseen.experts_themselves(study) == {"seen": dict.fromkeys(TASKS, 1.0), "unseen": {"other": 1.0}}


# Flips


def test_flips_between_expert_and_merged_model(study):
    expert = flips.Expert(study, "low", 8)
    weights = expert_weights(study.material)
    merged = weights.module({n: b + weights.vectors[n].mean(0) for n, b in weights.base.items()}, "low")
    with torch.inference_mode():
        expected = (merged(**collate(expert.inputs)).logits.argmax(-1) != torch.tensor(expert.own)).float().mean()
    (nothing, one) = expert.towards_merged((0.0, 1.0))
    assert nothing == [0.0, 0.0]
    assert one == [1.0, pytest.approx(expected.item())]
    assert expert.plane((0.0,)) == [[0.0]]


def test_random_direction_is_as_long_as_the_difference(study):
    expert = flips.Expert(study, "middle", 4)
    direction = flips.random_direction(expert.difference, expert.learned, 0)
    assert set(direction) == set(expert.body)
    for name, tensor in direction.items():
        torch.testing.assert_close(tensor.norm(), expert.difference[name].norm())
    moved = flips.move(expert.body, [(0.25, direction)])
    assert flips.distance(moved, expert.body, expert.merged) == pytest.approx(0.25, rel=1e-4)
    assert flips.distance(expert.merged, expert.body, expert.merged) == pytest.approx(1)


def test_full_rank_flips_nothing(study):
    found = flips.at_rank(study, "full", 8)
    assert all(reached < 1e-5 and rate == 0 for reached, rate in found.values())
    low = flips.at_rank(study, 1, 8)
    assert all(low[task][0] > 0.1 for task in TASKS)


def test_buffers_are_not_moved_at_random(study):
    expert = flips.Expert(study, "low", 4)
    assert "variance" not in flips.random_direction({**expert.difference, "variance": torch.ones(3)}, expert.learned, 0)


# Corruptions


def test_corrupted_task_keeps_its_answers_and_kind():
    images = list(np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8))
    arrays = corrupted.corrupted_task(TaskData("shapes", images, [0, 1, 2]), "gaussian", 3, seed=0)
    pictures = corrupted.corrupted_task(
        TaskData("shapes", [Image.fromarray(image) for image in images], [0, 1, 2]), "gaussian", 3, seed=0
    )
    assert arrays.answers == [0, 1, 2]
    for array, picture, image in zip(arrays.inputs, pictures.inputs, images, strict=True):
        assert (array == np.asarray(picture)).all()
        assert (array != image).any()
    alone = corrupted.corrupted_task(TaskData("shapes", images[:1], [0]), "gaussian", 3, seed=0)
    assert (alone.inputs[0] == arrays.inputs[0]).all()


def test_texts_are_corrupted_as_texts_only():
    news = TaskData("news", ["where is the dog now"], [0])
    assert corrupted.corrupted_task(news, "truncation", 3, seed=0).inputs == ["where is"]
    with pytest.raises(InputError, match="Task 'news': corruption 'jpeg' needs images, and input 0 is a str"):
        corrupted.corrupted_task(news, "jpeg", 1, seed=0)


# From the command line


@pytest.fixture
def command(tmp_path, dataset_cache, monkeypatch):
    """Runs a script on a mirrored recipe of three tasks and an unseen one; returns what it wrote."""

    def make(kind: str):
        data = {task: {"path": f"org/data-{task}"} for task in "abcu"}
        if kind != "zero_shot":
            data = {task: {**source, "input": "{text} ?"} for task, source in data.items()}
        readout = {"kind": kind, "max_new_tokens": 2} if kind == "generate" else kind
        recipe = {
            "base": "org/base",
            "experts": {task: f"org/{task}" for task in "abcu"},
            "data": data,
            "readout": readout,
            "tasks": ["a", "b", "c"],
            "unseen": ["u"],
            "config": {"rank": 4},
        }
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        write_mirror(read_recipe(file), tmp_path / "hub")

        def call(script, *flags):
            options = ["--recipe", file, "--work-dir", tmp_path / "work", "--mirror", tmp_path / "hub", "--rows", 4]
            monkeypatch.setattr(sys, "argv", list(map(str, ["script", *options, *flags])))
            script.main()
            return tmp_path / "work"

        return call

    return make


def test_images_from_the_command_line(command):
    call = command("zero_shot")
    work = call(corrupted, "--kinds", "jpeg", "contrast", "--severities", 2, "--merges", "average")
    rows = json.loads((work / "corrupted.json").read_text())["rows"]
    assert [(row["kind"], row["severity"]) for row in rows] == [("clean", 0), ("jpeg", 2), ("contrast", 2)]
    for row in rows:
        assert row["ReTeX, task unknown"] <= row["task identified"]
        assert {"ReTeX, oracle", "average, head given", "average, task unknown"} <= set(row)
    work = call(unseen, "--merges", "average", "--temperatures", 1, "--only", "merges")
    table = (work / "unseen_merges.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines()[6:] if line] == [
        "| individual",
        "| pre-trained",
        "| average",
        "| average + ReTeX, hard",
        "| average + ReTeX, soft, tau 1",
    ]
    for name in ("corrupted.png", "unseen_merges.png"):
        assert Image.open(work / name).size[0] > 500


def test_classifiers_from_the_command_line(command, monkeypatch):
    chosen = {name: unseen.SAMPLERS[name] for name in ("single tasks", "Dirichlet(1)")}
    monkeypatch.setattr(unseen, "SAMPLERS", chosen)
    call = command("classifier")
    work = call(identify, "--sources", "pretrained", "TIES")
    layers = json.loads((work / "identify_layers.json").read_text())
    assert list(layers) == ["command", "pretrained", "TIES"]
    rules = json.loads((work / "identify_methods.json").read_text())
    assert rules["rules"][-1]["rule"] == "weights, centred on a pool"
    assert np.trace(rules["confusion"]) / 3 == pytest.approx(rules["rules"][0]["identified"])
    call(unseen, "--only", "samplers", "--probe-rows", 6)
    samplers = json.loads((work / "unseen_samplers.json").read_text())
    assert samplers["soft, solved for Dirichlet(1)"].keys() == {"seen", "unseen"}
    for name in ("layers", "references", "subspace", "methods"):
        assert (work / f"identify_{name}.png").is_file() and (work / f"identify_{name}.md").is_file()


def test_generators_from_the_command_line(command, monkeypatch):
    monkeypatch.setattr(ablations, "SEEDS", (0, 1))
    monkeypatch.setattr(flips, "PLANE", (-1.0, 1.0))
    monkeypatch.setattr(flips, "RANKS", (2,))
    for name in ("DISTANCES", "RANDOM_DISTANCES"):
        monkeypatch.setattr(flips, name, (0.5, 1.0))
    call = command("generate")
    work = call(flips)
    found = json.loads((work / "flips.json").read_text())
    assert set(found) == {"command", "a", "b", "c", "rank 2"}
    assert (work / "flips_landscape.png").is_file()
    work = call(ablations, "--only", "seeds")
    points = json.loads((work / "ablation_seeds.json").read_text())["points"]
    assert [point["x"] for point in points] == [0, 1]
    assert len({point["relative_error"] for point in points}) == 1  # the exact solution has no seed
