"""``litellm``: as ``openai/``, ``hosted_vllm/``, ``text-completion-openai/`` and ``anthropic/``."""

from __future__ import annotations

from typing import Any

import litellm
from checks import ADD, BASE_URL, KEY, MODEL, PROMPT, QUESTION, RESULT, V1, adds, check, equal, run

MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"temperature": 0, "max_tokens": 150, "api_key": KEY}
OPENAI: Any = {**GREEDY, "model": f"openai/{MODEL}", "api_base": V1}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "schema": ADD["function"]["parameters"], "strict": True},
}


@check("completion as openai/ and hosted_vllm/: whole, stream, asynchronous")
async def chats() -> None:
    for provider in ("openai", "hosted_vllm"):
        body = {**OPENAI, "model": f"{provider}/{MODEL}", "messages": MESSAGES}
        whole = litellm.completion(**body)
        text = whole.choices[0].message.content
        assert text.endswith(RESULT), whole
        pieces = list(litellm.completion(**body, stream=True))
        equal("".join(piece.choices[0].delta.content or "" for piece in pieces), text)
        rebuilt = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
        equal(rebuilt.choices[0].message.content, text)
        again = await litellm.acompletion(**body)
        equal(again.choices[0].message.content, text)
        stream = await litellm.acompletion(**body, stream=True)
        equal("".join([p.choices[0].delta.content or "" async for p in stream]), text)


@check("text_completion")
def texts() -> None:
    body = {**OPENAI, "model": f"text-completion-openai/{MODEL}", "prompt": PROMPT}
    whole = litellm.text_completion(**body)
    assert whole.choices[0].text.endswith(RESULT), whole
    pieces = litellm.text_completion(**body, stream=True)
    equal("".join(p.choices[0].text or "" for p in pieces), whole.choices[0].text)


@check("tools, response_format, reasoning_content")
def tools() -> None:
    body = {**OPENAI, "messages": MESSAGES}
    must = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**body, **must)
    (call,) = whole.choices[0].message.tool_calls
    equal((call.function.name, whole.choices[0].finish_reason), ("add", "tool_calls"))
    adds(call.function.arguments)
    pieces = list(litellm.completion(**body, **must, stream=True))
    rebuilt = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
    equal(rebuilt.choices[0].message.tool_calls[0].function.arguments, call.function.arguments)
    adds(litellm.completion(**body, response_format=FORM).choices[0].message.content)
    thought = litellm.completion(**body, extra_body={"enable_thinking": True}).choices[0].message
    assert "<<" in thought.reasoning_content and thought.content.isdigit(), thought


@check("responses")
def responses() -> None:
    asked = {"temperature": 0, "max_output_tokens": 150, "api_key": KEY, "api_base": V1}
    whole = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, **asked)
    assert whole.output[-1].content[0].text.endswith(RESULT), whole
    events = list(litellm.responses(model=f"openai/{MODEL}", input=QUESTION, stream=True, **asked))
    equal(str(events[-1].type.value), "response.completed")


@check("completion as anthropic/: whole, stream, tools")
def messages() -> None:
    body = {**GREEDY, "model": f"anthropic/{MODEL}", "api_base": BASE_URL, "messages": MESSAGES}
    whole = litellm.completion(**body)
    assert whole.choices[0].message.content.endswith(RESULT), whole
    pieces = litellm.completion(**body, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    equal(text, whole.choices[0].message.content)
    called = litellm.completion(**body, tools=[ADD], tool_choice="required")
    adds(called.choices[0].message.tool_calls[0].function.arguments)


@check("errors: BadRequestError")
def errors() -> None:
    try:
        litellm.completion(**{**OPENAI, "messages": MESSAGES, "temperature": -1})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("temperature -1 was taken")


run("litellm")
