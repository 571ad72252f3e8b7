"""A server whose model is split over processes, two parts in each of two pipeline stages, or one
stage on each of two nodes of a Ray cluster: the same texts, and all end together."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from running_server import PATIENCE, RunningServer, assert_end, need_weights

from mamba_eagle.bench.batch import BatchEngine, greedy
from mamba_eagle.config import EngineConfig
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.eval.gsm8k import synthetic_prompts
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


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Two machines, as far as Ray can tell. A server that is started meanwhile finds them."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs mamba-eagle[ray]")
    sizes = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        cluster.add_node(**sizes)
        yield
    cluster.shutdown()


def start_nodes() -> RunningServer:
    """The rank that answers is on the second machine."""
    need_weights(EMBEDDED_MODEL, EMBEDDED_DRAFTERS["EAGLE"])
    flags = ("--device", "cpu", "--pp-size", "2", "--check-ranks", "3", "--nnodes", "2")
    return RunningServer(*flags)


@pytest.fixture(scope="module")
def nodes(ray_cluster: None) -> Iterator[RunningServer]:
    server = start_nodes()
    yield server.wait_until_ready()
    server.stop()


def far_pids(server: RunningServer) -> dict[str, int]:
    """Of the actor, and of the rank that is its child, as Ray passes on what it prints."""
    pattern = r"\(NodeRanks pid=(\d+).*? runner1 process: pid (\d+)$"
    found = re.search(pattern, server.output, re.MULTILINE)
    assert found is not None, server.output
    return {"actor": int(found[1]), "runner1": int(found[2])}


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


def wait_for_both(server: RunningServer) -> None:
    """Until two requests are open: one that comes after a death is refused."""
    url = f"{server.base_url}/get_load"
    while httpx.get(url, timeout=PATIENCE).json()[0]["num_reqs"] < 2:
        pass


def test_a_killed_rank_ends_the_server(server: RunningServer) -> None:
    """The last test of this server: an open request gets an error, and no process is left."""
    pids = server.pids()
    assert set(pids) == {"server", "scheduler", *RUNNERS}
    with ThreadPoolExecutor() as pool:
        url = f"{server.base_url}/generate"
        open_request = pool.submit(httpx.post, url, json=ENDLESS, timeout=PATIENCE)
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=PATIENCE) as s:
            for _ in s.iter_text():
                wait_for_both(server)
                os.kill(pids["runner1"], signal.SIGKILL)
                break
        reply = open_request.result(PATIENCE)
    assert reply.status_code == 500
    assert server.wait(PATIENCE) == 1
    ending = f"the runner1 process (pid {pids['runner1']}) was killed by SIGKILL"
    assert ending in server.output and ending in reply.json()["error"]["message"]
    assert_end(pids)
    assert server.leftovers() == []


@pytest.mark.gpu
def test_stages_on_gpus_answer_as_one(expected: Expected) -> None:
    """At the same time: messages are kernels, between steps that are captured."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    server = RunningServer("--device", "cuda", "--dtype", "float32", "--pp-size", "2")
    assert_answers(server.wait_until_ready(), expected)
    server.stop()


def test_without_a_cluster_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is one: Ray looks for its processes."""
    pytest.importorskip("ray", reason="needs mamba-eagle[ray]")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    server = start_nodes()
    assert server.wait(PATIENCE) == 2
    assert "needs a Ray cluster, and this machine in it" in server.output.splitlines()[-1]
    server.stop()


def test_two_nodes_answer_as_one(nodes: RunningServer, expected: Expected) -> None:
    assert_answers(nodes, expected)
    info = httpx.get(f"{nodes.base_url}/server_info", timeout=PATIENCE).json()
    assert (info["pp_size"], info["nnodes"]) == (2, 2)
    assert set(nodes.pids()) == {"server", "scheduler", "runner"}


def test_a_lost_node_ends_the_server(nodes: RunningServer) -> None:
    """The last test of this server. The kernel takes the actor's rank along."""
    far = far_pids(nodes)
    with ThreadPoolExecutor() as pool:
        url = f"{nodes.base_url}/generate"
        open_request = pool.submit(httpx.post, url, json=ENDLESS, timeout=PATIENCE)
        with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=PATIENCE) as s:
            for _ in s.iter_text():
                wait_for_both(nodes)
                os.kill(far["actor"], signal.SIGKILL)
                break
        reply = open_request.result(PATIENCE)
    assert nodes.wait(PATIENCE) == 1
    ending = nodes.output.splitlines()[-1]
    assert re.fullmatch(r"mamba-eagle: node 1 \(.*\) was lost: its Ray actor .*", ending)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == ending.removeprefix("mamba-eagle: ")
    assert_end({**nodes.pids(), **far})
    assert nodes.leftovers() == []


def test_a_signal_ends_all_nodes_and_their_room_is_free_again(ray_cluster: None) -> None:
    """A second server finds room, so the first has given its share of the machines back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        server = start_nodes()
        server.wait_for_output("runner1 process: pid")
        server.process.send_signal(number)
        assert server.wait(PATIENCE) == 0
        assert_end({**server.pids(), "runner1": far_pids(server)["runner1"]})
        assert server.leftovers() == []
        server.stop()
