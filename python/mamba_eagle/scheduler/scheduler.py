"""The scheduler: requests in, plans out, results in, outputs out. No torch, no sockets.

add       a request waits
plan      who has left frees its slots
          who runs gets slots for a tree; if there are none, the last one steps back
          who waits is admitted, with what the cache has of its prompt, which is cut in chunks
          what the plan will have processed enters the cache
process   a prompt that ends has its first token; of trees, the accepted nodes are kept
          what is new is answered; who has ended leaves with the next plan
"""

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, FinishReason, shown
from mamba_eagle.message import CacheUse, Generate, Ready, RequestOutput, StepResult
from mamba_eagle.scheduler.planner import Planner
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.step_results import StepResults


class Scheduler(Planner):
    """Owns every request; ``slots`` owns what the requests hold.

    ``plan`` may be called again before the result of the last plan is back, for as long as it
    returns one. The caller sends each plan before the next call, and hands results over in order.
    """

    def __init__(self, config: EngineConfig, runner: Ready, prompts_first: bool = False) -> None:
        """prompts_first: as for ``Planner``."""
        super().__init__(config, runner, prompts_first)
        self.queue_timeout = config.queue_timeout  # seconds; 0: no limit
        self.results = StepResults(self, self._forget)
        self._live: dict[str, Request] = {}  # requests that have not ended
        self._num_added = 0

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def add(self, message: Generate) -> list[RequestOutput]:
        """Queues it; one that can never be served is answered at once.

        The caller has checked the prompt and the parameters (core.py), and gives no rid that is
        in use; what only the scheduler knows is how many slots there are.
        """
        assert message.rid not in self._live
        self.stats.num_requests += 1
        problem = self._problem(message)
        if problem:
            self.stats.num_aborted += 1
            reason = FinishReason(kind="abort", message=problem, failure=Failure.REFUSED)
            return [RequestOutput(rid=message.rid, finish=reason)]
        self._num_added += 1
        eos = tuple(self.runner.eos_token_ids)
        adapter = self.adapters.of(message.adapter)
        request = Request(message, self._num_added, eos, self.runner.context_length, adapter)
        self.adapters.begin(adapter)
        request.news.weight_version = self.pauses.version
        self._live[request.rid] = request
        if self.prefill.grammars is not None:
            self.prefill.grammars.add(request)
        if not self.pauses.holds_back(request):
            self.prefill.add(request)
        return []

    def abort(self, rid: str) -> list[RequestOutput]:
        """Ends one request. The slots that it holds are free in the first plan after the results of
        the plans now in flight."""
        request = self._live.get(rid)
        if request is None:
            return []
        return [self._end(request, FinishReason(kind="abort", message="aborted"))]

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends requests that have waited for longer than --queue-timeout, since they came or since
        the last pause. now: time.time()"""
        if self.pauses.any:
            self.pauses.last = now
        if not self.queue_timeout or self.pauses.any:
            return []
        message = (
            f"the request was not started within {self.queue_timeout:g} s (--queue-timeout): the "
            "server is busy, try again later"
        )
        reason = FinishReason(kind="abort", message=message, failure=Failure.TIMEOUT)
        late = self.prefill.expired(now, self.queue_timeout, self.pauses.last)
        return [self._end(request, reason) for request in late]

    def stop_at(self, rid: str, num_tokens: int, matched: str) -> list[RequestOutput]:
        """Ends the request with its first ``num_tokens`` output tokens."""
        request = self._live.get(rid)
        if request is None:
            return []
        del request.tokens[request.prompt_len + max(num_tokens, 0) :]
        return [self._end(request, FinishReason(kind="stop", matched=matched))]

    def _problem(self, message: Generate) -> str:
        """Why the request can never be served; "" if it can."""
        if message.adapter and self.adapters.of(message.adapter) is None:
            return f"adapter {shown(message.adapter)}: it is not loaded, or no longer"
        size, limit = len(message.token_ids), self.runner.context_length
        max_output = max(0, min(message.sampling.max_new_tokens, limit - size))
        needed, slots = size + max_output + 2 * self.shape.nodes, self.runner.max_kv_slots
        if needed > slots:
            return (
                f"{size} prompt tokens, {max_output} new tokens and {2 * self.shape.nodes} slots "
                f"for drafts need {needed} KV slots, but there are {slots}: shorten the prompt, "
                "lower max_new_tokens, or start the server with a larger --max-total-tokens"
            )
        return ""

    def _end(self, request: Request, finish: FinishReason) -> RequestOutput:
        request.finish = finish
        self._forget(request)
        return request.output()

    def _forget(self, request: Request) -> None:
        """The request has ended; it may still hold slots."""
        assert request.finish is not None
        self.stats.num_aborted += request.finish.kind == "abort"
        self.prefill.remove(request)
        self.adapters.end(request.adapter)
        self.pauses.forget(request)
        del self._live[request.rid]

    # ── results ──────────────────────────────────────────────────────────────────────────────

    def process(self, result: StepResult) -> list[RequestOutput]:
        """Takes the result of the oldest plan in flight; returns what clients are to get.

        Raises: RuntimeError if it answers another plan. What is wrong with a single request's
        part of it fails that request only.
        """
        plan = self._in_flight.popleft()
        self.cohorts.answered(plan)
        answers = (result.step, len(result.prefill), len(result.decode))
        if answers != (plan.message.step, len(plan.prompts), len(plan.decodes)):
            raise RuntimeError(
                f"step {plan.message.step} of {len(plan.prompts)} prefills and {len(plan.decodes)} "
                f"decodes was answered by step {answers[0]} of {answers[1]} and {answers[2]}"
            )
        self.tiers.end(result.copied, result.lost, result.problems)
        outputs = self.results.take(plan, result)
        self.stats.generated(sum(len(output.token_ids) for output in outputs))
        return outputs

    # ── state ────────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        """Requests run or wait."""
        return bool(self._live)

    @property
    def needs_cache(self) -> bool:
        """Requests run, wait to run, or are held in place."""
        if self.pauses.stops_all:
            return any(not request.leaving for request in self._admitted)
        return len(self._live) > len(self.pauses.later)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is on its way."""
        return not self._live and self.holds_nothing

    def flush(self) -> None:
        """Empties the cache. Raises: RuntimeError while anything holds a part of it."""
        if not self.holds_nothing:
            raise RuntimeError("the cache can be flushed only while no request holds slots")
        self.slots.flush()
        self.tiers.flush()

    @property
    def may_change(self) -> bool:
        """Whether a change of the model that waits can begin: nothing is held or being read."""
        return self.holds_nothing and self.adapters.are_read

    def lose_all(self) -> None:
        """The runner is about to forget everything that lies in slots."""
        self.flush()
        self.adapters.empty_slots()

    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers, unless free + cached + held = total."""
        held = [request.held for request in self._admitted if request.held is not None]
        trees = [tree for plan in self._in_flight for tree in plan.trees]
        self.slots.check_integrity(held, trees, self.tiers.coming)
        self.tiers.check_integrity()
        self.adapters.check_integrity(sum(each.adapter is not None for each in self._admitted))

    @property
    def num_nodes(self) -> int:
        """Of the prefix cache's trees, each of which ``check_integrity`` looks at."""
        lower = [passage.lower.cache for passage in self.tiers.passages]
        return sum(cache.num_nodes for cache in (self.slots.cache, *lower))

    def state(self) -> dict[str, float]:
        """Gauges and counters."""
        waiting = self.prefill.waiting
        return {
            "num_running_reqs": sum(not request.leaving for request in self._admitted),
            "num_queue_reqs": len(waiting) + len(self.pauses.later),
            "num_queue_tokens": sum(len(request.to_prefill) for request in waiting),
            **self.slots.gauges(),
            **self.tiers.gauges(),
            **self.stats.as_dict(),
        }

    def cache_use(self) -> CacheUse:
        """What the prefix cache has done so far."""
        cache = self.slots.cache
        return CacheUse(
            hits=dict(self.stats.hits),
            saved_tokens=dict(self.stats.saved_tokens),
            loaded_tokens=self.tiers.loaded_tokens(),
            lost_copies=self.tiers.lost_copies(),
            evicted_states=cache.evicted_states,
            evicted_tokens=cache.evicted_kv,
        )
