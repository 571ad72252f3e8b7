"""Two loads on servers with different settings: how much is cached, and what it is worth.

- documents: 32 prefixes of 2,048 tokens, 8 requests each, in random order, 32 at a time.
- chats: 16 conversations of 6 turns, each turn sent as soon as the last has been answered.

    python -m benchmark.cache_load --common "--model-path benchmark/models/nemotron-nano-9b-v2 \\
        --load-format dummy --skip-tokenizer-init" \\
        --config states="--max-journals 0" --config journals="--max-journals 96"

A GPU has no journals unless a flag says how many.

Exits with 1 if a request fails or an answer is short.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.lib.client import StreamClient
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results

VOCAB = 500  # token ids up to here, which every model has


@dataclass
class Load:
    """What a load asks, and what came of it."""

    client: StreamClient
    seed: int
    first_seconds: list[float] = field(default_factory=list)  # until the first token
    prompt_tokens = cached_tokens = output_tokens = 0

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(10, VOCAB) for _ in range(count)]

    async def ask(self, prompt: Sequence[int], count: int) -> list[int]:
        sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0}
        body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": sampling}
        began, first, last = time.perf_counter(), 0.0, {}
        async with self.client.stream(body) as pieces:
            async for piece in pieces:
                first = first or time.perf_counter() - began
                last = piece
        output: list[int] = last["output_ids"]
        if len(output) != count:
            raise RuntimeError(f"{len(output)} tokens instead of {count}")
        meta = last["meta_info"]
        self.first_seconds.append(first)
        self.prompt_tokens += meta["prompt_tokens"]
        self.cached_tokens += meta["cached_tokens"]
        self.output_tokens += count
        return output

    async def documents(self, sizes: argparse.Namespace) -> None:
        rng, gate = random.Random(self.seed), asyncio.Semaphore(sizes.clients)
        prefixes = [self.tokens(rng, sizes.prefix) for _ in range(sizes.prefixes)]
        prompts = [
            [*prefix, *self.tokens(rng, 64)] for prefix in prefixes for _ in range(sizes.requests)
        ]
        rng.shuffle(prompts)

        async def one(prompt: list[int]) -> None:
            async with gate:
                await self.ask(prompt, sizes.output)

        await asyncio.gather(*map(one, prompts))

    async def chats(self, sizes: argparse.Namespace) -> None:
        async def one(number: int) -> None:
            rng, text = random.Random(self.seed + number), []
            for _ in range(sizes.turns):
                text += self.tokens(rng, 200)
                text += await self.ask(text, sizes.output)

        await asyncio.gather(*map(one, range(sizes.chats)))


async def timed(load: Load, work: Awaitable[None], name: str, config: str) -> dict[str, Any]:
    began = time.perf_counter()
    await work
    seconds = time.perf_counter() - began
    first = sorted(load.first_seconds)
    line = {
        "name": "cache_load",
        "load": name,
        "config": config,
        "cached_share": round(load.cached_tokens / load.prompt_tokens, 4),
        "ttft_p50_ms": round(1e3 * statistics.median(first), 1),
        "ttft_p99_ms": round(1e3 * first[int(0.99 * (len(first) - 1))], 1),
        "tokens_per_s": round(load.output_tokens / seconds, 1),
        "prompt_tokens": load.prompt_tokens,
        "requests": len(first),
        "seconds": round(seconds, 2),
    }
    print(
        f"{config:>10} {name:>10} {line['cached_share']:>7.3f} {line['ttft_p50_ms']:>9.1f} "
        f"{line['ttft_p99_ms']:>9.1f} {line['tokens_per_s']:>9.1f} {line['seconds']:>7.1f}",
        flush=True,
    )
    return line


async def measure(base_url: str, config: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    async with StreamClient(base_url) as client:
        warm = Load(client, seed=1)
        await asyncio.gather(*(warm.ask([10 + i] * 100, 16) for i in range(args.clients)))
        load = Load(client, seed=2)
        lines = [await timed(load, load.documents(args), "documents", config)]
        load = Load(client, seed=3000)
        lines.append(await timed(load, load.chats(args), "chats", config))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", action="append", metavar="NAME=FLAGS", required=True)
    parser.add_argument("--common", default="", help="flags for all servers")
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of each")
    parser.add_argument("--requests", type=int, default=8, help="of each prefix")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--results", default="")
    args = parser.parse_args()
    exit_on_sigterm()
    print(f"{facts.hardware()}, commit {facts.commit()}")
    print("    config       load  cached  p50 ms    p99 ms   tokens/s seconds")
    for config in args.config:
        name, _, flags = config.partition("=")
        with ServerProcess([*shlex.split(args.common), *shlex.split(flags)]) as server:
            lines = asyncio.run(measure(server.base_url, name, args))
        more = {"gpu": facts.hardware(), "commit": facts.commit(), "date": facts.today()}
        if args.results:
            results.append(args.results, [{**line, **more} for line in lines])


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
