"""The tiers below the device, as the scheduler sees them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count, zip_longest

from mamba_eagle.cache.node import Tokens
from mamba_eagle.cache.slot_pools import SlotPools
from mamba_eagle.cache.slots import Coming
from mamba_eagle.cache.tiers.disk_log import Labels
from mamba_eagle.cache.tiers.exchange import Exchange
from mamba_eagle.cache.tiers.passage import FromDevice, Passage
from mamba_eagle.cache.tiers.tier import Tier
from mamba_eagle.message import TierCopy, TierSizes

MIN_GAINS = (64, 128)  # tokens that a load from host memory, and from disk, must save
NONE: Mapping[int, str] = {}
MAX_WRITTEN = 4  # states per plan that go down before they are evicted


class CacheTiers:
    """Says which copies a plan is to name, and learns from its result which have ended."""

    def __init__(self, slots: SlotPools, sizes: TierSizes, draft_states: bool) -> None:
        self.passages: list[Passage] = []  # from the top
        self._arrived: list[int] = []
        self._empties_disk = False
        self.num_started = 0  # loads
        self.labels: Labels | None = None
        self.exchange: Exchange | None = None
        if sizes.host_units:
            numbers = count(1)
            host = Tier(1, sizes.host_units, sizes, draft_states)
            on_disk = bool(sizes.disk_units)
            if on_disk:
                disk = Tier(2, sizes.disk_units, sizes, draft_states)
                self.labels = Labels(disk)
                numbers = count(self.labels.restore(sizes.disk_log))
            device = FromDevice(slots, host, numbers, MIN_GAINS[0], on_disk)
            self.passages.append(device)
            if on_disk:
                self.passages.append(Passage(host, disk, numbers, MIN_GAINS[1], True, self.labels))
            for passage in self.passages:
                passage.upper.cache.below = passage
            self.exchange = Exchange(device, sizes, draft_states, numbers)

    @property
    def in_flight(self) -> bool:
        """Whether a copy is to be answered."""
        moves = self.exchange is not None and self.exchange.calls
        return bool(moves) or any(passage.transfers for passage in self.passages)

    def fetch(
        self, tokens: Tokens, limit: int, salt: int, above: int, keep: Collection[int]
    ) -> bool:
        """Whether a prompt, which the device has up to position ``above``, is worth waiting for
        what comes up; starts it if a lower tier has more.

        limit: the deepest position that is of use. keep: state slots that must not be evicted."""
        for passage in self.passages:
            for load in passage.loads():
                if load.serves(tokens, limit, salt) - above >= passage.min_gain:
                    return True
        for place, passage in reversed(list(enumerate(self.passages))):  # the lowest first
            over = [each.reach(tokens, limit, salt).position for each in self.passages[:place]]
            hit = passage.reach(tokens, limit, salt)
            if passage.load(tokens, hit, max(above, *over, 0), keep):
                self.num_started += 1
                return True
        return False

    def length(self, tokens: Tokens, salt: int) -> int:
        """How many tokens of a prompt lower tiers have, with a state at their end or without."""
        return max((each.lower.cache.walk(tokens, salt)[1] for each in self.passages), default=0)

    def write_down(self) -> None:
        """Before a plan is built: what is new goes down, where there is room."""
        for passage in self.passages:
            passage.write_down(MAX_WRITTEN)

    def take_copies(self) -> list[TierCopy]:
        """For the plan that is being built, in the order of their numbers."""
        copies = [copy for passage in self.passages for copy in passage.copies]
        for passage in self.passages:
            passage.copies = []
        copies += self.exchange.take_copies() if self.exchange is not None else []
        return sorted(copies, key=lambda copy: copy.number)

    def take_arrived(self) -> list[int]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_empties_disk(self) -> bool:
        empties, self._empties_disk = self._empties_disk, False
        return empties

    def end(
        self, copied: Iterable[int], lost: Iterable[int], problems: Mapping[int, str] = NONE
    ) -> None:
        """Copies have ended, or failed."""
        for numbers, worked in ((copied, True), (lost, False)):
            for number in numbers:
                self._arrived.append(number)
                ours = any(passage.end(number, worked) for passage in self.passages)
                if not ours and self.exchange is not None:
                    self.exchange.end(number, worked, problems.get(number, "it was not read"))

    def flush(self) -> None:
        """Forgets all, also on disk. Nothing is under way."""
        for passage in reversed(self.passages):
            passage.lower.cache.flush()
        self._empties_disk = self.labels is not None

    # ── what there is ────────────────────────────────────────────────────────────────────────

    @property
    def coming(self) -> Coming:
        loads = list(self.passages[0].loads()) if self.passages else []
        journals = sum(load.journal >= 0 for load in loads)
        return Coming(sum(len(load.kv) for load in loads), len(loads), journals)

    def gauges(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, passage in self._by_name():
            tier = passage.lower
            found |= {
                f"num_{name}_tokens": tier.cache.num_kv,
                f"num_{name}_checkpoints": tier.cache.num_states,
                f"{name}_cache_usage": 1 - tier.units.num_free / tier.units.total,
            }
        return found

    def loaded_tokens(self) -> dict[str, int]:
        """Prompt tokens that were not run again, by the tier that had them."""
        return {name: passage.loaded_tokens for name, passage in self._by_name()}

    def lost_copies(self) -> dict[str, int]:
        """Copies that failed, records of earlier processes that could not be read, and what other
        servers sent that was no good."""
        lost = {name: passage.lost for name, passage in self._by_name()}
        if self.labels is not None:
            lost["disk"] += self.labels.ignored
        if self.exchange is not None:
            lost["other"] = self.exchange.refused
        return lost

    def _by_name(self) -> Iterator[tuple[str, Passage]]:
        return zip(("host", "disk"), self.passages)

    def check_integrity(self) -> None:
        """Raises: RuntimeError if a tier's units do not add up."""
        for passage, below in zip_longest(self.passages, self.passages[1:]):
            coming = list(below.loads()) if below is not None else []
            if passage is self.passages[0] and self.exchange is not None:
                coming += self.exchange.loads()
            passage.lower.check_integrity(
                sum(passage.lower.num_units(load.kv, load.journal) for load in coming)
            )
