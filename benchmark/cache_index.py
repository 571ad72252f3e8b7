"""What the prefix cache's indices cost the scheduler, by how much they hold. Indices only: no
model, no GPU.

    python -m benchmark.cache_index

Appends to --results, one line per measurement; ``value`` is the median time in microseconds:

    evict_state   one state of ``size``; each is of a prompt of its own
    evict_leaf    one leaf (4 tokens) of a tree of ``size`` nodes
    match         a prompt of ``size`` tokens, whose nodes have 250 tokens each
    plan_wire     encoding and decoding a plan whose request has ``size`` prefix slots

The first two are of one operation each, over --repetitions; a new state or leaf takes the place of
each that went.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mamba_eagle.bench import facts, results
from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import as_tokens
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import FirstChunk, Plan, PrefillItem
from mamba_eagle.message.indices import from_wire, indices, to_wire

HERE = Path(__file__).parent
LEAF, PART = 4, 250  # tokens per leaf, tokens per node of a long prompt


def put(cache: RadixCache, prompt: list[int], *positions: int) -> None:
    slots = cache.kv.allocate(len(prompt))
    assert slots is not None
    node = cache.insert(cache.root, as_tokens(prompt), slots).node
    for position in positions:
        state = cache.state_slots.allocate(1)
        assert state is not None
        cache.attach_state(node, position, state[0])


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def leaf(number: int) -> list[int]:
    return [number * LEAF + i for i in range(LEAF)]


def evict_state(size: int, repetitions: int) -> list[float]:
    total = (size + repetitions) * LEAF
    cache = RadixCache(SlotAllocator(total), SlotAllocator(size))
    for number in range(size):
        put(cache, leaf(number), LEAF)
    taken = []
    for number in range(size, size + repetitions):
        taken.append(seconds(lambda: cache.evict_states(1)))
        put(cache, leaf(number), LEAF)
    return taken


def evict_leaf(size: int, repetitions: int) -> list[float]:
    cache = RadixCache(SlotAllocator(size * LEAF), SlotAllocator(1))
    for number in range(size):
        put(cache, leaf(number))
    taken = []
    for number in range(size, size + repetitions):
        taken.append(seconds(lambda: cache.evict_kv(1)))
        put(cache, leaf(number))
    return taken


def match(size: int, repetitions: int) -> list[float]:
    cache = RadixCache(SlotAllocator(size), SlotAllocator(size // PART))
    prompt = list(range(size))
    put(cache, prompt, *range(PART, size + 1, PART))
    tokens = as_tokens(prompt)
    assert cache.match(tokens, size).position == size
    return [seconds(lambda: cache.match(tokens, size)) for _ in range(repetitions)]


def plan_wire(size: int, repetitions: int) -> list[float]:
    item = PrefillItem(
        slot=0,
        state_slot=0,
        start=size,
        token_ids=indices([1]),
        kv_slots=indices([size]),
        first=FirstChunk(
            sampling=SamplingParams(), output_start=size, prefix_kv_slots=indices(range(size))
        ),
    )
    plan = Plan(step=1, prefill=[item])
    encode = msgspec.msgpack.Encoder(enc_hook=to_wire).encode
    decode = msgspec.msgpack.Decoder(Plan, dec_hook=from_wire).decode
    assert decode(encode(plan)) == plan
    return [seconds(lambda: decode(encode(plan))) for _ in range(repetitions)]


CASES: list[tuple[Callable[[int, int], list[float]], tuple[int, ...]]] = [
    (evict_state, (200, 2_000, 10_000)),
    (evict_leaf, (1_000, 10_000, 100_000)),
    (match, (1_000, 10_000, 100_000)),
    (plan_wire, (1_000, 10_000, 100_000)),
]


def measure(repetitions: int) -> list[dict[str, Any]]:
    lines = []
    for case, sizes in CASES:
        for size in sizes:
            taken = sorted(case(size, repetitions))
            line = {
                "name": case.__name__,
                "size": size,
                "value": round(1e6 * statistics.median(taken), 2),
                "unit": "us",
                "p99": round(1e6 * taken[int(0.99 * len(taken))], 2),
                "repetitions": repetitions,
                "cpu": facts.cpu_model(),
                "threads": os.cpu_count(),
                "commit": facts.commit(),
                "date": facts.today(),
            }
            print(f"{line['name']:12} {size:7} {line['value']:9.2f} us", flush=True)
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=500)
    parser.add_argument("--results", default=str(HERE / "results" / "cache.jsonl"))
    arguments = parser.parse_args()
    results.append(arguments.results, measure(arguments.repetitions))


if __name__ == "__main__":
    main()
