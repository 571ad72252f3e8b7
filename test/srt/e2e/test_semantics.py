"""What a request gets does not depend on who else is served, on the cache, or on the settings.

Expected replies are those of the default server, asked one request after the other.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import time
from typing import Any, NamedTuple

import httpx
import pytest
from running_server import PATIENCE

from mamba_eagle.eval import gsm8k
from mamba_eagle.limits import MAX_JSON_DEPTH

pytestmark = pytest.mark.e2e

Body = dict[str, Any]
Replies = list[dict[str, Any]]

# Each row is one request's; what is not said: 48 tokens at temperature 1.
SCHEMA: Body = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "answer": {"type": "integer"},
        "unit": {"enum": ["apples", "dollars", None]},
    },
    "required": ["steps", "answer", "unit"],
    "additionalProperties": False,
}
SAMPLING: list[Body] = [
    {"temperature": 0},
    {"temperature": 0, "stop": "\n"},
    {"temperature": 0, "repetition_penalty": 1.2, "ignore_eos": True},
    {"temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 5, "stop": ["apples", ".", " ="], "min_new_tokens": 5},
    {"temperature": 1.4, "min_p": 0.05, "min_new_tokens": 40},
    {"logit_bias": {"331": 3.5, "28": -5}, "stop_token_ids": [200, 18]},
    {"temperature": 0, "json_schema": SCHEMA, "max_new_tokens": 160},
    {"json_schema": SCHEMA, "max_new_tokens": 160, "top_p": 0.9, "min_new_tokens": 60},
    {"regex": r"( [0-9]{1,3} [a-z]{2,9}[.,]){2,4}", "ignore_eos": True, "max_new_tokens": 90},
    # long ones: together they need three times the slots of the "retraction" server
    {"max_new_tokens": 130, "ignore_eos": True, "temperature": 0},
    {"max_new_tokens": 130, "ignore_eos": True, "presence_penalty": 0.5},
    {"max_new_tokens": 130, "ignore_eos": True, "repetition_penalty": 1.1},
    {"max_new_tokens": 130, "ignore_eos": True, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"max_new_tokens": 130, "ignore_eos": True, "temperature": 0.5},
    {"max_new_tokens": 130, "ignore_eos": True, "temperature": 2.0},
    {"max_new_tokens": 130, "ignore_eos": True, "temperature": 5.0},
    {"max_new_tokens": 130, "ignore_eos": True, "skip_special_tokens": False},
]


def make_bodies() -> list[Body]:
    questions = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, len(SAMPLING)).questions
    bodies = []
    for i, (problem, sampling) in enumerate(zip(questions, SAMPLING)):
        body: Body = {
            "text": gsm8k.make_prompt([], problem.question),
            "sampling_params": {"max_new_tokens": 48, "sampling_seed": 1000 + i, **sampling},
        }
        if i % 2 == 0:
            start = 0 if i % 4 == 0 else -1
            body |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": start}
        bodies.append(body)
    return bodies


def ask(url: str, bodies: list[Body], parallel: int) -> Replies:
    with httpx.Client(base_url=url, timeout=120, limits=httpx.Limits()) as client:

        def one(body: Body) -> Any:
            reply = client.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(one, bodies))


def read_stream(client: httpx.Client, body: Body) -> Any:
    """The last event; each one's text must begin with the one before."""
    last: Any = {"text": ""}
    with client.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert event["text"].startswith(last["text"])
                last = event
    assert line == "" or line == "data: [DONE]"
    return last


def assert_same(got: Replies, expected: Replies) -> None:
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        where = f"request {i}: {SAMPLING[i % len(SAMPLING)]}"
        assert mine["text"] == theirs["text"], where
        assert mine["output_ids"] == theirs["output_ids"], where
        meta, other = mine["meta_info"], theirs["meta_info"]
        assert meta["finish_reason"] == other["finish_reason"], where
        for name in ("input_token_logprobs", "output_token_logprobs"):
            assert same_logprobs(meta.get(name), other.get(name)), f"{name} of {where}"


