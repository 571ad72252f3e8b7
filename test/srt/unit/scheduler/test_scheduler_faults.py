"""A result that cannot be fails its own request; others get their texts, and no slot is lost."""

from __future__ import annotations

import logging
import random
import re

import fake_runner
import pytest
from fake_runner import EOS, VOCAB, FakeRunner, Fault, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, SamplingParams
from mamba_eagle.message import Generate, PrefillItem, RequestResult, TokenLogprob
from mamba_eagle.message.indices import indices
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.step_results import decode_problem, prefill_problem

TREE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}
SHAPES = {
    "decode": {"speculative_algorithm": "NONE"},
    "tree": {**TREE, "speculative_adaptive": False},
    "adaptive": TREE,
    "no-overlap": {"speculative_algorithm": "NONE", "disable_overlap_schedule": True},
    "no-cache": {**TREE, "disable_radix_cache": True},
}
FAULTS = {
    fake_runner.no_token: "no token: its logits are not finite, or every .* allowed_token_ids",
    fake_runner.outside_the_vocabulary: f"{VOCAB}\\], not all in the vocabulary of {VOCAB}",
    fake_runner.more_tokens_than_nodes: "accepted . nodes but returned 10. tokens",
    fake_runner.more_nodes_than_the_tree_has: "accepted nodes .* no path in a tree of",
    fake_runner.the_root_twice: r"accepted nodes \[0, 0\], which are no path",
    fake_runner.goes_on_after_a_stop: "went on after a stop token|no path in a tree of 1",
    fake_runner.stops_too_early: "stopped after .* output tokens, but min_new_tokens is 30",
    fake_runner.no_logprobs: "returned 0 logprobs for . tokens",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_one_request_fails_and_the_others_go_on(spoil, after, shape):
    rng = random.Random(f"{spoil.__name__} {after} {shape}")
    runner = FakeRunner(300, 12, 6, 400)
    server = Server(EngineConfig(**SHAPES[shape], chunked_prefill_size=32), runner, rng)
    trunk = [rng.randrange(VOCAB) for _ in range(40)]
    expected = {}
    for i in range(24):
        prompt = trunk[: rng.randint(0, 40)] + [i, *range(rng.randint(0, 9))]
        sampling = SamplingParams(max_new_tokens=40, min_new_tokens=30, seed=i)
        if i % 5 == 2:
            runner.faults[i] = Fault(after, spoil)
        expected[f"r{i}"] = expected_text(prompt, sampling)
        server.add(f"r{i}", prompt, sampling, return_logprob=True)
        server.step()
    server.finish()  # and all slots are free
    for rid, text in expected.items():
        finish = server.last[rid].finish
        if int(rid[1:]) in runner.faults:
            assert (finish.kind, finish.failure) == ("abort", Failure.INTERNAL)
            assert server.texts[rid] == text[: len(server.texts[rid])]
            assert after <= len(server.texts[rid]) < after + 8
        else:
            assert finish.kind in ("stop", "length") and server.texts[rid] == text
    assert server.scheduler.state()["num_aborted_requests_total"] == len(runner.faults)
    server.add("next", trunk, SamplingParams(max_new_tokens=5, seed=1000))
    server.finish()
    assert server.texts["next"] == expected_text(trunk, SamplingParams(max_new_tokens=5, seed=1000))


@pytest.mark.parametrize("rules, failure", [([[1, 2]], Failure.REFUSED), ([], Failure.INTERNAL)])
def test_rules_that_leave_no_token_are_the_clients_own(rules, failure):
    runner = FakeRunner(300, 12, 6, 400)
    server = Server(EngineConfig(**SHAPES["tree"]), runner, random.Random(1))
    runner.faults[1] = Fault(3, fake_runner.no_token)
    server.add("r", [5, 6], SamplingParams(max_new_tokens=9, seed=1, bad_word_ids=rules))
    server.finish()
    assert server.last["r"].finish.failure == failure


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_the_client_and_the_log_are_told_why(spoil, caplog):
    runner = FakeRunner(300, 12, 6, 400)
    runner.faults[3] = Fault(3, spoil)
    server = Server(EngineConfig(**SHAPES["tree"]), runner)
    sampling = SamplingParams(max_new_tokens=40, min_new_tokens=30, seed=3)
    rid = "a\nb"
    with caplog.at_level(logging.ERROR):
        server.add(rid, [1, 2, 3], sampling, return_logprob=True)
        server.finish()
    (line,) = caplog.messages
    tokens = len(server.texts[rid])
    assert (
        line == f"request {rid!r} failed after {tokens} tokens: {server.last[rid].finish.message}"
    )
    assert "\n" not in line
    assert re.search(FAULTS[spoil], line), line


def request(**sampling) -> Request:
    params = SamplingParams(**{"max_new_tokens": 5, "min_new_tokens": 3, **sampling})
    generate = Generate(rid="r", token_ids=[1, 2], sampling=params)
    return Request(generate, order=1, eos_token_ids=(EOS,), context_length=100)


@pytest.mark.parametrize(
    "tokens, nodes, problem",
    [
        ([1, 2, 3], [0, 1, 2], ""),
        ([1, 2, EOS], [0, 2, 3], ""),
        ([1, 2, 3, 4, EOS], [0, 1, 2, 3, 4], ""),
        ([], [], "no token"),
        ([1], [], "accepted 0 nodes but returned 1 tokens"),
        ([1, 2], [1, 2], r"nodes \[1, 2\]"),
        ([1, 2], [0, 6], r"nodes \[0, 6\], which are no path in a tree of 6"),
        ([1, 2, 3], [0, 2, 2], r"nodes \[0, 2, 2\]"),
        ([1, 2, 3], [0, 3, 2], r"nodes \[0, 3, 2\]"),
        ([1, -1], [0, 1], r"tokens \[1, -1\], not all in the vocabulary of 50"),
        ([1, 50], [0, 1], r"tokens \[1, 50\], not all in the vocabulary"),
        ([1, EOS], [0, 1], "stopped after 2 output tokens, but min_new_tokens is 3"),
        ([1, EOS, 2], [0, 1, 2], "went on after a stop token"),
        ([1] * 6, [0, 1, 2, 3, 4, 5], "6 output tokens in all, but max_new_tokens is 5"),
    ],
)
def test_what_a_decode_step_cannot_return(tokens, nodes, problem):
    found = decode_problem(request(), RequestResult(tokens=tokens, nodes=nodes), [*range(6)], VOCAB)
    assert (found == "") == (problem == "")
    assert re.search(problem, found), found


@pytest.mark.parametrize(
    "tokens, logprobs, problem",
    [
        ([1], 3, ""),
        ([], 3, "no token"),
        ([1, 2], 3, r"tokens \[1, 2\] after a prompt"),
        ([50], 3, r"tokens \[50\], not all"),
        ([EOS], 3, "stopped after 1 output tokens, but min_new_tokens is 3"),
        ([1], 0, "0 logprobs for 3 prompt tokens"),
        ([1], 4, "4 logprobs for 3 prompt tokens"),
    ],
)
def test_what_a_prompt_cannot_return(tokens, logprobs, problem):
    item = PrefillItem(
        slot=0, state_slot=0, start=4, token_ids=indices([1, 2, 3, 4]), kv_slots=indices(range(4))
    )
    item.logprob_start = 5
    result = RequestResult(tokens=tokens, input_logprobs=[TokenLogprob(1, -1.0)] * logprobs)
    asked = request()
    found = prefill_problem(asked, item, result, VOCAB)
    assert (found == "") == (problem == "")
    assert re.search(problem, found), found
    asked.asked.pooling = "last"
    if logprobs == 3:
        assert "0 bytes of an embedding" in prefill_problem(asked, item, result, VOCAB)
    item.is_last = False
    assert (prefill_problem(asked, item, result, VOCAB) == "") == (logprobs == 3)
