"""What a request asks the model to continue, as text: routers send equal beginnings to the same
replica, whose cache has them."""

from __future__ import annotations

import json
from typing import Any

MAX_COMPARED = 32_768  # characters


def prompt_of(body: bytes) -> str:
    """ "" if the body has none, or is none that a server takes."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    for name in ("messages", "text", "prompt", "input_ids", "input"):
        if (value := fields.get(name)) is not None:
            return _as_text(value)[:MAX_COMPARED]
    return ""


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], dict):  # a chat
        return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in _dicts(value))
    if isinstance(value, list) and value and isinstance(value[0], str):  # several prompts
        return value[0]
    return json.dumps(value)[:MAX_COMPARED]


def _dicts(values: list[Any]) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)]
