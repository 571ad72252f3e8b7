"""What becomes of the result of a step.

The scheduler and the runner decide alike when a request ends: at the first stop token, which is
never sampled before min_new_tokens, or at max_new_tokens. A result that contradicts this, or
that no step can have, fails its request and no other. The usual cause is that no token can be
sampled, because the logits are not finite or every token of the vocabulary is banned.
"""

import logging
from collections.abc import Callable, Sequence

from mamba_eagle import message
from mamba_eagle.core import Failure, FinishReason, shown
from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.planner import Planner
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import Outcome

log = logging.getLogger("mamba_eagle.scheduler")

NO_TOKEN_PROBLEM = (
    "the model produced no token: its logits are not finite, or every token of the vocabulary is "
    "banned (stop tokens before min_new_tokens, logit_bias, allowed_token_ids, bad_words, grammar)"
)


class StepResults:
    """Takes what steps have made: tokens for their requests, accepted nodes, and measured times."""

    def __init__(self, planner: Planner, forget: Callable[[Request], None]) -> None:
        """planner: of the steps. forget: called with a request that has ended."""
        self.policy, self._stats, self._forget = planner.policy, planner.stats, forget
        self._vocab_size, self._shape = planner.runner.vocab_size, planner.shape
        self._slots, self._prefill = planner.slots, planner.prefill

    def take(self, plan: PlanDraft, result: message.StepResult) -> list[message.RequestOutput]:
        """What clients are to get of the plan's result. What is wrong with a single request's part
        of it fails that request only."""
        self._stats.num_compiled = result.num_compiled
        self._stats.step_seconds += result.seconds
        prompt_tokens = sum(len(item.token_ids) for item in plan.message.prefill)
        made = sum(len(walk.tokens) for walk in result.decode) / max(len(result.decode), 1)
        self._prefill.pace.observe(result.seconds, result.decode_seconds, prompt_tokens, made)
        outputs = []
        for request, item, prefilled in zip(plan.prompts, plan.message.prefill, result.prefill):
            outputs += self._take_prefill(request, item, prefilled)
        outcomes = []
        for request, tree, walk in zip(plan.decodes, plan.trees, result.decode):
            problem = self._settle(request, tree, walk)
            outcomes.append(Outcome(request.drafts, 0 if problem else len(walk.tokens)))
            if request.finish is None:
                if problem:
                    outputs.append(self.fail(request, problem, walk.problem))
                else:
                    self._stats.verify_steps += 1
                    self._stats.decode_tokens += len(walk.tokens)
                    if self._shape.nodes > 1:
                        request.count_step(len(walk.tokens) - 1, plan.choice.shape.depth)
                    request.took_experts(len(request.tokens) - 1, len(walk.nodes), walk.experts)
                    outputs.append(self._accept(request, walk))
        if outcomes:
            # If the next plan arrived in time, the runner waited only for messages, which is a cost
            # of every step. Longer pauses are not the step's.
            waited = min(result.idle_seconds, result.decode_seconds)
            self.policy.observe(plan.choice, outcomes, result.decode_seconds + waited)
        return outputs

    def _take_prefill(
        self, request: Request, item: message.PrefillItem, result: message.RequestResult
    ) -> list[message.RequestOutput]:
        """An output if the chunk was the prompt's last, or if its result cannot be."""
        request.plans_in_flight -= 1
        request.min_tokens_in_flight -= item.is_last
        if request.finish is not None:
            return []
        if problem := prefill_problem(request, item, result, self._vocab_size):
            return [self.fail(request, problem, result.problem)]
        request.news.input_logprobs += result.input_logprobs
        request.took_experts(item.start, len(item.token_ids), result.experts)
        if not item.is_last:
            return []
        request.news.embedding = result.embedding
        if request.sampling.max_new_tokens == 0:  # the prompt was all that was wanted
            result.tokens, result.logprobs = [], []
        return [self._accept(request, result)]

    def _settle(self, request: Request, tree: Sequence[int], walk: message.RequestResult) -> str:
        """Books the nodes that a request accepted. Returns what is wrong with the result, if
        anything: then it has accepted none."""
        held = request.held
        assert held is not None
        request.plans_in_flight -= 1
        request.min_tokens_in_flight -= 1
        problem = decode_problem(request, walk, tree, self._vocab_size)
        self._slots.settle(held, tree, [] if problem else walk.nodes, walk.folded)
        return problem

    def _accept(self, request: Request, made: message.RequestResult) -> message.RequestOutput:
        request.accept(made.tokens)
        if request.finish is not None:
            self._forget(request)
        return request.output(made)

    def fail(self, request: Request, problem: str, in_grammar: str) -> message.RequestOutput:
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


