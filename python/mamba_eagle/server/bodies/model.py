"""Bodies as pydantic models: each is declared once, and read, refused, given its defaults and
described (/openapi.json, docs/http.md) by that declaration.

Clients differ: null means absent, and a whole float is an integer. What no body declares
is refused, unless ``known`` lists it as harmless or the server accepts any (``accepts_unknown``).
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Schema
from mamba_eagle.server.errors import RequestError

# --allow-unknown-fields, where a body is being read
accepts_unknown: ContextVar[bool] = ContextVar("accepts_unknown", default=False)
Text = Annotated[str, kinds.TEXT]  # what tokenizers and replies can take
Integer = Annotated[int, kinds.INTEGER_KIND]
Number = Annotated[float, kinds.NUMBER]
Flag = Annotated[bool, kinds.FLAG]
Object = Annotated[dict[str, Any], kinds.OBJECT]


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
    # of other servers' fields, with those of the classes above: what to do instead, or nothing
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
                # a name may be as long as the body, and no valid text
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
    if isinstance(cause, kinds.TooMany):
        raise RequestError(f"{where}: {cause}", param=where)
    remedy = REMEDIES.get(first["type"]) or str(cause or first["msg"])
    remedy = remedy[:1].lower() + remedy[1:]
    if first["type"] == "missing":
        field = None if path else model.model_fields.get(where)
        for kind in field.metadata if field is not None else ():
            if isinstance(kind, kinds.Kind):
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


def items(model: type[Body], what: str, most: int, must: str, least: int = 0) -> kinds.Kind:
    """A list of models, which are read later; what: "messages"."""

    def convert(value: Any) -> list[Any] | None:
        kinds.limit(value, what, most)
        return value if isinstance(value, list) and len(value) >= least else None

    return _Items(
        convert, must, {"maxItems": most, **({"minItems": least} if least else {})}, model
    )


@dataclass(frozen=True, eq=False)
class _Items(kinds.Kind):
    model: type[Body]

    def __get_pydantic_json_schema__(self, _: Any, handler: Any) -> Schema:
        return {**kinds.list_of(handler(self.model.__pydantic_core_schema__)), **self.schema}


@dataclass(frozen=True, eq=False)
class OneOrEach:
    """A model, or a list of them with one for each prompt; ``name`` is the field's."""

    model: type[Body]
    name: str

    def read(self, value: Any) -> Any:
        if not isinstance(value, list):
            return read(self.model, value, self.name)
        return [
            read(self.model, {} if one is None else one, f"{self.name}[{i}]")
            for i, one in enumerate(value)
        ]

    def __get_pydantic_core_schema__(self, *_: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, _: Any, handler: Any) -> Schema:
        model = handler(self.model.__pydantic_core_schema__)
        return kinds.any_of(model, kinds.list_of(model))
