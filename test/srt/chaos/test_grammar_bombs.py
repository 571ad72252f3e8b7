"""Grammars that would take for ever: each ends its own request, and others are served beside it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest
from chaos_rig import PATIENCE, SCALE, Start, assert_serves, eventually, report
from running_server import RunningServer, assert_all_ended, assert_end

from benchmark.lib.attacks import BOMBS, Attack
from benchmark.lib.grammar_bombs import intersection

ATTACKERS = 10
MORE_MEMORY = 100e6  # bytes, of all processes, when it is over
OTHERS = 40  # requests of others, more than the runner keeps grammars


def resident(server: RunningServer) -> int:
    process = psutil.Process(server.pids()["server"])
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def trials(server: RunningServer) -> list[psutil.Process]:
    """Processes that try a grammar now."""
    children = psutil.Process(server.pids()["server"]).children()
    return [trial for child in children for trial in child.children()]


def everybody(server: RunningServer) -> dict[str, int]:
    """Its process ids, by themselves."""
    process = psutil.Process(server.pids()["server"])
    return {str(one.pid): one.pid for one in (process, *process.children(recursive=True))}


def send(server: RunningServer, attack: Attack) -> httpx.Response:
    return httpx.post(f"{server.base_url}{attack.path}", content=attack.body(), timeout=PATIENCE)


def others_seconds(server: RunningServer, prefix: str) -> float:
    """The 99th percentile of requests with a small grammar each that nobody has sent before."""
    seconds = []
    for number in range(OTHERS):
        sampling = {"regex": f"{prefix}{number}[0-9]{{2}}", "max_new_tokens": 8}
        began = time.monotonic()
        body = {"text": "a", "sampling_params": sampling}
        reply = httpx.post(f"{server.base_url}/generate", json=body, timeout=PATIENCE)
        seconds.append(time.monotonic() - began)
        assert reply.status_code == 200, reply.text
        assert reply.json()["text"].startswith(f"{prefix}{number}")
    return sorted(seconds)[int(0.99 * OTHERS)]


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[RunningServer]:
    # Prefixes that are kept would be taken for memory that grammars leave.
    flags = ("--shutdown-timeout", str(PATIENCE), "--disable-radix-cache")
    yield start(*flags).wait_until_ready()


def test_every_bomb_is_answered_while_others_are_served(server: RunningServer) -> None:
    quiet = others_seconds(server, "q")
    before, answers = resident(server), list[tuple[str, httpx.Response]]()
    bombs = list(BOMBS.items())

    def attack(number: int) -> None:
        for name, bomb in bombs[number::ATTACKERS] * SCALE:
            answers.append((name, send(server, bomb)))

    with ThreadPoolExecutor(ATTACKERS) as pool:
        attacks = [pool.submit(attack, number) for number in range(ATTACKERS)]
        beside = others_seconds(server, "b")
        for one in attacks:
            one.result()
    for name, reply in answers:
        assert reply.status_code in BOMBS[name].statuses, (name, reply.text)
        if reply.status_code != 200:
            assert 0 < len(reply.json()["error"]["message"]) < 1000
    assert len(answers) == len(BOMBS) * SCALE
    others_seconds(server, "a")  # the runner keeps their grammars now, not those of the bombs
    more = resident(server) - before
    kinds = [str(reply.status_code) for _, reply in answers]
    report(
        "grammar_bombs",
        len(answers),
        "requests",
        answers={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        others_quiet_p99_ms=round(1e3 * quiet),
        others_beside_p99_ms=round(1e3 * beside),
        memory_more_mb=round(more / 1e6),
    )
    assert more < MORE_MEMORY
    assert_serves(server)


def test_a_timeout_ends_it(server: RunningServer) -> None:
    body = {"text": "a", "sampling_params": intersection(25), "timeout": 0.3}
    reply = httpx.post(f"{server.base_url}/generate", json=body, timeout=PATIENCE)
    assert reply.status_code == 504, reply.text
    assert "grammar" in reply.json()["error"]["message"]
    eventually(lambda: not trials(server), "nobody tries it any more")


def test_a_client_that_leaves_ends_it_and_a_stop_waits_for_none(server: RunningServer) -> None:
    def leave() -> None:
        body = {"text": "a", "sampling_params": intersection(23)}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.base_url}/generate", json=body, timeout=0.5)

    def ask(number: int) -> int | None:
        body = {"text": "a", "sampling_params": intersection(20 + number % 5)}
        # it came after the stop, or waited to be taken when that came
        with suppress(httpx.ConnectError, httpx.RemoteProtocolError):
            reply = httpx.post(f"{server.base_url}/generate", json=body, timeout=PATIENCE)
            return reply.status_code
        return None

    with ThreadPoolExecutor(ATTACKERS) as pool:
        for gone in [pool.submit(leave) for _ in range(ATTACKERS)]:
            gone.result()
        eventually(lambda: not trials(server), "nobody tries it any more")
        statuses = [pool.submit(ask, number) for number in range(ATTACKERS)]
        eventually(lambda: trials(server), "one is tried")
        family = everybody(server)
        server.process.send_signal(signal.SIGTERM)
        found = {status.result() for status in statuses}
        assert found & {400, 503} and found <= {400, 503, None}  # 400: it was refused just before
    assert server.wait(PATIENCE) == 0
    assert_all_ended(server)
    assert_end(family)


def test_a_killed_server_leaves_none_that_is_tried(start: Start) -> None:
    server = start().wait_until_ready()
    body = {"text": "a", "sampling_params": intersection(24)}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(httpx.post, f"{server.base_url}/generate", json=body, timeout=PATIENCE)
        eventually(lambda: trials(server), "it is tried")
        family = everybody(server)
        server.process.kill()
    assert len(family) >= 5
    assert_end(family)
