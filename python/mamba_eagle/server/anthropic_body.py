"""The body of Anthropic's /v1/messages as one of /v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import Any

from mamba_eagle.limits import MAX_MESSAGES, MAX_MODEL_LENGTH, MAX_TOOLS
from mamba_eagle.server.chat_body import ChatJob, render_chat
from mamba_eagle.server.chat_translation import ChatBody, kind_of, parts_of, text_of, text_only
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.nested import Body, Text, read
from mamba_eagle.server.openai_body import refuse_fields
from mamba_eagle.server.state import ServerState

TEXT = ("text",)
USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "disabled", "adaptive")


class ClientTool(Body):
    type: Text | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def parse_message(fields: Fields, state: ServerState) -> ChatJob:
    """Raises: RequestError 400"""
    state.prompts.need_tokenizer("/v1/messages")
    body = _translated(fields, state)
    body.put("max_tokens", fields.raw("max_tokens"), "max_tokens")
    body.values.setdefault("rid", f"msg_{uuid.uuid4().hex}")
    return body.parse(state)


def count_tokens(fields: Fields, state: ServerState) -> int:
    """Of the prompt that ``parse_message`` would make.

    Raises: RequestError 400
    """
    state.prompts.need_tokenizer("/v1/messages/count_tokens")
    fields.short_text("model", MAX_MODEL_LENGTH)
    body = _translated(fields, state)
    try:
        _, _, text = render_chat(Fields(body.values), state)
        (ids,) = state.prompts.encode([text], ["messages"], False)
    except RequestError as error:
        raise body.renamed(error) from None
    return len(ids)


def _translated(fields: Fields, state: ServerState) -> ChatBody:
    refuse_fields(fields, ("mcp_servers", "container"))
    body = ChatBody.of(fields)
    body.put("stop", fields.raw("stop_sequences"), "stop_sequences")
    _add_messages(body, fields)
    _add_tools(body, fields)
    _add_tool_choice(body, fields)
    _add_thinking(body, fields, state)
    _add_output_config(body, fields)
    return body


# ── messages ─────────────────────────────────────────────────────────────────────────────────


def _add_messages(body: ChatBody, fields: Fields) -> None:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.wrong("messages", "must be a list of messages, at least one")
    if len(value) > MAX_MESSAGES:
        raise fields.too_many("messages", "messages", len(value), MAX_MESSAGES)
    system = text_only(fields, "system", TEXT, "\n")
    if system:
        body.add_message({"role": "system", "content": system}, "system")
    for message in parts_of(fields, "messages"):
        own = message.where[:-1]
        role = message.text("role")
        if role == "user":
            _add_user(body, message, own)
        elif role == "assistant":
            body.add_message(_assistant(message), own)
        else:
            raise message.wrong("role", "must be user or assistant; instructions go into system")
    last = body.values["messages"][-1]
    if last["role"] == "assistant":
        if "tool_calls" in last:
            raise Fields({own: last["tool_calls"][-1]["id"]}).wrong(
                own, "this call has no result: send a tool_result of this id in a user message"
            )
        body.values["continue_final_message"] = True  # what Anthropic calls a prefill
        body.names["continue_final_message"] = own


def _add_user(body: ChatBody, message: Fields, own: str) -> None:
    """Each result becomes a message of its own, as templates want them; text keeps its place."""
    texts: list[str] = []

    def flush() -> None:
        if texts:
            body.add_message({"role": "user", "content": "\n".join(texts)}, own)
            texts.clear()

    if not isinstance(message.raw("content"), list):
        body.add_message({"role": "user", "content": message.text("content")}, own)
        return
    if not message.raw("content"):
        raise message.wrong("content", "must be a string or a list of blocks, at least one")
    for block in parts_of(message, "content"):
        if kind_of(block, USER_BLOCKS) == "text":
            texts.append(text_of(block, TEXT))
            continue
        flush()
        call_id = block.text("tool_use_id")
        if not call_id:
            raise block.wrong("tool_use_id", "must be the id of the tool_use that this answers")
        content = text_only(block, "content", TEXT, "\n")
        result = {"role": "tool", "tool_call_id": call_id, "content": content}
        body.add_message(result, block.where[:-1])
    flush()


def _assistant(message: Fields) -> dict[str, Any]:
    if not isinstance(message.raw("content"), list):
        return {"role": "assistant", "content": message.text("content")}
    texts, thoughts, calls = [], [], []
    for block in parts_of(message, "content"):
        kind = kind_of(block, ASSISTANT_BLOCKS)
        if kind == "text":
            texts.append(text_of(block, TEXT))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            calls.append(_call(block))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(block: Fields) -> dict[str, Any]:
    call_id, name = block.text("id"), block.text("name")
    if not call_id:
        raise block.wrong("id", "must be the id of the call")
    if not name:
        raise block.wrong("name", "must be the name of a tool")
    arguments = block.object("input").values
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ── settings ─────────────────────────────────────────────────────────────────────────────────


def _add_tools(body: ChatBody, fields: Fields) -> None:
    value = fields.raw("tools")
    if value is None:
        return
    if not isinstance(value, list):
        raise fields.wrong("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise fields.too_many("tools", "tools", len(value), MAX_TOOLS)
    tools = []
    for i, entry in enumerate(parts_of(fields, "tools")):
        if entry.text("type", "custom") != "custom":
            raise entry.wrong(
                "type",
                "must be custom: this server runs no tools of its own; leave this one out",
            )
        tool = read(ClientTool, value[i], f"tools[{i}]")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
        body.names[f"tools[{i}].function"] = f"tools[{i}]"
        body.names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
    body.put("tools", tools, "tools")


def _add_tool_choice(body: ChatBody, fields: Fields) -> None:
    if fields.raw("tool_choice") is None:
        return
    choice = fields.object("tool_choice")
    kind = choice.text("type")
    if kind == "tool":
        name = choice.text("name")
        if not name:
            raise choice.wrong("name", "must be the name of a tool")
        named = {"type": "function", "function": {"name": name}}
        body.put("tool_choice", named, "tool_choice")
    elif kind in CHOICES:
        body.put("tool_choice", CHOICES[kind], "tool_choice")
    else:
        raise choice.wrong("type", "must be auto, any, tool or none")
    body.names["tool_choice.function.name"] = "tool_choice.name"
    if choice.flag("disable_parallel_tool_use"):
        body.values["parallel_tool_calls"] = False


def _add_thinking(body: ChatBody, fields: Fields, state: ServerState) -> None:
    """Without the field the chat template decides. A budget counts where the server can keep it:
    clients send one to any model."""
    if fields.raw("thinking") is None:
        return
    thinking = fields.object("thinking")
    kind = thinking.text("type")
    if kind not in THINKING:
        raise thinking.wrong("type", f"must be one of {', '.join(THINKING)}")
    body.put("enable_thinking", kind != "disabled", "thinking.type")
    budget = thinking.integer("budget_tokens", 0)
    if thinking.raw("budget_tokens") is None or kind != "enabled":
        return
    if budget < 1:
        raise thinking.wrong("budget_tokens", "must be at least 1")
    if _keeps_budgets(state):
        body.put("thinking_budget", budget, "thinking.budget_tokens")


def _keeps_budgets(state: ServerState) -> bool:
    format = state.chat
    if format.problem or format.family is None or format.family.reasoning is None:
        return False
    return format.budget(1, state.manager.engine.eos_token_ids) is not None


def _add_output_config(body: ChatBody, fields: Fields) -> None:
    config = fields.object("output_config")
    body.put("reasoning_effort", config.raw("effort"), "output_config.effort")
    if config.raw("format") is None:
        return
    form = config.object("format")
    if form.text("type") != "json_schema":
        raise form.wrong("type", "must be json_schema")
    schema = form.object("schema").values
    asked = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    body.put("response_format", asked, "output_config.format")
    body.names["response_format.json_schema"] = "output_config.format"
