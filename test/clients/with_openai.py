"""The ``openai`` package: completions, chats, tools, parse, responses; its types of replies."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
from checks import (
    ADD,
    BASE_URL,
    KEY,
    MODEL,
    PARAMETERS,
    PROMPT,
    QUESTION,
    RESULT,
    THINKING,
    V1,
    adds,
    check,
    equal,
    post,
    run,
)
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict, Field

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": MODEL, "temperature": 0}
CHAT: Any = {**GREEDY, "messages": MESSAGES, "max_completion_tokens": 150}
client = openai.OpenAI(base_url=V1, api_key=KEY)


def async_client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=V1, api_key=KEY)


class Sum(BaseModel):
    """Of two numbers; without others, which a small model would go on to write."""

    model_config = ConfigDict(extra="forbid")
    left: int = Field(ge=0, le=999)
    right: int = Field(ge=0, le=999)


@check("models.list, models.retrieve")
def models() -> None:
    equal([model.id for model in client.models.list()], [MODEL])
    assert isinstance(client.models.retrieve(MODEL), Model)


@check("completions: plain, n, echo with logprobs, stop, stream with usage")
def completions() -> None:
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 150}
    whole = client.completions.create(**body)
    assert whole.choices[0].text.endswith(f"#### {RESULT}"), whole
    assert whole.choices[0].finish_reason == "stop"
    samples = client.completions.create(**{**body, "temperature": 0.8}, n=3, seed=7)
    equal([choice.index for choice in samples.choices], [0, 1, 2])
    stopped = client.completions.create(**body, stop=["####"])
    equal(stopped.choices[0].text, whole.choices[0].text.partition("####")[0])
    echoed = client.completions.create(**{**body, "max_tokens": 1}, echo=True, logprobs=2)
    logprobs = echoed.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs
    equal("".join(logprobs.tokens), echoed.choices[0].text)
    assert logprobs.token_logprobs[0] is None and max(logprobs.token_logprobs[1:]) <= 0
    pieces = list(
        client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    equal("".join(p.choices[0].text for p in pieces if p.choices), whole.choices[0].text)
    equal(pieces[-1].usage.completion_tokens, whole.usage.completion_tokens)


@check("embeddings: base64, which the client asks for by itself, and float")
def embeddings() -> None:
    made = client.embeddings.create(model=MODEL, input=[PROMPT, QUESTION])
    equal([one.index for one in made.data], [0, 1])
    plain = client.embeddings.create(model=MODEL, input=QUESTION, encoding_format="float")
    for one, other in zip(made.data[1].embedding, plain.data[0].embedding, strict=True):
        assert abs(one - other) < 1e-4, (one, other)
    assert abs(sum(number**2 for number in plain.data[0].embedding) - 1) < 1e-4
    equal(made.usage.prompt_tokens, made.usage.total_tokens)


@check("chat.completions: plain, logprobs, raw stream, stream helper")
def chat() -> None:
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.message.content.endswith(RESULT), choice
    equal(len(choice.logprobs.content), whole.usage.completion_tokens)
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    pieces = client.chat.completions.create(**CHAT, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    equal(text, choice.message.content)
    with client.chat.completions.stream(**CHAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    equal(final.choices[0].message.content, text)
    assert {"content.delta", "content.done", "chunk"} <= set(kinds), set(kinds)


@check("asynchronous client: completion, chat, stream, responses; 16 at once")
async def asynchronous() -> None:
    async with async_client() as one:
        whole = await one.chat.completions.create(**CHAT)
        stream = await one.chat.completions.create(**CHAT, stream=True)
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
        equal(text, whole.choices[0].message.content)
        replies = await asyncio.gather(*[one.chat.completions.create(**CHAT) for _ in range(16)])
        equal({reply.choices[0].message.content for reply in replies}, {text})
        response = await one.responses.create(**GREEDY, input=QUESTION, max_output_tokens=150)
        equal(response.output_text, text)
        completion = await one.completions.create(**GREEDY, prompt=PROMPT, max_tokens=150)
        assert completion.choices[0].text.endswith(RESULT)


@check("tools: required, named, streamed, with results; reasoning_content")
def tools() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        body = {**CHAT, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**body)
        calls = whole.choices[0].message.tool_calls
        assert calls and all(call.function.name == "add" for call in calls)
        for call in calls:
            adds(call.function.arguments)
        equal(whole.choices[0].finish_reason, "tool_calls")
        with client.chat.completions.stream(**body) as stream:
            done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        equal([e.arguments for e in done], [call.function.arguments for call in calls])
    results = [{"role": "tool", "tool_call_id": call.id, "content": "17"} for call in calls]
    asked = [*MESSAGES, whole.choices[0].message, *results]
    again = client.chat.completions.create(**{**CHAT, "messages": asked, "tools": [ADD]})
    assert again.choices[0].finish_reason in ("stop", "length")
    thought = client.chat.completions.create(**CHAT, extra_body=THINKING).choices[0].message
    assert "<<" in thought.reasoning_content, thought  # as its steps have
    assert thought.content.isdigit(), thought


@check("chat.completions.parse with a pydantic class, parsed tools, stream with response_format")
def parse() -> None:
    parsed = client.chat.completions.parse(**CHAT, response_format=Sum)
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    with client.chat.completions.stream(**CHAT, response_format=Sum) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
        equal(final.parsed, parsed.choices[0].message.parsed)
    tool = openai.pydantic_function_tool(Sum)
    one: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(**CHAT, **one)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Sum)
    plain = client.chat.completions.create(**CHAT, response_format={"type": "json_object"})
    assert plain.choices[0].message.content.startswith("{")


@check("responses: create, tools, stream, stream helper, parse")
def responses() -> None:
    body: Any = {**GREEDY, "input": QUESTION, "max_output_tokens": 150}
    whole = client.responses.create(**body)
    assert whole.status == "completed" and whole.output_text.endswith(RESULT), whole
    events = list(client.responses.create(**body, stream=True))
    equal([event.sequence_number for event in events], list(range(len(events))))
    equal(events[-1].response.output_text, whole.output_text)
    with client.responses.stream(**body) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        equal(text, whole.output_text)
        equal(stream.get_final_response().output_text, text)
    tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
    called = client.responses.create(**body, tools=[tool], tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    for call in calls:
        adds(call.arguments)
    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "17"} for c in calls
    ]
    asked = [{"role": "user", "content": QUESTION}, *called.output, *results]
    assert client.responses.create(**{**body, "input": asked}).output_text
    parsed = client.responses.parse(**body, text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)


@check("files and batches: create, retrieve, content, list, delete, cancel")
def batches() -> None:
    bodies = [{"prompt": f"{i} + 1 =", "max_tokens": 4, "temperature": 0} for i in range(9)]
    lines = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body})
        for i, body in enumerate([*bodies, {"prompt": 5.5}])
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file.id, metadata={"a": "b"}, **asked)
    while batch.status not in ("completed", "failed"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (10, 9, 1)
    assert batch.output_file_id is not None and batch.error_file_id is not None
    output = client.files.content(batch.output_file_id).text.splitlines()
    for reply in map(json.loads, output):
        plain = client.completions.create(model=MODEL, **bodies[int(reply["custom_id"])])
        assert reply["response"]["body"]["choices"][0]["text"] == plain.choices[0].text
    assert json.loads(client.files.content(batch.error_file_id).text)["custom_id"] == "9"
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert {file.id, batch.output_file_id} <= {one.id for one in client.files.list(limit=1)}
    assert client.batches.cancel(batch.id).status == "completed"
    assert client.files.delete(file.id).deleted


@check("responses that are kept: previous_response_id, retrieve, delete, NotFoundError")
def kept_responses() -> None:
    body: Any = {**GREEDY, "max_output_tokens": 60}
    first = client.responses.create(**body, input=QUESTION)
    follow: Any = {**body, "input": "And twice that?"}
    second = client.responses.create(**follow, previous_response_id=first.id)
    so_far = [{"role": "user", "content": QUESTION}, *first.output]
    asked = [*so_far, {"role": "user", "content": follow["input"]}]
    whole = client.responses.create(**{**body, "input": asked}, store=False)
    equal(second.output_text, whole.output_text)
    equal(second.usage.input_tokens, whole.usage.input_tokens)
    equal(client.responses.retrieve(second.id), second)
    with client.responses.stream(**follow, previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    equal(client.responses.retrieve(third.id).output_text, third.output_text)
    client.responses.delete(first.id)
    for missing in (first, whole):
        try:
            client.responses.retrieve(missing.id)
        except openai.NotFoundError:
            continue
        raise AssertionError(f"{missing.id} is still there")


@check("unstreamed replies against openai's types, strictly")
def strict_types() -> None:
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    several = {"n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 3}
    thinking = {**THINKING, "tools": [ADD], "tool_choice": "required", "max_tokens": 200}
    for extra in ({}, several, {"tools": [ADD], "tool_choice": "required"}, thinking):
        content = post("/v1/chat/completions", {**chat, **extra})
        ChatCompletion.model_validate_json(content, strict=True)
    completion = {"model": MODEL, "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    # Not with echo: the first token has no logprob, which OpenAI's server says and its type not.
    for extra in ({}, {"prompt": [PROMPT, PROMPT], "n": 2, "logprobs": 2, "stop": "1"}):
        Completion.model_validate_json(
            post("/v1/completions", {**completion, **extra}), strict=True
        )
    for given in (PROMPT, [PROMPT, QUESTION], [[5, 6], [7]]):
        content = post("/v1/embeddings", {"model": MODEL, "input": given})
        CreateEmbeddingResponse.model_validate_json(content, strict=True)
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    response = {"model": MODEL, "input": QUESTION, "max_output_tokens": 200, "temperature": 0}
    form = {"format": {"type": "json_schema", "name": "sum", "schema": PARAMETERS}}
    for extra in ({}, {"tools": [tool], "tool_choice": "required"}, {"text": form}, THINKING):
        Response.model_validate_json(post("/v1/responses", {**response, **extra}), strict=True)


@check("errors: BadRequestError with param, NotFoundError; a stream that is left")
def errors() -> None:
    try:
        client.chat.completions.create(**{**CHAT, "temperature": -1})
    except openai.BadRequestError as error:
        equal(error.param, "temperature")
        assert "-1" in error.message
    else:
        raise AssertionError("temperature -1 was taken")
    try:
        client.models.retrieve("no-such-model")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a model that is not there was found")
    stream = client.chat.completions.create(**{**CHAT, "max_completion_tokens": 2000}, stream=True)
    next(iter(stream))
    stream.close()
    assert openai.OpenAI(base_url=f"{BASE_URL}/v1/", api_key=KEY).models.list().data


run("openai")
