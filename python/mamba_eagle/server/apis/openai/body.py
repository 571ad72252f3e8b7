"""What bodies of the OpenAI routes share, and that of /v1/completions, checked and tokenized."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_TOP_LOGPROBS
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.demand import check_demand
from mamba_eagle.server.bodies.grammars import Formatted, read_grammar
from mamba_eagle.server.bodies.model import Body, Flag, Integer, Text, needs, read, says
from mamba_eagle.server.bodies.prompts import ANY_PROMPTS, count_prompts, limit_prompts
from mamba_eagle.server.bodies.sampling import (
    LENGTHS,
    PARAMETERS,
    Sampled,
    bounded,
    checked,
    with_parameters,
)
from mamba_eagle.server.bodies.served import Named
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import PromptRequest
from mamba_eagle.tokenizer.stop import StopStrings

TOP = kinds.integer(0, MAX_TOP_LOGPROBS)
# Some clients of /v1/completions send the chat route's true.
LOGPROBS = kinds.Kind(lambda value: 1 if value is True else TOP.read(value), TOP.must, TOP.schema)
MaxTokens = Annotated[int, bounded("max_new_tokens")]
LONGEST = PARAMETERS["max_new_tokens"][1].about


class StreamOptions(Body):
    HARMLESS = frozenset(("include_obfuscation",))

    include_usage: Flag = says("a last chunk has the usage", False)
    continuous_usage_stats: Flag = says("each chunk has its choice's usage so far", False)


class Common(Named):
    """Of all routes that generate but /generate."""

    stream: Flag = says("server-sent events", False)
    min_tokens: Annotated[int, bounded("min_new_tokens")] = says(
        PARAMETERS["min_new_tokens"][1].about, 0
    )


@with_parameters(*LENGTHS)
class OpenAIBody(Common, Sampled, Formatted):
    stream_options: StreamOptions = says("of a stream", StreamOptions())
    return_meta_info: Flag = says("each choice has /generate's meta_info", False)
    return_spec_trace: Flag = says("the tree of each step", False)

    @property
    def length_name(self) -> str:
        """The field that limits the output, as this client calls it."""
        return "max_tokens"


class CompletionBody(OpenAIBody):
    """A prompt, and how to continue it."""

    prompt: Annotated[Any, ANY_PROMPTS] = needs("a text, token ids, or a list of either")
    max_tokens: MaxTokens = says(LONGEST, 16)
    echo: Flag = says("the prompt comes first", False)
    suffix: Text = says("what the output must lead to, of models with tokens for filling in", "")
    logprobs: Annotated[int | None, LOGPROBS] = says("best tokens beside each")
    best_of: Integer | None = says("as n, or left out")
    return_token_ids: Flag = says("choices have `prompt_token_ids` and `token_ids`", False)
    return_tokens_as_token_ids: Flag = says("logprobs name tokens as `token_id:5`", False)

    REFUSED = known.COMPLETIONS


class OpenAIJob(msgspec.Struct, kw_only=True):
    rid: str
    model: str
    prompts: list[PromptRequest]
    stream: bool
    include_usage: bool  # a last chunk of a stream has the usage
    continuous_usage: bool  # every chunk has the usage so far
    meta_info: bool  # each choice has /generate's meta_info; sglang's evaluations ask for it
    logprobs: int | None = None  # how many best ones beside the token's own; None: none at all
    token_ids: bool = False  # completions: choices have those of prompt and output
    token_names: bool = False  # completions: logprobs name tokens by their ids
    echoes: list[str] = []  # completions with echo: the prompts' text, which comes first


def parse_completion(values: dict[str, Any], state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    body = read(CompletionBody, values)
    if body.best_of not in (None, body.n):
        remedy = "choosing among samples is not available; leave it out"
        raise RequestError.about("best_of", body.best_of, remedy)
    tokenizer = state.prompts.need_tokenizer("/v1/completions")
    limit_prompts(body.prompt, "prompt")
    count = count_prompts(body.prompt)
    state.limit_samples(count, body.n * count)
    prompts = state.prompts.any(body.prompt, "prompt")
    if body.suffix:
        prompts = _with_suffix(body, state, prompts)
    job = make_job(
        body,
        state,
        "cmpl",
        prompts,
        lambda length: body.max_tokens,
        body.logprobs,
        tokenizer.decode_all(prompts) if body.echo else [],
        read_grammar(body, state.grammars),
    )
    job.token_ids, job.token_names = body.return_token_ids, body.return_tokens_as_token_ids
    return job


def make_job(
    body: OpenAIBody,
    state: ServerState,
    kind: str,
    prompts: list[list[int]],
    max_tokens: Callable[[int], int],
    logprobs: int | None,
    echoes: list[str],
    grammar: str,
) -> OpenAIJob:
    rid = body.rid or f"{kind}-{uuid.uuid4().hex}"
    n = body.n
    samplings: dict[int, SamplingParams] = {}  # by length: prompts share them
    stops: StopStrings | None = None
    schedule = body.schedule(state.config)
    requests = []
    for i, ids in enumerate(prompts):
        own = rid if len(prompts) == 1 else f"{rid}_{i}"
        length = max_tokens(len(ids))
        if length not in samplings:
            samplings[length] = _sampling(body, state, length, grammar)
        stops = stops or StopStrings(samplings[length].stop)
        requests.append(
            PromptRequest(
                rid=own,
                token_ids=ids,
                sampling=samplings[length],
                seed=body.chosen_seed,
                n=n,
                sample_rids=[own] if n == 1 else [f"{own}_{k}" for k in range(n)],
                stops=stops,
                return_logprob=logprobs is not None,
                logprob_start=0 if echoes and logprobs is not None else -1,
                top_logprobs=logprobs or 0,
                return_spec_trace=body.return_spec_trace,
                adapter=state.adapter_of(body.model),
                cache=body.cache_hints(len(ids)),
                **schedule,
            )
        )
    top = "logprobs" if kind == "cmpl" else "top_logprobs"
    check_demand(requests, state.context_length, {"top": top, "output": body.length_name})
    return OpenAIJob(
        rid=rid,
        model=body.model or state.model_name,
        prompts=requests,
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
        continuous_usage=body.stream_options.continuous_usage_stats,
        meta_info=body.return_meta_info,
        logprobs=logprobs,
        echoes=echoes,
    )


def _sampling(body: OpenAIBody, state: ServerState, length: int, grammar: str) -> SamplingParams:
    """OpenAI's fields, and those beyond them under the names that other servers take."""
    names = {"max_new_tokens": body.length_name, "min_new_tokens": "min_tokens"}
    return checked(
        body,
        state.vocabulary,
        names=names,
        max_new_tokens=length,
        min_new_tokens=body.min_tokens,
        grammar=grammar,
    )


def _with_suffix(
    body: CompletionBody, state: ServerState, prompts: list[list[int]]
) -> list[list[int]]:
    """The prompts of a model that is to fill in what stands between each and the suffix."""
    if state.infill is None:
        raise RequestError.about(
            "suffix",
            body.suffix,
            "this model's tokenizer has no tokens for filling in, such as <|fim_prefix|>: leave "
            "the field out",
        )
    if body.echo:
        remedy = "a suffix is given, and no text begins with both: send one"
        raise RequestError.about("echo", True, remedy)
    (suffix,) = state.prompts.encode([body.suffix], ["suffix"], False)
    return [state.prompts.check(state.infill.around(ids, suffix), "prompt") for ids in prompts]
