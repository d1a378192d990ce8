"""Recipes, resumable cells, and whole experiments on mirrored Hub recipes with small random models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from cells import run_cells
from common import Task
from experiment import RECIPES, MethodSpec, Study, lines_figure, load, markdown_table, pack, unpack
from mirror import ROWS, write_mirror
from recipes import Recipe, parse_recipe, read_recipe

from retex_hf.errors import ConfigError, InputError
from retex_hf.evaluation import Method
from retex_hf.evaluation.run import Evaluation, TaskScore

NAMED = {"base": "b", "experts": {"x": "org/x", "y": "org/y"}, "data": {"x": "org/dx", "y": {"path": "org/dy"}}}


def small_recipe(name: str, tasks: int) -> Recipe:
    """A shipped recipe file, on its first tasks."""
    recipe = read_recipe(RECIPES / f"{name}.yaml")
    return Recipe(**{**vars(recipe), "tasks": list(recipe.experts)[:tasks], "sizes": [], "config": {}})


def two_methods() -> list[Method]:
    """The experts, and an exact ReTeX."""
    return [MethodSpec.parse(entry, {}).make() for entry in ({"individual": {}}, {"ReTeX": {"rank": "full"}})]


@pytest.fixture
def study_of(tmp_path, dataset_cache):
    def make(name: str, tasks: int = 3) -> Study:
        recipe = small_recipe(name, tasks)
        shown = {task: recipe.experts[task] for task in recipe.tasks}
        write_mirror(Recipe(**{**vars(recipe), "experts": shown}), tmp_path / "hub")
        return load(recipe, tmp_path / "work", mirror=tmp_path / "hub")

    return make


# Recipes


def test_every_shipped_recipe_is_valid():
    files = sorted(RECIPES.glob("*.yaml"))
    assert {"clip-vit-b32-8", "clip-vit-b32-14", "clip-vit-b32-20", "flan-t5-base-glue", "gpt2-glue", "text8"} <= {
        file.stem for file in files
    }
    for file in files:
        read_recipe(file)


def test_growing_clip_recipes_begin_alike():
    eight, twenty = (read_recipe(RECIPES / f"clip-vit-b32-{count}.yaml") for count in (8, 20))
    assert len(eight.experts) == 8 and len(twenty.experts) == 20
    assert list(eight.experts.items()) == list(twenty.experts.items())[:8]
    assert all(eight.data[task] == twenty.data[task] for task in eight.experts)
    assert twenty.sizes == [8, 14, 20]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"suite": "text", "rowz": 5}, "has no key 'rowz'"),
        ({"suite": "audio"}, "suite must be one of"),
        ({"suite": "text", "rows": 0}, "rows must be a positive integer, not 0"),
        ({"suite": "text", "base": "org/base"}, "it excludes base"),
        ({"suite": "text", "readout": "classifier"}, "it excludes readout"),
        (
            {**NAMED, "data": {"x": {"path": "p", "templates": ["{}"]}, "y": "q"}},
            "templates of task 'x' are for zero_shot",
        ),
        ({"base": "org/base"}, "needs a suite, or base, experts and data"),
        ({**NAMED, "tasks": ["x", "z"]}, "experts has no entry for task 'z'"),
        ({**NAMED, "sizes": [3]}, "sizes has 3, but there are 2 tasks"),
        ({**NAMED, "unseen": ["w"]}, "data has no entry for the unseen task 'w'"),
        ({**NAMED, "data": {"x": {"path": "p", "colour": 1}, "y": "q"}}, "data of task 'x' has no key 'colour'"),
        ({**NAMED, "data": {"x": {"path": "p", "classes": [0, 1]}, "y": "q"}}, "classes must be a list of texts"),
        ({**NAMED, "data": {"x": {"path": "p", "input": ["a"]}, "y": "q"}}, "input must be a column"),
        ({**NAMED, "readout": "regression"}, "kind of readout must be one of"),
        ({**NAMED, "readout": {"kind": "classifier", "templates": []}}, "readout has no key 'templates'"),
        ({**NAMED, "config": {"ranks": 3}}, "config has no key 'ranks'"),
        ({**NAMED, "config": {"rank": -1}}, "RetexConfig.rank must be"),
        ({**NAMED, "methods": [{"a": {}, "b": {}}]}, "methods must be a list of names"),
        ({**NAMED, "settings": {"WEMoE": 3}}, "settings must be a mapping of names to options"),
        ("text", "must hold keys and values"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(values, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        parse_recipe(values)
    assert "\n" not in str(error.value)


def test_a_recipe_like_another_has_its_data_and_other_models():
    small, large = (read_recipe(RECIPES / f"clip-vit-{kind}-14.yaml") for kind in ("b32", "l14"))
    assert large.base == "openai/clip-vit-large-patch14" and large.experts.keys() == small.experts.keys()
    assert large.experts["dtd"] == "tanganke/clip-vit-large-patch14_dtd"
    assert replace(large, base=small.base, experts=small.experts) == small


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"like": 3}, "like must be a file name"),
        ({"like": "clip-vit-b32-8.yaml", "rename": {"a": 1}}, "rename a mapping of texts"),
        ({"like": "text8.yaml"}, "text8.yaml must be a recipe with base and experts"),
        ({"like": "clip-vit-l14-8.yaml"}, "and not like another"),
        ({"like": "none.yaml"}, "none.yaml does not exist"),
    ],
)
def test_a_recipe_like_none_is_one_sentence(values, sentence, tmp_path):
    for file in RECIPES.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    (tmp_path / "own.yaml").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        read_recipe(tmp_path / "own.yaml")


def test_methods_of_a_recipe_become_specs():
    config = {"rank": 4}
    spec = MethodSpec.parse({"ReTeX": {"merge": "ties"}}, config)
    assert (spec.label, spec.options) == ("ReTeX, merge ties", {"rank": 4, "merge": "ties"})
    assert spec.make().config.rank == 4 and spec.make().name == "ReTeX, merge ties"
    assert MethodSpec.parse({"merged": {"merge": "ties", "label": "TIES"}}, config).make().name == "TIES"
    with pytest.raises(ConfigError, match="There is no method 'magic'"):
        MethodSpec.parse({"magic": {}}, config)
    with pytest.raises(ConfigError, match=r"Method 'merged': .*'strength'"):
        MethodSpec.parse({"merged": {"strength": 1}}, config)


def test_methods_of_the_main_table_run_as_their_authors_run_them_unless_a_recipe_says_otherwise():
    from main_table import methods, trimmed

    def options(recipe: Recipe) -> dict[str, dict]:
        return {spec.label: spec.options for spec in (MethodSpec.parse(entry, {}) for entry in methods(recipe))}

    plain = options(parse_recipe({"suite": "text"}))
    assert plain["AdaMerging"] == {"merge": {"method": "adamerging"}} and plain["WEMoE"] == {"remember": True}
    assert plain["TIES"]["merge"] == plain["ReTeX on TIES"]["merge"] == {"method": "ties", "scale": "auto"}
    for name in ("average", "task arithmetic", "TIES", "consensus", "AdaMerging"):
        assert plain[f"{name}, identified head"] == {**plain[name], "head": "identifier"}
    recipe = parse_recipe({"suite": "text", "settings": {"AdaMerging": {"steps": 7}, "WEMoE": {"steps": 9}}})
    fewer = options(recipe)
    quick = {"method": "adamerging", "steps": 7}
    assert fewer["AdaMerging"]["merge"] == fewer["ReTeX on AdaMerging"]["merge"] == quick
    assert fewer["AdaMerging++"]["merge"] == trimmed(recipe) == {**quick, "trim": True}
    assert fewer["WEMoE"] == {"remember": True, "steps": 9}
    changed = {label for label in plain if plain[label] != fewer[label]}
    assert changed == {
        "AdaMerging", "AdaMerging++", "AdaMerging, identified head", "ReTeX on AdaMerging", "WEMoE"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="settings of 'WeMoE', which is none of"):
        methods(parse_recipe({"suite": "text", "settings": {"WeMoE": {}}}))


def test_rows_to_calibrate_retex_on_are_an_option():
    spec = MethodSpec.parse({"ReTeX": {"merge": "consensus", "calibration_rows": 7}}, {"rank": 4})
    assert spec.make().calibration_rows == 7 and spec.make().config.merge == "consensus"


# Cells


def test_cells_are_computed_once_and_anew_when_what_they_depend_on_changes(tmp_path):
    calls = []

    def cell(value):
        return lambda: calls.append(value) or {"value": value}

    cells = {"a": cell(1), "b": cell(2)}
    assert run_cells(tmp_path, cells, {"rows": 5}, progress=False) == {"a": {"value": 1}, "b": {"value": 2}}
    assert run_cells(tmp_path, cells, {"rows": 5}, progress=False) == {"a": {"value": 1}, "b": {"value": 2}}
    assert calls == [1, 2]
    run_cells(tmp_path, cells, {"rows": 6}, progress=False)
    assert calls == [1, 2, 1, 2]
    run_cells(tmp_path, cells, {"rows": 5}, built={"a": "x", "b": "y"}, progress=False)
    run_cells(tmp_path, cells, {"rows": 5}, built={"a": "x", "b": "z"}, progress=False)
    assert calls == [1, 2, 1, 2, 1, 2, 2]


def test_an_interrupted_run_goes_on(tmp_path):
    calls = []

    def broken():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(tmp_path, {"a": lambda: calls.append("a") or 1, "b": broken}, progress=False)
    done = run_cells(tmp_path, {"a": lambda: calls.append("a") or 1, "b": lambda: 2}, progress=False)
    assert done == {"a": 1, "b": 2} and calls == ["a"]
    assert not list(tmp_path.glob("*.partial"))


def test_only_computes_what_is_asked_for(tmp_path):
    cells = {"ReTeX on ties": lambda: 1, "average": lambda: 2}
    assert run_cells(tmp_path, cells, only="ReTeX", progress=False) == {"ReTeX on ties": 1}
    assert run_cells(tmp_path, cells, only="average", progress=False) == {"ReTeX on ties": 1, "average": 2}


def test_evaluations_survive_their_cell():
    scores = {
        "known": {"x": TaskScore(np.array([True, False, True]))},
        "unknown": {"x": TaskScore(np.array([False, False, True]), np.array([True, False, True]))},
    }
    evaluation = Evaluation("m", scores, 12, {"rank": 3}, seed=4)
    found = unpack(json.loads(json.dumps(pack(evaluation))))
    assert (found.method, found.storage_bytes, found.state, found.seed) == ("m", 12, {"rank": 3}, 4)
    assert found.scores["known"]["x"].correct.tolist() == [True, False, True]
    assert found.scores["known"]["x"].identified is None
    assert found.scores["unknown"]["x"].identified.tolist() == [True, False, True]


def test_tables_and_figures():
    assert markdown_table(["a", "b"], [["x", 0.5], ["y", None]]).splitlines()[2:] == ["| x | 0.500 |", "| y |  |"]
    figure = lines_figure({"p": {"m": ([1, 2], [0.1, 0.2])}, "q": {"n": ([1], [0.3])}}, "tasks", "accuracy")
    assert [axes.get_title() for axes in figure.axes] == ["p", "q"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["m", "n"]


# Hub recipes, on a mirror


def test_zero_shot_recipe_runs_end_to_end_on_a_mirror(study_of, tmp_path):
    study = study_of("clip-vit-b32-8")
    assert study.tasks == ["sun397", "stanford-cars", "resisc45"]
    assert [len(test) for test in study.tests] == [ROWS] * 3
    assert study.tests[0].label_names == ["red fox", "green tree", "blue sea"]  # the data set's own, in words
    assert study.tests[2].label_names[2] == "baseball diamond"  # the recipe's

    base = tmp_path / "hub/openai/clip-vit-base-patch32"
    clip, tokenizer = tf.CLIPModel.from_pretrained(base).eval(), tf.AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        sentences = ["a photo of a green tree.", "a photo of the green tree."]
        tokens = tokenizer(sentences, padding=True, return_tensors="pt")
        embeddings = clip.get_text_features(**tokens).pooler_output
        head = torch.nn.functional.normalize(embeddings, dim=-1).mean(0)
        torch.testing.assert_close(study.material.readout.heads["sun397"][1], head / head.norm())

    individual, retex = (
        MethodSpec.parse(entry, {}).make() for entry in ({"individual": {}}, {"ReTeX": {"rank": "full"}})
    )
    experts, recovered = study.evaluate(individual), study.evaluate(retex)
    for test in study.tests:
        tower = tf.CLIPVisionModel.from_pretrained(study.material.experts[test.name]).eval()
        with torch.no_grad():
            pooled = tower(**study.material.collate(test.inputs)).pooler_output
            images = pooled @ clip.visual_projection.weight.T
        predicted = (images @ study.material.readout.heads[test.name].T).argmax(-1)
        right = (predicted == torch.tensor(test.answers)).tolist()
        assert experts.scores["known"][test.name].correct.tolist() == right
        assert recovered.scores["known"][test.name].correct.tolist() == right
    assert any(score.correct.any() for score in experts.scores["known"].values())
    assert set(recovered.scores) == {"known", "unknown", "oracle"}
    tower.requires_grad_()
    logits = study.material.readout.logits(tower, study.material.collate(test.inputs[:2]), test.name)
    logits.logsumexp(-1).sum().backward()
    assert tower.get_parameter("pre_layrnorm.weight").grad.abs().sum() > 0  # as merges that learn by entropy need


def test_generating_recipe_runs_end_to_end_on_a_mirror(study_of):
    study = study_of("flan-t5-base-glue")
    cola = study.tests[0]
    assert set(cola.answers) <= {"acceptable", "unacceptable"}
    assert cola.inputs[0].startswith('Indicate if the following sentence is grammatically correct or not: "')
    assert cola.inputs[0].endswith("""". Answere 'acceptable' or 'unacceptable'.""")
    individual, retex = (
        MethodSpec.parse(entry, {}).make() for entry in ({"individual": {}}, {"ReTeX": {"rank": "full"}})
    )
    assert study.evaluate(individual).tasks == ["cola", "mnli", "mrpc"]
    unknown = study.evaluate(retex).scores["unknown"]
    assert [len(score.correct) for score in unknown.values()] == [ROWS] * 3
    tokenizer = tf.AutoTokenizer.from_pretrained(study.material.base)
    for test in study.tests:
        expert = tf.T5ForConditionalGeneration.from_pretrained(study.material.experts[test.name]).eval()
        inputs = study.material.collate(test.inputs)
        generated = tokenizer.batch_decode(expert.generate(**inputs, max_new_tokens=10), skip_special_tokens=True)
        tasks = [test.name] * ROWS
        assert individual.predict(inputs, tasks).answers == [text.strip() for text in generated]
        assert retex.predict(inputs, tasks).answers == [text.strip() for text in generated]


