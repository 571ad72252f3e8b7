"""What bodies of the OpenAI routes share, and that of /v1/completions, checked and tokenized."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import (
    MAX_MODEL_LENGTH,
    MAX_RID_LENGTH,
    MAX_TOP_LOGPROBS,
)
from mamba_eagle.server.cache_fields import read_cache_hints
from mamba_eagle.server.demand import check_demand
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.grammars import read_grammar
from mamba_eagle.server.prompts import limit_prompts
from mamba_eagle.server.sampling import (
    Vocabulary,
    check,
    read_params,
    read_samples,
    read_seed,
    read_stop,
)
from mamba_eagle.server.schedule_fields import read_schedule
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import PromptRequest
from mamba_eagle.tokenizer.stop import StopStrings

LENGTHS = ("max_completion_tokens", "max_tokens")  # the first that is given counts


class OpenAIJob(msgspec.Struct, kw_only=True):
    rid: str
    model: str
    prompts: list[PromptRequest]
    stream: bool
    include_usage: bool  # a last chunk of a stream has the usage
    continuous_usage: bool  # every chunk has the usage so far
    meta_info: bool  # each choice has /generate's meta_info; sglang's evaluations ask for it
    logprobs: int | None = None  # how many best ones beside the token's own; None: none at all
    echoes: list[str] = []  # completions with echo: the prompts' text, which comes first


def parse_completion(fields: Fields, state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    n = read_samples(fields)
    if fields.integer("best_of", n) != n:
        raise fields.wrong("best_of", "choosing among samples is not available; leave it out")
    echo = fields.flag("echo")
    wanted = None if fields.raw("logprobs") is None else read_top_logprobs(fields, "logprobs")
    tokenizer = state.prompts.need_tokenizer("/v1/completions")
    prompts = read_prompts(fields, "prompt", state, n)
    if fields.text("suffix"):
        prompts = _with_suffix(fields, state, prompts)
    return make_job(
        fields,
        state,
        "cmpl",
        prompts,
        lambda length: fields.integer("max_tokens", 16),
        wanted,
        tokenizer.decode_all(prompts) if echo else [],
        read_grammar(fields, state.grammars),
    )


def make_job(
    fields: Fields,
    state: ServerState,
    kind: str,
    prompts: list[list[int]],
    max_tokens: Callable[[int], int],
    logprobs: int | None,
    echoes: list[str],
    grammar: str,
) -> OpenAIJob:
    rid = fields.short_text("rid", MAX_RID_LENGTH) or f"{kind}-{uuid.uuid4().hex}"
    n = read_samples(fields)
    seed = read_seed(fields)
    samplings: dict[int, SamplingParams] = {}  # by length: prompts share them
    stops = StopStrings(read_stop(fields))
    requests = []
    for i, ids in enumerate(prompts):
        own = rid if len(prompts) == 1 else f"{rid}_{i}"
        length = max_tokens(len(ids))
        if length not in samplings:
            samplings[length] = _sampling(fields, state, length, grammar)
        requests.append(
            PromptRequest(
                rid=own,
                token_ids=ids,
                sampling=samplings[length],
                seed=seed,
                n=n,
                sample_rids=[own] if n == 1 else [f"{own}_{k}" for k in range(n)],
                stops=stops,
                return_logprob=logprobs is not None,
                logprob_start=0 if echoes and logprobs is not None else -1,
                top_logprobs=logprobs or 0,
                return_spec_trace=fields.flag("return_spec_trace"),
                cache=read_cache_hints(fields, len(ids)),
                **read_schedule(fields, state.config),
            )
        )
    top = "logprobs" if kind == "cmpl" else "top_logprobs"
    check_demand(requests, state.context_length, {"top": top, "output": _length_name(fields)})
    options = fields.object("stream_options")
    return OpenAIJob(
        rid=rid,
        model=fields.short_text("model", MAX_MODEL_LENGTH) or state.model_name,
        prompts=requests,
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        continuous_usage=options.flag("continuous_usage_stats"),
        meta_info=fields.flag("return_meta_info"),
        logprobs=logprobs,
        echoes=echoes,
    )


def _sampling(fields: Fields, state: ServerState, max_tokens: int, grammar: str) -> SamplingParams:
    """OpenAI's fields, and those beyond them under the names that other servers take."""
    params = read_params(fields, max_tokens, fields.integer("min_tokens", 0), grammar)
    names = {"max_new_tokens": _length_name(fields), "min_new_tokens": "min_tokens"}
    vocabulary = Vocabulary(state.vocab_size, state.manager.engine.eos_token_ids)
    check(params, vocabulary, names=names)
    return params


def _length_name(fields: Fields) -> str:
    """The field that limits the output, as this client calls it."""
    return next((name for name in LENGTHS if fields.raw(name) is not None), LENGTHS[1])


def refuse_fields(fields: Fields, names: tuple[str, ...]) -> None:
    for name in names:
        if fields.raw(name):
            raise fields.wrong(name, "is not available in this server; leave the field out")


def read_top_logprobs(fields: Fields, name: str) -> int:
    value = fields.raw(name)
    # Some clients of /v1/completions send the chat route's true.
    number = int(value) if name == "logprobs" and value is True else fields.integer(name, 0)
    if not 0 <= number <= MAX_TOP_LOGPROBS:
        raise fields.wrong(name, f"must be between 0 and {MAX_TOP_LOGPROBS}")
    return number


def _with_suffix(fields: Fields, state: ServerState, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts of a model that is to fill in what stands between each and the suffix."""
    if state.infill is None:
        raise fields.wrong(
            "suffix",
            "this model's tokenizer has no tokens for filling in, such as <|fim_prefix|>: leave "
            "the field out",
        )
    if fields.flag("echo"):
        raise fields.wrong("echo", "a suffix is given, and no text begins with both: send one")
    (suffix,) = state.prompts.encode([fields.text("suffix")], ["suffix"], False)
    return [state.prompts.check(state.infill.around(ids, suffix), "prompt") for ids in prompts]


def read_prompts(fields: Fields, name: str, state: ServerState, n: int = 1) -> list[list[int]]:
    """A string, token ids, or a list of either; ``n`` samples of each.

    Raises: RequestError 400
    """
    value = fields.raw(name)
    if isinstance(value, str):
        state.limit_samples(1, n)
        return state.prompts.prompts([fields.text(name)], [name])
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, "must be a string, a list of token ids, or a list of either")
    batch = isinstance(value[0], (str, list))
    if batch:
        limit_prompts(fields, name, value)
    state.limit_samples(len(value) if batch else 1, n * len(value) if batch else n)
    if isinstance(value[0], str):
        return state.prompts.text_list(fields, name)
    if isinstance(value[0], list):
        return state.prompts.id_lists(fields, name)
    return [state.prompts.check(value, name)]
