"""Structural tags: free text in which some beginnings must be followed by text of a given form.

Two spellings are read, by the names that SGLang, vLLM and xgrammar gave them:

    {"structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [...], "tags": [
        {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}
    ]}}

``tagged_grammar`` makes the same from parts, for tool calls. What a name in ``special`` stands for
is that special token, which no free text contains.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import (
    ANY_TEXT,
    Grammar,
    Special,
    any_of,
    ebnf_grammar,
    json_schema_grammar,
    lark_grammar,
    literal,
    regex_grammar,
    sequence,
    text_grammar,
    until,
)
from mamba_eagle.constrain.schema import decoded_json
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_TAG_DEPTH, MAX_TAGS


class Tag(NamedTuple):
    """``begin``, then what ``content`` allows, then ``end``; content None: any text up to the end,
    which must not be empty then."""

    begin: str
    content: Grammar | None
    end: str


def tag_grammar(tag: Tag, special: Special = None) -> Grammar:
    """The tag alone.

    Raises: GrammarError
    """
    return _after(tag, literal(tag.begin, special), special)


def tagged_grammar(
    triggers: Sequence[str],
    tags: Sequence[Tag],
    at_least_one: bool = False,
    stop_after_first: bool = False,
    special: Special = None,
) -> Grammar:
    """Free text in which each trigger is the beginning of one of the tags.

    A trigger cannot occur in the free text otherwise. at_least_one: the text begins with a tag.
    stop_after_first: it ends after one.

    Raises: GrammarError
    """
    if not triggers or not tags:
        raise GrammarError("triggers and tags are needed, at least one of each")
    if len(tags) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise GrammarError(f"more than {MAX_TAGS} tags or triggers: send fewer")
    if not all(triggers):
        raise GrammarError("a trigger is empty: give the text that a tag begins with", "triggers")
    rules, uses = "", []
    for i, tag in enumerate(tags):
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(
                f"begin {shown(tag.begin)} starts with none of the triggers", f"tags[{i}].begin"
            )
    for i, trigger in enumerate(triggers):
        own = [tag for tag in tags if _trigger_of(tag, triggers) == trigger]
        if not own:
            raise GrammarError(f"no tag begins with the trigger {shown(trigger)}", f"triggers[{i}]")
        rests = [_after(tag, literal(tag.begin[len(trigger) :], special), special) for tag in own]
        uses += rests
        options = " | ".join(f"@{rest.name}" for rest in rests)
        free, its_rules = until(trigger, special, f"trigger{i}")
        rules += f"tag{i}: {free} ({options})\n{its_rules}"
    some = "(" + " | ".join(f"tag{i}" for i in range(len(triggers))) + ")"
    if at_least_one:
        whole = any_of(*(tag_grammar(tag, special) for tag in tags))
        uses.append(whole)
        start = f"@{whole.name}" if stop_after_first else f"@{whole.name} {some}* TEXT"
    else:
        start = f"{some} | TEXT" if stop_after_first else f"{some}* TEXT"
    text = "" if at_least_one and stop_after_first else f"TEXT: {ANY_TEXT}\n"
    return lark_grammar(f"start: {start}\n{rules}{text}", *uses)


def _trigger_of(tag: Tag, triggers: Sequence[str]) -> str:
    """The trigger that stands for a tag: the first to be complete when its beginning is read."""
    return min((trigger for trigger in triggers if tag.begin.startswith(trigger)), key=len)


def _after(tag: Tag, opening: str, special: Special) -> Grammar:
    """A tag, of whose ``begin`` only what the Lark text ``opening`` says is still to come."""
    if tag.content is None:
        if not tag.end:
            raise GrammarError("a tag with any text needs an end that is not empty", "end")
        inside, rules = until(tag.end, special, "inside")
        return lark_grammar(f"start: {opening} {inside}\n{rules}")
    return lark_grammar(
        f"start: {opening} @{tag.content.name} {literal(tag.end, special)}", tag.content
    )


# ── the two spellings ────────────────────────────────────────────────────────────────────────


def structural_tag_grammar(value: str | Mapping[str, Any], special: Special = None) -> Grammar:
    """Either spelling, as JSON text or decoded.

    Raises: GrammarError that names what is wrong by its path.
    """
    if isinstance(value, str):
        value = decoded_json(value, "it")
    if not isinstance(value, Mapping):
        raise GrammarError("must be an object, or its JSON text")
    reader = _Reader(special)
    if "format" in value:
        return reader.format(value["format"], "format", 0)
    if "structures" in value:
        return reader.structures(value)
    raise GrammarError("needs format (type structural_tag), or structures and triggers")


class _Reader:
    """Reads the parts of a structural tag; a path says where each stands."""

    def __init__(self, special: Special) -> None:
        self.special = special
        self.kinds: dict[str, Callable[[Mapping[str, Any], str, int], Grammar]] = {
            "any_text": lambda *_: lark_grammar(f"start: TEXT\nTEXT: {ANY_TEXT}"),
            "const_string": lambda value, path, _: text_grammar(
                _text(value, "value", path), special
            ),
            "grammar": self._grammar,
            "json_schema": self._json_schema,
            "or": lambda *part: any_of(*self._elements(*part)),
            "regex": self._regex,
            "sequence": lambda *part: sequence(*self._elements(*part)),
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def structures(self, value: Mapping[str, Any]) -> Grammar:
        tags = []
        for i, part in enumerate(_list(value, "structures", "")):
            path = f"structures[{i}]"
            part = _object(part, path)
            schema = self._json_schema({"json_schema": part.get("schema", {})}, path, 0)
            tags.append(Tag(_text(part, "begin", path), schema, _text(part, "end", path, "")))
        triggers = _texts(value, "triggers", "")
        return tagged_grammar(triggers, tags, special=self.special)

    def format(self, value: Any, path: str, depth: int) -> Grammar:
        value = _object(value, path)
        kind = value.get("type")
        if depth > MAX_TAG_DEPTH:
            raise GrammarError(f"formats are nested more than {MAX_TAG_DEPTH} deep", path)
        if kind not in self.kinds:
            known = ", ".join(self.kinds)
            raise GrammarError(f"type {shown(kind)} is not one of {known}", path + ".type")
        return self.kinds[kind](value, path, depth + 1)

    def _grammar(self, value: Mapping[str, Any], path: str, depth: int) -> Grammar:
        return _at(path + ".grammar", lambda: ebnf_grammar(_text(value, "grammar", path)))

    def _json_schema(self, value: Mapping[str, Any], path: str, depth: int) -> Grammar:
        schema = value.get("json_schema")
        return _at(path + ".json_schema", lambda: json_schema_grammar(schema))  # type: ignore[arg-type]

    def _regex(self, value: Mapping[str, Any], path: str, depth: int) -> Grammar:
        return _at(path + ".pattern", lambda: regex_grammar(_text(value, "pattern", path)))

    def _elements(self, value: Mapping[str, Any], path: str, depth: int) -> list[Grammar]:
        elements = _list(value, "elements", path)
        return [
            self.format(element, f"{path}.elements[{i}]", depth)
            for i, element in enumerate(elements)
        ]

    def _tag(self, value: Mapping[str, Any], path: str, depth: int) -> Grammar:
        return _at(path, lambda: tag_grammar(self._read_tag(value, path, depth), self.special))

    def _triggered(self, value: Mapping[str, Any], path: str, depth: int) -> Grammar:
        tags = self._tags(value, path, depth)
        flags = (bool(value.get("at_least_one")), bool(value.get("stop_after_first")))

        def made() -> Grammar:
            triggers = _texts(value, "triggers", path)
            return tagged_grammar(triggers, tags, *flags, self.special)

        return _at(path, made)

    def _separated(self, value: Mapping[str, Any], path: str, depth: int) -> Grammar:
        one = any_of(*(tag_grammar(tag, self.special) for tag in self._tags(value, path, depth)))
        separator = literal(_text(value, "separator", path, ""), self.special)
        more = "" if value.get("stop_after_first") else f" ({separator} @{one.name})*"
        some = f"@{one.name}{more}"
        return lark_grammar(f"start: {some if value.get('at_least_one') else f'({some})?'}", one)

    def _tags(self, value: Mapping[str, Any], path: str, depth: int) -> list[Tag]:
        tags = _list(value, "tags", path)
        return [
            self._read_tag(_object(tag, f"{path}.tags[{i}]"), f"{path}.tags[{i}]", depth)
            for i, tag in enumerate(tags)
        ]

    def _read_tag(self, value: Mapping[str, Any], path: str, depth: int) -> Tag:
        content = _object(value.get("content"), path + ".content")
        free = content.get("type") == "any_text"
        inner = None if free else self.format(content, path + ".content", depth)
        return Tag(_text(value, "begin", path), inner, _text(value, "end", path, ""))


def _at(path: str, make: Callable[[], Grammar]) -> Grammar:
    """What ``make`` makes; its errors name the path."""
    try:
        return make()
    except GrammarError as error:
        inner = error.path if error.path.startswith(path) else f"{path}.{error.path}".rstrip(".")
        raise GrammarError(str(error), inner) from None


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise GrammarError("must be an object", path)
    return value


def _list(value: Mapping[str, Any], name: str, path: str) -> list[Any]:
    found, path = value.get(name), f"{path}.{name}".lstrip(".")
    if not isinstance(found, list) or not found:
        raise GrammarError("must be a list, not empty", path)
    if len(found) > MAX_TAGS:
        raise GrammarError(f"has {len(found)} entries but may have at most {MAX_TAGS}", path)
    return found


def _texts(value: Mapping[str, Any], name: str, path: str) -> list[str]:
    found = _list(value, name, path)
    if not all(isinstance(item, str) and item for item in found):
        raise GrammarError("must be a list of strings, none empty", f"{path}.{name}".lstrip("."))
    return found


def _text(value: Mapping[str, Any], name: str, path: str, default: str | None = None) -> str:
    found = value.get(name, default)
    if not isinstance(found, str) or (not found and default is None):
        raise GrammarError("must be a string" + ", not empty" * (default is None), f"{path}.{name}")
    return found