def test_classifier_recipe_mixes_single_texts_and_pairs(study_of):
    study = study_of("gpt2-glue")
    assert isinstance(study.tests[0].inputs[0], str) and isinstance(study.tests[1].inputs[0], tuple)
    pair = study.tests[1].inputs[0]
    batch = study.material.collate([study.tests[0].inputs[0], pair])
    tokenizer = tf.AutoTokenizer.from_pretrained(study.material.base)
    ids = tokenizer(*pair)["input_ids"]
    assert batch["input_ids"][1, : len(ids)].tolist() == ids
    evaluation = study.evaluate(MethodSpec.parse({"ReTeX": {"rank": "full"}}, {}).make())
    for test in study.tests:
        expert = tf.GPT2ForSequenceClassification.from_pretrained(study.material.experts[test.name]).eval()
        with torch.no_grad():
            predicted = expert(**study.material.collate(test.inputs)).logits.argmax(-1)
        right = (predicted == torch.tensor(test.answers)).tolist()
        assert evaluation.scores["known"][test.name].correct.tolist() == right


def test_subsets_share_nothing_fitted(study_of):
    study = study_of("gpt2-glue")
    study.material.once("weights", lambda: "fitted")
    part = study.subset(2)
    assert part.tasks == ["cola", "mnli"] and [test.name for test in part.tests] == ["cola", "mnli"]
    assert part.material.shared == {} and study.with_seed(3).material.seed == 3
    assert part.identity("x") != study.identity("x") != study.with_seed(3).identity("x")


