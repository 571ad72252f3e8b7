"""The body of OpenAI's /v1/responses as one of /v1/chat/completions."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import Field

from mamba_eagle.limits import MAX_MESSAGES, MAX_TOOLS
from mamba_eagle.server.apis.openai import translation
from mamba_eagle.server.apis.openai.body import LONGEST, MaxTokens, OpenAIJob
from mamba_eagle.server.apis.openai.chat_body import EFFORT
from mamba_eagle.server.apis.openai.messages import json_object
from mamba_eagle.server.apis.openai.tools import CHOICES, TOOLS
from mamba_eagle.server.apis.responses.kept import Shelf
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, Content, Flag, Text, needs, read, says
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState

TEXTS = ("input_text", "output_text", "text")
REASONING_TEXT = ("reasoning_text", "summary_text", "text")
# What is read of each kind of item, and kept.
ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
ITEM_TEXTS = ("content", "summary", "output")
ROLES = ("user", "assistant", "system", "developer")
TOOL_FIELDS = ("name", "description", "parameters", "strict")
PREVIOUS = "previous_response_id"
LOGPROBS = "message.output_text.logprobs"
TRUNCATION = kinds.Kind(
    lambda value: value if value == "disabled" else None,
    "must be disabled: what does not fit is refused",
    {"enum": ["disabled"]},
)
TOOL_CHOICE = kinds.untouched(
    kinds.any_of(
        {"enum": list(CHOICES)},
        {"type": "object", "properties": {"type": kinds.STRING, "name": kinds.STRING}},
    )
)


class Item(Content):
    """A message, a call, its output, or reasoning."""

    type: Text = says("message unless it is said", "message")
    role: Text | None = says("of a message")
    content: Annotated[Any, translation.TEXT_OR_PARTS] = says("of a message or of reasoning")
    summary: Annotated[Any, translation.TEXT_OR_PARTS] = says("of reasoning")
    call_id: Text | None = says("of a call or its output")
    name: Text | None = says("of a call")
    arguments: Text = says("of a call: a JSON object as text", "")
    output: Annotated[Any, translation.TEXT_OR_PARTS] = says("of a call's output")


class ResponseTool(Content):
    type: Text | None = says("function")
    name: Annotated[Any, kinds.untouched(kinds.STRING)] = says("of the function")
    description: Annotated[Any, kinds.untouched(kinds.STRING)] = says("of the function")
    parameters: Annotated[Any, kinds.untouched({"type": "object"})] = says("a JSON schema")
    strict: Annotated[Any, kinds.untouched({"type": "boolean"})] = says("whether calls must fit it")


class Reasoning(Body):
    HARMLESS = frozenset("context generate_summary mode summary".split())

    effort: Annotated[str | None, EFFORT] = says("for the template")


FORMAT = kinds.choice_of("text", "json_object", "json_schema")


class Format(Body):
    type: Annotated[str, FORMAT] = says("of the output", "text")
    name: Text | None = says("of json_schema")
    schema_: Annotated[kinds.Object, Field(alias="schema")] = says("of json_schema", {})
    strict: Flag = says("repeated", False)

    HARMLESS = frozenset(("description",))


class TextForm(Body):
    format: Format = says("the form of the output", Format())

    HARMLESS = frozenset(("verbosity",))


SOME = "must be a string or a list of items, at least one"
ITEM_LIST = kinds.items(Item, "items", MAX_MESSAGES, SOME, 1)
INPUT = kinds.Kind(
    lambda value: kinds.TEXT.read(value) if isinstance(value, str) else ITEM_LIST.read(value),
    SOME,
    translation.TEXT_OR_PARTS.schema,
)
NAMES = kinds.texts("names", 8 * MAX_TOOLS)


class ResponseBody(translation.OtherChat):
    """A conversation, and how to answer it."""

    input: Annotated[Any, INPUT] = needs(
        "a text, or items: messages, calls, their outputs, reasoning"
    )
    instructions: Text = says("come first, as a system message; of this response alone", "")
    previous_response_id: Text | None = says("of a kept response, whose conversation goes on")
    store: Flag = says("whether the response is kept, for follow-ups and to be fetched", True)
    max_output_tokens: MaxTokens | None = says(LONGEST)
    metadata: kinds.Metadata = says("repeated", {})
    reasoning: Reasoning = says("how much to reason", Reasoning())
    text: TextForm = says("the form of the text", TextForm())
    tools: Annotated[
        list[Any] | None, kinds.items(ResponseTool, "tools", MAX_TOOLS, TOOLS.must)
    ] = says("that the model may call")
    tool_choice: Annotated[Any, TOOL_CHOICE] = says("whether a call must come")
    parallel_tool_calls: Flag = says("whether several calls may come", True)
    truncation: Annotated[str, TRUNCATION] = says("what does not fit is refused", "disabled")
    include: Annotated[list[str], NAMES] = says("ignored, but for logprobs, which are refused", [])

    REFUSED = known.RESPONSES
    HARMLESS = known.RESPONSES_HARMLESS


@dataclass(kw_only=True)
class ResponseJob:
    """``echo``: the fields of the request that the reply repeats. ``conversation``: the items
    before the reply, as JSON; None: nothing is kept."""

    chat: OpenAIJob
    echo: dict[str, Any]
    conversation: bytes | None


def parse_response(values: dict[str, Any], state: ServerState, shelf: Shelf) -> ResponseJob:
    """Raises: RequestError 400, and 404 if the response that it continues is not on the shelf"""
    state.prompts.need_tokenizer("/v1/responses")
    body = read(ResponseBody, values)
    if LOGPROBS in body.include:
        remedy = f"{LOGPROBS}: {known.RESPONSES['top_logprobs']}"
        raise RequestError.about("include", body.include, remedy)
    chat = translation.ChatBuilder.of(values)
    chat.values.setdefault("rid", f"resp_{uuid.uuid4().hex}")
    chat.put("max_tokens", body.max_output_tokens, "max_output_tokens")
    chat.put("parallel_tool_calls", body.parallel_tool_calls, "parallel_tool_calls")
    items = _Input(chat).read(body, _kept(body, shelf, state.bodies.max_size))
    tools = _add_tools(chat, body.tools or [])
    _add_tool_choice(chat, body.tool_choice)
    chat.put("reasoning_effort", body.reasoning.effort, "reasoning.effort")
    form = _add_format(chat, body.text.format)
    # What the reply repeats must be text.
    kinds.refuse_half_pairs({"text.format": form, "tools": tools})
    job = chat.parse(state)
    sampling = job.prompts[0].sampling
    echo = {
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id or None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": float(sampling.temperature),
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_p": float(sampling.top_p),
    }
    conversation = msgspec.json.encode(items) if body.store else None
    return ResponseJob(chat=job, echo=echo, conversation=conversation)


# ── input ────────────────────────────────────────────────────────────────────────────────────


class _Input:
    """Instructions and items become messages. What the assistant wrote in a row is one message,
    and so are the instructions with the system messages that follow at once: most templates take
    one system message, at the beginning."""

    def __init__(self, chat: translation.ChatBuilder) -> None:
        self.chat = chat
        chat.names["messages"] = "input"
        self._system: list[str] = []
        self._system_from = "instructions"
        self._answer: dict[str, Any] = {}
        self._answer_from = ""

    def read(self, body: ResponseBody, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All items, as they are kept. before: those of the conversation that goes on.

        Raises: RequestError 400
        """
        if body.instructions:
            self._system.append(body.instructions)
        kept = []
        for own, entry in _entries(body, before):
            item = _with_texts(read(Item, entry, own), own)
            self._take(item, own)
            read_of_it = {name: getattr(item, name) for name in ITEMS[item.type]}
            kept.append({"type": item.type, **read_of_it})
        self._flush()
        return kept

    def _take(self, item: Item, own: str) -> None:
        if item.type == "message":
            if item.role not in ROLES:
                remedy = f"must be one of {', '.join(ROLES)}"
                raise RequestError.about(f"{own}.role", item.role, remedy)
            self._say(item.role, item.content, own)
        elif item.type == "function_call":
            self._part_of_answer(own).setdefault("tool_calls", []).append(_call(item, own))
        elif item.type == "function_call_output":
            self._flush()
            remedy = "must be the id of the call that this answers"
            call_id = translation.needed(item.call_id, f"{own}.call_id", remedy)
            result = {"role": "tool", "tool_call_id": call_id, "content": item.output}
            self.chat.add_message(result, own)
        else:
            self._think(item.content or item.summary, own)

    def _say(self, role: str, text: str, own: str) -> None:
        if role == "assistant":
            answer = self._part_of_answer(own)
            answer["content"] += text
            return
        at_beginning = "messages" not in self.chat.values and not self._answer
        if role in ("system", "developer") and at_beginning:
            if not self._system:
                self._system_from = own
            self._system.append(text)
            return
        self._flush()
        self.chat.add_message({"role": role, "content": text}, own)

    def _think(self, text: str, own: str) -> None:
        """The text of reasoning; what only OpenAI could decrypt is left out."""
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
            self.chat.add_message(system, self._system_from)
        if self._answer:
            answer, self._answer = self._answer, {}
            self.chat.add_message(answer, self._answer_from)