def prefill_problem(
    request: Request, item: message.PrefillItem, result: message.RequestResult, vocab_size: int
) -> str:
    """What is wrong with the result of one chunk of a prompt; "" if nothing."""
    end, start = item.start + len(item.token_ids), item.logprob_start
    wanted, given = end - start if start >= 0 else 0, len(result.input_logprobs)
    if given != wanted:
        return f"the runner returned {given} logprobs for {wanted} prompt tokens"
    if item.is_last and bool(request.pooling) != bool(result.embedding):
        return f"the runner returned {len(result.embedding)} bytes of an embedding"
    if not item.is_last or request.sampling.max_new_tokens == 0:
        return ""
    if not result.tokens:
        return _no_token(result.problem)
    if len(result.tokens) > 1:
        return f"the runner returned tokens {shown(result.tokens)} after a prompt"
    return _token_problem(request, result.tokens, vocab_size)


def decode_problem(
    request: Request, result: message.RequestResult, tree: Sequence[int], vocab_size: int
) -> str:
    """What is wrong with a decode step's result for one request; "" if nothing.

    tree: the KV slots of the nodes that were verified. Of a request that has ended, only the nodes
    matter.
    """
    tokens, nodes = result.tokens, result.nodes
    if not _is_path(nodes, len(tree)):
        return (
            f"the runner accepted nodes {shown(nodes)}, which are no path in a tree of {len(tree)}"
        )
    if request.finish is not None:
        return ""
    if not tokens:
        return _no_token(result.problem)
    if len(nodes) != len(tokens):
        return f"the runner accepted {len(nodes)} nodes but returned {len(tokens)} tokens"
    if request.asked.return_logprob and len(result.logprobs) != len(tokens):
        return f"the runner returned {len(result.logprobs)} logprobs for {len(tokens)} tokens"
    if request.asked.return_hidden_states and len(result.hidden) != len(tokens):
        return f"the runner returned {len(result.hidden)} hidden states for {len(tokens)} tokens"
    return _token_problem(request, tokens, vocab_size)


def _no_token(problem: str) -> str:
    return f"the grammar cannot be followed: {shown(problem)}" if problem else NO_TOKEN_PROBLEM


def _is_path(nodes: list[int], num_nodes: int) -> bool:
    """From the root on; or empty. A node's parent comes before it."""
    if len(nodes) < 2:
        return not nodes or nodes[0] == 0
    return nodes[0] == 0 and nodes[-1] < num_nodes and nodes == sorted(set(nodes))


def _token_problem(request: Request, tokens: list[int], vocab_size: int) -> str:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        found = shown(tokens)
        return f"the runner returned tokens {found}, not all in the vocabulary of {vocab_size}"
    total, sampling = request.num_output + len(tokens), request.sampling
    if total > sampling.max_new_tokens:
        return (
            f"the runner returned {total} output tokens in all, but max_new_tokens is "
            f"{sampling.max_new_tokens}"
        )
    stops = request.stop_tokens
    if len(tokens) > 1 and not stops.isdisjoint(tokens[:-1]):
        return f"the runner went on after a stop token: {tokens}"
    # a grammar may end before: min_new_tokens yields to its end
    if tokens[-1] in stops and total < sampling.min_new_tokens and not sampling.is_constrained:
        return (
            f"the runner stopped after {total} output tokens, but min_new_tokens is "
            f"{sampling.min_new_tokens}"
        )
    return ""