def test_other_weights_in_the_same_folder_are_another_study(study_of):
    study = study_of("gpt2-glue", 2)
    before = study.identity("x")
    assert study.identity("x") == before
    expert = tf.GPT2ForSequenceClassification.from_pretrained(study.material.experts["mnli"])
    expert.save_pretrained(study.material.experts["mnli"])
    assert study.identity("x") != before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"test": "nowhere"}, "Task 'cola': split 'nowhere' of .* cannot be read"),
        ({"input": "body"}, "Task 'cola': the data have no column 'body'"),
        ({"input": "Is {body} good?"}, "Task 'cola': no column 'body' for its prompt"),
        ({"label": "target"}, "Task 'cola': .*'target'"),
        ({"classes": ["only"]}, "Task 'cola': label 1 is none of its 1 classes"),
    ],
)
def test_data_that_do_not_fit_the_recipe_are_one_sentence(change, sentence, tmp_path, dataset_cache):
    recipe = small_recipe("gpt2-glue", 2)
    write_mirror(Recipe(**{**vars(recipe), "experts": {t: recipe.experts[t] for t in recipe.tasks}}), tmp_path)
    source = type(recipe.data["cola"])(**{**vars(recipe.data["cola"]), **change})
    wrong = Recipe(**{**vars(recipe), "data": {**recipe.data, "cola": source}})
    with pytest.raises(InputError, match=sentence):
        load(wrong, tmp_path / "work", mirror=tmp_path)


