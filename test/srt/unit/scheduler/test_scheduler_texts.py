"""Whatever the scheduler does, each request gets its own text, and no slot is lost.

Invariants go by their numbers in docs/design/invariants.md.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_runner import EOS, EarlierStage, FakeRunner, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.scheduler.speculation import PROBE_REQUEST_INTERVAL

TREE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
    "speculative_adaptive": False,
}
SHAPES = {
    "decode": {"speculative_algorithm": "NONE"},
    "tree": TREE,
    "adaptive": {**TREE, "speculative_adaptive": True},
    "tree-told-all-tokens": {**TREE, "speculative_algorithm": "NGRAM"},
}
POOLS = {  # kv slots, state slots, request slots
    "roomy": (2000, 60, 8),
    "few-states": (2000, 5, 4),
    "one-state": (2000, 1, 4),
    "few-kv": (150, 40, 8),
    "tiny": (112, 3, 3),
}


def config(**settings) -> EngineConfig:
    defaults = {"chunked_prefill_size": 32, "mamba_checkpoint_interval": 16}
    return EngineConfig(**{**defaults, **settings})


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts with common prefixes of every kind, some equal."""
    trunks = [[rng.randrange(50) for _ in range(40)] for _ in range(2)]
    made = []
    for _ in range(count):
        prompt = rng.choice(trunks)[: rng.randint(0, 40)]
        prompt += [rng.randrange(50) for _ in range(rng.randint(1, 25))]
        made.append(rng.choice(made) if made and rng.random() < 0.15 else prompt)
    return made


def sampling_of(rng: random.Random) -> SamplingParams:
    most = rng.choice([0, 1, 2, 10, 30])
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=rng.choice([0, min(most, 3)]),
        ignore_eos=rng.random() < 0.6,
        stop_token_ids=rng.choice([[], [11]]),
        seed=rng.randrange(3),
        presence_penalty=rng.choice([0.0, 0.5]),
    )


def cache_hints(rng: random.Random, prompt_len: int) -> dict[str, Any]:
    count = rng.choice([0, 0, 1, 3]) if prompt_len > 1 else 0
    return {
        "salt": rng.choice(["", "", "x"]),
        "pin_seconds": rng.choice([0.0, 0.001, 100.0]),
        "checkpoints": [rng.randrange(1, prompt_len) for _ in range(count)],
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("mode", ["overlap", "no-overlap", "no-cache", "lpm", "no-spare"])
def test_same_text_cached_or_not_retracted_or_not(shape, pool, mode):
    """Invariants 4 and 6, after every step."""
    settings = {
        "overlap": {},
        "no-overlap": {"disable_overlap_schedule": True},
        "no-cache": {"disable_radix_cache": True},
        "lpm": {"schedule_policy": "lpm"},
        "no-spare": {"mamba_checkpoint_interval": 0, "chunked_prefill_size": 7},
    }[mode]
    rng = random.Random(f"{shape} {pool} {mode}")
    journals = {"overlap": 6, "no-overlap": 2, "lpm": 20, "no-spare": 3}.get(mode, 0)
    runner = FakeRunner(
        *POOLS[pool], 400, journals=journals, journal_rows=24, moves_anchors=mode != "lpm"
    )
    server = Server(config(**SHAPES[shape], **settings), runner, rng)
    wanted = {}
    for i, prompt in enumerate(prompts(rng, 25)):
        sampling = sampling_of(rng)
        wanted[f"r{i}"] = expected_text(prompt, sampling)
        server.add(f"r{i}", prompt, sampling)
        for _ in range(rng.choice([0, 0, 1, 6])):
            server.step()
    server.finish()
    assert server.texts == wanted
    for output in server.last.values():
        assert output.finish is not None
        assert output.completion_tokens == len(server.texts[output.rid])


@pytest.mark.parametrize("shape", SHAPES)
def test_retraction_happens_and_changes_no_text(shape):
    """Invariant 4: the tests above do exercise retraction."""
    rng = random.Random(1)
    server = Server(config(**SHAPES[shape]), FakeRunner(120, 20, 8, 400))
    wanted = {}
    for i in range(8):
        prompt = [rng.randrange(50) for _ in range(10)]
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=i)
        wanted[f"r{i}"] = expected_text(prompt, sampling)
        server.add(f"r{i}", prompt, sampling)
    server.finish()
    assert server.texts == wanted
    assert server.scheduler.state()["num_retracted_reqs"] > 0
    assert sum(output.retractions for output in server.last.values()) > 0


