"""What clients do, against the real server with the embedded model."""

from __future__ import annotations

import concurrent.futures
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import PATIENCE, RunningServer

pytestmark = pytest.mark.e2e

PROMPT = "Question: Tom has 12 apples and buys 7 more. How many apples does Tom have?\nAnswer:"
GREEDY = {"temperature": 0, "max_new_tokens": 48}


def generate(client: httpx.Client, **body: Any) -> Any:
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    events = []
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def internal_state(client: httpx.Client) -> dict[str, Any]:
    state: dict[str, Any] = client.get("/server_info").json()["internal_states"][0]
    return state


def wait_until_idle(client: httpx.Client) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE
    while True:
        state = internal_state(client)
        if not state["num_running_reqs"] and not state["num_queue_reqs"]:
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def test_greedy_text_is_reproducible_and_streams_the_same(client: httpx.Client) -> None:
    first = generate(client, text=PROMPT, sampling_params=GREEDY)
    again = generate(client, text=PROMPT, sampling_params=GREEDY)
    assert first["text"] == again["text"]
    assert first["meta_info"]["prompt_tokens"] == again["meta_info"]["prompt_tokens"]
    events = stream(client, "/generate", text=PROMPT, sampling_params=GREEDY)
    assert events[-1]["text"] == first["text"]
    assert events[-1]["output_ids"] == first["output_ids"]
    for before, after in zip(events, events[1:]):
        assert after["text"].startswith(before["text"])


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_no_process_loads_what_it_does_not_use(server: RunningServer) -> None:
    """transformers would load torch, and torch its compiler, which loads Triton."""
    maps = {role: Path(f"/proc/{pid}/maps").read_text() for role, pid in server.pids().items()}
    assert "libtorch" in maps["runner"] and "libtriton" not in maps["runner"]
    assert "libtorch" not in maps["server"] and "libtorch" not in maps["scheduler"]


def test_stop_string_cuts_the_greedy_text(client: httpx.Client) -> None:
    whole = generate(client, text=PROMPT, sampling_params=GREEDY)["text"]
    stop = whole[10:14]
    cut = generate(client, text=PROMPT, sampling_params={**GREEDY, "stop": stop})
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["meta_info"]["completion_tokens"] == len(cut["output_ids"])


def test_seed_decides_the_samples(client: httpx.Client) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "n": 3, "sampling_seed": 11}
    first = [reply["text"] for reply in generate(client, text=PROMPT, sampling_params=sampling)]
    again = [reply["text"] for reply in generate(client, text=PROMPT, sampling_params=sampling)]
    assert first == again
    alone = generate(client, text=PROMPT, sampling_params={**sampling, "n": 1})
    assert alone["text"] == first[0]


def test_batch_equals_requests_one_by_one(client: httpx.Client) -> None:
    prompts = [PROMPT, "Question: What is 3 plus 4?\nAnswer:", "Hello"]
    batch = generate(client, text=prompts, sampling_params=GREEDY)
    alone = [generate(client, text=text, sampling_params=GREEDY)["text"] for text in prompts]
    assert [reply["text"] for reply in batch] == alone


def test_logprobs_of_prompt_and_output(client: httpx.Client) -> None:
    reply = generate(
        client,
        text=PROMPT,
        sampling_params={"temperature": 0, "max_new_tokens": 5},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(entry[0] <= 0 for entry in meta["input_token_logprobs"][1:])
    assert "".join(entry[2] for entry in meta["input_token_logprobs"]) == PROMPT
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    for own, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"]):
        assert top[0][:2] == own[:2]  # greedy takes the best
        assert len(top) == 2


def test_prefill_only_fills_the_cache(client: httpx.Client) -> None:
    text = "A prompt that nobody else sends, long enough to be worth a checkpoint. " * 3
    reply = generate(client, text=text, sampling_params={"max_new_tokens": 0})
    assert reply["text"] == "" and reply["output_ids"] == []
    longer = generate(client, text=text + "More.", sampling_params={"max_new_tokens": 1})
    assert longer["meta_info"]["cached_tokens"] > 0
    assert client.post(f"/flush_cache?timeout={PATIENCE:g}").status_code == 200
    cold = generate(client, text=text + "More.", sampling_params={"max_new_tokens": 1})
    assert cold["meta_info"]["cached_tokens"] == 0


def test_client_that_leaves_frees_its_request(client: httpx.Client) -> None:
    before = wait_until_idle(client)["num_aborted_requests_total"]
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True}}
    with client.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        next(reply.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=body, timeout=httpx.Timeout(PATIENCE, read=0.3))
    assert wait_until_idle(client)["num_aborted_requests_total"] == before + 2