# Experiments


def run_script(monkeypatch, module: str, *arguments: str) -> None:
    script = __import__(module)
    monkeypatch.setattr("sys.argv", [module, *arguments])
    script.main()


def test_main_table_is_written_and_resumed(tmp_path, dataset_cache, monkeypatch, capsys):
    recipe = small_recipe("gpt2-glue", 3)
    write_mirror(Recipe(**{**vars(recipe), "experts": {t: recipe.experts[t] for t in recipe.tasks}}), tmp_path / "hub")
    file = tmp_path / "recipe.yaml"
    data = {task: vars(recipe.data[task]) for task in recipe.tasks}
    values = {
        "base": recipe.base,
        "experts": {task: recipe.experts[task] for task in recipe.tasks},
        "data": {task: {key: value for key, value in source.items() if value} for task, source in data.items()},
        "sizes": [2, 3],
        "seeds": [0, 1],
        "config": {"rank": "full", "num_reference": 8},
        "methods": ["individual", {"merged": {"label": "average"}}, "ReTeX"],
    }
    file.write_text(json.dumps(values), encoding="utf-8")
    arguments = ["--recipe", str(file), "--work-dir", str(tmp_path / "work"), "--mirror", str(tmp_path / "hub")]
    run_script(monkeypatch, "main_table", *arguments)
    first = (tmp_path / "work/main_table.json").read_text(encoding="utf-8")
    cells = {cell: cell.stat().st_mtime_ns for cell in (tmp_path / "work/cells").iterdir()}
    assert len(cells) == 9  # three methods on two numbers of tasks, on all of these under a second seed
    run_script(monkeypatch, "main_table", *arguments)
    assert (tmp_path / "work/main_table.json").read_text(encoding="utf-8") == first
    assert {cell: cell.stat().st_mtime_ns for cell in (tmp_path / "work/cells").iterdir()} == cells
    assert json.loads(first)["command"] == " ".join(["python examples/benchmarks/main_table.py", *arguments])
    results = json.loads(first)["sizes"]["3"]["methods"]
    known = {name: results[name]["modes"]["known"]["accuracy"]["mean"]["value"] for name in results}
    assert known["ReTeX"] == known["individual"]  # exact recovery
    assert results["ReTeX"]["seeds"] == [0, 1] and "std" in results["ReTeX"]["modes"]["unknown"]["normalised"]
    assert json.loads(first)["sizes"]["2"]["methods"]["ReTeX"]["seeds"] == [0]
    check_joining(arguments, tmp_path, monkeypatch)
    page = (tmp_path / "work/main_table.md").read_text(encoding="utf-8")
    assert "| ReTeX | 1.000 | 1.000 |" in page and "- ReTeX minus average: " in page
    assert (tmp_path / "work/main_table.png").stat().st_size > 0


