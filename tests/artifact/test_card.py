"""The model card: what it says, that its code runs, and that what a person wrote into it stays."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
import yaml
from families import FAMILIES, TEXT, VISION, images, tokens
from helpers import TASKS, make_experts, perturb
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.inference._generated import types as hub_types
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from markdown_it import MarkdownIt
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers.pipelines import SUPPORTED_TASKS

import retex_hf
from retex_hf import ArtifactError, RetexConfig, RetexModel
from retex_hf.artifact.card import FIGURES, write_card
from retex_hf.artifact.card import sections as card_sections
from retex_hf.artifact.card.sections import digest, find_sections, replace_sections
from retex_hf.artifact.card.text import plain
from retex_hf.artifact.card.usage import TEXT_TAGS, use_of
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.config import CONFIG_NAME
from retex_hf.evaluation import Report
from retex_hf.evaluation.run import Evaluation, TaskScore

SECTIONS = ["summary", "usage", "tasks", "results", "contents", "figures", "provenance", "recipe"]
STRANGE = [
    "a|b",
    "<script>alert(1)</script>",
    "`ls`",
    "{{ 7*7 }}",
    "_*em*_ [x](y)",
    "<!-- /retex:tasks -->",
    "ünï cödé",
]


def make_classifier(tasks: list[str] = TASKS) -> RetexModel:
    """Text classifiers with 2, 3, 4, ... classes."""
    module = tf.BertModel(tf.BertConfig(**TEXT)).eval()
    experts = {}
    for seed, task in enumerate(tasks, start=1):
        labels = {index: f"{task}-{index}" for index in range(seed + 1)}
        expert = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, id2label=labels))
        expert.bert.load_state_dict(perturb(module, seed).state_dict())
        experts[task] = expert.eval()
    return RetexModel.from_experts(module, experts, RetexConfig(rank=3), progress=False)


def summary_of(tasks: list[str] = TASKS) -> dict:
    """Of ten rows, 9, 8, 7, ... are right with the task known, one less when unknown; all of the experts', 5 merged."""

    def scores(missed: list[int], identified: bool) -> dict[str, TaskScore]:
        return {
            task: TaskScore(np.arange(10) >= count, np.arange(10) >= 1 if identified else None)
            for task, count in zip(tasks, missed, strict=True)
        }

    counts = list(range(1, len(tasks) + 1))
    own = {"known": scores(counts, False), "unknown": scores([count + 1 for count in counts], True)}
    runs = [
        Evaluation("individual", {"known": scores([0] * len(tasks), False)}, 3000),
        Evaluation("merged", {"known": scores([5] * len(tasks), False)}, 1000),
        Evaluation("ReTeX", own, 1400),
    ]
    return Report(runs, resamples=20).summary()


def card_in(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def sections(card: str) -> dict[str, str]:
    return {section.name: section.text for section in find_sections(card)}


def cells(card: str, section: str) -> list[list[str]]:
    """The rows of a section's tables as a reader sees them."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(sections(card)[section]):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows:
            rows[-1].append("".join(part.content for part in token.children))
    return rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder that tests copy or only read."""
    torch.manual_seed(0)
    model = make_classifier()
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    model.evaluation = summary_of()
    model.recipe = RecipeRecord(
        {"base": "org/base", "experts": {task: f"experts/{task}" for task in TASKS}, "config": {"rank": 3}}
    )
    folder = tmp_path_factory.mktemp("cards") / "my-retex"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved) -> RetexModel:
    return RetexModel.from_pretrained(saved)


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_metadata_are_those_of_the_hub(saved):
    card = ModelCard.load(saved / "README.md")
    values = card.data.to_dict()
    assert values["library_name"] == "retex-hf"
    assert values["pipeline_tag"] == "text-classification"
    assert {"retex", "model-merging", "transformers"} <= set(values["tags"])
    assert values["metrics"] == ["accuracy"]
    assert "base_model" not in values  # the base was in memory, and a name that is no Hub id is refused there
    assert "{{" not in card.content and "{%" not in card.content
    assert list(sections(card.content)) == SECTIONS


