"""Closed-loop clients: what they send and how they are timed, with the fake engine."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_engine import length_of
from server_harness import Harness, run, serving

from benchmark.lib import served
from benchmark.lib.client import StreamClient
from benchmark.lib.served import Scenario, percentile
from mamba_eagle.message import Generate

OUTPUT = [7, 8, 9]


def answers(seen: list[list[int]]):
    """Each request gets OUTPUT; ``seen`` gets its prompt."""

    def script(request: Generate):
        seen.append(list(request.token_ids))
        return OUTPUT, length_of(OUTPUT)

    return script


def client_of(harness: Harness) -> StreamClient:
    return StreamClient("http://test", transport=httpx.ASGITransport(harness.app))


def test_clients_send_the_next_request_when_the_last_is_answered() -> None:
    seen: list[list[int]] = []

    async def test() -> None:
        async with serving(answers(seen)) as harness, client_of(harness) as client:
            found = await served.run(Scenario("s", 3, 2, 5, 3, vocab_size=99), client)
            assert (found.requests, found.failed, found.compiled) == (6, 0, 0)
            assert found.tokens_per_second > 0 and found.first_token_p99 > 0
            assert len(seen) == 6 and len({tuple(prompt) for prompt in seen}) == 6
            assert {len(prompt) for prompt in seen} == {5}
            assert all(16 <= token < 99 for prompt in seen for token in prompt)

    run(test())


def test_a_chat_goes_on_from_its_answers() -> None:
    seen: list[list[int]] = []

    async def test() -> None:
        async with serving(answers(seen)) as harness, client_of(harness) as client:
            scenario = Scenario("c", 1, 3, 4, 3, shared=6, chat=True, vocab_size=99)
            await served.run(scenario, client)
            first, second, third = seen
            assert len(first) == 10
            assert second[:13] == first + OUTPUT and third[: len(second) + 3] == second + OUTPUT

    run(test())


def test_requests_that_fail_are_counted() -> None:
    async def test() -> None:
        async with serving(answers([])) as harness, client_of(harness) as client:
            found = await served.run(Scenario("s", 2, 2, 500, 3, vocab_size=99), client)
            assert (found.requests, found.failed) == (0, 4), "the context has 64 tokens"
            assert found.tokens_per_second == 0

    run(test())


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (0.0, 1), (1.0, 100)])
def test_percentiles(share: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value
    assert percentile([], share) == 0.0


def test_the_time_between_tokens_of_one_event_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent at 0, one token at 3 s, two at 5 s."""
    times = iter([0.0, 3.0, 5.0])
    monkeypatch.setattr(served.time, "perf_counter", lambda: next(times))

    class Pieces:
        async def __aenter__(self):
            async def pieces():
                yield {"output_ids": [1], "meta_info": {"prompt_tokens": 4, "cached_tokens": 3}}
                yield {"output_ids": [2, 3], "meta_info": {"prompt_tokens": 4, "cached_tokens": 3}}

            return pieces()

        async def __aexit__(self, *error: object) -> None: ...

    class Server:
        def stream(self, body: object) -> Pieces:
            return Pieces()

    timing = asyncio.run(served.timed(Server(), {}))  # type: ignore[arg-type]
    assert timing == (3.0, [1.0, 1.0], [1, 2, 3], 3, 4)
