"""Calls while they are written, so that a stream need not wait for the end of long arguments.

What is given out cannot be taken back: a stream says that a call begins once its name is one of the
request's tools and its arguments begin. If the output then breaks off, or the arguments turn out
to be no JSON, the stream has what was written.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamba_eagle.chat.family import CallForm

MOST_BETWEEN = 1024  # characters before the next argument or call; after more, nothing is streamed


@dataclass(frozen=True)
class ToolCall:
    """A call; ``arguments`` is an object as JSON, or, of one that goes on, its beginning."""

    name: str
    arguments: str
    is_whole: bool = True


@dataclass(frozen=True)
class ArgumentsPiece:
    """More of the arguments of the latest call; of one that is cut off none is the last."""

    text: str
    is_last: bool


CallPiece = ToolCall | ArgumentsPiece


def ends_call(piece: object) -> bool:
    """Whether a call is whole with this piece."""
    if isinstance(piece, ArgumentsPiece):
        return piece.is_last
    return isinstance(piece, ToolCall) and piece.is_whole


class LiveCalls(ABC):
    """The calls of one region. tools: the properties of each tool's arguments, by its name. most:
    calls that may come; None: any."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], most: int | None) -> None:
        self._tools = tools
        self._left = math.inf if most is None else most
        self.calls: list[ToolCall] = []  # those that have ended
        self.goes_on = False  # another has begun
        self._name = ""
        self._arguments: list[str] = []
        self._text = ""  # not looked at yet

    @abstractmethod
    def feed(self, text: str) -> list[CallPiece]:
        """What more of the region says."""

    def close(self, calls: Sequence[ToolCall]) -> list[CallPiece]:
        """The region has ended, with these calls. What is cut off does not look whole."""
        if not self.goes_on:
            return []
        told, number = "".join(self._arguments), len(self.calls)
        whole = calls[number].arguments if number < len(calls) else ""
        is_whole = bool(whole) and whole.startswith(told)
        rest = whole[len(told) :] if is_whole else ""
        self._more(rest, True)
        return [ArgumentsPiece(rest, is_whole)]

    def _begin(self, name: str) -> CallPiece:
        self._left -= 1
        self.goes_on, self._name, self._arguments = True, name, []
        return ToolCall(name, "", False)

    def _more(self, text: str, is_last: bool = False) -> CallPiece:
        self._arguments.append(text)
        if is_last:
            self.goes_on = False
            self.calls.append(ToolCall(self._name, "".join(self._arguments)))
        return ArgumentsPiece(text, is_last)

    def _may_begin(self, name: str) -> bool:
        return name in self._tools and self._left > 0


class JsonCalls(LiveCalls):
    """Objects with a name and arguments, one or a list: the arguments come as they are written."""

    HEAD = re.compile(
        r'[\s\[\]},]*\{\s*"name"\s*:\s*"([^"\\]{1,128})"\s*,\s*"arguments"\s*:\s*(?=\{)'
    )
    MARK = re.compile(r'["{}\[\]]|\\.|\\$', re.DOTALL)

    _depth, _in_text = 0, False

    def feed(self, text: str) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        if self._left or self.goes_on:
            self._text += text
        while self._text:
            if not self.goes_on:
                head = self.HEAD.match(self._text)
                if head is None or not self._may_begin(head[1]):
                    if len(self._text) > MOST_BETWEEN:
                        self._left, self._text = 0, ""
                    break
                pieces.append(self._begin(head[1]))
                self._text = self._text[head.end() :]
            piece, is_last = self._take()
            if not piece:
                break
            pieces.append(self._more(piece, is_last))
        return pieces

    def _take(self) -> tuple[str, bool]:
        """The part of the text that belongs to the arguments, and whether they end with it."""
        text, end = self._text, len(self._text)
        for mark in self.MARK.finditer(text):
            char = mark[0]
            if char == "\\":  # what it escapes has not come yet
                end = mark.start()
            elif char == '"':
                self._in_text = not self._in_text
            elif not self._in_text and char in "{[":
                self._depth += 1
            elif not self._in_text and char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._text = text[mark.end() :]
                    return text[: mark.end()], True
        self._text = text[end:]
        return text[:end], False


class TagCalls(LiveCalls):
    """One call, a tag for each argument: those that are texts come as they are written, others when
    they have ended.

    read: an argument's tag to an object with it, by the schema; None if it cannot be read.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        most: int | None,
        name: str,
        form: CallForm,
        read: Callable[[str], dict[str, Any] | None],
    ) -> None:
        super().__init__(tools, most)
        self._name, self._read, self._end = name, read, form.end_argument.strip()
        before, _, after = form.begin_argument.strip().partition("{key}")
        pattern = rf"{re.escape(before)}(?P<key>[^>\n]+){re.escape(after)}(?=.)\n?"
        self._argument = re.compile(pattern, re.DOTALL)
        self._key = self._tag = ""  # of the argument that is being written
        self._searched = 0  # characters without its end
        self._failed = False

    def feed(self, text: str) -> list[CallPiece]:
        self._text += text
        pieces: list[CallPiece] = []
        while not self._failed and (piece := self._step()) is not None:
            if not self.goes_on:
                if not self._may_begin(self._name):
                    self._failed = True
                    break
                pieces += [self._begin(self._name), self._more("{")]
            if piece:
                pieces.append(self._more(piece))
        return pieces

    def _step(self) -> str | None:
        """More of the arguments; None if there is nothing until more text comes."""
        if not self._key:
            return self._open()
        at = self._text.find(self._end, max(0, self._searched - len(self._end)))
        if at < 0:
            self._searched = len(self._text)
            return self._part_of_text(len(self._text) - len(self._end)) if self._is_text else None
        written, self._text = self._text[:at], self._text[at + len(self._end) :]
        is_text, tag, self._key, self._searched = self._is_text, self._tag, "", 0
        if is_text:
            return _escaped(written.removesuffix("\n")) + '"'
        found = self._read(tag + written + self._end)
        if found is None:
            self._failed = True
            return None
        return self._separator() + json.dumps(found, ensure_ascii=False)[1:-1]

    def _open(self) -> str | None:
        match = self._argument.search(self._text)
        if match is None:
            self._failed = len(self._text) > MOST_BETWEEN
            return None
        self._key, self._tag = match["key"], match[0]
        self._text = self._text[match.end() :]
        return f'{self._separator()}"{_escaped(self._key)}": "' if self._is_text else ""

    @property
    def _is_text(self) -> bool:
        schema = self._tools.get(self._name, {}).get(self._key)
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def _part_of_text(self, end: int) -> str | None:
        """The text so far, without what may be its end."""
        end -= 1  # a line end before that is not part of it
        if end <= 0:
            return None
        piece, self._text = self._text[:end], self._text[end:]
        self._searched = 0
        return _escaped(piece)

    def _separator(self) -> str:
        return ", " if len(self._arguments) > 1 else ""


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
