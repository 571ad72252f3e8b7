"""What each decode step drafted and accepted reaches the client that asks, and nobody else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fake_engine import length_of
from fake_runner import FakeRunner, Server
from runner_harness import Live, Proposal, Tiny, greedy, random_prompt, sampled
from server_harness import run, says, serving
from tiny_tokenizer import spell

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import StepTrace

torch.set_num_threads(1)

TREE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
    "speculative_adaptive": False,
}
PLAIN = {"speculative_algorithm": "NONE"}


def new_tokens(trace: StepTrace) -> list[int]:
    """What the step added to the text, if its accepted nodes are a path from the root."""
    assert trace.accepted[0] == 0
    for parent, node in zip(trace.accepted, trace.accepted[1:]):
        assert trace.parents[node] == parent
    return [trace.tokens[node] for node in trace.accepted[1:]] + [trace.bonus]


# ── the scheduler ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("settings", [TREE, PLAIN], ids=["tree", "none"])
@pytest.mark.parametrize("kv_slots", [120, 2000], ids=["retracted", "roomy"])
def test_traces_and_histograms_tell_the_whole_text(settings: dict[str, Any], kv_slots: int) -> None:
    """A retracted request keeps the traces it had; its prompt's second pass adds a token alone."""
    server = Server(EngineConfig(**settings), FakeRunner(kv_slots, 20, 8, 400))
    luck = random.Random(3)
    for i in range(8):
        prompt = [luck.randrange(50) for _ in range(10)]
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=i)
        server.add(f"r{i}", prompt, sampling, return_spec_trace=i % 2 == 0)
    server.finish()
    assert (server.scheduler.state()["num_retracted_reqs"] > 0) == (kv_slots == 120)
    assert set(server.traces) == {"r0", "r2", "r4", "r6"}
    for rid, traces in server.traces.items():
        text, output, at = server.texts[rid], server.last[rid], 0
        passes = 1
        for trace in traces:
            if trace.tokens[0] != text[at]:
                passes, at = passes + 1, at + 1
            made = new_tokens(trace)
            assert [trace.tokens[0], *made] == text[at : at + 1 + len(made)]
            at += len(made)
        assert passes + sum(len(trace.accepted) for trace in traces) == len(text) == 60
        assert 1 <= passes <= 1 + output.retractions
        if settings is TREE:
            drafts = [len(trace.accepted) - 1 for trace in traces]
            histogram = output.accept_histogram
            assert histogram == [drafts.count(i) for i in range(max(drafts) + 1)]
            assert output.verify_steps == len(traces)
            assert output.accepted_drafts == sum(drafts)
        else:
            assert output.accept_histogram == [] and output.verify_steps == 0
            assert all(len(trace.tokens) == 1 for trace in traces)


# ── the runner ───────────────────────────────────────────────────────────────────────────────


def assert_traces_are_the_drafters(live: Live, plain: bool) -> None:
    at = live.prompt_len
    for i, step in enumerate(live.steps):
        trace = step.trace
        assert trace is not None
        root = live.tokens[at]
        wanted = Proposal([root], [0], [0.0]) if plain else live.proposals[i]
        assert (trace.tokens, trace.parents, trace.scores) == wanted and trace.tokens[0] == root
        made = new_tokens(trace)
        assert made == live.tokens[at + 1 : at + 1 + len(made)] == step.tokens
        at += len(made)
    assert at + 1 == len(live.tokens)


@pytest.mark.parametrize("settings", ["tree", "tree-snapshot", "chain", "star", "none"])
def test_a_trace_is_what_was_proposed_and_what_became_of_it(tiny: Tiny, settings: str) -> None:
    """In a batch where not all ask, greedy and sampled, with a stop token in a path."""
    engine = tiny.engine(settings)
    free = engine.generate(random_prompt(19, 1), greedy(20)).output
    asked = {"return_spec_trace": True}
    lives = [
        engine.start(random_prompt(19, 1), greedy(20, stop_token_ids=[free[11]]), **asked),
        engine.start(random_prompt(7, 2), sampled(20, 5), **asked, cuts=(3,)),
        engine.start(random_prompt(26, 3), greedy(20)),
    ]
    engine.finish(lives)
    for live in lives[:2]:
        assert_traces_are_the_drafters(live, plain=settings == "none")
    assert [step.trace for step in lives[2].steps] == [None] * len(lives[2].steps)
    if settings != "none":
        assert max(len(step.nodes) for live in lives for step in live.steps) > 1


def test_the_next_request_in_a_slot_is_not_traced(tiny: Tiny) -> None:
    engine = tiny.engine("tree", max_running_requests=1)
    first = engine.generate(random_prompt(9, 1), greedy(6), return_spec_trace=True)
    second = engine.generate(random_prompt(9, 1), greedy(6))
    assert first.slot == second.slot and first.output == second.output
    assert all(step.trace is not None for step in first.steps)
    assert all(step.trace is None for step in second.steps)


# ── the reply ────────────────────────────────────────────────────────────────────────────────


