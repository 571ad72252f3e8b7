"""The body of Anthropic's /v1/messages as one of /v1/chat/completions."""

import uuid
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mamba_eagle.limits import MAX_MESSAGES, MAX_TOOLS
from mamba_eagle.server.apis.openai.body import LONGEST, MaxTokens, OpenAIJob
from mamba_eagle.server.apis.openai.chat_body import EFFORT, Rendered, render_chat
from mamba_eagle.server.apis.openai.messages import MESSAGES
from mamba_eagle.server.apis.openai.tools import TOOLS
from mamba_eagle.server.apis.openai.translation import (
    TEXT_OR_PARTS,
    Block,
    ChatBuilder,
    OtherChat,
    check_kind,
    needed,
    text_of,
    text_only,
)
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, Content, Flag, Object, Text, needs, read, says
from mamba_eagle.server.bodies.sampling import STOP
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState

TEXT = ("text",)
USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
OWN_TOOLS = "must be custom: this server runs no tools of its own; leave this one out"


class AnthropicBlock(Block):
    """A part of a message."""

    thinking: Text = says("of type thinking", "")
    id: Text | None = says("of type tool_use")
    name: Text | None = says("of type tool_use")
    input: Object = says("of type tool_use: the arguments", {})
    tool_use_id: Text | None = says("of type tool_result")
    content: Annotated[Any, TEXT_OR_PARTS] = says("of type tool_result: a text, or blocks of text")


class AnthropicMessage(Content):
    role: Text | None = says("user or assistant")
    content: Annotated[Any, TEXT_OR_PARTS] = says(
        "text, or blocks: text, tool_use, tool_result, thinking"
    )


class ClientTool(Content):
    type: Text = says("custom", "custom")
    name: Text
    description: Text | None = None
    input_schema: Object
    strict: bool | None = None


class ToolChoice(Content):
    type: Annotated[str, kinds.choice_of(*CHOICES, "tool")]
    name: Text | None = says("of type tool")
    disable_parallel_tool_use: Flag = says("one call at most", False)


class Thinking(Body):
    type: Annotated[str, kinds.choice_of("enabled", "disabled", "adaptive")]
    budget_tokens: kinds.Integer | None = says("tokens of reasoning, 1 or more")

    HARMLESS = frozenset(("display",))


class OutputFormat(Body):
    type: Annotated[str, kinds.choice_of("json_schema")]
    schema_: Annotated[Object, Field(alias="schema")] = says("a JSON schema", {})


class OutputConfig(Body):
    effort: Annotated[str | None, EFFORT] = says("for the template")
    format: OutputFormat | None = says("the form of the output")


class MessagesBody(OtherChat):
    """A chat, and how to answer it."""

    messages: Annotated[
        list[Any], kinds.items(AnthropicMessage, "messages", MAX_MESSAGES, MESSAGES.must, 1)
    ] = needs("the chat")
    system: Annotated[Any, TEXT_OR_PARTS] = says("instructions: a text, or blocks of type text")
    max_tokens: MaxTokens | None = says(LONGEST)
    stop_sequences: Annotated[list[str], STOP] = says("strings that end the output", [])
    tools: Annotated[list[Any] | None, kinds.items(ClientTool, "tools", MAX_TOOLS, TOOLS.must)] = (
        says("that the model may call")
    )
    tool_choice: ToolChoice | None = says("whether a call must come")
    thinking: Thinking | None = says("whether to reason; without it the template decides")
    output_config: OutputConfig = says("the form of the output", OutputConfig())

    REFUSED = known.MESSAGES
    HARMLESS = known.MESSAGES_HARMLESS


