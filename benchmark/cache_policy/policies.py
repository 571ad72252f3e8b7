"""Ways to choose which state is evicted. All but ``marconi`` are GreedyDual with other values."""

from __future__ import annotations

from collections.abc import Collection

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import Node
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.cache.states import CachedStates
from mamba_eagle.cache.tree import PrefixTree

# of Nemotron-Nano-9B-v2: 9e9 weights, 4 attention layers of 40 heads of 128
LINEAR = 2 * 9e9  # FLOPs per token
ATTENTION = 4 * 4 * 40 * 128  # FLOPs per token and token before it
HALF_LIFE = 500  # matches and inserts after which a use counts half
GHOSTS = 20  # evicted states whose use is remembered, per state slot


def end_above(node: Node) -> int:
    """Position of the next shallower state that counts."""
    for part in node.ancestors():
        if part is not node and part.state_slot >= 0 and not part.spare:
            return part.end
    return 0


def saved_flops(node: Node) -> float:
    """What a hit saves over one on the next shallower state, in tokens of linear work."""
    first, end = end_above(node), node.end
    return (LINEAR * (end - first) + ATTENTION * (end**2 - first**2) / 2) / LINEAR


class Lru(CachedStates):
    def score(self, node: Node) -> int:
        return node.state_used_at


class Flops(CachedStates):
    """All states are of one size: FLOPs per byte are in the order of FLOPs."""

    def score(self, node: Node) -> int:
        return int(node.inflation + saved_flops(node))


class RememberedUse(CachedStates):
    """FLOPs times a decaying count of uses, which outlives the state."""

    def __init__(self, tree: PrefixTree, slots: SlotAllocator) -> None:
        self.uses: dict[Node, tuple[float, int]] = {}  # and when they were counted
        self.ghosts: dict[bytes, tuple[float, int]] = {}
        super().__init__(tree, slots)

    def score(self, node: Node) -> int:
        uses = self.uses[node][0] if node in self.uses else 1.0
        return int(node.inflation + saved_flops(node) * uses)

    def _renew(self, node: Node) -> None:
        super()._renew(node)
        uses, when = self.uses.get(node) or self.ghosts.pop(self._name(node), (0.0, 0))
        self.uses[node] = 1 + uses * 0.5 ** ((self.tree.clock - when) / HALF_LIFE), self.tree.clock
        self.order.update(node)

    def drop(self, node: Node) -> None:
        self.ghosts[self._name(node)] = self.uses.pop(node)
        if len(self.ghosts) > GHOSTS * self.slots.total:
            del self.ghosts[next(iter(self.ghosts))]
        super().drop(node)

    @staticmethod
    def _name(node: Node) -> bytes:
        return b"".join(part.tokens.tobytes() for part in node.ancestors())


def marconi(alpha: float) -> type[CachedStates]:
    """Recency plus ``alpha`` times FLOPs per byte, both scaled to 0 … 1 over all states (arXiv
    2411.19379, section 4.2)."""

    class Marconi(CachedStates):
        def least(self, keep: Collection[int]) -> Node | None:
            nodes = [node for node in self.order if node.state_slot not in keep]
            if not nodes:
                return None
            values = [saved_flops(node) for node in nodes]
            times = [node.state_used_at for node in nodes]
            low, span = min(values), max(values) - min(values) or 1.0
            first, age = min(times), max(times) - min(times) or 1

            def utility(i: int) -> float:
                return (times[i] - first) / age + alpha * (values[i] - low) / span

            return nodes[min(range(len(nodes)), key=utility)]

    return Marconi


def with_policy(
    policy: type[CachedStates], kv: SlotAllocator, state_slots: SlotAllocator
) -> RadixCache:
    cache = RadixCache(kv, state_slots)
    cache.states = cache.journals.states = policy(cache, state_slots)
    return cache


POLICIES: dict[str, type[CachedStates]] = {
    "lru": Lru,
    "today": CachedStates,
    "flops": Flops,
    "flops_and_use": RememberedUse,
    **{f"marconi_{alpha}": marconi(alpha) for alpha in (0.25, 0.5, 1.0, 2.0)},
}
