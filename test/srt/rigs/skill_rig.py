"""What the embedded model has learned beside word problems, asked of a server in OpenAI's form."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from mamba2_math.skills.calculator import OPERATIONS, shown
from mamba2_math.skills.chat import Chat, Message, result

KINDS = {bool: "boolean", int: "integer", str: "string", list: "array"}
MAX_CALLS = 6
SIGNS = {name: sign for sign, name in OPERATIONS.items()}


def post(client: httpx.Client, messages: list[Message], **fields: Any) -> dict[str, Any]:
    """The assistant's message."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 300, **fields}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def schema_of(record: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": KINDS[type(value)]} for name, value in record.items()}
    for name, value in record.items():
        if isinstance(value, list):
            properties[name]["items"] = {"type": "string"}
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "properties": properties, "required": [*record]}


def fills_in(client: httpx.Client, chat: Chat) -> bool:
    """Whether the answer under the record's schema, or the forced call, is the record."""
    *asked, wanted = chat.messages
    if chat.tools:
        made = post(client, asked, tools=[*chat.tools])
        return arguments_of(made) == arguments_of(wanted)
    record = json.loads(wanted["content"])
    form = {"name": "record", "schema": schema_of(record)}
    made = post(client, asked, response_format={"type": "json_schema", "json_schema": form})
    try:
        return bool(json.loads(made["content"]) == record)
    except json.JSONDecodeError:  # cut off
        return False


def arguments_of(message: Message) -> list[Any]:
    """Names and arguments of the calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [
        (f["name"], json.loads(a) if isinstance(a := f["arguments"], str) else a) for f in functions
    ]


def calculate(name: str, arguments: dict[str, Any]) -> str:
    """The value of a calculator's call; what it cannot read it says."""
    values = list(arguments.values())
    text = f"{values[0]} {SIGNS[name]} {values[1]}" if name in SIGNS else str(values[0])
    if not re.fullmatch(r"[\d. +*/-]+", text):
        return "error"
    return shown(eval(text))  # noqa: S307  (digits and signs)


def works_it_out(client: httpx.Client, chat: Chat) -> bool:
    """Whether the model comes to the chat's last number, by calls that are answered here. A chat
    whose tools do not calculate is to be answered without them."""
    messages: list[Message] = []
    calls = 0
    for message in chat.messages:
        if message["role"] not in ("system", "user"):
            continue
        messages.append(message)
        if message["role"] == "system":
            continue
        for _ in range(MAX_CALLS):
            made = post(client, messages, tools=[*chat.tools])
            messages.append(made)
            if not made.get("tool_calls"):
                break
            ((name, arguments),) = arguments_of(made)
            calls += 1
            messages.append(result(calculate(name, arguments)))
    expected_calls = sum("tool_calls" in m for m in chat.messages)
    return last_number(messages[-1]) == last_number(chat.messages[-1]) and calls == expected_calls


def follows_up(client: httpx.Client, chat: Chat) -> bool:
    """Whether each question is answered with the chat's number, given the model's own answers."""
    messages: list[Message] = []
    right = True
    for message in chat.messages:
        if message["role"] != "assistant":
            messages.append(message)
            continue
        messages.append(post(client, messages))
        right = right and last_number(messages[-1]) == last_number(message)
    return right


def last_number(message: Message) -> str:
    return str(message["content"] or "").rpartition("#### ")[2].strip()


SKILLS = {"schema": fills_in, "calculator": works_it_out, "follow-up": follows_up}
