"""Streams that wait, streams of pieces, requests with a deadline, and their names."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import TOKENIZER, Others, listening, run, says, serving, silent
from tiny_tokenizer import EOS, spell

from mamba_eagle.chat.parse import OutputParser
from mamba_eagle.config import ServerConfig
from mamba_eagle.core import FinishReason, SamplingParams
from mamba_eagle.message import Abort, Generate, RequestOutput, TokenLogprob
from mamba_eagle.server.apis.openai.body import CompletionBody, OpenAIJob
from mamba_eagle.server.apis.openai.choice import ChatChoice, CompletionChoice
from mamba_eagle.server.apis.openai.parts import Written
from mamba_eagle.server.apis.sse import KEEP_ALIVE, updates
from mamba_eagle.tokenizer.sample import LiveRequest, Sample

PATHS = ("/generate", "/v1/completions")


def body(path: str, **more: object) -> dict[str, object]:
    if path == "/generate":
        return {"text": "hi", "sampling_params": {"max_new_tokens": 9}, **more}
    return {"model": "tiny", "prompt": "hi", "max_tokens": 9, **more}


@pytest.mark.parametrize("path", PATHS)
def test_a_silent_stream_says_that_it_lives(path: str) -> None:
    """Headers come, then comments, and an error that comes after them is an event."""

    async def test() -> None:
        async with serving(silent, sse_keep_alive=0.02) as server, listening(server.app) as client:
            asked = {"method": "POST", "url": path, "json": body(path, stream=True)}
            async with client.stream(**asked) as reply:
                assert reply.status_code == 200
                assert reply.headers["content-type"].startswith("text/event-stream")
                text = ""
                async for piece in reply.aiter_text():
                    text += piece
                    if text.count(KEEP_ALIVE.decode()) >= 3:
                        server.manager.fail("gone")  # again does nothing
            *comments, error = text.strip().split("\n\n")
            assert set(comments) == {KEEP_ALIVE.decode().strip()}
            assert "gone" in json.loads(error.removeprefix("data: "))["error"]["message"]

    run(test())


@pytest.mark.parametrize("by_flag", [False, True])
def test_pieces_add_up_to_the_reply(by_flag: bool) -> None:
    async def test() -> None:
        flag = {"incremental_streaming_output": True} if by_flag else {}
        async with serving(says("héllo wörld"), chunk=2, **flag) as server:
            wanted = body("/generate", return_logprob=True, top_logprobs_num=1)
            if not by_flag:
                wanted["incremental"] = True
            events = await server.events("/generate", **wanted)
            whole = (await server.post("/generate", **wanted)).json()
        assert "".join(event["text"] for event in events) == whole["text"]
        assert sum((event["output_ids"] for event in events), []) == whole["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            pieces = sum((event["meta_info"][name] for event in events), [])
            assert pieces == whole["meta_info"][name]
        assert events[-1]["meta_info"]["completion_tokens"] == 9

    run(test())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by_flag", [False, True])
def test_a_deadline_ends_the_request(path: str, by_flag: bool) -> None:
    async def test() -> None:
        flag = {"request_timeout": 0.05} if by_flag else {}
        async with serving(silent, **flag) as server:
            more = {"timeout": 60.0 if by_flag else 0.05}
            reply = await server.post(path, **body(path, **more))
            assert reply.status_code == 504
            assert "did not end within 0.05 s" in reply.json()["error"]["message"]
            assert reply.json()["error"]["type"] == "timeout_error"
            assert server.manager.num_live == 0
            while not any(isinstance(item, Abort) for item in server.engine.received):
                await asyncio.sleep(0.005)  # the engine hears of it
        async with serving(says("abc")) as server:  # in time
            for seconds in (60, 0):
                reply = await server.post(path, **body(path, timeout=seconds))
                assert reply.status_code == 200

    run(test())


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout", -1), ("timeout", "x"), ("timeout", 1e9), ("priority", 2**31)],
)
def test_wrong_times_are_refused_by_name(field: str, value: object) -> None:
    async def test() -> None:
        async with serving(silent, schedule_policy="priority") as server:
            reply = await server.post("/generate", **body("/generate", **{field: value}))
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == field

    run(test())


def test_priority_needs_its_policy() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            reply = await server.post("/generate", **body("/generate", priority=1))
            assert reply.status_code == 400
            assert "--schedule-policy priority" in reply.text

    run(test())


def test_a_request_keeps_the_name_that_it_came_with() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            for given, same in (("abc-1", True), ("x" * 129, False), ("", False)):
                reply = await server.client.get("/version", headers={"x-request-id": given})
                name = reply.headers["x-request-id"]
                assert (name == given) is same
                assert name
            reply = await server.post("/generate", text=1)
            assert reply.status_code == 400
            assert reply.headers["x-request-id"]

    run(test())


def test_evaluators_learn_about_the_tokenizer() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            facts = (await server.client.get("/tokenizer_info")).json()
            assert facts["eos_token"] == "</s>"
            assert facts["model_max_length"] == 64
            tokens = (await server.post("/v1/tokenize", prompt="hé")).json()["tokens"]
            assert tokens == spell("hé")
            back = (await server.post("/v1/detokenize", tokens=tokens)).json()
            assert back == {"text": "hé", "prompt": "hé"}
            assert (await server.client.get("/ping")).status_code == 200
            assert set((await server.client.get("/version")).json()) == {"version"}
            assert facts["chat_template"] == TOKENIZER.hf.chat_template
        async with serving(silent, chat_template="{{ messages }}") as server:
            facts = (await server.client.get("/tokenizer_info")).json()
            assert facts["chat_template"] == "{{ messages }}"

    run(test())


def test_others_are_served_while_many_outputs_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(silent) as server:
            left: list[list[RequestOutput]] = [[]] * 100

            def receive(timeout_ms: int) -> list[RequestOutput] | None:
                time.sleep(0.001)  # what an output costs
                return left.pop() if left else None

            monkeypatch.setattr(server.manager._receiver, "receive", receive)
            server.manager._receive_all()
            assert left, "a turn ends before all are taken"
            while left:
                await asyncio.sleep(0)

    run(test())


def test_others_are_served_while_many_samples_have_news() -> None:
    async def test() -> None:
        prompt = Generate(rid="r", token_ids=[1], sampling=SamplingParams())
        live = LiveRequest("r")
        for index in range(100):
            sample = Sample(live, prompt, "r", f"r#{index}", index, None)
            live.samples.append(sample)
            sample.end(FinishReason(kind="length", length=0))
            live.tell(sample)
        others = Others()
        taken = 0
        async for _ in updates(live, lambda sample: 1):
            time.sleep(0.001)  # what a sample's reply costs
            taken += 1
        assert taken == 100 and others.leave() > 3

    run(test())


def job_of_two_words() -> Any:
    texts = iter(("some", " text"))
    news = {"new_text": lambda: next(texts), "input_logprobs": [], "logprobs": [], "traces": []}
    sample = SimpleNamespace(finish=None, index=0, **news)
    body = SimpleNamespace(return_meta_info=False, prompt_logprobs=None)
    rest = {"make_parser": OutputParser, "echoes": (), "logprobs": None}
    return SimpleNamespace(samples=[sample], body=body, **rest)


def test_a_chat_that_ends_while_its_news_are_sent_says_so_once() -> None:
    """A client that reads slowly: the end comes between two events."""
    job = job_of_two_words()
    choice, told = ChatChoice(job.samples[0], None, job), []  # type: ignore[arg-type]
    for _ in range(2):
        for piece in choice.pieces():
            told.append((piece["delta"].get("content"), piece["finish_reason"]))
            assert ("matched_stop" in piece) == (piece["finish_reason"] is not None)
            job.samples[0].finish = FinishReason(kind="stop")
    assert told == [("", None), ("some", None), (" text", None), (None, "stop")]


def test_a_sample_that_ends_while_its_news_are_sent_has_its_text_in_one_part() -> None:
    job = job_of_two_words()
    written, told = Written(job), []
    for _ in range(2):
        for news in written.news():
            told.append(news.what)
            job.samples[0].finish = FinishReason(kind="stop")
    assert told == ["opened", "more", "more", "closed"]
    assert [part.text for part in written.parts] == ["some text"]


def test_a_stream_of_token_ids_has_each_once() -> None:
    """Those without text, too, and the prompt's at the beginning alone."""
    prompt = Generate(rid="r", token_ids=[5, 6], sampling=SamplingParams())
    body = CompletionBody(prompt=[5, 6], return_token_ids=True)
    job = OpenAIJob(body, ServerConfig(model_path="tiny"), "r", [prompt])
    sample = Sample(job, prompt, "r", "r#0", 0, TOKENIZER.detokenizer([5, 6], True))
    choice, tokens = CompletionChoice(sample, TOKENIZER, job), [*spell("né"), EOS, *spell("x")]
    told = []
    for token in tokens:
        sample.take(RequestOutput(rid="r#0", token_ids=[token]))
        told += choice.pieces()
    assert [piece["token_ids"] for piece in told] == [[token] for token in tokens]
    assert [piece.get("prompt_token_ids") for piece in told] == [[5, 6], None, None, None, None]


def test_others_are_served_while_logprobs_of_a_long_prompt_become_json() -> None:
    prompt = Generate(rid="r", token_ids=[5] * 1000, sampling=SamplingParams())
    body = CompletionBody(prompt="x", prompt_logprobs=64)
    job = OpenAIJob(body, ServerConfig(model_path="tiny"), "r", [prompt])
    sample = Sample(job, prompt, "r", "r#0", 0, None)
    best = [(-1.0 - i, i) for i in range(64)]
    sample.input_logprobs = [TokenLogprob(5, -6.0, best) for _ in range(1000)]
    choice = CompletionChoice(sample, TOKENIZER, job)
    choice.take_logprobs()

    async def test() -> None:
        others = Others()
        await choice.make_prompt_logprobs()
        assert others.leave() > 3
        entries = choice.prompt_logprobs()["prompt_logprobs"]
        assert len(entries) == 1000 and json.loads(bytes(entries[999]))["5"]["rank"] == 6

    run(test())
