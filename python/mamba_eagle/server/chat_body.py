"""The body of /v1/chat/completions, checked, rendered and tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mamba_eagle.chat.family import Family
from mamba_eagle.chat.format import ChatFormat, make_parser
from mamba_eagle.chat.parse import OutputParser
from mamba_eagle.chat.render import Chat, TemplateError
from mamba_eagle.chat.schema import readable_tools
from mamba_eagle.limits import MAX_DOCUMENTS
from mamba_eagle.server.chat_grammar import chat_grammar
from mamba_eagle.server.demand import fitting_output
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.messages import read_messages
from mamba_eagle.server.openai_body import (
    LENGTHS,
    OpenAIJob,
    make_job,
    read_top_logprobs,
    refuse_fields,
)
from mamba_eagle.server.sampling import read_samples
from mamba_eagle.server.state import ServerState
from mamba_eagle.server.tools import Tools, read_tools

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
LOW_EFFORTS = ("minimal", "low")


@dataclass(frozen=True)
class OutputForm:
    """How the samples of a chat are read. ``family`` None: all is content."""

    family: Family | None = None
    prefix: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    max_calls: int | None = None

    def parser(self) -> OutputParser:
        return make_parser(self.family, self.prefix, self.tools, self.max_calls)


@dataclass(kw_only=True)
class ChatJob:
    job: OpenAIJob
    form: OutputForm = field(default_factory=OutputForm)


def parse_chat(fields: Fields, state: ServerState) -> ChatJob:
    """Raises: RequestError 400"""
    state.prompts.need_tokenizer("/v1/chat/completions")
    n = read_samples(fields)
    state.limit_samples(1, n)
    wanted = read_top_logprobs(fields, "top_logprobs") if fields.flag("logprobs") else None
    tools, chat, text = render_chat(fields, state)
    form = _form(fields, state.chat, tools, chat, text)
    # The template writes the special tokens itself.
    (ids,) = state.prompts.encode([text], ["messages"], False)

    def max_tokens(length: int) -> int:
        # As with OpenAI, a chat without a limit goes on until the model stops.
        default = fitting_output(n, wanted, state.context_length - length)
        return fields.integer(LENGTHS[0], fields.integer(LENGTHS[1], default))

    job = make_job(
        fields,
        state,
        "chatcmpl",
        [state.prompts.check(ids, "messages")],
        max_tokens,
        wanted,
        [],
        chat_grammar(fields, state, tools, form.prefix),
    )
    kept = state.chat.kept_tokens(form.family)
    for prompt in job.prompts:
        prompt.kept_tokens = kept
    return ChatJob(job=job, form=form)


def render_chat(fields: Fields, state: ServerState) -> tuple[Tools | None, Chat, str]:
    """The tools and the chat, and its prompt.

    Raises: RequestError 400
    """
    refuse_fields(fields, ("functions", "function_call"))
    if fields.raw("chat_template") is not None:
        raise fields.wrong(
            "chat_template", "requests bring no template: start the server with --chat-template"
        )
    tools = read_tools(fields)
    chat = _read_chat(fields, state.chat, tools)
    try:
        return tools, chat, state.chat.template.render(chat)
    except TemplateError as error:
        raise RequestError(str(error), param="messages") from None


def _read_chat(fields: Fields, format: ChatFormat, tools: Tools | None) -> Chat:
    messages = read_messages(fields)
    goes_on = fields.flag("continue_final_message")
    if goes_on:
        if fields.flag("add_generation_prompt"):
            raise fields.wrong(
                "continue_final_message",
                "add_generation_prompt begins a new message: send one of the two",
            )
        if messages[-1]["role"] != "assistant":
            raise fields.wrong(
                "continue_final_message", "the last message must be one of role assistant"
            )
    if tools is not None and tools.may_call:
        _check_tools(fields, format)
    return Chat(
        messages=messages,
        tools=tools.given if tools is not None and tools.may_call else None,
        documents=_documents(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", not goes_on),
        continue_final_message=goes_on,
        arguments=_arguments(fields, format),
    )


def _check_tools(fields: Fields, format: ChatFormat) -> None:
    """Raises: RequestError 400 if the model could not use tools, or its calls not be read."""
    if format.problem:
        raise RequestError(f"tools: {format.problem}", param="tools")
    if not format.takes_tools:
        raise fields.wrong(
            "tools",
            "this model's chat template says nothing of tools: start the server with one that "
            "does (--chat-template), or leave them out",
        )
    if format.family is None or not format.family.reads_calls:
        raise fields.wrong(
            "tools",
            "how this model writes calls is not known: start the server with --tool-call-parser, "
            "or leave them out",
        )


def _documents(fields: Fields) -> list[dict[str, Any]] | None:
    value = fields.raw("documents")
    if value is None:
        return None
    if not isinstance(value, list):
        raise fields.wrong("documents", "must be a list of objects with title and text")
    if len(value) > MAX_DOCUMENTS:
        raise fields.too_many("documents", "documents", len(value), MAX_DOCUMENTS)
    for i, document in enumerate(value):
        if not isinstance(document, dict):
            name = f"documents[{i}]"
            raise Fields({name: document}).wrong(name, "must be an object with title and text")
    return value


def _arguments(fields: Fields, format: ChatFormat) -> dict[str, Any]:
    """The template's keyword arguments: those of the fields that have names of their own, and
    ``chat_template_kwargs``, which win."""
    arguments: dict[str, Any] = {}
    effort = fields.text("reasoning_effort")
    if effort:
        if effort not in EFFORTS:
            raise fields.wrong("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
        arguments["reasoning_effort"] = effort
        if effort == "none":
            arguments |= _thinking(False)
        if effort in LOW_EFFORTS:
            arguments["low_effort"] = True  # Nemotron 3's name of it
    if fields.raw("enable_thinking") is not None:
        arguments |= _thinking(fields.flag("enable_thinking"))
    given = fields.object("chat_template_kwargs")
    for name in given.values:
        if name in format.template.reserved:
            raise given.wrong(name, "is a field of the body or the server's own; it is no argument")
        if not name.isidentifier():
            raise given.wrong(name, "is no name that a template could use")
    return arguments | given.values


def _thinking(enabled: bool) -> dict[str, Any]:
    """Templates call it by either name."""
    return {"enable_thinking": enabled, "thinking": enabled}


def _form(
    fields: Fields, format: ChatFormat, tools: Tools | None, chat: Chat, prompt: str
) -> OutputForm:
    calls = tools is not None and tools.may_call
    family = format.reader(calls, fields.flag("separate_reasoning", True))
    answers = chat.add_generation_prompt or chat.continue_final_message
    return OutputForm(
        family,
        format.prefix(prompt) if answers else "",
        readable_tools(chat.tools or ()) if calls else (),
        1 if tools is not None and not tools.parallel else None,
    )