def test_the_model_index_holds_what_was_measured(saved):
    name, entries = model_index_to_eval_results(ModelCard.load(saved / "README.md").data.to_dict()["model-index"])
    assert name == "my-retex"
    found = {(entry.dataset_name, entry.metric_name): entry.metric_value for entry in entries}
    expected = {
        **{(task, "Accuracy (task known)"): 0.9 - place / 10 for place, task in enumerate(TASKS)},
        **{(task, "Accuracy (task unknown)"): 0.8 - place / 10 for place, task in enumerate(TASKS)},
        **{(task, "Task identification"): 0.9 for task in TASKS},
    }
    assert found == pytest.approx(expected)
    assert {entry.task_type for entry in entries} == {"text-classification"}


def test_the_hub_client_reads_the_metadata_and_writes_the_same(saved):
    card = ModelCard.load(saved / "README.md", ignore_metadata_errors=False)
    values = card.data.to_dict()
    assert values == yaml.safe_load(card.data.to_yaml()) == ModelCardData(**values).to_dict()
    name, entries = model_index_to_eval_results(values["model-index"])
    assert eval_results_to_model_index(name, entries) == values["model-index"]
    for entry in entries:
        assert type(entry.metric_value) is float and entry.dataset_type and entry.metric_type
    assert all(type(tag) is str for tag in values["tags"]) and len(set(values["tags"])) == len(values["tags"])
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", values["library_name"])


def test_a_card_with_the_former_library_name_gets_the_new_one(model, tmp_path):
    model.save_pretrained(tmp_path / "it")
    rewrite(
        tmp_path / "it",
        ("library_name: retex-hf", "library_name: retex_hf"),
        (f"library_name={digest('retex-hf')}", f"library_name={digest('retex_hf')}"),
    )
    model.save_pretrained(tmp_path / "it")
    assert ModelCard.load(tmp_path / "it" / "README.md").data.library_name == "retex-hf"
    bare = "---\nlibrary_name: retex_hf\n---\n# Mine\n"  # ours, with all sections removed
    (tmp_path / "it" / "README.md").write_text(bare)
    model.save_pretrained(tmp_path / "it")
    assert sections(card_in(tmp_path / "it")) == {}


# The Hub has the tag but neither a pipeline nor an inference API for it.
ONLY_ON_THE_HUB = {"multiple-choice"}


@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline_tags_are_those_of_the_hub(family):
    # huggingface_hub has no list of tags, only types for those that its inference client knows.
    known = {file.stem.replace("_", "-") for file in Path(hub_types.__file__).parent.glob("[a-z]*.py")}
    known = (known | set(SUPPORTED_TASKS)) - {"text2text-generation", "base", "chat-completion"}
    use = use_of(FAMILIES[family].make())
    assert {use.pipeline_tag or "text-generation", *TEXT_TAGS.values()} <= known | ONLY_ON_THE_HUB
    if use.kind == "generator":
        assert use.pipeline_tag == "text-generation"


def small_gpt2() -> nn.Module:
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))


STEMS = {
    "classifier": ["model", "retex_heads", "retex_recovery", "retex_signatures"],
    "shards": ["model-00002-of", "retex_recovery-00002-of"],
    "open_clip": ["open_clip_model", "retex_recovery"],
    "timm": ["model", "retex_recovery"],
    "rows": ["model", "retex_recovery", "retex_rows"],
    "streamed": ["model", "retex_recovery"],
}


