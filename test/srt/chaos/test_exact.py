"""No setting, no neighbour and no lack of memory changes a token: servers with random settings give
random requests what one without drafts and without a cache gives them.

In float32 on a CPU, on the embedded model and on small random ones of other recurrences.
MAMBA_EAGLE_CHAOS_SEED gives other settings and requests. With MAMBA_EAGLE_EXACT_FLAGS="--device
cuda --dtype bfloat16 --exact" on a GPU, on the embedded model; then logprobs are equal to the bit.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from chaos_rig import PATIENCE, SCALE, SEED, Start, report
from exact_models import EMBEDDED, RANDOM, Target, random_target
from exact_rig import (
    COMMON,
    MODES,
    REFERENCE,
    Body,
    Case,
    Comparison,
    ask_reference,
    random_bodies,
    random_flags,
)
from running_server import RunningServer, need_weights

from benchmark.lib.client import StreamClient
from benchmark.lib.soak import leaks
from mamba_eagle.bench.client import Reply
from mamba_eagle.embedded import EMBEDDED_DRAFTERS

REQUESTS = 20 * min(SCALE, 12)  # per round, beside the crowd
ON_A_GPU = COMMON[:2] == ("--device", "cuda")


class Outcome(NamedTuple):
    counts: Counter[str]
    problems: list[str]


def compare(start: Start, flags: list[str], cases: list[Case], seed: str) -> Outcome:
    """All cases against one server of its own."""
    server = start(*COMMON, *flags).wait_until_ready()
    comparison = Comparison(server, cases, random.Random(seed))
    asyncio.run(comparison.run())
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
        # Flushing waits for the last plan to come back.
        assert client.post(f"/flush_cache?timeout={PATIENCE:g}").status_code == 200
        info = client.get("/server_info").json()
    server.stop()
    counts = comparison.counts
    counts.update(servers=1, retracted=info["internal_states"][0]["num_retracted_reqs"])
    problems = comparison.differences + leaks(info)
    if "Traceback" in server.output:
        problems.append(server.output[-3000:])
    return Outcome(counts, [f"{' '.join(flags)}\n{problem}" for problem in problems])


class Round(NamedTuple):
    """A model, with a server per drafter, and requests of its own."""

    target: Target
    drafters: tuple[str, ...]
    requests: int


def rounds(folder: Path) -> list[Round]:
    """The short form has few servers: two models, and no head to be trained."""
    if ON_A_GPU:
        return [Round(EMBEDDED, EMBEDDED.drafters[:4], REQUESTS)]
    if SCALE == 1:
        other = random_target(RANDOM[SEED % 3], folder / "other")
        drafters = random.Random(SEED).sample(EMBEDDED.drafters, 2)
        return [
            Round(EMBEDDED, tuple(drafters), REQUESTS),
            Round(other, (("STANDALONE", "NGRAM")[SEED % 2],), REQUESTS // 2),
        ]
    names = ("", *RANDOM)
    chosen = [names[(SEED + number) % len(names)] for number in range(max(1, SCALE // 4))]
    targets = [random_target(name, folder / name) if name else EMBEDDED for name in chosen]
    return [Round(target, target.drafters, REQUESTS) for target in targets]


@pytest.mark.timeout(900 * SCALE)
def test_no_setting_changes_a_reply(start: Start, tmp_path: Path) -> None:
    need_weights(*EMBEDDED_DRAFTERS.values())
    print(f"MAMBA_EAGLE_CHAOS_SEED={SEED}")
    total: Counter[str] = Counter()
    for number, one in enumerate(rounds(tmp_path)):
        outcomes = run_round(start, one, number)
        for outcome in outcomes:
            total.update(outcome.counts)
        problems = [problem for outcome in outcomes for problem in outcome.problems]
        assert not problems, f"seed {SEED}: {len(problems)} problems\n" + "\n".join(problems[:5])
    assert total["cut"] and total["retracted"], total
    tokens = total.pop("tokens")
    report("exact", tokens, "compared tokens", seed=SEED, differences=0, **total)


def run_round(start: Start, one: Round, number: int) -> list[Outcome]:
    rng, target = random.Random(f"{SEED} {number}"), one.target
    reference = start(*COMMON, *target.flags, *REFERENCE).wait_until_ready()
    cases = asyncio.run(ask_reference(reference, random_bodies(rng, one.requests)))
    reference.stop()
    settings = [
        [
            *target.flags,
            *target.drafting(drafter),
            *random_flags(rng, drafter, MODES[(i + number) % 2], i == number % len(one.drafters)),
        ]
        for i, drafter in enumerate(one.drafters)
    ]
    with ThreadPoolExecutor(2) as pool:
        tasks = [
            pool.submit(compare, start, flags, cases, f"{SEED} {number} {i}")
            for i, flags in enumerate(settings)
        ]
        outcomes = [task.result() for task in tasks]
    tokens = sum(outcome.counts["tokens"] for outcome in outcomes)
    print(f"{target.name}: {tokens} tokens with {', '.join(one.drafters)}")
    for outcome in outcomes:
        outcome.counts[f"{target.name} tokens"] = outcome.counts["tokens"]
    return outcomes


@pytest.mark.timeout(900 * SCALE)
# with int4 lm_head has eight bits
@pytest.mark.parametrize("quantization", ["int8", "int4"] if SCALE > 1 else ["int4"])
def test_prompts_have_the_same_bits_in_any_batch_and_any_pieces(
    start: Start, quantization: str
) -> None:
    """Texts and every logprob are equal: alone and side by side, in chunks of any size, with a
    cache whose states stand at other positions, and through drafts."""
    need_weights(*EMBEDDED_DRAFTERS.values())
    rng = random.Random(f"{SEED} {quantization}")
    sampling = {"max_new_tokens": 24, "temperature": 0}
    bodies = [
        {**body, "return_logprob": True, "sampling_params": sampling}
        for body in random_bodies(rng, 120 if SCALE > 1 else 24)
        if "input_ids" in body
    ][: 60 if SCALE > 1 else 12]
    common, cache = (*COMMON, "--quantization", quantization), ("--speculative-algorithm", "NONE")
    exact, compared = asked(start(*common, *REFERENCE), bodies, [1])[0], 0
    servers = [
        (*REFERENCE, "--chunked-prefill-size", "16"),
        (*cache, "--chunked-prefill-size", "40", "--mamba-checkpoint-interval", "16"),
        ("--chunked-prefill-size", "auto"),
    ]
    for flags in servers if SCALE > 1 else servers[1:2]:
        for replies in asked(start(*common, *flags), bodies, [1, 2, 4, 8, 30][-SCALE - 1 :]):
            differ = [pair for pair in zip(replies, exact, strict=True) if pair[0] != pair[1]]
            assert not differ, f"seed {SEED}, {flags}: {len(differ)} of {len(bodies)} differ"
            compared += len(bodies)
    report("prompt bits", compared, "compared replies", seed=SEED, quantization=quantization)


def asked(server: RunningServer, bodies: list[Body], batches: list[int]) -> list[list[str]]:
    """Tokens and logprobs of all replies as text, for each number of requests at a time."""

    async def ask() -> list[list[str]]:
        async with StreamClient(server.base_url, connections=max(batches)) as client:
            found = [await client.generate_all(bodies, parallel) for parallel in batches]
        return [[repr(told(reply)) for reply in replies] for replies in found]

    def told(reply: Reply) -> tuple[object, object]:
        return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]

    server.wait_until_ready()
    replies = asyncio.run(ask())
    server.stop()
    return replies
