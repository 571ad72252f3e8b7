"""Which waiting requests start, how their prompts are cut, and where state slots are saved."""

from __future__ import annotations

from collections import Counter

from mamba_eagle.cache.base import Match, common_prefix
from mamba_eagle.cache.pools import Pools
from mamba_eagle.config import EngineConfig
from mamba_eagle.drafters import needs_history
from mamba_eagle.message import PrefillItem, StateSave
from mamba_eagle.scheduler.plan_draft import Chunk, PlanDraft
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import ShapePolicy

LOOK_AHEAD = 64  # waiting requests whose prompts are compared
WORTH_WAITING = 32  # tokens; for less, a shared prefix is run twice
MAX_SHARED_SAVES = 4  # state slots a prompt for the sake of waiting ones
MAX_SPARE_SAVES = 32  # state slots a prompt at multiples of --mamba-state slot-interval
MAX_SORTED = 128  # longer queues are served in order of arrival whatever the policy


class PrefillManager:
    """The queue, and the prompts that are being run."""

    def __init__(
        self, config: EngineConfig, policy: ShapePolicy, pools: Pools, chunk_size: int
    ) -> None:
        """chunk_size: most prompt tokens in one step."""
        self.policy, self.pools = policy, pools
        self.chunk_size = chunk_size
        self.longest_match_first = config.schedule_policy == "lpm"
        self.interval = config.mamba_checkpoint_interval
        self.nodes = config.tree_shape.nodes
        self.drafter_needs_history = needs_history(config.speculative_algorithm)
        self.reserve = max(1, pools.state_slots.total // 8)
        self.waiting: list[Request] = []
        self.chunked: list[Request] = []  # admitted, and parts of their prompts not yet sent

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def put_back(self, request: Request) -> None:
        """A retracted request: before those that never ran, in order of arrival."""
        place = 0
        while place < len(self.waiting) and self.waiting[place].retractions:
            if self.waiting[place].order > request.order:
                break
            place += 1
        self.waiting.insert(place, request)

    def remove(self, request: Request) -> None:
        """It ended; wherever it is, it will not be planned."""
        for requests in (self.waiting, self.chunked):
            if request in requests:
                requests.remove(request)

    def schedule(self, step: PlanDraft, num_running: int) -> list[Request]:
        """Fills ``step`` with up to ``chunk_size`` prompt tokens, begun prompts first.

        Returns the requests that it admitted; they join the ``num_running``.
        """
        budget = self.chunk_size
        for request in list(self.chunked):
            if budget > 0:
                budget -= self._cut(request, budget, step)
        admitted: list[Request] = []
        for request in self._in_order()[:LOOK_AHEAD]:
            if step.short_of_kv or budget <= 0 or self.pools.requests.num_free == 0:
                break
            match = self.pools.cache.match(request.to_prefill, request.hit_limit)
            if self._prefix_is_coming(request, match):
                continue  # others may go first: it is a matter of a few steps
            if not self._admit(request, match, step, num_running + len(admitted)):
                break  # none overtakes it
            admitted.append(request)
            self.waiting.remove(request)
            self.chunked.append(request)
            budget -= self._cut(request, budget, step)
        return admitted

    def _in_order(self) -> list[Request]:
        if not self.longest_match_first or len(self.waiting) > MAX_SORTED:
            return list(self.waiting)
        cache = self.pools.cache

        def rank(request: Request) -> tuple[bool, int]:
            hit = cache.match(request.to_prefill, request.hit_limit).position
            return request.retractions == 0, -hit

        return sorted(self.waiting, key=rank)

    def _prefix_is_coming(self, request: Request, match: Match) -> bool:
        """A prompt that is being run will give it a far better hit a few steps from now."""
        if not self.pools.cache.stores:
            return False
        for other in self.chunked:
            shared = common_prefix(other.to_prefill, request.to_prefill)
            reach = min(shared, request.hit_limit)
            if reach - match.position >= WORTH_WAITING and other.inserted < reach:
                return True
        return False

    def _admit(self, request: Request, match: Match, step: PlanDraft, num_running: int) -> bool:
        """Gives it all that its prompt needs, if there will be room for decoding as well."""
        pools, cache = self.pools, self.pools.cache
        cache.lock(match.node)
        fresh = len(request.to_prefill) - match.position
        # Its replayed tokens are in the tree already, and locked there when it has run them.
        replayed = match.length - match.position if num_running else 0
        if pools.available_kv < fresh + replayed + (2 + num_running) * self.nodes:
            cache.unlock(match.node)
            return False
        state_slot = pools.take_state(keep=step.reads | {match.state_slot})
        if state_slot is None:
            cache.unlock(match.node)
            if num_running == 0 and match.position > 0:
                # The only state slot there is holds its prefix: run that again, in its place.
                whole = cache.match(request.to_prefill, limit=0)
                return self._admit(request, whole, step, num_running)
            return False
        slot, kv = pools.requests.allocate(1), pools.take_kv(fresh)
        assert slot is not None and kv is not None
        request.admit(slot[0], state_slot, match, kv)
        request.started()
        self.policy.admit(request.drafts)
        if match.position > 0:
            step.reads.add(match.state_slot)
        return True

    def _cut(self, request: Request, budget: int, step: PlanDraft) -> int:
        """Plans the next chunk; returns its length."""
        start = request.inserted
        end = min(start + budget, len(request.to_prefill))
        is_first = start == request.hit
        saves, spare = self._saves(request, start, end, step)
        item = PrefillItem(
            slot=request.slot,
            state_slot=request.state_slot,
            start=start,
            token_ids=request.tokens[start:end],
            kv_slots=request.kv[start:end],
            saves=saves,
            is_first=is_first,
            is_last=end == len(request.to_prefill),
            output_start=request.prompt_len,
            top_logprobs=request.top_logprobs,
            return_logprob=request.return_logprob,
            track=request.drafts.tracked,
        )
        if request.wants_input_logprobs and request.logprob_start < end:
            item.logprob_start = max(request.logprob_start, start)
        if is_first:
            item.sampling = request.sampling
            item.return_spec_trace = request.return_spec_trace
            item.prefix_kv_slots = request.kv[:start]
            if start > 0:
                item.load_from = request.load_from
            if request.sampling.needs_history or self.drafter_needs_history:
                item.history = request.tokens[:start]
        step.chunks.append(Chunk(request, item, spare))
        return end - start

    # ── state slots ──────────────────────────────────────────────────────────────────────────

    def _saves(
        self, request: Request, start: int, end: int, step: PlanDraft
    ) -> tuple[list[StateSave], frozenset[int]]:
        """Where in (start, end] the state is saved, as slots allow; which of these are spare."""
        if not self.pools.cache.stores:
            return [], frozenset()
        tail = len(request.to_prefill) - 1
        wanted = [tail, *self._shared_positions(request), request.branch]
        slots: dict[int, int] = {}
        for position in wanted:
            inside = max(start, request.hit) < position <= min(end, tail)
            if inside and position not in slots:
                slot = self.pools.take_state(keep=step.reads)
                if slot is None:
                    break
                slots[position] = slot
        spare = set()
        for position in self._spare_positions(request, start, min(end, tail)):
            if position in slots or self.pools.state_slots.num_free <= self.reserve:
                continue
            slot = self.pools.take_state()
            assert slot is not None
            slots[position] = slot
            spare.add(position)
        return [StateSave(*save) for save in sorted(slots.items())], frozenset(spare)

    def _shared_positions(self, request: Request) -> list[int]:
        """Ends of prefixes shared with waiting requests, those that spare most tokens first."""
        ends: Counter[int] = Counter()
        for other in self.waiting[:LOOK_AHEAD]:
            if other is not request:
                shared = common_prefix(request.to_prefill, other.to_prefill)
                ends[min(shared, other.hit_limit, len(request.to_prefill) - 1)] += 1
        spared = {
            end: count * (end - request.hit)
            for end, count in ends.items()
            if end - request.hit >= WORTH_WAITING
        }
        return sorted(spared, key=lambda end: -spared[end])[:MAX_SHARED_SAVES]

    def _spare_positions(self, request: Request, start: int, end: int) -> range:
        """Multiples of the interval, or of a multiple of it if the prompt is long."""
        if self.interval == 0:
            return range(0)
        strides = (len(request.to_prefill) - request.hit) // self.interval
        stride = self.interval * max(1, -(-strides // MAX_SPARE_SAVES))
        return range((start // stride + 1) * stride, end + 1, stride)