@pytest.mark.parametrize("kind", STEMS)
def test_all_weights_say_that_they_are_torchs(kind, saved, model, tmp_path):
    """The Hub and transformers read the format from the metadata of each file."""
    folder = tmp_path / "it"
    if kind == "classifier":
        folder = saved
    elif kind == "shards":
        model.save_pretrained(folder, max_shard_size="10KB")
    else:
        bases = {
            "open_clip": FAMILIES["open_clip-vit"].make,
            "timm": lambda: pytest.importorskip("timm").create_model("test_resnet", num_classes=3),
            "rows": small_gpt2,
        }
        base = bases.get(kind, FAMILIES["bert"].make)().eval()
        experts = make_experts(base)
        if kind == "rows":
            experts["red"].resize_token_embeddings(43)
        options = {"model_config": FAMILIES["open_clip-vit"].model_config} if kind == "open_clip" else {}
        options |= {"output_dir": folder} if kind == "streamed" else {}
        built = RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, **options)
        if kind != "streamed":
            built.save_pretrained(folder)
    files = sorted(folder.rglob("*.safetensors"))
    for stem in STEMS[kind]:
        assert any(file.name.startswith(stem) for file in files), (stem, files)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt", file


def test_tables_show_the_figures(saved):
    card = card_in(saved)
    assert cells(card, "results") == [
        ["task", "task unknown", "task known", "task identified", "the expert itself", "merged only"],
        ["red", "80.0", "90.0", "90.0", "100.0", "50.0"],
        ["green", "70.0", "80.0", "90.0", "100.0", "50.0"],
        ["blue", "60.0", "70.0", "90.0", "100.0", "50.0"],
        ["mean", "70.0", "80.0", "90.0", "100.0", "50.0"],
    ]
    assert "of 30 rows" in sections(card)["results"]
    assert cells(card, "tasks")[2] == ["green", "3", "green-0, green-1, green-2"]
    assert "org/base" in sections(card)["recipe"] and "experts/blue" in sections(card)["recipe"]


def test_storage_is_what_the_files_hold(saved):
    def megabytes(stem: str) -> float:
        return sum(tensor.nbytes for tensor in load_file(saved / f"{stem}.safetensors").values()) / 1e6

    rows = {row[0]: float(row[1]) for row in cells(card_in(saved), "contents")[1:]}
    parts = {"recovery": "retex_recovery", "heads": "retex_heads", "signatures": "retex_signatures"}
    for part, stem in parts.items():
        assert rows[part] == pytest.approx(megabytes(stem), abs=0.006)
    head = sum(t.nbytes for n, t in load_file(saved / "model.safetensors").items() if n.startswith("classifier"))
    assert rows["merged model"] == pytest.approx(megabytes("model") - head / 1e6, abs=0.006)
    assert rows["everything"] == pytest.approx(sum(rows[part] for part in ("merged model", *parts)), abs=0.02)
    assert rows["the experts, for comparison"] == pytest.approx(3 * rows["merged model"] + rows["heads"], abs=0.03)


def test_without_evaluation_and_signatures_it_says_so(tmp_path):
    model = make_classifier()
    model.retex_config = replace(model.retex_config, signatures="inputs")
    model.save_pretrained(tmp_path / "bare")
    found = sections(card_in(tmp_path / "bare"))
    assert "Nothing has been measured yet: `retex eval`" in found["results"]
    assert "`retex sign`" in found["summary"] and "No signatures" in found["contents"]
    assert "No recipe was kept" in found["recipe"]
    assert "model-index" not in ModelCard.load(tmp_path / "bare" / "README.md").data.to_dict()


def test_a_recipe_that_is_not_the_whole_story_says_so(model, tmp_path):
    model.recipe = RecipeRecord(
        {"base": "org/base", "experts": {"red": "a"}, "unrecorded": ["fit signatures on batches in memory"]}
    )
    model.save_pretrained(tmp_path / "retex")
    text = sections(card_in(tmp_path / "retex"))["recipe"]
    assert "again, from this recipe, but for what no recipe can record (fit signatures on batches in memory):" in text


