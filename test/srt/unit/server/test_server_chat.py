"""/v1/chat/completions: tools, reasoning and templates, over the fake engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from chat_rig import add_call
from chat_samples import BEGUN, CHATML, HERMES, SAMPLES, WEATHER, Sample
from fake_engine import Script
from server_harness import Harness, run, serving
from tiny_tokenizer import EOS, byte_level, spell

from mamba_eagle.chat.family import FAMILIES
from mamba_eagle.constrain.grammar import Grammar
from mamba_eagle.core import FinishReason
from mamba_eagle.message import Generate
from mamba_eagle.server.bodies.grammars import Grammars
from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.text import TextTokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
LONG = {"type": "text", "text": "Hi " * 200}
# What the families' templates have in common, as far as these tests go.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v | tojson }}{% endfor %}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>\n{% endif %}{% endif %}"
    "{{ mood }}{{ reasoning_effort }}"
)


def ends(text: str, kind: str = "stop") -> Script:
    """Each request gets this text and ends with it."""

    def script(request: Generate) -> Any:
        tokens = spell(text)
        if kind == "stop":
            return [*tokens, EOS], FinishReason(kind="stop", matched=EOS)
        return tokens, FinishReason(kind="length", length=len(tokens))

    return script


def chatting(script: Script, **settings: Any) -> Any:
    values = {"chat_template": TEMPLATE, "context_length": 4000, "tool_call_parser": "qwen3"}
    return serving(script, **{**values, **settings})


def prompt_of(server: Harness) -> str:
    (request,) = server.engine.of(Generate)[-1:]
    return server.manager.tokenizer.decode(request.token_ids)  # type: ignore[union-attr]


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: call[key] for key in ("type", "function")} for call in calls]


def message_of(events: list[Any]) -> dict[str, Any]:
    """The message that a client puts together of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            add_call(message.setdefault("tool_calls", []), call)
    if not message["content"] and "tool_calls" not in message:
        message["content"] = ""
    return message


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_says_what_the_whole_reply_says(family: str, chunk: int) -> None:
    samples = [
        sample for name, sample in SAMPLES.items() if sample.family == family and name not in BEGUN
    ]
    writes = {"text": ""}

    async def check(server: Harness, sample: Sample) -> None:
        kwargs = {"prompt": sample.prompt}
        asked = {"messages": [USER], "tools": [WEATHER], "chat_template_kwargs": kwargs}
        whole = (await server.post(PATH, **asked)).json()["choices"][0]
        message = whole["message"]
        events = await server.events(PATH, **asked)
        streamed = message_of(events)
        for made in (message, streamed):
            made["tool_calls"] = without_ids(made.get("tool_calls", []))
        assert message == streamed
        assert message.get("reasoning_content") == sample.reasoning
        none = "" if not sample.calls else None
        assert message["content"] == (sample.content or none)
        said = [call["function"] for call in message["tool_calls"]]
        assert [(f["name"], json.loads(f["arguments"])) for f in said] == list(sample.calls)
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons[:-1] == [None] * (len(events) - 1)
        assert reasons[-1] == whole["finish_reason"]
        assert whole["finish_reason"] == ("tool_calls" if sample.calls else "stop")

    async def test() -> None:
        settings = {"chat_template": "{{ prompt }}{# tools #}", "tool_call_parser": family}
        async with chatting(
            lambda request: ends(writes["text"])(request), chunk=chunk, **settings
        ) as server:
            for sample in samples:
                writes["text"] = sample.text
                await check(server, sample)

    run(test())


def test_a_reply_cut_short_says_so() -> None:
    async def test() -> None:
        async with chatting(ends("</think>" + HERMES + "<tool_", "length")) as server:
            reply = await server.post(PATH, messages=[USER], tools=[WEATHER])
            choice = reply.json()["choices"][0]
            assert len(choice["message"]["tool_calls"]) == 1
            assert choice["finish_reason"] == "length"

    run(test())


