"""``instructor``: pydantic objects by tools, JSON schemas and responses, whole and in parts."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from checks import KEY, MODEL, QUESTION, V1, check, run
from pydantic import BaseModel, ConfigDict, Field

BODY: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}


class Sum(BaseModel):
    """Of two numbers; without others, which a small model would go on to write."""

    model_config = ConfigDict(extra="forbid")
    left: int = Field(ge=0, le=999)
    right: int = Field(ge=0, le=999)


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), mode=mode)


@check("create: modes TOOLS, TOOLS_STRICT, JSON_SCHEMA")
def create() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        made = client(mode).create(response_model=Sum, **BODY)
        assert isinstance(made, Sum), (mode, made)


@check("create_with_completion, create_partial")
def pieces() -> None:
    one = client(instructor.Mode.JSON_SCHEMA)
    made, completion = one.create_with_completion(response_model=Sum, **BODY)
    assert completion.usage.completion_tokens > 0
    parts = list(one.create_partial(response_model=Sum, **BODY))
    assert (parts[-1].left, parts[-1].right) == (made.left, made.right), parts[-1]


@check("asynchronous client")
async def asynchronous() -> None:
    one = openai.AsyncOpenAI(base_url=V1, api_key=KEY)
    patched = instructor.from_openai(one, mode=instructor.Mode.TOOLS)
    assert isinstance(await patched.create(response_model=Sum, **BODY), Sum)


@check("mode RESPONSES_TOOLS")
def responses() -> None:
    one = client(instructor.Mode.RESPONSES_TOOLS)
    body = {key: value for key, value in BODY.items() if key not in ("messages", "max_tokens")}
    made = one.responses.create(input=QUESTION, response_model=Sum, max_output_tokens=200, **body)
    assert isinstance(made, Sum), made


run("instructor")
