"""Ranks that are killed while the prefix cache writes to one folder: the next server, of any number
of ranks, gives the same texts, and still hits what was written before."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from chaos_rig import PATIENCE, SCALE, SEED, Start, metric, report
from running_server import RunningServer

WAYS = [(2, 1), (1, 2), (1, 1)]  # TP x PP
ROUNDS = 1 + SCALE // 2  # the last one is left alone
PROMPTS = 24
TIERS = ("--host-cache-gb", "0.5", "--disk-cache-gb", "0.3")
FEW_STATES = ("--max-mamba-cache-size", "12", "--max-running-requests", "4")


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Three begin with each beginning."""
    firsts = [[rng.randrange(3, 500) for _ in range(200)] for _ in range(PROMPTS // 3)]
    return [[*first, *(rng.randrange(3, 500) for _ in range(60))] for first in firsts * 3]


def ask(server: RunningServer, prompt: list[int]) -> tuple[list[int], int] | None:
    """The output and how much of the prompt was cached; None if the server ends meanwhile."""
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    try:
        reply = httpx.post(f"{server.base_url}/generate", json=body, timeout=PATIENCE)
    except httpx.TransportError as error:
        assert not isinstance(error, httpx.TimeoutException), error
        return None
    if reply.status_code != 200:
        return None
    found = reply.json()
    return found["output_ids"], found["meta_info"]["cached_tokens"]


@pytest.mark.skipif(SCALE == 1, reason="a long form; test_tier_ranks.py has each moment once")
def test_ranks_killed_in_the_middle_of_writes_cost_hits_alone(start: Start, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    prompts = make_prompts(rng)
    plain = start("--disable-radix-cache").wait_until_ready()
    expected = [found[0] for prompt in prompts if (found := ask(plain, prompt)) is not None]
    plain.stop()
    assert len(expected) == len(prompts)
    answered = cached = lost = 0
    for number in range(ROUNDS):
        tp, pp = WAYS[number % 3] if number + 1 < ROUNDS else rng.choice(WAYS)
        ranks = ("--tp-size", str(tp), "--pp-size", str(pp))
        folder = ("--cache-dir", str(tmp_path / "cache"))
        server = start(*ranks, *folder, *TIERS, *FEW_STATES).wait_until_ready()
        runners = [pid for role, pid in server.pids().items() if role.startswith("runner")]
        order = rng.sample(range(PROMPTS), PROMPTS)
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(ask, server, prompts[prompt]) for prompt in order]
            if number + 1 < ROUNDS:
                replies[rng.randint(3, PROMPTS // 2)].result()
                time.sleep(rng.uniform(0, 0.3))
                os.kill(rng.choice(runners), signal.SIGKILL)
            found = [reply.result() for reply in replies]
        for prompt, reply in zip(order, found):
            if reply is not None:
                assert reply[0] == expected[prompt], f"prompt {prompt}, tp {tp}, pp {pp}"
                answered, cached = answered + 1, cached + reply[1]
        if number + 1 < ROUNDS:
            assert server.wait(PATIENCE) == 1
        else:
            assert None not in found
            lost = int(metric(server, "cache_lost_copies_total"))
            loaded = int(metric(server, "cache_loaded_tokens_total", 'tier="disk"'))
        server.stop()
    assert loaded > 0, "nothing that was written was there"
    counts = {"answered": answered, "cached_tokens": cached, "from_disk_at_last": loaded}
    counts |= {"lost": lost, "seed": SEED}
    report("tier kills", ROUNDS - 1, "kills", **counts)
