"""A request as the scheduler sees it: its tokens, what it holds, and how far it is."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from mamba_eagle.cache.base import Match, Node, as_tokens
from mamba_eagle.cache.pools import Pools
from mamba_eagle.core import FinishReason
from mamba_eagle.message import Generate, Release, RequestOutput, StepTrace, TokenLogprob
from mamba_eagle.scheduler.estimates import RequestDrafts


class HeldSlots(NamedTuple):
    """Slots of each kind that a request owns and the cache does not."""

    kv: int
    state_slots: int
    requests: int


class Request:
    """One sample of one prompt.

    While it is *admitted* it owns a request slot, a state slot (S0) and KV slots, and keeps
    its part of the cache's tree locked:

        position   0 ──────── hit ─────────── inserted ─────── run ───────── len(kv)
        kv slots   the cache's  the cache's, or   the request's    dropped by a
                                in duplicates:                     late StopAt
                                the request's

    ``node`` ends at ``inserted``. A request that leaves keeps all this until no plan in flight
    names it; then ``release`` gives every slot to the cache or back.
    """

    def __init__(
        self, message: Generate, order: int, eos_token_ids: tuple[int, ...], context_length: int
    ) -> None:
        self.rid = message.rid
        self.order = order  # of arrival
        self.arrival_time = message.arrival_time
        self.prompt_len = len(message.token_ids)
        most = max(0, min(message.sampling.max_new_tokens, context_length - self.prompt_len))
        self.sampling = msgspec.structs.replace(
            message.sampling,
            max_new_tokens=most,
            min_new_tokens=min(message.sampling.min_new_tokens, most),
        )
        self.stop_tokens = self.sampling.stop_tokens(eos_token_ids)
        self.return_logprob = message.return_logprob
        self.top_logprobs = message.top_logprobs
        self.logprob_start = message.logprob_start
        self.return_spec_trace = message.return_spec_trace
        self.tokens = list(message.token_ids)  # prompt, then output
        self.finish: FinishReason | None = None
        self.drafts = RequestDrafts()
        # told to the client
        self.cached_tokens = 0
        self.verify_steps = 0
        self.accepted_drafts = 0
        self.proposed_drafts = 0
        self.accept_histogram: list[int] = []
        self.retractions = 0
        self.queue_time = -1.0
        self.input_logprobs: list[TokenLogprob] = []
        self._reset()

    def _reset(self) -> None:
        """Nothing run, nothing held: all tokens so far are to be prefilled."""
        self.to_prefill = as_tokens(self.tokens)
        self.slot = self.state_slot = -1
        self.kv: list[int] = []
        self.duplicates: list[int] = []
        self.node: Node | None = None
        self.hit = self.inserted = self.branch = 0
        self.load_from = -1  # the cache's state slot at ``hit``; sure until the first chunk is sent
        self.folded = 0  # the position S0 was last known to be at
        self.retracting = False
        self.in_flight = 0  # plans sent that name this request, their results not back
        self.tokens_in_flight = 0  # output tokens that they make at least, if it does not stop

    # ── where it is ──────────────────────────────────────────────────────────────────────────

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def admitted(self) -> bool:
        return self.slot >= 0

    @property
    def leaving(self) -> bool:
        """It has ended or goes back to the queue; no plan may name it any more."""
        return self.finish is not None or self.retracting

    @property
    def prefill_sent(self) -> bool:
        return self.inserted >= len(self.to_prefill)

    @property
    def all_planned(self) -> bool:
        """What is in flight certainly brings it to max_new_tokens."""
        coming = self.num_output + self.tokens_in_flight
        return self.prefill_sent and coming >= self.sampling.max_new_tokens

    @property
    def decodable(self) -> bool:
        """A further decode step could make a token, as far as is known."""
        return not self.leaving and self.prefill_sent and not self.all_planned

    @property
    def hit_limit(self) -> int:
        """The deepest position at which prefill may start: one token at least is run, and those
        whose logits give the wanted logprobs of the prompt."""
        limit = len(self.to_prefill) - 1
        if self.wants_input_logprobs:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit

    @property
    def wants_input_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start >= 0 and self.num_output == 0

    @property
    def processed(self) -> int:
        """Tokens whose KV slots are known."""
        if not self.prefill_sent:
            return self.inserted
        return len(self.to_prefill) + max(0, len(self.tokens) - len(self.to_prefill) - 1)

    # ── slots ────────────────────────────────────────────────────────────────────────────────

    def admit(self, slot: int, state_slot: int, match: Match, fresh_kv: list[int]) -> None:
        """Takes the slots over; the caller has locked ``match.node`` for it."""
        self.slot, self.state_slot = slot, state_slot
        self.node = match.node
        self.hit = self.inserted = self.folded = match.position
        self.branch = match.length
        self.load_from = match.state_slot
        self.kv = match.kv_slots + fresh_kv

    def give_to_cache(self, end: int, pools: Pools) -> None:
        """The cache gets tokens [inserted, end), whose plan is complete; ``node`` follows."""
        cache = pools.cache
        assert self.node is not None
        fresh = self.kv[self.inserted : end]
        done = cache.insert(self.node, as_tokens(self.tokens[self.inserted : end]), fresh)
        self.duplicates += fresh[: len(fresh) - done.taken]
        cache.lock(done.node)
        cache.unlock(self.node)
        self.node = done.node
        self.inserted = end

    def release(self, pools: Pools) -> Release:
        """Gives up every slot: what the cache can use to it, the rest back to the allocators.

        Nothing may be in flight. The release must be in the very next plan sent.
        """
        assert self.in_flight == 0 and self.node is not None
        run = self.processed
        wanted = self.finish is None or self.finish.kind != "abort"
        # A late StopAt may have cut tokens that S0 has already taken in.
        exact = max(self.folded, self.inserted, 1) <= run <= len(self.tokens)
        keep = wanted and pools.cache.stores and exact
        state_kept = False
        if keep:
            self.give_to_cache(run, pools)
            state_kept = pools.cache.attach_state(self.node, run, self.state_slot)
        # Not stored: slots from ``inserted`` on are in nobody's tree, those of a NoCache's
        # ``give_to_cache`` are in duplicates.
        pools.kv.free(self.duplicates)
        pools.kv.free(self.kv[self.inserted :])
        if not state_kept:
            pools.state_slots.free([self.state_slot])
        pools.cache.unlock(self.node)
        pools.requests.free([self.slot])
        # Between two chunks of a prompt S0 is at ``run`` already.
        release = Release(self.slot, run if keep and self.prefill_sent else -1)
        self.slot = -1
        return release

    @property
    def held(self) -> HeldSlots:
        if not self.admitted:
            return HeldSlots(0, 0, 0)
        return HeldSlots(len(self.duplicates) + len(self.kv) - self.inserted, 1, 1)

    def start_again(self) -> None:
        """After a retraction and release: back to the queue, the output so far becomes prompt."""
        self.retractions += 1
        if self.num_output == 0:
            self.input_logprobs = []
        self._reset()

    # ── outputs ──────────────────────────────────────────────────────────────────────────────

    def started(self) -> None:
        """The first chunk is planned."""
        if self.num_output == 0:
            self.cached_tokens = self.hit
        if self.queue_time < 0:
            self.queue_time = max(0.0, time.time() - self.arrival_time) if self.arrival_time else 0

    def count_accepted(self, drafts: int) -> None:
        """A step accepted so many drafted tokens."""
        self.accepted_drafts += drafts
        self.accept_histogram += [0] * (drafts + 1 - len(self.accept_histogram))
        self.accept_histogram[drafts] += 1

    def accept(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprob],
        trace: StepTrace | None = None,
    ) -> RequestOutput:
        """New output tokens, cut by the runner at stop tokens and at max_new_tokens."""
        self.tokens += token_ids
        if (
            token_ids
            and token_ids[-1] in self.stop_tokens
            and self.num_output >= self.sampling.min_new_tokens
        ):
            self.finish = FinishReason(kind="stop", matched=token_ids[-1])
        elif self.num_output >= self.sampling.max_new_tokens:
            self.finish = FinishReason(kind="length", length=self.num_output)
        return self.output(token_ids, logprobs, trace)

    def output(
        self,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        trace: StepTrace | None = None,
    ) -> RequestOutput:
        """What the client is told now; input logprobs go with the first call."""
        input_logprobs, self.input_logprobs = self.input_logprobs, []
        return RequestOutput(
            rid=self.rid,
            token_ids=token_ids or [],
            finish=self.finish,
            prompt_tokens=self.prompt_len,
            completion_tokens=self.num_output,
            cached_tokens=self.cached_tokens,
            verify_steps=self.verify_steps,
            accepted_drafts=self.accepted_drafts,
            proposed_drafts=self.proposed_drafts,
            accept_histogram=list(self.accept_histogram),
            retractions=self.retractions,
            queue_time=max(self.queue_time, 0.0),
            logprobs=(logprobs or []) if self.return_logprob else [],
            input_logprobs=input_logprobs,
            trace=trace,
        )
