"""Chats through a gateway over two servers: what their caches serve, the split, the latency.

    .venv/bin/python -m benchmark.routers --results benchmark/results/cluster.jsonl
    .venv/bin/python -m benchmark.routers --sglang-router .venv-router/bin/python   # it, too

16 chats of 5 turns, 8 at once, for each setting of each gateway; the servers' caches are flushed
before. Shares and splits are exact counts; latencies are compared with round robin in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmark.lib.server import ServerProcess, exit_on_sigterm, free_port
from mamba_eagle.bench import results
from mamba_eagle.embedded import EMBEDDED_MODEL

SESSIONS, TURNS, CONCURRENCY, NEW_TOKENS = 16, 5, 8, 48
FLAGS = ("--device", "cpu", "--cpu-threads", "1", "--max-total-tokens", "32768")
START_SECONDS = 90.0
KEY = "x-smg-routing-key"  # of gateways' policy manual
SPILL = "--cache-threshold 0.5 --balance-abs-threshold 2 --balance-rel-threshold 1.2"
MANUAL = "--policy manual --assignment-mode min_group"


class Setting(NamedTuple):
    """Of a gateway. ``keyed``: each chat names itself in a header."""

    gateway: str
    flags: str
    keyed: bool = False


SETTINGS = (
    Setting("none: one server", ""),
    Setting("smg", "--policy round_robin"),
    Setting("smg", "--policy least_load"),
    Setting("smg", "--policy cache_aware"),
    Setting("smg", f"--policy cache_aware {SPILL}"),
    Setting("smg", "--policy prefix_hash --prefix-token-count 16"),
    Setting("smg", MANUAL, keyed=True),
    Setting("sglang-router", "--policy round_robin"),
    Setting("sglang-router", "--policy cache_aware"),
    Setting("sglang-router", f"--policy cache_aware {SPILL}"),
    Setting("sglang-router", MANUAL, keyed=True),
)


class Load(NamedTuple):
    cached_share: float
    mean_latency: float  # seconds
    served: list[int]  # requests per server


@contextlib.contextmanager
def gateway(command: Sequence[str], setting: Setting, servers: Sequence[str]) -> Iterator[str]:
    """Its address, once it has found both servers."""
    port = free_port()
    line = [*command, "--worker-urls", *servers, "--host", "127.0.0.1", "--port", str(port)]
    line += ["--prometheus-port", str(free_port()), *shlex.split(setting.flags)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while _healthy(url) < len(servers):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(line)} did not find its servers")
            time.sleep(0.3)
        yield url
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> int:
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
        workers = httpx.get(f"{url}/workers", timeout=5).json()["workers"]
        return sum(worker.get("is_healthy", False) for worker in workers)
    return 0


def generated(server: str) -> int:
    """Replies of /generate so far."""
    start = "mamba_eagle:http_requests_total{"
    lines = httpx.get(f"{server}/metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith(start) and 'route="/generate"' in line]
    return sum(round(float(line.rpartition(" ")[2])) for line in found)


async def chat_load(url: str, keyed: bool) -> tuple[float, float]:
    """The cached share of the prompt tokens, and the mean latency in seconds."""
    rng = random.Random(0)
    lines = (EMBEDDED_MODEL.parent / "gsm8k_style_test.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    running = asyncio.Semaphore(CONCURRENCY)
    cached = prompt = 0
    latencies = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def chat(number: int) -> None:
            nonlocal cached, prompt
            text = ""
            for turn in range(TURNS):
                question = questions[(number * TURNS + turn) % len(questions)]
                text += f"Question: {question}\nAnswer:"
                sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
                body = {"text": text, "sampling_params": sampling}
                async with running:
                    begin = time.perf_counter()
                    headers = {KEY: f"chat-{number}"} if keyed else {}
                    reply = await client.post("/generate", json=body, headers=headers)
                    latencies.append(time.perf_counter() - begin)
                reply.raise_for_status()
                meta = reply.json()["meta_info"]
                cached, prompt = cached + meta["cached_tokens"], prompt + meta["prompt_tokens"]
                text += reply.json()["text"] + "\n\n"
                await asyncio.sleep(rng.random() * 0.05)

        await asyncio.gather(*map(chat, range(SESSIONS)))
    return cached / prompt, sum(latencies) / len(latencies)


def measure(url: str, setting: Setting, servers: Sequence[str]) -> Load:
    for server in servers:
        httpx.post(f"{server}/flush_cache", timeout=60).raise_for_status()
    before = [generated(server) for server in servers]
    share, latency = asyncio.run(chat_load(url, setting.keyed))
    served = [generated(server) - count for server, count in zip(servers, before)]
    return Load(share, latency, served)


def report(path: Path | None, setting: Setting, load: Load, robin: Load | None, name: str) -> None:
    ratio = round(load.mean_latency / robin.mean_latency, 2) if robin is not None else None
    split = "/".join(map(str, sorted(load.served)))
    key = ", a key per chat" if setting.keyed else ""
    print(f"| {name} `{setting.flags}`{key} | {load.cached_share:.3f} | {split} | {ratio} |")
    line = {
        "name": "router_chats",
        "gateway": name,
        "flags": setting.flags,
        "key_per_chat": setting.keyed,
        "cached_share": round(load.cached_share, 3),
        "split": sorted(load.served),
        "latency_to_round_robin": ratio,
        "chats": SESSIONS,
        "turns": TURNS,
        "concurrency": CONCURRENCY,
        "model": EMBEDDED_MODEL.name,
        "date": time.strftime("%Y-%m-%d"),
    }
    if path is not None:
        results.append(path, [line])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sglang-router", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--results", type=Path, metavar="FILE")
    args = parser.parse_args()
    exit_on_sigterm()
    programs = {"smg": ([sys.executable, "-m", "smg", "launch"], f"smg {version('smg')}")}
    if args.sglang_router:
        ask = "from importlib.metadata import version; print(version('sglang-router'))"
        found = subprocess.check_output([args.sglang_router, "-c", ask], text=True).strip()
        command = [args.sglang_router, "-m", "sglang_router.launch_router"]
        programs["sglang-router"] = (command, f"sglang-router {found}")
    print("| setting | cached share | split | latency / round robin |\n|---|---|---|---|")
    with ServerProcess(FLAGS) as first, ServerProcess(FLAGS) as second:
        servers = [first.base_url, second.base_url]
        robin: Load | None = None
        for setting in SETTINGS:
            if not setting.flags:
                load = measure(servers[0], setting, servers)
                report(args.results, setting, load, None, setting.gateway)
            elif setting.gateway in programs:
                command, name = programs[setting.gateway]
                with gateway(command, setting, servers) as url:
                    load = measure(url, setting, servers)
                robin = load if setting.flags == "--policy round_robin" else robin
                report(args.results, setting, load, robin, name)


if __name__ == "__main__":
    main()
