"""The body of /v1/chat/completions, checked, rendered and tokenized."""

from functools import partial
from typing import Annotated, Any

from mamba_eagle.chat.format import ChatFormat
from mamba_eagle.chat.parse import FamilyParser
from mamba_eagle.chat.render import Chat, TemplateError
from mamba_eagle.chat.schema import readable_tools
from mamba_eagle.limits import MAX_DOCUMENTS
from mamba_eagle.server.apis.generate.body import TOP
from mamba_eagle.server.apis.openai.body import LONGEST, MaxTokens, OpenAIBody, OpenAIJob, make_job
from mamba_eagle.server.apis.openai.chat_grammar import ConstrainedChat, chat_grammar
from mamba_eagle.server.apis.openai.messages import MESSAGES, read_messages
from mamba_eagle.server.apis.openai.tools import TOOL_CHOICE, TOOLS, Tools, read_tools
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, Flag, Object, needs, read, refuse_half_pairs, says
from mamba_eagle.server.bodies.served import fitting_output
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
LOW_EFFORTS = ("minimal", "low")
EFFORT = kinds.choice_of(*EFFORTS, absent="")
DOCUMENTS = kinds.Kind(
    lambda value: _documents(value),
    "must be a list of objects with title and text",
    {**kinds.list_of({"type": "object"}), "maxItems": MAX_DOCUMENTS},
)


def _documents(value: Any) -> list[Any] | None:
    kinds.limit(value, "documents", MAX_DOCUMENTS)
    if not isinstance(value, list):
        return None
    for i, document in enumerate(value):
        if not isinstance(document, dict):
            remedy = "must be an object with title and text"
            raise RequestError.about(f"documents[{i}]", document, remedy)
    return value


class Template(Body):
    """What goes to the chat template as it is."""

    documents: Annotated[list[Any] | None, DOCUMENTS] = says("for the template")
    chat_template_kwargs: Object = says("other arguments of the template", {})
    enable_thinking: Flag | None = says("whether to reason; without it the template decides")


class Rendered(Template):
    """What makes the prompt of a chat."""

    messages: Annotated[Any, MESSAGES] = says("the chat")
    tools: Annotated[list[Any] | None, TOOLS] = says("that the model may call")
    tool_choice: Annotated[Any, TOOL_CHOICE] = says("whether a call must come")
    parallel_tool_calls: Flag = says("whether several calls may come", True)
    add_generation_prompt: Flag | None = says("whether the model's message begins; true")
    continue_final_message: Flag = says("the last message, of the assistant, goes on", False)
    reasoning_effort: Annotated[str, EFFORT] = says("for the template", "")

    REFUSED = known.RENDERED


