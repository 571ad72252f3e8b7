"""What a drafter would have processed, by KV slot and state slot: the oracle for what the prefix
cache says of it."""

from __future__ import annotations

from collections.abc import Sequence

from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.message import FirstChunk, PrefillItem


class FakeDrafter:
    def __init__(self, reads: str, recurrent: bool) -> None:
        self.reads, self.recurrent = reads, recurrent
        self.kv: dict[int, tuple[int, int]] = {}  # (token, position), if all before it is known
        self.states: dict[int, tuple[int, ...]] = {}  # by state slot: the tokens before it
        self.follows: dict[int, bool] = {}  # by request slot
        self.copied = self.caught_up = 0  # tokens

    def overwritten(self, kv_slots: Sequence[int]) -> None:
        for slot in kv_slots:
            self.kv.pop(slot, None)

    def observe(self, item: PrefillItem, tokens: Sequence[int], table: Sequence[int]) -> None:
        """tokens, table: of the request, up to the chunk's end."""
        begin = item.start
        if item.first is not None:
            begin = self._begin(item, item.first, tokens, table)
        end = item.start + len(item.token_ids)
        follows = self.follows[item.slot]
        if follows:
            self._process(tokens, table, begin, end)
        saves = [(save.position, save.state_slot) for save in item.saves]
        for position, state_slot in [*saves, (end, item.state_slot)]:
            self._save(state_slot, tokens[:position] if follows else None)
        if item.draft_copy is not None:
            assert follows
            for source, target in zip(item.draft_copy.sources, item.draft_copy.targets):
                self.kv[target] = self.kv[source]
                self.copied += 1

    def _begin(
        self,
        item: PrefillItem,
        first: FirstChunk,
        tokens: Sequence[int],
        table: Sequence[int],
    ) -> int:
        """Where it begins to process the request."""
        lacking, begin, state_slot = first.draft_start, item.start, first.load_from
        anchor = item.start if first.replay is None else first.replay.start
        if lacking is not None:
            begin, state_slot = lacking.position, lacking.state_slot
            assert item.track and self.reads != "nothing"
            assert lacking.token_ids.tolist() == tokens[begin : item.start]
            if self.reads == "features":
                assert first.replay is not None and anchor <= begin, "features are in rows alone"
            self.caught_up += item.start - begin
        known = all(
            self.kv.get(table[place]) == (tokens[place], place) for place in range(begin)
        ) and (not self.recurrent or not begin or self.states.get(state_slot) == (*tokens[:begin],))
        assert known or lacking is None, "it has not followed what comes before"
        self.follows[item.slot] = item.track and known
        if lacking is not None and begin < anchor and first.load_from != item.state_slot:
            self._save(first.load_from, tokens[:anchor])
        return begin

    def _process(self, tokens: Sequence[int], table: Sequence[int], begin: int, end: int) -> None:
        for place in range(begin, end):
            self.kv[table[place]] = (tokens[place], place)

    def _save(self, state_slot: int, tokens: Sequence[int] | None) -> None:
        self.states.pop(state_slot, None)
        if tokens is not None:
            self.states[state_slot] = (*tokens,)

    def untrack(self, slot: int) -> None:
        self.follows[slot] = False

    def release(
        self, slot: int, keep_to: int, state_slot: int, tokens: Sequence[int], table: Sequence[int]
    ) -> None:
        if self.follows.pop(slot) and keep_to >= 0:
            self._process(tokens, table, 0, keep_to)
            self._save(state_slot, tokens[:keep_to])

    def check(self, cache: RadixCache) -> None:
        """It has followed whatever the cache says that it has."""
        stack = [(node, ()) for node in cache.root.children.values()]
        while stack:
            node, above = stack.pop()
            path = (*above, *node.tokens.tolist())
            stack += [(child, path) for child in node.children.values()]
            if node.followed:
                for slot, place in zip(node.kv_slots, range(node.start, node.end)):
                    assert self.kv.get(slot) == (path[place], place), f"position {place}"
            if self.recurrent and node.state_slot >= 0 and node.state_followed:
                assert self.states.get(node.state_slot) == path, f"state at {node.end}"
