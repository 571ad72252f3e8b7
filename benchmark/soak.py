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
import itertools
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx

from mamba_eagle.eval import gsm8k

IDLE_TIMEOUT = 30.0  # seconds in which the server must have freed everything


class Soak:
    """The clients' common state; ``outcomes`` counts requests, ``problems`` says what was wrong."""

    def __init__(self, args: argparse.Namespace, client: httpx.AsyncClient) -> None:
        self.args = args
        self.client = client
        self.rng = random.Random(args.seed)
        problems = gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
        shots = problems[:2]
        # Half of the prompts share a long prefix, so that the cache is hit, branched and evicted.
        self.prompts = [
            gsm8k.make_prompt(shots if i % 2 else [], problem.question)
            for i, problem in enumerate(problems[2 : 2 + args.prompts])
        ]
        self.texts: dict[tuple[int, int], str] = {}
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.problems: list[str] = []
        self.serial = itertools.count()

    async def run(self) -> None:
        self.deadline = time.monotonic() + self.args.seconds
        await asyncio.gather(*(self.one_client() for _ in range(self.args.clients)))
        await self.check_nothing_leaked()

    async def one_client(self) -> None:
        while time.monotonic() < self.deadline and len(self.problems) < 10:
            try:
                await self.one_request()
            except httpx.HTTPError as error:
                self.problems.append(f"a request failed: {error!r}")
                await asyncio.sleep(0.5)

    async def one_request(self) -> None:
        """Stream one answer and, with the given probability, end it before it is complete."""
        which = self.rng.randrange(len(self.prompts))
        length = self.rng.choice([8, 32, self.args.max_new_tokens])
        rid = f"soak-{next(self.serial)}"
        body = {
            "rid": rid,
            "text": self.prompts[which],
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": length, "stop": gsm8k.STOP},
        }
        abort_after = -1  # streamed pieces; -1: let it finish
        if self.rng.random() < self.args.abort_rate:
            abort_after = self.rng.randrange(6)
        by_route = self.rng.random() < 0.5
        reply: dict[str, Any] = {}
        pieces = 0
        async with self.client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self.problems.append(f"status {response.status_code}: {response.text}")
                return
            if abort_after == 0 and not by_route:
                self.outcomes["disconnected"] += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                reply = json.loads(line[len("data: ") :])
                if "error" in reply:
                    self.problems.append(f"{rid}: {reply['error']}")
                    return
                pieces += 1
                if pieces == abort_after and not by_route:
                    self.outcomes["disconnected"] += 1
                    return  # leaving the block closes the connection
                if pieces == max(abort_after, 1) and abort_after >= 0 and by_route:
                    await self.client.post("/abort_request", json={"rid": rid})
        self.finished(which, length, reply)

    def finished(self, which: int, length: int, reply: dict[str, Any]) -> None:
        meta = reply.get("meta_info") or {}
        reason = meta.get("finish_reason")
        if not reason:
            self.problems.append(f"the stream of {meta.get('id')} ended without a finish reason")
            return
        self.tokens += meta["completion_tokens"]
        if reason["type"] == "abort":
            self.outcomes["aborted"] += 1
            return
        self.outcomes["finished"] += 1
        text = self.texts.setdefault((which, length), reply["text"])
        if text != reply["text"]:
            self.outcomes["different text"] += 1
            if not self.args.allow_different_texts:
                self.problems.append(
                    f"prompt {which}: {reply['text']!r} differs from the first answer {text!r}"
                )

    async def check_nothing_leaked(self) -> None:
        end = time.monotonic() + IDLE_TIMEOUT
        leaks = await self.leaks()
        while leaks and time.monotonic() < end:
            await asyncio.sleep(0.2)
            leaks = await self.leaks()
        self.problems += [f"{IDLE_TIMEOUT:.0f} s after the last request: {leak}" for leak in leaks]

    async def leaks(self) -> list[str]:
        info = (await self.client.get("/server_info")).json()
        values = {**info, **info["internal_states"][0]}
        wrong = [
            f"{name} is {values[name]}"
            for name in ("num_running_reqs", "num_queue_reqs")
            if values[name]
        ]
        for free, cached, total in (
            ("num_free_kv_slots", "num_cached_tokens", "max_total_num_tokens"),
            ("num_free_checkpoints", "num_cached_checkpoints", "max_mamba_cache_size"),
        ):
            if values[free] + values[cached] != values[total]:
                wrong.append(
                    f"{free} {values[free]} + {cached} {values[cached]} "
                    f"is not {total} {values[total]}"
                )
        return wrong


async def soak(args: argparse.Namespace) -> Soak:
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=120.0,
        trust_env=False,
        # A client holds its stream's connection while it posts an abort.
        limits=httpx.Limits(max_connections=2 * args.clients + 2),
    ) as client:
        load = Soak(args, client)
        await load.run()
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
    args = parser.parse_args()
    begin = time.monotonic()
    load = asyncio.run(soak(args))
    seconds = time.monotonic() - begin
    print(f"{args.clients} clients, {seconds:.1f} s: {dict(load.outcomes)}")
    print(f"{load.tokens / seconds:.1f} token/s of requests that were read to their end")
    if load.problems:
        print("\n".join(load.problems[:20]), file=sys.stderr)
        sys.exit(1)
    print("Nothing leaked.")


if __name__ == "__main__":
    main()
