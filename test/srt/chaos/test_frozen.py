"""A process that has stopped working is noticed, named, and ends the server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest
from chaos_rig import (
    ENDLESS,
    PATIENCE,
    SCALE,
    Start,
    Stream,
    eventually,
    generate_body,
)
from running_server import RunningServer, assert_all_ended

TIMEOUT = 3  # seconds, of the watchdog
TOKENS = 200


def freeze(server: RunningServer, *roles: str) -> None:
    for role in roles:
        os.kill(server.pids()[role], signal.SIGSTOP)


def thaw(server: RunningServer, *roles: str) -> None:
    for role in roles:
        os.kill(server.pids()[role], signal.SIGCONT)


def failed_probe(server: RunningServer, path: str) -> str | None:
    """The message of a 503; None while the probe succeeds."""
    reply = httpx.get(server.base_url + path, timeout=PATIENCE)
    return reply.json()["error"]["message"] if reply.status_code == 503 else None


def survives_short_freezes(server: RunningServer) -> None:
    """A process may be frozen for less than the time-out."""
    for role in ("scheduler", "runner"):
        stream = Stream(server, generate_body(TOKENS))
        eventually(lambda: stream.events, "the stream has begun")  # noqa: B023
        freeze(server, role)
        time.sleep(TIMEOUT / 4)
        thaw(server, role)
        assert stream.wait()["meta_info"]["completion_tokens"] == TOKENS


def survives_a_freeze_of_all(server: RunningServer) -> None:
    """As in a suspended container: the time it slept says nothing about the engine."""
    stream = Stream(server, generate_body(TOKENS))
    eventually(lambda: stream.events, "the stream has begun")
    freeze(server, "server", "scheduler", "runner")
    time.sleep(TIMEOUT + 1)
    thaw(server, "runner", "scheduler", "server")
    assert stream.wait()["meta_info"]["completion_tokens"] == TOKENS
    assert failed_probe(server, "/health") is None


@pytest.mark.parametrize(
    ("role", "survives"),
    [("scheduler", survives_short_freezes), ("runner", survives_a_freeze_of_all)],
    ids=["scheduler", "runner"],
)
def test_a_frozen_process_fails_the_probes_and_ends_the_server(
    start: Start, role: str, survives: Callable[[RunningServer], None]
) -> None:
    server = start("--watchdog-timeout", str(TIMEOUT)).wait_until_ready()
    for _ in range(SCALE):
        survives(server)

    waiting = Stream(server, ENDLESS)
    eventually(lambda: waiting.events, "the stream has begun")
    freeze(server, role)
    if role == "scheduler":  # crashes when it is continued for its stacks: that is not the reason
        os.kill(server.pids()[role], signal.SIGSEGV)
    message = eventually(lambda: failed_probe(server, "/health"), "/health is 503")
    assert f"the {role} process has not answered" in message
    with suppress(httpx.TransportError):  # it has ended: the machine is busy
        assert failed_probe(server, "/ready") == message
    assert server.wait(PATIENCE) == 1
    error = waiting.wait()["error"]
    assert error["code"] == 500 and message in error["message"]
    assert f"mamba-eagle: {message}" in server.output
    # Both processes write their stacks, unless they crash: the frozen one is continued for it.
    for each in ("scheduler", "runner") if role == "runner" else ("runner",):
        assert f"{each}/process.py" in server.output
    assert_all_ended(server)


def test_a_frozen_process_fails_ready_alone_until_it_answers(plain: RunningServer) -> None:
    freeze(plain, "scheduler")
    message = eventually(lambda: failed_probe(plain, "/ready"), "/ready is 503")
    assert message == "the scheduler process has not answered for 2 s"
    assert failed_probe(plain, "/health") is None
    thaw(plain, "scheduler")
    eventually(lambda: failed_probe(plain, "/ready") is None, "/ready is 200 again")
