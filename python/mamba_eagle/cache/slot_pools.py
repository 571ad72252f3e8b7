"""The pools of all slots, and what is cached in those not in use."""

import heapq
import time
from collections.abc import Collection

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import Match, Node, StateKind
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.message import AnchorMove, CacheNode
from mamba_eagle.message.indices import Indices


class SlotPools:
    """Says what is free, hands out slots, and evicts from the cache where needed. Knows no
    requests: who holds what is for ``Slots``."""

    def __init__(
        self,
        max_kv_slots: int,
        max_state_slots: int,
        max_requests: int,
        use_cache: bool = True,
        max_journals: int = 0,
        folds_journals: bool = True,
    ) -> None:
        """folds_journals: whether a state can be moved to the end of a journal by its rows alone;
        otherwise journals leave with their states only."""
        self.kv = SlotAllocator(max_kv_slots, "KV slot")
        self.states = SlotAllocator(max_state_slots, "state slot")
        self.requests = SlotAllocator(max_requests, "request slot")
        self.journals = SlotAllocator(max_journals if use_cache else 0, "journal slot")
        self.folds_journals = folds_journals
        self._moves: list[AnchorMove] = []
        self.stores = use_cache  # otherwise nothing is inserted, and every slot stays its owner's
        cache = self.cache = RadixCache(self.kv, self.states, self.journals, not folds_journals)
        self.match, self.flush = cache.match, cache.flush

    # ── what there is ────────────────────────────────────────────────────────────────────────

    @property
    def available_kv(self) -> int:
        """KV slots that are free or could be evicted from the cache."""
        return self.kv.num_free + self.cache.evictable_kv

    def gauges(self) -> dict[str, float]:
        """Slots by who has them; ``num_used_tokens`` leaves out what could be evicted."""
        cache, used = self.cache, self.kv.total - self.available_kv
        return {
            "num_used_tokens": used,
            "num_cached_tokens": cache.num_kv,
            "num_locked_tokens": cache.num_kv - cache.evictable_kv,
            "num_pinned_tokens": cache.pins.kv,
            "num_free_kv_slots": self.kv.num_free,
            "max_total_num_tokens": self.kv.total,
            "token_usage": used / max(self.kv.total, 1),
            "num_free_checkpoints": self.states.num_free,
            "num_cached_checkpoints": cache.num_states,
            "max_journals": self.journals.total,
            "num_free_journals": self.journals.num_free,
            "num_cached_journals": cache.num_journals,
            "num_pinned_checkpoints": cache.pins.states,
            "num_used_checkpoints": self.states.total - self.states.num_free - cache.num_states,
            "max_mamba_cache_size": self.states.total,
        }

    # ── handing out ──────────────────────────────────────────────────────────────────────────

    def reserve_state(self, keep: Collection[int] = ()) -> int | None:
        """A state slot; none of ``keep`` is evicted for it. None if there is no other."""
        if self.states.num_free == 0:
            self.cache.evict_states(1, keep)
        slots = self.states.allocate(1)
        return slots[0] if slots else None

    def reserve_spare(self, kind: StateKind, keep: Collection[int]) -> int | None:
        """A state slot for a state that no known request asks for: a free one, an eighth staying
        free, or for a document's that of another such state, which is not in ``keep``."""
        if self.states.can_spare or (
            kind == "document" and self.cache.evict_spare(lambda node: node.state_slot in keep)
        ):
            return self.reserve_state(keep)
        return None

    def reserve_journal(self, keep: Collection[int] = ()) -> int | None:
        """A journal slot; None if none is free or can be freed. keep: state slots that are
        not moved to the end of their journal for it; ``take_moves`` has the one that is."""
        if self.journals.num_free == 0 and self.folds_journals:
            move = self.cache.journals.evict(keep)
            if move is not None:
                self._moves.append(move)
        slots = self.journals.allocate(1)
        return slots[0] if slots else None

    def take_moves(self) -> list[AnchorMove]:
        """What is to be done first in the plan that is being built."""
        moves, self._moves = self._moves, []
        return moves

    def is_folding(self, state_slot: int) -> bool:
        """Whether the plan that is being built brings that state forward: it is not there yet."""
        return any(move.state_slot == state_slot for move in self._moves)

    def reserve_kv(self, count: int) -> Indices | None:
        """KV slots, of a request's tree the plan's until ``settle``. None, and nothing is evicted,
        if that many are not available."""
        missing = count - self.kv.num_free
        if missing > 0:
            if missing > self.cache.evictable_kv:
                return None
            self.cache.evict_kv(missing)
        return self.kv.allocate(count)

    def make_room(self, match: Match, count: int, most: int) -> bool:
        """Evicts up to ``most`` leaves for ``count`` KV slots beside what was matched. Returns
        False if more have to go."""
        cache = self.cache
        cache.lock(match.node)
        cache.evict_kv(count - self.kv.num_free, most)
        done = self.kv.num_free >= count or cache.leaves.first() is None
        cache.unlock(match.node)
        return done

    def check_sums(self, kv: int, states: int, journals: int, requests: int) -> None:
        """Raises: RuntimeError unless what is free, cached and held is all there is. Arguments:
        slots that requests and plans hold."""
        cache = self.cache
        for pool, cached, in_use in (
            (self.kv, cache.num_kv, kv),
            (self.states, cache.num_states, states),
            (self.journals, cache.num_journals, journals),
            (self.requests, 0, requests),
        ):
            if pool.num_free + cached + in_use != pool.total:
                raise RuntimeError(
                    f"{pool.name}s do not add up: {pool.num_free} free + {cached} cached + "
                    f"{in_use} held by requests != {pool.total}"
                )


MAX_CHILDREN = 8192  # of a node, among which the most recently used are looked for


def top_nodes(root: Node, max_nodes: int, max_tokens: int = 0) -> list[CacheNode]:
    """What a cache's tree looks like, for people: up to ``max_nodes`` nodes below ``root``, each
    after its parent; the most recently used ones, with up to ``max_tokens`` of their tokens.

    A node was used whenever one below it was, so these are found without a walk over the tree:
    only the children of nodes that are returned are looked at, the last ``MAX_CHILDREN`` that came.
    """
    now = time.monotonic()
    nodes: list[CacheNode] = []
    # (-used_at, order of discovery, node, index of its parent)
    heap: list[tuple[int, int, Node, int]] = []
    found = 0

    def discover(parent: Node, index: int) -> None:
        nonlocal found
        wanted = max_nodes - len(nodes)
        newest = list(parent.children.values())[-MAX_CHILDREN:]
        for child in heapq.nlargest(wanted, newest, key=lambda n: n.used_at):
            found += 1
            heapq.heappush(heap, (-child.used_at, found, child, index))

    discover(root, -1)
    while heap and len(nodes) < max_nodes:
        _, _, node, parent = heapq.heappop(heap)
        nodes.append(
            CacheNode(
                parent=parent,
                start=node.start,
                tokens=len(node.tokens),
                kind=node.kind if node.state_slot >= 0 else "",
                evicted_first=node.spare,
                locks=node.locks,
                age=round(max(now - node.used_time, 0.0), 3),
                children=len(node.children),
                token_ids=node.tokens[:max_tokens].tolist(),
            )
        )
        discover(node, len(nodes) - 1)
    return nodes
