"""The scheduler: requests in, plans out, results in, outputs out. No torch, no sockets."""

from __future__ import annotations

from collections import deque

from mamba_eagle.cache.pools import Pools
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, FinishReason, TreeShape
from mamba_eagle.message import DecodeResult, Generate, Plan, RequestOutput, RunnerReady, StepResult
from mamba_eagle.scheduler.decode import DecodeManager
from mamba_eagle.scheduler.prefill import PrefillManager
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import Outcome, shape_policy
from mamba_eagle.scheduler.stats import Stats
from mamba_eagle.scheduler.step import Row, Step


class Scheduler:
    """Owns every request and every slot index.

    ``plan`` may be called again before the result of the last plan is back, as long as it gives
    one; the caller sends each plan before the next call, and hands results over in order.
    """

    def __init__(self, config: EngineConfig, runner: RunnerReady) -> None:
        self.runner = runner
        self.shape = config.tree_shape  # the largest of any step
        self.policy = shape_policy(config)
        self.max_in_flight = 1 if config.disable_overlap_schedule else 2
        self.pools = Pools(
            runner.max_kv_slots,
            runner.max_checkpoints,
            runner.max_running_requests,
            use_cache=not config.disable_radix_cache,
        )
        chunk_size = config.chunked_prefill_size or runner.chunked_prefill_size
        self.prefill = PrefillManager(config, self.policy, self.pools, chunk_size)
        self.decode = DecodeManager(self.policy, self.pools)
        self.stats = Stats()
        self._live: dict[str, Request] = {}  # those that have not ended
        self._admitted: list[Request] = []  # those that hold slots, ended ones until released
        self._in_flight: deque[Step] = deque()
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
            prompt_tokens = len(message.token_ids)
            return [RequestOutput(rid=message.rid, finish=reason, prompt_tokens=prompt_tokens)]
        self._num_added += 1
        eos = tuple(self.runner.eos_token_ids)
        request = Request(message, self._num_added, eos, self.runner.context_length)
        self._live[request.rid] = request
        self.prefill.add(request)
        return []

    def abort(self, rid: str | None) -> list[RequestOutput]:
        """Ends one request, or all (None). What it holds is free in the first plan after the
        results of those in flight."""
        requests = list(self._live.values()) if rid is None else [self._live.get(rid)]
        outputs = []
        for request in requests:
            if request is not None:
                request.finish = FinishReason(kind="abort", message="aborted")
                outputs.append(request.output())
                self._ended(request)
        return outputs

    def stop_at(self, rid: str, num_tokens: int, matched: str) -> list[RequestOutput]:
        """Ends the request with its first ``num_tokens`` output tokens."""
        request = self._live.get(rid)
        if request is None:
            return []
        del request.tokens[request.prompt_len + max(num_tokens, 0) :]
        request.finish = FinishReason(kind="stop", matched=matched)
        self._ended(request)
        return [request.output()]

    def _problem(self, message: Generate) -> str:
        """Why the request can never be served; "" if it can."""
        size, limit = len(message.token_ids), self.runner.context_length
        most_output = max(0, min(message.sampling.max_new_tokens, limit - size))
        needed, slots = size + most_output + 2 * self.shape.nodes, self.runner.max_kv_slots
        if needed > slots:
            return (
                f"{size} prompt tokens, {most_output} new tokens and {2 * self.shape.nodes} slots "
                f"for drafts need {needed} KV slots, but there are {slots}: shorten the prompt, "
                "lower max_new_tokens, or start the server with a larger --max-total-tokens"
            )
        return ""

    def _ended(self, request: Request) -> None:
        assert request.finish is not None
        self.stats.num_aborted += request.finish.kind == "abort"
        self.prefill.remove(request)
        del self._live[request.rid]

    # ── plans ────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do, or as many in flight as may be."""
        if len(self._in_flight) >= self.max_in_flight:
            return None
        step = Step(self.stats.num_steps + 1)
        self._release_leaving(step)
        youngest = self.decode.schedule(step, self._admitted, self._in_flight)
        if youngest is not None:
            self._retract(youngest)
            self._release_leaving(step)
        num_running = sum(not request.leaving for request in self._admitted)
        self._admitted += self.prefill.schedule(step, num_running)
        if step.empty:
            return None
        self._complete(step)
        return step.plan()

    def _release_leaving(self, step: Step) -> None:
        for request in list(self._admitted):
            if request.leaving and request.in_flight == 0:
                self._admitted.remove(request)
                step.releases.append(request.release(self.pools))
                if request.finish is None:
                    request.start_again()
                    self.prefill.put_back(request)

    def _retract(self, request: Request) -> None:
        """Its slots come free once no plan in flight names it; then it waits again."""
        self.stats.num_retracted += 1
        request.retracting = True
        self.prefill.remove(request)

    def _complete(self, step: Step) -> None:
        """The plan is as good as sent: what it will have run belongs to the cache from here on,
        for the plans after it."""
        self.stats.num_steps += 1
        self._in_flight.append(step)
        for row in step.rows:
            row.request.in_flight += 1
            row.request.tokens_in_flight += 1
        for request, item, spare in step.chunks:
            request.in_flight += 1
            request.tokens_in_flight += item.is_last
            if item.is_first and request.retractions == 0:
                self.stats.prompt_tokens += request.prompt_len
                self.stats.cached_tokens += request.cached_tokens
            request.folded = item.start + len(item.token_ids)
            request.give_to_cache(request.folded, self.pools)
            if item.is_last:
                self.prefill.remove(request)
            assert request.node is not None
            for save in item.saves:
                if not self.pools.cache.attach_checkpoint(
                    request.node, save.position, save.checkpoint, save.position in spare
                ):
                    self.pools.checkpoints.free([save.checkpoint])

    # ── results ──────────────────────────────────────────────────────────────────────────────

    def process(self, result: StepResult) -> list[RequestOutput]:
        """Takes the result of the oldest plan in flight; what clients are to be told of it."""
        step = self._in_flight.popleft()
        answers = (result.step, len(result.prefill), len(result.decode))
        if answers != (step.number, len(step.chunks), len(step.rows)):
            raise RuntimeError(
                f"step {step.number} of {len(step.chunks)} prefills and {len(step.rows)} decodes "
                f"was answered by step {answers[0]} of {answers[1]} and {answers[2]}"
            )
        if step.rows:
            self._learn(step, result)
        outputs = []
        for (request, item, _), made in zip(step.chunks, result.prefill):
            request.in_flight -= 1
            request.tokens_in_flight -= item.is_last
            if request.finish is not None:
                continue
            request.input_logprobs += made.input_logprobs
            if item.is_last:
                # max_new_tokens 0: the prompt was all that was wanted
                tokens = [made.token] if request.sampling.max_new_tokens > 0 else []
                logprobs = [made.logprob] if tokens and made.logprob is not None else []
                outputs.append(request.accept(tokens, logprobs))
                self._made(request, len(tokens))
        for row, walk in zip(step.rows, result.decode):
            request = row.request
            self._settle(row, walk)
            if request.finish is None:
                if not walk.tokens:
                    raise RuntimeError(
                        f"the runner made no token in step {step.number} for request "
                        f"{request.rid}, which has {request.num_output} of "
                        f"{request.sampling.max_new_tokens}"
                    )
                self._count_step(request, walk, step.choice.shape)
                outputs.append(request.accept(walk.tokens, walk.logprobs, walk.trace))
                self._made(request, len(walk.tokens))
        return outputs

    def _settle(self, row: Row, walk: DecodeResult) -> None:
        """The accepted nodes' KV slots go to the request, the others are free."""
        request, kept = row.request, set(walk.nodes)
        request.in_flight -= 1
        request.tokens_in_flight -= 1
        request.kv += [row.kv_slots[node] for node in walk.nodes]
        self.pools.kv.free(slot for node, slot in enumerate(row.kv_slots) if node not in kept)
        request.folded = max(request.folded, walk.folded)

    def _learn(self, step: Step, result: StepResult) -> None:
        # A runner whose next plan is there in time waits for as long as messages take: a cost of
        # every step. Longer pauses are not the step's.
        waited = min(result.idle_seconds, result.decode_seconds)
        outcomes = [
            Outcome(row.request.drafts, len(walk.tokens))
            for row, walk in zip(step.rows, result.decode)
        ]
        seconds = result.decode_seconds + waited
        self.policy.observe(step.choice, outcomes, seconds)

    def _count_step(self, request: Request, walk: DecodeResult, shape: TreeShape) -> None:
        self.stats.verify_steps += 1
        self.stats.decode_tokens += len(walk.tokens)
        if self.shape.nodes > 1:
            request.verify_steps += 1
            request.count_accepted(len(walk.tokens) - 1)
            request.proposed_drafts += shape.steps

    def _made(self, request: Request, num_tokens: int) -> None:
        self.stats.generated(num_tokens)
        if request.finish is not None:
            self._ended(request)

    # ── state ────────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        """Requests run or wait."""
        return bool(self._live)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is on its way."""
        return not (self._live or self._admitted or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def flush(self) -> None:
        """Empties the cache. Only when idle."""
        if not self.idle:
            raise RuntimeError("the cache can be flushed only while nothing runs or waits")
        self.pools.cache.flush()

    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers, unless free + cached + running = total."""
        held = [request.held for request in self._admitted]
        drafts = sum(len(row.kv_slots) for step in self._in_flight for row in step.rows)
        self.pools.check_integrity(
            drafts + sum(each.kv for each in held),
            sum(each.checkpoints for each in held),
            sum(each.requests for each in held),
        )

    def state(self) -> dict[str, float]:
        """Gauges and counters; ``num_used_tokens`` leaves out what could be evicted."""
        pools, cache = self.pools, self.pools.cache
        used = pools.kv.total - pools.available_kv
        return {
            "num_running_reqs": sum(not request.leaving for request in self._admitted),
            "num_queue_reqs": len(self.prefill.waiting),
            "num_used_tokens": used,
            "num_cached_tokens": cache.num_kv,
            "num_free_kv_slots": pools.kv.num_free,
            "max_total_num_tokens": pools.kv.total,
            "token_usage": used / max(pools.kv.total, 1),
            "num_free_checkpoints": pools.checkpoints.num_free,
            "num_cached_checkpoints": cache.num_checkpoints,
            "max_mamba_cache_size": pools.checkpoints.total,
            **self.stats.as_dict(),
        }
