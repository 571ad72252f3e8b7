"""Reads JSON bodies by hand: every refusal names the field, its value and what would be right.

null means absent, unknown keys are ignored, and a whole float is an integer: clients differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_INTEGER
from mamba_eagle.server.errors import RequestError

T = TypeVar("T")


class Fields:
    """An object of the body; ``where`` is its path, for messages."""

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def raw(self, name: str) -> Any:
        return self.values.get(name)

    def wrong(self, name: str, remedy: str) -> RequestError:
        path = self.where + name
        return RequestError(f"{path} = {shown(self.values.get(name))}: {remedy}", param=path)

    def too_many(self, name: str, what: str, count: int, most: int) -> RequestError:
        """what: the items, as in "stop strings"."""
        path = self.where + name
        return RequestError(
            f"{path}: {count} {what} are more than the limit of {most}: send fewer", param=path
        )

    def _read(self, name: str, default: T, convert: Callable[[Any], T | None], kind: str) -> T:
        value = self.values.get(name)
        if value is None:
            return default
        result = convert(value)
        if result is None:
            raise self.wrong(name, f"must be {kind}")
        return result

    def integer(self, name: str, default: int) -> int:
        value = self.values.get(name)
        kind = "an integer"
        if isinstance(value, (int, float)) and not _fits(value):
            kind = "an integer between -2**63 and 2**63 - 1"
        return self._read(name, default, as_integer, kind)

    def number(self, name: str, default: float) -> float:
        return self._read(name, default, as_number, "a finite number")

    def flag(self, name: str, default: bool = False) -> bool:
        def convert(value: Any) -> bool | None:
            return value if isinstance(value, bool) else None

        return self._read(name, default, convert, "true or false")

    def text(self, name: str, default: str = "") -> str:
        return self._read(name, default, as_text, "a string of valid Unicode")

    def short_text(self, name: str, most: int, default: str = "") -> str:
        """A string that replies repeat, of at most so many characters."""
        value = self.text(name, default)
        if len(value) > most:
            remedy = f"has {len(value)} characters but may have at most {most}: shorten it"
            raise self.wrong(name, remedy)
        return value

    def texts(self, name: str, what: str, most: int) -> list[str]:
        """A string or a list of at most so many strings; what: "stop strings"."""
        value = self.values.get(name)
        if isinstance(value, list) and len(value) > most:
            raise self.too_many(name, what, len(value), most)

        def convert(value: Any) -> list[str] | None:
            return all_of([value] if isinstance(value, str) else value, as_text)

        return self._read(name, [], convert, "a string or a list of strings")

    def integers(self, name: str, what: str, most: int) -> list[int]:
        value = self.values.get(name)
        if isinstance(value, list) and len(value) > most:
            raise self.too_many(name, what, len(value), most)
        return self._read(name, [], lambda value: all_of(value, as_integer), "a list of integers")

    def object(self, name: str) -> Fields:
        def convert(value: Any) -> dict[str, Any] | None:
            return value if isinstance(value, dict) else None

        return Fields(self._read(name, {}, convert, "an object"), f"{self.where}{name}.")


def as_integer(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and _fits(value) else None


def _fits(value: float) -> bool:
    """Messages carry 64-bit integers."""
    return -MAX_INTEGER - 1 <= value <= MAX_INTEGER


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair; tokenizers refuse it
            return None
    return value


def all_of(values: Any, convert: Callable[[Any], T | None]) -> list[T] | None:
    """Each item converted; None if it is no list or an item is wrong."""
    if not isinstance(values, list):
        return None
    results = []
    for value in values:
        result = convert(value)
        if result is None:
            return None
        results.append(result)
    return results