def check_joining(arguments: list[str], folder: Path, monkeypatch) -> None:
    """A run of one method that is joined with the result file of all of them gives their table."""
    whole = json.loads((folder / "work/main_table.json").read_text(encoding="utf-8"))
    (folder / "whole.json").write_text(json.dumps(whole), encoding="utf-8")
    shutil.copytree(folder / "work/cells", folder / "part/cells", ignore=shutil.ignore_patterns("*average*"))
    arguments = [argument.replace(str(folder / "work"), str(folder / "part")) for argument in arguments]
    run_script(monkeypatch, "main_table", *arguments, "--only", "nothing", "--join", str(folder / "whole.json"))
    found = json.loads((folder / "part/main_table.json").read_text(encoding="utf-8"))
    assert found["sizes"] == whole["sizes"] and found["joined"] == [whole["command"]]
    assert {run["method"] for run in found["sizes"]["3"]["evaluations"]} == {"individual", "average", "ReTeX"}


def test_seeds_of_the_main_table_are_those_of_its_recipe():
    from main_table import chosen_seeds

    recipe = parse_recipe({"suite": "text", "seeds": [3, 1, 2]})
    assert chosen_seeds(recipe, None) == [3, 1, 2] and chosen_seeds(recipe, [2, 3]) == [3, 2]
    with pytest.raises(ConfigError, match=r"has no seed 7; its seeds are \[3, 1, 2\]"):
        chosen_seeds(recipe, [7])


