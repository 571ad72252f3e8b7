"""The ``anthropic`` package: messages, streams, tools, thinking, parse, count_tokens."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from anthropic.types import Message, MessageTokensCount
from checks import (
    BASE_URL,
    KEY,
    MODEL,
    PARAMETERS,
    QUESTION,
    RESULT,
    adds,
    check,
    equal,
    post,
    run,
)
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASKED: Any = {"model": MODEL, "max_tokens": 150, "messages": MESSAGES}
BODY: Any = {**ASKED, "extra_body": {"temperature": 0}}  # the package names it no more
TOOL: Any = {"name": "add", "description": "Two numbers.", "input_schema": PARAMETERS}
MUST: Any = {"type": "any", "disable_parallel_tool_use": True}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY)


class Kind(BaseModel):
    """The package sends no limits of numbers, which a small model would not keep by itself."""

    operation: Literal["add", "subtract"]
    exact: bool


@check("messages.create; asynchronous client")
async def messages() -> None:
    whole = client.messages.create(**BODY)
    assert whole.content[0].text.endswith(RESULT), whole
    equal(whole.stop_reason, "end_turn")
    async with anthropic.AsyncAnthropic(base_url=BASE_URL, api_key=KEY) as one:
        again = await one.messages.create(**BODY)
        equal(again.content[0].text, whole.content[0].text)
        async with one.messages.stream(**BODY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        equal(text, whole.content[0].text)
    stopped = client.messages.create(**BODY, stop_sequences=["####"])
    equal((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", "####"))
    cut = client.messages.create(**{**BODY, "max_tokens": 5})
    equal((cut.stop_reason, cut.usage.output_tokens), ("max_tokens", 5))


@check("messages.stream, raw stream")
def streams() -> None:
    whole = client.messages.create(**BODY)
    with client.messages.stream(**BODY) as stream:
        equal("".join(stream.text_stream), whole.content[0].text)
        final = stream.get_final_message()
    equal(final.content[0].text, whole.content[0].text)
    equal(final.usage.output_tokens, whole.usage.output_tokens)
    events = [event.type for event in client.messages.create(**BODY, stream=True)]
    equal((events[0], events[-1]), ("message_start", "message_stop"))


@check("tools: any, named, streamed, with results")
def tools() -> None:
    for choice in (MUST, {**MUST, "type": "tool", "name": "add"}):
        body = {**BODY, "tools": [TOOL], "tool_choice": choice}
        whole = client.messages.create(**body)
        equal(whole.stop_reason, "tool_use")
        (call,) = [block for block in whole.content if block.type == "tool_use"]
        equal(call.name, "add")
        adds(call.input)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        equal([b.input for b in streamed.content if b.type == "tool_use"], [call.input])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "17"}
    asked = [
        *MESSAGES,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**{**BODY, "messages": asked, "tools": [TOOL]}).content


@check("thinking, whole and streamed")
def thinking() -> None:
    body = {**BODY, "thinking": THINK}
    whole = client.messages.create(**body)
    equal([block.type for block in whole.content], ["thinking", "text"])
    assert "<<" in whole.content[0].thinking and whole.content[1].text.isdigit(), whole
    with client.messages.stream(**body) as stream:
        kinds = {event.type for event in stream}
        equal(stream.get_final_message().content[0].thinking, whole.content[0].thinking)
    assert "thinking" in kinds, kinds


@check("messages.parse with a pydantic class")
def parse() -> None:
    parsed = client.messages.parse(**BODY, output_format=Kind)
    assert isinstance(parsed.parsed_output, Kind), parsed


@check("messages.count_tokens")
def count_tokens() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    whole = client.messages.create(**BODY, system="Be brief.")
    usage = whole.usage
    equal(count.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))


@check("unstreamed replies against anthropic's types, strictly")
def strict_types() -> None:
    must = {"tools": [TOOL], "tool_choice": MUST}
    for extra in ({}, must, {"thinking": THINK}, {"stop_sequences": ["1"]}, {"max_tokens": 3}):
        content = post("/v1/messages", {**ASKED, "temperature": 0, **extra})
        Message.model_validate_json(content, strict=True)
    asked = {"model": MODEL, "messages": MESSAGES}
    content = post("/v1/messages/count_tokens", asked)
    MessageTokensCount.model_validate_json(content, strict=True)


@check("errors: BadRequestError; a stream that is left")
def errors() -> None:
    try:
        client.messages.create(**ASKED, extra_body={"temperature": -1})
    except anthropic.BadRequestError as error:
        assert "temperature" in str(error), error
    else:
        raise AssertionError("temperature -1 was taken")
    with client.messages.stream(**{**BODY, "max_tokens": 2000}) as stream:
        next(iter(stream))


run("anthropic")
