"""Questions to the scheduler that are not requests, and who waits for their answers."""

import asyncio
import itertools
import time
from typing import Any, TypeVar

from mamba_eagle.message import Answer, Done, FlushCache, Question, RankReply, ToScheduler
from mamba_eagle.message.channel import Sender
from mamba_eagle.tokenizer.errors import EngineDead
from mamba_eagle.tokenizer.observer import Observer

A = TypeVar("A")


class Questions:
    """Each is asked under a number of its own, which its answer repeats."""

    def __init__(self, sender: Sender[ToScheduler], recorder: Observer, num_ranks: int = 1) -> None:
        self._sender, self._recorder, self._num_ranks = sender, recorder, num_ranks
        self._replies: dict[int, list[RankReply]] = {}  # of some ranks
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._dead: str | None = None

    def answer(self, reply: Answer) -> None:
        asked = self._waiting.get(reply.call_id)
        if asked is None or asked.done():
            return
        if isinstance(reply, RankReply):
            replies = self._replies.setdefault(reply.call_id, [])
            replies.append(reply)
            if len(replies) == self._num_ranks:
                asked.set_result(sorted(replies, key=lambda reply: reply.rank))
        else:
            asked.set_result(reply)

    def fail(self, message: str) -> None:
        """The engine is gone: who waits gets an error, and every later question does."""
        self._dead = message
        for asked in self._waiting.values():
            if not asked.done():
                asked.set_exception(EngineDead(message))

    async def __call__(self, question: Question[A], seconds: float) -> A:
        """The answer.

        Raises: EngineDead; TimeoutError if it does not come in time.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        asked: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        number = question.call_id = next(self._numbers)
        self._waiting[number] = asked
        try:
            self._sender.send(question)  # type: ignore[arg-type]  # all kinds are ToScheduler's
            return await asyncio.wait_for(asked, seconds)
        finally:
            del self._waiting[number]
            self._replies.pop(number, None)

    async def flush_cache(self, seconds: float = 0.0) -> Done:
        """Empties the cache; a busy engine refuses, and is asked again for that long.

        Raises: as asking.
        """
        deadline = time.monotonic() + seconds
        while True:
            reply = await self(FlushCache(), 30.0)
            if not reply.problem:
                self._recorder.reset_averages()
            if not reply.problem or time.monotonic() >= deadline:
                return reply
            await asyncio.sleep(0.05)
