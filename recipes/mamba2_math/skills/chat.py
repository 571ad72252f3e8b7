"""Chats to learn from: messages, tools, and what of their text the model has to write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# How much a token counts in the loss: what is read is mostly chance, what is skipped is decided by
# others (a grammar, a tool, a user who goes on asking).
READ, WRITTEN, SKIPPED = 0, 1, 2

Message = dict[str, Any]
Tool = dict[str, Any]


class Piece(NamedTuple):
    text: str
    kind: int


class Chat(NamedTuple):
    """``messages`` as OpenAI has them; the last one is the assistant's."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    by_grammar: bool = False  # the answer is JSON whose keys a grammar writes
    asks_for_json: bool = True  # or only the grammar says that the answer is JSON

    @property
    def key(self) -> str:
        """Equal keys ask the same."""
        return "\n".join(m["content"] for m in self.messages if m["role"] in ("user", "tool"))

    def turns(self) -> list[Chat]:
        """One chat for each answer of the assistant, ending with it."""
        ends = [i for i, m in enumerate(self.messages, 1) if m["role"] == "assistant"]
        return [self._replace(messages=self.messages[:end]) for end in ends]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "id": "call_0", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def tool(name: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    shape = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "parameters": shape}}


def pieces(chat: Chat) -> Iterator[Piece]:
    """What the chat template makes of the chat (``tokenizer.CHAT_TEMPLATE``), without the end."""
    if chat.tools:
        shown = (t["function"] for t in chat.tools)
        names = (f"{t['name']}({', '.join(t['parameters']['properties'])})" for t in shown)
        yield Piece(f"Tools: {', '.join(names)}\n\n", READ)
    for i, message in enumerate(chat.messages):
        content = message["content"]
        if message["role"] in ("user", "system"):
            if i:
                yield Piece("\n\n", SKIPPED)
            yield Piece(f"Question: {content}" if message["role"] == "user" else content, READ)
        elif message["role"] == "tool":
            yield Piece(f"\n<tool_response>\n{content}\n</tool_response>", SKIPPED)
        else:
            yield Piece("\nAnswer:", READ)
            yield from _answer(message, chat)


def _answer(message: Message, chat: Chat) -> Iterator[Piece]:
    for made in message.get("tool_calls", ()):
        text = json.dumps(made["function"])
        yield Piece(f"<tool_call>\n{text}\n</tool_call>", WRITTEN)
        return
    if not chat.by_grammar:
        yield Piece(f" {message['content']}", WRITTEN)
        return
    between = "{"
    for name, value in json.loads(message["content"]).items():
        yield Piece(between, READ if chat.asks_for_json else SKIPPED)
        yield Piece(f'"{name}": ', READ)
        yield Piece(json.dumps(value), WRITTEN)
        between = ", "
    yield Piece("}", WRITTEN)
