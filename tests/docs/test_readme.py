"""What the documents tell people to type is what the command line takes, and what they point at is there."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module

import pytest
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_point_at_files_that_are_there(document):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link


def test_the_test_command_is_the_one_that_ci_runs():
    command = "pip install -e '.[dev]' && python -m pytest"
    assert any(command in text for page, text in blocks("bash") if page == "README.md")
    assert command.replace("install", "install --quiet") in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_scripts_that_the_documents_run_are_there():
    text = "\n".join(block for _, block in blocks("bash"))
    for script in set(re.findall(r"(?:examples/[\w/]+\.(?:py|yaml))", text)):
        assert (ROOT / script).is_file(), script
