"""What goes to the scheduler and comes from it, in turns of the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from mamba_eagle.message import Generate, Prompt, ToScheduler, ToServer
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.tokenizer.sample import Sample

# A request of thousands of samples is started and ended in turns, between which this process and
# the scheduler serve the others.
SAMPLES_PER_TURN = 32
TOKENS_PER_TURN = 32_768
TURN_SECONDS = 0.005


class Outbox:
    """Samples that were started and that the scheduler does not know yet, first come first sent."""

    def __init__(self, sender: Sender[ToScheduler]) -> None:
        self._sender = sender
        self._waiting: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, samples: deque[Sample]) -> bool:
        """Sends one turn of a request's samples and keeps the others. Returns whether they are the
        first that wait, so that the caller must send them in turns."""
        self._send(samples)
        was_empty = not self._waiting
        self._waiting += samples
        return was_empty and bool(samples)

    def send_turn(self) -> None:
        self._send(self._waiting)

    def _send(self, samples: deque[Sample]) -> None:
        """Hands the first of them to the scheduler, no more than it takes in in a moment."""
        tokens = 0
        for _ in range(min(SAMPLES_PER_TURN, len(samples))):
            sample = samples.popleft()
            if sample.finish is not None:
                continue
            sample.sent = True
            self._sender.send(_generate(sample))
            tokens += len(sample.prompt.token_ids)
            if tokens >= TOKENS_PER_TURN:
                break


def _generate(sample: Sample) -> Generate:
    asked = {name: getattr(sample.prompt, name) for name in Prompt.__struct_fields__}
    asked["rid"] = sample.engine_rid
    # Stop strings are looked for here; thousands of them would travel for nothing.
    asked["sampling"] = msgspec.structs.replace(asked["sampling"], seed=sample.seed, stop=[])
    return Generate(**asked, arrival_time=sample.request.arrival)


class Inbox:
    """Hands on all that comes, or as much as one turn may take: the others follow in the next."""

    def __init__(self, receiver: Receiver[ToServer], take: Callable[[ToServer], None]) -> None:
        """take: called with each message, on the running loop. receiver: this one's from now on."""
        self.receiver, self._take = receiver, take
        self._loop = asyncio.get_running_loop()
        self._next_turn: asyncio.Handle | None = None
        # The file descriptor tells of a change, not of a state: each wake must read all there is.
        self._loop.add_reader(receiver.socket.FD, self.receive_all)
        self._loop.call_soon(self.receive_all)

    def receive_all(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        until = time.monotonic() + TURN_SECONDS
        while (item := self.receiver.receive(timeout_ms=0)) is not None:
            self._take(item)
            if time.monotonic() > until:
                self._next_turn = self._loop.call_soon(self.receive_all)
                return

    def close(self) -> None:
        self._loop.remove_reader(self.receiver.socket.FD)
        if self._next_turn is not None:
            self._next_turn.cancel()
        self.receiver.close()
