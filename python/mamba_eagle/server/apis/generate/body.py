"""The body of POST /generate, checked and tokenized."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Annotated, Any

from mamba_eagle import limits
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.grammars import NAMES, Constrained, read_grammars
from mamba_eagle.server.bodies.kinds import Flag, one_or_each, read, says
from mamba_eagle.server.bodies.prompts import limit_prompts
from mamba_eagle.server.bodies.sampling import Sampled, checked, with_parameters
from mamba_eagle.server.bodies.served import Job, Served, check_demand
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState


@with_parameters()
class GenerateSampling(Sampled, Constrained):
    """How to sample."""

    HARMLESS = frozenset(("stream_interval",))


@dataclass(frozen=True, eq=False)
class Each(kinds.Kind):
    """One value for all prompts, or a list with one for each: read once it is known how many."""

    one: kinds.Kind


def either(one: kinds.Kind, schema: kinds.Schema | None = None) -> Each:
    """schema: of both, if that of a list of ``one`` would not describe it."""
    both = schema or kinds.any_of(one.schema, kinds.list_of(one.schema))
    return Each(lambda value: value, "", both, one)


TEXTS = kinds.text_or_texts("prompt", limits.MAX_PROMPTS)
ID_LISTS = kinds.untouched(kinds.ID_LISTS)
FLAGS, INTEGERS, STRINGS = either(kinds.FLAG), either(kinds.INTEGER_KIND), either(kinds.TEXT)
TOP = kinds.integer(0, limits.MAX_TOP_LOGPROBS)
NAMED = either(kinds.integers("token ids", limits.MAX_STOP_TOKEN_IDS), kinds.ID_LISTS)


class GenerateBody(Served):
    """text or input_ids, and how to sample."""

    text: Annotated[Any, TEXTS] = says("a prompt, or a list of prompts")
    input_ids: Annotated[Any, ID_LISTS] = says("a prompt's token ids, or a list of such")
    sampling_params: Annotated[Any, one_or_each(GenerateSampling, "sampling_params")] = says(
        "how to sample"
    )
    stream: Flag = says("server-sent events", False)
    incremental: Flag | None = says("of a stream: events have what is new instead of all so far")
    rid: Annotated[Any, kinds.untouched(kinds.STRINGS)] = says(
        "names for `/abort_request` and logs"
    )
    return_logprob: Annotated[Any, FLAGS] = says("logprobs of the output")
    logprob_start_len: Annotated[Any, INTEGERS] = says(
        "the first token of the prompt with logprobs"
    )
    top_logprobs_num: Annotated[Any, INTEGERS] = says(
        f"best tokens, up to {limits.MAX_TOP_LOGPROBS}"
    )
    token_ids_logprob: Annotated[Any, NAMED] = says(
        "tokens whose logprobs come with return_logprob, or a list of them per prompt"
    )
    return_text_in_logprobs: Flag = says("the tokens' texts beside them", False)
    return_spec_trace: Annotated[Any, FLAGS] = says("the tree of each step")
    return_hidden_states: Annotated[Any, FLAGS] = says(
        "the hidden states that the output was sampled from"
    )
    return_routed_experts: Annotated[Any, FLAGS] = says(
        "the experts of each token, with `--enable-return-routed-experts`"
    )
    routed_experts_start_len: Annotated[Any, INTEGERS] = says(
        "the first token whose experts are returned; the prompt before it may come from the cache"
    )
    lora_path: Annotated[Any, STRINGS] = says("the name of a loaded adapter, or one per prompt")

    HARMLESS = frozenset(("model",))  # gateways add "unknown"; lora_path chooses here
    REFUSED = {
        **known.SAMPLING,
        **dict.fromkeys((*NAMES, *GenerateSampling.FIELDS), known.MISPLACED),
    }

    @property
    def is_batch(self) -> bool:
        """Whether the prompts came as a list, of texts or of lists of ids."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)


PER_PROMPT = {
    name: kind.one
    for name, field in GenerateBody.model_fields.items()
    for kind in field.metadata
    if isinstance(kind, Each)
}