def test_retracted_requests_abort_and_stop_while_they_wait():
    server = Server(config(**TREE), FakeRunner(120, 20, 8, 400))
    for i in range(8):
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=i)
        server.add(f"r{i}", [i] * 10, sampling)
    ended = {}
    while not server.scheduler.idle:
        server.step()
        for request in list(server.scheduler.prefill.waiting):
            if request.retractions and request.num_output > 2 and len(ended) < 2:
                if not ended:
                    server.take(server.scheduler.abort(request.rid))
                    ended[request.rid] = "abort"
                elif request.rid not in ended:
                    server.take(server.scheduler.stop_at(request.rid, 2, "x"))
                    ended[request.rid] = "stop"
    server.finish()
    assert sorted(ended.values()) == ["abort", "stop"]
    for rid, kind in ended.items():
        assert server.last[rid].finish.kind == kind


@pytest.mark.parametrize("seed", range(12))
def test_aborts_and_stops_at_any_moment_free_all(seed):
    """Invariants 4, 6 and 7: the others' texts do not change."""
    rng = random.Random(seed)
    pool = rng.choice(list(POOLS.values()))
    settings = rng.choice([{}, {"disable_overlap_schedule": True}, {"disable_radix_cache": True}])
    settings.update(rng.choice(list(SHAPES.values())))
    runner = FakeRunner(*pool, 400, journals=seed % 5, journal_rows=24)
    server = Server(config(**settings), runner, rng)
    wanted, stopped = {}, {}
    for i, prompt in enumerate(prompts(rng, 60)):
        sampling = sampling_of(rng)
        rid = f"r{i}"
        wanted[rid] = expected_text(prompt, sampling)
        server.add(rid, prompt, sampling)
        for _ in range(rng.choice([0, 1, 3])):
            server.step()
        other = f"r{rng.randint(0, i)}"
        if rng.random() < 0.3:
            server.take(server.scheduler.abort(other))
        elif rng.random() < 0.4 and server.texts.get(other):
            kept = rng.randint(0, len(server.texts[other]))
            outputs = server.scheduler.stop_at(other, kept, "stop")
            stopped.update({other: kept} if outputs else {})
            server.take(outputs)
        if i == 30:
            for k in range(i + 1):
                server.take(server.scheduler.abort(f"r{k}"))
            assert not server.scheduler.busy
    server.finish()
    for rid, text in wanted.items():
        last = server.last[rid]
        if last.finish.kind == "abort":
            assert server.texts[rid] == text[: len(server.texts[rid])]
        elif rid in stopped:
            assert last.finish.matched == "stop" and last.completion_tokens == stopped[rid]
        else:
            assert server.texts[rid] == text


@pytest.mark.parametrize("shape", SHAPES)
def test_serving_a_then_b_then_a_again_gives_the_first_answer(shape):
    """Invariant 5."""
    server = Server(config(**SHAPES[shape]), FakeRunner(2000, 60, 8, 400))
    sampling = SamplingParams(max_new_tokens=20, seed=5)
    a, b = list(range(20)), [*range(15), 40, 41, 42]
    for rid, prompt in (("a1", a), ("b", b), ("a2", a)):
        server.add(rid, prompt, sampling)
        server.finish()
    assert server.texts["a1"] == server.texts["a2"] == expected_text(a, sampling)
    assert server.last["a2"].cached_tokens == len(a) - 1


def test_an_aborted_request_frees_all_within_one_step():
    """Invariant 7: the first plan after the results in flight releases it."""
    server = Server(config(**TREE, disable_radix_cache=True), FakeRunner(500, 8, 4, 400))
    server.add("r", list(range(40)), SamplingParams(max_new_tokens=100, ignore_eos=True))
    for _ in range(5):
        server.step()
    server.take(server.scheduler.abort("r"))
    while server.plans:
        server.take(server.scheduler.process(server.runner.execute(server.plans.popleft())))
    plan = server.scheduler.plan()
    assert plan is not None and len(plan.releases) == 1
    slots = server.scheduler.slots
    assert slots.kv.num_free == 500
    assert slots.states.num_free == 8
    assert slots.requests.num_free == 4


def test_finish_reasons():
    server = Server(config(), FakeRunner(2000, 60, 8, 400))
    prompt = [1, 2, 3]
    server.add("length", prompt, SamplingParams(max_new_tokens=5, ignore_eos=True))
    server.add("stop", prompt, SamplingParams(max_new_tokens=300))
    server.add("none", prompt, SamplingParams(max_new_tokens=0))
    server.finish()
    assert server.last["length"].finish.as_dict() == {"type": "length", "length": 5}
    assert server.last["stop"].finish.as_dict() == {"type": "stop", "matched": EOS}
    assert server.last["none"].finish.as_dict() == {"type": "length", "length": 0}
    assert server.texts["none"] == []


