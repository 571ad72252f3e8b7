"""What does the host's tier of the prefix cache bring, and what do its copies cost others? (GPU)

    python -m benchmark.host_tier

SGLang #39436's test: --prefixes prompts of --tokens tokens on a server whose device holds few of
them, and then the same with a question behind each. ``host_tier_hits`` counts those that come back,
``host_tier_first_token`` is how long the first token takes then, as a share of the first time. The
same again for documents that had other questions behind them (``host_tier_document_…``). Then
--streams clients read text while prompts come whose prefixes are on the device, and while prompts
come whose prefixes are copied up from the host: ``host_tier_steps`` compares the times between
tokens. Both kinds of prompts run as many tokens anew. What is evicted for them is on the host
already, or saves too little to go there.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark.lib.client import StreamClient
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results

GEOMETRY = Path(__file__).parent / "models" / "nemotron-nano-9b-v2"
FLAGS = f"--model-path {GEOMETRY} --load-format dummy --skip-tokenizer-init"
FLAGS += " --speculative-algorithm NONE --max-running-requests 8 --max-total-tokens 36000"
FLAGS += " --max-mamba-cache-size 48 --host-cache-gb 8"
FEW = 32  # tokens behind a prefix, and of each answer


class Asked:
    """Prompts with long prefixes, and what came of the last time each was sent."""

    def __init__(self, client: StreamClient, prefixes: int, tokens: int, seed: int = 0) -> None:
        self.client, self.draw = client, random.Random(tokens + seed)
        self.prefixes = [self.ids(tokens) for _ in range(prefixes)]

    def ids(self, count: int) -> list[int]:
        return [self.draw.randrange(10, 500) for _ in range(count)]

    async def first_token(self, number: int, more: int = FEW) -> tuple[float, int]:
        """Seconds until it, and cached tokens. more: tokens behind the prefix."""
        prompt = [*self.prefixes[number], *self.ids(more)]
        began, found, cached = time.perf_counter(), 0.0, 0
        async with self.client.stream(body_of(prompt, FEW)) as pieces:
            async for piece in pieces:
                found = found or time.perf_counter() - began
                cached = piece["meta_info"]["cached_tokens"]
        return found, cached


def body_of(ids: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


async def intervals(asked: Asked, streams: int, tokens: int, numbers: Iterable[int]) -> list[float]:
    """Seconds between tokens of streams, from all streams' first token to the end of the prompts
    ``numbers``, which come one after the other."""
    times: list[list[float]] = [[] for _ in range(streams)]

    async def read(number: int) -> None:
        async with asked.client.stream(body_of(asked.ids(FEW), tokens)) as pieces:
            async for _ in pieces:
                times[number].append(time.perf_counter())

    tasks = [asyncio.create_task(read(number)) for number in range(streams)]
    while not all(times):
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    for number in numbers:
        await asked.first_token(number)
    ended = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    spans = [pair for each in times for pair in zip(each, each[1:])]
    return [b - a for a, b in spans if a >= began and b <= ended]


def at(share: float, ordered: list[float]) -> float:
    return 1e3 * ordered[int(share * (len(ordered) - 1))]


async def come_back(asked: Asked, name: str, more: int, tokens: int) -> list[dict[str, Any]]:
    """more: tokens behind the prefixes of ``tokens`` at first."""
    order = range(len(asked.prefixes))
    cold = [await asked.first_token(number, more) for number in order]
    again = [await asked.first_token(number) for number in order]
    hits = sum(cached >= 0.9 * tokens for _, cached in again)
    seconds = [statistics.median(first for first, _ in each) for each in (cold, again)]
    return [
        {"name": f"{name}_hits", "value": hits, "of": len(order)},
        {
            "name": f"{name}_first_token",
            "value": round(seconds[1] / seconds[0], 4),
            "cold_ms": [round(1e3 * first, 1) for first, _ in cold],
            "again_ms": [round(1e3 * first, 1) for first, _ in again],
            "cached": [cached for _, cached in again],
        },
    ]


async def measure(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    async with StreamClient(url) as client:
        await Asked(client, 1, 700).first_token(0)
        documents = Asked(client, args.prefixes, args.tokens, seed=1)
        lines = await come_back(documents, "host_tier_document", FEW, args.tokens)
        asked = Asked(client, args.prefixes, args.tokens)
        lines += await come_back(asked, "host_tier", 0, args.tokens)
        order = range(args.prefixes)
        last = [args.prefixes - 1] * (2 * args.prefixes)
        ways: dict[str, list[float]] = {"device": [], "host": []}
        for name, numbers in 2 * [("device", last), ("host", [*order, *order])]:
            await asked.first_token(args.prefixes - 1)
            ways[name] += await intervals(asked, args.streams, args.stream_tokens, numbers)
    for found in ways.values():
        found.sort()
    p99 = {name: at(0.99, ordered) for name, ordered in ways.items()}
    return [
        *lines,
        {
            "name": "host_tier_steps",
            "value": round(p99["host"] / p99["device"], 3),
            **{f"{name}_p99_ms": round(value, 2) for name, value in p99.items()},
            **{f"{name}_p50_ms": round(at(0.5, ordered), 2) for name, ordered in ways.items()},
            **{f"{name}_steps": len(ordered) for name, ordered in ways.items()},
            "streams": args.streams,
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of each prefix")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=2000)
    parser.add_argument("--flags", default="", help="added to those of the geometry")
    parser.add_argument("--server-flags", default=FLAGS, help="instead of these")
    parser.add_argument("--results", default="")
    args = parser.parse_args()
    exit_on_sigterm()
    with ServerProcess([*shlex.split(args.server_flags), *shlex.split(args.flags)]) as server:
        lines = asyncio.run(measure(server.base_url, args))
    for line in lines:
        print(line, flush=True)
    if args.results:
        kept = [{**line, "tokens": args.tokens, **facts.facts()} for line in lines]
        results.append(args.results, kept)


if __name__ == "__main__":
    main()
