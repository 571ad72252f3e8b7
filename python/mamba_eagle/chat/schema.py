"""The schemas of a tool's arguments, one by one: what calls in tags are written and read by."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.core import shown

MAX_REFERENCES = 8  # in a row
# Keywords that say more of an object than each argument's own schema does.
WHOLE = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "minProperties")
# Others that say which properties there may be.
OTHERS = ("additionalProperties", "unevaluatedProperties", "$ref")


class Argument(NamedTuple):
    """``schema`` stands alone: it has the definitions that it refers to."""

    name: str
    schema: dict[str, Any]
    required: bool


def arguments_of(schema: Mapping[str, Any]) -> list[Argument]:
    """Those of a schema of type object, in its order.

    Raises: GrammarError for what cannot be said of arguments one by one.
    """
    for key in WHOLE:
        if key in schema:
            raise GrammarError(
                f"this model writes arguments one by one, for which {key} cannot be enforced: "
                "leave it out, or let the model choose (tool_choice auto, not strict)",
                key,
            )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name in required:
        if name not in properties:
            raise GrammarError(f"{shown(name)} is required but no property", "required")
    for name in properties:
        if not name or any(char in name for char in "<>\n"):
            raise GrammarError(f"{shown(name)} is not a name that a tag can have", "properties")
    return [
        Argument(name, standalone(value, schema), name in required)
        for name, value in properties.items()
    ]


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments without those that it does not name: a weak model makes up more and
    more of them. What says ``additionalProperties`` itself is left as it is, and so is what several
    schemas describe together."""
    if schema.get("type", "object") == "object":
        schema = {"properties": {}, **schema}
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), Mapping):
            made[key] = {name: _closed(value) for name, value in schema[key].items()}
    if "items" in schema:
        made["items"] = _closed(schema["items"])
    named = schema.get("properties")
    all_named = isinstance(named, Mapping) and all(
        one in named for one in schema.get("required", ())
    )
    if all_named and not any(key in schema for key in (*WHOLE, *OTHERS)):
        made["additionalProperties"] = False
    return made


def standalone(value: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema with what it refers to at its top, and the root's definitions."""
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    for _ in range(MAX_REFERENCES):
        if isinstance(value.get("$ref"), str):
            target = _target(value["$ref"], root)
            if target is None:
                break
            value = {**target, **{key: one for key, one in value.items() if key != "$ref"}}
        elif isinstance(value.get("allOf"), list) and len(value["allOf"]) == 1:
            (only,) = value["allOf"]
            rest = {key: one for key, one in value.items() if key != "allOf"}
            value = {**only, **rest} if isinstance(only, dict) else rest
        else:
            break
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**value, **kept}


def _target(reference: str, root: Mapping[str, Any]) -> dict[str, Any] | None:
    found: Any = root
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else None


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a value may have, which the top of the schema allows; empty: any."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {one for one in declared if isinstance(one, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {json_type(value) for value in values}
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or []:
            types = types_of(choice) if isinstance(choice, Mapping) else set()
            if not types:
                return set()
            found |= types
    return found


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def tool_properties(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The arguments' schemas of each tool, by its name."""
    functions = [tool["function"] for tool in tools]
    return {one["name"]: (one.get("parameters") or {}).get("properties") or {} for one in functions}


def readable_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the reader of calls in tags wants them: each argument says its types itself."""
    return [{**tool, "function": _readable(tool["function"])} for tool in tools]


def _readable(function: Mapping[str, Any]) -> dict[str, Any]:
    root = function.get("parameters") or {}
    properties = {}
    for name, value in root.get("properties", {}).items():
        types = types_of(standalone(value, root))
        # A value that may be a text is one, whatever else it reads as.
        order = ["string", *types & {"null"}] if "string" in types else sorted(types)
        properties[name] = {"type": order} if order else {}
    return {**function, "parameters": {"type": "object", "properties": properties}}
