"""Replies, streams, several samples, aborts and disconnects, over a fake engine."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest
from fake_engine import length_of
from server_harness import PATIENCE, listening, run, says, serving, silent
from tiny_tokenizer import BOS, EOS, spell

from mamba_eagle.core import Failure, FinishReason
from mamba_eagle.message import Abort, FlushCache, Generate, StopAt

# An answer that takes minutes: it never ends before a test ends it.
LONG, ROOM = says("x" * 9000), {"context_length": 10_000}


def test_reply_has_what_clients_read() -> None:
    async def test() -> None:
        async with serving(says("hello"), chunk=2) as server:
            reply = (await server.post("/generate", text="hi", rid="mine")).json()
            meta = reply["meta_info"]
            assert reply["text"] == "hello"
            assert reply["output_ids"] == spell("hello")
            assert meta["id"] == "mine"
            assert meta["finish_reason"] == {"type": "length", "length": 5}
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 5)
            assert meta["cached_tokens"] == 1
            assert meta["e2e_latency"] > 0
            assert meta["weight_version"] == "default"
            assert (meta["spec_verify_ct"], meta["spec_accept_length"]) == (1, 5.0)
            assert meta["spec_accept_rate"] == 0.0

    run(test())


def test_put_works_as_post() -> None:
    async def test() -> None:
        async with serving(says("hello")) as server:
            reply = await server.client.put("/generate", json={"text": "hi"})
            assert reply.json()["text"] == "hello"

    run(test())


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_stop_string_is_told_to_the_engine(chunk: int) -> None:
    async def test() -> None:
        async with serving(says("one\n\nQuestion: two"), chunk) as server:
            body = {"text": "x", "sampling_params": {"stop": ["\n\nQuestion"]}}
            reply = (await server.post("/generate", **body)).json()
            assert reply["text"] == "one"
            assert reply["meta_info"]["completion_tokens"] == 13
            assert reply["meta_info"]["finish_reason"] == {
                "type": "stop",
                "matched": "\n\nQuestion",
            }
            if chunk < 100:  # else the engine had finished by itself
                (stop,) = server.engine.wait_for(StopAt)
                assert (stop.num_tokens, stop.matched) == (13, "\n\nQuestion")

    run(test())


def test_zero_new_tokens() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 0}}
            reply = (await server.post("/generate", **body)).json()
            assert (reply["text"], reply["output_ids"]) == ("", [])
            events = await server.events("/generate", **body)
            assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 0}

    run(test())


# ── streams ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk", [1, 3])
def test_stream_is_cumulative_and_ends_with_the_reply(chunk: int) -> None:
    async def test() -> None:
        async with serving(says("Grüße 🦅 END more"), chunk) as server:
            body = {"text": "x", "sampling_params": {"stop": "END"}}
            whole = (await server.post("/generate", **body)).json()
            events = await server.events("/generate", **body)
            text, count = "", 0
            for event in events:
                assert event["text"].startswith(text)
                assert len(event["output_ids"]) >= count
                text, count = event["text"], len(event["output_ids"])
                assert "\ufffd" not in text and "E" not in text
            reasons = [event["meta_info"]["finish_reason"] for event in events]
            assert reasons[:-1] == [None] * (len(events) - 1)
            for key in ("text", "output_ids"):
                assert events[-1][key] == whole[key]
            assert reasons[-1] == whole["meta_info"]["finish_reason"]
            assert "index" not in events[0]

    run(test())


def test_stream_interval_leaves_out_pieces_but_not_the_end() -> None:
    async def test() -> None:
        async with serving(says("abcdefghij"), stream_interval=4) as server:
            server.engine.pause = 0.005
            firsts = []
            while 1 not in firsts:  # on a busy machine several tokens may have come at once
                events = await server.events("/generate", text="x")
                counts = [len(event["output_ids"]) for event in events]
                assert counts[-1] == 10
                assert all(b - a >= 4 for a, b in zip(counts[:-2], counts[1:-1]))
                firsts.append(counts[0])
                assert len(firsts) < 100, "the first token waits for others"

    run(test())


def test_several_streams_carry_their_index() -> None:
    async def test() -> None:
        async with serving(lambda r: (r.token_ids, length_of(r.token_ids))) as server:
            events = await server.events("/generate", text=["abc", "de", "f"])
            last = {event["index"]: event["text"] for event in events}
            assert last == {0: "abc", 1: "de", 2: "f"}
            ends = [e["index"] for e in events if e["meta_info"]["finish_reason"]]
            assert sorted(ends) == [0, 1, 2]

    run(test())


# ── several prompts and samples ──────────────────────────────────────────────────────────────


def test_samples_have_own_names_and_seeds() -> None:
    async def seeds(**sampling: Any) -> list[int]:
        async with serving(says("x")) as server:
            body = {"text": "x", "rid": "r", "sampling_params": {"n": 3, **sampling}}
            replies = (await server.post("/generate", **body)).json()
            assert [reply["meta_info"]["id"] for reply in replies] == ["r_0", "r_1", "r_2"]
            return [item.sampling.seed for item in server.engine.of(Generate)]

    async def test() -> None:
        for name in ("sampling_seed", "seed"):
            first = await seeds(**{name: 7})
            assert first[0] == 7 and len(set(first)) == 3
            assert first == await seeds(**{name: 7})
        assert await seeds() != await seeds()

    run(test())


def test_batch_replies_in_order() -> None:
    async def test() -> None:
        async with serving(lambda r: (r.token_ids, length_of(r.token_ids))) as server:
            body = {"text": ["a", "bc"], "sampling_params": [{"n": 2}, {"n": 1}]}
            replies = (await server.post("/generate", **body)).json()
            assert [reply["text"] for reply in replies] == ["a", "a", "bc"]
            one = (await server.post("/generate", input_ids=[spell("q")])).json()
            assert [reply["text"] for reply in one] == ["q"]

    run(test())


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────


def test_logprobs_in_their_shapes() -> None:
    async def test() -> None:
        async with serving(says("ab")) as server:
            body = {
                "text": "xyz",
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 2,
                "return_text_in_logprobs": True,
            }
            meta = (await server.post("/generate", **body)).json()["meta_info"]
            x, y, z = spell("xyz")
            a, b = spell("ab")
            assert meta["input_token_logprobs"] == [[None, x, "x"], [-0.5, y, "y"], [-0.5, z, "z"]]
            assert meta["output_token_logprobs"] == [[-0.5, a, "a"], [-0.5, b, "b"]]
            assert meta["input_top_logprobs"][0] is None
            assert meta["output_top_logprobs"][1] == [[-0.5, b, "b"], [-1.5, 3, "\x00"]]
            body = {"text": "xyz", "return_logprob": True}
            for meta in (
                (await server.post("/generate", **body)).json()["meta_info"],
                (await server.events("/generate", **body))[-1]["meta_info"],
            ):
                assert meta["input_token_logprobs"] == []
                assert meta["output_token_logprobs"] == [[-0.5, a, None], [-0.5, b, None]]
                assert "output_top_logprobs" not in meta

    run(test())


def test_logprobs_end_with_the_stop_string() -> None:
    async def test() -> None:
        async with serving(says("abcd"), chunk=4) as server:
            body = {"text": "x", "return_logprob": True, "sampling_params": {"stop": "b"}}
            reply = (await server.post("/generate", **body)).json()
            assert len(reply["meta_info"]["output_token_logprobs"]) == 2

    run(test())


def test_long_logprobs_come_in_fewer_events() -> None:
    """Cumulative events of a stream grow with its square; from some size on they come rarer, and
    all of them together are a few times as long as the last."""

    async def test() -> None:
        async with serving(says("x" * 2000), context_length=4000) as server:
            server.engine.pause = 0.0005
            body = {"text": "x", "sampling_params": {"max_new_tokens": 400}}
            body |= {"return_logprob": True, "top_logprobs_num": 60}
            events = await server.events("/generate", **body)
            last = events[-1]["meta_info"]
            assert len(last["output_top_logprobs"]) == 400
            assert len(last["output_top_logprobs"][0]) == 60
            counts = [len(event["output_ids"]) for event in events]
            for event, count in zip(events, counts):
                assert len(event["meta_info"]["output_token_logprobs"]) == count
            # One by one they would be 200 times as long.
            assert sum(counts) < 20 * counts[-1]

    run(test())


# ── ends other than the usual ────────────────────────────────────────────────────────────────


def test_abort_is_exact_and_parents_end_their_samples() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            names = ["r1", "r10", "r2"]
            bodies: list[dict[str, Any]] = [{"text": "x", "rid": name} for name in names]
            bodies[2]["sampling_params"] = {"n": 3}
            tasks = [asyncio.ensure_future(server.post("/generate", **body)) for body in bodies]
            while server.manager.num_live < 5:
                await asyncio.sleep(0.005)
            for rid, left in (("r", 5), ("r1", 4), ("r2_1", 3), ("r2", 1)):
                await server.post("/abort_request", rid=rid)
                assert server.manager.num_live == left, rid
            reply = (await tasks[0]).json()
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
            assert len((await tasks[2]).json()) == 3
            assert not tasks[1].done()
            await server.post("/abort_request", abort_all=True)
            assert (await tasks[1]).status_code == 200
            aborted = [item.rid for item in server.engine.wait_for(Abort, 5)]
            assert sorted(aborted) == sorted(item.rid for item in server.engine.of(Generate))

    run(test())


def test_live_rid_is_refused_and_free_again_later() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            task = asyncio.ensure_future(server.post("/generate", text="x", rid="same"))
            while server.manager.num_live < 1:
                await asyncio.sleep(0.005)
            reply = await server.post("/generate", text="x", rid="same")
            assert reply.status_code == 400
            assert "rid = " in reply.json()["error"]["message"]
            await server.post("/abort_request", rid="same")
            await task
            server.engine.script = says("ok")
            assert (await server.post("/generate", text="x", rid="same")).json()["text"] == "ok"

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_aborts_its_samples(stream: bool) -> None:
    async def test() -> None:
        async with serving(silent) as server, listening(server.app) as client:
            body = {"text": "x", "stream": stream, "sampling_params": {"n": 2}}
            task = asyncio.ensure_future(client.post("/generate", json=body))
            while server.manager.num_live < 2:
                await asyncio.sleep(0.005)
            task.cancel()
            while server.manager.num_live:  # nothing else would end them
                await asyncio.sleep(0.001)
            assert len(server.engine.wait_for(Abort, 2)) == 2

    run(test())


def test_client_that_leaves_mid_stream_aborts() -> None:
    async def test() -> None:
        async with serving(LONG, **ROOM) as server, listening(server.app) as client:
            server.engine.pause = 0.02
            async with client.stream(
                "POST", "/generate", json={"text": "x", "stream": True}
            ) as reply:
                async for line in reply.aiter_lines():
                    assert line.startswith("data: ")
                    break
            while server.manager.num_live:
                await asyncio.sleep(0.001)
            assert len(server.engine.wait_for(Abort, 1)) == 1

    run(test())


def test_engine_death_is_an_error_for_everyone() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            tasks = [
                asyncio.ensure_future(server.post("/generate", text="x", stream=stream))
                for stream in (False, True)
            ]
            while server.manager.num_live < 2:
                await asyncio.sleep(0.005)
            server.manager.fail("the runner process (pid 5) was killed by SIGKILL")
            for task in tasks:
                reply = await task
                assert reply.status_code == 500
                assert "runner" in reply.json()["error"]["message"]
            for reply in (
                await server.post("/generate", text="x"),
                await server.client.get("/health"),
                await server.client.get("/server_info"),
            ):
                assert reply.status_code == 503
                assert "runner" in reply.json()["error"]["message"]

    run(test())


@pytest.mark.parametrize("publisher", ["zmq", "null"])
def test_routers_are_told_where_kv_events_are(publisher: str) -> None:
    events = {"publisher": publisher, "endpoint": "tcp://127.0.0.1:5600", "topic": "kv"}

    async def test() -> None:
        async with serving(says("a"), kv_events_config=json.dumps(events)) as server:
            told = (await server.client.get("/server_info")).json()["kv_events"]
            replay = {"replay_endpoint": "tcp://127.0.0.1:5558", "block_size": 16}
            assert told == (events | replay if publisher == "zmq" else None)

    run(test())


def test_engine_death_mid_stream_is_an_event() -> None:
    async def test() -> None:
        async with serving(LONG, **ROOM) as server:
            server.engine.pause = 0.02
            task = asyncio.ensure_future(server.events("/generate", text="x"))
            while not any(sample.told for sample in server.manager._live.named(None)):
                await asyncio.sleep(0.005)
            server.manager.fail("gone")
            events = await task
            assert events[-1]["error"]["message"] == "gone"
            assert events[-1]["error"]["code"] == 500

    run(test())


def prompt_of(path: str, text: str) -> dict[str, str]:
    return {"text" if "generate" in path else "prompt": text}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_abort_by_the_engine_has_its_status(path: str, stream: bool) -> None:
    async def test() -> None:
        reason = FinishReason("abort", message="too long for the pool", failure=Failure.REFUSED)
        async with serving(lambda request: ([], reason)) as server:
            reply = await server.post(path, **prompt_of(path, "x"), stream=stream)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"] == "too long for the pool"

    run(test())


# ── other routes ─────────────────────────────────────────────────────────────────────────────


def test_information_routes() -> None:
    async def test() -> None:
        async with serving(says("abc"), served_model_name="eagle", api_key="") as server:
            get = server.client.get
            assert (await get("/health")).status_code == 200
            assert (await server.client.head("/health")).status_code == 200
            assert (await get("/health_generate")).status_code == 200
            for path in ("/get_model_info", "/model_info"):
                info = (await get(path)).json()
                assert info["served_model_name"] == "eagle" and info["max_model_len"] == 64
                assert info["is_generation"] is True
            for path in ("/get_server_info", "/server_info"):
                info = (await get(path)).json()
                assert info["internal_states"][0]["last_gen_throughput"] == 12.5
                assert info["internal_states"][0]["avg_spec_accept_length"] == 1.0
                assert info["max_req_input_len"] == 63
                assert info["max_running_requests"] == 8 and info["max_checkpoints"] == 100
                assert info["speculation"] == {
                    "adaptive": True,
                    "current": "2x5x8",
                    "given_up": True,
                    "shapes": {"2x5x8": {"steps": 7, "accept_length": 2.5, "step_ms": 1.5}},
                }
            models = (await get("/v1/models")).json()["data"]
            assert (
                models[0]["id"] == "eagle" and (await get("/v1/models/eagle")).json() == models[0]
            )
            begin = datetime.fromisoformat(models[0]["created_at"])  # for Anthropic's client
            assert begin.timestamp() == models[0]["created"] and models[0]["type"] == "model"
            other = await get("/v1/models/some/other")
            assert other.status_code == 404 and '"some/other"' in other.json()["error"]["message"]
            assert (await get("/get_load")).json()[0]["num_reqs"] == 0
            assert (await get("/v1/loads")).json()["loads"][0]["num_waiting_reqs"] == 0
            page = await get("/")
            assert page.status_code == 200 and "<title>mamba-eagle" in page.text
            missing = await get("/nowhere")
            assert missing.status_code == 404 and "/nowhere" in missing.json()["error"]["message"]

    run(test())


def test_flush_waits_for_idle_as_long_as_told() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            assert (await server.client.post("/flush_cache")).status_code == 200
            assert (await server.client.get("/flush_cache")).status_code == 200
            task = asyncio.ensure_future(server.post("/generate", text="x", rid="a"))
            while server.manager.num_live < 1:
                await asyncio.sleep(0.005)
            assert (await server.client.post("/flush_cache")).status_code == 400
            path = f"/flush_cache?timeout={PATIENCE:g}"
            waiting = asyncio.ensure_future(server.client.post(path))
            await asyncio.sleep(0.1)
            await server.post("/abort_request", rid="a")
            assert (await waiting).status_code == 200
            await task
            assert (await server.client.post("/flush_cache?timeout=x")).status_code == 400

    run(test())


def test_an_engine_that_stood_still_with_the_server_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with serving(silent) as server:
            loop = asyncio.get_running_loop()
            asking = asyncio.ensure_future(server.client.get("/server_info"))
            while not server.manager.ask._waiting:
                await asyncio.sleep(0)
            clock = loop.time
            monkeypatch.setattr(loop, "time", lambda: clock() + 60)
            assert (await asking).status_code == 200

    run(test())


def test_tokenize_and_detokenize() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            reply = (await server.post("/tokenize", prompt="héllo")).json()
            assert reply == {"tokens": spell("héllo"), "count": 6, "max_model_len": 64}
            reply = (await server.post("/tokenize", text=["a", "bc"])).json()
            assert reply["count"] == [1, 2]
            tokens = [*spell("hé"), EOS]
            assert (await server.post("/detokenize", tokens=tokens)).json()["text"] == "hé"
            reply = await server.post("/detokenize", tokens=[tokens], skip_special_tokens=False)
            assert reply.json() == {"text": ["hé</s>"], "prompt": ["hé</s>"]}

    run(test())


def test_api_key_guards_all_but_health_and_the_page() -> None:
    async def test() -> None:
        async with serving(says("abc"), api_key="secret") as server:
            assert (await server.client.get("/health")).status_code == 200
            assert "API key" in (await server.client.get("/")).text
            assert (await server.post("/generate", text="a")).status_code == 401
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                reply = await server.client.get("/v1/models", headers=header)
                assert reply.status_code == 401 and "error" in reply.json()
            good = {"Authorization": "Bearer secret"}
            assert (await server.client.get("/v1/models", headers=good)).status_code == 200
            info = await server.client.get("/server_info", headers=good)
            assert "secret" not in info.text

    run(test())


def test_replies_are_counted_by_the_routes_that_gave_them() -> None:
    """Also where a path has an id; what clients make up is one route."""

    async def test() -> None:
        async with serving(says("a")) as server:
            for path in ("/v1/files/one", "/v1/files/two", "/nothing", "/v1/nothing"):
                assert (await server.client.get(path)).status_code == 404
            assert (await server.client.get("/generate")).status_code == 405
            lines = (await server.client.get("/metrics")).text.splitlines()
            counts = [line for line in lines if line.startswith("mamba_eagle:http_requests_total")]
            wanted = (("/v1/files/{id}", 404, 2), ("other", 404, 2), ("/generate", 405, 1))
            for route, status, count in wanted:
                labels = f'{{model_name="tiny",route="{route}",status="{status}"}}'
                assert f"mamba_eagle:http_requests_total{labels} {count}.0" in counts

    run(test())


def test_a_wait_is_counted_of_requests_that_make_no_token() -> None:
    async def test() -> None:
        async with serving(says("")) as server:
            for path, field in (("/generate", "text"), ("/v1/embeddings", "input")):
                assert (await server.post(path, **{field: "xyz"})).status_code == 200
            lines = (await server.client.get("/metrics")).text.splitlines()
            for name, count in (("queue_time", 2), ("time_to_first_token", 0)):
                name = f"mamba_eagle:{name}_seconds_count"
                assert f'{name}{{model_name="tiny"}} {count}.0' in lines

    run(test())


def test_metrics_count_what_was_served() -> None:
    async def test() -> None:
        async with serving(says("abcd"), chunk=2) as server:
            await server.post("/generate", text="xyz")
            text = (await server.client.get("/metrics")).text
            values = {}
            for line in text.splitlines():
                if not line.startswith("#"):
                    name, value = line.rsplit(" ", 1)
                    values[name.replace('{model_name="tiny"}', "")] = float(value)
            expected = {
                "prompt_tokens_total": 3,
                "generation_tokens_total": 4,
                "cached_tokens_total": 1,
                "num_requests_total": 1,
                "num_aborted_requests_total": 0,
                "time_to_first_token_seconds_count": 1,
                "inter_token_latency_seconds_count": 2,
                "e2e_request_latency_seconds_count": 1,
                "queue_time_seconds_count": 1,
                "spec_accept_length": 4,
                "num_running_reqs": 0,
                "spec_given_up": 1,
                "gen_throughput": 12.5,
                'spec_steps_total{model_name="tiny",shape="2x5x8"}': 7,
            }
            for name, value in expected.items():
                assert values["mamba_eagle:" + name] == value, name
            labels = '{model_name="tiny",route="/generate",status="200"}'
            assert values["mamba_eagle:http_requests_total" + labels] == 1
            labels = '{model_name="tiny",reason="length"}'
            assert values["mamba_eagle:finished_requests_total" + labels] == 1
            for name, value in values.items():  # under other servers' names
                if name.startswith("mamba_eagle:"):
                    assert values[name.replace("mamba_eagle:", "sglang:")] == value
            assert values["vllm:num_requests_running"] == 0
            assert values["vllm:inter_token_latency_seconds_count"] == 2
            assert 'vllm:time_to_first_token_seconds_bucket{le="0.005"' in text
            assert "# TYPE vllm:e2e_request_latency_seconds histogram" in text

    run(test())


# ── what clients differ in ───────────────────────────────────────────────────────────────────


def test_head_works_where_get_does() -> None:
    paths = "/ /health /health_generate /model_info /server_info /v1/models /v1/models/tiny"
    paths += " /get_load /v1/loads /metrics /get_model_info /get_server_info"

    async def test() -> None:
        async with serving(says("abc")) as server, listening(server.app) as client:
            for path in paths.split():
                got, head = await client.get(path), await client.head(path)
                assert (got.status_code, head.status_code) == (200, 200), path
                assert head.content == b""
                assert head.headers.get("content-type") == got.headers.get("content-type")
            assert (await client.head("/generate")).status_code == 405

    run(test())


def test_a_trailing_slash_makes_no_difference() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            for path in ("/v1/models/", "/health/", "/v1/models/tiny/", "/model_info//"):
                assert (await server.client.get(path)).status_code == 200, path
            for path in ("/generate/", "/v1/completions/"):
                reply = await server.post(path, **prompt_of(path, "a"))
                assert reply.status_code == 200, path
            assert (await server.client.get("/nowhere/")).status_code == 404

    run(test())


def test_a_root_path_makes_no_difference() -> None:
    async def test() -> None:
        async with serving(says("abc"), root_path="/llm", api_key="secret") as server:
            for path in ("/ready", "/llm/ready", "/llm"):
                assert (await server.client.get(path)).status_code == 200, path
            assert (await server.client.get("/llmready")).status_code == 401
            assert (await server.client.get("/llm/v1/models")).status_code == 401

    run(test())


def test_a_flush_ends_with_its_client() -> None:
    async def test() -> None:
        async with serving(silent) as server, listening(server.app) as client:
            live = asyncio.ensure_future(client.post("/generate", json={"text": "x"}))
            while not server.manager.num_live:
                await asyncio.sleep(0.005)
            flush = asyncio.ensure_future(client.post("/flush_cache?timeout=60"))
            while not server.engine.of(FlushCache):
                await asyncio.sleep(0.005)
            flush.cancel()
            while server.manager.ask._waiting:
                await asyncio.sleep(0.005)
            await server.all_heard()
            asked = len(server.engine.of(FlushCache))
            await asyncio.sleep(0.3)
            assert len(server.engine.of(FlushCache)) == asked
            live.cancel()

    run(test())


def test_stop_strings_stay_in_this_process() -> None:
    async def test() -> None:
        async with serving(says("abcd")) as server:
            sampling = {"stop": ["c", "zz"], "n": 2, "stop_token_ids": [7]}
            await server.post("/generate", text="x", sampling_params=sampling)
            for request in server.engine.of(Generate):
                assert request.sampling.stop == [] and request.sampling.stop_token_ids == [7]

    run(test())


def test_tiny_temperatures_are_greedy() -> None:
    async def test() -> None:
        async with serving(says("a")) as server:
            for value in (1e-9, 1e-300, 0):
                body = {"text": "x", "sampling_params": {"temperature": value}}
                assert (await server.post("/generate", **body)).status_code == 200
            assert {item.sampling.temperature for item in server.engine.of(Generate)} == {0.0}

    run(test())


def test_parameters_are_named_as_the_route_names_them() -> None:
    async def message(server: Any, path: str, **body: Any) -> str:
        reply = await server.post(path, **body)
        assert reply.status_code == 400
        return reply.json()["error"]["message"]

    async def test() -> None:
        async with serving(says("a")) as server:
            said = await message(server, "/v1/completions", prompt="x", min_tokens=40)
            assert said == "min_tokens = 40: must be between 0 and max_tokens (16)"
            chat = {"messages": [{"role": "user", "content": "x"}], "min_tokens": 4}
            path = "/v1/chat/completions"
            said = await message(server, path, **chat, max_completion_tokens=2)
            assert said == "min_tokens = 4: must be between 0 and max_completion_tokens (2)"
            said = await message(server, path, **chat, max_tokens=-1)
            assert "max_tokens = -1: must be 0 or more" in said
            params = {"max_new_tokens": 2**63}
            said = await message(server, "/generate", text="x", sampling_params=params)
            assert "max_new_tokens = 9223372036854775808" in said
            assert "between -2**63 and 2**63 - 1" in said
            every = {"stop_token_ids": list(range(300)), "min_new_tokens": 2}
            said = await message(server, "/generate", text="x", sampling_params=every)
            assert "sampling_params.stop_token_ids" in said and "min_new_tokens to 0" in said

    run(test())


@pytest.mark.parametrize("value", [None, "abc"])
def test_no_error_shows_another_clients_name(value: str | None) -> None:
    """What one request's rid is, another client learns from no message."""

    async def test() -> None:
        async with serving(silent, max_queued_requests=0) as server:
            task = asyncio.ensure_future(
                server.post("/generate", text=["x"] * 7, rid="somebodys-name")
            )
            while server.manager.num_live < 7:
                await asyncio.sleep(0.005)
            full = await server.post("/generate", text=["a", "b"], rid=value)
            unknown = await server.post("/abort_request", rid="other")
            for reply in (full, unknown, await server.client.post("/flush_cache")):
                assert "somebody" not in reply.text
            assert full.status_code == 503
            server.manager.fail("the engine is gone")
            assert "somebody" not in (await task).text

    run(test())


