"""Chats whose calls a grammar forces, so that even a model that knows no tools makes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from mamba_eagle.chat.family import FOLDER

# The embedded model has seen questions and answers only; the tags are text to it.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
# One token of the embedded model's vocabulary, which it writes before a result.
END_OF_REASONING = "####"
OBJECT = {"type": "object", "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {
        **OBJECT,
        "properties": {
            "operation": {"enum": ["add", "subtract", "divide"]},
            "left": {"type": "integer", "minimum": 0, "maximum": 9999},
            "right": {"type": "integer", "minimum": -99, "maximum": 99},
        },
        "required": ["operation", "left", "right"],
    },
    {
        **OBJECT,
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]},
        },
        "required": ["city"],
    },
    {
        **OBJECT,
        "properties": {
            "items": {
                "type": "array",
                "items": {"$ref": "#/$defs/item"},
                "minItems": 1,
                "maxItems": 3,
            },
            "gift": {"type": "boolean"},
        },
        "required": ["items"],
        "$defs": {
            "item": {
                **OBJECT,
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z]{2,8}$"},
                    "price": {"type": "number", "minimum": 0, "maximum": 99},
                },
                "required": ["name", "price"],
            }
        },
    },
    {**OBJECT, "properties": {}},
]
NAMES = ("calculate", "weather", "order", "ping")
PLACES = ("a shop", "the park", "a school", "her garden")


def tool(name: str) -> dict[str, Any]:
    parameters = TOOLS[NAMES.index(name)]
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def body_of(number: int) -> dict[str, Any]:
    """The chat of this number; always the same."""
    rng = random.Random(number)
    names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
    count, place = rng.randint(2, 99), rng.choice(PLACES)
    content = f"Question: Anna has {count} apples in {place}. How many are left?"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "tools": [tool(name) for name in names],
        "tool_choice": "required",
        "parallel_tool_calls": rng.random() < 0.5,
        "max_tokens": 200,
        "temperature": rng.choice([0, 0.5, 0.8]),
        "seed": number,
    }
    if rng.random() < 0.25:
        body["tool_choice"] = {"type": "function", "function": {"name": rng.choice(names)}}
    if rng.random() < 0.4:
        body["enable_thinking"] = True
        body["thinking_budget"] = rng.choice([0, 3, 20])
    return body


def family_file(family: str, folder: Path) -> str:
    """A family's file whose reasoning ends as the embedded model can end it."""
    values = json.loads((FOLDER / f"{family}.json").read_text())
    field = values["response_template"]["fields"]["reasoning_content"]
    field["close_pattern"] = field["close_pattern"].replace("</think>", END_OF_REASONING)
    values["reasoning"]["close"] = END_OF_REASONING
    path = folder / f"{family}.json"
    path.write_text(json.dumps(values))
    return str(path)


def check_calls(body: dict[str, Any], choice: dict[str, Any]) -> int:
    """How many calls there are; all fit the schemas of the tools that were given."""
    calls = choice["message"].get("tool_calls", [])
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in body["tools"]}
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, schemas[call["function"]["name"]])
    if isinstance(body["tool_choice"], dict):
        assert {c["function"]["name"] for c in calls} <= {body["tool_choice"]["function"]["name"]}
    if body.get("thinking_budget") == 0:
        assert "reasoning_content" not in choice["message"]
    if not body["parallel_tool_calls"]:
        assert len(calls) <= 1
    if choice["finish_reason"] != "length":
        assert calls and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
    return len(calls)


def add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """A call that begins, or more of the latest one's arguments."""
    if "id" in delta:
        calls.append(delta)
    else:
        assert delta["index"] == len(calls) - 1
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def streamed(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The choice that a client puts together of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    reason = None
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for call in value:
                        add_call(message.setdefault(name, []), call)
                elif name != "role" and value:
                    message[name] = (message[name] or "") + value if name in message else value
            reason = choice["finish_reason"] or reason
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return {"message": message, "finish_reason": reason}


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Without what is not the text's: names of calls are drawn."""
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [call["function"] for call in calls]
    return {"message": message, "finish_reason": choice["finish_reason"]}