def test_the_same_model_has_the_same_card_and_no_path(model, saved, tmp_path):
    for parent in ("one", "two"):
        model.save_pretrained(tmp_path / parent / "my-retex")
    assert card_in(tmp_path / "one" / "my-retex") == card_in(tmp_path / "two" / "my-retex") == card_in(saved)
    assert str(tmp_path) not in card_in(saved) and str(saved.parent) not in card_in(saved)


def test_strange_names_are_shown_as_they_are(tmp_path):
    model = make_classifier(STRANGE)
    model.evaluation = summary_of(STRANGE)
    model.recipe = RecipeRecord({"base": "```\n<!-- /retex:recipe -->", "experts": dict.fromkeys(STRANGE, "a`b")})
    model.save_pretrained(tmp_path / "strange")
    card = card_in(tmp_path / "strange")
    shown = [" ".join(task.split()) for task in STRANGE]
    for section in ("tasks", "results", "provenance"):
        names = [row[0] for row in cells(card, section)]
        assert [name for name in names if name in shown] == shown
    assert list(sections(card)) == SECTIONS
    assert "49" not in sections(card)["tasks"]
    _, entries = model_index_to_eval_results(
        ModelCard.load(tmp_path / "strange" / "README.md").data.to_dict()["model-index"]
    )
    assert list(dict.fromkeys(entry.dataset_name for entry in entries)) == STRANGE
    fenced = [t for t in MarkdownIt("commonmark").parse(sections(card)["recipe"]) if t.type == "fence"]
    assert len(fenced) == 1 and fenced[0].info == "yaml" and "a`b" in fenced[0].content
    model.save_pretrained(tmp_path / "strange")
    assert card_in(tmp_path / "strange") == card


@pytest.mark.parametrize(
    "text", [*STRANGE, "a\\b", "$x$", "~~no~~", "&lt;", "snake_case_name", "# title", "http://a.b"]
)
def test_any_text_reads_as_itself(text):
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(f"| x | {plain(text)} |\n|---|---|\n")
    inline = [token for token in tokens if token.type == "inline"][1]
    assert "".join(part.content for part in inline.children) == " ".join(text.split())
    assert {part.type for part in inline.children} <= {"text", "text_special"}


def test_an_evaluation_of_another_form_is_refused(model, saved, tmp_path):
    model.evaluation = {"accuracy": 0.9}
    with pytest.raises(ArtifactError, match=r"not what Report\.summary\(\) gives"):
        model.save_pretrained(tmp_path / "artifact")
    assert list(tmp_path.iterdir()) == []


def test_tasks_that_came_later_have_no_figures(model, tmp_path):
    model.evaluation = summary_of(TASKS[:2])
    model.save_pretrained(tmp_path / "artifact")
    rows = cells(card_in(tmp_path / "artifact"), "results")
    assert [row[0] for row in rows] == ["task", *TASKS]
    assert rows[-1][1:] == ["–"] * 5 and rows[1][1] == "80.0"


def test_hub_data_sets_are_named(model, tmp_path):
    data = {"red": "org/texts:red@main", "green": "data/green", "blue": "org/texts@v1"}
    model.recipe = model.recipe.with_values(data=data)
    model.save_pretrained(tmp_path / "artifact")
    data = ModelCard.load(tmp_path / "artifact" / "README.md").data
    assert data.datasets == ["org/texts"]
    assert {entry.dataset_type for entry in data.eval_results} == {"org/texts", "green"}