@pytest.mark.parametrize("before", ["", HERMES])
def test_a_call_that_its_model_does_not_end_is_none_to_run(before: str) -> None:
    """A stream has begun it, and says of its end what a whole reply says."""
    begun = '<tool_call>{"name": "weather", "arguments": {"city": "Os'
    asked = {"messages": [USER], "tools": [WEATHER]}
    function = {"name": "weather", "parameters": WEATHER["function"]["parameters"]}
    own_tool = {"name": "weather", "input_schema": function["parameters"]}

    async def streamed(server: Harness, path: str, **body: Any) -> list[Any]:
        reply = await server.post(path, stream=True, **body)
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    async def test() -> None:
        async with chatting(ends("</think>" + before + begun)) as server:
            whole = (await server.post(PATH, **asked)).json()["choices"][0]
            last = (await streamed(server, PATH, **asked))[-1]["choices"][0]
            assert last["finish_reason"] == whole["finish_reason"]
            assert last["finish_reason"] == ("tool_calls" if before else "stop")
            items = {"input": "Hi", "tools": [{"type": "function", **function}]}
            *_, last = await streamed(server, "/v1/responses", **items)
            statuses = [item["status"] for item in last["response"]["output"]]
            assert statuses == ["completed"] * bool(before) + ["incomplete"]
            own = {"messages": [USER], "tools": [own_tool]}
            *_, last, _ = await streamed(server, "/v1/messages", **own)
            assert last["delta"]["stop_reason"] == ("tool_use" if before else "end_turn")

    run(test())


def test_calls_have_names_of_their_own() -> None:
    async def test() -> None:
        async with chatting(ends("</think>" + HERMES * 2)) as server:
            reply = await server.post(PATH, messages=[USER], tools=[WEATHER], n=2)
            calls = [c for ch in reply.json()["choices"] for c in ch["message"]["tool_calls"]]
            assert len({call["id"] for call in calls}) == len(calls) == 4
            one = await server.post(
                PATH, messages=[USER], tools=[WEATHER], parallel_tool_calls=False
            )
            assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1

    run(test())


def test_without_tools_a_call_is_text() -> None:
    async def test() -> None:
        async with chatting(ends("</think>" + HERMES)) as server:
            for asked in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
                choice = (await server.post(PATH, messages=[USER], **asked)).json()["choices"][0]
                assert choice["message"]["content"] == HERMES
                assert choice["finish_reason"] == "stop"
                assert "weather" not in prompt_of(server)

    run(test())


def test_reasoning_may_stay_in_the_text() -> None:
    async def test() -> None:
        async with chatting(ends("a</think>b")) as server:
            asked = {"messages": [USER], "separate_reasoning": False}
            message = (await server.post(PATH, **asked)).json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": "a</think>b"}

    run(test())


def test_what_the_template_is_given() -> None:
    async def test() -> None:
        async with chatting(ends("x")) as server:
            await server.post(PATH, messages=[USER])
            assert (
                prompt_of(server)
                == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
            )
            await server.post(PATH, messages=[USER], enable_thinking=False)
            assert prompt_of(server).endswith("<think></think>")
            await server.post(PATH, messages=[USER], reasoning_effort="none")
            assert prompt_of(server).endswith("<think></think>none")
            kwargs = {"enable_thinking": True, "mood": "calm"}
            await server.post(
                PATH, messages=[USER], enable_thinking=False, chat_template_kwargs=kwargs
            )
            assert prompt_of(server).endswith("<think>\ncalm")
            documents = [{"title": "t", "text": "d"}]
            await server.post(PATH, messages=[USER], documents=documents)
            assert prompt_of(server).startswith("[t: d]")
            await server.post(PATH, messages=[USER], add_generation_prompt=False)
            assert prompt_of(server).endswith("Hi<|im_end|>\n")
            await server.post(PATH, messages=[USER], tools=[WEATHER])
            assert prompt_of(server).startswith(json.dumps([WEATHER]))
            started = {"role": "assistant", "content": "The answer"}
            reply = await server.post(PATH, messages=[USER, started], continue_final_message=True)
            assert prompt_of(server).endswith("assistant\nThe answer")
            assert reply.json()["choices"][0]["message"]["content"] == "x"

    run(test())


