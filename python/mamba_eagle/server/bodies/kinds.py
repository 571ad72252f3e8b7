"""Bodies as pydantic models, and the kinds of values that they hold: each is declared once, and
read, refused, given its defaults and described (/openapi.json, docs/http.md) by that declaration.

Clients differ: null means absent, and a whole float is an integer. What no body declares is
refused, unless ``known`` lists it as harmless or the server accepts any (``accepts_unknown``).
"""

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from mamba_eagle.core import Parameter, is_unicode, shown
from mamba_eagle.limits import MAX_INTEGER
from mamba_eagle.server.bodies import known
from mamba_eagle.server.errors import RequestError, cut

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
    # Tokenizers refuse half of a surrogate pair.
    return value if isinstance(value, str) and (value.isascii() or is_unicode(value)) else None


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
    """For a value that is not shown, since it is too long."""

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
    """other: valid though it is outside the bounds."""
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


def text_or_texts(what: str, most: int) -> Kind:
    """The same, left as it is; what: "prompt"."""

    def convert(value: Any) -> str | list[str] | None:
        limit(value, what + "s", most)
        if value == []:
            raise ValueError(f"the list has no {what}")
        return all_of(value, as_text) if isinstance(value, list) else as_text(value)

    return Kind(convert, "must be a string or a list of strings", STRINGS)


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


def instance_of(types: type | tuple[type, ...], must: str, schema: Schema) -> Kind:
    return Kind(lambda value: value if isinstance(value, types) else None, must, schema)


OBJECT = instance_of(dict, "must be an object", {"type": "object"})
FLAG = instance_of(bool, "must be true or false", {"type": "boolean"})


# --allow-unknown-fields, where a body is being read
accepts_unknown: ContextVar[bool] = ContextVar("accepts_unknown", default=False)
Text = Annotated[str, TEXT]  # what tokenizers and replies can take
Integer = Annotated[int, INTEGER_KIND]
Flag = Annotated[bool, FLAG]
Object = Annotated[dict[str, Any], OBJECT]


def says(about: str, default: Any = None) -> Any:
    """A field that may be absent, and what it is for."""
    if isinstance(default, (list, dict)):  # pydantic would copy them deeply each time
        return Field(default_factory=type(default), description=about)
    return Field(default, description=about)


def needs(about: str) -> Any:
    """A field that must be there."""
    return Field(description=about)


class _Refused(ValueError):
    """name, value, remedy: of a field within the object that is being read."""


class Body(BaseModel):
    """A body, or an object within one."""

    model_config = ConfigDict(strict=True, extra="ignore")
    # fields of other servers, those of base classes included: what to do instead, or nothing
    REFUSED: ClassVar[Mapping[str, str]] = {}
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    FIELDS: ClassVar[frozenset[str]] = frozenset()  # as clients call them
    NEEDED: ClassVar[frozenset[str]] = frozenset()  # where null is wrong

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = cls.model_fields.items()
        cls.NEEDED = frozenset(name for name, field in fields if field.is_required())
        cls.FIELDS = frozenset(field.alias or name for name, field in fields)
        bases = [base for base in reversed(cls.__mro__) if issubclass(base, Body)]
        merged = {name: remedy for base in bases for name, remedy in base.REFUSED.items()}
        cls.REFUSED = {name: merged[name] for name in merged.keys() - cls.FIELDS}
        cls.HARMLESS = frozenset().union(*(base.HARMLESS for base in bases)) - cls.FIELDS

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in filter(cls.REFUSED.__contains__, values):
            remedy = cls.REFUSED[name]
            if values[name] not in known.neutral(name, remedy):
                raise _Refused(name, values[name], remedy)
        if not accepts_unknown.get():
            cls._refuse_unknown(values)
        needed = cls.NEEDED
        return {k: value for k, value in values.items() if value is not None or k in needed}

    @classmethod
    def _refuse_unknown(cls, values: dict[str, Any]) -> None:
        known_ones = cls.FIELDS | cls.HARMLESS | cls.REFUSED.keys()
        for name in values:
            if name not in known_ones and not _asks_for_nothing(values[name]):
                # a name may be as long as the body, and need not be valid text
                short = name[:64].encode("ascii", "backslashreplace").decode()
                near = get_close_matches(short, cls.FIELDS, 1)
                mean = f"did you mean {near[0]}? " if near else ""
                raise _Refused(
                    short,
                    values[name],
                    f"is not a field here: {mean}leave it out, or start the "
                    "server with --allow-unknown-fields",
                )


def _asks_for_nothing(value: Any) -> bool:
    """As gateways fill in the fields that they know; a zero may be meant."""
    return value is None or value is False or value in ("", [], {})


class Content(Body):
    """A part of a conversation, or a tool: clients send back what other servers added to it."""

    @classmethod
    def _refuse_unknown(cls, values: dict[str, Any]) -> None:
        pass


