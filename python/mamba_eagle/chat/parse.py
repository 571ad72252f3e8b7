"""What a model writes, taken apart while it is written: reasoning, content and tool calls.

transformers' ``ResponseParser`` finds where each part begins and ends; this turns them into the
pieces of a reply. A whole reply is made of the same pieces, so it says what the stream said.

- Text that only looks like a call stays text: bad JSON, no name, arguments that are no object.
- A call that the end of the output cuts off is not a call, and is left out.
- White space at both ends of reasoning and content is left out.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mamba_eagle.chat.family import CALLS, CONTENT, REASONING, CallForm, Family
from mamba_eagle.chat.live_calls import CallPiece, JsonCalls, LiveCalls, TagCalls, ToolCall
from mamba_eagle.chat.schema import tool_properties
from mamba_eagle.core import is_unicode

log = logging.getLogger("mamba_eagle.chat")


def _library() -> Any:
    """transformers' module. Imported here: it takes a second."""
    from transformers.utils import chat_parsing

    return chat_parsing


@dataclass(frozen=True)
class TextPiece:
    """More of a text; ``field`` is content or reasoning_content."""

    field: str
    text: str


Piece = TextPiece | CallPiece


class OutputParser:
    """Takes the text of one sample as it grows: all is content."""

    def read(self, text: str, is_last: bool) -> list[Piece]:
        """What more text adds, and the end if it is the last."""
        return [TextPiece(CONTENT, text)] if text else []


class _Text:
    """One of the texts: without the white space at its ends."""

    def __init__(self, field: str) -> None:
        self.field = field
        self._begun = False
        self.held = ""  # white space that is the end unless more comes

    def take(self, text: str) -> list[Piece]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        body = text.rstrip()
        if not body:
            self.held += text
            return []
        piece = TextPiece(self.field, self.held + body)
        self.held = text[len(body) :]
        return [piece]


