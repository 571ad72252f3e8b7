"""Thousands of bodies with something wrong in them: each is answered, none with a 5xx, and the
server goes on. MAMBA_EAGLE_CHAOS_SCALE multiplies their number."""

from __future__ import annotations

import concurrent.futures
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from chaos_rig import (
    PATIENCE,
    SCALE,
    SEED,
    Start,
    assert_serves,
    eventually,
    report,
    running_requests,
)
from running_server import RunningServer

CLIENTS = 8
SHORT = {"max_new_tokens": 2, "temperature": 0}
MESSAGES = [{"role": "user", "content": "a"}]

# ── what is right, and what never is, by the kind of a field ─────────────────────────────────

WRONG: dict[str, list[Any]] = {
    "integer": ["x", 1.5, True, [1], {"a": 1}, 2**63, -(2**63) - 1, 1e300, "1"],
    "integer or list": ["x", 1.5, True, ["x"], [1, 1], {"a": 1}, 2**63, 1e300],
    "number": ["x", True, [], [0.5], {}, "0.5", 10**400],
    "flag": ["yes", "true", 1, 0, 0.0, [], {}],
    "text": [5, 0.5, True, [], {}, ["a", 5], "\ud800"],
    "texts": [5, True, {}, [1], [None], [["a"]], ["a", 5], ["\ud800"]],
    "integers": [5, True, {}, "x", ["1"], [1.5], [None], [[1]], [2**63], [True]],
    "id lists": [5, True, {}, "x", ["1"], [1.5], [None], [2**63], [10**9], [[1], 2]],
    "object": [5, True, "x", [1]],
    "bias": [5, True, "x", [], [1], {"x": 1}, {"-1": 1}, {"1": "x"}, {"1": None}, {"1.5": 1}],
    "prompt": [5, True, {}, "", [], [""], [[]], ["a", ""], ["a", [1]], [1, "a"], [10**9], [-1]],
    "ids": [True, {}, [], [[]], [1.5], [1, "a"], [10**9], [-1], [[1], []], [[1], 2], "x", "1"],
    "messages": [5, "x", [], {}, ["x"], [{}], [{"role": 5}], [{"role": "user", "content": 5}]],
    "pattern": ["", "(", "a\0", "\ud800", "(?=a)", {"a": 1}, 5, True, ["x"]],
    "ebnf": ["", "x", "root ::= foo", "start: foo", 'root ::= "', {"a": 1}, 5, True, ["x"]],
    "schema": ["", "x", "{", 5, False, ["x"], {"type": "x"}, {"not": {}}, {"$ref": "#"}],
    "choices": ["x", 5, True, {}, [""], ["a", 5], ["\ud800"], ["a\0"]],
    "tag": ["", "x", 5, True, {}, ["x"], {"format": {}}, {"structures": [], "triggers": ["a"]}],
    "tools": [5, "x", True, {}, [5], [{}], [{"type": "function", "function": {"name": 5}}]],
    "tool choice": [5, "x", [], True, {"type": "function"}, "required"],
    "documents": [5, "x", True, {}, [5]],
    "arguments": [5, "x", [1], {"messages": []}, {"chat_template": "x"}, {"a b": 1}],
    "structured": [5, True, "x", [1], {"regex": "("}, {"regex": "a", "choice": ["a"]}],
}
SAMPLING = {
    "temperature": "number",
    "top_p": "number",
    "top_k": "integer",
    "min_p": "number",
    "frequency_penalty": "number",
    "presence_penalty": "number",
    "repetition_penalty": "number",
    "stop": "texts",
    "stop_token_ids": "integers",
    "ignore_eos": "flag",
    "logit_bias": "bias",
    "skip_special_tokens": "flag",
    "spaces_between_special_tokens": "flag",
    "no_stop_trim": "flag",
    "n": "integer",
    "seed": "integer",
    "regex": "pattern",
    "json_schema": "schema",
    "ebnf": "ebnf",
    "choice": "choices",
    "structural_tag": "tag",
    "structured_outputs": "structured",
    "guided_json": "schema",
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-1, 1e39, 1e300, -1e-9],
    "top_p": [0, -1, 1.01],
    "top_k": [0, -2],
    "min_p": [-0.1, 1.5],
    "frequency_penalty": [-2.5, 1e39],
    "presence_penalty": [2.5],
    "repetition_penalty": [0, -1, 1e-46, 3],
    "stop": ["", ["a", ""], ["x"] * 513, "x" * 1025],
    "stop_token_ids": [[-1], [10**9], [1] * 1025],
    "logit_bias": [{"1": 1e5}, {"999999999": 1}, {str(i): 1 for i in range(4097)}],
    "n": [0, -1, 1025],
    "seed": [-1],
    "max_new_tokens": [-1],
    "min_new_tokens": [-1, 5],
    "sampling_seed": [-1],
    "max_tokens": [-1],
    "min_tokens": [-1, 5],
    "model": ["x" * 513],
    "logprobs": [-1, 65],
}


class Route(NamedTuple):
    path: str
    right: dict[str, Any]
    fields: dict[str, str]  # its own, and their kinds
    within: str = ""  # the object of the body that has the sampling parameters


