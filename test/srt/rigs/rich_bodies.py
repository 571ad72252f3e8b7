"""Right bodies of each route with most of what they may hold, and ways to make one value wrong."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
OTHER = {"name": "ping", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": OTHER}]
ARGUMENTS = '{"city": "a"}'
CALLED = {"name": "weather", "arguments": {"city": "a"}}
CALL = {"id": "c1", "type": "function", "function": CALLED}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    {"role": "user", "content": "b"},
]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": ["zzz", "yyy"],
    "stop_token_ids": [3, 4],
    "ignore_eos": False,
    "logit_bias": {"5": 1, "6": -0.5},
    "skip_special_tokens": True,
    "n": 1,
    "seed": 5,
}
SERVED = {"timeout": 100, "priority": 1, "cache_salt": "s", "pin_seconds": 0, "checkpoint": [1]}
TEMPLATE_VALUES = {
    "documents": [{"title": "t", "text": "d"}],
    "chat_template_kwargs": {"mood": "x"},
}
CHAT_SAMPLING = {
    name: SAMPLING[name]
    for name in ("temperature", "top_p", "top_k", "seed", "stop_token_ids", "logit_bias")
}
FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA}
ANTHROPIC: dict[str, Any] = {
    "model": "default",
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "sun"}],
                },
                {"type": "text", "text": "c"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
}
# By route; several of one route differ in what excludes each other.
RIGHT: list[tuple[str, dict[str, Any]]] = [
    (
        "/generate",
        {
            "text": ["a", "b"],
            "rid": ["r1", "r2"],
            "sampling_params": {"max_new_tokens": 2, "regex": "[ab]{1,9}", **SAMPLING},
            "return_logprob": True,
            "logprob_start_len": [0, -1],
            "top_logprobs_num": [2, 0],
            "return_text_in_logprobs": True,
            "return_spec_trace": True,
            "incremental": True,
            "stream": True,
            **SERVED,
            "checkpoint": [],
        },
    ),
    (
        "/generate",
        {
            "text": ["a", "b"],
            "sampling_params": [{"max_new_tokens": 2, "min_new_tokens": 1, **SAMPLING}, {"n": 2}],
        },
    ),
    (
        "/generate",
        {"input_ids": [[5, 6], [7, 8]], "sampling_params": {"max_new_tokens": 2}, **SERVED},
    ),
    (
        "/v1/completions",
        {
            "prompt": ["a", "b"],
            "max_tokens": 2,
            "min_tokens": 1,
            "echo": True,
            "logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "model": "default",
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            **SAMPLING,
            **SERVED,
            "checkpoint": [],
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": [5, 6, 7],
            "max_tokens": 2,
            "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "model": "default",
            "thinking_budget": 5,
            "separate_reasoning": True,
            "enable_thinking": True,
            "reasoning_effort": "low",
            **TEMPLATE_VALUES,
            **SAMPLING,
            **SERVED,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "max_completion_tokens": 2,
            "tools": TOOLS,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "weather",
                    "arguments": ARGUMENTS,
                },
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {"type": "message", "role": "user", "content": "b"},
            ],
            "instructions": "s",
            "max_output_tokens": 2,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
            "text": {"format": FORM},
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "model": "default",
            "stream": True,
            "thinking_budget": 5,
            "enable_thinking": True,
            **TEMPLATE_VALUES,
            **CHAT_SAMPLING,
            **SERVED,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "a",
            "max_output_tokens": 2,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "weather"},
        },
    ),
    (
        "/v1/messages",
        {
            **ANTHROPIC,
            "max_tokens": 2,
            "stop_sequences": ["zzz"],
            "stream": True,
            **TEMPLATE_VALUES,
            **CHAT_SAMPLING,
            **SERVED,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2,
            "output_config": {
                "effort": "low",
                "format": {"type": "json_schema", "schema": SCHEMA},
            },
        },
    ),
    ("/v1/messages/count_tokens", ANTHROPIC),
    (
        "/v1/score",
        {
            "query": "a",
            "items": ["b", "cd"],
            "label_token_ids": [[5, 6], [7]],
            "apply_softmax": True,
            "temperature": 0.5,
            "item_first": True,
            "return_token_logprobs": True,
            "model": "default",
            "rid": "s1",
            **SERVED,
        },
    ),
    ("/v1/score", {"query": [5], "items": [[6], [7, 8]], "label_token_ids": [5, 6]}),
    (
        "/v1/embeddings",
        {
            "input": ["a", "b"],
            "encoding_format": "float",
            "normalize": False,
            "model": "default",
            "rid": "e1",
            **SERVED,
            "checkpoint": [],
        },
    ),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64"}),
    (
        "/tokenize",
        {
            "messages": TURNS,
            "tools": TOOLS,
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "reasoning_effort": "low",
            "enable_thinking": True,
            **TEMPLATE_VALUES,
        },
    ),
    ("/tokenize", {"prompt": ["a", "b"], "add_special_tokens": True}),
    ("/detokenize", {"tokens": [[5, 6], [7]], "skip_special_tokens": True}),
    ("/start_profile", {"num_steps": 3}),
    ("/abort_request", {"rid": "nobody", "abort_all": False}),
]
# What stands in these is a template's business, or a schema's, which has tests of its own.
FREE_INSIDE = ("arguments", "documents", "chat_template_kwargs", "properties", "required")
ANYTHING = ("signature", "reasoning_content")


def paths_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Of all values below an object where not just anything is right."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        own = (*path, key)
        if key in ANYTHING:
            continue
        yield own
        is_free = key in FREE_INSIDE or own[1:] and key == "input"  # a call's arguments
        if isinstance(inner, (dict, list)) and not is_free:
            yield from paths_of(inner, own)


def with_value(body: Any, path: Path, value: Any) -> Any:
    """A copy of ``body`` with another value at ``path``."""
    if not path:
        return value
    copied = dict(body) if isinstance(body, dict) else list(body)
    copied[path[0]] = with_value(body[path[0]], path[1:], value)
    return copied


def value_at(body: Any, path: Path) -> Any:
    for key in path:
        body = body[key]
    return body


def written(path: Path) -> str:
    """As messages write it."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


