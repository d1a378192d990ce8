"""What the documents tell people to type is what the command line takes, and what they point at is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from doc_blocks import PAGES, ROOT, blocks_of, shell_lines

from retex_hf.cli import COMMANDS

DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    found = (block for document in DOCUMENTS for block in blocks_of(document))
    return [(block.page, block.text) for block in found if block.language == language]


def commands() -> list[str]:
    return [line for _, text in blocks("bash") for line in shell_lines(text) if line.startswith("retex ")]


def test_the_walk_through_uses_every_command():
    page = [line for block in blocks_of(ROOT / "docs/commands.md") for line in shell_lines(block.text)]
    assert {shlex.split(line)[1] for line in page if line.startswith("retex ")} == set(COMMANDS)


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_documents_are_understood(line):
    _, name, *arguments = shlex.split(line, comments=True)
    module, options, _ = COMMANDS[name]
    parsed = getattr(import_module(f"retex_hf.cli.{module}"), options).parse(f"retex {name}", arguments)
    recipe = getattr(parsed, "recipe", None)
    if recipe is not None and "examples" in str(recipe):
        assert (ROOT / recipe).is_file()


@pytest.mark.parametrize(("document", "code"), blocks("python"))
def test_examples_are_python(document, code):
    ast.parse(code, document)


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_point_at_files_and_headings_that_are_there(document):
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", document.read_text(encoding="utf-8"))
    for link, anchor in links:
        if not link.startswith("http"):
            target = document.parent / link
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_every_page_is_on_the_site_and_in_the_readme_or_the_index():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert set(re.findall(r"[\w/-]+\.md", json.dumps(site["nav"]))) == pages
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/-]+\.md)\)", index)) | {"index.md"}
    assert {page for page in pages if not page.startswith("reference/")} <= listed


def test_the_test_command_is_the_one_that_ci_runs():
    command = "pip install -e '.[dev]' && python -m pytest"
    assert any(command in text for page, text in blocks("bash") if page == "README.md")
    assert command.replace("install", "install --quiet") in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_scripts_that_the_documents_run_are_there():
    text = "\n".join(block for _, block in blocks("bash"))
    for script in set(re.findall(r"(?:examples/[\w/]+\.(?:py|yaml))", text)):
        assert (ROOT / script).is_file(), script
