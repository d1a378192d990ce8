"""Untrusted text is shown and never interpreted: on the terminal, on cards, on the page."""

from __future__ import annotations

import json
from dataclasses import replace

import gradio as gr
import pytest
import yaml
from fastapi.testclient import TestClient
from markdown_it import MarkdownIt
from signed import make_tokenizer, signed_classifier
from trust.subjects import make_artifact, make_model

from retex_hf import RetexModel
from retex_hf.artifact.preprocess import load_preprocessor
from retex_hf.artifact.recipe_record import RecipeRecord
from retex_hf.artifact.schema import seal
from retex_hf.checkpoints import manifest as recorded
from retex_hf.cli import main
from retex_hf.config import RetexConfig, is_task_name
from retex_hf.demo import make_demo
from retex_hf.demo.page import launch_options
from retex_hf.errors import ConfigError
from retex_hf.utils.tables import Table
from retex_hf.utils.terminal import UNPRINTABLE, as_json, visible

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\n"
NASTY = [
    "<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "](javascript:alert(1)) [x", "| a | b |",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}", "--- license: evil", "<!-- /retex:tasks -->", "`code` ```", "$(touch x)",
    "'; touch x #", "../../x", "a/b", "con", "&lt;b&gt;", "**bold**", "!!python/object:os.system", "![x](http://x/y.png)",
]  # fmt: skip


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_control_characters_are_written_out():
    assert visible(ESCAPES) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\n"
    assert visible("naïve 文字 \u200d👍 ünï") == "naïve 文字 \u200d👍 ünï"
    assert visible("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert json.loads(as_json({ESCAPES: [ESCAPES, "é"]}, indent=2)) == {ESCAPES: [ESCAPES, "é"]}
    assert not UNPRINTABLE.search(as_json({ESCAPES: ESCAPES}))
    text = Table([ESCAPES, "b"], [[ESCAPES, "1"]], frozenset({(0, 0)})).text()
    assert not UNPRINTABLE.search(text.replace("\n", "")) and len(text.split("\n")) == 3


def test_task_names_are_names():
    assert all(map(is_task_name, NASTY))
    for name in ("", " a", "a\n", ESCAPES, "\ud800", "x" * 201, "__base__", 3, None):
        assert not is_task_name(name)
        with pytest.raises(ConfigError, match="tasks must be unique names"):
            RetexConfig(tasks=["a", name])


def test_commands_print_no_control_characters(tmp_path, capfd):
    """Labels and provenance may hold anything; a terminal gets it written out."""
    folder = make_artifact(tmp_path / "artifact")
    path = folder / "retex_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["experts"]["red"]["id"] = ESCAPES
    values["labels"]["red"]["id2label"] = {"0": ESCAPES, "1": ESCAPES + "2"}
    values["artifact"]["seal"] = seal(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    capfd.readouterr()
    assert main(["inspect", str(folder), "--no-spectra"]) == 0
    assert main(["inspect", str(folder), "--no-spectra", "--json"]) == 0
    for form in ("table", "jsonl"):
        assert main(["predict", str(folder), "--text", "rose ruby", "--task", "red", "--format", form]) == 0
    assert main(["inspect", str(tmp_path / f"no{ESCAPES.strip()}")]) == 2
    out, err = capfd.readouterr()
    assert "owned" in out and "owned" in err
    assert not UNPRINTABLE.search((out + err).replace("\n", ""))


# ---- the card --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def card(tmp_path_factory) -> str:
    """The card of a model all of whose names are nasty."""
    model = make_model()
    config = model.retex_config
    config.labels["red"]["id2label"] = {str(index): name for index, name in enumerate(NASTY)}
    for task, name in zip(model.tasks, NASTY[:3], strict=True):
        config.experts[task] = {"source": "hub", "id": name, "revision": NASTY[4]}
    model.retex_config = replace(config, base_model={"source": "local", "id": NASTY[1]})
    model.recipe = RecipeRecord({"base": NASTY[0], "experts": dict.fromkeys(NASTY, ESCAPES), "unrecorded": NASTY})
    folder = tmp_path_factory.mktemp("card") / "nasty"
    folder.mkdir()
    model.create_or_update_model_card(folder)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_a_card_holds_no_untrusted_markup(card):
    _, front, body = card.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert set(metadata) <= {"library_name", "base_model", "base_model_relation", "tags", "pipeline_tag"}
    assert metadata["base_model"] == NASTY[:3]
    assert "{{ 7 * 7 }}" in body
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(body)
    inline = [part for token in tokens for part in token.children or ()]
    assert {token.content.strip()[:4] for token in tokens if token.type == "html_block"} <= {"<!--"}
    assert not [part for part in inline if part.type == "html_inline"]
    assert not [part for part in inline if part.type == "link_open"]
    assert all(part.attrs["src"].startswith("figures/") for part in inline if part.type == "image")
    assert not UNPRINTABLE.search(body.replace("\n", ""))


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The page behind its own web server, without a port."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    model = signed_classifier()
    page = make_demo(model, load_preprocessor(folder, model.model))
    page.max_file_size = 10_000_000
    app = gr.routes.App.create_app(page)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../../../etc/passwd", "pyproject.toml", "/proc/self/environ", "~/.netrc"]
)
def test_the_page_serves_no_files_of_the_machine(served, path):
    for route in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/"):
        answer = served.get(route + path)
        assert answer.status_code in (400, 403, 404, 405), (route, answer.status_code)
        assert b"root:" not in answer.content and b"[project]" not in answer.content


def test_the_page_has_no_public_functions(served):
    described = served.get("/gradio_api/info").json()
    assert described["named_endpoints"] == {} and described["unnamed_endpoints"] == {}


def test_uploads_are_limited():
    assert launch_options()["max_file_size"] == "10mb"
    assert "allowed_paths" not in launch_options()


def test_seals_and_records_can_be_forged(tmp_path):
    """Checksums find damage, not malice: whoever changes a file can record it. SECURITY.md says so."""
    folder = make_artifact(tmp_path / "artifact")
    config = folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    path = folder / "retex_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["artifact"]["files"] = recorded.to_json(recorded.record(folder, values["artifact"]["files"]))
    values["artifact"]["seal"] = seal(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    assert RetexModel.from_pretrained(folder).tasks
