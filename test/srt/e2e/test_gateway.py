"""SGLang's model gateway (smg), unchanged, in front of two servers: it reads their load."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ports import free_ports
from running_server import RunningServer

pytest.importorskip("smg", reason="the gateway is not installed: pip install smg")
START_SECONDS = 200


@pytest.fixture(scope="module")
def second(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server("--cpu-threads", "1")


@pytest.fixture(scope="module")
def gateway(
    server: RunningServer, second: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Its address."""
    port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("gateway") / "log.txt"
    command = [sys.executable, "-m", "smg", "launch", "--policy", "least_load"]
    command += ["--worker-urls", server.base_url, second.base_url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_both_work(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_until_both_work(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            workers = httpx.get(f"{url}/workers", timeout=30).json()["workers"]
        except (httpx.HTTPError, ValueError, KeyError):
            workers = []
        if sum(worker.get("is_healthy", False) for worker in workers) == 2:
            return
        time.sleep(0.3)
    pytest.fail(f"two workers were not healthy: {log.read_text()[-2000:]}")


def served(server: RunningServer) -> Counter[str]:
    """Replies by route, so far."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=120).text
    pattern = r'^mamba_eagle:http_requests_total\{.*route="([^"]*)".*\} (\S+)$'
    return Counter({route: float(n) for route, n in re.findall(pattern, text, re.MULTILINE)})


def test_requests_go_to_both_and_texts_are_a_servers_own(
    gateway: str, server: RunningServer, second: RunningServer
) -> None:
    bodies = [
        {"text": f"Question: {i}", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
        for i in range(12)
    ]
    before = [served(one)["/generate"] for one in (server, second)]

    async def ask(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            replies = await asyncio.gather(*[client.post("/generate", json=b) for b in bodies])
        return [reply.json()["text"] for reply in replies]

    texts = asyncio.run(ask(gateway))
    after = [served(one)["/generate"] for one in (server, second)]
    taken = [b - a for a, b in zip(before, after)]
    assert sum(taken) == 12 and min(taken) > 0
    assert texts == asyncio.run(ask(server.base_url))


def test_the_gateway_reads_loads(gateway: str, server: RunningServer) -> None:
    """In the form that /v1/loads has: else all of these would be 0."""
    info = httpx.get(f"{server.base_url}/server_info", timeout=120).json()
    deadline = time.monotonic() + START_SECONDS
    loads: list[dict[str, float]] = []
    while not loads and time.monotonic() < deadline:
        loads = httpx.get(f"{gateway}/get_loads", timeout=120).json()["loads"]
    for load in loads:
        assert load["max_total_num_tokens"] == info["max_total_num_tokens"]
        assert load["max_running_requests"] == info["max_running_requests"]
    assert loads
