"""What a request asks the model to continue: routers send equal beginnings to the same replica,
whose cache has them. As text for one that compares texts, as tokens for one that knows caches."""

import json
from typing import Any

MAX_COMPARED = 32_768  # characters
CHATS = "/v1/chat/completions"
# Of a chat, what its prompt is made of: the fields that /tokenize takes.
RENDERED = frozenset(
    "messages tools tool_choice parallel_tool_calls documents chat_template_kwargs enable_thinking "
    "add_generation_prompt continue_final_message reasoning_effort".split()
)


def prompt_of(body: bytes) -> str:
    """ "" if the body has none, or is not one that a server takes."""
    fields = _fields(body)
    for name in ("messages", "text", "prompt", "input_ids", "input"):
        if (value := fields.get(name)) is not None:
            return _as_text(value)[:MAX_COMPARED]
    return ""


def to_tokenize(path: str, body: bytes) -> list[int] | dict[str, Any]:
    """The token ids of the first prompt, or the body of /tokenize that gives them. [] if there are
    none, or if the route makes its prompt in a way of its own."""
    fields = _fields(body)
    if path == CHATS:
        return {name: value for name, value in fields.items() if name in RENDERED}
    for name in ("input_ids", "text", "prompt"):
        value = fields.get(name)
        if isinstance(value, list) and value and isinstance(value[0], (list, str)):
            value = value[0]
        if isinstance(value, str):
            return {"prompt": value}
        if isinstance(value, list) and all(type(one) is int for one in value):
            return value
    return []


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], dict):  # a chat
        messages = [one for one in value if isinstance(one, dict)]
        return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in messages)
    if isinstance(value, list) and value and isinstance(value[0], str):  # several prompts
        return value[0]
    return json.dumps(value)[:MAX_COMPARED]