# ── OpenAI ───────────────────────────────────────────────────────────────────────────────────


def test_completions() -> None:
    async def test() -> None:
        async with serving(says("abc END d"), chunk=2) as server:
            body = {"model": "tiny", "prompt": "xy", "stop": "END", "n": 2, "max_tokens": 50}
            reply = (await server.post("/v1/completions", **body)).json()
            assert [choice["text"] for choice in reply["choices"]] == ["abc ", "abc "]
            assert reply["choices"][1]["index"] == 1
            assert reply["choices"][0]["finish_reason"] == "stop"
            usage = reply["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 14)
            options = {"include_usage": True}
            events = await server.events("/v1/completions", **body, stream_options=options)
            assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 14
            for index in (0, 1):
                mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
                assert "".join(choice["text"] for choice in mine) == "abc "
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_may_come_with_every_chunk(path: str) -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            body: dict[str, Any] = {"max_tokens": 3, "n": 2, "prompt": "hi"}
            if "chat" in path:
                messages = [{"role": "user", "content": body.pop("prompt")}]
                body = {**body, "messages": messages}
            whole = (await server.post(path, **body)).json()["usage"]
            options = {"include_usage": True, "continuous_usage_stats": True}
            *chunks, last = await server.events(path, **body, stream_options=options)
            assert last["usage"] == whole and last["choices"] == []
            ended = 0
            for index in (0, 1):  # each chunk's is that of its choice
                own = [c for c in chunks if c["choices"][0]["index"] == index]
                counts = [chunk["usage"]["completion_tokens"] for chunk in own]
                assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == 3
                usage = own[-1]["usage"]
                assert usage["total_tokens"] == usage["prompt_tokens"] + counts[-1]
                assert usage["prompt_tokens"] == whole["prompt_tokens"]
                ended += counts[-1]
            assert ended == whole["completion_tokens"]
            alone = await server.events(
                path, **body, stream_options={"continuous_usage_stats": True}
            )
            assert alone[-1]["choices"] and all(chunk["usage"] for chunk in alone)

    run(test())


def test_completions_with_echo_and_logprobs() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            body = {"prompt": "xy", "echo": True, "logprobs": 1, "max_tokens": 1}
            choice = (await server.post("/v1/completions", **body)).json()["choices"][0]
            assert choice["text"] == "xya"
            assert choice["logprobs"]["tokens"] == ["x", "y", "a"]
            assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
            assert choice["logprobs"]["top_logprobs"] == [None, {"y": -0.5}, {"a": -0.5}]
            assert choice["logprobs"]["text_offset"] == [0, 1, 2]
            assert choice["finish_reason"] == "length"
            many = {**body, "prompt": ["xy", "z"], "n": 2, "best_of": 3}
            choices = (await server.post("/v1/completions", **many)).json()["choices"]
            assert [choice["text"] for choice in choices] == ["xya", "xya", "za", "za"]

    run(test())


def test_offsets_of_logprobs_are_places_in_the_text() -> None:
    """Parts of characters, special tokens and other names of tokens move none."""
    tokens = [*spell("né"), EOS, *spell("x日y")]

    async def test() -> None:
        async with serving(lambda request: (tokens, length_of(tokens))) as server:
            body = {"prompt": [BOS, *spell("aéb")], "logprobs": 0, "ignore_eos": True}
            alone, prompt = [0, 1, 1, 2, 2, 3, 3, 3, 4], [0, 0, 1, 1, 2]
            whole = [0, 1, 1, 2, 6, 7, 7, 7, 8]
            for fields, text, places in [
                ({}, "néx日y", alone),
                ({"return_tokens_as_token_ids": True}, "néx日y", alone),
                ({"skip_special_tokens": False}, "né</s>x日y", whole),
                ({"echo": True}, "aébnéx日y", prompt + [3 + place for place in alone]),
            ]:
                reply = await server.post("/v1/completions", **body, **fields)
                choice = reply.json()["choices"][0]
                assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, places)

    run(test())