def parse_generate(values: dict[str, Any], state: ServerState) -> Job[GenerateBody]:
    """Raises: RequestError 400 that names the field and its value."""
    body = read(GenerateBody, values)
    # What is cheap to refuse comes before the prompts, which may take long to encode.
    count = _count_prompts(body)
    rid, rids = _read_rids(body.rid, count, body.is_batch)
    asked = _each_sampling(body, count)
    samplings = _read_samplings(body, asked, state)
    state.limit_samples(count, sum(one.n for one in asked))
    prompts: list[Generate] = []
    for i, token_ids in enumerate(_read_prompts(body, state)):
        own = partial(_own, body, i, count)
        prompt = Generate(
            rid=rids[i],
            token_ids=token_ids,
            sampling=samplings[i],
            n=asked[i].n,
            seed=asked[i].chosen_seed,
            return_spec_trace=bool(own("return_spec_trace")),
            return_hidden_states=bool(own("return_hidden_states")),
            adapter=own("lora_path") or "",  # SGLang's field has a name, not a folder
            **body.wishes(state.config, len(token_ids)),
        )
        if prompt.adapter and prompt.adapter not in state.adapters:
            raise RequestError.about("lora_path", prompt.adapter, state.loaded_adapters)
        _ask_for_experts(prompt, own, state)
        _ask_for_logprobs(prompt, own, state)
        prompts.append(prompt)
    check_demand(prompts, state.prompts.context_length)
    job = Job(body, state.config, rid, prompts)
    for prompt in prompts:
        job.stop_strings(prompt.sampling.stop)  # here, in a thread: thousands take long
    return job


# ── prompts ──────────────────────────────────────────────────────────────────────────────────


def _count_prompts(body: GenerateBody) -> int:
    text, ids = body.text, body.input_ids
    if text is not None and ids is not None:
        raise RequestError("text and input_ids are both given: send one of them", param="text")
    if text is None and ids is None:
        raise RequestError("text or input_ids is needed: neither is given", param="text")
    if text is not None:
        return len(text) if body.is_batch else 1
    if not isinstance(ids, list):
        remedy = "must be a list of token ids, or a list of such lists"
        raise RequestError.about("input_ids", ids, remedy)
    if not body.is_batch:
        return 1
    limit_prompts(ids, "input_ids")
    return len(ids)


def _read_prompts(body: GenerateBody, state: ServerState) -> list[list[int]]:
    reader, ids = state.prompts, body.input_ids
    if body.text is not None:
        return reader.any(body.text, "text")
    return reader.id_lists(ids, "input_ids") if body.is_batch else [reader.check(ids, "input_ids")]


# ── sampling ─────────────────────────────────────────────────────────────────────────────────


def _each_sampling(body: GenerateBody, count: int) -> list[GenerateSampling]:
    given = body.sampling_params
    if not isinstance(given, list):
        return [given or GenerateSampling()] * count
    if len(given) != count:
        wrong = f"the list has {len(given)} entries for {count} prompts"
        raise RequestError(f"sampling_params: {wrong}", param="sampling_params")
    return given


def _read_samplings(
    body: GenerateBody, asked: list[GenerateSampling], state: ServerState
) -> list[SamplingParams]:
    places, copies = [f"sampling_params[{i}]." for i in range(len(asked))], 1
    if not isinstance(body.sampling_params, list):  # one object for all prompts is read once
        asked, places, copies = asked[:1], ["sampling_params."], len(asked)
    grammars = read_grammars(asked, state.grammars, places)
    read = list(map(_read_sampling, asked, places, grammars, repeat(state))) * copies
    different = {tuple(one.stop) for one in read}
    if any(different):
        state.prompts.need_tokenizer("sampling_params.stop")
    characters = sum(len(string) for strings in different for string in strings)
    if characters > limits.MAX_STOP_CHARACTERS:
        what = "characters of different stop strings"
        wrong = kinds.TooMany(what, characters, limits.MAX_STOP_CHARACTERS)
        raise RequestError(f"sampling_params: {wrong}", param="sampling_params")
    return read