def test_arguments_of_earlier_calls_are_objects() -> None:
    function = {"name": "f", "arguments": '{"a": 1, "b": "x"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        {"role": "developer", "content": "s"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]

    async def test() -> None:
        async with chatting(ends("x")) as server:
            await server.post(PATH, messages=messages)
            said = '<tool_call>f a=1 b="x"</tool_call>'
            assert f"assistant\n{said}{said}<|im_end|>" in prompt_of(server)
            assert "tool\n42" in prompt_of(server) and "system\ns" in prompt_of(server)

    run(test())


def test_special_tokens_that_parts_begin_with_are_read() -> None:
    """As with Nemotron 3: its tags are special tokens, which texts are made without."""
    tokenizer = byte_level()
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["</think>", "<|im_end|>"]})
    tokenizer = type(tokenizer)(tokenizer.hf)
    special = tokenizer.special_tokens()

    def script(request: Generate) -> Any:
        tokens = [*spell("a"), special["</think>"], *spell("b"), special["<|im_end|>"], EOS]
        return tokens, FinishReason(kind="stop", matched=EOS)

    async def test() -> None:
        async with chatting(script, tokenizer=tokenizer) as server:
            message = (await server.post(PATH, messages=[USER])).json()["choices"][0]["message"]
            assert message == {"role": "assistant", "reasoning_content": "a", "content": "b"}
            events = await server.events(PATH, messages=[USER])
            assert message_of(events) == message

    run(test())


def test_logprobs_of_all_tokens_come_with_the_parts() -> None:
    async def test() -> None:
        text = "a</think>" + HERMES
        async with chatting(ends(text), chunk=3) as server:
            asked = {"messages": [USER], "tools": [WEATHER], "logprobs": True}
            whole = (await server.post(PATH, **asked)).json()["choices"][0]
            events = await server.events(PATH, **asked)
            entries = [
                entry
                for event in events
                for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])
            ]
            assert entries == whole["logprobs"]["content"]
            assert len(entries) == len(text) + 1

    run(test())