def test_logprobs_of_tokens_become_json_as_they_come() -> None:
    """Two million of them at the end would hold up all others for seconds."""

    async def test() -> None:
        async with serving(LONG, **ROOM) as server:
            sampling = {"max_tokens": 9000, "logprobs": 1}
            asked = server.post("/inference/v1/generate", token_ids=[5], sampling_params=sampling)
            posted, kept, made = asyncio.ensure_future(asked), 0, 0
            while not posted.done():
                await asyncio.sleep(0.005)
                for sample in server.manager._live.named(None):
                    kept, made = len(sample.logprobs), len(sample.output_ids)
            (choice,) = posted.result().json()["choices"]
            assert kept < made / 2
            best = [{"token": f"token_id:{spell('x')[0]}", "logprob": -0.5}]
            assert choice["logprobs"]["content"] == [{**best[0], "top_logprobs": best}] * 9000

    run(test())


def test_chat() -> None:
    async def test() -> None:
        async with serving(says("hello"), chunk=2) as server:
            messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
            body = {"messages": messages, "logprobs": True, "top_logprobs": 1, "seed": 3}
            reply = (await server.post("/v1/chat/completions", **body)).json()
            assert reply["object"] == "chat.completion"
            assert reply["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
            entry = reply["choices"][0]["logprobs"]["content"][0]
            assert (entry["token"], entry["bytes"]) == ("h", [104])
            (request,) = server.engine.of(Generate)
            assert request.token_ids == spell("user: hi\nassistant:")
            assert request.sampling.seed == 3
            assert request.sampling.max_new_tokens == 64 - len(request.token_ids)
            assert "meta_info" not in reply["choices"][0]
            body["return_meta_info"] = True  # sglang's evaluations
            reply = (await server.post("/v1/chat/completions", **body)).json()
            assert reply["choices"][0]["meta_info"]["spec_accept_length"] == 5.0
            events = await server.events("/v1/chat/completions", messages=messages)
            deltas = [event["choices"][0]["delta"] for event in events]
            assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
            assert "".join(delta.get("content", "") for delta in deltas) == "hello"
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert json.dumps(events).count('"finish_reason": "length"') == 1

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_no_answer(path: str, stream: bool) -> None:
    """OpenAI's clients know four finish reasons, and none of them means this."""

    async def test() -> None:
        async with serving(LONG, **ROOM) as server:
            server.engine.pause = 0.02
            messages = [{"role": "user", "content": "a"}]
            asked = {"messages": messages} if "chat" in path else {"prompt": "a"}
            body = {**asked, "max_tokens": 9000, "stream": stream}
            task = asyncio.ensure_future(server.post(path, **body, rid="mine"))
            while not any(sample.output_ids for sample in server.manager._live.named(None)):
                await asyncio.sleep(0.005)
            await server.post("/abort_request", rid="mine")
            reply = await task
            assert '"abort"' not in reply.text
            if stream:
                *pieces, error, done = reply.text.strip().split("\n\n")
                assert pieces and done == "data: [DONE]"
                content = json.loads(error.removeprefix("data: "))
            else:
                assert reply.status_code == 400
                content = reply.json()
            assert "ended: aborted by /abort_request" in content["error"]["message"]

    run(test())


def test_logprobs_of_a_prompt_without_text_are_echoed() -> None:
    async def test() -> None:
        async with serving(says("ab")) as server:
            body = {"prompt": [EOS, EOS], "echo": True, "logprobs": 0, "max_tokens": 1}
            choice = (await server.post("/v1/completions", **body)).json()["choices"][0]
            assert choice["text"] == "a"
            assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_logprobs_in_pieces_are_those_of_the_whole(path: str) -> None:
    async def test() -> None:
        async with serving(says("abcdefgh" * 3), chunk=2) as server:
            asked = {"logprobs": 2} if "chat" not in path else {"logprobs": True, "top_logprobs": 2}
            messages = [{"role": "user", "content": "x"}]
            body = {"messages": messages} if "chat" in path else {"prompt": "x"}
            body |= {"max_tokens": 24, **asked, "n": 2, "return_meta_info": True}
            whole = (await server.post(path, **body)).json()["choices"]
            events = await server.events(path, **body)
            for index in (0, 1):
                mine = [event["choices"][0] for event in events]
                mine = [choice for choice in mine if choice["index"] == index]
                joined: dict[str, list[Any]] = {}
                for choice in mine:
                    for name, items in (choice["logprobs"] or {}).items():
                        joined.setdefault(name, []).extend(items)
                assert joined == whole[index]["logprobs"]
                meta = whole[index]["meta_info"]
                assert len(meta["output_token_logprobs"]) == 24
                last = mine[-1]["meta_info"]
                assert last["output_token_logprobs"] == meta["output_token_logprobs"]

    run(test())


def test_cookies_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's reader takes time that grows with the square of a quoted one."""
    monkeypatch.setattr("starlette.requests.cookie_parser", None)

    async def test() -> None:
        async with serving(says("x")) as server:
            for path in ("/health", "/v1/models"):
                reply = await server.client.get(path, headers={"cookie": 'a="\\"\\""; b=c'})
                assert reply.status_code == 200, reply.text

    run(test())
