"""Reads JSON bodies by hand: every refusal names the field, its value and what would be right.

null means absent, unknown keys are ignored, and a whole float is an integer: clients differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from mamba_eagle.server.errors import RequestError

MAX_BODY = 64 * 2**20
# An oversized body is read and thrown away up to this length, since a client that is still
# sending would not see the answer.
MAX_DRAINED = 4 * MAX_BODY
T = TypeVar("T")


def shown(value: Any) -> str:
    """A value for an error message, not longer than a line."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


async def read_body(request: Request) -> bytes:
    """Raises: RequestError 413 when it is longer than MAX_BODY."""
    parts: list[bytes] = []
    length = 0
    try:
        async for part in request.stream():
            length += len(part)
            if length <= MAX_BODY:
                parts.append(part)
            elif length > MAX_DRAINED:
                break
    except ClientDisconnect:
        raise RequestError("the client went away before its request was complete") from None
    if length > MAX_BODY:
        raise RequestError(f"the body is longer than {MAX_BODY // 2**20} MiB", 413)
    return b"".join(parts)


async def read_fields(request: Request) -> Fields:
    """The body as a JSON object; an empty one counts as {}.

    Raises: RequestError
    """
    body = await read_body(request)
    if not body.strip():
        return Fields({})
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            # Takes NaN and Infinity, which the readers below then refuse by field.
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {shown(value)}")
    return Fields(value)


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

    def _read(self, name: str, default: T, convert: Callable[[Any], T | None], kind: str) -> T:
        value = self.values.get(name)
        if value is None:
            return default
        result = convert(value)
        if result is None:
            raise self.wrong(name, f"must be {kind}")
        return result

    def integer(self, name: str, default: int) -> int:
        return self._read(name, default, as_integer, "an integer")

    def number(self, name: str, default: float) -> float:
        return self._read(name, default, as_number, "a finite number")

    def flag(self, name: str, default: bool = False) -> bool:
        def convert(value: Any) -> bool | None:
            return value if isinstance(value, bool) else None

        return self._read(name, default, convert, "true or false")

    def text(self, name: str, default: str = "") -> str:
        return self._read(name, default, as_text, "a string of valid Unicode")

    def texts(self, name: str) -> list[str]:
        """A string or a list of strings."""

        def convert(value: Any) -> list[str] | None:
            return all_of([value] if isinstance(value, str) else value, as_text)

        return self._read(name, [], convert, "a string or a list of strings")

    def integers(self, name: str) -> list[int]:
        return self._read(name, [], lambda value: all_of(value, as_integer), "a list of integers")

    def object(self, name: str) -> Fields:
        def convert(value: Any) -> dict[str, Any] | None:
            return value if isinstance(value, dict) else None

        return Fields(self._read(name, {}, convert, "an object"), f"{self.where}{name}.")


def as_integer(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Messages carry 64-bit integers.
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


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
