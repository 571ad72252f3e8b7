"""The server process's end of the engine: requests go out, outputs find who waits for them, both in
turns of the event loop; and so do questions and their answers."""

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from functools import cached_property
from typing import Any, Protocol, TypeVar

import zmq
from msgspec.structs import replace

from mamba_eagle import message
from mamba_eagle.config import ServerConfig
from mamba_eagle.core import DEFAULT_VERSION, Failure, FinishReason, shown
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.tokenizer.sample import EngineDead, LiveRequest, LiveSamples, QueueFull, Sample
from mamba_eagle.tokenizer.text import TextTokenizer

# A request of thousands of samples is started and ended in turns, between which this process and
# the scheduler serve the others.
SAMPLES_PER_TURN = 32
TOKENS_PER_TURN = 32_768
TURN_SECONDS = 0.005


def _message(sample: Sample) -> message.Generate:
    # Stop strings are looked for here; thousands of them would be sent for nothing.
    own = replace(sample.prompt.sampling, seed=sample.seed, stop=[])
    name, arrival = sample.engine_rid, sample.request.arrival
    return replace(sample.prompt, rid=name, sampling=own, n=1, seed=None, arrival_time=arrival)


class Observer(Protocol):
    """Called for each event of a request, on the event loop; must not block."""

    def started(self, sample: Sample) -> None:
        """It goes to the scheduler."""

    def progressed(self, sample: Sample, new_tokens: int, now: float) -> None:
        """``new_tokens`` of a sample came at time ``now``."""

    def finished(self, sample: Sample) -> None:
        """A sample ended, also when it was aborted."""

    def reset_averages(self) -> None:
        """The cache was flushed: averages start again."""


A = TypeVar("A")


