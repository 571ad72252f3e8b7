"""What the probes say, and which requests are taken, while the server comes to its end."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from server_harness import PATIENCE, Harness, run, says, serving, silent

from mamba_eagle.metrics.request_log import RequestLog
from mamba_eagle.server.lifetime import Gate, Lifetime


def gated(server: Harness) -> httpx.AsyncClient:
    app = Gate(server.app, lifetime_of(server))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def lifetime_of(server: Harness) -> Lifetime:
    lifetime: Lifetime = server.app.state.server.lifetime
    return lifetime


async def statuses(client: httpx.AsyncClient) -> dict[str, int]:
    paths = ("/health", "/ready", "/v1/models")
    return {path: (await client.get(path)).status_code for path in paths}


def test_probes_while_draining() -> None:
    """Alive, so that nobody kills it, but not ready."""

    async def test() -> None:
        async with serving(says("abc")) as server, gated(server) as client:
            assert await statuses(client) == {"/health": 200, "/ready": 200, "/v1/models": 200}
            assert await lifetime_of(server).drain(0) == 0
            assert await statuses(client) == {"/health": 200, "/ready": 503, "/v1/models": 503}
            ready = await client.get("/ready")
            assert int(ready.headers["Retry-After"]) > 0
            assert (await client.head("/ready")).status_code == 503
            # Whoever stops a server may look at it, and end what runs.
            assert (await client.get("/metrics")).status_code == 200
            aborted = await client.post("/abort_request", json={"abort_all": True})
            assert aborted.status_code == 200

    run(test())


def test_probes_when_the_engine_is_given_up_or_dead() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server, gated(server) as client:
            lifetime_of(server).failure = "the runner process has not answered for 60 s"
            assert await statuses(client) == {"/health": 503, "/ready": 503, "/v1/models": 503}
            for path in ("/health", "/ready", "/v1/models"):
                assert "has not answered" in (await client.get(path)).text
        async with serving(says("abc")) as server, gated(server) as client:
            server.manager.fail("the scheduler process ended")
            found = await statuses(client)
            assert found["/health"] == found["/ready"] == 503

    run(test())


def test_only_ready_fails_while_a_process_does_not_answer() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server, gated(server) as client:
            lifetime_of(server).silent = "the runner process has not answered for 10 s"
            assert await statuses(client) == {"/health": 200, "/ready": 503, "/v1/models": 200}
            assert "the runner process has not" in (await client.get("/ready")).text
            lifetime_of(server).silent = None
            assert await statuses(client) == {"/health": 200, "/ready": 200, "/v1/models": 200}

    run(test())


def test_probes_need_no_key() -> None:
    async def test() -> None:
        async with serving(says("abc"), api_key="secret") as server:
            assert await statuses(server.client) == {
                "/health": 200,
                "/ready": 200,
                "/v1/models": 401,
            }

    run(test())


def test_a_drain_waits_for_open_requests_and_no_longer_than_it_may() -> None:
    async def test() -> None:
        async with serving(silent) as server, gated(server) as client:
            lifetime = lifetime_of(server)
            asking = asyncio.ensure_future(
                client.post("/generate", json={"text": "a", "rid": "one"})
            )
            while not lifetime.open_requests:
                await asyncio.sleep(0.005)
            assert await lifetime.drain(0.05) == 1
            draining = asyncio.ensure_future(lifetime.drain(PATIENCE))
            await asyncio.sleep(0.02)
            assert not draining.done()
            await client.post("/abort_request", json={"rid": "one"})
            assert await draining == 0
            await asking

    run(test())


def test_what_clients_send_cannot_forge_lines_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            server.manager.recorder.log = RequestLog()
            rid = "x\n2026-01-01 INFO forged\x1b[2J\u202e" + "y" * 100
            reply = await server.post(
                "/generate", text="a", rid=rid, sampling_params={"stop": ["c\n"], "temperature": 0}
            )
            assert reply.status_code == 200

    with caplog.at_level(logging.INFO, logger="mamba_eagle.requests"):
        run(test())
    messages = [record.getMessage() for record in caplog.records if "requests" in record.name]
    assert [message.split()[0] for message in messages] == ["start", "end"]
    for message in messages:
        assert message.isprintable() and "forged" in message
        assert len(message) < 700
