"""``tools`` and ``tool_choice`` of a chat."""

import json
import re
from typing import Any, Literal, NamedTuple

from pydantic import field_validator

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_TOOL_NAME, MAX_TOOLS
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Content, Text, items, read
from mamba_eagle.server.errors import RequestError

NAME = re.compile(rf"[\w.:/-]{{1,{MAX_TOOL_NAME}}}", re.ASCII)
CHOICES = ("auto", "none", "required")


class Function(Content):
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
    def _is_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
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
        if kinds.as_text(text) is None:
            raise ValueError("must be a JSON schema of valid Unicode")
        return value


class Tool(Content):
    type: Literal["function"]
    function: Function


class NamedFunction(Content):
    name: str


class NamedChoice(Content):
    type: Literal["function"]
    function: NamedFunction


class Tools(NamedTuple):
    """given: the tools as the client wrote them, for the template. functions: theirs, read.
    choice: auto, required, or "named", and then ``named`` is the place of the one tool."""

    given: list[dict[str, Any]]
    functions: list[Function]
    choice: str
    named: int
    parallel: bool

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")


TOOL_CHOICE = kinds.untouched(
    kinds.any_of(
        {"enum": list(CHOICES)},
        {"type": "object", "properties": {"type": kinds.STRING, "function": {"type": "object"}}},
    )
)
TOOLS = items(Tool, "tools", MAX_TOOLS, "must be a list of tools")


def read_tools(
    tools: list[Any] | None, tool_choice: Any, parallel_tool_calls: bool
) -> Tools | None:
    """None if the body has no tools, or lets none be called.

    Raises: RequestError 400
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            remedy = "needs tools: give them, or leave it out"
            raise RequestError.about("tool_choice", tool_choice, remedy)
        return None
    functions = []
    seen: dict[str, int] = {}
    for i, entry in enumerate(tools):
        function = read(Tool, entry, f"tools[{i}]").function
        first = seen.setdefault(function.name, i)
        if first != i:
            remedy = f"tools[{first}] has this name already; each tool needs its own"
            raise RequestError.about(f"tools[{i}].function.name", function.name, remedy)
        functions.append(function)
    choice, named = _choice(tool_choice, seen)
    if choice == "none":
        return None
    return Tools(tools, functions, choice, named, parallel_tool_calls)


def _choice(value: Any, places: dict[str, int]) -> tuple[str, int]:
    """The choice, and the place of the tool that it names, -1 for none."""
    if value is None:
        return "auto", -1
    if isinstance(value, str):
        if value not in CHOICES:
            remedy = (
                f'must be one of {", ".join(CHOICES)}, or {{"type": "function", "function": '
                '{"name": ...}}'
            )
            raise RequestError.about("tool_choice", value, remedy)
        return value, -1
    name = read(NamedChoice, value, "tool_choice").function.name
    if name not in places:
        known = shown(", ".join(places))[1:-1]
        remedy = f"must be the name of a tool: {known}"
        raise RequestError.about("tool_choice.function.name", name, remedy)
    return "named", places[name]
