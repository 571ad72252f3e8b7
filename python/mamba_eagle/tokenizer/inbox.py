"""Messages of the scheduler, taken in turns of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mamba_eagle.message import ToServer
from mamba_eagle.message.channel import Receiver
from mamba_eagle.tokenizer.outbox import TURN_SECONDS


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
