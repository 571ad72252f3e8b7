"""Tries grammars in a process that can be killed (constrain/trials.py).

A grammar first gets little time. One that needs more begins again in a lane of those that do, and
then in another one, at lower priority: most are tried at once, however many need seconds.
"""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import msgspec

from mamba_eagle.constrain import trials
from mamba_eagle.constrain.grammar import Grammar
from mamba_eagle.constrain.vocabulary import NoVocabulary, Vocabulary
from mamba_eagle.limits import MAX_GRAMMAR_SECONDS, MAX_GRAMMAR_WAIT
from mamba_eagle.message.lifetime import module_command
from mamba_eagle.server.errors import RequestError

COMMAND = module_command("mamba_eagle.constrain.trials")
# It computes in one thread, and libraries' threads would cost memory.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Level(NamedTuple):
    seconds: float  # of processor time
    lanes: int
    nice: int


def levels() -> tuple[Level, ...]:
    cores = os.cpu_count() or 1
    few = min(max(1, cores // 4), 4)
    return (
        Level(0.04, min(max(2, cores // 2), 8), 0),
        Level(0.3, few, 10),
        Level(MAX_GRAMMAR_SECONDS, few, 15),
    )


class Judge:
    """Says whether a grammar can be served. Without a process, for an Engine that may start none:
    its only client is its owner."""

    def __init__(self, tokens: Callable[[], trials.Tokens]) -> None:
        self._tokens = tokens

    async def verdict(self, grammar: Grammar) -> trials.Verdict:
        return await asyncio.to_thread(lambda: trials.verdict_on(self._vocabulary, grammar))

    @cached_property
    def _vocabulary(self) -> Vocabulary | NoVocabulary:
        return trials.load(self._tokens())

    def start(self) -> None:
        """Have it ready before the first grammar comes."""

    def hurry(self) -> None:
        """The server is shutting down: what takes long is given up."""

    def close(self) -> None:
        """No more grammars are to be judged."""


class _Asked(NamedTuple):
    ended: asyncio.Future[trials.Verdict | None]
    level: int


class ProcessJudge(Judge):
    """With a process, which starts with the first grammar, or with ``start``. Lives on the event
    loop."""

    def __init__(self, tokens: Callable[[], trials.Tokens]) -> None:
        super().__init__(tokens)
        self._levels = levels()
        self._lanes = [asyncio.Semaphore(level.lanes) for level in self._levels]
        self._asked: dict[int, _Asked] = {}  # by number
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]
        self._starting = asyncio.Lock()
        self._hurries = False

    def start(self) -> None:
        """In the background, unless the first grammar has."""
        self._first = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        async with self._starting:
            if self._process is not None:
                return
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    COMMAND,
                    stdin=theirs.fileno(),
                    env={**os.environ, **ENVIRONMENT},
                    start_new_session=True,  # Ctrl-C is for the server, which then ends this
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._writer.write(trials.framed(self._tokens()))
            self._reading = asyncio.ensure_future(self._read(reader, process))
            self._process = process

    async def verdict(self, grammar: Grammar) -> trials.Verdict:
        """Cancelling it ends the work. Raises: RequestError 503"""
        try:
            return await asyncio.wait_for(self._climb(grammar), MAX_GRAMMAR_WAIT)
        except asyncio.TimeoutError:
            raise RequestError(
                "the server could not try the grammar in time: send it again", 503, retry_after=1
            ) from None

    async def _climb(self, grammar: Grammar) -> trials.Verdict:
        for level, lanes in enumerate(self._lanes):
            async with lanes:
                found = await self._tried(grammar, level)
            if found is not None:
                return found
        return trials.Verdict(
            f"it needs more than {MAX_GRAMMAR_SECONDS:g} s of processor time: make it simpler"
        )

    async def _tried(self, grammar: Grammar, number_of_level: int) -> trials.Verdict | None:
        """None if its time was over."""
        if number_of_level and self._hurries:
            raise _shutting_down()
        await self._start()
        level = self._levels[number_of_level]
        self._count = number = self._count + 1
        ended: asyncio.Future[trials.Verdict | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(ended, number_of_level)
        self._send(trials.Trial(number, grammar, level.seconds, level.nice))
        try:
            return await ended
        finally:
            if self._asked.pop(number, None) is not None:
                self._send(trials.Stop(number))

    def _send(self, message: trials.Trial | trials.Stop) -> None:
        if not self._writer.is_closing():
            self._writer.write(trials.framed(message))

    async def _read(self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                (length,) = trials.LENGTH.unpack(await reader.readexactly(trials.LENGTH.size))
                ended = msgspec.msgpack.decode(await reader.readexactly(length), type=trials.Ended)
                asked = self._asked.pop(ended.number, None)
                if asked is not None and not asked.ended.done():
                    asked.ended.set_result(ended.verdict)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail("the process that tries grammars has ended: send the request again")
            self._writer.close()
            self._process = None  # the next grammar starts another one
            await asyncio.to_thread(process.wait)

    def _fail(self, reason: str, from_level: int = 0) -> None:
        for asked in self._asked.values():
            if asked.level >= from_level and not asked.ended.done():
                asked.ended.set_exception(RequestError(reason, 503, retry_after=1))

    def hurry(self) -> None:
        self._hurries = True
        self._fail(str(_shutting_down()), from_level=1)

    def close(self) -> None:
        if self._process is not None:
            self._reading.cancel()
            self._fail(str(_shutting_down()))
            self._writer.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", 503, retry_after=1)
