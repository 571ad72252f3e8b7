"""Batches that a running server answers: ``bench --url``."""

import argparse
import asyncio
import itertools
import time
from typing import NamedTuple

from mamba_eagle.bench.client import Client, full_url


class Served(NamedTuple):
    """Counts of tokens and steps, and seconds from the first request to the last reply."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int  # 0 without speculation

    def lines(self) -> list[str]:
        total = self.prompt_tokens + self.output_tokens
        lines = [
            f"Prompts. tokens: {self.prompt_tokens}, of them cached: {self.cached_tokens}",
            f"Output.  throughput: {self.output_tokens / self.seconds:9.2f} token/s",
            f"Total. latency: {self.seconds:6.3f} s, "
            f"throughput: {total / self.seconds:9.2f} token/s",
        ]
        if self.steps:
            lines.append(f"Acceptance. length: {self.output_tokens / self.steps:.3f} token/step")
        return lines


def measure(args: argparse.Namespace, text: str) -> None:
    """Every combination of batch size, input and output length in ``args``, printed as it comes.
    text: what prompts are cut from.

    Raises: ServerError
    """
    asyncio.run(_measure(args, text))


async def _measure(args: argparse.Namespace, text: str) -> None:
    url = full_url(args.url)
    async with Client(url, args.api_key) as client:
        tokens = await client.tokenize(text)
        for size in itertools.product(args.batch_size, args.input_len, args.output_len):
            batch, input_len, output_len = size
            print(f"Benchmark ... {url}, batch {batch}, input {input_len}, output {output_len}")
            prompts = [_cut(tokens, i * input_len, input_len) for i in range(batch)]
            print("\n".join((await _serve(client, prompts, output_len)).lines()))


def _cut(tokens: list[int], begin: int, length: int) -> list[int]:
    """``length`` tokens from ``begin`` on, as if ``tokens`` had no end."""
    return [tokens[(begin + i) % len(tokens)] for i in range(length)]


async def _serve(client: Client, prompts: list[list[int]], output_len: int) -> Served:
    sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    bodies = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts]
    begin = time.perf_counter()
    replies = await client.generate_all(bodies, len(bodies))
    seconds = time.perf_counter() - begin
    metas = [reply["meta_info"] for reply in replies]

    def total(field: str) -> int:
        return sum(meta.get(field) or 0 for meta in metas)

    return Served(
        seconds,
        total("prompt_tokens"),
        total("cached_tokens"),
        total("completion_tokens"),
        total("spec_verify_ct"),
    )
