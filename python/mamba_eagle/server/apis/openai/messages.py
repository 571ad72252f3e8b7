"""``messages`` of a chat, as templates want them."""

import json
from typing import Annotated, Any, Literal

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_MESSAGES
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Content, Text, items, needs, read, says
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.json_body import UNSCANNED, scan


def _content(value: Any) -> str | None:
    if not isinstance(value, list):
        return kinds.as_text(kinds.TEXT.read(value))
    parts = kinds.all_of(value, _text_part)
    return None if parts is None else "".join(parts)


def _text_part(part: Any) -> str | None:
    kind = kinds.as_text(part.get("type")) if isinstance(part, dict) else None
    if kind is not None and kind != "text":
        raise ValueError(f"has a part of type {shown(kind)}, and this model reads text only")
    return kinds.as_text(part.get("text")) if kind == "text" else None


PART = {"type": "object", "properties": {"type": kinds.STRING, "text": kinds.STRING}}
CONTENT = kinds.Kind(
    _content,
    "must be a string or parts of type text",
    kinds.any_of(kinds.STRING, kinds.list_of(PART)),
)
ROLE = kinds.Kind(
    lambda value: kinds.as_text(value) or None, "must be a string such as user", kinds.STRING
)
OBJECT_OR_TEXT = kinds.any_of(kinds.STRING, {"type": "object"})
ARGUMENTS = kinds.instance_of((str, dict), "must be a JSON object as text", OBJECT_OR_TEXT)


class CalledFunction(Content):
    name: Text
    arguments: Annotated[str | dict[str, Any] | None, ARGUMENTS] = None


class MessageCall(Content):
    type: Literal["function"] = "function"
    id: Text | None = None
    function: CalledFunction


class ChatMessage(Content):
    """Other names are for the template."""

    role: Annotated[str, ROLE] = needs("system, user, assistant, tool, or what the template knows")
    content: Annotated[str, CONTENT] = says("a text, or parts of type text", "")
    tool_call_id: Text = says("of role tool: the call that this answers", "")
    tool_calls: list[MessageCall] | None = says("of role assistant")


MESSAGES = items(
    ChatMessage, "messages", MAX_MESSAGES, "must be a list of messages, at least one", 1
)


def read_messages(values: list[Any]) -> list[dict[str, Any]]:
    """Messages with their content as plain text and the arguments of calls as objects; other keys
    are for the template.

    Raises: RequestError 400
    """
    return [_message(entry, f"messages[{i}]") for i, entry in enumerate(values)]


def _message(entry: Any, path: str) -> dict[str, Any]:
    message = read(ChatMessage, entry, path)
    made = {**entry, "content": message.content}
    if message.role == "tool" and not message.tool_call_id:
        remedy = "must be the id of the call that this answers"
        raise RequestError.about(f"{path}.tool_call_id", entry.get("tool_call_id"), remedy)
    if message.tool_calls is not None:
        made["tool_calls"] = [
            _call(entry["tool_calls"][i], call, f"{path}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return made


def _call(value: Any, call: MessageCall, path: str) -> dict[str, Any]:
    """Arguments come as JSON text; templates write them out one by one."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = json_object(arguments, f"{path}.function.arguments")
    function = {**value["function"], "arguments": arguments or {}}
    return {**value, "type": "function", "function": function}


def json_object(text: str, path: str) -> dict[str, Any]:
    """The arguments of a call; an empty text means none.

    Raises: RequestError 400
    """
    if len(text) > UNSCANNED:  # a text that counts as one in its body may hold millions of lists
        counts = scan(text.encode("utf-8", "surrogatepass"))
        problem = counts.problem or counts.many_numbers and "has too many numbers: send fewer"
        if problem:
            raise RequestError(f"{path} {problem}", param=path)
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError.about(path, text, ARGUMENTS.must)
    return value