def test_the_licence_is_that_of_the_base(tmp_path):
    base = tf.BertModel(tf.BertConfig(**TEXT))
    for name in ("base", "expert"):
        base.save_pretrained(tmp_path / name)
    (tmp_path / "base" / "README.md").write_text("---\nlicense: other\nlicense_name: ours\ntags: [x]\n---\n# Base\n")
    (tmp_path / "expert" / "README.md").write_text("---\nlicense: mit\n---\n")
    experts = {"red": tmp_path / "expert", "green": perturb(base, 1)}
    options = {"progress": False, "check_base": False}
    RetexModel.from_experts(tmp_path / "base", experts, RetexConfig(rank=3), **options).save_pretrained(tmp_path / "a")
    values = ModelCard.load(tmp_path / "a" / "README.md").data.to_dict()
    assert (values["license"], values["license_name"]) == ("other", "ours") and "x" not in values["tags"]
    assert "## Licence" not in card_in(tmp_path / "a")
    RetexModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "c")
    assert ModelCard.load(tmp_path / "c" / "README.md").data.to_dict() == values
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), **options).save_pretrained(tmp_path / "b")
    assert "license" not in ModelCard.load(tmp_path / "b" / "README.md").data.to_dict()
    assert "## Licence\n\nSay here" in card_in(tmp_path / "b")


# ---- code that runs --------------------------------------------------------------------------------------------------


def word_tokenizer(folder: Path, **special: str) -> None:
    words = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        "A",
        "first",
        "text",
        ".",
        "And",
        "a",
        "second",
        "one",
        "photo",
        "of",
        "cat",
    ]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "</s>", **special}
    names = ["input_ids", "attention_mask"]
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special).save_pretrained(folder)


def make(kind: str, folder: Path) -> nn.Module:
    """A base of a kind in a folder, with what turns raw inputs into batches."""
    size = {"height": 32, "width": 32}
    if kind == "text-generation":
        word_tokenizer(folder)  # without a padding token, as GPT-2 has none
        model = FAMILIES["gpt2"].make()
    elif kind == "text-generation, encoder-decoder":
        word_tokenizer(folder, pad_token="<pad>")
        model = FAMILIES["t5"].make()
    elif kind == "text-classification":
        word_tokenizer(folder, pad_token="<pad>")
        model = tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=2))
    elif kind == "image-classification":
        tf.ViTImageProcessor(size=size).save_pretrained(folder)
        model = tf.ViTForImageClassification(tf.ViTConfig(**VISION, num_labels=3))
    elif kind == "image-classification, bare":
        config = tf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2
        )
        model = tf.ResNetForImageClassification(config)
    elif kind == "zero-shot-image-classification":
        word_tokenizer(folder, pad_token="<pad>")
        tf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
        model = FAMILIES["clip"].make()
    else:
        model = FAMILIES["bert"].make()
    model.eval().save_pretrained(folder)
    return model


