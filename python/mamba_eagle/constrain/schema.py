"""JSON schemas before llguidance reads them: how large, how deep, and whether a text can fit.

llguidance refuses keywords that it cannot enforce, and names them; ``blamed`` finds where in the
schema they stand.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_GRAMMAR_CHARACTERS, MAX_SCHEMA_DEPTH

# One blank behind a comma and a colon at most: what a weak model pads is paid for in tokens.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
OPTIONS = "x-guidance"  # llguidance's own key in a schema: clients may not set it


def checked_schema(schema: str | Mapping[str, Any] | bool, whitespace: str | None = None) -> str:
    """The schema as JSON for llguidance, its options included.

    whitespace: as in ``json_schema_grammar``.

    Raises: GrammarError
    """
    decoded = _decoded(schema)
    _limit_depth(decoded)
    try:
        text = json.dumps(decoded, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"it is not JSON: {shown(str(error))}") from None
    limit_length(text, "the schema")
    options: dict[str, Any] = COMPACT
    if whitespace is not None:
        free = {"whitespace_pattern": whitespace}
        options = free if whitespace else {"whitespace_flexible": False}
    rest = {key: value for key, value in decoded.items() if key != OPTIONS}
    return json.dumps({**rest, OPTIONS: options}, ensure_ascii=False)


def _decoded(schema: str | Mapping[str, Any] | bool) -> dict[str, Any]:
    if isinstance(schema, str):
        schema = decoded_json(schema, "the schema")
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("no value fits the schema false: give another")
    if not isinstance(schema, Mapping):
        raise GrammarError("must be a JSON schema, an object")
    return dict(schema)


def decoded_json(text: str, what: str) -> Any:
    """Raises: GrammarError"""
    limit_length(text, what)
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise GrammarError(f"it is not JSON: {shown(str(error))}") from None


def limit_length(text: str, what: str) -> None:
    """Raises: GrammarError"""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(
            f"{what} has {len(text)} characters but may have at most {MAX_GRAMMAR_CHARACTERS}: "
            "shorten it"
        )


def _limit_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list))]


def _too_deep() -> GrammarError:
    return GrammarError(
        f"objects and lists are nested more than {MAX_SCHEMA_DEPTH} deep: move inner schemas to "
        "$defs"
    )


# ── schemas that refer to themselves ─────────────────────────────────────────────────────────


def refuse_endless(schema: str) -> None:
    """schema: as ``checked_schema`` returned it. Long chains of references take seconds.

    Raises: GrammarError
    """
    if '"$ref"' in schema and not _Finite(msgspec.json.decode(schema)).root_is():
        raise GrammarError(
            "every value that fits refers to itself without end: let some $ref be optional", "$ref"
        )


class _Finite:
    """Which parts of a schema a finite value can fit: the least fixed point over its references.

    Only what forces a value to contain another counts: required properties, least items, allOf.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.known: set[int] = set()  # by id: parts that a finite value fits

    def root_is(self) -> bool:
        parts = [part for part in _walk(self.root) if isinstance(part, dict)]
        grows = True
        while grows and id(self.root) not in self.known:
            new = {id(part) for part in parts if id(part) not in self.known and self._fits(part)}
            self.known |= new
            grows = bool(new)
        return id(self.root) in self.known

    def _fits(self, part: dict[str, Any]) -> bool:
        return all(self._is(needed) for needed in self._needed(part)) and all(
            any(map(self._is, options)) for options in self._choices(part)
        )

    def _is(self, part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in self.known

    def _choices(self, part: dict[str, Any]) -> Iterator[list[Any]]:
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list):
                yield part[name]

    def _needed(self, part: dict[str, Any]) -> Iterator[Any]:
        if "$ref" in part:
            yield self._target(part["$ref"])
        if isinstance(part.get("allOf"), list):
            yield from part["allOf"]
        kind, required = part.get("type"), part.get("required")
        properties = part.get("properties")
        if kind == "object" and isinstance(required, list) and isinstance(properties, dict):
            yield from (properties.get(name) for name in required if isinstance(name, str))
        least = part.get("minItems")
        if kind == "array" and isinstance(least, int) and least > 0:
            first = part.get("prefixItems")
            first = first if isinstance(first, list) else []
            yield from first[:least]
            if least > len(first):
                yield part.get("items")

    def _target(self, reference: Any) -> Any:
        """The part that a reference inside the schema names; None if it is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self.root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found


def _walk(value: Any) -> Iterator[Any]:
    """The value and all objects and lists in it."""
    open_ones = [value]
    while open_ones:
        value = open_ones.pop()
        yield value
        open_ones += _children(value)


# ── what llguidance's messages blame ─────────────────────────────────────────────────────────


def blamed(schema: str, message: str) -> str:
    """The path to the keyword or the value that a message of llguidance names; "" if none is
    found. schema: as ``checked_schema`` returned it."""
    decoded = msgspec.json.decode(schema)
    listed = re.search(r"Unimplemented keys: \[(.*)\]", message)
    if listed:
        return _path(decoded, re.findall(r'"([^"]+)"', listed.group(1)))
    for pattern, keyword in _BY_MESSAGE:
        found = re.search(pattern, message)
        if found:
            values = list(found.groups())
            return (values and _path(decoded, [keyword], values)) or _path(decoded, [keyword])
    return ""


_BY_MESSAGE = (
    (r"Unknown format: (.*)", "format"),
    (r"Invalid type: (.*)", "type"),
    (r"oneOf constraints are not supported", "oneOf"),
    (r"(?:Pointer|Resource|Unresolvable)\b", "$ref"),
    (r"regex parse error", "pattern"),
)


def _path(
    value: Any, keywords: Sequence[str], values: Sequence[Any] | None = None, above: str = ""
) -> str:
    """Where the first of the keywords stands, with one of the values if any are given; "" if
    nowhere."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if key == OPTIONS and not above:
            continue
        path = f"{above}[{key}]" if isinstance(value, list) else f"{above}.{key}".lstrip(".")
        if key in keywords and (values is None or item in values):
            return path
        if isinstance(item, (dict, list)):
            deeper = _path(item, keywords, values, path)
            if deeper:
                return deeper
    return ""