def tool(name: Any, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


def called(arguments: Any) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


UNIQUE = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"tools": "x"}, ['tools = "x"', "list of tools"]),
    ({"tools": [5]}, ["tools[0] = 5", "object"]),
    ({"tools": [{"type": "function"}]}, ["tools[0].function is needed"]),
    (
        {"tools": [{"type": "web", "function": {"name": "a"}}]},
        ['tools[0].type = "web"', "function"],
    ),
    ({"tools": [tool(None)]}, ["tools[0].function.name = null", "string"]),
    ({"tools": [tool("a"), {"type": "function", "function": {}}]}, ["tools[1].function.name is"]),
    ({"tools": [tool("a b")]}, ['tools[0].function.name = "a b"', "letters"]),
    ({"tools": [tool("x" * 129)]}, ["tools[0].function.name", "1 to 128"]),
    ({"tools": [tool("a"), tool("b"), tool("a")]}, ["tools[2].function.name", "tools[0] has"]),
    ({"tools": [tool(f"t{i}") for i in range(500)]}, ["tools: 500 tools", "128", "fewer"]),
    ({"tools": [tool("a", parameters=5)]}, ["tools[0].function.parameters = 5", "object"]),
    ({"tools": [tool("a", parameters={"type": "string"})]}, ["parameters", "type object"]),
    ({"tools": [tool("a", parameters={"properties": {"x": 5}})]}, ["parameters", "properties"]),
    ({"tools": [tool("a", strict="yes")]}, ['tools[0].function.strict = "yes"', "true or false"]),
    ({"tool_choice": "required"}, ['tool_choice = "required"', "needs tools"]),
    ({"tools": [WEATHER], "tool_choice": "any"}, ['tool_choice = "any"', "auto, none, required"]),
    ({"tools": [WEATHER], "tool_choice": 5}, ["tool_choice = 5", "object"]),
    (
        {"tools": [WEATHER], "tool_choice": tool("sun")},
        ['tool_choice.function.name = "sun"', "weather"],
    ),
    ({"functions": [{}]}, ["functions", "send tools"]),
    ({"messages": called("{")}, ["messages[1].tool_calls[0].function.arguments", "JSON object"]),
    ({"messages": called("[1]")}, ["messages[1].tool_calls[0].function.arguments", "JSON object"]),
    ({"messages": called(5)}, ["messages[1].tool_calls[0].function.arguments"]),
    (
        {"messages": called('{"a": [' + "[]," * 40_000 + "0]}")},
        ["messages[1].tool_calls[0].function.arguments has 40002 arrays and objects", "32768"],
    ),
    (
        {"messages": called('{"a": [' + "1," * 40_000 + "0]}")},
        ["messages[1].tool_calls[0].function.arguments has too many numbers"],
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, ["messages[0].tool_calls", "list"]),
    ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].tool_call_id = null"]),
    (
        {"messages": [{"role": "user", "content": [LONG, {"type": "image_url"}]}]},
        ["messages[0].content", 'a part of type "image_url"', "text only"],
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ["parts of type text"]),
    ({"messages": [USER] * 5000}, ["messages: 5000 messages", "4096"]),
    ({"messages": [{"role": "user", "content": "word " * 4}] * 1000}, ["messages", "fit"]),
    ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs.messages", "argument"]),
    ({"chat_template_kwargs": {"tokenize": True}}, ["chat_template_kwargs.tokenize"]),
    ({"chat_template_kwargs": {"a b": 1}}, ["chat_template_kwargs.a b", "name"]),
    ({"chat_template_kwargs": 5}, ["chat_template_kwargs = 5", "object"]),
    ({"chat_template": "x"}, ['chat_template = "x"', "--chat-template"]),
    ({"documents": "x"}, ['documents = "x"', "list"]),
    ({"documents": ["x"]}, ['documents[0] = "x"', "object"]),
    ({"documents": [{}] * 257}, ["documents: 257 documents", "256"]),
    (
        {"tools": [tool("a"), tool("b", parameters=UNIQUE)], "tool_choice": "required"},
        ["tools[1].function.parameters.properties.x", "uniqueItems"],
    ),
    (
        {"tools": [tool("a", parameters={"$ref": "#/x"})], "tool_choice": "required"},
        ["tools[0].function.parameters"],
    ),
    (
        {"tools": [tool("b", parameters=UNIQUE, strict=True)]},
        ["tools[0].function.parameters.properties.x", "uniqueItems"],
    ),
    (
        {
            "tools": [WEATHER],
            "tool_choice": "required",
            "response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE}},
        },
        ["response_format.json_schema.schema.properties.x", "uniqueItems"],
    ),
    ({"thinking_budget": -1}, ["thinking_budget = -1", "between 0"]),
    ({"thinking_budget": "x"}, ['thinking_budget = "x"', "integer"]),
    ({"thinking_token_budget": 5}, ["thinking_token_budget = 5", "</think>", "several tokens"]),
    ({"reasoning_effort": "huge"}, ['reasoning_effort = "huge"', "none, minimal"]),
    ({"enable_thinking": "no"}, ['enable_thinking = "no"', "true or false"]),
    ({"continue_final_message": True}, ["continue_final_message", "role assistant"]),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        ["continue_final_message", "one of the two"],
    ),
]


