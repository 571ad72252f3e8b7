"""What bodies hold, as JSON Schema: for /openapi.json and /docs.

The parsers read bodies by hand, so that each refusal names field, value and remedy.
``test_openapi.py`` records what they read, and fails if it is not what stands here.
"""

from __future__ import annotations

from typing import Any

from mamba_eagle.limits import (
    MAX_CACHE_SALT,
    MAX_CHECKPOINTS,
    MAX_CHOICES,
    MAX_DOCUMENTS,
    MAX_EMBEDDINGS,
    MAX_MESSAGES,
    MAX_MODEL_LENGTH,
    MAX_PENALTY,
    MAX_PIN_SECONDS,
    MAX_PRIORITY,
    MAX_PROFILED_STEPS,
    MAX_REPETITION_PENALTY,
    MAX_RID_LENGTH,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_THINKING_BUDGET,
    MAX_TIMEOUT,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from mamba_eagle.server.anthropic_body import CHOICES, THINKING, ClientTool
from mamba_eagle.server.chat_body import EFFORTS
from mamba_eagle.server.embeddings import FORMATS as EMBEDDING_FORMATS
from mamba_eagle.server.responses_body import FORMATS
from mamba_eagle.server.tools import CHOICES as TOOL_CHOICES
from mamba_eagle.server.tools import Function, NamedChoice, Tool

Schema = dict[str, Any]
MODELS = (Tool, NamedChoice, ClientTool, Function)  # that the bodies below refer to


def integer(what: str, **limits: Any) -> Schema:
    return {"type": "integer", "description": what, **limits}


def number(what: str, **limits: Any) -> Schema:
    return {"type": "number", "description": what, **limits}


def flag(what: str, default: bool = False) -> Schema:
    return {"type": "boolean", "description": what, "default": default}


def text(what: str, **limits: Any) -> Schema:
    return {"type": "string", "description": what, **limits}


def one_of(what: str, *kinds: Schema) -> Schema:
    return {"anyOf": list(kinds), "description": what}


def texts(what: str) -> Schema:
    return one_of(what, {"type": "string"}, {"type": "array", "items": {"type": "string"}})


def integers(what: str, **limits: Any) -> Schema:
    return {"type": "array", "items": {"type": "integer"}, "description": what, **limits}


def items_of(what: str, kind: Schema, **limits: Any) -> Schema:
    return {"type": "array", "items": kind, "description": what, **limits}


def fields_of(what: str, *, needs: tuple[str, ...] = (), **properties: Schema) -> Schema:
    made = {"type": "object", "description": what, "properties": properties}
    return {**made, "required": list(needs)} if needs else made


def any_object(what: str) -> Schema:
    return {"type": "object", "description": what}


def either(what: str, kind: Schema) -> Schema:
    """One for all prompts, or a list with one for each."""
    return one_of(what, kind, {"type": "array", "items": kind})


def named(model: type) -> Schema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


IDS: Schema = {"type": "array", "items": {"type": "integer"}}
TEXT: Schema = {"type": "string"}
JSON_SCHEMA = one_of("a JSON schema, or one as text", {"type": "object"}, TEXT, {"type": "boolean"})

# ── what generating routes have in common ────────────────────────────────────────────────────

SERVED: Schema = {
    "timeout": number("seconds from arrival to the end", exclusiveMinimum=0, maximum=MAX_TIMEOUT),
    "priority": integer(
        "higher ones first, with --schedule-policy priority",
        minimum=-MAX_PRIORITY,
        maximum=MAX_PRIORITY,
    ),
    "cache_salt": text("only requests of the same salt share a prefix", maxLength=MAX_CACHE_SALT),
    "pin_seconds": number(
        "for so long the prompt's prefix is evicted last", minimum=0, maximum=MAX_PIN_SECONDS
    ),
    "checkpoint": integers("positions of the prompt whose state is kept", maxItems=MAX_CHECKPOINTS),
}
RID = text("a name for /abort_request and logs", maxLength=MAX_RID_LENGTH)
MODEL = text("any: one model is served, and the name is repeated", maxLength=MAX_MODEL_LENGTH)
TAG = one_of("free text with constrained parts", {"type": "object"}, TEXT)
CHOICE = items_of("one of these texts", TEXT, maxItems=MAX_CHOICES)
GRAMMARS: Schema = {
    "regex": text("a regular expression that the whole output matches"),
    "json_schema": JSON_SCHEMA,
    "ebnf": text("a grammar in GBNF or Lark"),
    "structural_tag": TAG,
    "choice": CHOICE,
    "guided_json": JSON_SCHEMA,
    "guided_regex": text("as regex"),
    "guided_choice": CHOICE,
    "guided_grammar": text("as ebnf"),
    "guided_whitespace_pattern": text("of guided_json: between its tokens"),
    "structured_outputs": fields_of(
        "vLLM's: one of them",
        json=JSON_SCHEMA,
        regex=text("as regex"),
        choice=CHOICE,
        grammar=text("as ebnf"),
        json_object=flag("any JSON object"),
        structural_tag=TAG,
        whitespace_pattern=text("of json: between its tokens"),
        disable_any_whitespace=flag("of json: none between its tokens"),
    ),
}
PENALTY = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
SAMPLING: Schema = {
    "temperature": number("0: always the best token", minimum=0, maximum=MAX_TEMPERATURE),
    "top_p": number("the best tokens of this probability", exclusiveMinimum=0, maximum=1),
    "top_k": integer("so many of the best tokens; -1: all", minimum=-1),
    "min_p": number("tokens of this share of the best one's", minimum=0, maximum=1),
    "frequency_penalty": number("by the token's count in the output", **PENALTY),
    "presence_penalty": number("for tokens that the output has", **PENALTY),
    "repetition_penalty": number(
        "divides logits of tokens that came before",
        minimum=MIN_REPETITION_PENALTY,
        maximum=MAX_REPETITION_PENALTY,
    ),
    "stop": texts("strings that end the output"),
    "stop_token_ids": integers("tokens that end the output", maxItems=MAX_STOP_TOKEN_IDS),
    "ignore_eos": flag("go on after the model's end"),
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "description": "token ids and what is added to their logits",
    },
    "skip_special_tokens": flag("leave special tokens out of the text", True),
    "spaces_between_special_tokens": flag("as transformers decodes them", True),
    "no_stop_trim": flag("keep what ended the output"),
    "n": integer("samples of each prompt", minimum=1, maximum=MAX_SAMPLES),
    "seed": integer("makes the output repeatable", minimum=0),
    "sampling_seed": integer("as seed", minimum=0),
    **GRAMMARS,
}
RESPONSE_FORMAT = fields_of(
    "the form of the output",
    type=text("", enum=["text", "json_object", "json_schema", "structural_tag"]),
    json_schema=fields_of("", name=TEXT, schema=JSON_SCHEMA),
    schema=JSON_SCHEMA,
)
OPENAI: Schema = {
    "model": MODEL,
    "rid": RID,
    "stream": flag("server-sent events"),
    "stream_options": fields_of(
        "of a stream",
        include_usage=flag("a last chunk has the usage"),
        continuous_usage_stats=flag("each chunk has its choice's usage so far"),
    ),
    "return_meta_info": flag("each choice has /generate's meta_info"),
    "return_spec_trace": flag("the tree of each step"),
    "min_tokens": integer("no end before", minimum=0),
    "response_format": RESPONSE_FORMAT,
    **SAMPLING,
    **SERVED,
}

