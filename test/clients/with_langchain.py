"""``langchain-openai``: ChatOpenAI with completions and with responses, tools, OpenAI."""

from __future__ import annotations

from typing import Any

from checks import ADD, KEY, MODEL, PROMPT, QUESTION, RESULT, V1, adds, check, equal, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

SETTINGS: Any = {"model": MODEL, "base_url": V1, "api_key": KEY, "temperature": 0}
MAX = 150


class Sum(BaseModel):
    """Of two numbers; without others, which a small model would go on to write."""

    model_config = ConfigDict(extra="forbid")
    left: int = Field(ge=0, le=999)
    right: int = Field(ge=0, le=999)


def chat(**settings: Any) -> ChatOpenAI:
    return ChatOpenAI(**SETTINGS, max_completion_tokens=MAX, **settings)


@check("ChatOpenAI: invoke, stream, batch, ainvoke, astream")
async def chats() -> None:
    whole = chat().invoke(QUESTION)
    assert whole.content.endswith(RESULT), whole
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = list(chat(stream_usage=True).stream(QUESTION))
    equal("".join(piece.content for piece in pieces), whole.content)
    total = sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces)
    equal(total, whole.usage_metadata["output_tokens"])
    equal([m.content for m in chat().batch([QUESTION] * 3)], [whole.content] * 3)
    equal((await chat().ainvoke(QUESTION)).content, whole.content)
    equal("".join([m.content async for m in chat().astream(QUESTION)]), whole.content)


@check("bind_tools with a choice that must be, and results")
def tools() -> None:
    model = chat().bind_tools([ADD], tool_choice="any", parallel_tool_calls=False)
    called = model.invoke(QUESTION)
    (call,) = called.tool_calls
    equal(call["name"], "add")
    adds(call["args"])
    streamed = None
    for piece in model.stream(QUESTION):
        streamed = piece if streamed is None else streamed + piece
    equal(streamed.tool_calls[0]["args"], call["args"])
    asked = [HumanMessage(QUESTION), called, ToolMessage("17", tool_call_id=call["id"])]
    assert isinstance(chat().bind_tools([ADD]).invoke(asked), AIMessage)


@check("with_structured_output: json_schema, function_calling")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        made = chat().with_structured_output(Sum, method=method).invoke(QUESTION)
        assert isinstance(made, Sum), (method, made)


@check("ChatOpenAI with use_responses_api: invoke, stream, tools")
def responses() -> None:
    model = chat(use_responses_api=True)
    whole = model.invoke(QUESTION)
    assert whole.text.endswith(RESULT), whole
    equal("".join(piece.text for piece in model.stream(QUESTION)), whole.text)
    (call, *_) = model.bind_tools([ADD], tool_choice="any").invoke(QUESTION).tool_calls
    adds(call["args"])


@check("OpenAI (completions): invoke, stream, generate")
def completions() -> None:
    model = OpenAI(**SETTINGS, max_tokens=MAX)
    text = model.invoke(PROMPT)
    assert text.endswith(RESULT), text
    equal("".join(model.stream(PROMPT)), text)
    results = model.generate([PROMPT, PROMPT]).generations
    equal([r[0].text for r in results], [text, text])


run("langchain-openai")
