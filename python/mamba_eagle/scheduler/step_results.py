"""What is wrong with the result of a step.

The scheduler and the runner decide alike when a request ends: at the first stop token, which is
never sampled before min_new_tokens, or at max_new_tokens. A result that contradicts this, or
that no step can have, fails its request and no other. The usual cause is that no token can be
sampled, because the logits are not finite or every token of the vocabulary is banned.
"""

from collections.abc import Sequence

from mamba_eagle.core import shown
from mamba_eagle.message import DecodeResult, PrefillItem, PrefillResult
from mamba_eagle.scheduler.request import Request

NO_TOKEN_PROBLEM = (
    "the model produced no token: its logits are not finite, or every token of the vocabulary is "
    "banned (stop tokens before min_new_tokens, logit_bias, allowed_token_ids, bad_words, grammar)"
)


def prefill_problem(
    request: Request, item: PrefillItem, result: PrefillResult, vocab_size: int
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
    if result.token < 0:
        return _no_token(result.problem)
    return _token_problem(request, [result.token], vocab_size)


def decode_problem(
    request: Request, result: DecodeResult, tree: Sequence[int], vocab_size: int
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
