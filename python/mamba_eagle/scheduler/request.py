"""A request as the scheduler sees it: its tokens, what it holds, and how far it has come."""

import time

from msgspec.structs import replace

from mamba_eagle.cache.node import as_tokens, salt_number
from mamba_eagle.cache.slots import HeldSlots
from mamba_eagle.core import FinishReason
from mamba_eagle.message import Generate, RequestOutput, RequestResult, RoutedExperts
from mamba_eagle.message.indices import indices
from mamba_eagle.scheduler.adapters import Adapter
from mamba_eagle.scheduler.estimates import RequestDrafts


class Request:
    """One sample of one prompt: data only. It holds slots while it is *admitted*; ``Slots`` hands
    them out and takes them back (cache/slots.py draws when)."""

    def __init__(
        self,
        message: Generate,
        order: int,
        eos_token_ids: tuple[int, ...],
        context_length: int,
        adapter: Adapter | None = None,
    ) -> None:
        self.rid = message.rid
        self.order = order  # of arrival
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.prompt_len = len(message.token_ids)
        limit = max(0, min(message.sampling.max_new_tokens, context_length - self.prompt_len))
        least = min(message.sampling.min_new_tokens, limit)
        self.sampling = replace(message.sampling, max_new_tokens=limit, min_new_tokens=least)
        self.stop_tokens = self.sampling.stop_tokens(eos_token_ids)
        # Its tokens are in ``tokens``. A list of them takes nine times as much, while it waits too.
        self.asked = replace(message, token_ids=[])
        self.adapter = adapter
        # states and keys depend on the adapter
        self.salt = salt_number(message.salt, adapter.number if adapter else 0)
        self.tokens = indices(message.token_ids)  # prompt, then output
        self.finish: FinishReason | None = None
        self.drafts = RequestDrafts()
        self.news = RequestOutput(rid=message.rid)  # for the client: its counters, what is not sent
        self.retractions = 0
        self.fetches = 0  # loads from lower tiers of the cache that it has started
        self.length_below = 0  # tokens that they had of it when it was admitted
        self.waits_for_grammar = False  # until the runner has compiled it (grammars.py)
        self._wait()

    def _wait(self) -> None:
        """Nothing is processed and nothing is held: all tokens so far are to be prefilled."""
        self.to_prefill = as_tokens(self.tokens)
        self.held: HeldSlots | None = None
        self.retracting = False
        self.plans_in_flight = 0  # plans sent for this request whose results are pending
        self.newest_step = 0  # of the newest of its plans
        self.min_tokens_in_flight = 0  # fewest output tokens that those plans make

    # ── where it is ──────────────────────────────────────────────────────────────────────────

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def leaving(self) -> bool:
        """It has ended or goes back to the queue; no further plan may name it."""
        return self.finish is not None or self.retracting

    @property
    def prefill_sent(self) -> bool:
        return self.held is not None and self.held.inserted >= len(self.to_prefill)

    @property
    def all_planned(self) -> bool:
        """The plans in flight are certain to bring it to max_new_tokens."""
        coming = self.num_output + self.min_tokens_in_flight
        return self.prefill_sent and coming >= self.sampling.max_new_tokens

    @property
    def decodable(self) -> bool:
        """By what is known, another decode step can make a token."""
        return not self.leaving and self.prefill_sent and not self.all_planned

    @property
    def hit_limit(self) -> int:
        """The deepest position at which prefill may start: at least one token is processed, and
        so are those whose logits give the logprobs of the prompt that were asked for, and all of
        a mean, or whose experts are asked for: the cache keeps states, not what was computed on
        the way to them."""
        if self.pooling == "mean":
            return 0
        limit = len(self.to_prefill) - 1
        if self.asked.return_routed_experts and self.num_output == 0:
            limit = min(limit, self.asked.routed_experts_start)
        if self.wants_input_logprobs:
            limit = min(limit, max(self.asked.logprob_start - 1, 0))
        return limit

    @property
    def wants_input_logprobs(self) -> bool:
        asked = self.asked
        return asked.return_logprob and asked.logprob_start >= 0 and self.num_output == 0

    @property
    def pooling(self) -> str:
        """How its prompt becomes an embedding; "" if that is not wanted, or was sent."""
        return self.asked.pooling if self.num_output == 0 else ""

    @property
    def processed(self) -> int:
        """Tokens that the target model has processed and whose KV slots are known."""
        if self.held is None or not self.prefill_sent:
            return self.held.inserted if self.held is not None else 0
        return len(self.to_prefill) + max(0, len(self.tokens) - len(self.to_prefill) - 1)

    @property
    def reusable(self) -> int | None:
        """How many tokens' KV slots and state the cache may have once nothing is in flight; None
        if there is nothing that it should have."""
        if self.held is None or (self.finish is not None and self.finish.kind == "abort"):
            return None
        # A late StopAt may have cut tokens that S0 has taken in already; what is kept behind the
        # request may still be exact there.
        end = self.processed
        exact = max(self.held.folded, 1) <= end or self._on_trail(end)
        return end if exact and end <= len(self.tokens) else None

    def will_serve(self, position: int) -> int:
        """How many of its first ``position`` tokens the cache can continue after once it is
        released; 0 if none."""
        if self._on_trail(position):
            return position
        reusable, trail = self.reusable or 0, self.held.trail if self.held is not None else None
        served = reusable if reusable <= position else 0
        for each in trail.inside if trail is not None else ():
            if each.position <= position:
                served = max(served, each.position, min(each.end, position))
        return served

    def _on_trail(self, position: int) -> bool:
        trail = self.held.trail if self.held is not None else None
        return trail is not None and 1 <= trail.anchor <= position <= self.processed

    # ── what happens to it ───────────────────────────────────────────────────────────────────

    def admit(self, held: HeldSlots) -> None:
        """Its first chunk is about to be planned."""
        self.held = held
        if self.num_output == 0:
            self.news.cached_tokens = held.hit.position
        if self.retractions == 0:
            self.news.queue_time = max(0.0, time.time() - (self.arrival_time or time.time()))

    def start_again(self) -> None:
        """Retracted and released: back to the queue; the output so far is prefilled again."""
        self.retractions += 1
        if self.num_output == 0:
            self.news.input_logprobs = []
        self._wait()

    def took_experts(self, start: int, count: int, experts: bytes) -> None:
        """Of the tokens from ``start`` on, if they were asked for."""
        if experts:
            self.news.experts.append(RoutedExperts(start, count, experts))

    def count_step(self, accepted: int, proposed: int) -> None:
        """A decode step accepted some drafted tokens, of a tree of this depth."""
        news = self.news
        news.verify_steps += 1
        news.accepted_drafts += accepted
        news.proposed_drafts += proposed
        news.accept_histogram += [0] * (accepted + 1 - len(news.accept_histogram))
        news.accept_histogram[accepted] += 1

    def accept(self, token_ids: list[int]) -> None:
        """New output tokens, which the runner has cut after a stop token and at max_new_tokens:
        the request ends here exactly where it has ended in the runner."""
        self.tokens.extend(token_ids)
        if token_ids and token_ids[-1] in self.stop_tokens:
            self.finish = FinishReason(kind="stop", matched=token_ids[-1])
        elif self.num_output >= self.sampling.max_new_tokens:
            self.finish = FinishReason(kind="length", length=self.num_output)

    def output(self, made: RequestResult | None = None) -> RequestOutput:
        """What the client gets now; logprobs and embedding of the prompt go with the first
        call."""
        made = made or RequestResult()
        told = self.news
        counts = list(told.accept_histogram)
        self.news = replace(
            told, accept_histogram=counts, input_logprobs=[], embedding=b"", experts=[]
        )
        told.token_ids, told.finish, told.trace = made.tokens, self.finish, made.trace
        told.completion_tokens, told.retractions = self.num_output, self.retractions
        told.logprobs = made.logprobs if self.asked.return_logprob else []
        told.hidden = made.hidden
        return told


def rank(request: Request) -> tuple[int, int]:
    """Who comes first: the smallest. Without priorities, in order of arrival."""
    return -request.priority, request.order
