"""KV events over ZMQ: a PUB socket for what changes, a ROUTER socket for what was missed.

The format is vLLM's, which routers such as NVIDIA Dynamo's and llm-d's read:

    PUB      topic, sequence number (8 bytes, big-endian), msgpack of [time, [events], rank]; a
             batch without events follows each subscription: who missed any sees it by the number
    ROUTER   (b"", n) is answered by each batch from n on, as (b"", number, msgpack), and then by
             (b"", -1, b""); so a client needs a DEALER socket, since REQ takes one reply only

A subscriber that comes late asks for a batch that is not kept any more. It is then sent one batch
with the last number so far: everything is cleared, and all blocks are stored.
"""

import logging
import queue
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from mamba_eagle.cache.events import (
    AllBlocksCleared,
    AnyEvent,
    Block,
    BlockRemoved,
    BlockStored,
    ReachableBlocks,
)
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.config import ConfigError
from mamba_eagle.core import shown
from mamba_eagle.events_config import EventsConfig

log = logging.getLogger("mamba_eagle.scheduler")
POLL_MS = 20  # how long a replay may wait
SUBSCRIBE = b"\x01"  # how XPUB says so; the topic follows
END = (-1).to_bytes(8, "big", signed=True)
MAX_SNAPSHOT_EVENT = 1024  # blocks in one event of a snapshot


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Snapshot:
    """What a subscriber that has read everything knows."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}  # each after the one before it

    def apply(self, events: list[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                for number, own in enumerate(event.block_hashes):
                    tokens = event.token_ids[number * size : (number + 1) * size]
                    self.blocks[own] = Block(own, parent, tokens)
                    parent = own
            elif isinstance(event, BlockRemoved):
                for own in event.block_hashes:
                    self.blocks.pop(own, None)
            else:
                self.blocks.clear()

    def events(self) -> list[AnyEvent]:
        """From which a new subscriber learns the same."""
        events: list[AnyEvent] = [AllBlocksCleared()]
        for block in self.blocks.values():
            last = events[-1]
            if (
                isinstance(last, BlockStored)
                and last.block_hashes[-1] == block.parent
                and len(last.block_hashes) < MAX_SNAPSHOT_EVENT
            ):
                last.block_hashes.append(block.hash)
                last.token_ids.extend(block.tokens)
            else:
                size, tokens = len(block.tokens), list(block.tokens)
                events.append(BlockStored([block.hash], block.parent, tokens, size))
        return events


class EventPublisher:
    """Sends from a thread of its own. ``publish`` never waits: what does not fit into the queue is
    dropped, and everything that there is then follows."""

    def __init__(self, config: EventsConfig, cache: RadixCache) -> None:
        """Raises: ConfigError if an address cannot be bound."""
        self.config = config
        self.reachable = ReachableBlocks(cache)
        self.lost = False  # batches did not fit into the queue
        self._queue: queue.Queue[list[AnyEvent] | None] = queue.Queue(config.max_queue_size)
        self._context = zmq.Context()
        self._pub = self._bind(zmq.XPUB, config.endpoint)
        self._replay = self._bind(zmq.ROUTER, config.replay_endpoint)
        self._snapshot, self._next = Snapshot(), 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-events")
        self._thread.start()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes] | None:
        if not endpoint:
            return None
        socket = self._context.socket(kind)
        socket.set_hwm(self.config.hwm)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # it tells of each subscription
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                [f"--kv-events-config: cannot bind {shown(endpoint)} ({error}): choose another"]
            ) from None
        return socket

    def publish(self) -> None:
        """Called by the scheduler: sends what has changed in the cache."""
        events = self.reachable.drain()
        if self.lost and not self._queue.full():
            snapshot = Snapshot()
            snapshot.blocks = {block.hash: block for block in self.reachable.blocks()}
            events = snapshot.events()
        if not events:
            return
        try:
            self._queue.put_nowait(events)
            self.lost = False
        except queue.Full:
            self.lost = True

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._ended:
            try:
                events = self._queue.get(timeout=POLL_MS / 1000)
            except queue.Empty:
                events = None
            try:
                if events is not None:
                    self._send(events)
                if self._subscribed():
                    self._send([])
                while self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
            except Exception:
                log.exception("KV events: a batch or a replay was not sent")

    def _subscribed(self) -> bool:
        """Whether somebody has subscribed since the last call."""
        assert self._pub is not None
        anybody = False
        while self._pub.poll(0):
            anybody |= self._pub.recv().startswith(SUBSCRIBE)
        return anybody

    def _send(self, events: list[AnyEvent]) -> None:
        self._snapshot.apply(events)
        payload, number = self._payload(events), self._next
        self._next += 1
        self._sent.append((number, payload))
        assert self._pub is not None
        topic = self.config.topic.encode()
        self._pub.send_multipart((topic, number.to_bytes(8, "big"), payload))

    def _payload(self, events: list[AnyEvent]) -> bytes:
        return self._encode(EventBatch(time.time(), events, 0))

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning(
                "KV events: a replay was asked for by %d frames, not by a number", len(frames)
            )
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        kept = self._sent[0][0] if self._sent else self._next
        batches = [(number, payload) for number, payload in self._sent if number >= start]
        if start < kept:
            batches = [(self._next - 1, self._payload(self._snapshot.events()))]
        for number, payload in batches:
            socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", END, b""))

    def close(self) -> None:
        self._ended = True
        self._thread.join(timeout=1.0)
        self._context.destroy(linger=0)
