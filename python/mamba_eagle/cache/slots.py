"""Who holds which slot: the one object that hands slots out and takes them back.

Each slot of the three kinds is free, or has one owner: a request, a plan, or the prefix cache.

                        KV slots                      state slots             request slots
    waiting             none                          none                    none
      │ admit           prefix that the cache has:    S0: the request's       the request's
      │                   the cache's, locked
      │                 rest of the prompt:
      │                   the request's
    prefill
      │ reserve_state                                 to save a state in:
      │                                                 the plan's
      │ insert,         chunk that is sent:           saves: plan → cache,
      │ attach_state      request → cache, or kept      or free if it has a
      │                   as a duplicate                state there already
    decode
      │ reserve_kv    one per tree node: the plan's
      │ (in flight)
      │ settle          accepted: plan → request
      │                 rejected: free
    leaving             all stays as it is until no plan in flight names the request
      │ release         what was processed:           S0: request → cache,    free
      │                   request → cache               or free
      │                 duplicates: free
    gone, or waiting again

A request leaves when it is finished, retracted or aborted. The cache gets nothing of an aborted
one; its slots are free. What is the cache's is locked while a request reads it, and may be evicted
(cache → free) afterwards. Plans run in order, so slots change hands as soon as the plan that last
uses them is sent.

Positions of one request, and who owns the KV slots there (``HeldSlots.kv``):

    0 ──────── hit ─────────── inserted ────────── processed ────── len(kv)
      cache's      cache's, or           request's           dropped by a
                   request's own                             late StopAt:
                   duplicate                                 request's
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mamba_eagle.cache.node import Match, Node, StateKind, Tokens
from mamba_eagle.cache.slot_pools import SlotPools
from mamba_eagle.message import JournalPart
from mamba_eagle.message.indices import Indices, indices


class Behind(NamedTuple):
    """What an anchor leaves behind when it moves, for the cache once the request has left."""

    position: int
    state_slot: int
    journal: int = -1  # journal slot with the rows of [position, end); -1: none
    end: int = 0


@dataclass(slots=True)
class Trail:
    """What is kept behind a running request, so that the cache can continue after any of its last
    tokens: a state, and a journal of all that came after it."""

    journal: int  # journal slot
    state_slot: int  # of the anchor
    anchor: int  # its position
    first: int  # its position when the output began
    inside: list[Behind] = field(default_factory=list)  # in the output

    @property
    def state_slots(self) -> list[int]:
        return [self.state_slot, *(each.state_slot for each in self.inside)]

    @property
    def journals(self) -> list[int]:
        return [self.journal, *(each.journal for each in self.inside if each.journal >= 0)]


@dataclass(slots=True)
class HeldSlots:
    """What one request holds from ``admit`` to ``release``. Changed by ``Slots`` alone."""

    slot: int  # its request slot
    state_slot: int  # of S0, its own running state
    kv: Indices  # the KV slot of each position
    hit: (
        Match  # what was cached at admission. Its state may be evicted once the first chunk is sent
    )
    node: Node  # ends at ``inserted``; its prefix is locked
    inserted: int  # tokens that are in the cache's tree
    folded: int  # position that S0 was last known to be at
    salt: int = 0  # of its prefix in the cache
    followed: bool = True  # the drafter has processed all up to ``inserted``, and goes on
    prompt_journal: JournalPart | None = None  # of its last tokens, while chunks are being sent
    trail: Trail | None = None
    duplicates: Indices = field(default_factory=indices)  # own slots of tokens in the tree

    @property
    def num_own_kv(self) -> int:
        return len(self.duplicates) + len(self.kv) - self.inserted

    @property
    def num_states(self) -> int:
        return 1 + (0 if self.trail is None else len(self.trail.state_slots))

    @property
    def num_journals(self) -> int:
        own = int(self.prompt_journal is not None)
        return own + (0 if self.trail is None else len(self.trail.journals))


class Coming(NamedTuple):
    """Slots that wait for what comes from a lower tier of the cache."""

    kv: int = 0
    states: int = 0
    journals: int = 0


NOTHING_COMES = Coming()


class Released(NamedTuple):
    """What the cache has of a request that has left."""

    stored: bool  # its tokens
    state_kept: bool  # S0, as the state after the last one


class Slots(SlotPools):
    """Owns the slots of all kinds, and the prefix cache that is filled with those not in use.

    free + cached + held by requests + planned trees = total, of every kind.
    """

    num_trails = 0

    def admit(
        self,
        match: Match,
        num_tokens: int,
        headroom: int,
        keep: Collection[int] = (),
        salt: int = 0,
        in_place: bool = False,
        followed: bool = True,
    ) -> HeldSlots | None:
        """All that a request needs for its prompt, evicting from the cache where necessary.

        match: what the cache has of the prompt's ``num_tokens`` tokens. headroom: KV slots that
        must stay available beyond the prompt. keep: state slots that must not be evicted, besides
        the match's own. in_place: S0 is the slot of the match's state, which the cache gives up.
        followed: the drafter follows the request, and has followed what is cached, or catches up.

        Returns None, and nothing is held, if there is not enough.
        """
        cache, fresh = self.cache, num_tokens - match.position
        if self.requests.num_free == 0:
            return None
        cache.lock(match.node)
        if self.available_kv >= fresh + headroom:
            if in_place:
                state_slot: int | None = cache.states.take(match.node)
            else:
                state_slot = self.reserve_state({match.state_slot, match.draft_state, *keep})
            if state_slot is not None:
                kv, slots = self.reserve_kv(fresh), self.requests.allocate(1)
                assert kv is not None and slots is not None
                begin, kv_slots = match.position, match.kv_slots + kv
                return HeldSlots(
                    slots[0], state_slot, kv_slots, match, match.node, begin, begin, salt, followed
                )
        cache.unlock(match.node)
        return None

    def start_trail(self, held: HeldSlots, position: int, keep: Collection[int] = ()) -> None:
        """Reserves what is kept behind a request whose prompt ends at ``position``; nothing if a
        quarter of the states already serves that."""
        if self.num_trails >= self.states.total // 4:
            return
        journal = self.reserve_journal(keep)
        if journal is None:
            return
        state_slot = self.reserve_state(keep)
        if state_slot is None:
            self.journals.free([journal])
            return
        held.trail = Trail(journal, state_slot, position, position)
        self.num_trails += 1

    def end_trail(self, held: HeldSlots) -> None:
        """Nothing is kept behind the request any more."""
        if held.trail is not None:
            self.states.free(held.trail.state_slots)
            self.journals.free(held.trail.journals)
            held.trail = None
            self.num_trails -= 1

    def keep_prompt_journal(self, held: HeldSlots) -> None:
        """The tokens of the prompt's journal are inserted: the cache gets it, if it still has the
        state that it begins at."""
        journal = held.prompt_journal
        assert journal is not None
        held.prompt_journal = None
        self._attach_journal(held, journal.start, journal.slot, journal.end)

    def _attach_journal(self, held: HeldSlots, position: int, slot: int, end: int) -> None:
        """The cache gets it, or it is free."""
        if not self.cache.attach_journal(held.node, position, slot, end):
            self.journals.free([slot])

    def drop_prompt_journal(self, held: HeldSlots) -> None:
        if held.prompt_journal is not None:
            self.journals.free([held.prompt_journal.slot])
            held.prompt_journal = None

    def follow(self, held: HeldSlots) -> None:
        """The first chunk is sent, and before it the drafter processes what it lacked. Where it
        comes past the state that the target starts from, it leaves its own."""
        passes = held.hit.draft_from < held.hit.anchor
        self.cache.follow(held.node, held.hit.anchor if passes else -1)

    def insert(
        self, held: HeldSlots, tokens: Tokens, heals: bool = False
    ) -> tuple[Indices, Indices]:
        """The tokens from ``inserted`` on enter the tree, and S0 is the state after them: the plan
        that processes them is complete.

        The cache takes the KV slots of those that it lacks. Where it has them already, the
        request's own slots are duplicates: the runner reads these until the request is released.

        heals: as ``PrefixTree.insert`` has it. Returns the request's slots from which the
        drafter's keys and values are to be copied, and the cache's, to which.
        """
        end = held.inserted + len(tokens)
        fresh = held.kv[held.inserted : end]
        sources, targets = indices(), indices()
        if not self.stores:
            held.duplicates += fresh
            held.inserted = held.folded = end
            return sources, targets
        done = self.cache.insert(held.node, tokens, fresh, held.salt, held.followed, heals)
        held.duplicates += fresh[: len(fresh) - done.taken]
        self.cache.lock(done.node)
        self.cache.unlock(held.node)
        held.node, held.inserted, held.folded = done.node, end, end
        for first, kv_slots in done.healed:
            sources += fresh[first : first + len(kv_slots)]
            targets += kv_slots
        return sources, targets

    def attach_state(
        self, held: HeldSlots, position: int, state_slot: int, kind: StateKind
    ) -> None:
        """A plan saves the state after ``position`` inserted tokens: the cache gets it, unless it
        has one already."""
        if not self.cache.attach_state(held.node, position, state_slot, kind, held.followed):
            self.states.free([state_slot])

    def settle(
        self, held: HeldSlots, tree: Sequence[int], accepted: Sequence[int], folded: int
    ) -> None:
        """The result of a decode step is back: accepted nodes keep their KV slots, the others are
        free.

        tree: from ``reserve_kv``. accepted: distinct nodes, in the order of their positions.
        folded: the position that S0 is at now.
        """
        held.folded = max(held.folded, folded)
        if len(accepted) == len(tree):
            held.kv.extend(tree)
            return
        kept = set(accepted)
        held.kv.extend(tree[node] for node in accepted)
        self.kv.free(slot for node, slot in enumerate(tree) if node not in kept)

    def release(self, held: HeldSlots, tokens: Tokens | None) -> Released:
        """The request gives up everything; nothing in flight may name it.

        tokens: those from ``inserted`` on whose KV slots the cache may have, S0 or the trail being
        good for the state after the last of them; None: the cache gets nothing.
        """
        state_kept, stored = False, tokens is not None and self.stores
        if tokens is not None and stored:
            self.insert(held, tokens)
            # A journal that reaches the end takes the place of the state there.
            state_kept = not self._keep_trail(held) and self.cache.attach_state(
                held.node, held.inserted, held.state_slot, "output", held.followed
            )
        self.end_trail(held)
        self.drop_prompt_journal(held)
        self.kv.free(held.duplicates)
        self.kv.free(held.kv[held.inserted :])
        if not state_kept:
            self.states.free([held.state_slot])
        self.cache.unlock(held.node)
        self.requests.free([held.slot])
        return Released(stored, state_kept)

    def _keep_trail(self, held: HeldSlots) -> bool:
        """The cache gets what is kept behind the request. Returns whether that serves the
        end: by these rows, or by those that it had of the same tokens."""
        trail, end = held.trail, held.inserted
        if trail is None or trail.anchor > end:
            return False
        for each in trail.inside:
            self.attach_state(held, each.position, each.state_slot, "spare")
            if each.journal >= 0:
                self._attach_journal(held, each.position, each.journal, min(each.end, end))
        self.attach_state(held, trail.anchor, trail.state_slot, "output")
        self._attach_journal(held, trail.anchor, trail.journal, end)
        held.trail = None
        self.num_trails -= 1
        return True

    def check_integrity(
        self,
        held: Iterable[HeldSlots] = (),
        trees: Iterable[Sequence[int]] = (),
        coming: Coming = NOTHING_COMES,
    ) -> None:
        """Raises: RuntimeError with numbers, unless free + cached + held = total everywhere.

        held: of all admitted requests. trees: of all plans in flight.
        """
        self.cache.check_integrity()
        held = list(held)
        trails = sum(each.trail is not None for each in held)
        if trails != self.num_trails:
            raise RuntimeError(f"{self.num_trails} trails are counted, but requests have {trails}")
        kv = sum(each.num_own_kv for each in held) + sum(map(len, trees)) + coming.kv
        states = sum(each.num_states for each in held) + coming.states
        journals = sum(each.num_journals for each in held) + coming.journals
        self.check_sums(kv, states, journals, len(held))