# ── chats ────────────────────────────────────────────────────────────────────────────────────

PARTS = items_of("parts of type text", fields_of("", type=TEXT, text=TEXT))
MESSAGE = fields_of(
    "other names are for the template",
    needs=("role",),
    role=text("system, user, assistant, tool, or what the template knows"),
    content=one_of("", TEXT, PARTS),
    tool_call_id=text("of role tool: the call that this answers"),
    tool_calls=items_of("of role assistant", {"type": "object"}),
)
TEMPLATE: Schema = {
    "documents": items_of("for the template", {"type": "object"}, maxItems=MAX_DOCUMENTS),
    "chat_template_kwargs": any_object("other arguments of the template"),
    "enable_thinking": flag("whether to reason; without it the template decides"),
}
RENDERED: Schema = {
    "messages": items_of("the chat", MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
    "tools": items_of("that the model may call", named(Tool), maxItems=MAX_TOOLS),
    "tool_choice": one_of(
        "whether a call must come", {"enum": list(TOOL_CHOICES)}, named(NamedChoice)
    ),
    "parallel_tool_calls": flag("whether several calls may come", True),
    "add_generation_prompt": flag("whether the model's message begins", True),
    "continue_final_message": flag("the last message, of the assistant, goes on"),
    "reasoning_effort": text("for the template", enum=list(EFFORTS)),
    **TEMPLATE,
}
BUDGET = integer("tokens of reasoning", minimum=0, maximum=MAX_THINKING_BUDGET)
# Fields that the other chats take over as they are.
SHARED: Schema = {
    "model": MODEL,
    "stream": OPENAI["stream"],
    "min_tokens": OPENAI["min_tokens"],
    "rid": RID,
    "thinking_budget": BUDGET,
    **TEMPLATE,
    **SERVED,
    **{
        name: SAMPLING[name]
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "seed",
            "stop_token_ids",
            "ignore_eos",
            "logit_bias",
            "skip_special_tokens",
        )
    },
}
BLOCKS = items_of("", {"type": "object"})
ANTHROPIC: Schema = {
    **SHARED,
    "messages": items_of(
        "the chat",
        fields_of(
            "",
            needs=("role", "content"),
            role=text("", enum=["user", "assistant"]),
            content=one_of("text, or blocks: text, tool_use, tool_result, thinking", TEXT, BLOCKS),
        ),
        minItems=1,
        maxItems=MAX_MESSAGES,
    ),
    "system": one_of("instructions: a text, or blocks of type text", TEXT, BLOCKS),
    "stop_sequences": texts("strings that end the output"),
    "tools": items_of("that the model may call", named(ClientTool), maxItems=MAX_TOOLS),
    "tool_choice": fields_of(
        "whether a call must come",
        needs=("type",),
        type=text("", enum=[*CHOICES, "tool"]),
        name=text("of type tool"),
        disable_parallel_tool_use=flag("one call at most"),
    ),
    "thinking": fields_of(
        "whether to reason; without it the template decides",
        needs=("type",),
        type=text("", enum=list(THINKING)),
        budget_tokens=integer("tokens of reasoning", minimum=1),
    ),
    "output_config": fields_of(
        "the form of the output",
        effort=RENDERED["reasoning_effort"],
        format=fields_of("", type=text("", enum=["json_schema"]), schema={"type": "object"}),
    ),
}