def test_input_logprobs_come_once_and_whole_whatever_is_cached():
    server = Server(config(**TREE, chunked_prefill_size=8), FakeRunner(2000, 60, 8, 400))
    prompt = list(range(30))
    sampling = SamplingParams(max_new_tokens=10, ignore_eos=True)
    for start in (-1, 0, 1, 8, 9, 17, 29):
        rid = f"from{start}"
        server.add(rid, prompt, sampling, return_logprob=True, logprob_start=start)
        server.finish()
        assert [each.token_id for each in server.logprobs[rid]] == server.texts[rid]
        positions = range(start, 30) if start >= 0 else []
        assert [each.token_id for each in server.input_logprobs[rid]] == list(positions)
        if start >= 0:
            assert server.last[rid].cached_tokens <= max(start - 1, 0)


@pytest.mark.parametrize("seed", [197, *range(10)])  # 197: a retraction once went on for ever
def test_any_mixture_of_settings_and_pools_serves_every_request(seed):
    """Invariants 4, 6 and 7, for pools that just hold the largest request."""
    rng = random.Random(seed)
    nodes = rng.choice([1, 2, 6, 8])
    shape = {"speculative_algorithm": "NONE"}
    if nodes > 1:
        shape = {
            **TREE,
            "speculative_num_draft_tokens": nodes,
            "speculative_num_steps": max(1, min(nodes - 1, rng.randint(1, 4))),
            "speculative_eagle_topk": rng.choice([1, 2, 3]),
        }
    settings = config(
        **shape,
        chunked_prefill_size=rng.choice([1, 5, 16, 32, 200]),
        mamba_checkpoint_interval=rng.choice([0, 4, 16]),
        disable_overlap_schedule=rng.random() < 0.3,
        disable_radix_cache=rng.random() < 0.15,
        schedule_policy=rng.choice(["fcfs", "lpm", "priority"]),
    )
    pool = [rng.choice(s) for s in ([115, 130, 160, 300, 2000], [1, 2, 3, 5, 9, 40], [1, 2, 4, 8])]
    journals = rng.choice([0, 1, 3, 30])
    sizes = (*pool, 400, rng.choice([0, 4, 9, 30]), journals, rng.choice([20, 40]))
    cohorts = 1 if seed == 197 else seed % 4 + 1
    earlier = EarlierStage(*sizes) if cohorts > 1 else None
    server = Server(settings, FakeRunner(*sizes, cohorts=cohorts), rng, earlier)
    wanted, stopped = {}, {}
    for i, prompt in enumerate(prompts(rng, 30)):
        sampling, rid = sampling_of(rng), f"r{i}"
        wanted[rid] = expected_text(prompt, sampling)
        start = rng.choice([-1, -1, rng.randrange(len(prompt))])
        hints = cache_hints(rng, len(prompt))
        logprobs = {"return_logprob": start >= 0, "logprob_start": start}
        priority = rng.choice([0, 0, -1, 2])
        server.add(rid, prompt, sampling, **logprobs, **hints, priority=priority)
        if rng.random() < 0.5:
            for _ in range(rng.choice([1, 3, 10])):
                server.step()
        other = f"r{rng.randint(0, i)}"
        if rng.random() < 0.1:
            server.take(server.scheduler.abort(other))
        elif rng.random() < 0.2 and server.texts.get(other):
            kept = rng.randint(0, len(server.texts[other]))
            outputs = server.scheduler.stop_at(other, kept, "stop")
            stopped.update({other: kept} if outputs else {})
            server.take(outputs)
    server.finish()
    for rid, text in wanted.items():
        finish = server.last[rid].finish
        if finish.kind == "abort":
            assert finish.message == "aborted"
        elif rid in stopped:
            assert server.last[rid].completion_tokens == stopped[rid]
        else:
            assert server.texts[rid] == text


@pytest.mark.parametrize("pool", POOLS)
def test_a_drafter_of_no_use_follows_one_request_of_some(pool):
    """And no text changes, whoever is tracked, retracted or aborted."""
    rng, requests = random.Random(5), 80
    runner = FakeRunner(*POOLS[pool], context=100)
    runner.drafts_accepted = False
    server = Server(config(**SHAPES["adaptive"]), runner, rng)
    expected = {}
    for number, prompt in enumerate(prompts(rng, requests)):
        how = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=number)
        server.add(f"{number}", prompt, how)
        expected[f"{number}"] = expected_text(prompt, how)
        for _ in range(12):
            server.step()
        if not server.scheduler.policy.disabled:
            before = runner.tracked
    server.finish()
    assert server.texts == expected
    assert 0 < runner.tracked - before <= requests // PROBE_REQUEST_INTERVAL