class ChatBody(Rendered, OpenAIBody, ConstrainedChat):
    """A chat, and how to answer it."""

    messages: Annotated[list[Any], MESSAGES] = needs("the chat")
    max_tokens: MaxTokens | None = says(LONGEST)
    max_completion_tokens: MaxTokens | None = says("as max_tokens")
    logprobs: Flag = says("logprobs of the output", False)
    top_logprobs: Annotated[Any, kinds.untouched(TOP.schema)] = says("best tokens beside each")
    separate_reasoning: Flag = says("reasoning apart from content", True)

    REFUSED = known.CHAT
    HARMLESS = known.CHAT_HARMLESS

    @property
    def length_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def parse_chat(values: dict[str, Any], state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    state.prompts.need_tokenizer("/v1/chat/completions")
    body = read(ChatBody, values)
    n = body.n
    state.limit_samples(1, n)
    wanted = None
    if body.logprobs:
        wanted = TOP.take(0 if body.top_logprobs is None else body.top_logprobs, "top_logprobs")
    tools, chat, text = render_chat(body, state)
    family = state.chat.reader(tools is not None, body.separate_reasoning)
    answers = chat.add_generation_prompt or chat.continue_final_message
    prefix = state.chat.prefix(text) if answers else ""
    # The template writes the special tokens itself.
    prompts = state.prompts.keeping(body.truncate_prompt_tokens)
    (ids,) = prompts.encode([text], ["messages"], False)
    ids = prompts.check(ids, "messages")
    max_tokens = getattr(body, body.length_name)
    if max_tokens is None:  # as with OpenAI, a chat without a limit goes on until the model stops
        tops = [top for top in (wanted, body.prompt_logprobs) if top is not None]
        room = state.context_length - len(ids)
        max_tokens = fitting_output(n, max(tops, default=None), body.return_spec_trace, room)
    grammar = chat_grammar(body, state, tools, prefix)
    job = make_job(body, state, "chatcmpl", [ids], max_tokens, wanted, grammar)
    job.kept_tokens = state.chat.kept_tokens(family)
    if family is not None:
        known = readable_tools(chat.tools or ())
        most = 1 if tools is not None and not tools.parallel else None
        job.make_parser = partial(FamilyParser, family, prefix, known, most, is_live=body.stream)
    return job


def render_chat(body: Rendered, state: ServerState) -> tuple[Tools | None, Chat, str]:
    """The tools and the chat, and its prompt.

    Raises: RequestError 400
    """
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    chat = _read_chat(body, state.chat, tools)
    try:
        text = state.chat.template.render(chat)
    except TemplateError as error:
        raise RequestError(str(error), param="messages") from None
    if kinds.as_text(text) is None:
        given = {"messages": chat.messages, "tools": chat.tools, "documents": chat.documents}
        refuse_half_pairs({**given, "chat_template_kwargs": chat.arguments})
        raise RequestError("the chat template writes text that is not valid Unicode")
    return tools, chat, text


def _read_chat(body: Rendered, format: ChatFormat, tools: Tools | None) -> Chat:
    messages = read_messages(body.messages)
    goes_on = body.continue_final_message
    if goes_on:
        problem = ""
        if body.add_generation_prompt:
            problem = "add_generation_prompt begins a new message: send one of the two"
        elif messages[-1]["role"] != "assistant":
            problem = "the last message must be one of role assistant"
        if problem:
            raise RequestError.about("continue_final_message", True, problem)
    if tools is not None:
        _check_tools(tools.given, format)
    begins = body.add_generation_prompt
    return Chat(
        messages=messages,
        tools=tools.given if tools is not None else None,
        documents=body.documents,
        add_generation_prompt=not goes_on if begins is None else begins,
        continue_final_message=goes_on,
        arguments=_arguments(body, format),
    )


def _check_tools(given: list[Any], format: ChatFormat) -> None:
    """Raises: RequestError 400 if the model could not use tools, or its calls not be read."""
    if "tools" not in format.template.source(with_tools=True):
        remedy = (
            "this model's chat template says nothing of tools: start the server with one that "
            "does (--chat-template), or leave them out"
        )
        raise RequestError.about("tools", given, remedy)
    if format.family is None or not format.family.reads_calls:
        remedy = (
            "how this model writes calls is not known: start the server with --tool-call-parser, "
            "or leave them out"
        )
        raise RequestError.about("tools", given, remedy)


def _arguments(body: Rendered, format: ChatFormat) -> dict[str, Any]:
    """The template's keyword arguments: those of the fields that have names of their own, and
    ``chat_template_kwargs``, which win."""
    arguments: dict[str, Any] = {}
    effort = body.reasoning_effort
    if effort:
        arguments["reasoning_effort"] = effort
        if effort == "none":
            arguments |= _thinking(False)
        if effort in LOW_EFFORTS:
            arguments["low_effort"] = True  # Nemotron 3's name of it
    if body.enable_thinking is not None:
        arguments |= _thinking(body.enable_thinking)
    for name, value in body.chat_template_kwargs.items():
        path = f"chat_template_kwargs.{name}"
        if name in format.template.reserved:
            remedy = "is a field of the body or the server's own; it is not an argument"
            raise RequestError.about(path, value, remedy)
        if not name.isidentifier():
            raise RequestError.about(path, value, "is not a valid template argument name")
    return arguments | body.chat_template_kwargs


def _thinking(enabled: bool) -> dict[str, Any]:
    """Templates call it by either name."""
    return {"enable_thinking": enabled, "thinking": enabled}
