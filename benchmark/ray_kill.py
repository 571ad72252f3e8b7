"""A replica on Ray is killed under load: which requests does it cost, and what does Ray add?

    .venv-ray/bin/python -m benchmark.ray_kill --results benchmark/results/cluster.jsonl

Two replicas serve streams, 8 at once; one replica is killed (SIGKILL) when a third of the requests
are done. Counts the requests that failed, and how many of them were sent after the kill, beside
what was open then. The time that Ray adds is the difference of medians of one-token requests
through Ray and to the server of a replica, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmark.lib.server import exit_on_sigterm, free_port
from mamba_eagle.bench import results

REQUESTS, CONCURRENCY, NEW_TOKENS, PAIRS = 90, 8, 160, 60
REPLICAS, START_SECONDS = 2, 300.0
FLAGS = ("--device", "cpu", "--cpu-threads", "1", "--max-total-tokens", "32768")
FLAGS_OF_URL = (HOST, PORT) = ("--host", "--port")
ACTOR = "ray::ServeReplica:mamba-eagle:Replica"


class Served(NamedTuple):
    """begin, end: seconds of time.monotonic."""

    begin: float
    end: float
    problem: str


class Replica(NamedTuple):
    """An actor of Ray, and the address of the server below it."""

    actor: psutil.Process
    url: str


def replicas(command: psutil.Process) -> list[Replica]:
    found = []
    for process in command.children(recursive=True):
        words: list[str] = []
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            words = process.cmdline()
        if words and words[0].startswith(ACTOR):
            lines = [child.cmdline() for child in process.children(recursive=True)]
            at = [[line[line.index(f) + 1] for f in FLAGS_OF_URL] for line in lines if HOST in line]
            found += [Replica(process, "http://{}:{}".format(*at[0]))] if at else []
    return found


async def ask(client: httpx.AsyncClient, number: int) -> Served:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"text": f"Question: {number} + 1 =", "sampling_params": sampling, "stream": True}
    begin, problem, last = time.monotonic(), "", ""
    try:
        async with client.stream("POST", "/generate", json=body) as reply:
            if reply.status_code != 200:
                problem = f"status {reply.status_code}"
            async for line in reply.aiter_lines():
                last = line or last
        if not problem and last != "data: [DONE]":
            problem = "the stream ended early"
    except httpx.HTTPError as error:
        problem = type(error).__name__
    return Served(begin, time.monotonic(), problem)


async def kill_under_load(url: str, command: psutil.Process) -> dict[str, Any]:
    served: list[Served] = []
    victim = replicas(command)[0]
    todo = iter(range(REQUESTS))
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def work() -> None:
            for number in todo:
                served.append(await ask(client, number))

        workers = [asyncio.create_task(work()) for _ in range(CONCURRENCY)]
        while len(served) < REQUESTS // 3:
            await asyncio.sleep(0.01)
        load = (await client.get(f"{victim.url}/get_load")).json()
        victim.actor.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.gather(*workers)
    failed = [one for one in served if one.problem]
    return {
        "name": "ray_replica_killed",
        "value": len(failed),
        "requests": len(served),
        "sent_after_the_kill": sum(one.begin > killed for one in failed),
        "open_at_the_kill": sum(one.begin <= killed < one.end for one in served),
        "on_the_replica": sum(rank["num_reqs"] for rank in load),
        "problems": sorted({one.problem for one in failed}),
    }


def added_time(url: str, direct: str) -> dict[str, Any]:
    """Milliseconds."""
    body = {"text": "Question: 1", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    times: dict[str, list[float]] = {url: [], direct: []}
    with httpx.Client(timeout=60, trust_env=False) as client:
        for _ in range(PAIRS):
            for base, values in times.items():
                begin = time.perf_counter()
                client.post(f"{base}/generate", json=body).raise_for_status()
                values.append(1e3 * (time.perf_counter() - begin))
    through, alone = (statistics.median(values) for values in times.values())
    added = round(through - alone, 1)
    rounded = {"through_ms": round(through, 1), "direct_ms": round(alone, 1)}
    return {"name": "added_ms_one_client", "value": added, **rounded}


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(url: str, process: subprocess.Popen[bytes]) -> float:
    """Seconds until both replicas are there; Ray says so as soon as one is."""
    begin, command = time.monotonic(), psutil.Process(process.pid)
    while time.monotonic() - begin < START_SECONDS:
        if process.poll() is not None:
            sys.exit("error: Ray ended; see its output above")
        if is_ready(url):
            found = replicas(command)
            if len(found) == REPLICAS and all(is_ready(replica.url) for replica in found):
                return time.monotonic() - begin
        time.sleep(0.2)
    sys.exit(f"error: not ready after {START_SECONDS:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--router", default="load", choices=("load", "prefix", "events"))
    parser.add_argument("--results", type=Path, metavar="FILE")
    args = parser.parse_args()
    exit_on_sigterm()
    port = free_port()
    line = [sys.executable, "-m", "mamba_eagle.cluster.ray_serve", "--num-replicas", str(REPLICAS)]
    line += ["--router", args.router, "--port", str(port), "--cpus-per-replica", "0.5"]
    process = subprocess.Popen([*line, "--", *FLAGS], env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    common = {
        "replicas": REPLICAS,
        "router": args.router,
        "ray": version("ray"),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        up = {"name": "ray_up_s", "value": round(wait_for(url, process), 1)}
        command = psutil.Process(process.pid)
        added = added_time(url, replicas(command)[0].url)
        killed = asyncio.run(kill_under_load(url, command))
        for values in (up, added, killed):
            print({**values, **common})
            if args.results:
                results.append(args.results, [{**values, **common}])
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    main()
