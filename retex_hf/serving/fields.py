"""Typed reading of the fields of a request's JSON body; what is unknown or not supported is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InputError, brief
from ..utils.strict_files import parse_json
from .errors import ApiError

MOST_STRING = 64


def parse_body(body: bytes) -> Fields:
    """Parse a request's body, strictly: one JSON object in UTF-8, without duplicate keys or deep nesting."""
    try:
        return Fields(parse_json(body.decode("utf-8"), "The request", InputError))
    except UnicodeDecodeError:
        raise ApiError(400, "The request is not text in UTF-8.") from None
    except InputError as error:
        raise ApiError(400, str(error)) from None


class Fields:
    """The fields of a JSON object. Each is read once; `finish` refuses those that were not.

    >>> from retex_hf.serving.fields import parse_body
    >>> fields = parse_body(b'{"n": 2, "mode": 1}')
    >>> fields.whole("n", 1, least=1, most=9)
    2
    >>> fields.finish()
    Traceback (most recent call last):
    ...
    retex_hf.serving.errors.ApiError: 'mode' is not supported here.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def take(self, name: str) -> Any:
        """Return a field of any type; None if it is missing or null."""
        return self._left.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text."""
        value = self.take(name)
        return default if value is None else _require(isinstance(value, str), value, name, "a text")

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(name)
        return default if value is None else _require(isinstance(value, bool), value, name, "true or false")

    def whole(self, name: str, default: int | None, *, least: int, most: int) -> int | None:
        """Return an integer within limits."""
        value = self.take(name)
        if value is None:
            return default
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return _require(fits, value, name, f"an integer from {least} to {most}")

    def number(self, name: str, default: float | None, *, least: float, most: float) -> float | None:
        """Return a number within limits."""
        value = self.take(name)
        if value is None:
            return default
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        return float(_require(fits, value, name, f"a number from {least:g} to {most:g}"))

    def only(self, name: str, allowed: Iterable[Any]) -> None:
        """Accept a field whose value changes nothing; refuse other values, which are not supported."""
        value, allowed = self.take(name), list(allowed)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            which = f": only {' or '.join(brief(one) for one in allowed)} is" if allowed else ""
            raise ApiError(
                400,
                f"{name}={brief(value, MOST_STRING)} is not supported here{which}.",
                param=name,
                code="unsupported_parameter",
            )

    def finish(self) -> None:
        """Refuse fields that nobody has read."""
        for name, value in self._left.items():
            if value is not None:
                raise ApiError(
                    400, f"{brief(name, MOST_STRING)} is not supported here.", param=name[:MOST_STRING],
                    code="unsupported_parameter",
                )  # fmt: skip


def _require(fits: bool, value: Any, name: str, expected: str) -> Any:
    if not fits:
        raise ApiError(400, f"{name} must be {expected}, not {brief(value, MOST_STRING)}.", param=name)
    return value
