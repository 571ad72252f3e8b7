"""What streams feel of grammars that are compiled: times between tokens of 8 streams while 100
requests come, without a grammar, with one schema, or each with a schema of its own.

    python -m benchmark.constrained_streams --rounds 5

Starts a server of the embedded model. The kinds of requests come in turns, in another order each
round, at the same pace and with as many tokens, so whatever else the machine does meets all of
them. Prints and appends to benchmark/results/constrained.jsonl one line per kind: the p99 of all
rounds, and its ratio to that of requests without a grammar.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.constrained import RESULTS, random_schema
from benchmark.lib.client import StreamClient
from benchmark.lib.served import percentile
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.client import Body

STREAMS = 8
PLAIN, ONE_SCHEMA, SCHEMAS = "without a grammar", "of one schema", "each of its own schema"
TOKENS = 4  # of each request


class Streams:
    """Requests that are always under way, and the times between their events."""

    def __init__(self, client: StreamClient) -> None:
        self.client, self.gaps = client, list[float]()

    async def run(self, number: int) -> None:
        luck = random.Random(number)
        while True:
            last = 0.0
            async with self.client.stream(request(luck, 2000)) as pieces:
                async for _ in pieces:
                    now = time.perf_counter()
                    if last:
                        self.gaps.append(now - last)
                    last = now


def request(luck: random.Random, tokens: int, **constraint: Any) -> Body:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **constraint}
    return {"input_ids": luck.choices(range(300, 1800), k=16), "sampling_params": sampling}


def schemas(luck: random.Random) -> Iterator[dict[str, Any]]:
    """All different."""
    number = 0
    while True:
        schema, number = random_schema(luck), number + 1
        name = f"own_{luck.randrange(10**9)}_{number}"
        yield {**schema, "properties": {**schema["properties"], name: {"type": "boolean"}}}


async def flood(
    client: StreamClient, kind: str, args: argparse.Namespace, luck: random.Random
) -> None:
    """``args.requests`` requests of a kind, ``args.pace`` per second."""
    fresh = schemas(luck)
    shared = next(schemas(random.Random(1)))
    under_way = []
    for _ in range(args.requests):
        constraint = {}
        if kind != PLAIN:
            constraint = {"json_schema": shared if kind == ONE_SCHEMA else next(fresh)}
        body = request(luck, TOKENS, **constraint)
        under_way.append(asyncio.create_task(client.generate(body)))
        await asyncio.sleep(1 / args.pace)
    await asyncio.gather(*under_way)


async def measure(args: argparse.Namespace, base_url: str) -> list[results.Line]:
    gaps: dict[str, list[float]] = {kind: [] for kind in (PLAIN, ONE_SCHEMA, SCHEMAS)}
    rounds: dict[str, list[float]] = {kind: [] for kind in gaps}
    luck = random.Random(args.seed)
    async with StreamClient(base_url) as client:
        streams = Streams(client)
        running = [asyncio.create_task(streams.run(i)) for i in range(STREAMS)]
        for round_ in range(args.rounds + 1):
            for kind in luck.sample(list(gaps), len(gaps)):
                await asyncio.sleep(0.3)
                streams.gaps = []
                await flood(client, kind, args, luck)
                if round_:
                    gaps[kind] += streams.gaps
                    rounds[kind].append(round(1e3 * percentile(streams.gaps, 0.99), 1))
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    plain = percentile(gaps[PLAIN], 0.99)
    return [
        {
            "name": "others_inter_token_ms",
            "requests": f"{args.requests} {kind}",
            "pace": args.pace,
            "streams": STREAMS,
            "p50": round(1e3 * percentile(own, 0.5), 2),
            "p99": round(1e3 * percentile(own, 0.99), 2),
            "p99_ratio": round(percentile(own, 0.99) / plain, 3),
            "p99_of_rounds": rounds[kind],
        }
        for kind, own in gaps.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--pace", type=float, default=25.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="*", help="for the server, after --")
    args = parser.parse_args()
    exit_on_sigterm()
    where = {"machine": facts.device_name("cpu"), "commit": facts.commit(), "date": facts.today()}
    with ServerProcess(args.flags) as server:
        lines = asyncio.run(measure(args, server.base_url))
    for line in lines:
        print(json.dumps(line), flush=True)
        results.append(args.results, [{**line, **where}])


if __name__ == "__main__":
    main()
