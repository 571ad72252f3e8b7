"""/v1/responses over the fake engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from chat_samples import HERMES, WEATHER
from server_harness import PATIENCE, Harness, listening, run
from test_server_anthropic import events_of, says
from test_server_chat import USER, chatting, ends, fits, prompt_of
from tiny_tokenizer import spell

from mamba_eagle.core import Failure, FinishReason
from mamba_eagle.message import Generate

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TEXT = "Rain?</think>Let me look.\n" + HERMES + "\nDone."
TEXT_EVENTS = ["output_item.added", "content_part.added", "{}.delta", "{}.done"] + [
    "content_part.done",
    "output_item.done",
]
CALL_EVENTS = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]


def expected_order(*stems: str) -> list[str]:
    """The events of parts with these names, with each run of deltas as one."""
    names = ["created", "in_progress"]
    for stem in stems:
        form = CALL_EVENTS if stem.startswith("function") else TEXT_EVENTS
        names += [name.format(stem) for name in form]
    return [f"response.{name}" for name in [*names, "completed"]]


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together of deltas; places and names are checked."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "response.output_item.done":
            assert {**item, "status": "completed"} == event["item"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "response.content_part.added":
            item["content"].append(event["part"])
        elif kind == "response.content_part.done":
            assert item["content"] == [event["part"]]
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
        elif kind.endswith(".delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        else:
            assert item["content"][event["content_index"]]["text"] == event["text"]
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in items
    ]


@pytest.mark.parametrize("chunk", [1, 7])
def test_a_stream_says_what_the_whole_reply_says(chunk: int) -> None:
    async def test() -> None:
        async with chatting(ends(TEXT), chunk=chunk) as server:
            asked = {"model": "tiny", "input": "Hi", "tools": [TOOL], "instructions": "S"}
            whole = (await server.post(PATH, **asked)).json()
            events = events_of(await server.post(PATH, **asked, stream=True))
            names = [event["type"] for event in events]
            order = [b for a, b in zip([""] + names, names) if a != b or not b.endswith("delta")]
            stems = ("reasoning_text", "output_text", "function_call_arguments", "output_text")
            assert order == expected_order(*stems)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            last = events[-1]["response"]
            assert items_of(events) == last["output"]
            assert without_ids(last["output"]) == without_ids(whole["output"])
            told = {"id", "output", "created_at"}
            for name in whole.keys() - told:
                assert last[name] == whole[name], name
            assert whole["tools"] == [TOOL] and whole["instructions"] == "S"
            assert whole["status"] == "completed" and whole["object"] == "response"
            assert whole["usage"] == {
                "input_tokens": len(prompt_of(server)),
                "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
                "output_tokens": len(TEXT) + 1,
                "output_tokens_details": {"reasoning_tokens": len("Rain?")},
                "total_tokens": len(prompt_of(server)) + len(TEXT) + 1,
            }
            call = whole["output"][2]
            assert (call["name"], call["arguments"]) == ("weather", '{"city": "Oslo"}')

    run(test())


def test_the_prompt_is_that_of_the_same_chat() -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    items = [
        {"role": "developer", "content": "T"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call", "call_id": "c2", **function},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "dry"}],
        },
        {"role": "user", "content": "and now?"},
    ]
    asked = {"instructions": "S", "input": items, "tools": [TOOL]}
    chat = {
        "messages": [
            {"role": "system", "content": "S\n\nT"},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "A",
                "reasoning_content": "Hm",
                "tool_calls": [{"id": c, "function": function} for c in ("c1", "c2")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "wet"},
            {"role": "tool", "tool_call_id": "c2", "content": "dry"},
            {"role": "user", "content": "and now?"},
        ],
        "tools": [WEATHER],
        "reasoning_effort": "none",
    }

    async def test() -> None:
        async with chatting(ends("x")) as server:
            assert (await server.post("/v1/chat/completions", **chat)).status_code == 200
            expected = prompt_of(server)
            reply = await server.post(PATH, **asked, reasoning={"effort": "none"})
            assert reply.status_code == 200, reply.text
            assert prompt_of(server) == expected

    run(test())


def test_a_response_cut_short_says_so() -> None:
    async def test() -> None:
        async with chatting(ends("</think>abc", "length")) as server:
            reply = (await server.post(PATH, input="Hi", max_output_tokens=9)).json()
            assert reply["status"] == "incomplete" and reply["max_output_tokens"] == 9
            assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
            assert [item["status"] for item in reply["output"]] == ["incomplete"]
            events = events_of(await server.post(PATH, input="Hi", stream=True))
            assert events[-1]["type"] == "response.incomplete"

    run(test())


def test_choices_and_forms_are_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}

    async def test() -> None:
        async with chatting(ends("x")) as server:
            for choice in ("required", {"type": "function", "name": "weather"}):
                asked = {"input": "Hi", "tools": [TOOL], "tool_choice": choice, **OFF}
                reply = await server.post(PATH, **asked)
                assert reply.status_code == 200, reply.text
                assert reply.json()["tool_choice"] == choice
                assert fits(server, HERMES) and not fits(server, "Hm"), choice
            reply = await server.post(PATH, input="Hi", text={"format": form}, **OFF)
            assert fits(server, '{"a": 1}') and not fits(server, '{"a": "x"}'), reply.text
            assert reply.json()["text"]["format"] == {**form, "strict": False}

    run(test())


def item(**values: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, values]}


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"input": None}, ["input = null", "string"]),
    ({"input": ["x"]}, ['input[0] = "x"', "object"]),
    ({"input": [{"role": "robot", "content": "x"}]}, ['input[0].role = "robot"', "developer"]),
    (item(role="user", content=5), ["input[1].content = 5", "string"]),
    (
        item(role="user", content=[{"type": "input_image", "image_url": "x"}]),
        ['input[1].content[0].type = "input_image"', "input_text"],
    ),
    (item(type="item_reference", id="x"), ['input[1].type = "item_reference"', "message"]),
    (item(type="function_call", name="f", arguments="{}"), ["input[1].call_id = null"]),
    (
        item(type="function_call", call_id="c", name="f", arguments="{a"),
        ['input[1].arguments = "{a"', "JSON object"],
    ),
    (item(type="function_call_output", output="x"), ["input[1].call_id = null"]),
    ({"instructions": 5}, ["instructions = 5"]),
    ({"previous_response_id": 5}, ["previous_response_id = 5", "string"]),
    ({"conversation": "conv_1"}, ["conversation = ", "whole conversation"]),
    ({"store": "yes"}, ['store = "yes"', "true or false"]),
    ({"background": True}, ["background = true", "leave it out"]),
    ({"prompt": {"id": "x"}}, ["prompt = ", "keeps no prompts"]),
    ({"truncation": "auto"}, ['truncation = "auto"', "disabled"]),
    ({"include": ["message.output_text.logprobs"]}, ["include = ", "/v1/chat/completions"]),
    ({"max_output_tokens": -1}, ["max_output_tokens = -1"]),
    ({"metadata": {"a": 5}}, ["metadata.a = 5"]),
    ({"metadata": {"\ud800": "a"}}, ["metadata: the name", "Unicode"]),
    (
        {"tools": [{**TOOL, "description": "\ud800"}]},
        ["tools[0].description = ", "Unicode"],
    ),
    ({"reasoning": {"effort": "much"}}, ['reasoning.effort = "much"', "one of"]),
    ({"reasoning": "high"}, ['reasoning = "high"', "object"]),
    ({"tools": [{"type": "web_search"}]}, ['tools[0].type = "web_search"', "function"]),
    ({"tools": [{"type": "function"}]}, ["tools[0].name is needed"]),
    ({"tools": [TOOL, TOOL]}, ["tools[1].name", "has this name"]),
    ({"tools": [TOOL] * 500}, ["tools: 500 tools", "128"]),
    ({"input": [{"role": "user", "content": "a"}] * 5000}, ["input: 5000 items", "4096"]),
    ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs.messages", "argument"]),
    ({"chat_template_kwargs": {".a" * 5000: 1}}, ["chat_template_kwargs..a.a", "... = 1: is not"]),
    ({"tools": [{**TOOL, "name": "a b"}]}, ['tools[0].name = "a b"', "letters"]),
    ({"tools": [{**TOOL, "parameters": 5}]}, ["tools[0].parameters = 5", "object"]),
    ({"tool_choice": "required"}, ["tool_choice", "needs tools"]),
    ({"tools": [TOOL], "tool_choice": "any"}, ['tool_choice = "any"', "required"]),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}},
        ['tool_choice.name = "b"', "weather"],
    ),
    ({"text": {"format": {"type": "xml"}}}, ['text.format.type = "xml"', "json_schema"]),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
        ["text.format.schema", "x"],
    ),
]


def test_bad_bodies_name_the_fields_of_this_route() -> None:
    async def check(server: Harness, body: dict[str, Any], parts: list[str]) -> None:
        content = json.dumps({"input": "Hi", **body}).encode()
        kind = {"content-type": "application/json"}
        reply = await server.client.post(PATH, content=content, headers=kind)
        assert reply.status_code == 400, (body, reply.text)
        message = reply.json()["error"]["message"]
        assert message.startswith(parts[0]), message
        for part in parts:
            assert part in message, message

    async def test() -> None:
        async with chatting(ends("x")) as server:
            for body, parts in BAD:
                await check(server, body, parts)
            assert server.engine.of(Generate) == []

    run(test())


def test_an_error_in_a_stream_is_a_failed_response() -> None:
    failure = FinishReason(kind="abort", message="broken", failure=Failure.INTERNAL)

    async def test() -> None:
        asked = {"input": "Hi", "stream": True, **OFF}
        async with chatting(says(spell("abc"), failure)) as server:
            server.engine.pause = 0.05
            events = events_of(await server.post(PATH, **asked))
            assert [event["type"] for event in events[:2]] == [
                "response.created",
                "response.in_progress",
            ]
            assert events[-1]["type"] == "response.failed"
            failed = events[-1]["response"]
            assert failed["error"] == {"code": "server_error", "message": "broken"}
            assert failed["status"] == "failed" and failed["id"] == events[0]["response"]["id"]
        async with chatting(says([], failure)) as server:
            reply = await server.post(PATH, **asked)
            assert reply.status_code == 500 and reply.json()["error"]["message"] == "broken"

    run(test())


def test_an_error_after_a_keep_alive_has_the_form_of_its_route() -> None:
    failure = FinishReason(kind="abort", message="broken", failure=Failure.INTERNAL)
    bodies = {PATH: {"input": "Hi"}, "/v1/messages": {"messages": [USER]}}

    heard = threading.Event()

    def late(request: Generate) -> Any:
        assert heard.wait(PATIENCE)
        return [], failure

    async def test() -> None:
        async with chatting(late, sse_keep_alive=0.02) as server, listening(server.app) as client:
            for path, body in bodies.items():
                asked = {**body, "stream": True, **OFF}
                text = ""
                heard.clear()
                async with client.stream("POST", path, json=asked) as reply:
                    assert reply.status_code == 200
                    async for piece in reply.aiter_text():
                        text += piece
                        heard.set()
                *comments, last, end = text.split("\n\n")
                assert set(comments) == {": keep-alive"} and end == ""
                name, data = last.split("\ndata: ")
                assert name == f"event: {json.loads(data)['type']}" and "broken" in data

    run(test())
