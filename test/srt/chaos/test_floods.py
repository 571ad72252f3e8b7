"""Bodies that ask for far too much, while streams run: each is answered in plain words, the streams
get their texts, and the server's memory stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest
from chaos_rig import PATIENCE, SCALE, Stream, assert_serves, generate_body
from running_server import RunningServer

from benchmark.lib.attacks import ATTACKS, Attack

STREAMS = 3
TOKENS = 200
MORE_MEMORY = (
    300e6  # bytes, of all processes; each of these took up to 2 GB before there were limits
)


class Readers:
    """Clients that stream the same few requests again and again, until told to stop."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.texts: dict[int, set[str]] = {number: set() for number in range(STREAMS)}
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(STREAMS)
        ]

    def _read(self, number: int) -> None:
        body = {**generate_body(TOKENS), "input_ids": [5, 6, 7 + number]}
        while not self._stop.is_set():
            try:
                last = Stream(self.server, body).wait()
                self.texts[number].add(last["text"])
            except Exception as error:
                self.problems.append(repr(error))
                return

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.fixture(scope="module")
def readers(plain: RunningServer) -> Iterator[Readers]:
    with Readers(plain) as readers:
        yield readers
    assert not readers.problems
    assert all(len(texts) == 1 for texts in readers.texts.values()), readers.texts


def resident(server: RunningServer) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in server.pids().values())


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_flood_harms_nobody(plain: RunningServer, readers: Readers, attack: Attack) -> None:
    before = resident(plain)
    body = attack.body()
    for _ in range(SCALE):
        reply = httpx.post(f"{plain.base_url}{attack.path}", content=body, timeout=PATIENCE)
        assert reply.status_code in attack.statuses, reply.text[:500]
        if reply.status_code != 200:
            message = reply.json()["error"]["message"]
            assert 0 < len(message) < 1000
    assert resident(plain) - before < MORE_MEMORY
    assert not readers.problems
    assert_serves(plain)


def test_nothing_was_logged_in_anger(plain: RunningServer, readers: Readers) -> None:
    assert not readers.problems
    assert "Traceback" not in plain.output, plain.output[-3000:]