KINDS = {
    "text-classification": tokens,
    "text-generation": tokens,
    "text-generation, encoder-decoder": tokens,
    "image-classification": images,
    "image-classification, bare": images,
    "zero-shot-image-classification": images,
    "feature-extraction": tokens,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_in_the_card_runs(kind, tmp_path, monkeypatch, capsys):
    base = make(kind, tmp_path / "base")
    model = RetexModel.from_experts(tmp_path / "base", make_experts(base), RetexConfig(rank=3), progress=False)
    monkeypatch.chdir(tmp_path)
    for signed in (False, True):
        if signed:
            model.fit_signatures({task: [KINDS[kind](8)] for task in TASKS}, progress=False)
        model.save_pretrained(tmp_path / "it")
        card = ModelCard.load(tmp_path / "it" / "README.md")
        assert card.data.pipeline_tag == kind.partition(",")[0]
        (code,) = re.findall(r"```python\n(.*?)\n```", card.text, re.DOTALL)
        assert ('task="red"' in code) == ("predict" in code)  # experts alone are told apart by their weights
        assert ("predict" in code) == kind.startswith(("text-classification", "image-classification"))
        capsys.readouterr()
        exec(code, {})
        first = next(line for line in capsys.readouterr().out.splitlines() if line)
        if "predict" in code:
            answers = ast.literal_eval(first)
            assert all(answer["task"] in TASKS and 0 <= answer["score"] <= 1 for answer in answers)
        else:
            assert set(ast.literal_eval(first)) <= set(TASKS)


def test_the_code_for_the_hubs_pages_runs(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "hub.md").read_text(encoding="utf-8")
    load, whole = (code.replace("${model.id}", "it") for code in re.findall(r"`(from [^`]+)`", text))
    base = make("text-classification", tmp_path / "base")
    model = RetexModel.from_experts(tmp_path / "base", make_experts(base), RetexConfig(rank=3), progress=False)
    model.save_pretrained(tmp_path / "it")
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(whole.replace("${load}", load), found)
    assert found["tasks"] == TASKS and found["output"].logits.shape == (1, 2)
    (library,) = re.findall(r'^\t"(.+)": \{$', text, re.MULTILINE)
    assert library == card_sections.LIBRARY and f'path:"{CONFIG_NAME}"' in text


def test_open_clip_code_runs(tmp_path, monkeypatch, capsys):
    family = FAMILIES["open_clip-vit"]
    base = family.make().eval()
    model = RetexModel.from_experts(
        base, make_experts(base), RetexConfig(rank=3), model_config=family.model_config, progress=False
    )
    model.fit_signatures({task: [torch.randn(8, 3, 32, 32)] for task in TASKS}, progress=False)
    model.save_pretrained(tmp_path / "it")
    card = ModelCard.load(tmp_path / "it" / "README.md")
    assert "open_clip" in card.data.tags and card.data.pipeline_tag == "zero-shot-image-classification"
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)\n```", card.text, re.DOTALL)[0], {})
    assert "torch.Size([1, 12])" in capsys.readouterr().out


def test_models_of_other_inputs_have_a_card_too(tmp_path):
    base = FAMILIES["whisper"].make().eval()
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)
    model.save_pretrained(tmp_path / "it")
    assert "```python" not in card_in(tmp_path / "it")
    assert ModelCard.load(tmp_path / "it" / "README.md").data.pipeline_tag == "automatic-speech-recognition"


# ---- what a person wrote ---------------------------------------------------------------------------------------------


def rewrite(folder: Path, *changes: tuple[str, str]) -> None:
    card = card_in(folder)
    for old, new in changes:
        assert card.count(old) == 1, old
        card = card.replace(old, new)
    (folder / "README.md").write_text(card, encoding="utf-8")


def test_an_update_keeps_what_a_person_wrote(model, tmp_path):
    folder = tmp_path / "my-retex"
    model.evaluation = None
    model.save_pretrained(folder)
    before = sections(card_in(folder))
    (found,) = (section for section in find_sections(card_in(folder)) if section.name == "provenance")
    whole = card_in(folder)[found.start : found.end]
    rewrite(
        folder,
        ("# my-retex\n", "# Three colours\n\nMy own words.\n"),
        ("Say here what the model is for", "It is for sorting: ask me what for"),
        ("## Tasks\n", "## The tasks, as I see them\n"),
        (whole, ""),
        ("tags:\n", "license: mit\nlanguage: en\ntags:\n- mine\n"),
        ("pipeline_tag: text-classification\n", ""),
    )
    model.evaluation = summary_of()
    model.save_pretrained(folder)
    card = card_in(folder)
    after = sections(card)
    for text in ("# Three colours\n\nMy own words.\n", "It is for sorting: ask me what for", "## The tasks, as I see"):
        assert card.count(text) == 1
    assert list(after) == [name for name in SECTIONS if name != "provenance"]
    assert "Nothing has been measured" in before["results"] and "| red | 80.0 |" in after["results"]
    assert {name for name in after if after[name] != before[name]} == {"tasks", "results"}
    values = ModelCard.load(folder / "README.md").data.to_dict()
    assert (values["license"], values["language"]) == ("mit", "en")
    assert values["tags"][0] == "mine" and "retex" in values["tags"]
    assert "pipeline_tag" not in values
    assert len(values["model-index"][0]["results"]) == 3
    model.save_pretrained(folder)
    assert card_in(folder) == card
    model.evaluation = None
    model.save_pretrained(folder)
    assert "Nothing has been measured" in card_in(folder) and "model-index" not in card_in(folder).partition("# ")[0]


