"""Bounds on products: a small body may ask for much work, memory or output."""

from collections.abc import Mapping, Sequence

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import (
    MAX_HIDDEN_STATES,
    MAX_INPUT_LOGPROBS,
    MAX_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_TOKEN_ENTRIES,
)
from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.sample import PromptRequest

NAMES: Mapping[str, str] = {"top": "top_logprobs_num", "output": "max_new_tokens"}


def check_demand(
    prompts: Sequence[PromptRequest], context_length: int, names: Mapping[str, str] = NAMES
) -> None:
    """names: what the route calls the number of best tokens and the limit of the output.

    Raises: RequestError 400
    """
    carried = sum(prompt.n * len(prompt.token_ids) for prompt in prompts)
    if carried > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"n: {len(prompts)} prompts and their samples carry {carried} tokens together, more "
            f"than the limit of {MAX_PROMPT_TOKENS}: send fewer prompts, or a lower n",
            param="n",
        )
    entries = sum(prompt.n * _entries(prompt.sampling) for prompt in prompts)
    if entries > MAX_TOKEN_ENTRIES:
        raise RequestError(
            f"logit_bias, stop_token_ids, allowed_token_ids, bad_words: all samples have {entries} "
            f"entries together, more than the limit of {MAX_TOKEN_ENTRIES}: send fewer, or a "
            "lower n",
            param="logit_bias",
        )
    states = sum(p.n * _output(p, context_length) for p in prompts if p.return_hidden_states)
    if states > MAX_HIDDEN_STATES:
        raise RequestError(
            f"return_hidden_states: all samples have up to {states} tokens together, more than the "
            f"limit of {MAX_HIDDEN_STATES}: lower max_new_tokens or n",
            param="return_hidden_states",
        )
    _check_logprobs([p for p in prompts if p.return_logprob], context_length, names)


def _output(prompt: PromptRequest, context_length: int) -> int:
    """The most tokens that a sample can have."""
    return min(prompt.sampling.max_new_tokens, context_length - len(prompt.token_ids))


def _entries(sampling: SamplingParams) -> int:
    lists = (sampling.logit_bias, sampling.stop_token_ids, sampling.allowed_token_ids)
    return sum(map(len, (*lists, *sampling.bad_word_ids)))


def _check_logprobs(
    prompts: Sequence[PromptRequest], context_length: int, names: Mapping[str, str]
) -> None:
    top, output = names["top"], names["output"]
    total = 0
    for prompt in prompts:
        best = 1 + prompt.top_logprobs + len(prompt.token_ids_logprob)
        length = len(prompt.token_ids)
        wanted = (length - prompt.logprob_start) * best if prompt.logprob_start >= 0 else 0
        if wanted > MAX_INPUT_LOGPROBS:
            raise RequestError(
                f"logprobs of a prompt: {length - max(prompt.logprob_start, 0)} positions with "
                f"{best} each are {wanted}, more than the limit of {MAX_INPUT_LOGPROBS}: ask for "
                f"fewer positions (logprob_start_len) or a lower {top}",
                param=top,
            )
        total += prompt.n * (wanted + _output(prompt, context_length) * best)
    if total > MAX_LOGPROBS:
        raise RequestError(
            f"{top}: tokens of all samples with their best ones are up to {total} logprobs, more "
            f"than the limit of {MAX_LOGPROBS}: lower {top}, {output} or n",
            param=top,
        )


def fitting_output(n: int, top: int | None, room: int) -> int:
    """The longest output, up to ``room``, whose logprobs stay within the limit; for requests that
    name no length. top None: no logprobs."""
    return room if top is None else min(room, max(1, MAX_LOGPROBS // (n * (1 + top))))
