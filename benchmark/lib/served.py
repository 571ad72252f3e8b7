"""Closed-loop clients of a server: what they send, and what they see.

A client sends its next request when the last one is answered, as a user does. Prompts are random
token ids, so that none finds another's in the prefix cache unless the scenario says so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmark.lib.client import StreamClient
from mamba_eagle.bench.client import Body

GREEDY = {"temperature": 0.0}
FIRST_ID = 16  # of random tokens: lower ones may end a text


class Timing(NamedTuple):
    """One answered request. Seconds."""

    first_token: float  # from sending to the first token
    gaps: list[float]  # between tokens; those of one event share its gap
    output: list[int]
    cached: int  # prompt tokens that the prefix cache had
    prompt: int


class Stream:
    """What a client has seen of an answer so far."""

    def __init__(self, began: float) -> None:
        """began: when the request was sent, in seconds."""
        self.began = self.last = began
        self.first = 0.0
        self.gaps: list[float] = []
        self.output: list[int] = []

    def hear(self, now: float, tokens: Sequence[int]) -> None:
        """An event brings ``tokens``."""
        if not tokens:
            return
        if self.output:
            self.gaps += [(now - self.last) / len(tokens)] * len(tokens)
        else:
            self.first = now - self.began
        self.output += tokens
        self.last = now

    def timing(self, cached: int, prompt: int) -> Timing:
        return Timing(self.first, self.gaps, self.output, cached, prompt)


@dataclass
class Scenario:
    """What each client sends, one request after the other; a turn may depend on the last answer."""

    name: str
    clients: int
    requests: int  # of each client
    input_len: int
    output_len: int
    sampling: dict[str, Any] = field(default_factory=lambda: dict(GREEDY))
    shared: int = 0  # tokens that all requests of a client have in common; other clients' differ
    chat: bool = False  # a request continues the last one's prompt and output
    vocab_size: int = 2048  # of the model, or less

    def body(self, prompt: list[int], seed: int) -> Body:
        sampling = {
            **self.sampling,
            "max_new_tokens": self.output_len,
            "ignore_eos": True,
            "seed": seed,
        }
        return {"input_ids": prompt, "sampling_params": sampling, "incremental": True}

    def client(self, number: int) -> Iterator[tuple[Body, list[list[int]]]]:
        """Bodies to send, each with a list into which the caller puts the output before it asks for
        the next one."""
        rng = random.Random(f"{self.name} {number}")
        prefix = self._tokens(rng, self.shared)
        for turn in range(self.requests):
            prompt = prefix + self._tokens(rng, self.input_len)
            answer: list[list[int]] = []
            yield self.body(prompt, number * 1000 + turn), answer
            if self.chat:
                prefix = prompt + answer[0]

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, self.vocab_size) for _ in range(count)]


def scenarios(requests: int) -> list[Scenario]:
    """requests: of each client, where a client's number of them is not given by the scenario."""
    return [
        *(
            Scenario(f"clients-{n}", n, requests, input_len=512, output_len=128)
            for n in (8, 64, 128)
        ),
        Scenario("prefixes", 32, 8, input_len=64, output_len=64, shared=2048),
        Scenario("chats", 16, 6, input_len=128, output_len=128, chat=True),
        Scenario("long", 1, max(2, requests), input_len=16_384, output_len=16),
        *(
            Scenario(f"documents-{n}", n, 1, input_len=8192, output_len=1024)  # as SGLang's tables
            for n in (1, 16)
        ),
    ]


class Summary(NamedTuple):
    """Of all requests of a scenario. Milliseconds unless named otherwise."""

    requests: int
    failed: int
    tokens_per_second: float  # of output
    first_token_p50: float
    first_token_p99: float
    inter_token_mean: float
    inter_token_p50: float
    inter_token_p99: float
    cached_share: float  # of prompt tokens
    busy_share: float  # of the time in which the device executed steps
    compiled: int  # kernels compiled and graphs captured meanwhile


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; 0 without values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


async def timed(client: StreamClient, body: Body) -> Timing:
    """Raises: ServerError"""
    stream = Stream(time.perf_counter())
    meta: dict[str, Any] = {}
    async with client.stream(body) as pieces:
        async for piece in pieces:
            meta = piece["meta_info"]
            stream.hear(time.perf_counter(), piece["output_ids"])
    return stream.timing(meta.get("cached_tokens", 0), meta.get("prompt_tokens", 0))


def summarize(
    timings: Sequence[Timing], failed: int, seconds: float, busy: float, compiled: int
) -> Summary:
    """seconds: from the first request to the last answer. busy: those of them in which the device
    executed steps."""
    firsts = [timing.first_token for timing in timings]
    gaps = [gap for timing in timings for gap in timing.gaps]
    return Summary(
        requests=len(timings),
        failed=failed,
        tokens_per_second=sum(len(timing.output) for timing in timings) / seconds,
        first_token_p50=1e3 * percentile(firsts, 0.5),
        first_token_p99=1e3 * percentile(firsts, 0.99),
        inter_token_mean=1e3 * sum(gaps) / max(len(gaps), 1),
        inter_token_p50=1e3 * percentile(gaps, 0.5),
        inter_token_p99=1e3 * percentile(gaps, 0.99),
        cached_share=sum(t.cached for t in timings) / max(sum(t.prompt for t in timings), 1),
        busy_share=busy / seconds,
        compiled=compiled,
    )


async def run(scenario: Scenario, client: StreamClient) -> Summary:
    """All clients at once, until each has its answers.

    Raises: ServerError if the server does not say how it is; failed requests are counted.
    """
    timings: list[Timing] = []
    failures: list[str] = []

    async def one(number: int) -> None:
        for body, answer in scenario.client(number):
            try:
                timing = await timed(client, body)
            except RuntimeError as error:  # a ServerError, or whatever broke a stream
                failures.append(str(error))
                timing = None
            answer.append([] if timing is None else timing.output)
            if timing is not None:
                timings.append(timing)

    before, began = await _state(client), time.perf_counter()
    await asyncio.gather(*map(one, range(scenario.clients)))
    seconds, after = time.perf_counter() - began, await _state(client)
    for failure in failures[:3]:
        print(f"{scenario.name}: {failure}")
    busy = after.get("step_seconds", 0.0) - before.get("step_seconds", 0.0)
    compiled = after.get("num_compiled_kernels", 0) - before.get("num_compiled_kernels", 0)
    return summarize(timings, len(failures), seconds, busy, int(compiled))


async def _state(client: StreamClient) -> dict[str, float]:
    state: dict[str, float] = (await client.server_info())["internal_states"][0]
    return state