Model = TypeVar("Model", bound=Body)
REMEDIES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "missing": "is needed",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "string_unicode": "must be a string of valid Unicode",
}


def read(model: type[Model], value: Any, path: str = "") -> Model:
    """Raises: RequestError 400 for the first thing that is wrong. path: the value's own."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = path + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    )
    where = where.removeprefix(".")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _Refused):
        name, given, remedy = cause.args
        raise RequestError.about(f"{where}.{name}".removeprefix("."), given, remedy)
    if isinstance(cause, TooMany):
        raise RequestError(f"{where}: {cause}", param=where)
    remedy = REMEDIES.get(first["type"]) or str(cause or first["msg"])
    remedy = remedy[:1].lower() + remedy[1:]
    if first["type"] == "missing":
        field = None if path else model.model_fields.get(where)
        for kind in field.metadata if field is not None else ():
            if isinstance(kind, Kind) and kind.must:
                raise RequestError.about(where, None, kind.must)
        raise RequestError(f"{where} {remedy}", param=where)
    raise RequestError.about(where, first["input"], remedy)


class Description(GenerateJsonSchema):
    """Without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: Any) -> Schema:
        return self.generate_inner(schema["schema"])  # null means absent, everywhere

    def default_schema(self, schema: Any) -> Schema:
        made = super().default_schema(schema)
        if not isinstance(made.get("default"), (bool, int, float, str)) or made["default"] == "":
            made.pop("default", None)
        return made


def described(model: type[Body]) -> Schema:
    """Its JSON schema; models within it stand in ``$defs``."""
    return model.model_json_schema(
        ref_template="#/components/schemas/{model}", schema_generator=Description
    )


def takes(body: type[Body] | None = None, **queries: str) -> dict[str, Any]:
    """What a route reads, for its ``openapi_extra``; queries: of its address, and what each is."""
    return {"body": body, "queries": queries}


def items(model: type[Body], what: str, most: int, must: str, least: int = 0) -> Kind:
    """A list of models, which are read later; what: "messages"."""

    def convert(value: Any) -> list[Any] | None:
        limit(value, what, most)
        return value if isinstance(value, list) and len(value) >= least else None

    sizes = {"maxItems": most, **({"minItems": least} if least else {})}
    return _OfModel(convert, must, {}, model, lambda made: {**list_of(made), **sizes})


def one_or_each(model: type[Body], name: str) -> Kind:
    """A model, or a list of them with one for each prompt; name: the field's."""

    def convert(value: Any) -> Any:
        if not isinstance(value, list):
            return read(model, value, name)
        places = enumerate(value)
        return [read(model, {} if one is None else one, f"{name}[{i}]") for i, one in places]

    return _OfModel(convert, "", {}, model, lambda made: any_of(made, list_of(made)))


@dataclass(frozen=True, eq=False)
class _OfModel(Kind):
    """describe: makes the JSON schema of the model's."""

    model: type[Body]
    describe: Callable[[Schema], Schema]

    def __get_pydantic_json_schema__(self, _: Any, handler: Any) -> Schema:
        return self.describe(handler(self.model.__pydantic_core_schema__))


def count_in_address(name: str, given: str, least: int, most: int) -> int:
    """A number of an address's query. Raises: RequestError 400"""
    is_count = given.isascii() and given.isdigit() and len(given) < 10
    if not (is_count and least <= int(given) <= most):
        raise RequestError.about(name, given, f"must be {least} to {most}")
    return int(given)


_Place = tuple[Any, str] | None  # that of what it is in, and the end of its own path


def refuse_half_pairs(values: dict[str, Any]) -> None:
    """values: by their paths. JSON can write halves of surrogate pairs, which no text has.

    Raises: RequestError 400 for the first text, or name in an object, that is no valid Unicode.
    """
    # Paths are put together for the error alone: a name may be as long as the body, and what it
    # holds may be many.
    waiting: list[tuple[_Place, Any]] = [((None, name), one) for name, one in values.items()]
    waiting.reverse()
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str):
            if as_text(value) is None:
                raise RequestError.about(_path(place), value, TEXT.must)
        elif isinstance(value, dict):
            for name in value:
                if as_text(name) is None:
                    path = _path(place)
                    raise RequestError(
                        f"{path}: the name {shown(name)} must be a string of valid Unicode",
                        param=path,
                    )
            waiting += [((place, f".{name}"), inner) for name, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [((place, f"[{i}]"), inner) for i, inner in enumerate(value)]


def _path(place: _Place) -> str:
    parts = []
    while place is not None:
        place, part = place
        parts.append(part)
    return cut("".join(reversed(parts)))


def _metadata(value: Any) -> dict[str, str]:
    refuse_half_pairs({"metadata": OBJECT.read(value)})
    return {name: TEXT.take(inner, f"metadata.{name}") for name, inner in value.items()}


Metadata = Annotated[
    dict[str, str], Kind(_metadata, OBJECT.must, {**OBJECT.schema, "additionalProperties": STRING})
]
