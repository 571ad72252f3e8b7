"""Bodies of other APIs become bodies of /v1/chat/completions; errors keep the client's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from mamba_eagle.server.apis.openai.body import Common, OpenAIJob
from mamba_eagle.server.apis.openai.chat_body import Template, parse_chat
from mamba_eagle.server.apis.openai.chat_grammar import BUDGET
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Content, Text, read, says
from mamba_eagle.server.bodies.sampling import LENGTHS, PARAMETERS, SEED, with_parameters
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState


@with_parameters(*LENGTHS, "stop", "no_stop_trim", "spaces_between_special_tokens")
class OtherChat(Common, Template):
    """Fields that mean the same on every route that makes a chat."""

    seed: Annotated[int | None, SEED] = says(PARAMETERS["seed"][1].about)
    thinking_budget: Annotated[int | None, BUDGET] = says("tokens of reasoning")


_PATH = re.compile(r"[\w.\[\]]+")
_HEAD = re.compile(r"(?:(?! = |: | is ).)*", re.DOTALL)  # the fields that a message is about


@dataclass
class ChatBuilder:
    """``names``: paths of chat fields with those of the route that they were made of."""

    values: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ChatBuilder:
        """What the routes have in common."""
        shared = OtherChat.model_fields
        return cls({name: values[name] for name in shared if values.get(name) is not None})

    def put(self, name: str, value: Any, own: str) -> None:
        """A field that the route has under another name; None is left out."""
        if value is not None:
            self.values[name] = value
        self.names[name] = own

    def add_message(self, message: dict[str, Any], own: str) -> None:
        messages = self.values.setdefault("messages", [])
        self.names[f"messages[{len(messages)}]"] = own
        messages.append(message)

    def parse(self, state: ServerState) -> OpenAIJob:
        """Raises: RequestError 400"""
        try:
            return parse_chat(self.values, state)
        except RequestError as error:
            raise self.renamed(error) from None

    def renamed(self, error: RequestError) -> RequestError:
        """The error with the fields' names as the route has them; the values stay as they are."""
        message, param = error.message, error.param
        if param is None:
            return error
        if message.startswith(param):
            head = _HEAD.match(message)
            assert head is not None  # it matches the empty text as well
            renamed = _PATH.sub(lambda match: self._own(match[0]), head[0])
            message = renamed + message[head.end() :]
        return RequestError(message, error.status, self._own(param), error.retry_after)

    def _own(self, path: str) -> str:
        """By the longest beginning of the path that has a name of its own."""
        end = len(path)
        while end > 0:
            if path[:end] in self.names:
                return self.names[path[:end]] + path[end:]
            end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))
        return path


class Block(Content):
    """A part of a message, or an item of a conversation, that has a type and a text."""

    type: Text | None = says("the kind of part")
    text: Text | None = says("of type text")


def text_only(value: Any, path: str, types: tuple[str, ...], separator: str = "") -> str:
    """A string, or parts of these types, joined.

    Raises: RequestError 400
    """
    if not isinstance(value, list):
        return "" if value is None else str(kinds.TEXT.take(value, path))
    return separator.join(
        text_of(read(Block, part, f"{path}[{i}]"), f"{path}[{i}]", types)
        for i, part in enumerate(value)
    )


def text_of(part: Block, path: str, types: tuple[str, ...]) -> str:
    """Raises: RequestError 400"""
    check_kind(part.type, path, types)
    if part.text is None:
        raise RequestError.about(f"{path}.text", None, "must be a string")
    return part.text


def check_kind(kind: str | None, path: str, types: tuple[str, ...]) -> None:
    """Raises: RequestError 400 unless it is one of ``types``"""
    if kind not in types:
        known = ", ".join(types)
        remedy = f"must be one of {known}" if len(types) > 1 else f"must be {known}"
        remedy += "; this server reads text and calls of functions only"
        raise RequestError.about(f"{path}.type", kind, remedy)


def needed(value: str | None, path: str, remedy: str) -> str:
    """Raises: RequestError 400 if it is empty"""
    if not value:
        raise RequestError.about(path, value, remedy)
    return value


# A text, or parts of it, which are read one by one.
TEXT_OR_PARTS = kinds.untouched(kinds.any_of(kinds.STRING, kinds.list_of({"type": "object"})))
