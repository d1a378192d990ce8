"""Every backend has what the protocol lists, and the rest of the library uses nothing else of a backend."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from types import FunctionType

import pytest
from torch import nn

import retex_hf
from retex_hf import CheckpointError
from retex_hf.backends import LIBRARIES, not_supported
from retex_hf.backends.protocol import Backend

PACKAGE = Path(retex_hf.__file__).parent
FUNCTIONS = {name: value for name, value in vars(Backend).items() if isinstance(value, FunctionType) and name[0] != "_"}
CONSTANTS = {name: {"str": str, "bool": bool}[kind] for name, kind in Backend.__annotations__.items()}
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
# Expressions that stand for a backend: variables and attributes of these names, calls of these functions.
NAMES = {"library", "_library"}
CALLS = {"library_of", "library_of_folder"}


def incompatible(function: FunctionType, protocol: FunctionType) -> list[str]:
    """Say in what way a function cannot be called as the protocol says."""
    found = dict(inspect.signature(function).parameters)
    expected = list(inspect.signature(protocol).parameters.values())[1:]  # without self
    rest = [parameter.name for parameter in found.values() if parameter.kind == Parameter.VAR_KEYWORD]
    problems = []
    positions = [parameter.name for parameter in found.values() if parameter.kind in POSITIONAL]
    wanted = [parameter.name for parameter in expected if parameter.kind in POSITIONAL]
    if positions[: len(wanted)] != wanted:
        problems.append(f"takes {positions} by position, not {wanted}")
    for parameter in expected:
        own = found.pop(parameter.name, None)
        if parameter.kind == Parameter.VAR_KEYWORD:
            if not rest:
                problems.append("takes no further options")
        elif own is None:
            if not rest:
                problems.append(f"lacks {parameter.name}")
        elif parameter.default is not Parameter.empty and own.default != parameter.default:
            problems.append(f"has another default of {parameter.name}")
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    needed = [p.name for p in found.values() if p.default is Parameter.empty and p.kind not in variable]
    return problems + [f"asks for {name} too" for name in needed]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_backend_has_all_that_the_protocol_lists(library):
    backend = LIBRARIES[library]
    assert [name for name in (*FUNCTIONS, *CONSTANTS) if not hasattr(backend, name)] == []
    assert {name: type(getattr(backend, name)) for name in CONSTANTS} == CONSTANTS
    problems = {name: incompatible(getattr(backend, name), protocol) for name, protocol in FUNCTIONS.items()}
    assert {name: found for name, found in problems.items() if found} == {}


def test_incompatible_parameters_are_found():
    def protocol(self, model, *, copy=True, **options): ...

    assert incompatible(lambda model, *, copy=True, dtype=None, **options: None, protocol) == []
    assert incompatible(lambda model, extra=1, **options: None, protocol) == []
    assert incompatible(lambda module, *, copy=True, **options: None, protocol) == [
        "takes ['module'] by position, not ['model']",
        "asks for module too",
    ]
    assert incompatible(lambda model, other, *, copy=False: None, protocol) == [
        "has another default of copy",
        "takes no further options",
        "asks for other too",
    ]


def test_every_entry_of_the_protocol_is_described():
    assert len(FUNCTIONS) > 25 and len(CONSTANTS) == 5
    assert all(inspect.getdoc(function) and "\n" not in inspect.getdoc(function) for function in FUNCTIONS.values())


def uses(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of backends that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_backend(node.value):
            yield node.attr


def is_backend(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in CALLS
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id == "LIBRARIES"
    return (isinstance(node, ast.Name) and node.id in NAMES) or (isinstance(node, ast.Attribute) and node.attr in NAMES)


def found_uses() -> dict[str, set[str]]:
    files = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "backends"]
    found: dict[str, set[str]] = {}
    for file in files:
        for name in uses(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(name, set()).add(file.relative_to(PACKAGE).as_posix())
    return found


def test_nothing_else_of_a_backend_is_used():
    listed = {*FUNCTIONS, *CONSTANTS}
    assert {name: sorted(files) for name, files in found_uses().items() if name not in listed} == {}


def test_the_protocol_lists_nothing_that_is_not_used():
    # `owns` is called by `library_of` itself.
    assert {*FUNCTIONS, *CONSTANTS} - set(found_uses()) == {"owns"}


def test_all_ways_to_a_backend_are_seen():
    text = (
        "library.a; self.library.b; self._library.c; library_of(x.y).d; library_of_folder(f(x)).e; LIBRARIES[k].f; x.g"
    )
    assert sorted(uses(ast.parse(text))) == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize("name", [name for name, value in vars(not_supported).items() if name in FUNCTIONS])
def test_what_does_not_apply_is_refused_in_one_sentence(name):
    arguments = [
        nn.Linear(1, 1) if parameter == "model" else Path("folder") if parameter == "folder" else 1
        for parameter in inspect.signature(getattr(not_supported, name)).parameters
    ]
    with pytest.raises(CheckpointError, match=r"^(A Linear|folder) .*[^.]\.$"):
        getattr(not_supported, name)(*arguments)
