"""A server under closed-loop clients: tokens per second, time to first token, between tokens.

    python -m benchmark.served --flags "--model-path benchmark/models/nemotron-nano-9b-v2 \\
        --load-format dummy --skip-tokenizer-init --max-running-requests 128 \\
        --speculative-algorithm STANDALONE \\
        --speculative-draft-model-path benchmark/models/llama-2-layers \\
        --speculative-eagle-topk 3 --no-speculative-adaptive --simulate-acc-len 3" \\
        --results FILE.jsonl
    python -m benchmark.served --base-url http://127.0.0.1:30000 --scenarios clients-64 chats

Starts the server, or takes a running one. Each scenario runs once to warm the clients up, with one
request each, and then in full. Exits with 1 if a request failed, or with --strict if a kernel was
compiled meanwhile or the slowest of 100 tokens took more than twice the median at 64 clients.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmark.lib.client import StreamClient
from benchmark.lib.served import Scenario, Summary, run, scenarios
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results

TIMEOUT = 300.0  # seconds without a byte
MAX_RATIO = 2.0  # of p99 to p50 between tokens
HEADER = (
    f"{'scenario':>12} {'requests':>8} {'tokens/s':>9} {'TTFT p50':>9} {'p99':>8} "
    f"{'between mean':>12} {'p50':>7} {'p99':>7} {'cached':>6} {'busy':>5} {'compiled':>8}   "
    "(times in ms)"
)


def row(name: str, found: Summary) -> str:
    return (
        f"{name:>12} {found.requests:>8} {found.tokens_per_second:>9.0f} "
        f"{found.first_token_p50:>9.1f} {found.first_token_p99:>8.1f} "
        f"{found.inter_token_mean:>12.2f} {found.inter_token_p50:>7.2f} "
        f"{found.inter_token_p99:>7.2f} "
        f"{found.cached_share:>6.2f} {found.busy_share:>5.0%} {found.compiled:>8}"
    )


def problems(scenario: Scenario, found: Summary, strict: bool) -> list[str]:
    wrong = []
    if found.failed:
        wrong.append(f"{scenario.name}: {found.failed} requests failed")
    if strict and found.compiled:
        wrong.append(f"{scenario.name}: {found.compiled} kernels or graphs were made under load")
    ratio = found.inter_token_p99 / max(found.inter_token_p50, 1e-9)
    if strict and scenario.name == "clients-64" and ratio > MAX_RATIO:
        wrong.append(f"{scenario.name}: p99 between tokens is {ratio:.1f} times the median")
    return wrong


async def measure(args: argparse.Namespace, base_url: str, about: dict[str, Any]) -> list[str]:
    """Runs the scenarios; returns what is wrong."""
    wrong: list[str] = []
    chosen = [each for each in scenarios(args.requests) if each.name in args.scenarios]
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    async with StreamClient(base_url, args.api_key, TIMEOUT) as client:
        info = await client.server_info()
        about |= {
            "simulated_accept_length": info.get("simulate_acc_len") or None,
            "flags": args.flags,
            "temperature": args.temperature,
        }
        print(HEADER, flush=True)
        for scenario in chosen:
            scenario.sampling, scenario.vocab_size = sampling, info["vocab_size"]
            few = dataclasses.replace(scenario, name=f"{scenario.name} warm-up", requests=1)
            await run(few, client)
            found = await run(scenario, client)
            print(row(scenario.name, found), flush=True)
            wrong += problems(scenario, found, args.strict)
            if args.results:
                line = {"name": "served", "scenario": scenario.name, "clients": scenario.clients}
                values = {key: round(value, 3) for key, value in found._asdict().items()}
                value = round(found.tokens_per_second, 1)
                results.append(args.results, [{**line, **values, "value": value, **about}])
    return wrong


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--base-url", default="", help="a running server")
    target.add_argument("--flags", default="", help="of the server to start")
    parser.add_argument("--api-key", default="")
    names = [scenario.name for scenario in scenarios(1)]
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names)
    parser.add_argument("--requests", type=int, default=6, help="of each client")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--results", type=Path, default=None)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    exit_on_sigterm()
    device = "cpu" if "--device cpu" in args.flags else "auto"
    about = facts.facts(device) if args.results else {}
    if args.base_url:
        wrong = asyncio.run(measure(args, args.base_url, about))
    else:
        began = time.perf_counter()
        with ServerProcess(shlex.split(args.flags)) as server:
            print(f"first answer after {time.perf_counter() - began:.1f} s", flush=True)
            wrong = asyncio.run(measure(args, server.base_url, about))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