def same_logprobs(mine: Any, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return len(mine) == len(theirs) and all(
        (a[0] is b[0] if None in (a[0], b[0]) else abs(a[0] - b[0]) <= 1e-3) and a[1:] == b[1:]
        for a, b in zip(mine, theirs)
    )


def internal_state(client: httpx.Client) -> dict[str, float]:
    state: dict[str, float] = client.get("/server_info").json()["internal_states"][0]
    return state


def all_free(url: str) -> dict[str, float]:
    """Waits until nothing runs; nothing may be held then but by the cache. The last state."""
    deadline = time.monotonic() + PATIENCE
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        while True:
            state = internal_state(client)
            if not state["num_running_reqs"] and not state["num_queue_reqs"]:
                break
            assert time.monotonic() < deadline, state
            time.sleep(0.05)
        # Flushing waits for the last plan to come back, and only the cache can be emptied.
        assert client.post(f"/flush_cache?timeout={PATIENCE:g}").status_code == 200
        empty = internal_state(client)
        assert empty["num_free_kv_slots"] == empty["max_total_num_tokens"]
        assert empty["num_free_checkpoints"] == empty["max_mamba_cache_size"]
        assert client.get("/health_generate").status_code == 200
    return state


class Expected(NamedTuple):
    bodies: list[Body]
    replies: Replies


@pytest.fixture(scope="module")
def expected(server) -> Expected:
    bodies = make_bodies()
    return Expected(bodies, ask(server.base_url, bodies, parallel=1))


def test_batch_and_cache_change_nothing(server, expected: Expected) -> None:
    bodies, replies = expected
    warm = ask(server.base_url, bodies, parallel=16)
    assert_same(warm, replies)
    assert any(reply["meta_info"]["cached_tokens"] for reply in warm)
    all_free(server.base_url)
    assert_same(ask(server.base_url, bodies, parallel=16), replies)


def test_64_streams_at_once_end_as_plain_replies(server, expected: Expected) -> None:
    limits = httpx.Limits(max_connections=64)
    with (
        httpx.Client(base_url=server.base_url, timeout=120, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(64) as pool,
    ):
        got = list(pool.map(lambda body: read_stream(client, body), expected.bodies * 4))
    assert_same(got, expected.replies * 4)
    all_free(server.base_url)


def test_a_conversation_goes_on_from_its_own_output(client: httpx.Client) -> None:
    def turns() -> tuple[list[str], int]:
        text, texts, cached = "Question: What is 12 plus 7?\nAnswer:", [], 0
        for turn in range(3):
            sampling = {"max_new_tokens": 40, "sampling_seed": turn}
            (reply,) = ask(str(client.base_url), [{"text": text, "sampling_params": sampling}], 1)
            texts.append(reply["text"])
            cached += reply["meta_info"]["cached_tokens"]
            text += reply["text"] + "\nQuestion: And 5 more?\nAnswer:"
        return texts, cached

    all_free(str(client.base_url))
    cold = turns()
    warm = turns()
    assert warm[0] == cold[0]
    assert 0 < cold[1] < warm[1]


def test_samples_differ_and_come_again(client: httpx.Client) -> None:
    sampling = {"max_new_tokens": 16, "temperature": 2.0, "sampling_seed": 5, "n": 6}
    body = {"text": "Question: Tom", "sampling_params": sampling}
    first, again = (client.post("/generate", json=body).json() for _ in range(2))
    texts = [sample["text"] for sample in first]
    assert texts == [sample["text"] for sample in again]
    assert len(set(texts)) == 6
    alone = client.post("/generate", json={**body, "sampling_params": {**sampling, "n": 1}})
    assert alone.json()["text"] == texts[0]


def test_aborts_and_clients_that_leave_free_everything(client: httpx.Client) -> None:
    endless = {"max_new_tokens": 6000, "ignore_eos": True}
    body = {"text": "Hello", "sampling_params": endless}
    many = {**body, "rid": "many", "sampling_params": {**endless, "n": 36}}

    def leave(delay: float) -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json=body, timeout=httpx.Timeout(PATIENCE, read=delay))

    def stream() -> Any:
        return read_stream(client, {**body, "rid": "streamed"})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        samples = pool.submit(client.post, "/generate", json=many)
        streamed = pool.submit(stream)
        gone = [pool.submit(leave, delay) for delay in (0.02, 0.1, 0.3)]
        for task in gone:
            task.result(PATIENCE)
        made = 0.0  # tokens when 32 of the 37 requests run
        while True:
            state = internal_state(client)
            counts = [state["num_running_reqs"], state["num_queue_reqs"]]
            if counts == [32, 5]:
                made = made or state["generation_tokens_total"]
                if state["generation_tokens_total"] > made + 500:  # some of each
                    break
            assert not samples.done() and not streamed.done()
            time.sleep(0.02)
        counts = []
        for rid in ("nobody", "many_0", "many_35", "streamed", "many"):
            counts.append(client.post("/abort_request", json={"rid": rid}).json()["aborted"])
        assert counts == [0, 1, 1, 1, 34]
        replies = samples.result(PATIENCE).json()
        assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"abort"}
        assert replies[0]["output_ids"]
        assert streamed.result(PATIENCE)["meta_info"]["finish_reason"]["type"] == "abort"
    all_free(str(client.base_url))


def test_what_cannot_be_served_is_400_and_harms_nobody(client: httpx.Client) -> None:
    context = client.get("/model_info").json()["max_model_len"]
    nested: Any = 1
    for _ in range(MAX_JSON_DEPTH - 2):
        nested = {"a": nested}
    ids = [5] * context
    cases: list[tuple[Any, str]] = [
        ({"input_ids": ids}, f"{context} tokens"),
        ({"input_ids": [[5], 6]}, "input_ids[1] = 6"),
        ({"text": "ab " * 2_700_000}, "text"),
        ({"text": "a", "sampling_params": nested}, "sampling_params.a = "),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n = 0"),
        ({"text": "a", "sampling_params": {"n": 2000}}, "sampling_params.n = 2000"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"text": "a", "sampling_params": {"logit_bias": {"99999": 1}}}, "logit_bias"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
    ]
    raw = [
        (b'{"text": "\xff"}', "not valid JSON"),
        (b'{"text": ' + b"[" * 20_000, f"{MAX_JSON_DEPTH} deep"),
        (b'{"text": ' + b"[" * 90_000, "90001 arrays and objects"),
    ]
    encoded = [(json.dumps(body).encode(), part) for body, part in cases]
    for content, part in itertools.chain(encoded, raw):
        reply = client.post("/generate", content=content)
        assert reply.status_code == 400 and part in reply.json()["error"]["message"], reply.text
    assert client.post("/generate", content=b" " * (70 * 2**20)).status_code == 413

    stops = [f"zz{i}" for i in range(300)]
    sampling: Body = {"max_new_tokens": 100, "ignore_eos": True, "stop": stops}
    body = {"input_ids": ids[1:], "sampling_params": sampling}  # one token short of the context
    reply = client.post("/generate", json=body).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    all_free(str(client.base_url))
