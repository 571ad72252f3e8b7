"""Load with aborts on a running server, then a check that nothing leaked.

    python -m benchmark.soak --port 30000 --clients 64 --seconds 60

Clients stream greedy answers to a few prompts. Some requests are left to finish, some are dropped
by closing the connection, some are ended by /abort_request. A finished text must equal the first
one for its prompt (with --allow-different-texts it may part, as bfloat16 can at a near-tie). In the
end no request may be left and every KV slot and state slot must be free or cached. Exits with 1 if
anything is wrong.

With --own-server it starts the server that it loads, with default settings, and reports how its
processes' memory grew: that at the end against that after five minutes. --output appends this to a
file of results.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

from benchmark.lib.client import StreamClient
from benchmark.lib.memory import MemoryWatch
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from benchmark.lib.soak import Load, Soak
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.client import ServerError
from mamba_eagle.eval import gsm8k

TIMEOUT = 120.0  # seconds without a byte
MAX_SHOWN_PROBLEMS = 20


def make_prompts(count: int) -> list[str]:
    """Half of them share a long prefix, so that the cache is hit, branched and evicted."""
    problems = gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
    shots = problems[:2]
    return [
        gsm8k.make_prompt(shots if i % 2 else [], problem.question)
        for i, problem in enumerate(problems[2 : 2 + count])
    ]


async def soak(args: argparse.Namespace, base_url: str) -> Soak:
    load = Load(
        prompts=make_prompts(args.prompts),
        clients=args.clients,
        seconds=args.seconds,
        abort_rate=args.abort_rate,
        max_new_tokens=args.max_new_tokens,
        stop=gsm8k.STOP,
        seed=args.seed,
        allow_different_texts=args.allow_different_texts,
    )
    connections = 2 * args.clients + 2  # a client holds its stream's while it posts an abort
    async with StreamClient(base_url, args.api_key, TIMEOUT, connections) as client:
        running = Soak(load, client)
        await running.run()
    return running


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base-url", default="", help="in place of --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--abort-rate", type=float, default=0.3)
    parser.add_argument("--prompts", type=int, default=24, help="different prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow-different-texts", action="store_true")
    parser.add_argument("--own-server", action="store_true", help="start one, watch its memory")
    parser.add_argument("--output", default="", help="with --own-server: a file of results")
    return parser


def soak_own_server(args: argparse.Namespace) -> Soak:
    exit_on_sigterm()
    with ServerProcess([]) as server:
        with MemoryWatch(server.pids()) as memory:
            found = asyncio.run(soak(args, server.base_url))
        if "Traceback" in server.output:
            found.problems.append("the server's log has a traceback")
    growth = memory.growth()
    for role, grown in growth.items():
        print(f"{role}: {grown.early_mb:.0f} MB after {grown.early_s:.0f} s, {grown.end_mb:.0f} MB")
    if args.output:
        results.append(args.output, [result_line(args, found, memory)])
    return found


def result_line(args: argparse.Namespace, found: Soak, memory: MemoryWatch) -> results.Line:
    growth = memory.growth()
    line: dict[str, Any] = {
        "name": "soak",
        "value": round(growth["runner"].ratio, 4),
        "unit": "the runner's memory at the end / after five minutes",
        "seconds": args.seconds,
        "clients": args.clients,
        "abort_rate": args.abort_rate,
        **{key.replace(" ", "_"): count for key, count in found.outcomes.items()},
        "tokens": found.tokens,
        "problems": len(found.problems),
        "memory_mb": {
            role: [round(grown.early_mb, 1), round(grown.end_mb, 1)]
            for role, grown in growth.items()
        },
        "machine": facts.cpu_model(),
        "commit": facts.commit(),
        "date": facts.today(),
    }
    return line


def main() -> None:
    args = make_parser().parse_args()
    begin = time.monotonic()
    try:
        if args.own_server:
            found = soak_own_server(args)
        else:
            base_url = args.base_url or f"http://{args.host}:{args.port}"
            found = asyncio.run(soak(args, base_url))
    except ServerError as error:  # it does not say what it holds
        sys.exit(f"error: {error}")
    seconds = time.monotonic() - begin
    print(f"{args.clients} clients, {seconds:.1f} s: {dict(found.outcomes)}")
    print(f"{found.tokens / seconds:.1f} token/s of requests that were read to their end")
    if found.problems:
        print("\n".join(found.problems[:MAX_SHOWN_PROBLEMS]), file=sys.stderr)
        sys.exit(1)
    print("Nothing leaked.")


if __name__ == "__main__":
    main()
