"""The server process's end of the engine: requests go out, outputs find who waits for them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec
import zmq

from mamba_eagle.config import ServerConfig
from mamba_eagle.core import Failure, FinishReason, shown
from mamba_eagle.message import (
    Abort,
    CacheReply,
    FlushCache,
    FlushReply,
    Generate,
    GetCache,
    GetState,
    Outputs,
    Profile,
    ProfileReply,
    Ready,
    RequestOutput,
    StateReply,
    ToScheduler,
    ToServer,
)
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.tokenizer.observer import Observer
from mamba_eagle.tokenizer.sample import LiveRequest, PromptRequest, Sample
from mamba_eagle.tokenizer.text import TextTokenizer

log = logging.getLogger("mamba_eagle.tokenizer")
# A request of thousands of samples is started and ended in turns, between which this process and
# the scheduler serve the others.
SAMPLES_PER_TURN = 32
TOKENS_PER_TURN = 32_768
TURN_SECONDS = 0.005


class EngineDead(RuntimeError):
    """The engine is gone, or the server is being stopped."""


class QueueFull(RuntimeError):
    """More requests than the server holds at a time."""


class DuplicateRid(ValueError):
    """A live request has this name already."""


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample; the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class TokenizerManager:
    """Owns the live requests. Everything runs on the event loop; nothing here blocks."""

    def __init__(
        self,
        config: ServerConfig,
        context: zmq.Context[Any],
        socket_dir: str,
        recorder: Observer,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.tokenizer: TextTokenizer | None = None  # set when loaded; None: token ids only
        self.dead: str | None = None  # why no request can be served any more
        self._receiver: Receiver[ToServer] = Receiver(context, socket_dir, "to_server")
        self._sender: Sender[ToScheduler] = Sender(context, socket_dir, "to_scheduler")
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self._samples: dict[str, Sample] = {}  # by engine rid; only those that have not ended
        self._names: dict[str, list[Sample]] = {}  # what a client may call them
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._unsent: deque[Sample] = deque()  # started, but the scheduler does not know them yet
        self._tasks: set[asyncio.Task[Any]] = set()
        # The file descriptor tells of a change, not of a state: each wake must read all there is.
        self._loop.add_reader(self._receiver.socket.FD, self._receive_all)
        self._loop.call_soon(self._receive_all)

    @property
    def engine(self) -> Ready:
        return self.ready.result()

    @property
    def num_live(self) -> int:
        return len(self._samples)

    @property
    def max_samples(self) -> int:
        """What may run and wait at the same time."""
        return self.engine.max_running_requests + self.config.max_queued_requests

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._receiver.socket.FD)
        self._receiver.close()
        self._sender.close()

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def submit(self, rid: str, prompts: list[PromptRequest], trace_parent: str = "") -> LiveRequest:
        """Starts every sample of every prompt; the scheduler hears of many of them in turns.

        Raises: EngineDead, QueueFull, DuplicateRid; then nothing was started.
        """
        names = self._admit(rid, prompts)
        live = LiveRequest(rid, trace_parent)
        live.names = list(names)
        self._set_deadline(live, max((prompt.timeout for prompt in prompts), default=0.0))
        started: deque[Sample] = deque()
        for prompt in prompts:
            seed = secrets.randbits(63) if prompt.seed is None else prompt.seed
            for i in range(prompt.n):
                started.append(self._start(live, prompt, i, sample_seed(seed, i)))
        self.recorder.started(live)
        self._send_turn(started)
        if started:
            self._unsent += started
            if len(self._unsent) == len(started):
                self._spawn(self._send_unsent())
        return live

    def _admit(self, rid: str, prompts: list[PromptRequest]) -> set[str]:
        """All names of a request that may start."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        wanted = sum(prompt.n for prompt in prompts)
        if self.num_live + wanted > self.max_samples:
            raise QueueFull(
                f"{self.num_live} requests are running or waiting and {wanted} more would exceed "
                f"the limit of {self.max_samples}: try again later"
            )
        names = {rid}
        for prompt in prompts:
            names.update((prompt.rid, *prompt.sample_rids))
        taken = names & self._names.keys()
        if taken:
            raise DuplicateRid(
                f"rid = {shown(min(taken))}: a request of this name is running; give another or "
                "none"
            )
        return names

    def _set_deadline(self, live: LiveRequest, seconds: float) -> None:
        if seconds > 0:
            live.deadline = self._loop.call_later(seconds, self._expire, live, seconds)

    def _expire(self, live: LiveRequest, seconds: float) -> None:
        message = f"the request did not end within {seconds:g} s (timeout, or --request-timeout)"
        reason = FinishReason(kind="abort", message=message, failure=Failure.TIMEOUT)
        self._spawn(self._abort_all(live.samples, reason))

    def _start(self, live: LiveRequest, prompt: PromptRequest, i: int, seed: int) -> Sample:
        rid = prompt.sample_rids[i]
        # Clients may use a name again as soon as they have their answer, when the scheduler may
        # still have something to say about the first holder.
        engine_rid = f"{rid}#{next(self._numbers)}"
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(
                prompt.token_ids, prompt.sampling.skip_special_tokens, prompt.kept_tokens
            )
        sample = Sample(live, prompt, rid, engine_rid, len(live.samples), detokenizer)
        sample.seed = seed
        live.samples.append(sample)
        live.open += 1
        self._samples[engine_rid] = sample
        for name in {live.rid, prompt.rid, rid}:
            self._names.setdefault(name, []).append(sample)
        return sample

    def _send_turn(self, samples: deque[Sample]) -> None:
        """Hands the first of them to the scheduler, no more than it takes in in a moment."""
        tokens = 0
        for _ in range(min(SAMPLES_PER_TURN, len(samples))):
            sample = samples.popleft()
            if sample.finish is not None:
                continue
            self._send_generate(sample)
            tokens += len(sample.prompt.token_ids)
            if tokens >= TOKENS_PER_TURN:
                break

    async def _send_unsent(self) -> None:
        while self._unsent and self.dead is None:
            await asyncio.sleep(TURN_SECONDS)
            self._send_turn(self._unsent)

    def _send_generate(self, sample: Sample) -> None:
        prompt = sample.prompt
        sample.sent = True
        self._sender.send(
            Generate(
                rid=sample.engine_rid,
                token_ids=prompt.token_ids,
                # Stop strings are looked for here; thousands of them would travel for nothing.
                sampling=msgspec.structs.replace(prompt.sampling, seed=sample.seed, stop=[]),
                return_logprob=prompt.return_logprob,
                logprob_start=prompt.logprob_start,
                top_logprobs=prompt.top_logprobs,
                return_spec_trace=prompt.return_spec_trace,
                pooling=prompt.pooling,
                cache=prompt.cache,
                priority=prompt.priority,
                arrival_time=sample.request.arrival,
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def abort(self, rid: str | None, message: str = "aborted by /abort_request") -> int:
        """Ends the samples of exactly this name, or all (None); how many there were."""
        samples = list(self._samples.values()) if rid is None else self._names.get(rid, [])
        return await self._abort_all(list(samples), FinishReason(kind="abort", message=message))

    def release(self, live: LiveRequest) -> None:
        """Nobody waits for the request any more: what still runs of it is ended."""
        if live.open:
            reason = FinishReason(kind="abort", message="the client has gone")
            for sample in live.samples[:SAMPLES_PER_TURN]:
                self._abort(sample, reason)
            if live.open:
                self._spawn(self._abort_all(live.samples[SAMPLES_PER_TURN:], reason))

    async def _abort_all(self, samples: Iterable[Sample], reason: FinishReason) -> int:
        aborted = 0
        for sample in samples:
            if self._abort(sample, reason):
                aborted += 1
                if aborted % SAMPLES_PER_TURN == 0:
                    await asyncio.sleep(TURN_SECONDS)
        return aborted

    def _abort(self, sample: Sample, reason: FinishReason) -> bool:
        if sample.finish is not None:
            return False
        if self.dead is None and sample.sent:
            self._sender.send(Abort(rid=sample.engine_rid))
        sample.end(reason)
        self._ended(sample)
        return True

    def fail(self, message: str, failure: Failure = Failure.INTERNAL) -> None:
        """The engine is gone: whoever waits gets an error, and so does whoever comes."""
        if self.dead is not None:
            return
        self.dead = message
        reason = FinishReason(kind="abort", message=message, failure=failure)
        for sample in list(self._samples.values()):
            self._abort(sample, reason)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(message))

    # ── outputs ──────────────────────────────────────────────────────────────────────────────

    def _receive_all(self) -> None:
        while (item := self._receiver.receive(timeout_ms=0)) is not None:
            if isinstance(item, Outputs):
                now = time.time()
                for output in item.outputs:
                    sample = self._samples.get(output.rid)
                    if sample is not None:  # else it came after the end
                        self._take(sample, output, now)
            elif isinstance(item, Ready):
                if not self.ready.done():
                    self.ready.set_result(item)
            else:
                call = self._calls.get(item.call_id)
                if call is not None and not call.done():
                    call.set_result(item)

    def _take(self, sample: Sample, output: RequestOutput, now: float) -> None:
        try:
            self._dispatch(sample, output, now)
        except Exception:  # one request's trouble must not stop the others' outputs
            log.exception("request %s: its output could not be decoded", shown(sample.rid))
            message = "the output could not be decoded; see the server log"
            reason = FinishReason(kind="abort", message=message, failure=Failure.INTERNAL)
            self._abort(sample, reason)

    def _dispatch(self, sample: Sample, output: RequestOutput, now: float) -> None:
        before = len(sample.output_ids)
        stop = sample.take(output)
        if stop is not None and output.finish is None:
            self._sender.send(stop)
        self.recorder.progressed(sample, len(sample.output_ids) - before, now)
        sample.request.tell(sample)
        if sample.finish is not None:
            self._ended(sample)

    def _ended(self, sample: Sample) -> None:
        del self._samples[sample.engine_rid]
        live = sample.request
        live.open -= 1
        live.tell(sample)
        self.recorder.finished(sample)
        if live.open == 0:
            if live.deadline is not None:
                live.deadline.cancel()
            for name in live.names:
                self._names.pop(name, None)
            live.done.set()

    # ── questions to the scheduler ───────────────────────────────────────────────────────────

    async def state(self, timeout: float = 5.0) -> StateReply:
        """The scheduler's gauges and counters, and what it drafts.

        Raises: EngineDead, TimeoutError
        """
        reply = await self._call(GetState(call_id=next(self._numbers)), timeout)
        assert isinstance(reply, StateReply)
        return reply

    async def cache(self, max_nodes: int, max_tokens: int = 0, timeout: float = 5.0) -> CacheReply:
        """What the prefix cache holds, and the first nodes of its tree with up to ``max_tokens`` of
        their tokens each.

        Raises: EngineDead, TimeoutError
        """
        number = next(self._numbers)
        item = GetCache(call_id=number, max_nodes=max_nodes, max_tokens=max_tokens)
        reply = await self._call(item, timeout)
        assert isinstance(reply, CacheReply)
        return reply

    async def flush_cache(self, timeout: float = 0.0) -> FlushReply:
        """Empties the cache; a busy engine refuses, and is asked again until ``timeout`` s.

        Raises: EngineDead, TimeoutError
        """
        deadline = time.monotonic() + timeout
        while True:
            reply = await self._call(FlushCache(call_id=next(self._numbers)), 30.0)
            assert isinstance(reply, FlushReply)
            if reply.ok:
                self.recorder.reset_averages()
            if reply.ok or time.monotonic() >= deadline:
                return reply
            await asyncio.sleep(0.05)

    async def profile(self, path: str, steps: int, timeout: float = 60.0) -> ProfileReply:
        """Records so many steps of the runner, or with 0 ends that.

        Raises: EngineDead, TimeoutError
        """
        item = Profile(call_id=next(self._numbers), path=path, steps=steps)
        reply = await self._call(item, timeout)
        assert isinstance(reply, ProfileReply)
        return reply

    async def _call(
        self, item: FlushCache | GetState | GetCache | Profile, timeout: float
    ) -> FlushReply | StateReply | CacheReply | ProfileReply:
        if self.dead is not None:
            raise EngineDead(self.dead)
        call: asyncio.Future[Any] = self._loop.create_future()
        self._calls[item.call_id] = call
        try:
            self._sender.send(item)
            return await asyncio.wait_for(call, timeout)
        finally:
            del self._calls[item.call_id]
