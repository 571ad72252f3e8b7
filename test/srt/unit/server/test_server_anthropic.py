"""/v1/messages and /v1/messages/count_tokens over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from chat_samples import HERMES, WEATHER
from fake_engine import Script
from server_harness import Harness, run
from test_server_chat import chatting, ends, fits, prompt_of
from tiny_tokenizer import spell

from mamba_eagle.core import Failure, FinishReason
from mamba_eagle.message import Generate

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": WEATHER["function"]["parameters"],
}
OFF = {"thinking": {"type": "disabled"}}
TEXT = "Rain?</think>Let me look.\n" + HERMES + "\nDone."


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The stream's objects, each below an event of its type."""
    assert reply.status_code == 200, reply.text
    made = []
    for block in reply.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        made.append(event)
    return made


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together of a stream; the order of the events is checked."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    opened, arguments = -1, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert opened < 0 and event["index"] == len(message["content"])
            opened, arguments = event["index"], ""
            message["content"].append(event["content_block"])
            continue
        assert event["index"] == opened
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            opened = -1
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(arguments)
            continue
        piece = event["delta"]
        name = {"text_delta": "text", "thinking_delta": "thinking"}.get(piece["type"])
        if name is not None:
            block[name] += piece[name]
        else:
            arguments += piece["partial_json"]
    assert opened < 0
    return {**message, **delta["delta"], "usage": delta["usage"]}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {key: value for key, value in block.items() if key != "id"} for block in message["content"]
    ]
    return {**message, "id": "", "content": blocks}


@pytest.mark.parametrize("chunk", [1, 7])
def test_a_stream_says_what_the_whole_reply_says(chunk: int) -> None:
    async def test() -> None:
        async with chatting(ends(TEXT), chunk=chunk) as server:
            asked = {"model": "tiny", "max_tokens": 500, "messages": [USER], "tools": [TOOL]}
            whole = (await server.post(PATH, **asked)).json()
            events = events_of(await server.post(PATH, **asked, stream=True))
            streamed = message_of(events)
            assert comparable(whole) == comparable(streamed)
            thinking, text, call, rest = whole["content"]
            assert thinking == {"type": "thinking", "thinking": "Rain?", "signature": ""}
            assert text == {"type": "text", "text": "Let me look."}
            assert (call["type"], call["name"]) == ("tool_use", "weather")
            assert call["id"].startswith("toolu_") and call["input"] == {"city": "Oslo"}
            assert rest["text"].strip() == "Done."
            assert whole["stop_reason"] == "tool_use" and whole["stop_sequence"] is None
            assert whole["usage"] == {
                "input_tokens": len(prompt_of(server)) - 1,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 1,
                "output_tokens": len(TEXT) + 1,
            }
            assert whole["id"].startswith("msg_") and whole["model"] == "tiny"

    run(test())


def test_the_prompt_is_that_of_the_same_chat() -> None:
    """Also when it is counted."""
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "wet"}],
    }
    asked = {
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "A"},
                    call,
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
        ],
        "tools": [TOOL],
        **OFF,
    }
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    chat = {
        "messages": [
            {"role": "system", "content": "S"},
            USER,
            {
                "role": "assistant",
                "content": "A",
                "reasoning_content": "Hm",
                "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "wet"},
            {"role": "user", "content": "and now?"},
        ],
        "tools": [{"type": "function", "function": {**WEATHER["function"]}}],
        "enable_thinking": False,
    }
    chat["tools"][0]["function"] = {  # type: ignore[index]
        "name": "weather",
        "parameters": TOOL["input_schema"],
        "description": "of a city",
    }

    async def test() -> None:
        async with chatting(ends("x")) as server:
            assert (await server.post("/v1/chat/completions", **chat)).status_code == 200
            expected = prompt_of(server)
            assert (await server.post(PATH, **asked, max_tokens=5)).status_code == 200
            assert prompt_of(server) == expected
            counted = await server.post(f"{PATH}/count_tokens", **asked)
            assert counted.json() == {"input_tokens": len(expected)}
            tokens = (await server.post("/tokenize", **chat)).json()
            assert tokens["count"] == len(tokens["tokens"]) == len(expected)
            started = {"role": "assistant", "content": "The answer"}
            reply = await server.post(PATH, messages=[USER, started], max_tokens=5)
            assert prompt_of(server).endswith("assistant\nThe answer"), reply.text

    run(test())


def says(tokens: list[int], finish: FinishReason) -> Script:
    return lambda request: (tokens, finish)


def test_why_a_message_ends() -> None:
    cases = [
        (FinishReason(kind="length", length=1), "max_tokens", None),
        (FinishReason(kind="stop", matched=2), "end_turn", None),
    ]

    async def test() -> None:
        for finish, reason, matched in cases:
            async with chatting(says(spell("a"), finish)) as server:
                reply = (await server.post(PATH, messages=[USER], max_tokens=9, **OFF)).json()
                assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, matched)
        async with chatting(ends("abcEND")) as server:
            asked = {"messages": [USER], "max_tokens": 9, "stop_sequences": ["E"], **OFF}
            reply = (await server.post(PATH, **asked)).json()
            assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "E")
            assert reply["content"] == [{"type": "text", "text": "abc"}]

    run(test())