def test_abort_by_rid(client: httpx.Client) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        before = wait_until_idle(client)["generation_tokens_total"]
        sampling = {"max_new_tokens": 7000, "ignore_eos": True}
        task = pool.submit(generate, client, text=PROMPT, rid="r10", sampling_params=sampling)
        while internal_state(client)["generation_tokens_total"] == before:
            assert not task.done()
            time.sleep(0.02)
        assert client.post("/abort_request", json={"rid": "r1"}).json() == {"aborted": 0}
        assert not task.done()
        assert client.post("/abort_request", json={"rid": "r10"}).json() == {"aborted": 1}
        reply = task.result(PATIENCE)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["text"]
    wait_until_idle(client)


def test_health_answers_many_times_while_one_request_runs(client: httpx.Client) -> None:
    wait_until_idle(client)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sampling = {"max_new_tokens": 7000, "ignore_eos": True}
        body = {"text": [PROMPT] * 8, "rid": "load", "sampling_params": sampling}
        task = pool.submit(generate, client, **body)
        while internal_state(client)["num_running_reqs"] < 8:
            assert not task.done()
            time.sleep(0.02)
        for _ in range(20):
            assert client.get("/health").status_code == 200
        assert not task.done()
        assert client.post("/abort_request", json={"rid": "load"}).json() == {"aborted": 8}
    assert client.get("/health_generate").status_code == 200


def test_bad_requests_leave_the_server_alive(client: httpx.Client) -> None:
    for body in (b"{", b"[]", b'{"text": ""}', b'{"text": "a", "sampling_params": {"top_p": 0}}'):
        reply = client.post("/generate", content=body)
        assert reply.status_code == 400 and reply.json()["error"]["message"]
    too_long = client.post("/generate", json={"input_ids": [5] * 9000})
    assert too_long.status_code == 400 and "9000" in too_long.text
    assert generate(client, text="ok", sampling_params=GREEDY)["output_ids"]


def test_openai_routes_agree_with_generate(client: httpx.Client) -> None:
    expected = generate(client, text=PROMPT, sampling_params=GREEDY)["text"]
    body = {"model": "default", "prompt": PROMPT, "temperature": 0, "max_tokens": 48}
    reply = client.post("/v1/completions", json=body).json()
    assert reply["choices"][0]["text"] == expected
    events = stream(client, "/v1/completions", **body, stream_options={"include_usage": True})
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == expected
    assert events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]
    chat = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 16}
    whole = client.post("/v1/chat/completions", json={**chat, "temperature": 0}).json()
    pieces = stream(client, "/v1/chat/completions", **chat, temperature=0)
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]


def test_facts_and_metrics(client: httpx.Client) -> None:
    generate(client, text="ok", sampling_params=GREEDY)
    info = client.get("/get_model_info").json()
    assert info["max_model_len"] > 0 and info["model_type"] and info["architectures"]
    text = client.get("/metrics").text
    for stem in ("num_running_reqs", "token_usage", "generation_tokens_total", "gen_throughput"):
        assert f"mamba_eagle:{stem}{{" in text
    load = client.get("/get_load").json()
    assert load[0]["num_waiting_reqs"] == 0
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == info["max_model_len"]


def test_embeddings_are_the_same_cold_cached_and_in_a_batch(client: httpx.Client) -> None:
    texts = ["A bus has 12 seats. " * 9, "Two trains leave.", PROMPT]
    both = [client.post("/v1/embeddings", json={"input": texts}).json() for _ in range(2)]
    alone = [client.post("/v1/embeddings", json={"input": text}).json() for text in texts]
    for made in (both[1], {"data": [one["data"][0] for one in alone]}):
        for first, again in zip(both[0]["data"], made["data"], strict=True):
            assert again["embedding"] == pytest.approx(first["embedding"], abs=1e-5)
    first, second, third = (one["embedding"] for one in both[0]["data"])
    assert math.hypot(*first) == pytest.approx(1, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(first, second)) > 0.01
    assert both[0]["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


def test_scores_are_the_probabilities_of_the_next_token(client: httpx.Client) -> None:
    query, items = PROMPT.removesuffix("Answer:"), ["Answer:", "Answer: 12 + 7 ="]
    params = {"max_new_tokens": 1, "temperature": 0}
    asked = {"return_logprob": True, "top_logprobs_num": 8, "sampling_params": params}
    replies = generate(client, text=[query + item for item in items], **asked)
    best = [reply["meta_info"]["output_top_logprobs"][0] for reply in replies]
    body = {
        "query": query,
        "items": items,
        "label_token_ids": [[token for _, token, _ in row] for row in best],
        "return_token_logprobs": True,
    }
    made = client.post("/v1/score", json=body).json()
    for row, logprobs, scores in zip(best, made["token_logprobs"], made["scores"], strict=True):
        wanted = [logprob for logprob, _, _ in row]
        assert logprobs == pytest.approx(wanted, abs=1e-3)
        assert scores == pytest.approx([math.exp(value) for value in wanted], abs=1e-3)
