"""``pydantic-ai``: agents over OpenAI's chats and responses, and over Anthropic's messages."""

from __future__ import annotations

from typing import Any

from checks import BASE_URL, KEY, MODEL, QUESTION, RESULT, V1, check, equal, run
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False)


class Sum(BaseModel):
    """Of two numbers; without others, which a small model would go on to write."""

    model_config = ConfigDict(extra="forbid")
    left: int = Field(ge=0, le=999)
    right: int = Field(ge=0, le=999)


def openai() -> OpenAIProvider:
    return OpenAIProvider(base_url=V1, api_key=KEY)


async def _text(model: Any) -> str:
    """The same, whole and in pieces."""
    agent = Agent(model, model_settings=SETTINGS)
    whole = await agent.run(QUESTION)
    assert whole.output.endswith(RESULT), whole.output
    assert whole.usage.output_tokens > 0
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    equal("".join(pieces), whole.output)
    return whole.output


async def _objects(model: Any, kinds: tuple[Any, ...]) -> None:
    for kind in kinds:
        agent = Agent(model, model_settings=SETTINGS, output_type=kind(Sum), retries=0)
        made = (await agent.run(QUESTION)).output
        assert isinstance(made, Sum), made
        async with agent.run_stream(QUESTION) as stream:
            equal(await stream.get_output(), made)


@check("OpenAIChatModel: text, stream, ToolOutput, NativeOutput")
async def chats() -> None:
    model = OpenAIChatModel(MODEL, provider=openai())
    await _text(model)
    await _objects(model, (ToolOutput, NativeOutput))


@check("OpenAIResponsesModel: text, stream, ToolOutput, NativeOutput")
async def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=openai())
    await _text(model)
    await _objects(model, (ToolOutput, NativeOutput))


@check("AnthropicModel: text, stream, ToolOutput")
async def messages() -> None:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE_URL, api_key=KEY))
    await _text(model)
    await _objects(model, (ToolOutput,))


@check("a tool that runs and a second round, run_sync")
def rounds() -> None:
    model = OpenAIChatModel(MODEL, provider=openai())
    agent = Agent(model, model_settings=SETTINGS, output_type=ToolOutput(Sum))
    first = agent.run_sync(QUESTION)
    again = agent.run_sync("And 3 more?", message_history=first.all_messages())
    assert isinstance(again.output, Sum) and len(again.all_messages()) > len(first.all_messages())


run("pydantic-ai-slim")