def test_reply_has_a_trace_for_those_who_ask() -> None:
    async def test() -> None:
        async with serving(says("hello"), chunk=3) as server:
            meta = (await server.post("/generate", text="x", return_spec_trace=True)).json()[
                "meta_info"
            ]
            root, (h, e, ell, o) = 3, spell("helo")
            first, second = meta["spec_trace"]
            assert first == {
                "tokens": [root, h, e],
                "parents": [0, 0, 1],
                "scores": [0.0, -0.5, -1.0],
                "accepted": [0, 1, 2],
                "bonus": ell,
                "token_texts": ["\x00", "h", "e"],
                "bonus_text": "l",
            }
            assert (second["tokens"], second["bonus"]) == ([root, ell], o)
            for body in ({}, {"return_spec_trace": None}, {"return_spec_trace": False}):
                meta = (await server.post("/generate", text="x", **body)).json()["meta_info"]
                assert "spec_trace" not in meta

    run(test())


def test_each_prompt_says_for_itself_and_each_sample_has_its_own() -> None:
    async def test() -> None:
        async with serving(lambda r: (r.token_ids, length_of(r.token_ids)), chunk=4) as server:
            body = {"text": ["abcd", "e"], "sampling_params": [{"n": 2}, {"n": 1}]}
            replies = (
                await server.post("/generate", **body, return_spec_trace=[True, False])
            ).json()
            traces = [reply["meta_info"].get("spec_trace") for reply in replies]
            assert traces[0] == traces[1] and traces[0][0]["bonus_text"] == "d"
            assert traces[2] is None

    run(test())


def test_a_streams_events_have_each_step_once() -> None:
    async def test() -> None:
        async with serving(says("abcdefghij"), chunk=2) as server:
            server.engine.pause = 0.003
            body = {"text": "x", "return_spec_trace": True}
            whole = (await server.post("/generate", **body)).json()["meta_info"]["spec_trace"]
            events = await server.events("/generate", **body)
            parts = [event["meta_info"]["spec_trace"] for event in events]
            assert len(whole) == 5 and [step for part in parts for step in part] == whole
            assert max(map(len, parts)) < 5

    run(test())


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)]
)
def test_choices_of_openai_replies_have_each_step_once(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving(says("abcdefghij"), chunk=2) as server:
            server.engine.pause = 0.003
            generated = (await server.post("/generate", text="x", return_spec_trace=True)).json()
            steps = generated["meta_info"]["spec_trace"]
            asked = {**body, "return_spec_trace": True}
            (choice,) = (await server.post(path, **asked)).json()["choices"]
            made = [step["bonus_text"] for step in choice["spec_trace"]]
            assert made == [step["bonus_text"] for step in steps] and len(made) == 5
            choices = [event["choices"][0] for event in await server.events(path, **asked)]
            streamed = [each.get("spec_trace", []) for each in choices]
            assert [step for part in streamed for step in part] == choice["spec_trace"]
            assert max(map(len, streamed)) < 5
            assert "spec_trace" not in (await server.post(path, **body)).json()["choices"][0]

    run(test())


def test_a_step_comes_while_the_text_is_held_back() -> None:
    """The text of a stop string may be none; its step is one in any case."""

    async def test() -> None:
        async with serving(says("abcabc"), chunk=2) as server:
            server.engine.pause = 0.003
            body = {**CHAT, "stop": "abcabd", "return_spec_trace": True}
            events = await server.events("/v1/chat/completions", **body)
            choices = [event["choices"][0] for event in events]
            first = next(each for each in choices if "spec_trace" in each)
            assert not first["delta"].get("content") and first["finish_reason"] is None
            assert "".join(each["delta"].get("content", "") for each in choices) == "abcabc"

    run(test())


def test_without_tokenizer_a_trace_has_ids_alone() -> None:
    async def test() -> None:
        async with serving(says("ab"), chunk=2, tokenizer=None) as server:
            reply = (await server.post("/generate", input_ids=[5], return_spec_trace=True)).json()
            (step,) = reply["meta_info"]["spec_trace"]
            assert set(step) == {"tokens", "parents", "scores", "accepted", "bonus"}

    run(test())


def test_histogram_is_in_every_reply_and_in_the_metrics() -> None:
    async def test() -> None:
        async with serving(says("hello"), chunk=5) as server:
            histogram = [0, 0, 0, 0, 1]
            metas = [
                (await server.post("/generate", text="x")).json()["meta_info"],
                (await server.events("/generate", text="x"))[-1]["meta_info"],
            ]
            body = {"messages": [{"role": "user", "content": "hi"}], "return_meta_info": True}
            reply = (await server.post("/v1/chat/completions", **body)).json()
            metas.append(reply["choices"][0]["meta_info"])
            assert [meta["spec_accept_histogram"] for meta in metas] == [histogram] * 3
            text = (await server.client.get("/metrics")).text
            name = 'mamba_eagle:spec_verify_steps_total{accepted_drafts="4",model_name="tiny"}'
            assert f"{name} 3.0" in text

    run(test())
