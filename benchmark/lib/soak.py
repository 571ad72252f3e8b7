"""Load with aborts and lost connections, and a check that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmark.lib.client import StreamClient
from mamba_eagle.bench.client import Reply, ServerError

IDLE_SECONDS = 30.0  # in which the server must have freed everything
MAX_PROBLEMS = 10  # then the load ends
FREE_CACHED_TOTAL = (
    ("num_free_kv_slots", "num_cached_tokens", "max_total_num_tokens"),
    ("num_free_checkpoints", "num_cached_checkpoints", "max_mamba_cache_size"),
)


@dataclass(frozen=True)
class Load:
    """What the clients send."""

    prompts: Sequence[str]
    clients: int
    seconds: float
    abort_rate: float  # share of the requests that are ended before they are complete
    max_new_tokens: int
    stop: Sequence[str] = ()
    seed: int = 0
    allow_different_texts: bool = False


class Ending(NamedTuple):
    """How a request is ended before it is complete."""

    after: int  # streamed pieces; -1: it is left to finish
    by_route: bool  # by /abort_request; else by closing the connection


class Soak:
    """The clients' common state. ``outcomes`` counts requests, ``problems`` says what was wrong,
    ``tokens`` counts those of requests that were read to their end."""

    def __init__(
        self, load: Load, client: StreamClient, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.load, self.client, self.idle_seconds = load, client, idle_seconds
        self.rng = random.Random(load.seed)
        self.texts: dict[tuple[int, int], str] = {}  # (prompt, length): the first answer
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.problems: list[str] = []
        self._serial = itertools.count()
        self._deadline = 0.0

    async def run(self) -> None:
        self._deadline = time.monotonic() + self.load.seconds
        await asyncio.gather(*(self._one_client() for _ in range(self.load.clients)))
        await self._check_nothing_leaked()

    async def _one_client(self) -> None:
        while time.monotonic() < self._deadline and len(self.problems) < MAX_PROBLEMS:
            rid = f"soak-{next(self._serial)}"
            try:
                await self._one_request(rid)
            except ServerError as error:
                self.problems.append(f"{rid}: {error}")
                await asyncio.sleep(0.5)

    async def _one_request(self, rid: str) -> None:
        """Stream one answer and, with the given probability, end it before it is complete."""
        which = self.rng.randrange(len(self.load.prompts))
        length = self.rng.choice([8, 32, self.load.max_new_tokens])
        ending = self._choose_ending()
        body = {
            "rid": rid,
            "text": self.load.prompts[which],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": length,
                "stop": list(self.load.stop),
            },
        }
        reply: Reply = {}
        pieces = 0
        async with self.client.stream(body) as stream:
            if ending.after == 0 and not ending.by_route:
                self.outcomes["disconnected"] += 1
                return
            async for piece in stream:
                reply, pieces = piece, pieces + 1
                if pieces == ending.after and not ending.by_route:
                    self.outcomes["disconnected"] += 1
                    return  # leaving the block closes the connection
                if ending.by_route and ending.after >= 0 and pieces == max(ending.after, 1):
                    await self.client.abort(rid)
        self._finished(which, length, reply)

    def _choose_ending(self) -> Ending:
        after = -1
        if self.rng.random() < self.load.abort_rate:
            after = self.rng.randrange(6)
        return Ending(after, by_route=self.rng.random() < 0.5)

    def _finished(self, which: int, length: int, reply: Reply) -> None:
        meta: dict[str, Any] = reply.get("meta_info") or {}
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
            if not self.load.allow_different_texts:
                self.problems.append(
                    f"prompt {which}: {reply['text']!r} differs from the first answer {text!r}"
                )

    # ── leaks ────────────────────────────────────────────────────────────────────────────────

    async def _check_nothing_leaked(self) -> None:
        end = time.monotonic() + self.idle_seconds
        while (found := leaks(await self.client.server_info())) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        self.problems += [
            f"{self.idle_seconds:.0f} s after the last request: {leak}" for leak in found
        ]


def leaks(info: Reply) -> list[str]:
    """What /server_info of an idle server should not say."""
    values = {**info, **info["internal_states"][0]}
    wrong = [
        f"{name} is {values[name]}"
        for name in ("num_running_reqs", "num_queue_reqs")
        if values[name]
    ]
    for free, cached, total in FREE_CACHED_TOTAL:
        if values[free] + values[cached] != values[total]:
            wrong.append(
                f"{free} {values[free]} + {cached} {values[cached]} is not {total} {values[total]}"
            )
    return wrong
