"""KV events: the stream, replayed into a set, is the tree's reachable blocks; late, slow and lost
subscribers; the wire format."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest
import zmq
from fake_runner import FakeRunner, Server
from hypothesis import settings
from hypothesis.stateful import invariant
from ports import free_ports
from test_radix_cache import CacheAgainstDict, put

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.events import (
    BLOCK,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ReachableBlocks,
    block_hash,
)
from mamba_eagle.cache.node import as_tokens
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.events_config import EventsConfig, read_events_config
from mamba_eagle.scheduler.events import EventPublisher, Snapshot

SIZE = 2  # of the blocks below
WAIT_SECONDS = 60  # only what hangs takes so long


class EventsAgainstDict(CacheAgainstDict):
    """All rules of the cache's own test; after each, the events so far are compared."""

    def __init__(self):
        super().__init__()
        self.reachable, self.heard = ReachableBlocks(self.cache, SIZE), Snapshot()

    @invariant()
    def the_stream_is_what_can_be_reached(self):
        for event in self.reachable.drain():
            if isinstance(event, BlockStored):
                assert not self.heard.blocks.keys() & event.block_hashes, "stored twice"
                known = event.parent_block_hash in self.heard.blocks
                assert known or event.parent_block_hash is None, "stored before its parent"
            elif isinstance(event, BlockRemoved):
                assert self.heard.blocks.keys() >= set(event.block_hashes), "removed twice"
            self.heard.apply([event])
        ends = [*self.states, *(end for _, end in self.journals.values())]
        expected = {}
        for salt, *tokens in ends:
            parent = None
            for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
                own = tokens[start : start + SIZE]
                parent = block_hash(parent, salt, as_tokens(own))
                expected[parent] = own
        assert {own: block.tokens for own, block in self.heard.blocks.items()} == expected
        again = Snapshot()
        again.apply(self.heard.events())
        assert again.blocks == self.heard.blocks, "a snapshot says the same"
        before: set[int | None] = {None}
        for block in self.reachable.blocks():
            assert block.parent in before, "after the one before it"
            before.add(block.hash)
        assert before == {None, *expected}


TestEventsAgainstDict = EventsAgainstDict.TestCase
TestEventsAgainstDict.settings = settings(max_examples=40, stateful_step_count=40)


def new_cache() -> RadixCache:
    return RadixCache(SlotAllocator(4000), SlotAllocator(8), SlotAllocator(4))


