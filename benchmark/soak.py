"""Load with aborts on a running server, then a check that nothing leaked.

    python benchmark/soak.py --port 30000 --clients 64 --seconds 60

Clients stream greedy answers to a few prompts. Some requests are left to finish, some are dropped
by closing the connection, some are ended by /abort_request. A finished text must equal the first
one for its prompt (with --allow-different-texts it may part, as bfloat16 can at a near-tie). In the
end no request may be left and every KV slot and state slot must be free or cached. Exits with 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from mamba_eagle.bench.client import Client, ServerError
from mamba_eagle.bench.soak import Load, Soak
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


async def soak(args: argparse.Namespace) -> Soak:
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
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    connections = 2 * args.clients + 2  # a client holds its stream's while it posts an abort
    async with Client(base_url, args.api_key, TIMEOUT, connections) as client:
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
    return parser


def main() -> None:
    args = make_parser().parse_args()
    begin = time.monotonic()
    try:
        found = asyncio.run(soak(args))
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