# ── values ───────────────────────────────────────────────────────────────────────────────────


def a_number(rng: random.Random) -> Any:
    edges = [0, -1, 2**31, 2**63, -(2**63) - 1, 10**40, 1e300, -1e-300, 0.1, float("nan")]
    return rng.choice([*edges, rng.randrange(-(10**6), 10**6), rng.uniform(-9, 9)])


def a_text(rng: random.Random) -> str:
    letters = string.printable + "é語😀\0\ud800\udfff"
    return "".join(rng.choices(letters, k=rng.choice([0, 1, 5, 30, 300])))


def a_value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind < 2:
        return a_number(rng)
    if kind < 3:
        return a_text(rng)
    if kind < 5:
        return rng.choice([None, True, False])
    if kind == 5:
        return [a_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {a_text(rng)[:9]: a_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def wrong_for(value: Any, rng: random.Random) -> Any:
    """Of a kind that is wrong wherever one of this value's kind is right."""
    numbers: list[Any] = [a_number(rng), True]
    objects: list[Any] = [{a_text(rng)[:9]: a_value(rng)}, {"a": 1}]
    if isinstance(value, str):
        return rng.choice([*numbers, False, *objects, [5], "\ud800 " + a_text(rng)])
    if isinstance(value, bool):
        return rng.choice([a_number(rng), a_text(rng), *objects, [[True]]])
    if isinstance(value, (int, float)):
        return rng.choice([a_text(rng) + "x", *objects, [[5]], float("nan"), 10**400])
    if isinstance(value, list) and value and isinstance(value[0], int):
        return rng.choice([True, False, *objects])  # one number for all prompts may be right
    if isinstance(value, list):  # of one kind, and the first tells which
        return rng.choice([*numbers, False])
    return rng.choice([a_number(rng), False, "x" + a_text(rng), [5, a_value(rng)]])
