"""``messages`` of a chat, as templates want them."""

from __future__ import annotations

import json
from typing import Any, Literal

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_MESSAGES
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, all_of, as_text
from mamba_eagle.server.nested import Body, Text, read


class CalledFunction(Body):
    name: Text
    arguments: str | dict[str, Any] | None = None


class Call(Body):
    type: Literal["function"] = "function"
    id: Text | None = None
    function: CalledFunction


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Messages with their content as plain text and the arguments of calls as objects; other keys
    are for the template.

    Raises: RequestError 400
    """
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.wrong("messages", "must be a list of messages, at least one")
    if len(value) > MAX_MESSAGES:
        raise fields.too_many("messages", "messages", len(value), MAX_MESSAGES)
    return [_message(entry, f"messages[{i}]") for i, entry in enumerate(value)]


def _message(entry: Any, name: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise Fields({name: entry}).wrong(name, "must be an object")
    message = Fields(entry, name + ".")
    role = message.text("role")
    if not role:
        raise message.wrong("role", "must be a string such as user")
    made = {**entry, "content": _content(message)}
    if role == "tool" and not message.text("tool_call_id"):
        raise message.wrong("tool_call_id", "must be the id of the call that this answers")
    if (calls := message.raw("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise message.wrong("tool_calls", "must be a list of calls")
        made["tool_calls"] = [
            _call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return made


def _content(message: Fields) -> str:
    value = message.raw("content")
    if not isinstance(value, list):
        return message.text("content")
    parts = all_of(value, _text_part)
    if parts is None:
        raise message.wrong(
            "content", "must be a string or parts of type text: this model reads text only"
        )
    return "".join(parts)


def _text_part(part: Any) -> str | None:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return as_text(part.get("text")) if is_text else None


def _call(value: Any, path: str) -> dict[str, Any]:
    """Arguments come as JSON text; templates write them out one by one."""
    call = read(Call, value, path)
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = _object(arguments, f"{path}.function.arguments") if arguments.strip() else {}
    function = {**value["function"], "arguments": arguments or {}}
    return {**value, "type": "function", "function": function}


def _object(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{path} = {shown(text)}: must be a JSON object as text", param=path)
    return value