HALF = "\ud800"
NO_JSON: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool("f", description=HALF)]}, "tools[0].function.description"),
    ({"messages": called(json.dumps({"a": HALF}))}, "messages[1].tool_calls[0].function.arguments"),
    ({"documents": [{"title": HALF, "text": ""}]}, "documents[0].title"),
    ({"chat_template_kwargs": {"mood": HALF}}, "chat_template_kwargs.mood"),
    ({"chat_template_kwargs": {HALF: 1}}, "chat_template_kwargs.\\ud800"),
    ({"tools": [tool("f", parameters={"x": float("nan")})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", parameters={"x": {HALF: 1}})]}, "tools[0].function.parameters"),
]
FORMS = [
    ({"type": "object", "title": HALF}, "json_schema.schema.title"),
    ({"type": "object", "minProperties": float("nan")}, "finite"),
]


def test_what_no_text_and_no_schema_can_have_is_named_wherever_it_is() -> None:
    async def test() -> None:
        async with chatting(ends("x")) as server:
            for body, path in NO_JSON:
                content = json.dumps({"messages": [USER], **body}).encode()
                for route in (PATH, "/tokenize"):
                    reply = await server.client.post(
                        route, content=content, headers={"content-type": "application/json"}
                    )
                    assert reply.status_code == 400, reply.text
                    assert reply.json()["error"]["param"].startswith(path), reply.text
            for schema, said in FORMS:
                form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
                content = json.dumps({"messages": [USER], "response_format": form}).encode()
                reply = await server.client.post(
                    PATH, content=content, headers={"content-type": "application/json"}
                )
                assert reply.status_code == 400 and said in reply.text

    run(test())


def test_arguments_with_half_of_a_surrogate_pair_are_sent_escaped() -> None:
    async def test() -> None:
        async with chatting(ends("</think>" + HERMES.replace("Oslo", "\\ud800"))) as server:
            reply = await server.post(PATH, messages=[USER], tools=[WEATHER])
            (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
            assert call["function"]["arguments"] == '{"city": "\\ud800"}'

    run(test())


def test_bad_bodies_name_path_and_remedy() -> None:
    async def test() -> None:
        async with chatting(ends("x")) as server:
            for body, parts in BAD:
                reply = await server.post(PATH, **{"messages": [USER], **body})
                assert reply.status_code == 400, (body, reply.text)
                message = reply.json()["error"]["message"]
                for part in parts:
                    assert part in message, message
            assert server.engine.of(Generate) == []

    run(test())


def test_a_server_that_knows_no_calls_says_what_to_start_it_with() -> None:
    async def test() -> None:
        asked = {"messages": [USER], "tools": [WEATHER]}
        for settings, remedy in (
            ({"chat_template": "{{ 'plain' }}"}, "--chat-template"),
            ({"chat_template": "{{ tools }}", "tool_call_parser": "auto"}, "--tool-call-parser"),
            ({"tool_call_parser": "none"}, "--tool-call-parser"),
        ):
            async with chatting(ends("x"), **settings) as server:
                reply = await server.post(PATH, **asked)
                assert reply.status_code == 400 and remedy in reply.text, reply.text
                assert (await server.post(PATH, messages=[USER])).status_code == 200

    run(test())


@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages", "/tokenize"])
def test_what_a_template_raises_is_told_by_every_route(path: str) -> None:
    async def test() -> None:
        template = "{{ raise_exception('no ' ~ messages[0].role) }}"
        async with chatting(ends("x"), chat_template=template) as server:
            name = "input" if "responses" in path else "messages"
            reply = await server.post(path, **{name: [USER]})
            assert reply.status_code == 400 and "no user" in reply.text

    run(test())


def test_a_looping_template_delays_nobody() -> None:
    loop = (
        "{% if loops %}{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}"
        "{% endfor %}{% endif %}" + CHATML
    )

    async def test() -> None:
        async with chatting(ends("x"), chat_template=loop) as server:
            server.app.state.server.chat.template.max_seconds = 0.5
            stuck = asyncio.ensure_future(
                server.post(PATH, messages=[USER], chat_template_kwargs={"loops": True})
            )
            for _ in range(5):
                assert (await server.post(PATH, messages=[USER])).status_code == 200
            assert not stuck.done()
            reply = await stuck
            assert reply.status_code == 400 and "had not ended" in reply.text

    run(test())


def fits(server: Harness, text: str) -> bool:
    """Whether the last request's grammar takes this as a whole text."""
    (request,) = server.engine.of(Generate)[-1:]
    assert request.sampling.grammar
    matcher = server.matcher(request.sampling.grammar)
    tokens = spell(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


OFF = {"enable_thinking": False}
OBJECT = {"type": "json_object"}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
WRONG = HERMES.replace('"Oslo"', "7")
FORCED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # what is asked, what it lets through, what it does not
    (
        {"tool_choice": "required", **OFF},
        [HERMES, HERMES + "\n" + HERMES],
        ["", "Hm", "a</think>" + HERMES, WRONG, HERMES.replace("weather", "wether")],
    ),
    (
        {"tool_choice": "required"},
        ["a</think>\n\n" + HERMES],
        [HERMES, "a</think>b" + HERMES, "<tool_call></think>" + HERMES],
    ),
    (
        {"tool_choice": "required", "parallel_tool_calls": False, **OFF},
        [HERMES],
        [HERMES + "\n" + HERMES],
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}, **OFF},
        [HERMES],
        [HERMES + "\n" + HERMES, HERMES.replace("weather", "sun")],
    ),
    # A form is for text, and there is none.
    ({"tool_choice": "required", "response_format": OBJECT, **OFF}, [HERMES], ["{}", ""]),
    ({"tools": [STRICT], **OFF}, [HERMES, "", "Hm " + HERMES + " and"], [WRONG, "<tool_call>"]),
    ({"tools": [STRICT]}, ["a</think>b", "a</think>" + HERMES], ["a</think>" + WRONG]),
    (
        {"response_format": OBJECT, **OFF},
        [HERMES, WRONG, '{"a": 1}'],
        ["Hm", "", "<tool_call>{}</tool_call>"],
    ),
    ({"tools": None, "response_format": OBJECT}, ["a</think>{}"], ["{}"]),
    ({"tools": None, "response_format": OBJECT, **OFF}, ["{}"], ["a</think>{}", "Hm"]),
]


def test_calls_and_forms_are_grammars() -> None:
    sun = tool("sun", parameters={"type": "object", "properties": {}})

    async def test() -> None:
        async with chatting(ends("x")) as server:
            for asked, good, bad in FORCED:
                body = {"messages": [USER], "tools": [WEATHER, sun], **asked}
                reply = await server.post(PATH, **body)
                assert reply.status_code == 200, reply.text
                for text in good:
                    assert fits(server, text), (asked, text)
                for text in bad:
                    assert not fits(server, text), (asked, text)
            for free in ({"tools": [WEATHER]}, {"tools": [STRICT], "tool_choice": "none"}, {}):
                await server.post(PATH, messages=[USER], **free)
                (request,) = server.engine.of(Generate)[-1:]
                assert request.sampling.grammar == ""

    run(test())


def thinking_tokenizer() -> TextTokenizer:
    """Whose reasoning ends with one token."""
    tokenizer = byte_level()
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["</think>"]})
    return type(tokenizer)(tokenizer.hf)