def _read_sampling(
    one: GenerateSampling, where: str, grammar: str, state: ServerState
) -> SamplingParams:
    bad_words = one.bad_word_ids(state.prompts, where)
    return checked(one, state.vocabulary, where, grammar=grammar, bad_word_ids=bad_words)


# ── names ────────────────────────────────────────────────────────────────────────────────────


def _read_rids(value: Any, count: int, is_batch: bool) -> tuple[str, list[str]]:
    """The request's name and its prompts'."""
    if isinstance(value, list) and is_batch:
        return uuid.uuid4().hex, _read_rid_list(value, count)
    if value is not None and not kinds.as_text(value):
        raise RequestError.about(
            "rid", value, "must be a string, not empty" + " or a list of strings" * is_batch
        )
    rid = RID.take(value, "rid") if value is not None else uuid.uuid4().hex
    if not is_batch or count == 1:
        return rid, [rid] * count
    return rid, [f"{rid}_{i}" for i in range(count)]


def _read_rid_list(value: list[Any], count: int) -> list[str]:
    rids = kinds.all_of(value, kinds.as_text)
    if rids is None or len(rids) != count or not all(rids):
        raise RequestError.about("rid", value, f"must be a string or a list of {count} strings")
    if len(set(rids)) != count:
        raise RequestError.about("rid", value, "the names must differ")
    return [RID.take(rid, f"rid[{i}]") for i, rid in enumerate(rids)]


RID = kinds.short(limits.MAX_RID_LENGTH)

# ── what comes back ──────────────────────────────────────────────────────────────────────────

Own = Callable[[str], Any]  # a prompt's own value of a field


def _own(body: GenerateBody, i: int, count: int, name: str) -> Any:
    """Prompt i's of a field that may be one value or a list with one per prompt."""
    kind, value = PER_PROMPT[name], getattr(body, name)
    is_list = isinstance(value, list)
    if is_list and kind is NAMED.one:
        is_list = bool(value) and isinstance(value[0], list)
    if is_list and len(value) != count:
        remedy = f"the list has {len(value)} entries for {count} prompts"
        raise RequestError.about(name, value, remedy)
    value = value[i] if is_list else value
    return None if value is None else kind.take(value, name)


def _ask_for_experts(prompt: Generate, own: Own, state: ServerState) -> None:
    prompt.return_routed_experts = asks = bool(own("return_routed_experts"))
    if asks and not state.config.enable_return_routed_experts:
        remedy = "needs a server with --enable-return-routed-experts"
        raise RequestError.about("return_routed_experts", asks, remedy)
    if start := own("routed_experts_start_len"):
        fitting = kinds.integer(0, len(prompt.token_ids))
        prompt.routed_experts_start = fitting.take(start, "routed_experts_start_len")


def _ask_for_logprobs(prompt: Generate, own: Own, state: ServerState) -> None:
    named: list[int] = own("token_ids_logprob") or []
    vocab_size, length = state.prompts.vocab_size, len(prompt.token_ids)
    if not all(0 <= token < vocab_size for token in named):
        remedy = f"each must be between 0 and {vocab_size - 1}"
        raise RequestError.about("token_ids_logprob", named, remedy)
    start, best = own("logprob_start_len"), own("top_logprobs_num") or 0
    if not own("return_logprob"):
        if named:
            remedy = "needs return_logprob: send that as well"
            raise RequestError.about("token_ids_logprob", named, remedy)
        return
    start = -1 if start is None else start
    if not -1 <= start <= length:
        remedy = f"must be between 0 and {length}, the prompt's length, or -1: output only"
        raise RequestError.about("logprob_start_len", start, remedy)
    prompt.top_logprobs = TOP.take(best, "top_logprobs_num")
    prompt.return_logprob, prompt.token_ids_logprob = True, named
    prompt.logprob_start = -1 if start == length else start