ROUTES = [
    Route(
        "/generate",
        {"text": "a", "sampling_params": SHORT},
        {
            "text": "prompt",
            "stream": "flag",
            "return_logprob": "flag",
            "return_text_in_logprobs": "flag",
            "rid": "text",
            "sampling_params": "object",
        },
        within="sampling_params",
    ),
    Route(
        "/generate",
        {"input_ids": [5, 6], "return_logprob": True, "sampling_params": SHORT},
        {
            "input_ids": "ids",
            "logprob_start_len": "integer or list",
            "top_logprobs_num": "integer or list",
        },
    ),
    Route(
        "/v1/completions",
        {"prompt": "a", "max_tokens": 2},
        {
            "prompt": "prompt",
            "max_tokens": "integer",
            "min_tokens": "integer",
            "echo": "flag",
            "stream": "flag",
            "model": "text",
            "rid": "text",
            "stream_options": "object",
            **SAMPLING,
        },
    ),
    Route(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 2},
        {
            "messages": "messages",
            "max_tokens": "integer",
            "max_completion_tokens": "integer",
            "min_tokens": "integer",
            "logprobs": "flag",
            "stream": "flag",
            "model": "text",
            "tools": "tools",
            "tool_choice": "tool choice",
            "parallel_tool_calls": "flag",
            "documents": "documents",
            "chat_template_kwargs": "arguments",
            "add_generation_prompt": "flag",
            "continue_final_message": "flag",
            "enable_thinking": "flag",
            "separate_reasoning": "flag",
            "reasoning_effort": "text",
            "thinking_budget": "integer",
            **SAMPLING,
        },
    ),
    Route("/tokenize", {"prompt": "a"}, {"prompt": "texts", "add_special_tokens": "flag"}),
    Route("/detokenize", {"tokens": [5]}, {"tokens": "id lists", "skip_special_tokens": "flag"}),
    Route("/abort_request", {"rid": "nobody"}, {"rid": "text", "abort_all": "flag"}),
]
INNER = {
    "max_new_tokens": "integer",
    "min_new_tokens": "integer",
    "sampling_seed": "integer",
    **SAMPLING,
}


class Case(NamedTuple):
    path: str
    content: bytes
    names: str = ""  # a field that the error must name; "": it may be fine


def with_value(route: Route, name: str, value: Any) -> dict[str, Any]:
    if name in route.fields:
        return {**route.right, name: value}
    return {**route.right, route.within: {**route.right[route.within], name: value}}


def kinds_of(route: Route) -> dict[str, str]:
    return {**route.fields, **(INNER if route.within else {})}


def one_wrong_value() -> Iterator[Case]:
    """Each field of each route with each value that is of another kind or out of range."""
    for route in ROUTES:
        for name, kind in kinds_of(route).items():
            for value in WRONG[kind] + OUT_OF_RANGE.get(name, []):
                yield Case(route.path, json.dumps(with_value(route, name, value)).encode(), name)


def random_case(rng: random.Random) -> Case:
    """Some fields with any values, or the bytes of a right body with a few changed."""
    route = rng.choice(ROUTES)
    values = [value for kind in WRONG.values() for value in kind] + [None, 1, 0.5, "a", [5]]
    body = dict(route.right)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(kinds_of(route)))
        body = with_value(route._replace(right=body), name, rng.choice(values))
        if not isinstance(body.get(route.within, {}), dict):
            break
    text = bytearray(json.dumps(body).encode())
    if rng.random() < 0.4:
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = rng.choice(b'\x00\xff"\\{}[],:0-e. nNaI')
    return Case(route.path, bytes(text))


# ── sending ──────────────────────────────────────────────────────────────────────────────────


def send(client: httpx.Client, case: Case) -> str:
    """What is wrong with the answer; "" if nothing."""
    where = f"{case.path} {case.content[:300]!r}: "
    try:
        reply = client.post(case.path, content=case.content)
    except httpx.HTTPError as error:
        return where + repr(error)
    if reply.status_code >= 500:
        return f"{where}{reply.status_code} {reply.text[:300]}"
    if reply.status_code == 200:
        return f"{where}was taken" if case.names else ""
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{where}{reply.status_code} without a message: {reply.text[:300]}"
    if len(message) > 1500:
        return f"{where}a message of {len(message)} characters"
    if reply.status_code != 400 or case.names not in message:
        return f"{where}{reply.status_code} {message} does not name {case.names}"
    return ""


def send_all(server: RunningServer, cases: list[Case]) -> list[str]:
    """Over a few connections at once."""

    def work(part: list[Case]) -> list[str]:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
            return [problem for case in part if (problem := send(client, case))]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        parts = pool.map(work, [cases[i::CLIENTS] for i in range(CLIENTS)])
        return [problem for part in parts for problem in part]


@pytest.fixture(scope="module")
def server(start: Start) -> RunningServer:
    return start().wait_until_ready()


def assert_unharmed(server: RunningServer) -> None:
    """It serves, nothing runs, every slot is free or cached, and nothing was logged in anger."""
    assert_serves(server)
    eventually(lambda: not running_requests(server), "all requests have ended")
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
        assert client.post("/flush_cache?timeout=60").status_code == 200
        state = client.get("/server_info").json()["internal_states"][0]
    assert state["num_free_kv_slots"] == state["max_total_num_tokens"]
    assert state["num_free_checkpoints"] == state["max_mamba_cache_size"]
    assert "Traceback" not in server.output, server.output[-3000:]


def test_one_wrong_value_is_refused_by_name(server: RunningServer) -> None:
    cases = list(one_wrong_value())
    assert len(cases) > 500
    problems = send_all(server, cases)
    assert not problems, "\n".join(problems[:10])
    assert_unharmed(server)


def test_random_bodies_never_fail(server: RunningServer) -> None:
    rng = random.Random(SEED)
    cases = [random_case(rng) for _ in range(2500 * SCALE)]
    assert min(Counter(case.path for case in cases).values()) > 100 * SCALE
    problems = send_all(server, cases)
    assert not problems, "\n".join(problems[:10])
    assert_unharmed(server)
    report("fuzz", len(cases), "bodies", seed=SEED, without_an_answer=0, server_errors=0)
