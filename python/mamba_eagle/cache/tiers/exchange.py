"""Prefixes for other servers and from them, through files."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mamba_eagle.cache.node import as_tokens, salt_number
from mamba_eagle.cache.tiers import disk_log
from mamba_eagle.cache.tiers.passage import FromDevice, Load, Passage
from mamba_eagle.cache.tiers.tier import Tier
from mamba_eagle.message import ExportPrefix, ImportPrefix, PrefixMoved, TierCopy, TierSizes

FILE = 3  # the tier's number


class Call(NamedTuple):
    """Answered once its copies are."""

    id: int
    passage: Passage
    tokens: int
    lost: list[str]  # why copies failed


class Exchange:
    """A file is a tier below the host's that lives for one call: what is exported goes down into
    it, what is imported comes up from it. So all rules of the other tiers hold for it."""

    def __init__(
        self, device: FromDevice, sizes: TierSizes, draft_states: bool, numbers: Iterator[int]
    ) -> None:
        """device: the passage from the device to host memory. numbers: of copies."""
        self.device, self.host = device, device.lower
        self.sizes, self.draft_states, self.numbers = sizes, draft_states, numbers
        self.calls: list[Call] = []
        self.replies: list[PrefixMoved] = []  # not taken yet
        self.refused = 0  # files that were no good

    def send(self, asked: ExportPrefix) -> None:
        """What the device has of the prompt goes down to the host first."""
        tokens, salt = as_tokens(asked.token_ids), salt_number(asked.salt)
        limit = len(tokens) - 1
        above = self.device.upper.cache
        found = above.match(tokens, limit, salt)
        if found.position and not self.device.slots.is_folding(found.state_slot):
            self.device.send(found)
        hit = self.host.cache.match(tokens, limit, salt)
        if not hit.position:
            problem = "nothing of the prompt is cached, or there is no room in host memory"
            self._answer(asked.call_id, problem=problem)
            return
        file = Tier(
            FILE, self.host.num_units(hit.kv_slots, hit.journal), self.sizes, self.draft_states
        )
        passage = Passage(self.host, file, self.numbers, 1, False, disk_log.Labels(file))
        passage.send(hit)
        self._begin(asked, passage, hit.position)

    def receive(self, asked: ImportPrefix) -> None:
        try:
            found = disk_log.read_export(asked.path)
            file = self._tier_of(found)
        except disk_log.TornFile as error:
            self.refused += 1
            self._answer(asked.call_id, problem=str(error))
            return
        deepest = max(found.records, key=lambda record: record.label.end).label
        leaf = max(file.cache.nodes(), key=lambda node: node.end, default=file.cache.root)
        parts = [part.tokens for part in leaf.ancestors()]
        tokens = np.concatenate([as_tokens(()), *reversed(parts)])
        salt = int.from_bytes(deepest.salt, "little")
        hit = file.cache.match(tokens, len(tokens), salt)
        above = self.host.cache.match(tokens, len(tokens), salt).position
        passage = Passage(self.host, file, self.numbers, 1, False)
        if above >= hit.position:
            self._answer(asked.call_id, above)
        elif passage.load(tokens, hit, above, ()):
            self._begin(asked, passage, hit.position)
        else:
            self._answer(asked.call_id, problem="there is no room in host memory (--host-cache-gb)")

    def _tier_of(self, found: disk_log.ExportFile) -> Tier:
        """Raises: TornFile unless its records are of the sizes that this server's are."""
        sizes = self.sizes
        file = Tier(FILE, len(found.units), sizes, self.draft_states)
        for record in found.records:
            label = record.label
            state, journal, kv = (len(x) // 4 for x in (label.state, label.journal, label.kv))
            if (
                (state, journal) not in ((sizes.state_units, 0), (0, sizes.journal_units))
                or kv != len(label.tokens) // 4
                or len(record.sums) // disk_log.SUM_BYTES != state + journal + kv * sizes.kv_units
            ):
                raise disk_log.TornFile(
                    "layout: a state or a token takes another number of units there"
                )
        records = disk_log.live(found.records, len(found.units))
        if len(records) < len(found.records) or not records:
            raise disk_log.TornFile("its records contradict each other")
        disk_log.Labels(file).fill(records)
        return file

    def _begin(self, asked: ExportPrefix | ImportPrefix, passage: Passage, tokens: int) -> None:
        if not passage.transfers:
            self._answer(asked.call_id, problem="there is no room for the copies")
            return
        for copy in passage.copies:
            copy.path = asked.path
        self.calls.append(Call(asked.call_id, passage, tokens, []))

    def end(self, number: int, worked: bool, problem: str) -> bool:
        """A copy is answered. Returns whether it was one of these."""
        for call in self.calls:
            if call.passage.end(number, worked):
                call.lost.extend([] if worked else [problem])
                if not call.passage.transfers:
                    self.calls.remove(call)
                    self.refused += bool(call.lost)
                    self._answer(call.id, call.tokens, "; ".join(call.lost))
                return True
        return False

    def _answer(self, call_id: int, tokens: int = 0, problem: str = "") -> None:
        tokens = 0 if problem else tokens
        self.replies.append(PrefixMoved(call_id=call_id, tokens=tokens, problem=problem))

    def take_copies(self) -> list[TierCopy]:
        copies = [copy for call in self.calls for copy in call.passage.copies]
        for call in self.calls:
            call.passage.copies = []
        return copies

    def take_replies(self) -> list[PrefixMoved]:
        replies, self.replies = self.replies, []
        return replies

    def loads(self) -> Iterator[Load]:
        return (load for call in self.calls for load in call.passage.loads())