# ── routes ───────────────────────────────────────────────────────────────────────────────────

PROMPT = one_of(
    "a text, token ids, or a list of either",
    TEXT,
    IDS,
    {"type": "array", "items": TEXT},
    {"type": "array", "items": IDS},
)
MAX_TOKENS = integer("the longest output", minimum=0)
SAMPLING_PARAMS = fields_of(
    "",
    **SAMPLING,
    max_new_tokens=integer("the longest output", minimum=0, default=128),
    min_new_tokens=integer("no end before", minimum=0),
)
GENERATE = fields_of(
    "text or input_ids, and how to sample",
    text=texts("a prompt, or a list of prompts"),
    input_ids=one_of("a prompt's token ids, or a list of such", IDS, {**IDS, "items": IDS}),
    sampling_params=either("how to sample", SAMPLING_PARAMS),
    stream=flag("server-sent events"),
    incremental=flag("of a stream: events have what is new instead of all so far"),
    rid=either("names for /abort_request and logs", {"type": "string"}),
    return_logprob=either("logprobs of the output", {"type": "boolean"}),
    logprob_start_len=either("the first token of the prompt with logprobs", {"type": "integer"}),
    top_logprobs_num=either(f"best tokens, up to {MAX_TOP_LOGPROBS}", {"type": "integer"}),
    return_text_in_logprobs=flag("the tokens' texts beside them"),
    return_spec_trace=either("the tree of each step", {"type": "boolean"}),
    **SERVED,
)
COMPLETION = fields_of(
    "a prompt, and how to continue it",
    needs=("prompt",),
    prompt=PROMPT,
    max_tokens={**MAX_TOKENS, "default": 16},
    echo=flag("the prompt comes first"),
    suffix=text("what the output must lead to, of models with tokens for filling in"),
    logprobs=integer("best tokens beside each", minimum=0, maximum=MAX_TOP_LOGPROBS),
    best_of=integer("as n, or left out"),
    **OPENAI,
)
CHAT = fields_of(
    "a chat, and how to answer it",
    needs=("messages",),
    max_tokens=MAX_TOKENS,
    max_completion_tokens=MAX_TOKENS,
    logprobs=flag("logprobs of the output"),
    top_logprobs=integer("best tokens beside each", minimum=0, maximum=MAX_TOP_LOGPROBS),
    separate_reasoning=flag("reasoning apart from content", True),
    thinking_budget=BUDGET,
    thinking_token_budget=BUDGET,
    **RENDERED,
    **OPENAI,
)
RESPONSE = fields_of(
    "a conversation, and how to answer it; nothing is kept",
    needs=("input",),
    **SHARED,
    input=one_of("a text, or items: messages, calls, their outputs, reasoning", TEXT, BLOCKS),
    instructions=text("come first, as a system message"),
    max_output_tokens=MAX_TOKENS,
    metadata={"type": "object", "additionalProperties": TEXT, "description": "repeated"},
    reasoning=fields_of("", effort=RENDERED["reasoning_effort"]),
    text=fields_of(
        "",
        format=fields_of(
            "the form of the output",
            type=text("", enum=list(FORMATS)),
            name=text("of json_schema"),
            schema={"type": "object"},
            strict=flag("repeated"),
        ),
    ),
    tools=items_of(
        "that the model may call",
        {"allOf": [fields_of("", type=text("", enum=["function"])), named(Function)]},
        maxItems=MAX_TOOLS,
    ),
    tool_choice=one_of(
        "whether a call must come",
        {"enum": list(TOOL_CHOICES)},
        fields_of("", type=text("", enum=["function"]), name=TEXT),
    ),
    parallel_tool_calls=flag("whether several calls may come", True),
    truncation=text("", enum=["disabled"]),
    include=texts("ignored, but for logprobs, which are refused"),
)
MESSAGES = fields_of(
    "a chat, and how to answer it", needs=("messages",), **ANTHROPIC, max_tokens=MAX_TOKENS
)
COUNT_TOKENS = fields_of("a chat, of which nothing is generated", needs=("messages",), **ANTHROPIC)
SCORE = fields_of(
    "texts, and the tokens that may follow each",
    needs=("items", "label_token_ids"),
    query=one_of("what all items have in common", TEXT, IDS),
    items=one_of(
        "texts, or token ids, each with the query before it",
        TEXT,
        {"type": "array", "items": TEXT},
        {"type": "array", "items": IDS},
    ),
    item_first=flag("the query comes behind the item"),
    label_token_ids=one_of(
        "tokens to be scored: of all items, or of each", IDS, {"type": "array", "items": IDS}
    ),
    apply_softmax=flag("among the labels alone"),
    temperature=number("of apply_softmax", exclusiveMinimum=0, default=1),
    return_token_logprobs=flag("the labels' logprobs as well"),
    model=MODEL,
    rid=RID,
    **SERVED,
)
EMBEDDINGS = fields_of(
    "texts, or token ids",
    needs=("input",),
    input=one_of(
        "one or several",
        TEXT,
        {"type": "array", "items": TEXT, "maxItems": MAX_EMBEDDINGS},
        IDS,
        {"type": "array", "items": IDS, "maxItems": MAX_EMBEDDINGS},
    ),
    encoding_format={
        "enum": list(EMBEDDING_FORMATS),
        "description": "a list of numbers, or float32 as bytes",
        "default": EMBEDDING_FORMATS[0],
    },
    dimensions={"type": "null", "description": "vectors are never cut"},
    normalize=flag("to a length of 1", True),
    model=MODEL,
    rid=RID,
    **SERVED,
)
TOKENIZE = fields_of(
    "prompt or messages",
    prompt=texts("a text, or a list of texts"),
    text=texts("as prompt"),
    add_special_tokens=flag("as the tokenizer adds them; of messages not"),
    **RENDERED,
)
DETOKENIZE = fields_of(
    "token ids",
    needs=("tokens",),
    tokens=one_of("token ids, or a list of such", IDS, {**IDS, "items": IDS}),
    skip_special_tokens=flag("leave special tokens out of the text", True),
)
START_PROFILE = fields_of(
    "how much is recorded",
    num_steps=integer("steps of the runner", minimum=1, maximum=MAX_PROFILED_STEPS, default=20),
)
ABORT = fields_of(
    "rid or abort_all",
    rid=text("the request's name"),
    abort_all=flag("all requests"),
)