def parse_message(values: dict[str, Any], state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    state.prompts.need_tokenizer("/v1/messages")
    chat = _translated(values, state)
    chat.values.setdefault("rid", f"msg_{uuid.uuid4().hex}")
    return chat.parse(state)


def count_tokens(values: dict[str, Any], state: ServerState) -> int:
    """How many tokens the prompt has that ``parse_message`` would make.

    Raises: RequestError 400
    """
    state.prompts.need_tokenizer("/v1/messages/count_tokens")
    chat = _translated(values, state)
    try:
        shown = {name: one for name, one in chat.values.items() if name in Rendered.FIELDS}
        _, _, text = render_chat(read(Rendered, shown), state)
        (ids,) = state.prompts.encode([text], ["messages"], False)
    except RequestError as error:
        raise chat.renamed(error) from None
    return len(ids)


def _translated(values: dict[str, Any], state: ServerState) -> ChatBuilder:
    body = read(MessagesBody, values)
    chat = ChatBuilder.of(values)
    chat.put("max_tokens", body.max_tokens, "max_tokens")
    chat.put("stop", body.stop_sequences or None, "stop_sequences")
    _add_messages(chat, body)
    if body.tools is not None:
        _add_tools(chat, body.tools)
    if body.tool_choice is not None:
        _add_tool_choice(chat, body.tool_choice)
    if body.thinking is not None:
        _add_thinking(chat, body.thinking, state)
    chat.put("reasoning_effort", body.output_config.effort, "output_config.effort")
    if (form := body.output_config.format) is not None:
        asked = {"type": form.type, "json_schema": {"name": "output", "schema": form.schema_}}
        chat.put("response_format", asked, "output_config.format")
        chat.names["response_format.json_schema"] = "output_config.format"
    return chat


# ── messages ─────────────────────────────────────────────────────────────────────────────────


def _add_messages(chat: ChatBuilder, body: MessagesBody) -> None:
    system = text_only(body.system, "system", TEXT, "\n")
    if system:
        chat.add_message({"role": "system", "content": system}, "system")
    for i, entry in enumerate(body.messages):
        own = f"messages[{i}]"
        message = read(AnthropicMessage, entry, own)
        if message.role == "user":
            _add_user(chat, message.content, own)
        elif message.role == "assistant":
            chat.add_message(_assistant(message.content, own), own)
        else:
            remedy = "must be user or assistant; instructions go into system"
            raise RequestError.about(f"{own}.role", message.role, remedy)
    last = chat.values["messages"][-1]
    if last["role"] == "assistant":
        if "tool_calls" in last:
            remedy = "this call has no result: send a tool_result of this id in a user message"
            raise RequestError.about(own, last["tool_calls"][-1]["id"], remedy)
        chat.values["continue_final_message"] = True  # what Anthropic calls a prefill
        chat.names["continue_final_message"] = own


def _add_user(chat: ChatBuilder, content: Any, own: str) -> None:
    """Each result becomes a message of its own, as templates want them; text keeps its place."""
    texts: list[str] = []

    def flush() -> None:
        if texts:
            chat.add_message({"role": "user", "content": "\n".join(texts)}, own)
            texts.clear()

    if not isinstance(content, list):
        text = text_only(content, f"{own}.content", TEXT)
        chat.add_message({"role": "user", "content": text}, own)
        return
    if not content:
        remedy = "must be a string or a list of blocks, at least one"
        raise RequestError.about(f"{own}.content", content, remedy)
    for block, path in _blocks(content, own, USER_BLOCKS):
        if block.type == "text":
            texts.append(text_of(block, path, TEXT))
            continue
        flush()
        remedy = "must be the id of the tool_use that this answers"
        call_id = needed(block.tool_use_id, f"{path}.tool_use_id", remedy)
        text = text_only(block.content, f"{path}.content", TEXT, "\n")
        chat.add_message({"role": "tool", "tool_call_id": call_id, "content": text}, path)
    flush()


def _blocks(
    content: list[Any], own: str, types: tuple[str, ...]
) -> Iterator[tuple[AnthropicBlock, str]]:
    """The blocks, each with its path."""
    for i, entry in enumerate(content):
        path = f"{own}.content[{i}]"
        block = read(AnthropicBlock, entry, path)
        check_kind(block.type, path, types)
        yield block, path


def _assistant(content: Any, own: str) -> dict[str, Any]:
    if not isinstance(content, list):
        return {"role": "assistant", "content": text_only(content, f"{own}.content", TEXT)}
    texts, thoughts, calls = [], [], []
    for block, path in _blocks(content, own, ASSISTANT_BLOCKS):
        if block.type == "text":
            texts.append(text_of(block, path, TEXT))
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            call_id = needed(block.id, f"{path}.id", "must be the id of the call")
            name = needed(block.name, f"{path}.name", "must be the name of a tool")
            function = {"name": name, "arguments": block.input}
            calls.append({"id": call_id, "type": "function", "function": function})
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


# ── settings ─────────────────────────────────────────────────────────────────────────────────


def _add_tools(chat: ChatBuilder, given: list[Any]) -> None:
    tools = []
    for i, entry in enumerate(given):
        if isinstance(entry, dict) and entry.get("type") not in (None, "custom"):
            raise RequestError.about(f"tools[{i}].type", entry["type"], OWN_TOOLS)
        tool = read(ClientTool, entry, f"tools[{i}]")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
        chat.names[f"tools[{i}].function"] = f"tools[{i}]"
        chat.names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
    chat.put("tools", tools, "tools")


def _add_tool_choice(chat: ChatBuilder, choice: ToolChoice) -> None:
    made: Any = CHOICES.get(choice.type)
    if choice.type == "tool":
        name = needed(choice.name, "tool_choice.name", "must be the name of a tool")
        made = {"type": "function", "function": {"name": name}}
    chat.put("tool_choice", made, "tool_choice")
    chat.names["tool_choice.function.name"] = "tool_choice.name"
    if choice.disable_parallel_tool_use:
        chat.values["parallel_tool_calls"] = False


def _add_thinking(chat: ChatBuilder, thinking: Thinking, state: ServerState) -> None:
    """Without the field the chat template decides. A budget counts where the server can keep it:
    clients send one to any model."""
    chat.put("enable_thinking", thinking.type != "disabled", "thinking.type")
    budget = thinking.budget_tokens
    if budget is None or thinking.type != "enabled":
        return
    if budget < 1:
        raise RequestError.about("thinking.budget_tokens", budget, "must be at least 1")
    if state.chat.budget(budget, state.manager.engine.eos_token_ids) is not None:
        chat.put("thinking_budget", budget, "thinking.budget_tokens")
