"""Kinds of values that bodies hold: how each is read, what is said of a wrong one, its schema."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import core_schema

from mamba_eagle.core import Parameter
from mamba_eagle.limits import MAX_INTEGER
from mamba_eagle.server.errors import RequestError

T = TypeVar("T")
Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


@dataclass(frozen=True, eq=False)
class Kind:
    """How a value is read in place of pydantic's way, and its JSON schema. ``convert`` returns
    None for what is wrong; ``must`` is the remedy. A ValueError is a remedy of its own."""

    convert: Callable[[Any], Any]
    must: str
    schema: Schema

    def read(self, value: Any) -> Any:
        result = self.convert(value)
        if result is None:
            raise ValueError(self.must)
        return result

    def take(self, value: Any, path: str) -> Any:
        """Raises: RequestError 400"""
        try:
            return self.read(value)
        except ValueError as error:
            raise RequestError.about(path, value, str(error)) from None

    def __get_pydantic_core_schema__(self, *_: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, _: Any, handler: Any) -> Schema:
        return dict(self.schema)


def as_integer(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (int, float)) and not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        # messages carry 64 bits
        raise ValueError("must be an integer between -2**63 and 2**63 - 1")
    return value if type(value) is int else None


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
    """Each item converted; None if it is not a list or an item is wrong."""
    if not isinstance(values, list):
        return None
    results = []
    for value in values:
        result = convert(value)
        if result is None:
            return None
        results.append(result)
    return results


def limit(value: Any, what: str, most: int) -> None:
    """Raises: TooMany; what: the items, as in "stop strings"."""
    if isinstance(value, list) and len(value) > most:
        raise TooMany(what, len(value), most)


class TooMany(ValueError):
    """Of a value that is not shown: it is too long."""

    def __init__(self, what: str, count: int, most: int) -> None:
        super().__init__(f"{count} {what} are more than the limit of {most}: send fewer")


def short(most: int, must: str = "") -> Kind:
    """A text that is repeated or kept; must: the remedy for a longer one."""

    def convert(value: Any) -> str | None:
        text = as_text(value)
        if text is not None and len(text) > most:
            known = f"has {len(text)} characters but may have at most {most}: shorten it"
            raise ValueError(must or known)
        return text

    return Kind(convert, TEXT.must, {**STRING, "maxLength": most})


def integer(least: int, most: int, must: str = "", other: int | None = None) -> Kind:
    """other: right though it is outside of the bounds."""
    return _bounded(INTEGER_KIND, Parameter("", least, most, other=other, must=must))


def number(least: float, most: float, above: float = -math.inf, must: str = "") -> Kind:
    return _bounded(NUMBER, Parameter("", least, most, above, must=must))


def _bounded(kind: Kind, parameter: Parameter) -> Kind:
    def convert(value: Any) -> Any:
        number = kind.read(value)
        if not parameter.fits(number):
            raise ValueError(parameter.remedy)
        return number

    return Kind(convert, kind.must, {**kind.schema, **bounds(parameter)})


def bounds(parameter: Parameter) -> Schema:
    least = parameter.least if parameter.other is None else min(parameter.least, parameter.other)
    found = {"minimum": least, "maximum": parameter.most}
    if parameter.above >= least:
        found = {"exclusiveMinimum": parameter.above, "maximum": parameter.most}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def choice_of(*names: str, absent: str | None = None) -> Kind:
    """absent: a text that says nothing."""

    def convert(value: Any) -> str | None:
        return value if value in names or value == absent else None

    known = f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)
    return Kind(convert, f"must be {known}", {"enum": list(names)})


def texts(what: str, most: int) -> Kind:
    """A string or a list of strings becomes a list; what: "stop strings"."""

    def convert(value: Any) -> list[str] | None:
        limit(value, what, most)
        return all_of([value] if isinstance(value, str) else value, as_text)

    schema = any_of(STRING, {**list_of(STRING), "maxItems": most})
    return Kind(convert, "must be a string or a list of strings", schema)


def integers(what: str, most: int) -> Kind:
    def convert(value: Any) -> list[int] | None:
        limit(value, what, most)
        return all_of(value, _plain_integer)

    return Kind(convert, "must be a list of integers", {**list_of(INTEGER), "maxItems": most})


def _plain_integer(value: Any) -> int | None:
    try:
        return as_integer(value)
    except ValueError:
        return None


IDS = list_of(INTEGER)
STRINGS = any_of(STRING, list_of(STRING))
ID_LISTS = any_of(IDS, list_of(IDS))


def untouched(schema: Schema, must: str = "") -> Kind:
    """A value that is read later, by what knows the model."""
    return Kind(lambda value: value, must, schema)


TEXT = Kind(as_text, "must be a string of valid Unicode", STRING)
INTEGER_KIND = Kind(as_integer, "must be an integer", INTEGER)
NUMBER = Kind(as_number, "must be a finite number", {"type": "number"})
OBJECT = Kind(
    lambda value: value if isinstance(value, dict) else None,
    "must be an object",
    {"type": "object"},
)
FLAG = Kind(
    lambda value: value if isinstance(value, bool) else None,
    "must be true or false",
    {"type": "boolean"},
)