def test_blocks_are_reachable_up_to_a_state_or_the_rows_behind_it():
    cache = new_cache()
    reachable = ReachableBlocks(cache)
    node = put(cache, list(range(100)))
    assert reachable.drain() == [], "KV alone makes no hit"
    (slot,) = cache.state_slots.allocate(1)
    cache.attach_state(node, 48, slot)
    (stored,) = reachable.drain()
    assert stored.token_ids == list(range(48)) and stored.parent_block_hash is None
    cache.attach_journal(node, 48, cache.journal_slots.allocate(1)[0], 85)
    (behind,) = reachable.drain()
    assert behind.token_ids == list(range(48, 80)), "85 is in the sixth block"
    assert behind.parent_block_hash == stored.block_hashes[-1]
    cache.evict_states(1)
    removed = reachable.drain()
    assert sum(len(each.block_hashes) for each in removed) == 5
    assert reachable.blocks() == []


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("{", "a JSON object"),
        ('{"endpont": "tcp://*:1"}', "endpont"),
        ('{"endpoint": "*:5557"}', "must be an address to bind"),
        ('{"publisher": "kafka"}', "must be zmq or null"),
        ('{"buffer_steps": 0}', "must be 1 or more"),
    ],
)
def test_a_wrong_config_is_refused(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        read_events_config(text)
    assert any(wrong in each for each in EngineConfig(kv_events_config=text).problems())


def test_events_are_off_unless_asked_for_and_local_unless_told_otherwise():
    assert read_events_config("") is None
    assert read_events_config('{"publisher": "null"}') is None
    config = read_events_config("{}")
    assert config is not None and config.endpoint.startswith("tcp://127.0.0.1:")
    assert config.replay_endpoint.startswith("tcp://127.0.0.1:")


class Subscriber:
    """Reads as a router would, and keeps what it was told."""

    def __init__(self, config: EventsConfig) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(config.endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(config.replay_endpoint)
        self.blocks: dict[int, list[int]] = {}
        self.next = 0

    def take(self, number: int, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "BlockStored":
                size = event["block_size"]
                for i, own in enumerate(event["block_hashes"]):
                    self.blocks[own] = event["token_ids"][i * size : (i + 1) * size]
            elif event["type"] == "BlockRemoved":
                for own in event["block_hashes"]:
                    del self.blocks[own]
            else:
                assert event["type"] == "AllBlocksCleared"
                self.blocks.clear()
        self.next = number + 1

    def is_greeted(self) -> None:
        """A batch without events comes at once, whose number says what was missed."""
        assert self.sub.poll(WAIT_SECONDS * 1000), "no one noticed"
        _, number, payload = self.sub.recv_multipart()
        assert msgspec.msgpack.decode(payload)[1] == []
        self.missed = int.from_bytes(number, "big")

    def listen(self) -> None:
        """One batch; those that were replayed already are skipped."""
        assert self.sub.poll(WAIT_SECONDS * 1000), "no event arrived"
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"" and len(number) == 8
        if int.from_bytes(number, "big") >= self.next:
            self.take(int.from_bytes(number, "big"), payload)

    def catch_up(self, start: int) -> int:
        """Returns how many batches came."""
        self.replay.send_multipart((b"", start.to_bytes(8, "big")))
        count = 0
        while True:
            assert self.replay.poll(WAIT_SECONDS * 1000), "no replay arrived"
            _, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return count
            self.take(int.from_bytes(number, "big"), payload)
            count += 1

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def published():
    """A cache, its publisher with room for four batches, and a way to make a subscriber."""
    port = free_ports(2)
    first, second = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    config = EventsConfig(endpoint=first, replay_endpoint=second, buffer_steps=4, max_queue_size=4)
    cache, subscribers = new_cache(), []
    publisher = EventPublisher(config, cache)

    def subscribe() -> Subscriber:
        subscribers.append(Subscriber(config))
        subscribers[-1].is_greeted()
        return subscribers[-1]

    yield cache, publisher, subscribe
    for subscriber in subscribers:
        subscriber.close()
    publisher.close()


def grow(cache: RadixCache, publisher: EventPublisher, number: int) -> None:
    put(cache, [number] * 2 * BLOCK, 2 * BLOCK)
    publisher.publish()


def reached(publisher: EventPublisher) -> dict[int, list[int]]:
    return {block.hash: block.tokens for block in publisher.reachable.blocks()}


def sent(publisher: EventPublisher, count: int) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while publisher._next < count and time.monotonic() < until:
        time.sleep(0.01)
    assert publisher._next == count


def test_a_late_subscriber_is_told_everything_and_then_hears_the_rest(published):
    cache, publisher, subscribe = published
    for number in range(3):
        grow(cache, publisher, number)
    sent(publisher, 3)
    early = subscribe()
    assert early.missed == 3
    assert early.catch_up(0) == 4 and early.blocks == reached(publisher)
    for number in range(3, 6):
        grow(cache, publisher, number)
    sent(publisher, 7)
    late = subscribe()
    assert late.catch_up(0) == 1, "batches 0 to 3 are not kept: a snapshot"
    assert late.blocks == reached(publisher) and late.next == 8
    assert early.catch_up(4) == 4 and early.blocks == late.blocks
    cache.evict_states(2)
    publisher.publish()
    cache.flush()
    publisher.publish()
    sent(publisher, 10)
    for subscriber in (early, late):
        subscriber.catch_up(subscriber.next)
        assert subscriber.blocks == {}


def test_a_live_subscriber_hears_what_changes(published):
    cache, publisher, subscribe = published
    subscriber = subscribe()
    grow(cache, publisher, 10)
    while subscriber.blocks != reached(publisher):
        subscriber.listen()


def test_what_does_not_fit_into_the_queue_is_made_up_for(published):
    cache, publisher, subscribe = published
    send, held = publisher._send, []
    publisher._send = held.append  # the thread gets no further
    for number in range(3):
        grow(cache, publisher, number)
    while len(held) < 3:
        time.sleep(0.01)
    publisher._queue.maxsize = 1
    publisher._queue.put([])  # full, as far as the scheduler can see
    publisher._queue.maxsize = 0
    publisher._send = send
    publisher.lost = True
    publisher.publish()
    assert not publisher.lost
    subscriber = subscribe()
    until = time.monotonic() + WAIT_SECONDS
    while subscriber.blocks != reached(publisher) and time.monotonic() < until:
        subscriber.catch_up(0)
    assert subscriber.blocks == reached(publisher) and len(subscriber.blocks) == 6


def test_a_full_queue_is_noticed_and_nothing_waits(published):
    cache, publisher, _ = published
    publisher._ended = True
    publisher._thread.join()
    for number in range(6):
        grow(cache, publisher, number)
    assert publisher.lost and publisher._queue.full()


def test_an_address_that_is_taken_is_refused(published):
    _, publisher, _ = published
    with pytest.raises(ConfigError, match="cannot bind"):
        EventPublisher(publisher.config, new_cache())


def test_dynamos_index_knows_what_can_be_reached_from_the_start_and_after_it_was_killed(published):
    reason = "Dynamo's index is not installed: mamba-eagle[events]"
    pytest.importorskip("dynamo.llm", reason=reason)
    from mamba_eagle.cluster.event_index import EventIndex
    from mamba_eagle.cluster.replica import EventSource

    cache, publisher, _ = published
    source = EventSource(publisher.config.endpoint, publisher.config.replay_endpoint)

    async def says(index: EventIndex, expected: dict[int, int]) -> None:
        """The tokens that are cached of prompts, each of one token many times."""
        found: dict[int, int] = {}
        until = time.monotonic() + WAIT_SECONDS
        while found != expected and time.monotonic() < until:
            await asyncio.sleep(0.01)
            publisher.publish()  # what did not fit into the queue
            for token in expected:
                overlaps = await index.overlaps([token] * (2 * BLOCK + 1))
                found[token] = overlaps.get("one", -1)
        assert found == expected

    async def test() -> None:
        grow(cache, publisher, 0)
        first = EventIndex()
        await first.follow({"one": source})
        await says(first, {0: 2 * BLOCK, 1: 0})
        grow(cache, publisher, 1)
        await says(first, {0: 2 * BLOCK, 1: 2 * BLOCK})
        first.close()
        cache.flush()
        for number in range(2, 8):  # more batches than are kept
            grow(cache, publisher, number)
        second = EventIndex()
        await second.follow({"one": source})
        await says(second, {1: 0, 2: 2 * BLOCK, 7: 2 * BLOCK})
        assert await second.overlaps([7] * BLOCK) == {}, "the last token is never cached"
        assert await second.overlaps([7] * 2 * BLOCK) == {"one": BLOCK}
        cache.flush()
        publisher.publish()
        await says(second, {2: 0, 7: 0})
        await second.follow({})
        assert await second.overlaps([7] * 3 * BLOCK) == {}
        second.close()

    asyncio.run(test())


def test_events_predict_what_is_cached():
    """Chats and forks with few states, so that something is evicted all the time."""
    rng = random.Random(1)
    runner = FakeRunner(1500, 12, 4, 3000, journals=5)
    serving = Server(EngineConfig(speculative_algorithm="NONE"), runner)
    cache = serving.scheduler.slots.cache
    reachable, heard = ReachableBlocks(cache), Snapshot()
    chats = [[rng.randrange(50) for _ in range(60)] for _ in range(4)]
    extends = [False] * 4  # whether the next prompt of a chat continues the last output
    errors: dict[bool, list[int]] = {False: [], True: []}
    for turn in range(70):
        place = rng.randrange(len(chats))
        prompt = chats[place] + [rng.randrange(50) for _ in range(rng.randint(1, 40))]
        heard.apply(reachable.drain())
        overlap, parent = 0, None
        while len(prompt) > (overlap + 1) * BLOCK:
            own = prompt[overlap * BLOCK : (overlap + 1) * BLOCK]
            parent = block_hash(parent, 0, as_tokens(own))
            if parent not in heard.blocks:
                break
            overlap += 1
        assert cache.match(as_tokens(prompt), len(prompt) - 1).length >= overlap * BLOCK
        serving.add(f"{turn}", prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
        serving.finish()
        cached = serving.last[f"{turn}"].cached_tokens
        assert cached // BLOCK <= overlap, "a hit that was not announced"
        errors[extends[place]].append(overlap * BLOCK - cached)
        text = prompt + serving.texts[f"{turn}"]
        extends[place] = len(text) < 300 and rng.random() < 0.6
        chats[place] = text if extends[place] else text[:60]
    assert serving.scheduler.cache_use().evicted_states > 20
    assert max(errors[True]) < BLOCK, "a request that extends what is cached"
    assert sum(error <= 128 for error in errors[False]) >= 0.95 * len(errors[False])


def test_the_wire_format():
    event = BlockStored([5, 6], None, [1] * 32, 16)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode([event, AllBlocksCleared()]))
    assert decoded == [
        {
            "type": "BlockStored",
            "block_hashes": [5, 6],
            "parent_block_hash": None,
            "token_ids": [1] * 32,
            "block_size": 16,
        },
        {"type": "AllBlocksCleared"},
    ]