def _kept(body: ResponseBody, shelf: Shelf, most_bytes: int) -> list[dict[str, Any]]:
    """The items of the conversation that goes on: with the new ones no more than a body may have.

    Raises: RequestError 400 or 404
    """
    if not body.previous_response_id:
        return []
    kept = shelf.find(body.previous_response_id, PREVIOUS)
    items = kept.items() if kept.size <= most_bytes else None
    new = len(body.input) if isinstance(body.input, list) else 1
    if items is None or len(items) + new > MAX_MESSAGES:
        raise RequestError(
            f"{PREVIOUS}: the conversation has become longer than a request may be "
            f"({MAX_MESSAGES} items, --max-body-size): send the part that matters as input",
            param=PREVIOUS,
        )
    return items


def _entries(body: ResponseBody, before: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Items, each with the path of the field that it comes from."""
    for entry in before:
        yield PREVIOUS, entry
    if isinstance(body.input, str):
        yield "input", {"role": "user", "content": body.input}
        return
    for i, entry in enumerate(body.input):
        yield f"input[{i}]", entry


def _with_texts(item: Item, own: str) -> Item:
    """The item with texts in place of parts. Raises: RequestError 400"""
    translation.check_kind(item.type, own, tuple(ITEMS))
    types = REASONING_TEXT if item.type == "reasoning" else TEXTS
    for name in ITEM_TEXTS:
        if name in ITEMS[item.type]:
            setattr(item, name, translation.text_only(getattr(item, name), f"{own}.{name}", types))
    return item


def _call(item: Item, own: str) -> dict[str, Any]:
    call_id = translation.needed(item.call_id, f"{own}.call_id", "must be the id of the call")
    name = translation.needed(item.name, f"{own}.name", "must be the name of the function")
    json_object(item.arguments, f"{own}.arguments")  # it is one
    function = {"name": name, "arguments": item.arguments}
    return {"id": call_id, "type": "function", "function": function}


# ── settings ─────────────────────────────────────────────────────────────────────────────────


def _add_tools(chat: translation.ChatBuilder, given: list[Any]) -> list[dict[str, Any]]:
    """The tools, as the reply repeats them."""
    functions = []
    for i, entry in enumerate(given):
        tool = read(ResponseTool, entry, f"tools[{i}]")
        if tool.type != "function":
            remedy = "must be function: this server runs no tools of its own; leave this one out"
            raise RequestError.about(f"tools[{i}].type", tool.type, remedy)
        functions.append({name: entry[name] for name in TOOL_FIELDS if name in entry})
        chat.names[f"tools[{i}].function"] = f"tools[{i}]"
    tools = [{"type": "function", "function": function} for function in functions]
    chat.put("tools", tools, "tools")
    return [{"type": "function", **function} for function in functions]


def _add_tool_choice(chat: translation.ChatBuilder, choice: Any) -> None:
    chat.names["tool_choice.function"] = "tool_choice"
    if isinstance(choice, dict):
        named = read(ResponseTool, choice, "tool_choice")
        if named.type != "function":
            remedy = "must be function; or send auto, none or required"
            raise RequestError.about("tool_choice.type", named.type, remedy)
        name = None if named.name is None else kinds.TEXT.take(named.name, "tool_choice.name")
        translation.needed(name, "tool_choice.name", "must be the name of a tool")
        choice = {"type": "function", "function": {"name": name}}
    elif choice not in (None, *CHOICES):
        remedy = 'must be auto, none, required or {"type": "function", "name": ...}'
        raise RequestError.about("tool_choice", choice, remedy)
    chat.put("tool_choice", choice, "tool_choice")


def _add_format(chat: translation.ChatBuilder, form: Format) -> dict[str, Any]:
    """The format, as the reply repeats it."""
    if form.type == "text":
        return {"type": "text"}
    asked: dict[str, Any] = {"type": form.type}
    made = dict(asked)
    if form.type == "json_schema":
        name = translation.needed(form.name, "text.format.name", "must be the name of the format")
        asked["json_schema"] = {"name": name, "schema": form.schema_}
        made |= {"name": name, "schema": form.schema_, "strict": form.strict}
    chat.put("response_format", asked, "text.format")
    chat.names["response_format.json_schema"] = "text.format"
    return made
