"""One options class per command: its fields become arguments, and its docstring becomes their help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from ..errors import ConfigError
from ..utils.strict_files import parse_yaml

Self = TypeVar("Self", bound="Options")


POSITIONAL = "positional"
"""Marks a positional field, as in `Annotated[str, POSITIONAL]`; a field may also name its flag there."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports invalid input in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help).")

    def print_help(self, file: Any = None) -> None:
        """Print the help, and fail if it cannot be written; argparse would ignore that."""
        print(self.format_help(), end="", file=file)


@dataclasses.dataclass
class Options(ABC):
    """Base class of a command's options. Subclasses are dataclasses with `EXAMPLES` and `run`."""

    EXAMPLES = ""

    @classmethod
    def parse(cls: type[Self], prog: str, arguments: list[str]) -> Self:
        """Parse the command line."""
        parser = cls.parser(prog)
        return cls.from_namespace(vars(parser.parse_args(arguments)))

    @classmethod
    def parser(cls, prog: str) -> Parser:
        parser = Parser(
            prog=prog,
            description=inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:")[0],
            epilog="examples:\n" + textwrap.indent(inspect.cleandoc(cls.EXAMPLES), "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        cls.add_arguments(parser)
        return parser

    @classmethod
    def add_arguments(cls, parser: Parser) -> None:
        add_fields(parser, cls)

    @classmethod
    def from_namespace(cls: type[Self], values: dict[str, Any]) -> Self:
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @abstractmethod
    def run(self) -> None:
        """Run the command; results go to standard output."""


@dataclasses.dataclass(kw_only=True)
class DeviceOptions(Options):
    """Options of a command that runs the model of an artifact.

    Args:
        device: The device to compute on, such as cuda, cuda:1 or mps; auto uses an accelerator if there is one.
            Default: the CPU.
        device_map: Distribute the model as transformers does: auto, or {module: device, ...}. Use instead of --device.
        offload_folder: Folder for the weights that --device-map leaves on disk.
        dtype: Load and run the model in float32, bfloat16 or float16; a model saved whole afterwards has this dtype
            too. Default: auto, the stored dtype.
    """

    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    offload_folder: Path | None = None
    dtype: str | None = None

    @classmethod
    def add_arguments(cls, parser: Parser) -> None:
        own = {field.name for field in dataclasses.fields(DeviceOptions)}
        add_fields(parser, cls, own)
        others = {field.name for field in dataclasses.fields(cls)} - own
        add_fields(parser.add_argument_group("where the model runs"), cls, others)

    @property
    def model_options(self) -> dict[str, Any]:
        """Return the options for `RetexModel.from_pretrained`."""
        given = {"device": self.device, "device_map": self.device_map, "dtype": self.dtype}
        return given if self.offload_folder is None else {**given, "offload_folder": str(self.offload_folder)}


def add_fields(group: Any, cls: type, left_out: typing.Collection[str] = ()) -> None:
    """Add an argument for every field of a documented dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if field.name not in left_out:
            _add_field(group, field, hints[field.name], describe(cls, field.name))


def _add_field(group: Any, field: dataclasses.Field, hint: Any, text: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    if typing.get_origin(hint) is Annotated:
        hint, flag = typing.get_args(hint)
    kind, many = _value_kind(hint)
    default = None if field.default is dataclasses.MISSING else field.default
    if default is not None and default is not False and default != "" and "default" not in text.lower():
        text = f"{text} Default: {str(default).rstrip('.')}."
    text = text.replace("%", "%%")
    if flag == POSITIONAL:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        # With an explicit default, even None, argparse does not treat the argument as required.
        shape = {"nargs": "*", "default": None} if many else {} if required else {"nargs": "?"}
        group.add_argument(field.name, type=kind, metavar=field.name.upper(), help=text, **shape)
        return
    if kind is bool:
        action = argparse.BooleanOptionalAction if default is not False else "store_true"
        group.add_argument(flag, dest=field.name, action=action, default=None, help=text)
    elif typing.get_origin(hint) is dict:
        group.add_argument(flag, dest=field.name, action=_AddPair, metavar="TASK=SOURCE", help=text)
    elif typing.get_origin(kind) is Literal:
        group.add_argument(flag, dest=field.name, choices=typing.get_args(kind), help=text)
    else:
        shape = {"action": "append"} if many else {}
        if many and "repeated" not in text:
            text += " May be repeated."
        group.add_argument(flag, dest=field.name, type=kind, metavar=_metavar(kind), help=text, **shape)


def _value_kind(hint: Any) -> tuple[Any, bool]:
    """Return the parser of one value, and whether there may be several."""
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType] or [hint]
    if typing.get_origin(hint) is list:
        return parts[0], True
    if typing.get_origin(hint) in (dict, Literal):
        return hint, False
    if len(parts) == 1 and (parts[0] in (str, int, float, bool, Path) or typing.get_origin(parts[0]) is Literal):
        return parts[0], False
    if set(parts) == {str, list[str]}:
        return _text_or_list, False
    return _yaml_value, False  # YAML gives 64, full, [a, b] and {method: ties} the right types


def _yaml_value(text: str) -> Any:
    try:
        return parse_yaml(text, "a flag", ConfigError, kind=None)
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a value") from None


def _text_or_list(text: str) -> Any:
    """Return a text unchanged, though YAML would parse `*a*` or `{a} and {b}`; parse `[a, b]` as a list."""
    return _yaml_value(text) if text.startswith("[") else text


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", Path: "PATH", str: "TEXT"}.get(kind, "VALUE")


class _AddPair(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, separator, source = values.partition("=")
        if not separator or not name or not source:
            parser.error(f"{option_string} takes TASK=SOURCE, not {values!r}")
        found = dict(getattr(namespace, self.dest) or {})
        if name in found:
            parser.error(f"{option_string} names {name!r} twice")
        setattr(namespace, self.dest, {**found, name: source})


def describe(cls: type, name: str) -> str:
    """Return the documentation of a field from the docstring of a class or of its bases."""
    texts = (base.__doc__ or "" for base in cls.__mro__ if dataclasses.is_dataclass(base))
    # Python 3.13 removes the indentation of docstrings itself.
    pattern = re.compile(rf"^ {{4}}{name}: (.+(?:\n {{8}}.+)*)", re.MULTILINE)
    found = next(match for text in texts if (match := pattern.search(inspect.cleandoc(text))))
    return re.sub(r"\s+", " ", found[1]).replace("`", "")
