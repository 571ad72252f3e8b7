"""A server whose model is split over processes, two parts in each of two pipeline stages: the same
texts, and all end together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running_server import RunningServer, is_running, need_weights

from mamba_eagle.bench.batch import BatchEngine, greedy
from mamba_eagle.config import EngineConfig
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.eval.prompts import synthetic_prompts
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.model_runner import ModelRunner

pytestmark = pytest.mark.e2e

PROMPTS, LENGTH, TOKENS = 6, 40, 32
ENDLESS = {"text": "Hello", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
WAIT_SECONDS = 20
RUNNERS = ("runner", "runner1", "runner2", "runner3")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    need_weights(EMBEDDED_MODEL, EMBEDDED_DRAFTERS["EAGLE"])
    sizes = ("--tp-size", "2", "--pp-size", "2")
    started = RunningServer("--device", "cpu", *sizes, "--check-ranks", "3")
    yield started.wait_until_ready()
    started.stop()


def one_rank() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what one rank makes of them."""
    config = EngineConfig(
        device="cpu",
        max_running_requests=PROMPTS,
        max_total_tokens=1000,
        speculative_algorithm="NONE",
    )
    runner = ModelRunner(resolve(config))
    prompts = synthetic_prompts(resolve(config), runner.ready.vocab_size, PROMPTS, LENGTH)
    return prompts, BatchEngine(resolve(config), runner).generate(prompts, greedy(TOKENS)).tokens


def test_several_ranks_answer_as_one(server: RunningServer) -> None:
    """Drafts, batches and the cache included; their tables are compared every third step."""
    prompts, expected = one_rank()
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

    def ask(prompt: list[int]) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": sampling}
        return httpx.post(f"{server.base_url}/generate", json=body, timeout=60).json()

    for _ in range(2):
        with ThreadPoolExecutor(PROMPTS) as pool:
            replies = list(pool.map(ask, prompts))
        assert [reply["output_ids"] for reply in replies] == expected
    assert all(reply["meta_info"]["cached_tokens"] > 0 for reply in replies)
    info = httpx.get(f"{server.base_url}/server_info").json()
    assert (info["tp_size"], info["pp_size"]) == (2, 2)


def test_a_killed_rank_ends_the_server(server: RunningServer) -> None:
    """The last test of this server: an open request gets an error, and no process is left."""
    pids = server.pids()
    assert set(pids) == {"server", "scheduler", *RUNNERS}
    with ThreadPoolExecutor() as pool:
        url = f"{server.base_url}/generate"
        open_request = pool.submit(httpx.post, url, json=ENDLESS, timeout=WAIT_SECONDS)
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=WAIT_SECONDS) as s:
            for _ in s.iter_text():
                os.kill(pids["runner1"], signal.SIGKILL)
                break
        reply = open_request.result(WAIT_SECONDS)
    assert reply.status_code == 500
    assert server.wait(WAIT_SECONDS) == 1
    ending = f"the runner1 process (pid {pids['runner1']}) was killed by SIGKILL"
    assert ending in server.output and ending in reply.json()["error"]["message"]
    assert not any(map(is_running, pids.values()))
    assert server.leftovers() == []
