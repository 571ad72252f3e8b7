"""No setting, no neighbour and no lack of memory changes a token: servers with random settings give
random requests what one without drafts and without a cache gives them.

In float32, on the embedded model. MAMBA_EAGLE_CHAOS_SEED gives other settings and requests.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest
from chaos_rig import PATIENCE, SCALE, SEED, Start, report
from exact_rig import (
    DRAFTERS,
    MODES,
    REFERENCE,
    Case,
    Comparison,
    ask_reference,
    random_bodies,
    random_flags,
)
from running_server import need_weights

from mamba_eagle.bench.soak import leaks
from mamba_eagle.embedded import EMBEDDED_DRAFTERS

ROUNDS = max(1, SCALE // 4)  # each has a server per drafter, and requests of its own
REQUESTS = 60 * min(SCALE, 4)  # per round, beside the crowd
COMMON = ("--device", "cpu", "--dtype", "float32")


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


@pytest.mark.timeout(900 * SCALE)
def test_no_setting_changes_a_reply(start: Start) -> None:
    need_weights(*EMBEDDED_DRAFTERS.values())
    print(f"MAMBA_EAGLE_CHAOS_SEED={SEED}")
    reference = start(*COMMON, *REFERENCE).wait_until_ready()
    total: Counter[str] = Counter()
    for number in range(ROUNDS):
        rng = random.Random(f"{SEED} {number}")
        bodies = random_bodies(rng, REQUESTS)
        cases = asyncio.run(ask_reference(reference, bodies))
        modes = [MODES[(i + number) % 2] for i in range(len(DRAFTERS))]
        settings = [
            random_flags(rng, drafter, mode, crowded=i == number % len(DRAFTERS))
            for i, (drafter, mode) in enumerate(zip(DRAFTERS, modes, strict=True))
        ]
        with ThreadPoolExecutor(2) as pool:
            tasks = [
                pool.submit(compare, start, flags, cases, f"{SEED} {number} {i}")
                for i, flags in enumerate(settings)
            ]
            outcomes = [task.result() for task in tasks]
        for outcome in outcomes:
            total.update(outcome.counts)
        problems = [problem for outcome in outcomes for problem in outcome.problems]
        assert not problems, f"seed {SEED}: {len(problems)} problems\n" + "\n".join(problems[:5])
    assert total["cut"] and total["retracted"], total
    tokens = total.pop("tokens")
    report("exact", tokens, "compared tokens", seed=SEED, differences=0, **total)
