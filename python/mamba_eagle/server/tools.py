"""``tools`` and ``tool_choice`` of a chat."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

from pydantic import field_validator

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_TOOL_NAME, MAX_TOOLS
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, as_text
from mamba_eagle.server.nested import Body, Text, read

NAME = re.compile(rf"[\w.:/-]{{1,{MAX_TOOL_NAME}}}", re.ASCII)
CHOICES = ("auto", "none", "required")


class Function(Body):
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                f"must be 1 to {MAX_TOOL_NAME} letters, digits, underscores, dashes, dots, colons "
                "or slashes"
            )
        return value

    @field_validator("parameters")
    @classmethod
    def _is_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        if value.get("type", "object") != "object":
            raise ValueError("must be a JSON schema of type object")
        properties = value.get("properties", {})
        if not isinstance(properties, dict) or not all(
            isinstance(schema, (dict, bool)) for schema in properties.values()
        ):
            raise ValueError("must be a JSON schema, whose properties are an object of schemas")
        required = value.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError("must be a JSON schema, whose required is a list of names")
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON schema, whose numbers are finite") from None
        if as_text(text) is None:
            raise ValueError("must be a JSON schema of valid Unicode")
        return value


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class Tools(NamedTuple):
    """given: the tools as the client wrote them, for the template. functions: theirs, read.
    choice: one of ``CHOICES``, or "named", and then ``named`` is the place of the one tool."""

    given: list[dict[str, Any]]
    functions: list[Function]
    choice: str
    named: int
    parallel: bool

    @property
    def may_call(self) -> bool:
        return self.choice != "none"

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")


def read_tools(fields: Fields) -> Tools | None:
    """None if the body has no tools.

    Raises: RequestError 400
    """
    parallel = fields.flag("parallel_tool_calls", True)
    value = fields.raw("tools")
    if value is None or value == []:
        if fields.raw("tool_choice") not in (None, "none", "auto"):
            raise fields.wrong("tool_choice", "needs tools: give them, or leave it out")
        return None
    if not isinstance(value, list):
        raise fields.wrong("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise fields.too_many("tools", "tools", len(value), MAX_TOOLS)
    functions = []
    seen: dict[str, int] = {}
    for i, entry in enumerate(value):
        function = read(Tool, entry, f"tools[{i}]").function
        first = seen.setdefault(function.name, i)
        if first != i:
            path = f"tools[{i}].function.name"
            raise RequestError(
                f"{path} = {shown(function.name)}: tools[{first}] has this name already; each "
                "tool needs its own",
                param=path,
            )
        functions.append(function)
    choice, named = _choice(fields, seen)
    return Tools(value, functions, choice, named, parallel)


def _choice(fields: Fields, places: dict[str, int]) -> tuple[str, int]:
    """The choice, and the place of the tool that it names, -1 for none."""
    value = fields.raw("tool_choice")
    if value is None:
        return "auto", -1
    if isinstance(value, str):
        if value not in CHOICES:
            raise fields.wrong(
                "tool_choice",
                f'must be one of {", ".join(CHOICES)}, or {{"type": "function", "function": '
                '{"name": ...}}',
            )
        return value, -1
    name = read(NamedChoice, value, "tool_choice").function.name
    if name not in places:
        known = shown(", ".join(places))[1:-1]
        raise RequestError(
            f"tool_choice.function.name = {shown(name)}: must be the name of a tool: {known}",
            param="tool_choice.function.name",
        )
    return "named", places[name]
