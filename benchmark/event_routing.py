"""Do KV events say what a cache will serve, and what does a router make of them?

    results=benchmark/results/scaleout.jsonl
    .venv-ray/bin/python -m benchmark.event_routing predict --results $results
    .venv-ray/bin/python -m benchmark.event_routing chats --results $results

.venv-ray has mamba-eagle[events]. ``predict``: chats on a server whose cache is too small for them.
Some turns go back: to the end of an earlier turn (an edit), or to any place (a cut). Before each
request an index of the server's events is asked what the cache has; its answer is compared with
the reply's ``cached_tokens``. The process with the index is killed (SIGKILL), twice, and another
one takes its place after some requests that nobody listened to.

``chats``: the load of ``benchmark.routers`` over two replicas on Ray. There is a cluster for each
router, and rounds take them in turn; each round's latencies are compared with its round robin's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmark.lib.server import ServerProcess, exit_on_sigterm, free_port
from benchmark.ray_kill import REPLICAS, replicas, wait_for
from benchmark.routers import FLAGS, Load, Setting, measure
from mamba_eagle.bench import results
from mamba_eagle.cluster.event_index import EventIndex
from mamba_eagle.cluster.replica import EventSource
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.events_config import BLOCK

REQUESTS, CLIENTS, CHATS, UNHEARD = 1200, 4, 24, 60
SMALL = ("--max-total-tokens", "8192", "--max-mamba-cache-size", "96")
EDITS, CUTS = 0.05, 0.02  # shares of all turns
THINK_SECONDS = 0.1  # what a request leaves to the cache is published a step or two after its reply
EVICTED = "mamba_eagle:cache_evicted_tokens_total"
LONGEST, NEW_TOKENS = 500, 24
ROUTERS = {
    "round robin": "benchmark.lib.round_robin:RoundRobin",
    "prefix": "prefix",
    "events": "events",
}


# ── what events predict ──────────────────────────────────────────────────────────────────────


def answer(source: EventSource, pipe: Connection) -> None:
    """Of the process with the index: token ids come, tokens that are cached go."""

    async def serve() -> None:
        index = EventIndex()
        await index.follow({"server": source})
        while True:
            overlaps = await index.overlaps(pipe.recv())
            pipe.send(overlaps.get("server", 0))

    asyncio.run(serve())


class Listener:
    """The index in a process that can be killed."""

    def __init__(self, source: EventSource) -> None:
        self._source, self._lock = source, threading.Lock()
        self.begin()

    def begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=answer, args=(self._source, theirs), daemon=True)
        self._process.start()
        self.predict([0])  # until it is there

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def predict(self, tokens: list[int]) -> int:
        with self._lock:
            self._pipe.send(tokens)
            found: int = self._pipe.recv()
            return found


class Chats:
    """Those of one client. ``turn`` sends the next message of one of them."""

    def __init__(self, url: str, number: int) -> None:
        self._rng = random.Random(number)
        self._client = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self._texts: list[list[int]] = [[] for _ in range(CHATS // CLIENTS)]
        self._ends: list[list[int]] = [[] for _ in self._texts]  # of the turns of each

    def turn(self, listener: Listener | None) -> dict[str, Any]:
        rng, place = self._rng, self._rng.randrange(len(self._texts))
        history, ends = self._texts[place], self._ends[place]
        luck, kind = rng.random(), "extension"
        if luck < EDITS and len(ends) > 1:
            history, kind = history[: rng.choice(ends[:-1])], "edit"
        elif EDITS < luck < EDITS + CUTS and len(history) > BLOCK:
            history, kind = history[: rng.randrange(BLOCK, len(history))], "cut"
        prompt = history + [rng.randrange(3, 900) for _ in range(rng.randint(10, 60))]
        time.sleep(THINK_SECONDS)
        predicted = listener.predict(prompt) if listener is not None else None
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        reply = self._client.post("/generate", json=body).raise_for_status().json()
        text = prompt + reply["output_ids"]
        ends = [end for end in ends if end <= len(history)] + [len(text)]
        goes_on = len(text) < LONGEST
        self._texts[place], self._ends[place] = (text, ends) if goes_on else ([], [])
        cached = reply["meta_info"]["cached_tokens"]
        return {"kind": kind, "cached": cached, "prompt": len(prompt), "predicted": predicted}


def predict(path: Path | None) -> None:
    port = free_port()
    source = EventSource(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{free_port()}")
    config = json.dumps({**source._asdict(), "buffer_steps": 100})  # too few: snapshots come
    flags = ("--device", "cpu", "--cpu-threads", "1", *SMALL, "--kv-events-config", config)
    turns: list[list[dict[str, Any]]] = []  # before the first kill, after it, after the second
    with ServerProcess(flags) as server, ThreadPoolExecutor(CLIENTS) as pool:
        server.wait_until_answering()
        clients = [Chats(server.base_url, number) for number in range(CLIENTS)]

        def send(count: int, listener: Listener | None) -> list[dict[str, Any]]:
            def work(client: Chats) -> list[dict[str, Any]]:
                return [client.turn(listener) for _ in range(count // CLIENTS)]

            return [turn for part in pool.map(work, clients) for turn in part]

        listener = Listener(source)
        for part in range(3):
            turns.append(send(REQUESTS // 3, listener))
            listener.kill()
            if part < 2:
                send(UNHEARD, None)
                listener.begin()
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=60, trust_env=False).text
    lines = [line for line in metrics.splitlines() if line.startswith(EVICTED)]
    evicted = round(float(lines[0].rpartition(" ")[2]))
    for name, parts in (("from the start", turns[:1]), ("after kills", turns[1:])):
        found = [turn for part in parts for turn in part]
        for kind in ("all", "extension", "edit", "cut"):
            few = [turn for turn in found if kind in ("all", turn["kind"])]
            report_errors(path, name, kind, few, evicted)


def report_errors(
    path: Path | None, name: str, kind: str, turns: list[dict[str, Any]], evicted: int
) -> None:
    errors = sorted(abs(turn["predicted"] - turn["cached"]) for turn in turns)
    line = {
        "name": "predicted_overlap_error_tokens",
        "listener": name,
        "kind": kind,
        "value": errors[math.ceil(0.95 * len(errors)) - 1],  # p95
        "p50": errors[len(errors) // 2],
        "max": errors[-1],
        "within_a_block": round(sum(error <= BLOCK for error in errors) / len(errors), 4),
        "requests": len(turns),
        "cached_share": round(
            sum(turn["cached"] for turn in turns) / sum(turn["prompt"] for turn in turns), 3
        ),
        "evicted_tokens": evicted,
        "flags": " ".join(SMALL),
    }
    write(path, line)


# ── what a router makes of them ──────────────────────────────────────────────────────────────


@contextmanager
def cluster(router: str) -> Iterator[tuple[str, list[str]]]:
    """Its address, and those of the servers below it."""
    port = free_port()
    line = [sys.executable, "-m", "mamba_eagle.cluster.ray_serve", "--num-replicas", str(REPLICAS)]
    line += ["--router", router, "--port", str(port), "--cpus-per-replica", "0.5", "--", *FLAGS]
    process = subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process)
        yield url, [replica.url for replica in replicas(psutil.Process(process.pid))]
    finally:
        process.terminate()
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def chats(path: Path | None, rounds: int) -> None:
    loads: dict[str, list[Load]] = {name: [] for name in ROUTERS}
    with ExitStack() as clusters:
        up = {name: clusters.enter_context(cluster(router)) for name, router in ROUTERS.items()}
        for number in range(rounds + 1):
            for name, (url, servers) in up.items():
                load = measure(url, Setting("ray", name), servers)
                if number:  # the first warms up
                    loads[name].append(load)
                    print(name, load, flush=True)
    robin = [load.mean_latency for load in loads["round robin"]]
    for name, found in loads.items():
        ratios = [load.mean_latency / base for load, base in zip(found, robin)]
        line = {
            "name": "router_chats",
            "gateway": f"ray {version('ray')}",
            "router": name,
            "cached_share": [round(load.cached_share, 3) for load in found],
            "split": [sorted(load.served) for load in found],
            "latency_to_round_robin": [round(ratio, 2) for ratio in ratios],
            "value": round(statistics.median(ratios), 2),
        }
        write(path, line)


def write(path: Path | None, line: dict[str, Any]) -> None:
    line |= {"ai-dynamo-runtime": version("ai-dynamo-runtime"), "model": EMBEDDED_MODEL.name}
    line["date"] = time.strftime("%Y-%m-%d")
    print(line)
    if path is not None:
        results.append(path, [line])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("predict", "chats"))
    parser.add_argument("--rounds", type=int, default=7, help="of chats")
    parser.add_argument("--results", type=Path, metavar="FILE")
    args = parser.parse_args()
    exit_on_sigterm()
    if args.what == "predict":
        predict(args.results)
    else:
        chats(args.results, args.rounds)


if __name__ == "__main__":
    main()