def test_choices_and_forms_are_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}

    async def test() -> None:
        async with chatting(ends("x")) as server:
            for choice, good, bad in (
                ({"type": "any"}, HERMES + "\n" + HERMES, "Hm"),
                ({"type": "any", "disable_parallel_tool_use": True}, HERMES, HERMES + HERMES),
                ({"type": "tool", "name": "weather"}, HERMES, ""),
            ):
                asked = {"messages": [USER], "tools": [TOOL], "tool_choice": choice, **OFF}
                reply = await server.post(PATH, **asked)
                assert reply.status_code == 200, reply.text
                assert fits(server, good) and not fits(server, bad), choice
            reply = await server.post(PATH, messages=[USER], output_config={"format": form}, **OFF)
            assert fits(server, '{"a": 1}') and not fits(server, '{"a": "x"}'), reply.text

    run(test())


def block(**values: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, values]}]}


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"messages": None}, ["messages = null"]),
    ({"messages": ["x"]}, ['messages[0] = "x"', "object"]),
    ({"messages": [{"role": "tool", "content": "x"}]}, ['messages[0].role = "tool"', "assistant"]),
    ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content = 5", "string"]),
    ({"messages": [{"role": "user", "content": []}]}, ["messages[0].content = []", "one"]),
    ({"messages": [USER] * 5000}, ["messages: 5000 messages", "4096"]),
    ({"messages": [{"role": "user", "content": "word " * 4}] * 1000}, ["messages", "fit"]),
    (block(type="image", source={}), ['messages[0].content[1].type = "image"', "text"]),
    (block(type="text"), ["messages[0].content[1].text = null"]),
    (block(type="tool_result", content="x"), ["messages[0].content[1].tool_use_id = null"]),
    (
        block(type="tool_result", tool_use_id="a", content=[{"type": "document"}]),
        ['messages[0].content[1].content[0].type = "document"', "must be text"],
    ),
    ({"system": 5}, ["system = 5", "string"]),
    ({"max_tokens": -1}, ["max_tokens = -1"]),
    ({"stop_sequences": [5]}, ["stop_sequences = [5]", "strings"]),
    ({"tools": [{"name": "a"}]}, ["tools[0].input_schema is needed"]),
    ({"tools": [{**TOOL, "name": "a b"}]}, ['tools[0].name = "a b"', "letters"]),
    ({"tools": [{**TOOL, "name": 5}]}, ["tools[0].name = 5", "string"]),
    ({"tools": [TOOL, TOOL]}, ["tools[1].name", "has this name"]),
    ({"tools": [TOOL] * 500}, ["tools: 500 tools", "128"]),
    ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs.messages", "argument"]),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "string"}}]},
        ["tools[0].input_schema = ", "object"],
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ["tools[0].type = ", "custom"]),
    ({"tool_choice": {"type": "any"}}, ["tool_choice", "needs tools"]),
    ({"tools": [TOOL], "tool_choice": "any"}, ['tool_choice = "any"', "object"]),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}},
        ['tool_choice.name = "b"', "weather"],
    ),
    ({"thinking": {"type": "on"}}, ['thinking.type = "on"', "enabled"]),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, ["thinking.budget_tokens = 0"]),
    ({"output_config": {"effort": "much"}}, ['output_config.effort = "much"', "one of"]),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        ["output_config.format.schema", "x"],
    ),
    ({"mcp_servers": [{}]}, ["mcp_servers", "leave the field out"]),
]


def test_bad_bodies_name_the_fields_of_this_route() -> None:
    async def check(server: Harness, body: dict[str, Any], parts: list[str]) -> None:
        reply = await server.post(PATH, **{"messages": [USER], **body})
        assert reply.status_code == 400, (body, reply.text)
        error = reply.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith(parts[0]), error
        for part in parts:
            assert part in error["error"]["message"], error

    async def test() -> None:
        async with chatting(ends("x")) as server:
            for body, parts in BAD:
                await check(server, body, parts)
            assert server.engine.of(Generate) == []
            reply = await server.client.post(PATH, content=b"{")
            assert reply.status_code == 400 and reply.json()["type"] == "error"

    run(test())


def test_an_error_in_a_stream_is_an_event() -> None:
    failure = FinishReason(kind="abort", message="broken", failure=Failure.INTERNAL)

    async def test() -> None:
        asked = {"messages": [USER], "max_tokens": 9, "stream": True, **OFF}
        async with chatting(says(spell("abc"), failure)) as server:
            server.engine.pause = 0.05
            events = events_of(await server.post(PATH, **asked))
            assert [event["type"] for event in events][:1] == ["message_start"]
            assert events[-1] == {
                "type": "error",
                "error": {"type": "api_error", "message": "broken"},
            }
        async with chatting(says([], failure)) as server:
            reply = await server.post(PATH, **asked)
            assert reply.status_code == 500
            assert reply.json()["error"] == {"type": "api_error", "message": "broken"}

    run(test())