def test_a_card_follows_the_model_it_was_loaded_with(saved, model, tmp_path):
    model.save_pretrained(tmp_path / "first")
    rewrite(tmp_path / "first", ("Say here what the model is for", "It is for sorting: ask me what for"))
    RetexModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    card = card_in(tmp_path / "second")
    assert "It is for sorting" in card and 'from_pretrained("second")' in card and '"first"' not in card


def test_a_card_of_another_hand_gets_the_sections_behind_it(model, tmp_path):
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\ntags:\n- mine\n---\r\n# Mine\n\nText.\n")
    model.save_pretrained(folder)
    card = card_in(folder)
    assert card.index("# Mine\n\nText.\n") < card.index("<!-- retex:summary")
    assert list(sections(card)) == SECTIONS and "# it" not in card
    values = ModelCard.load(folder / "README.md").data.to_dict()
    assert (
        values["license"] == "mit" and values["tags"][:2] == ["mine", "retex"] and values["library_name"] == "retex-hf"
    )
    (folder / "README.md").write_text(replace_sections(card, lambda _: ""))
    model.save_pretrained(folder)
    assert sections(card_in(folder)) == {} and "# Mine\n\nText.\n" in card_in(folder)


def test_metadata_that_nobody_changed_stay_as_they_are_written(model, tmp_path):
    model.save_pretrained(tmp_path / "it")
    rewrite(tmp_path / "it", ("library_name: retex-hf", "library_name: 'retex-hf'  # ours"))
    model.save_pretrained(tmp_path / "it")
    assert "library_name: 'retex-hf'  # ours\n" in card_in(tmp_path / "it")


@pytest.mark.parametrize(("block", "reason"), [("a: [", "not valid YAML"), ("- a\n- b", "keys and values, not a list")])
def test_a_card_that_cannot_be_read_stops_the_save(model, tmp_path, block, reason):
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "README.md").write_text(f"---\n{block}\n---\n# Mine\n")
    with pytest.raises(ArtifactError, match=rf"{folder}/README.md: .*{reason}"):
        model.save_pretrained(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["it", "README.md"]


def test_digests_do_not_mind_line_ends():
    assert digest("a \nb\n\n") == digest("a\r\nb") != digest("a\nc")


# ---- figures and files -----------------------------------------------------------------------------------------------


def test_figures_are_drawn_on_demand_and_then_kept_up_to_date(model, tmp_path):
    folder = tmp_path / "it"
    model.save_pretrained(folder)
    assert not (folder / "figures").exists() and sections(card_in(folder))["figures"] == ""
    model.create_or_update_model_card(folder)
    drawn = {name: (folder / "figures" / f"{name}.png").read_bytes() for name in ("errors", "results")}
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())
    shown = re.findall(r"!\[[^\]]+\]\((.*?)\)", card_in(folder))
    assert shown == ["figures/errors.png", "figures/results.png"] and set(shown) <= set(FIGURES)
    (folder / "figures" / "mine.png").write_bytes(b"mine")
    (folder / "figures" / "storage.png").write_bytes(b"analysed")
    model.evaluation = None
    model.recovery_errors = {name: 0.5 for name in model.recovery_errors}
    model.save_pretrained(folder)
    assert (folder / "figures" / "mine.png").read_bytes() == b"mine"
    assert (folder / "figures" / "errors.png").read_bytes() != drawn["errors"]
    assert re.findall(r"!\[[^\]]+\]\((.*?)\)", card_in(folder)) == ["figures/errors.png", "figures/storage.png"]
    RetexModel.from_pretrained(folder).save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "figures" / "storage.png").read_bytes() == b"analysed"


