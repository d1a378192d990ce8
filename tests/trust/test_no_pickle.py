"""Nothing in the tree unpickles, evaluates or runs what comes from a file: read from the syntax of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file for folder in ("retex_hf", "examples") for file in (ROOT / folder).rglob("*.py"))
# Modules whose readers run code, and what else runs it.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.save", "torch.jit.load", "torch.hub.load",
    "torch.package.PackageImporter", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load",
    "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.Loader", "jinja2.Template", "jinja2.Environment",
    "pandas.read_pickle", "pd.read_pickle", "evaluate.load", "ModelCard.from_template", "tempfile.mktemp",
}  # fmt: skip


def findings(source: str) -> Iterator[str]:
    """What a module does that could run code from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (found for part in names if (found := part.split(".")[0]) in MODULES)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Attribute) and node.attr in MODULES:
            yield node.attr  # torch.serialization.pickle and the like


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in CALLS or called.endswith((".register_for_checkpointing", ".from_template")):
        yield called
    if called == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if called.startswith("subprocess.") and "shell" in given:
        yield "shell="
    for name in ("trust_remote_code", "allow_pickle", "allow_all_kernels", "use_kernels", "custom_generate"):
        if name in given and not _is(given[name], False):
            yield f"{name}="


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("torch.load(file)", ["torch.load without weights_only=True"]),
        ("torch.load(file, weights_only=flag)", ["torch.load without weights_only=True"]),
        ("torch.load(file, weights_only=True)", []),
        ("torch.serialization.pickle.loads(x)", ["pickle"]),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", ["trust_remote_code="]),
        ("AutoModel.from_pretrained(name, trust_remote_code=given)", ["trust_remote_code="]),
        ("AutoModel.from_pretrained(name, trust_remote_code=False)", []),
        ("np.load(file, allow_pickle=True)", ["allow_pickle="]),
        ("np.load(file)", []),
        ("subprocess.run(x, shell=True)", ["shell="]),
        ("model.eval()\nre.compile(x)", []),
        ("eval(x)", ["eval"]),
        ("'import pickle; eval(x)'  # torch.load(file)", []),
        ("accelerator.register_for_checkpointing(x)", ["accelerator.register_for_checkpointing"]),
    ],
)
def test_the_reader_of_syntax_sees_what_it_must(source, found):
    assert list(findings(source)) == found


def test_nothing_in_the_tree_runs_code_from_files():
    assert len(FILES) > 150
    found = {
        (file.relative_to(ROOT).as_posix(), what)
        for file in FILES
        for what in findings(file.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_every_loader_of_transformers_is_told_not_to_run_code():
    """Left open, `trust_remote_code` makes transformers ask the person at the keyboard, who may say yes."""
    silent = []
    for file in sorted((ROOT / "retex_hf").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            loads = isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("Auto", "auto_class."))
            if loads and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}:
                silent.append(f"{file.name}:{node.lineno}")
    assert silent == []