def test_a_budget_is_a_grammar() -> None:
    tokenizer = thinking_tokenizer()
    end = tokenizer.special_tokens()["</think>"]

    async def test() -> None:
        async with chatting(ends("x"), tokenizer=tokenizer) as server:

            async def takes(tokens: list[int], **asked: Any) -> bool:
                reply = await server.post(PATH, messages=[USER], thinking_budget=3, **asked)
                assert reply.status_code == 200, reply.text
                (request,) = server.engine.of(Generate)[-1:]
                matcher = server.matcher(request.sampling.grammar)
                taken: int = matcher.try_consume_tokens(tokens)
                return taken == len(tokens)

            assert await takes([*spell("abc"), end, *spell("answer")])
            assert await takes([end, *spell("answer"), EOS])
            assert not await takes(spell("abcd"))
            assert not await takes([EOS])
            assert await takes([*spell("abc"), end, *spell("{}")], response_format=OBJECT)
            assert not await takes([*spell("abc"), end, *spell("x")], response_format=OBJECT)
            await server.post(PATH, messages=[USER], thinking_budget=3, enable_thinking=False)
            (request,) = server.engine.of(Generate)[-1:]
            assert request.sampling.grammar == ""  # there is no reasoning to be cut short

    run(test())


def test_a_refused_budget_blames_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Grammars, grammar: Grammar, path: str) -> str:
        raise RequestError(f"{path}: too large", param=path)

    monkeypatch.setattr(Grammars, "check", refused)

    async def test() -> None:
        async with chatting(ends("x"), tokenizer=thinking_tokenizer()) as server:
            reply = await server.post(PATH, messages=[USER], thinking_budget=3, tools=[WEATHER])
            assert reply.status_code == 400 and "thinking_budget: too large" in reply.text

    run(test())
