"""A server whose model is split over processes, two parts in each of two pipeline stages, or one
stage on each of two nodes: the same texts, and all end together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
from ports import free_ports
from running_server import PATIENCE, RunningServer, assert_end, need_weights

from mamba_eagle.bench.batch import BatchEngine, greedy
from mamba_eagle.config import EngineConfig
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.eval.prompts import synthetic_prompts
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble

pytestmark = pytest.mark.e2e

PROMPTS, LENGTH, TOKENS = 6, 40, 32
ENDLESS = {"text": "Hello", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
RUNNERS = ("runner", "runner1", "runner2", "runner3")


class Expected(NamedTuple):
    prompts: list[list[int]]
    outputs: list[list[int]]  # one rank's


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    need_weights(EMBEDDED_MODEL, EMBEDDED_DRAFTERS["EAGLE"])
    sizes = ("--tp-size", "2", "--pp-size", "2")
    started = RunningServer("--device", "cpu", *sizes, "--check-ranks", "3")
    yield started.wait_until_ready()
    started.stop()


def start_nodes() -> tuple[RunningServer, RunningServer]:
    """Two machines, as far as they can tell: node 0 listens on an address of its own, and they
    share no folder. The rank that answers is on the second."""
    flags = ("--device", "cpu", "--pp-size", "2", "--check-ranks", "3", "--nnodes", "2")
    flags += ("--dist-init-addr", f"127.0.0.2:{free_ports(8)}", "--cluster-key", "k" * 16)
    first, other = (RunningServer(*flags, "--node-rank", rank) for rank in "01")
    return first, other


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[RunningServer, RunningServer]]:
    need_weights(EMBEDDED_MODEL, EMBEDDED_DRAFTERS["EAGLE"])
    first, other = start_nodes()
    yield first.wait_until_ready(), other
    first.stop()
    other.stop()


@pytest.fixture(scope="module")
def expected() -> Expected:
    need_weights(EMBEDDED_MODEL)
    config = EngineConfig(
        device="cpu",
        max_running_requests=PROMPTS,
        max_total_tokens=1000,
        speculative_algorithm="NONE",
    )
    runner = assemble(resolve(config))
    prompts = synthetic_prompts(resolve(config), runner.ready.vocab_size, PROMPTS, LENGTH)
    outputs = BatchEngine(resolve(config), runner).generate(prompts, greedy(TOKENS)).tokens
    return Expected(prompts, outputs)


def assert_answers(server: RunningServer, expected: Expected) -> None:
    """As one rank does, twice, the second time from the cache."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

    def ask(prompt: list[int]) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": sampling}
        return httpx.post(f"{server.base_url}/generate", json=body, timeout=PATIENCE).json()

    for _ in range(2):
        with ThreadPoolExecutor(PROMPTS) as pool:
            replies = list(pool.map(ask, expected.prompts))
        assert [reply["output_ids"] for reply in replies] == expected.outputs
    assert all(reply["meta_info"]["cached_tokens"] > 0 for reply in replies)


def test_several_ranks_answer_as_one(server: RunningServer, expected: Expected) -> None:
    """Drafts, batches and the cache included; their tables are compared every third step."""
    assert_answers(server, expected)
    info = httpx.get(f"{server.base_url}/server_info", timeout=PATIENCE).json()
    assert (info["tp_size"], info["pp_size"]) == (2, 2)


def test_a_killed_rank_ends_the_server(server: RunningServer) -> None:
    """The last test of this server: an open request gets an error, and no process is left."""
    pids = server.pids()
    assert set(pids) == {"server", "scheduler", *RUNNERS}
    with ThreadPoolExecutor() as pool:
        url = f"{server.base_url}/generate"
        open_request = pool.submit(httpx.post, url, json=ENDLESS, timeout=PATIENCE)
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=PATIENCE) as s:
            for _ in s.iter_text():
                os.kill(pids["runner1"], signal.SIGKILL)
                break
        reply = open_request.result(PATIENCE)
    assert reply.status_code == 500
    assert server.wait(PATIENCE) == 1
    ending = f"the runner1 process (pid {pids['runner1']}) was killed by SIGKILL"
    assert ending in server.output and ending in reply.json()["error"]["message"]
    assert_end(pids)
    assert server.leftovers() == []


def test_two_nodes_answer_as_one(
    nodes: tuple[RunningServer, RunningServer], expected: Expected
) -> None:
    first, other = nodes
    assert_answers(first, expected)
    info = httpx.get(f"{first.base_url}/server_info", timeout=PATIENCE).json()
    assert (info["pp_size"], info["nnodes"], info["cluster_key"]) == (2, 2, "***")
    assert set(first.pids()) == {"server", "scheduler", "runner"}
    assert set(other.pids()) == {"agent", "runner1"}


def test_a_lost_node_ends_the_others(nodes: tuple[RunningServer, RunningServer]) -> None:
    """The last test of these servers. The kernel takes the agent's rank along."""
    first, other = nodes
    pids = {**first.pids(), **other.pids()}
    with ThreadPoolExecutor() as pool:
        url = f"{first.base_url}/generate"
        open_request = pool.submit(httpx.post, url, json=ENDLESS, timeout=PATIENCE)
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=PATIENCE) as s:
            for _ in s.iter_text():
                os.kill(other.pids()["agent"], signal.SIGKILL)
                break
        reply = open_request.result(PATIENCE)
    assert first.wait(PATIENCE) == 1
    ending = first.output.splitlines()[-1]
    assert ending.startswith("mamba-eagle: the connection to node 1 (")
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == ending.removeprefix("mamba-eagle: ")
    assert_end(pids)
    assert first.leftovers() == []


def test_ctrl_c_at_node_zero_ends_all_nodes() -> None:
    first, other = start_nodes()
    other.wait_for_output("runner1 process: pid")
    first.process.send_signal(signal.SIGINT)
    assert first.wait(PATIENCE) == other.wait(PATIENCE) == 0
    pids = {**first.pids(), **other.pids()}
    assert_end(pids)
    assert first.leftovers() == other.leftovers() == []
    first.stop()
    other.stop()