def test_further_seeds_may_run_some_methods_only():
    from main_table import named

    specs = [MethodSpec.parse({"merged": {"label": name}}, {}) for name in ("a", "b", "c")]
    assert named(specs, None) == specs and named(specs, ["c", "a"]) == [specs[0], specs[2]]
    with pytest.raises(ConfigError, match="There is no method called 'd'"):
        named(specs, ["d"])


def toy_task(classes: int, rows: int) -> Task:
    labels = [row % classes for row in range(rows)]
    inputs = [f"row {row} of class {label}" for row, label in enumerate(labels)]
    return Task("toy", [f"class {c}" for c in range(classes)], inputs, labels, inputs[::2], labels[::2])


def test_class_groups_are_disjoint_and_whole():
    from fine_grained import class_groups

    task = toy_task(7, 70)
    groups = class_groups(task, 3)
    assert sorted(name for group in groups for name in group.label_names) == sorted(task.label_names)
    assert [len(group.label_names) for group in groups] == [3, 2, 2]
    assert sum(len(group.train_inputs) for group in groups) == 70
    for group in groups:
        for text, label in zip(group.train_inputs, group.train_labels, strict=True):
            assert text.endswith("of " + group.label_names[label])
    with pytest.raises(ConfigError, match="between 2 and 3 groups, not 4"):
        class_groups(task, 4)


def test_reordering_keeps_the_validation_rows_out():
    from common import split_validation
    from seeds import reordered

    task = toy_task(2, 50)
    other = reordered(task, 1)
    assert split_validation(other)[1].train_inputs == split_validation(task)[1].train_inputs
    left, before = split_validation(other)[0], split_validation(task)[0]
    assert left.train_inputs != before.train_inputs and sorted(left.train_inputs) == sorted(before.train_inputs)
    assert all(
        text.endswith(f"class {label}") for text, label in zip(other.train_inputs, other.train_labels, strict=True)
    )


def test_seed_table_has_mean_and_spread():
    from seeds import table

    figures = [{"known": 1.0, "unknown": value, "identified": 0.5} for value in (0.8, 0.9)]
    lines = table({4: {"0": figures[0], "1": figures[1]}}).splitlines()
    assert lines[-1] == "| mean | 1.000 ± 0.000 | 0.850 ± 0.071 | 0.500 ± 0.000 |"
