"""Bodies of other APIs become bodies of /v1/chat/completions; errors keep the client's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mamba_eagle.server.chat_body import ChatJob, parse_chat
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.state import ServerState

# Fields that mean the same on every route that makes a chat.
SHARED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "skip_special_tokens",
    "rid",
    "timeout",
    "priority",
    "cache_salt",
    "pin_seconds",
    "checkpoint",
    "chat_template_kwargs",
    "enable_thinking",
    "thinking_budget",
    "documents",
)
_PATH = re.compile(r"[\w.\[\]]+")
_HEAD = re.compile(r"(?:(?! = |: | is ).)*", re.DOTALL)  # the fields that a message is about


@dataclass
class ChatBody:
    """``names``: paths of chat fields with those of the route that they were made of."""

    values: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Fields) -> ChatBody:
        """What the routes have in common."""
        return cls({name: fields.raw(name) for name in SHARED if fields.raw(name) is not None})

    def put(self, name: str, value: Any, own: str) -> None:
        """A field that the route has under another name; None is left out."""
        if value is not None:
            self.values[name] = value
        self.names[name] = own

    def add_message(self, message: dict[str, Any], own: str) -> None:
        messages = self.values.setdefault("messages", [])
        self.names[f"messages[{len(messages)}]"] = own
        messages.append(message)

    def parse(self, state: ServerState) -> ChatJob:
        """Raises: RequestError 400"""
        try:
            return parse_chat(Fields(self.values), state)
        except RequestError as error:
            raise self.renamed(error) from None

    def renamed(self, error: RequestError) -> RequestError:
        """With the fields' names as the route has them; the values stay as they are."""
        message, param = error.message, error.param
        if param is None:
            return error
        if message.startswith(param):
            head = _HEAD.match(message)
            assert head is not None  # it matches nothing at all, too
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


def text_only(fields: Fields, name: str, kinds: tuple[str, ...], separator: str = "") -> str:
    """A string, or parts of these types, joined.

    Raises: RequestError 400
    """
    if not isinstance(fields.raw(name), list):
        return fields.text(name)
    return separator.join(text_of(part, kinds) for part in parts_of(fields, name))


def text_of(part: Fields, kinds: tuple[str, ...]) -> str:
    """Raises: RequestError 400"""
    kind_of(part, kinds)
    if part.raw("text") is None:
        raise part.wrong("text", "must be a string")
    return part.text("text")


def parts_of(fields: Fields, name: str) -> list[Fields]:
    """The objects of a list.

    Raises: RequestError 400
    """
    value = fields.raw(name)
    path = f"{fields.where}{name}"
    if not isinstance(value, list):
        raise fields.wrong(name, "must be a string or a list of objects")
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise Fields({f"{path}[{i}]": part}).wrong(f"{path}[{i}]", "must be an object")
    return [Fields(part, f"{path}[{i}].") for i, part in enumerate(value)]


def kind_of(part: Fields, kinds: tuple[str, ...]) -> str:
    """Its type, one of ``kinds``.

    Raises: RequestError 400
    """
    kind = part.text("type")
    if kind not in kinds:
        known = ", ".join(kinds)
        remedy = f"must be one of {known}" if len(kinds) > 1 else f"must be {known}"
        raise part.wrong("type", f"{remedy}; this server reads text and calls of functions only")
    return kind
