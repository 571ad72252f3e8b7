"""What bodies of the OpenAI routes share, and that of /v1/completions, checked and tokenized."""

import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from mamba_eagle.chat.parse import OutputParser
from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_INTEGER, MAX_SAMPLES
from mamba_eagle.message import Generate
from mamba_eagle.server.apis.generate.body import TOP
from mamba_eagle.server.bodies import kinds, known, sampling
from mamba_eagle.server.bodies.grammars import Formatted, read_grammar
from mamba_eagle.server.bodies.kinds import Body, Flag, Text, needs, read, says
from mamba_eagle.server.bodies.prompts import (
    ANY_PROMPTS,
    count_prompts,
    limit_prompts,
    limit_shared,
)
from mamba_eagle.server.bodies.served import Job, Named, check_demand
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState

BEST_OF = kinds.integer(1, MAX_SAMPLES)
# Some clients of /v1/completions send the chat route's true.
LOGPROBS = kinds.Kind(lambda value: 1 if value is True else TOP.read(value), TOP.must, TOP.schema)
LAST = kinds.integer(1, MAX_INTEGER, "must be 1 or more, or -1: as many as fit", other=-1)
MaxTokens = Annotated[int, sampling.bounded("max_new_tokens")]
LONGEST = sampling.PARAMETERS["max_new_tokens"][1].about


class StreamOptions(Body):
    HARMLESS = frozenset(("include_obfuscation",))

    include_usage: Flag = says("a last chunk has the usage", False)
    continuous_usage_stats: Flag = says("each chunk has its choice's usage so far", False)


class Common(Named):
    """Of all routes that generate but /generate."""

    stream: Flag = says("server-sent events", False)
    min_tokens: Annotated[int, sampling.bounded("min_new_tokens")] = says(
        sampling.PARAMETERS["min_new_tokens"][1].about, 0
    )


@sampling.with_parameters(*sampling.LENGTHS)
class OpenAIBody(Common, sampling.Sampled, Formatted):
    stream_options: StreamOptions = says("of a stream", StreamOptions())
    return_meta_info: Flag = says("each choice has /generate's meta_info", False)
    return_spec_trace: Flag = says("the tree of each step", False)
    prompt_logprobs: Annotated[int | None, TOP] = says(
        "logprobs of the prompt, and this many best tokens beside each; not of streams"
    )
    truncate_prompt_tokens: Annotated[int | None, LAST] = says(
        "at most this many tokens, the prompt's last; -1: as many as fit"
    )

    @property
    def samples(self) -> int:
        """How many samples each prompt has."""
        return self.n

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
    best_of: Annotated[int | None, BEST_OF] = says(
        "samples of each prompt, of which the n with the best mean logprob come; not of streams"
    )
    return_token_ids: Flag = says(
        "choices have `prompt_token_ids` (of a stream the first one) and `token_ids`", False
    )
    return_tokens_as_token_ids: Flag = says("logprobs name tokens as `token_id:5`", False)

    REFUSED = known.COMPLETIONS

    @property
    def samples(self) -> int:
        return self.n if self.best_of is None else self.best_of


class OpenAIJob(Job[OpenAIBody]):
    logprobs: int | None = None  # how many best ones beside the token's own; None: none at all
    echoes: Sequence[str] = ()  # completions with echo: the prompts' text, which comes first
    make_parser: Callable[[], OutputParser] = OutputParser  # reads one sample of a chat


def parse_completion(values: dict[str, Any], state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    body = read(CompletionBody, values)
    problem = ""
    if body.samples < body.n:
        problem = f"must be n ({body.n}) or more"
    elif body.samples > body.n and body.stream:
        problem = "the best are known at the end, and a stream begins before: send stream: false"
    if problem:
        raise RequestError.about("best_of", body.best_of, problem)
    tokenizer = state.prompts.need_tokenizer("/v1/completions")
    limit_prompts(body.prompt, "prompt")
    count = count_prompts(body.prompt)
    state.limit_samples(count, body.samples * count)
    prompts = state.prompts.keeping(body.truncate_prompt_tokens).any(body.prompt, "prompt")
    if body.suffix:
        prompts = _with_suffix(body, state, prompts)
    echoes = tokenizer.decode_all(prompts) if body.echo else []
    grammar, top = read_grammar(body, state.grammars), body.logprobs
    of_echo = bool(echoes) and top is not None
    job = make_job(body, state, "cmpl", prompts, body.max_tokens, top, grammar, of_echo)
    job.echoes = echoes
    return job


def make_job(
    body: OpenAIBody,
    state: ServerState,
    kind: str,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    grammar: str,
    of_prompt: bool = False,
) -> OpenAIJob:
    """kind: what names begin with. of_prompt: the logprobs are of the prompt, too."""
    if body.prompt_logprobs is not None and body.stream:
        remedy = "does not come with a stream: send stream: false"
        raise RequestError.about("prompt_logprobs", body.prompt_logprobs, remedy)
    rid = body.rid or f"{kind}-{uuid.uuid4().hex}"
    n = body.samples
    wanted = [top for top in (logprobs, body.prompt_logprobs) if top is not None]
    of_prompt = of_prompt or body.prompt_logprobs is not None
    params = _sampling(body, state, max_tokens, grammar)
    requests = []
    for i, ids in enumerate(prompts):
        own = rid if len(prompts) == 1 else f"{rid}_{i}"
        requests.append(
            Generate(
                rid=own,
                token_ids=ids,
                sampling=params,
                seed=body.chosen_seed,
                n=n,
                return_logprob=bool(wanted) or n > body.n,
                logprob_start=0 if of_prompt else -1,
                top_logprobs=max(wanted, default=0),
                return_spec_trace=body.return_spec_trace,
                adapter=state.adapter_of(body.model),
                **body.wishes(state.config, len(ids)),
            )
        )
    top = "logprobs" if kind == "cmpl" else "top_logprobs"
    check_demand(requests, state.context_length, {"top": top, "output": body.length_name})
    job = OpenAIJob(body, state.config, rid, requests, body.model or state.model_name)
    job.logprobs = logprobs
    job.stop_strings(params.stop)  # here, in a thread: thousands take long
    return job


def _sampling(body: OpenAIBody, state: ServerState, length: int, grammar: str) -> SamplingParams:
    """OpenAI's fields, and those beyond them under the names that other servers take."""
    names = {"max_new_tokens": body.length_name, "min_new_tokens": "min_tokens"}
    return sampling.checked(
        body,
        state.vocabulary,
        names=names,
        max_new_tokens=length,
        min_new_tokens=body.min_tokens,
        grammar=grammar,
        bad_word_ids=body.bad_word_ids(state.prompts),
    )


def _with_suffix(
    body: CompletionBody, state: ServerState, prompts: list[list[int]]
) -> list[list[int]]:
    """The prompts of a model that is to fill in what stands between each and the suffix."""
    if state.infill is None:
        remedy = (
            "this model's tokenizer has no tokens for filling in, such as <|fim_prefix|>: leave "
            "the field out"
        )
        raise RequestError.about("suffix", body.suffix, remedy)
    if body.echo:
        remedy = "a suffix is given, and no text begins with both: send one"
        raise RequestError.about("echo", True, remedy)
    (suffix,) = state.prompts.encode([body.suffix], ["suffix"], False)
    limit_shared(suffix, len(prompts), "suffix")
    return [state.prompts.check(state.infill.around(ids, suffix), "prompt") for ids in prompts]