def test_parameters_of_unknown_error_are_left_out_of_the_figure(model, tmp_path):
    for number, known in enumerate((1, 0)):
        folder = tmp_path / str(number)
        names = list(model.recovery_errors)
        model.recovery_errors = {name: 0.5 if place < known else None for place, name in enumerate(names)}
        model.save_pretrained(folder)
        RetexModel.from_pretrained(folder).create_or_update_model_card(folder)
        assert (folder / "figures" / "errors.png").is_file() == (known > 0)


def test_a_build_into_a_folder_writes_the_card(tmp_path):
    base = tf.BertModel(tf.BertConfig(**TEXT)).eval()
    base.save_pretrained(tmp_path / "base")
    folder = tmp_path / "out" / "it"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# Mine\n")
    model = RetexModel.from_experts(
        tmp_path / "base", make_experts(base), RetexConfig(rank=3), output_dir=folder, progress=False
    )
    card = card_in(folder)
    assert "# Mine\n" in card and list(sections(card)) == SECTIONS
    model.save_pretrained(folder)
    assert card_in(folder) == card


def test_the_template_comes_with_the_package():
    root = Path(retex_hf.__file__).parents[1]
    template = Path(retex_hf.__file__).parent / "artifact" / "card" / "model_card_template.md"
    assert (root / "model_card_template.md").resolve() == template.resolve()
    assert f'"retex_hf.artifact.card" = ["{template.name}"]' in (root / "pyproject.toml").read_text()


ODD_VALUES = [
    "5", "{a: b}", "[1, {2: x}]", "null", "true", "2020-01-01", "!!binary aGk=", "!!set {a, b}", ".nan",
    "0x" + "f" * 3000, "{1: a, b: c}", "{2020-01-01: a}", "{null: a, true: b, 1.5: c}", "[[[]]]", "''", "1:30:00",
]  # fmt: skip


@pytest.mark.parametrize("key", ["language", "tags", "model-index", "license", "base_model", "datasets", "5", "null"])
def test_odd_metadata_are_carried_over(key):
    for value in ODD_VALUES:
        card = f"---\n{key}: {value}\n---\n# Mine\n"
        before, *_ = card_sections.split(card, "README.md")
        fresh = {"license": "mit", "tags": ["retex"], "datasets": ["d"], "base_model": ["b"]}
        once = card_sections.update(card, fresh, "<!-- retex:a -->\nours\n<!-- /retex:a -->\n", "README.md")
        assert card_sections.update(once, fresh, "<!-- retex:a -->\nours\n<!-- /retex:a -->\n", "README.md") == once
        after, *_ = card_sections.split(once, "README.md")
        for name, old in before.items():
            if isinstance(old, list) and isinstance(fresh.get(name), list):
                assert after[name] == [*old, *fresh[name]]
            else:
                assert after[name] == old or value == ".nan"
        assert {**fresh, **before}.keys() == after.keys()
        assert card_sections.choose(once, card, "README.md")[0] in (once, card)


def test_a_card_of_many_megabytes_is_refused(model, tmp_path):
    folder = tmp_path / "my-retex"
    model.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    (folder / "README.md").write_text("x" * 2_000_001)
    with pytest.raises(ArtifactError, match=r"README\.md has 2000001 bytes; at most 2000000 are read"):
        model.save_pretrained(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before | {"README.md": b"x" * 2_000_001}


def test_only_texts_are_a_licence(model, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: {a: b}\nlicense_name: [1]\nlicense_link: LICENSE\n---\n")
    config = replace(model.retex_config, base_model={"source": "local", "id": "base"})
    parts = replace(model.parts(), side_folder=folder, config=config)
    write_card(parts, tmp_path / "card")
    values, *_ = card_sections.split((tmp_path / "card" / "README.md").read_text(), "README.md")
    assert {key: value for key, value in values.items() if "license" in key} == {"license_link": "LICENSE"}
