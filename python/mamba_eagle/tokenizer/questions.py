"""Questions to the scheduler that are not requests, and who waits for their answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from mamba_eagle.message import (
    AdapterReply,
    Answer,
    AskRanks,
    CacheReply,
    ChangeModel,
    Changes,
    CloseSession,
    Continue,
    Done,
    ExportPrefix,
    FlushCache,
    FlushReply,
    GetCache,
    GetState,
    ImportPrefix,
    LoadAdapter,
    Moves,
    OpenSession,
    Pause,
    PauseMode,
    PrefixMoved,
    Profile,
    ProfileReply,
    Question,
    RankReply,
    RankTask,
    StateReply,
    ToScheduler,
    UnloadAdapter,
    Weights,
)
from mamba_eagle.message.channel import Sender
from mamba_eagle.tokenizer.errors import EngineDead
from mamba_eagle.tokenizer.observer import Observer


class Questions:
    """Each is asked under a number of its own, which its answer repeats.

    All raise EngineDead, or TimeoutError if the answer does not come in time.
    """

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

    async def state(self, timeout: float = 5.0) -> StateReply:
        """The scheduler's gauges and counters, and what it drafts."""
        reply = await self._ask(GetState(call_id=next(self._numbers)), timeout)
        assert isinstance(reply, StateReply)
        return reply

    async def cache(self, max_nodes: int, max_tokens: int = 0, timeout: float = 5.0) -> CacheReply:
        """What the prefix cache holds, and the first nodes of its tree with up to ``max_tokens`` of
        their tokens each."""
        number = next(self._numbers)
        item = GetCache(call_id=number, max_nodes=max_nodes, max_tokens=max_tokens)
        reply = await self._ask(item, timeout)
        assert isinstance(reply, CacheReply)
        return reply

    async def flush_cache(self, timeout: float = 0.0) -> FlushReply:
        """Empties the cache; a busy engine refuses, and is asked again until ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while True:
            reply = await self._ask(FlushCache(call_id=next(self._numbers)), 30.0)
            assert isinstance(reply, FlushReply)
            if reply.ok:
                self._recorder.reset_averages()
            if reply.ok or time.monotonic() >= deadline:
                return reply
            await asyncio.sleep(0.05)

    async def profile(self, path: str, steps: int, timeout: float = 60.0) -> ProfileReply:
        """Records this number of steps of the runner, or with 0 ends that."""
        item = Profile(call_id=next(self._numbers), path=path, steps=steps)
        reply = await self._ask(item, timeout)
        assert isinstance(reply, ProfileReply)
        return reply

    async def export_prefix(self, token_ids: list[int], salt: str, path: str) -> PrefixMoved:
        """What is cached of a prompt goes to a new file."""
        number = next(self._numbers)
        return await self._move(
            ExportPrefix(call_id=number, token_ids=token_ids, salt=salt, path=path)
        )

    async def import_prefix(self, path: str) -> PrefixMoved:
        return await self._move(ImportPrefix(call_id=next(self._numbers), path=path))

    async def _move(self, item: Moves) -> PrefixMoved:
        reply = await self._ask(item, 600.0)
        assert isinstance(reply, PrefixMoved)
        return reply

    async def open_session(self, name: str, seconds: float) -> Done:
        item = OpenSession(call_id=next(self._numbers), name=name, seconds=seconds)
        return await self._done(item, 30.0)

    async def close_session(self, name: str) -> Done:
        return await self._done(CloseSession(call_id=next(self._numbers), name=name), 30.0)

    async def load_adapter(self, name: str, path: str) -> str:
        """Returns why it is not served, if it is not."""
        item = LoadAdapter(call_id=next(self._numbers), name=name, path=path)
        return await self._change(item)

    async def unload_adapter(self, name: str) -> str:
        return await self._change(UnloadAdapter(call_id=next(self._numbers), name=name))

    async def _change(self, item: Changes, timeout: float = 600.0) -> str:
        reply = await self._ask(item, timeout)
        assert isinstance(reply, AdapterReply)
        return reply.problem

    async def pause(self, mode: PauseMode, timeout: float) -> Done:
        """Returns once the pause is in force."""
        return await self._done(Pause(call_id=next(self._numbers), mode=mode), timeout)

    async def go_on(self) -> Done:
        """Ends a pause."""
        return await self._done(Continue(call_id=next(self._numbers)), 30.0)

    async def change(
        self,
        weights: Weights | None = None,
        release: Sequence[str] = (),
        resume: Sequence[str] = (),
        timeout: float = 1800.0,
    ) -> Done:
        """Loads other weights, or gives memory back or takes it again, by tags."""
        tags = {"release": list(release), "resume": list(resume)}
        item = ChangeModel(call_id=next(self._numbers), weights=weights, **tags)
        return await self._done(item, timeout)

    async def ranks(self, task: RankTask, timeout: float = 3600.0) -> list[RankReply]:
        """What each rank answers, in their order."""
        item = AskRanks(call_id=next(self._numbers), task=task)
        replies: list[RankReply] = await self._ask(item, timeout)
        return replies

    async def _done(self, item: Question, timeout: float) -> Done:
        reply = await self._ask(item, timeout)
        assert isinstance(reply, Done)
        return reply

    async def _ask(self, item: Question, timeout: float) -> Any:
        if self._dead is not None:
            raise EngineDead(self._dead)
        asked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[item.call_id] = asked
        try:
            self._sender.send(item)
            return await asyncio.wait_for(asked, timeout)
        finally:
            del self._waiting[item.call_id]
            self._replies.pop(item.call_id, None)
