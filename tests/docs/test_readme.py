"""What the documents tell people to type is what the command line takes, and what they point at is there."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from retex_hf.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        pattern = rf"```{language}\n(.*?)```"
        for block in re.findall(pattern, document.read_text(encoding="utf-8"), re.DOTALL):
            found.append((document.relative_to(ROOT).as_posix(), block))
    return found


def commands() -> list[str]:
    text = "\n".join(block for _, block in blocks("bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("retex ")]


def test_the_walk_through_uses_every_command():
    assert {shlex.split(line)[1] for line in commands()} == set(COMMANDS) - {"remove-task"}


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


def test_scripts_that_the_documents_run_are_there():
    text = "\n".join(block for _, block in blocks("bash"))
    for script in set(re.findall(r"(?:examples/[\w/]+\.(?:py|yaml))", text)):
        assert (ROOT / script).is_file(), script
