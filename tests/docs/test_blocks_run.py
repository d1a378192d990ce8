"""Every code block of README.md and docs/ runs, on small models, in the order of its page."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from string import Template

import datasets
import pytest
import yaml
from doc_blocks import PAGES, ROOT, Block, blocks_of, shell_lines
from doc_setups import SETUPS
from hubs import serving
from huggingface_hub import constants
from local_hub import LocalHub

from retex_hf.cli import main

ALL = {page.relative_to(ROOT).as_posix(): blocks_of(page) for page in PAGES}
BLOCKS = [block for blocks in ALL.values() for block in blocks]
# What a block of each language is: run, or only read.
RUN, READ = {"python", "bash"}, {"yaml", "json", "bibtex", "ts"}
NOT_RUN = 29


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[LocalHub]:
    """An empty folder to run in, with a Hub and caches of its own."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    with serving(tmp_path / "hub", monkeypatch, tokens={"hf_local": "write"}) as served:
        monkeypatch.setenv("HF_TOKEN", "hf_local")
        yield served


def run_python(block: Block, names: dict) -> None:
    """Run a block with the line numbers of its page, so that a traceback points into it."""
    code = ast.increment_lineno(ast.parse(block.text, block.page), block.line)
    exec(compile(code, str(ROOT / block.page), "exec"), names)


def run_bash(block: Block, variables: dict[str, str]) -> None:
    """Run `retex` in this process; other commands must be marked as not run."""
    for line in shell_lines(block.text):
        if assigned := re.fullmatch(r"([A-Z]\w*)=(\S+)", line):
            variables[assigned[1]] = assigned[2]
            continue
        command, *arguments = shlex.split(Template(line).substitute(variables), comments=True)
        assert command == "retex", f"{block.place}: {line!r} is no retex command: mark the block as not run"
        assert main(arguments) == 0, f"{block.place}: {line}"


@pytest.mark.parametrize("page", [page for page, blocks in ALL.items() if any(b.language in RUN for b in blocks)])
def test_a_page_runs_from_top_to_bottom(page, hub):
    names, variables = {"__name__": "__main__"}, {}
    for block in ALL[page]:
        if block.setup:
            names |= SETUPS[block.setup](hub)
        if block.not_run is not None:
            continue
        if block.language == "python":
            run_python(block, names)
        elif block.language == "bash":
            run_bash(block, variables)


def test_every_block_has_a_language():
    assert {block.place: block.language for block in BLOCKS if block.language not in RUN | READ} == {}


def test_blocks_that_are_not_run_say_why():
    exempt = [block for block in BLOCKS if block.not_run is not None]
    assert [block.place for block in exempt if len(block.not_run.split()) < 2] == []
    assert [block.place for block in exempt if block.language not in RUN] == []
    assert len(exempt) == NOT_RUN, [block.place for block in exempt]


def test_every_setup_is_used():
    assert {block.setup for block in BLOCKS} - {None} == set(SETUPS)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: block.place)
def test_recipes_are_shipped_ones(block):
    shipped = [yaml.safe_load(file.read_text()) for file in (ROOT / "examples/recipes").glob("*.yaml")]
    assert yaml.safe_load(block.text) in shipped


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