class Questions:
    """Each is asked under a number of its own, which its answer repeats."""

    def __init__(
        self, sender: Sender[message.ToScheduler], recorder: Observer, num_ranks: int = 1
    ) -> None:
        self._sender, self._recorder, self._num_ranks = sender, recorder, num_ranks
        self._replies: dict[int, list[message.RankReply]] = {}  # of some ranks
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._dead: str | None = None

    def answer(self, reply: message.Answer) -> None:
        asked = self._waiting.get(reply.call_id)
        if asked is None or asked.done():
            return
        if isinstance(reply, message.RankReply):
            replies = self._replies.setdefault(reply.call_id, [])
            replies.append(reply)
            if len(replies) == self._num_ranks:
                asked.set_result(sorted(replies, key=lambda reply: reply.rank))
        else:
            asked.set_result(reply)

    def fail(self, why: str) -> None:
        """The engine is gone: who waits gets an error, and every later question does."""
        self._dead = why
        for asked in self._waiting.values():
            if not asked.done():
                asked.set_exception(EngineDead(why))

    async def __call__(self, question: message.Question[A], seconds: float) -> A:
        """The answer.

        Raises: EngineDead; TimeoutError if it does not come in time. A pause in which the whole
        machine stood still counts as a second, since the engine has not been silent in it.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        asked: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        number = question.call_id = next(self._numbers)
        self._waiting[number] = asked
        try:
            self._sender.send(question)  # type: ignore[arg-type]  # all kinds are ToScheduler's
            while seconds > 0 and not asked.done():
                await asyncio.wait([asked], timeout=min(seconds, 1.0))
                seconds -= 1.0
            if not asked.done():
                raise asyncio.TimeoutError
            return asked.result()
        finally:
            del self._waiting[number]
            self._replies.pop(number, None)

    async def flush_cache(self, seconds: float = 0.0) -> message.Done:
        """Empties the cache; a busy engine refuses, and is asked again for that long.

        Raises: as asking.
        """
        deadline = time.monotonic() + seconds
        while True:
            reply = await self(message.FlushCache(), 30.0)
            if not reply.problem:
                self._recorder.reset_averages()
            if not reply.problem or time.monotonic() >= deadline:
                return reply
            await asyncio.sleep(0.05)


log = logging.getLogger("mamba_eagle.tokenizer")


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample; the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class TokenizerManager:
    """Owns the live requests. Everything runs on the event loop; nothing here blocks."""

    def __init__(
        self, config: ServerConfig, context: zmq.Context[Any], socket_dir: str, recorder: Observer
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.tokenizer: TextTokenizer | None = None  # set when loaded; None: token ids only
        self.weight_version = DEFAULT_VERSION  # of those that requests run with now
        self.dead: str | None = None  # why no request can be served any more
        self._sender: Sender[message.ToScheduler] = Sender(context, socket_dir, "to_scheduler")
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[message.Ready] = self._loop.create_future()
        self._live = LiveSamples()
        self._numbers = itertools.count(1)
        self._unsent: deque[Sample] = deque()  # started, and not known to the scheduler yet
        self.ask = Questions(self._sender, recorder, config.num_ranks)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._receiver: Receiver[message.ToServer] = Receiver(context, socket_dir, "to_server")
        self._next_turn: asyncio.Handle | None = None
        # The file descriptor signals a change, not a state: each wake must read all there is.
        self._loop.add_reader(self._receiver.socket.FD, self._receive_all)
        self._loop.call_soon(self._receive_all)

    @property
    def engine(self) -> message.Ready:
        return self.ready.result()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @cached_property
    def max_samples(self) -> int:
        """What may run and wait at the same time."""
        return self.engine.max_running_requests + self.config.max_queued_requests

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._receiver.socket.FD)
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._receiver.close()
        self._sender.close()

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def submit(self, live: LiveRequest) -> None:
        """Starts every sample of every prompt; the scheduler hears of many of them in turns.

        Raises: EngineDead, QueueFull, DuplicateRid; then nothing was started.
        """
        live.names = list(self._admit(live))
        if live.timeout:
            live.deadline = self._loop.call_later(live.timeout, self._expire, live)
        started: deque[Sample] = deque()
        for prompt in live.prompts:
            seed = secrets.randbits(63) if prompt.seed is None else prompt.seed
            for i in range(prompt.n):
                started.append(self._start(live, prompt, i, sample_seed(seed, i)))
        self._send_turn(started)
        if started and not self._unsent:
            self._spawn(self._send_unsent())
        self._unsent += started

    def _admit(self, live: LiveRequest) -> set[str]:
        """All names of a request that may start."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        wanted = sum(prompt.n for prompt in live.prompts)
        if self.num_live + wanted > self.max_samples:
            raise QueueFull(
                f"{self.num_live} requests are running or waiting and {wanted} more would exceed "
                f"the limit of {self.max_samples}: try again later"
            )
        return self._live.free_names(live)

    def _expire(self, live: LiveRequest) -> None:
        limit = f"{live.timeout:g} s (timeout, or --request-timeout)"
        why = f"the request did not end within {limit}"
        reason = FinishReason(kind="abort", message=why, failure=Failure.TIMEOUT)
        self._spawn(self._abort_all(live.samples, reason))

    def _start(self, live: LiveRequest, prompt: message.Generate, i: int, seed: int) -> Sample:
        rid = prompt.sample_rid(i)
        # Clients may use a name again as soon as they have their answer, when the scheduler may
        # still have something to say about the first holder.
        engine_rid = f"{rid}#{next(self._numbers)}"
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(
                prompt.token_ids, prompt.sampling.skip_special_tokens, live.kept_tokens
            )
        sample = Sample(live, prompt, rid, engine_rid, len(live.samples), detokenizer)
        sample.seed = seed
        sample.last.weight_version = self.weight_version
        live.samples.append(sample)
        live.open += 1
        self._live.add(sample)
        return sample

    async def _send_unsent(self) -> None:
        """First come, first sent."""
        while self._unsent and self.dead is None:
            await asyncio.sleep(TURN_SECONDS)
            self._send_turn(self._unsent)

    def _send_turn(self, samples: deque[Sample]) -> None:
        """Hands the first of them to the scheduler, no more than it takes in in a moment."""
        tokens = 0
        for _ in range(min(SAMPLES_PER_TURN, len(samples))):
            sample = samples.popleft()
            if sample.finish is not None:
                continue
            self.recorder.started(sample)
            sample.sent = True
            self._sender.send(_message(sample))
            tokens += len(sample.prompt.token_ids)
            if tokens >= TOKENS_PER_TURN:
                break

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def abort(self, rid: str | None, why: str = "aborted by /abort_request") -> int:
        """Ends the samples of exactly this name, or all (None); how many there were."""
        reason = FinishReason(kind="abort", message=why)
        return await self._abort_all(self._live.named(rid), reason)

    def release(self, live: LiveRequest) -> None:
        """No one waits for the request any more: what still runs of it is ended."""
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
            self._sender.send(message.Abort(rid=sample.engine_rid))
        sample.end(reason)
        self._ended(sample)
        return True

    def fail(self, why: str, failure: Failure = Failure.INTERNAL) -> None:
        """The engine is gone: who waits gets an error, and every later request does."""
        if self.dead is not None:
            return
        self.dead = why
        reason = FinishReason(kind="abort", message=why, failure=failure)
        for sample in self._live.named(None):
            self._abort(sample, reason)
        self.ask.fail(why)

    # ── outputs ──────────────────────────────────────────────────────────────────────────────

    def _receive_all(self) -> None:
        """Takes all that comes, or as much as one turn may take: the others follow in the next."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        until = time.monotonic() + TURN_SECONDS
        while (item := self._receiver.receive(timeout_ms=0)) is not None:
            self._receive(item)
            if time.monotonic() > until:
                self._next_turn = self._loop.call_soon(self._receive_all)
                return

    def _receive(self, item: message.ToServer) -> None:
        if isinstance(item, list):
            now = time.time()
            for output in item:
                sample = self._live.get(output.rid)
                if sample is not None:  # else it came after the end
                    self._take(sample, output, now)
        elif isinstance(item, message.Ready):
            if not self.ready.done():
                self.ready.set_result(item)
        else:
            self.ask.answer(item)

    def _take(self, sample: Sample, output: message.RequestOutput, now: float) -> None:
        try:
            before = len(sample.output_ids)
            stop = sample.take(output)
            if stop is not None and output.finish is None:
                self._sender.send(stop)
            self.recorder.progressed(sample, len(sample.output_ids) - before, now)
            sample.request.tell(sample)
            if sample.finish is not None:
                self._ended(sample)
        except Exception:  # one request's trouble must not stop the others' outputs
            log.exception("request %s: its output could not be decoded", shown(sample.rid))
            why = "the output could not be decoded; see the server log"
            reason = FinishReason(kind="abort", message=why, failure=Failure.INTERNAL)
            self._abort(sample, reason)

    def _ended(self, sample: Sample) -> None:
        live = sample.request
        live.open -= 1
        self._live.remove(sample)
        live.tell(sample)
        self.recorder.finished(sample)
        if live.open == 0:
            if live.deadline is not None:
                live.deadline.cancel()
            live.done.set()