class FamilyParser(OutputParser):
    """By a family's response template. ``prefix``: what of the assistant's message the prompt
    already has; it decides where the output begins and is not part of the reply. is_live: calls
    come in pieces while they are written, not when they are whole."""

    def __init__(
        self,
        family: Family,
        prefix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        max_calls: int | None = None,
        is_live: bool = False,
    ) -> None:
        self._form = _form(json.dumps(family.template))
        self._tools = list(tools)
        self._properties = tool_properties(tools)
        self._is_live = is_live
        self._live: LiveCalls | None = None
        self._calls_form = family.calls
        self._calls_left = max_calls
        self._all = prefix
        self._at = 0  # how far the events have come in it
        self.field = CONTENT  # the part that is being written, and where it begins
        self._begin = 0
        self._texts = {name: _Text(name) for name in (CONTENT, REASONING)}
        self._broken = False
        self._new_from = len(prefix)
        self._parser = _library().ResponseParser(self._form.split, prefix)
        self._take(self._parser.initial_events, ending=False)
        for text in self._texts.values():
            text.held = ""  # what comes is another's, and that is not a part of it

    def read(self, text: str, is_last: bool) -> list[Piece]:
        pieces = self.feed(text)
        return pieces + self.finish() if is_last else pieces

    def feed(self, text: str) -> list[Piece]:
        """What more text adds."""
        if not text:
            return []
        if self._broken:
            return self._texts[CONTENT].take(text)
        self._all += text
        try:
            return self._take(self._parser.feed(text), ending=False)
        except Exception:  # a checkpoint's own template may be wrong in any way
            log.exception("the response template failed; the rest of the output stays text")
            self._broken = True
            return [*self._end_live(()), *self._texts[CONTENT].take(self._all[self._at :])]

    def finish(self) -> list[Piece]:
        """What the end of the text adds."""
        if self._broken:
            return []
        _, events = self._parser.finalize()
        return self._take(events, ending=True)

    def _take(self, events: list[dict[str, Any]], ending: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            field = self._form.names.get(event["field"], CONTENT)
            if event["type"] == "region_open":
                self._open(event["field"], field)
            elif event["type"] == "region_chunk":
                self._at += len(event["text"])
                if field in self._texts:
                    pieces += self._texts[field].take(event["text"])
                elif self._live is not None:
                    live = self._live.feed(event["text"])
                    pieces += live if self._is_live else ()
            else:
                pieces += self._close(event["field"], field, ending)
        return pieces

    def _open(self, name: str, field: str) -> None:
        self.field, self._begin = field, self._at
        if opening := self._form.opens.get(name):
            match = opening.match(self._all, self._at)
            self._at = match.end() if match else self._at
        if field == CALLS and self._begin >= self._new_from and self._calls_form is not None:
            self._live = self._follow(self._all[self._begin : self._at], self._calls_form)

    def _follow(self, opening: str, form: CallForm) -> LiveCalls | None:
        if form.arguments == "json":
            return JsonCalls(self._properties, self._calls_left)
        match = self._form.opens[CALLS].match(opening)
        if match is None or "name" not in match.groupdict():
            return None

        def read(argument: str) -> dict[str, Any] | None:
            calls = read_calls(self._form.one_call, opening + argument + form.end, self._tools)
            return json.loads(calls[0].arguments) if calls else None

        return TagCalls(self._properties, self._calls_left, match["name"].strip(), form, read)

    def _end_live(self, calls: Sequence[ToolCall]) -> list[CallPiece]:
        """The end of the call that is being given out in pieces. calls: of the region."""
        live, self._live = self._live, None
        return live.close(calls) if live is not None and self._is_live else []

    def _close(self, name: str, field: str, ending: bool) -> list[Piece]:
        closing = self._form.closes.get(name)
        match = closing.match(self._all, self._at) if closing else None
        self._at = match.end() if match else self._at
        self.field = CONTENT
        if field != CALLS or self._at <= self._new_from:
            return []
        if ending and closing and match is None:
            return [*self._end_live(())]  # cut off
        region = self._all[self._begin : self._at]
        calls = None
        if not leaves_open(region, self._calls_form):
            calls = read_calls(self._form.one_call, region, self._tools)
        live = self._live
        ends = self._end_live(calls or ())
        if calls is None and self._is_live and live is not None and live.calls:
            return [*ends]
        if calls is None:
            begin = max(self._begin, self._new_from)
            return self._texts[CONTENT].take(self._all[begin : self._at])
        if self._calls_left is not None:
            calls = calls[: self._calls_left]
            self._calls_left -= len(calls)
        told = live.calls if live is not None else []
        return [*ends, *calls[len(told) :]] if self._is_live else [*told, *calls[len(told) :]]


# ── templates, prepared ──────────────────────────────────────────────────────────────────────


class _Form:
    """A response template in the two ways in which it is used."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        fields: Mapping[str, Any] = template["fields"]
        split = {name: _as_text(value) for name, value in fields.items()}
        if all("open" in value or "open_pattern" in value for value in split.values()):
            split["outside"] = {"content": "text", "content_args": {"strip": False}}
        # The prompt's part is found by the maker of the prompt.
        load = _library().response_templates.load_response_template
        self.split = load({"fields": split, "start_anchor": "\0\0"})
        self.names = {name: name for name in (REASONING, CALLS) if name in fields}
        loaded = self.split.fields
        self.opens = {name: value.open_re for name, value in loaded.items() if value.open_re}
        self.closes = {name: value.close_re for name, value in loaded.items() if value.close_re}
        self.one_call: Any = None
        if CALLS in fields:
            one = {"fields": {CALLS: fields[CALLS]}, "start_anchor": "\0\0"}
            self.one_call = load(one)


def _as_text(field: Mapping[str, Any]) -> dict[str, Any]:
    """The same part, kept as it is written. A part without a beginning has no end either: what
    ends a message is the end of the output here."""
    is_implicit = "open" not in field and "open_pattern" not in field
    edges = () if is_implicit else ("open", "open_pattern", "close", "close_pattern")
    kept = {name: field[name] for name in edges if name in field}
    return {
        **kept,
        "content": "text",
        "content_args": {"strip": False},
        "transform": {"text": "{content}"},  # named groups need one
    }


@lru_cache(maxsize=64)
def _form(template: str) -> _Form:
    return _Form(json.loads(template))


def template_problem(family: Family) -> str:
    """Why transformers does not take the family's template; "" if it does."""
    try:
        _form(json.dumps(family.template))
    except Exception as error:  # transformers' own checks, and those of regular expressions
        return str(error)
    return ""


# ── calls ────────────────────────────────────────────────────────────────────────────────────


def leaves_open(region: str, form: CallForm | None) -> bool:
    """Whether an argument begins and does not end. It is not a call then, and a reader would look
    for the end of each such argument in all that follows."""
    if form is None or not form.begin_argument:
        return False
    begin, end = form.begin_argument.partition("{key}")[0], form.end_argument.strip()
    return begin in region[region.rfind(end) + 1 :]


def read_calls(
    template: Any, region: str, tools: Sequence[Mapping[str, Any]]
) -> list[ToolCall] | None:
    """The calls of a region with its tags; None if it is none."""
    try:
        value = _library().parse_response(region, template, prefix="", tools=list(tools)).get(CALLS)
    except Exception:  # not JSON, or without what the template takes from it
        return None
    items = value if isinstance(value, list) else [value]
    flat = [one for item in items for one in (item if isinstance(item, list) else [item])]
    calls = [_read_call(item) for item in flat]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _read_call(value: Any) -> ToolCall | None:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments", {})
    try:
        if isinstance(arguments, str):  # some write an object as a string
            arguments = json.loads(arguments)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if not is_unicode(text):  # half of a surrogate pair can only be sent escaped
            text = json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    return ToolCall(name.strip(), text) if is_unicode(name) else None
