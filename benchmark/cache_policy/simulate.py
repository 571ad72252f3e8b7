"""Which states are worth keeping? Replays generated requests on the prefix cache, without a model,
under several policies of eviction.

    python -m benchmark.cache_policy.simulate

Requests come one after the other. States are saved where the scheduler saves them: at the end of
the prompt, where it leaves the tree, at the end of the output, and spare ones at multiples of 64,
of which the last one before what may be a question takes the place of another.
Appends to --results one line per trace, budget and policy: ``value`` is the share of all prompt
tokens that were cached, ``bound`` the share with memory without end and a state at each token.
``states`` and ``kv_slots`` are the same for all policies, so their bytes are equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.cache_policy.policies import POLICIES, with_policy
from benchmark.cache_policy.traces import TRACES, Turn, trace
from mamba_eagle.bench import facts, results
from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import SPARE_KINDS, as_tokens
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.cache.states import CachedStates
from mamba_eagle.message.indices import indices

HERE = Path(__file__).parent
INTERVAL, MAX_SPARE = 64, 32


def save(cache: RadixCache, node: Any, position: int, kind: Any) -> None:
    if cache.state_slots.num_free == 0:
        if kind in SPARE_KINDS:
            return
        cache.evict_states(1)
    slot = cache.state_slots.allocate(1)
    if slot and not cache.attach_state(node, position, slot[0], kind):
        cache.state_slots.free(slot)


def serve(cache: RadixCache, turn: Turn) -> int:
    """Returns how many tokens of the prompt were cached."""
    prompt = as_tokens(turn.prompt)
    tail = len(prompt) - 1
    match = cache.match(prompt, tail)
    whole = as_tokens(turn.prompt + turn.output[:-1])  # the last token is never run
    cache.lock(match.node)
    missing = len(whole) - match.position - cache.kv.num_free
    if missing > 0:
        cache.evict_kv(missing)
    slots = cache.kv.allocate(len(whole) - match.position) or indices()
    done = cache.insert(match.node, whole[match.position :], slots)
    cache.lock(done.node)
    cache.unlock(match.node)
    cache.kv.free(slots[: len(slots) - done.taken])
    save(cache, done.node, tail, "tail")
    if match.position < match.length < tail:
        save(cache, done.node, match.length, "branch")
    strides = (len(prompt) - match.position) // INTERVAL
    stride = INTERVAL * max(1, -(-strides // MAX_SPARE))
    document = tail // stride * stride - stride
    spare = range((match.position // stride + 1) * stride, tail, stride)
    for position in sorted(spare, key=lambda position: position != document):
        kind = "document" if position == document else "spare"
        free = cache.state_slots.num_free > max(1, cache.state_slots.total // 8)
        if free or (kind == "document" and cache.evict_spare(lambda node: False)):
            save(cache, done.node, position, kind)
    save(cache, done.node, len(whole), "output")
    cache.unlock(done.node)
    return match.position


def bound(turns: Sequence[Turn]) -> int:
    """Tokens that a cache of everything would have had: the longest prefix of an earlier text."""
    cache = RadixCache(
        SlotAllocator(sum(len(t.prompt) + len(t.output) for t in turns)), SlotAllocator(1)
    )
    total = 0
    for turn in turns:
        prompt = as_tokens(turn.prompt)
        total += min(cache.match(prompt, 0).length, len(prompt) - 1)
        whole = as_tokens(turn.prompt + turn.output[:-1])
        slots = cache.kv.allocate(len(whole)) or indices()
        taken = cache.insert(cache.root, whole, slots).taken
        cache.kv.free(slots[: len(slots) - taken])
    return total


def replay(turns: Sequence[Turn], policy: type[CachedStates], kv_slots: int, states: int) -> int:
    """Cached prompt tokens, of all turns."""
    cache = with_policy(policy, SlotAllocator(kv_slots), SlotAllocator(states))
    hits = sum(serve(cache, turn) for turn in turns)
    cache.check_integrity()
    return hits


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    turns = trace(name, args.requests, args.at_once, args.seed)
    prompts, most = sum(len(turn.prompt) for turn in turns), bound(turns)
    lines = []
    for states in args.states:
        kv_slots = states * args.kv_per_state
        for policy in POLICIES:
            hits = replay(turns, POLICIES[policy], kv_slots, states)
            line = {
                "name": "cached_share",
                "trace": name,
                "policy": policy,
                "states": states,
                "kv_slots": kv_slots,
                "value": round(hits / prompts, 4),
                "bound": round(most / prompts, 4),
                "requests": args.requests,
                "at_once": args.at_once,
                "seed": args.seed,
                "commit": facts.commit(),
                "date": facts.today(),
            }
            print(
                f"{name:10} {states:5} {policy:14} {line['value']:.4f} of {line['bound']:.4f}",
                flush=True,
            )
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--at-once", type=int, default=40, help="sessions that alternate")
    parser.add_argument("--states", type=int, nargs="+", default=[32, 100, 300])
    parser.add_argument("--kv-per-state", type=int, default=1000, help="KV slots per state slot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", default=str(HERE.parent / "results" / "cache.jsonl"))
    args = parser.parse_args()
    for name in TRACES:
        results.append(args.results, measure(name, args))


if __name__ == "__main__":
    main()
