"""What becomes of the result of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mamba_eagle.cache.slots import Slots
from mamba_eagle.core import Failure, FinishReason, TreeShape
from mamba_eagle.message import (
    DecodeResult,
    PrefillResult,
    RequestOutput,
    RunnerReady,
    StepResult,
    StepTrace,
    TokenLogprob,
)
from mamba_eagle.scheduler.plan_draft import Chunk, DecodeItem, PlanDraft
from mamba_eagle.scheduler.prefill import PrefillManager
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.results import NO_TOKEN_PROBLEM, decode_problem, prefill_problem
from mamba_eagle.scheduler.speculation import Choice, Outcome, ShapePolicy
from mamba_eagle.scheduler.stats import Stats

log = logging.getLogger("mamba_eagle.scheduler")


class StepResults:
    """Takes what steps have made: tokens for their requests, accepted nodes, and measured times."""

    def __init__(
        self,
        runner: RunnerReady,
        shape: TreeShape,
        policy: ShapePolicy,
        slots: Slots,
        prefill: PrefillManager,
        stats: Stats,
        forget: Callable[[Request], None],
    ) -> None:
        """shape: the largest of any step. forget: called with a request that has ended."""
        self.policy = policy
        self._vocab_size, self._shape = runner.vocab_size, shape
        self._slots, self._prefill, self._stats = slots, prefill, stats
        self._forget = forget

    def take(self, plan: PlanDraft, result: StepResult) -> list[RequestOutput]:
        """What clients are to get of the plan's result. What is wrong with a single request's part
        of it fails that request only."""
        self._stats.num_compiled = result.num_compiled
        self._stats.step_seconds += result.seconds
        prompt_tokens = sum(len(chunk.item.token_ids) for chunk in plan.chunks)
        made = sum(len(walk.tokens) for walk in result.decode) / max(len(result.decode), 1)
        self._prefill.pace.observe(result.seconds, result.decode_seconds, prompt_tokens, made)
        outputs = []
        for chunk, prefilled in zip(plan.chunks, result.prefill):
            outputs += self._take_prefill(chunk, prefilled)
        outcomes = []
        for item, walk in zip(plan.decodes, result.decode):
            request, problem = item.request, self._settle(item, walk)
            outcomes.append(Outcome(request.drafts, 0 if problem else len(walk.tokens)))
            if request.finish is None:
                if problem:
                    outputs.append(self.fail(request, problem, walk.problem))
                else:
                    self._count_step(request, walk, plan.choice.shape)
                    request.took_experts(len(request.tokens) - 1, len(walk.nodes), walk.experts)
                    told = (walk.logprobs, walk.trace, walk.hidden)
                    outputs.append(self._accept(request, walk.tokens, *told))
        if outcomes:
            self._learn(plan.choice, outcomes, result)
        return outputs

    def _take_prefill(self, chunk: Chunk, result: PrefillResult) -> list[RequestOutput]:
        """An output if the chunk was the prompt's last, or if its result cannot be."""
        request, is_last = chunk.request, chunk.item.is_last
        request.plans_in_flight -= 1
        request.min_tokens_in_flight -= is_last
        if request.finish is not None:
            return []
        if problem := prefill_problem(request, chunk.item, result, self._vocab_size):
            return [self.fail(request, problem, result.problem)]
        request.input_logprobs += result.input_logprobs
        request.took_experts(chunk.item.start, len(chunk.item.token_ids), result.experts)
        if not is_last:
            return []
        request.embedding = result.embedding
        if request.sampling.max_new_tokens == 0:  # the prompt was all that was wanted
            return [self._accept(request, [], [], None, result.hidden)]
        logprobs = [result.logprob] if result.logprob is not None else []
        return [self._accept(request, [result.token], logprobs, None, result.hidden)]

    def _settle(self, item: DecodeItem, walk: DecodeResult) -> str:
        """Books the nodes that a request accepted. Returns what is wrong with the result, if
        anything: then it has accepted none."""
        request, held, tree = item
        request.plans_in_flight -= 1
        request.min_tokens_in_flight -= 1
        problem = decode_problem(request, walk, tree, self._vocab_size)
        self._slots.settle(held, tree, [] if problem else walk.nodes, walk.folded)
        return problem

    def _accept(
        self,
        request: Request,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        trace: StepTrace | None,
        hidden: list[bytes],
    ) -> RequestOutput:
        request.accept(tokens)
        if request.finish is not None:
            self._forget(request)
        return request.output(tokens, logprobs, trace, hidden)

    def fail(self, request: Request, problem: str, in_grammar: str) -> RequestOutput:
        """The runner's result cannot be: this request ends with an error of its own.

        in_grammar: what its grammar has to do with it, such as a limit that only shows here."""
        failure = Failure.INTERNAL
        if in_grammar or (problem == NO_TOKEN_PROBLEM and request.sampling.has_token_rules):
            failure = Failure.REFUSED
            if self._prefill.grammars is not None:
                self._prefill.grammars.failed(request.sampling.grammar)
        log.error("request %r failed after %d tokens: %s", request.rid, request.num_output, problem)
        request.finish = FinishReason("abort", message=problem, failure=failure)
        self._forget(request)
        return request.output()

    def _learn(self, choice: Choice, outcomes: list[Outcome], result: StepResult) -> None:
        # If the next plan arrived in time, the runner waited only for messages, which is a cost of
        # every step. Longer pauses are not the step's.
        waited = min(result.idle_seconds, result.decode_seconds)
        self.policy.observe(choice, outcomes, result.decode_seconds + waited)

    def _count_step(self, request: Request, walk: DecodeResult, shape: TreeShape) -> None:
        self._stats.verify_steps += 1
        self._stats.decode_tokens += len(walk.tokens)
        if self._shape.nodes > 1:
            request.verify_steps += 1
            request.count_accepted(len(walk.tokens) - 1)
            request.proposed_drafts += shape.depth
