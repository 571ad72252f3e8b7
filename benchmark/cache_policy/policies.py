"""Ways to choose which state is evicted. All but ``marconi`` are GreedyDual with other values."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.base import Node
from mamba_eagle.cache.radix import RadixCache

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


class Lru(RadixCache):
    def _score(self, node: Node) -> int:  # type: ignore[override]
        return node.state_used_at


class Flops(RadixCache):
    """All states are of one size: FLOPs per byte are in the order of FLOPs."""

    def _score(self, node: Node) -> int:  # type: ignore[override]
        return int(node.inflation + saved_flops(node))


class RememberedUse(RadixCache):
    """FLOPs times a decaying count of uses, which outlives the state."""

    def __init__(self, kv: SlotAllocator, state_slots: SlotAllocator) -> None:
        self.uses: dict[Node, tuple[float, int]] = {}  # and when they were counted
        self.ghosts: dict[bytes, tuple[float, int]] = {}
        super().__init__(kv, state_slots)

    def _score(self, node: Node) -> int:  # type: ignore[override]
        uses = self.uses[node][0] if node in self.uses else 1.0
        return int(node.inflation + saved_flops(node) * uses)

    def _renew(self, node: Node) -> None:
        super()._renew(node)
        uses, when = self.uses.get(node) or self.ghosts.pop(self._name(node), (0.0, 0))
        self.uses[node] = 1 + uses * 0.5 ** ((self.clock - when) / HALF_LIFE), self.clock
        if node in self._states:
            self._states.put(node)

    def _drop_state(self, node: Node) -> None:
        self.ghosts[self._name(node)] = self.uses.pop(node)
        if len(self.ghosts) > GHOSTS * self.state_slots.total:
            del self.ghosts[next(iter(self.ghosts))]
        super()._drop_state(node)

    @staticmethod
    def _name(node: Node) -> bytes:
        return b"".join(part.tokens.tobytes() for part in node.ancestors())


def marconi(alpha: float) -> type[RadixCache]:
    """Recency plus ``alpha`` times FLOPs per byte, both scaled to 0 … 1 over all states (arXiv
    2411.19379, section 4.2)."""

    class Marconi(RadixCache):
        def evict_states(self, count: int, keep: Collection[int] = ()) -> int:
            for freed in range(count):
                nodes = [node for node in self._states if node.state_slot not in keep]
                if not nodes:
                    return freed
                values = [saved_flops(node) for node in nodes]
                times = [node.state_used_at for node in nodes]
                low, span = min(values), max(values) - min(values) or 1.0
                first, age = min(times), max(times) - min(times) or 1

                def utility(
                    i: int,
                    values: list[float] = values,
                    times: list[int] = times,
                    scale: tuple[float, float, int, int] = (low, span, first, age),
                ) -> float:
                    low, span, first, age = scale
                    return (times[i] - first) / age + alpha * (values[i] - low) / span

                self._drop_state(nodes[min(range(len(nodes)), key=utility)])
            return max(count, 0)

    return Marconi


Policy = Callable[[SlotAllocator, SlotAllocator], RadixCache]
POLICIES: dict[str, Policy] = {
    "lru": Lru,
    "today": RadixCache,
    "flops": Flops,
    "flops_and_use": RememberedUse,
    **{f"marconi_{alpha}": marconi(alpha) for alpha in (0.25, 0.5, 1.0, 2.0)},
}
