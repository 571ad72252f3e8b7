"""The body of OpenAI's /v1/responses as one of /v1/chat/completions."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from mamba_eagle.limits import MAX_MESSAGES, MAX_TOOLS
from mamba_eagle.server.chat_body import ChatJob
from mamba_eagle.server.chat_translation import ChatBody, kind_of, parts_of, text_only
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.state import ServerState

TEXT = ("input_text", "output_text", "text")
REASONING_TEXT = ("reasoning_text", "summary_text", "text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
FORMATS = ("text", "json_object", "json_schema")
TOOL_FIELDS = ("name", "description", "parameters", "strict")
STATELESS = "this server keeps no state between requests: send the whole conversation as input"
# What would need something kept, or run apart from the request, and what to do without it.
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "this server keeps no prompts: send instructions and input",
    "background": "this server keeps no responses to be fetched later: leave it out",
    "store": "this server keeps no responses: leave it out, or send false",
    "top_logprobs": "logprobs are not available here: use /v1/chat/completions",
}
LOGPROBS = "message.output_text.logprobs"


@dataclass(kw_only=True)
class ResponseJob:
    """``echo``: the fields of the request that the reply repeats."""

    chat: ChatJob
    echo: dict[str, Any]


def parse_response(fields: Fields, state: ServerState) -> ResponseJob:
    """Raises: RequestError 400"""
    state.prompts.need_tokenizer("/v1/responses")
    _refuse_state(fields)
    body = ChatBody.of(fields)
    body.values.setdefault("rid", f"resp_{uuid.uuid4().hex}")
    body.put("max_tokens", fields.raw("max_output_tokens"), "max_output_tokens")
    body.put("parallel_tool_calls", fields.raw("parallel_tool_calls"), "parallel_tool_calls")
    _Input(body).read(fields)
    tools = _add_tools(body, fields)
    _add_tool_choice(body, fields)
    effort = fields.object("reasoning").raw("effort")
    body.put("reasoning_effort", effort, "reasoning.effort")
    form = _add_format(body, fields)
    metadata = _metadata(fields)
    chat = body.parse(state)
    sampling = chat.job.prompts[0].sampling
    echo = {
        "instructions": fields.text("instructions") or None,
        "max_output_tokens": fields.raw("max_output_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "reasoning": {"effort": effort, "summary": None},
        "temperature": float(sampling.temperature),
        "text": {"format": form},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": tools,
        "top_p": float(sampling.top_p),
    }
    return ResponseJob(chat=chat, echo=echo)


def _refuse_state(fields: Fields) -> None:
    for name, remedy in REFUSED.items():
        if fields.raw(name):
            raise fields.wrong(name, remedy)
    if fields.raw("truncation") not in (None, "disabled"):
        raise fields.wrong("truncation", "must be disabled: what does not fit is refused")
    include = fields.texts("include", "names", len(REFUSED) * MAX_TOOLS)
    if LOGPROBS in include:
        raise fields.wrong("include", f"{LOGPROBS}: {REFUSED['top_logprobs']}")


def _metadata(fields: Fields) -> dict[str, str]:
    metadata = fields.object("metadata")
    return {name: metadata.text(name) for name in metadata.values}


# ── input ────────────────────────────────────────────────────────────────────────────────────


class _Input:
    """Instructions and items become messages. What the assistant wrote in a row is one message,
    and so are the instructions with the system messages right behind them: most templates take one
    system message, at the beginning."""

    def __init__(self, body: ChatBody) -> None:
        self.body = body
        body.names["messages"] = "input"
        self._system: list[str] = []
        self._system_from = "instructions"
        self._answer: dict[str, Any] = {}
        self._answer_from = ""

    def read(self, fields: Fields) -> None:
        """Raises: RequestError 400"""
        if instructions := fields.text("instructions"):
            self._system.append(instructions)
        value = fields.raw("input")
        if isinstance(value, str):
            self._say("user", fields.text("input"), "input")
            return
        if not isinstance(value, list) or not value:
            raise fields.wrong("input", "must be a string or a list of items, at least one")
        if len(value) > MAX_MESSAGES:
            raise fields.too_many("input", "items", len(value), MAX_MESSAGES)
        for item in parts_of(fields, "input"):
            self._take(item, item.where[:-1])
        self._flush()

    def _take(self, item: Fields, own: str) -> None:
        kind = "message" if item.raw("type") is None else kind_of(item, ITEMS)
        if kind == "message":
            role = item.text("role")
            if role not in ROLES:
                raise item.wrong("role", f"must be one of {', '.join(ROLES)}")
            self._say(role, text_only(item, "content", TEXT), own)
        elif kind == "function_call":
            self._part_of_answer(own).setdefault("tool_calls", []).append(_call(item))
        elif kind == "function_call_output":
            self._flush()
            call_id = _needed(item, "call_id", "the call that this answers")
            output = text_only(item, "output", TEXT)
            result = {"role": "tool", "tool_call_id": call_id, "content": output}
            self.body.add_message(result, own)
        else:
            self._think(item, own)

    def _say(self, role: str, text: str, own: str) -> None:
        if role == "assistant":
            answer = self._part_of_answer(own)
            answer["content"] += text
            return
        at_beginning = "messages" not in self.body.values and not self._answer
        if role in ("system", "developer") and at_beginning:
            if not self._system:
                self._system_from = own
            self._system.append(text)
            return
        self._flush()
        self.body.add_message({"role": role, "content": text}, own)

    def _think(self, item: Fields, own: str) -> None:
        """The text of reasoning; what only OpenAI could decrypt is left out."""
        name = "content" if item.raw("content") else "summary"
        text = text_only(item, name, REASONING_TEXT)
        if not text:
            return
        if self._answer.get("content") or "tool_calls" in self._answer:
            self._flush()  # another answer begins
        answer = self._part_of_answer(own)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _part_of_answer(self, own: str) -> dict[str, Any]:
        if not self._answer:
            self._flush()
            self._answer = {"role": "assistant", "content": ""}
            self._answer_from = own
        return self._answer

    def _flush(self) -> None:
        if self._system:
            system = {"role": "system", "content": "\n\n".join(self._system)}
            self._system = []
            self.body.add_message(system, self._system_from)
        if self._answer:
            answer, self._answer = self._answer, {}
            self.body.add_message(answer, self._answer_from)


def _call(item: Fields) -> dict[str, Any]:
    call_id = _needed(item, "call_id", "the call")
    name = _needed(item, "name", "the function", "name")
    arguments = item.text("arguments")
    try:
        is_object = not arguments.strip() or isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise item.wrong("arguments", "must be a JSON object as text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _needed(item: Fields, name: str, whose: str, what: str = "id") -> str:
    value = item.text(name)
    if not value:
        raise item.wrong(name, f"must be the {what} of {whose}")
    return value


# ── settings ─────────────────────────────────────────────────────────────────────────────────


def _add_tools(body: ChatBody, fields: Fields) -> list[dict[str, Any]]:
    """The tools, as the reply repeats them."""
    if fields.raw("tools") is None:
        return []
    if not isinstance(fields.raw("tools"), list):
        raise fields.wrong("tools", "must be a list of tools")
    if len(fields.raw("tools")) > MAX_TOOLS:
        raise fields.too_many("tools", "tools", len(fields.raw("tools")), MAX_TOOLS)
    functions = []
    for i, tool in enumerate(parts_of(fields, "tools")):
        if tool.text("type") != "function":
            raise tool.wrong(
                "type",
                "must be function: this server runs no tools of its own; leave this one out",
            )
        functions.append({name: tool.raw(name) for name in TOOL_FIELDS if name in tool.values})
        body.names[f"tools[{i}].function"] = f"tools[{i}]"
    tools = [{"type": "function", "function": function} for function in functions]
    body.put("tools", tools, "tools")
    return [{"type": "function", **function} for function in functions]


def _add_tool_choice(body: ChatBody, fields: Fields) -> None:
    choice = fields.raw("tool_choice")
    body.names["tool_choice.function"] = "tool_choice"
    if isinstance(choice, dict):
        named = fields.object("tool_choice")
        if named.text("type") != "function":
            raise named.wrong("type", "must be function; or send auto, none or required")
        choice = {
            "type": "function",
            "function": {"name": _needed(named, "name", "a tool", "name")},
        }
    elif choice not in (None, "auto", "none", "required"):
        remedy = 'must be auto, none, required or {"type": "function", "name": ...}'
        raise fields.wrong("tool_choice", remedy)
    body.put("tool_choice", choice, "tool_choice")


def _add_format(body: ChatBody, fields: Fields) -> dict[str, Any]:
    """The format, as the reply repeats it."""
    form = fields.object("text").object("format")
    kind = form.text("type", "text")
    if kind not in FORMATS:
        raise form.wrong("type", f"must be one of {', '.join(FORMATS)}")
    if kind == "text":
        return {"type": "text"}
    asked: dict[str, Any] = {"type": kind}
    made = dict(asked)
    if kind == "json_schema":
        name = _needed(form, "name", "the format", "name")
        schema = form.object("schema").values
        asked["json_schema"] = {"name": name, "schema": schema}
        made |= {"name": name, "schema": schema, "strict": form.flag("strict")}
    body.put("response_format", asked, "text.format")
    body.names["response_format.json_schema"] = "text.format"
    return made
