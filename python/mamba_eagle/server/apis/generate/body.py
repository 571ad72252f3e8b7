"""The body of POST /generate, checked and tokenized."""

import uuid
from dataclasses import dataclass
from typing import Annotated, Any

from mamba_eagle.limits import (
    MAX_PROMPTS,
    MAX_RID_LENGTH,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.grammars import NAMES, Constrained, read_grammar
from mamba_eagle.server.bodies.kinds import Flag, OneOrEach, read, says
from mamba_eagle.server.bodies.prompts import limit_prompts
from mamba_eagle.server.bodies.sampling import Sampled, checked, with_parameters
from mamba_eagle.server.bodies.served import Job, Served, check_demand
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import PromptRequest
from mamba_eagle.tokenizer.stop import StopStrings


@with_parameters()
class GenerateSampling(Sampled, Constrained):
    """How to sample."""

    HARMLESS = frozenset(("stream_interval",))


def either(kind: kinds.Kind) -> kinds.Kind:
    """One value for all prompts, or a list with one for each."""
    return kinds.untouched(kinds.any_of(kind.schema, kinds.list_of(kind.schema)))


TEXTS = kinds.text_or_texts("prompt", MAX_PROMPTS)
STRINGS, ID_LISTS = kinds.untouched(kinds.STRINGS), kinds.untouched(kinds.ID_LISTS)
FLAGS, INTEGERS = either(kinds.FLAG), either(kinds.INTEGER_KIND)


class GenerateBody(Served):
    """text or input_ids, and how to sample."""

    text: Annotated[Any, TEXTS] = says("a prompt, or a list of prompts")
    input_ids: Annotated[Any, ID_LISTS] = says("a prompt's token ids, or a list of such")
    sampling_params: Annotated[Any, OneOrEach(GenerateSampling, "sampling_params")] = says(
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
    top_logprobs_num: Annotated[Any, INTEGERS] = says(f"best tokens, up to {MAX_TOP_LOGPROBS}")
    token_ids_logprob: Annotated[Any, ID_LISTS] = says(
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


@dataclass(kw_only=True)
class GenerateJob(Job[GenerateBody]):
    as_list: bool  # the reply is a list


def parse_generate(values: dict[str, Any], state: ServerState) -> GenerateJob:
    """Raises: RequestError 400 that names the field and its value."""
    body = read(GenerateBody, values)
    # What is cheap to refuse comes before the prompts, which may take long to encode.
    is_batch, count = _count_prompts(body)
    rid, rids = _read_rids(body.rid, count, is_batch)
    samplings = _read_samplings(body, count, state)
    num_samples = sum(sampling["n"] for sampling in samplings)
    state.limit_samples(count, num_samples)
    requests: list[PromptRequest] = []
    for i, token_ids in enumerate(_read_prompts(body, state)):
        own = _own(body, i, count)
        start = own["routed_experts_start_len"] or 0
        if not 0 <= start <= len(token_ids):
            remedy = f"must be between 0 and {len(token_ids)}"
            raise RequestError.about("routed_experts_start_len", start, remedy)
        name = own["lora_path"] or ""  # SGLang's field has a name, not a folder
        if name and name not in state.adapters:
            raise RequestError.about("lora_path", name, state.loaded_adapters)
        requests.append(
            PromptRequest(
                rid=rids[i],
                token_ids=token_ids,
                return_spec_trace=bool(own["return_spec_trace"]),
                return_hidden_states=bool(own["return_hidden_states"]),
                return_routed_experts=_asks_for_experts(own, state),
                routed_experts_start=start,
                adapter=name,
                **samplings[i],
                **_read_logprobs(own, len(token_ids), state.prompts.vocab_size),
                **body.wishes(state.config, len(token_ids)),
            )
        )
    check_demand(requests, state.prompts.context_length)
    as_list = is_batch or num_samples > 1
    return GenerateJob(body=body, rid=rid, prompts=requests, as_list=as_list)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────


def _count_prompts(body: GenerateBody) -> tuple[bool, int]:
    """Whether the prompts came as a list, and how many there are."""
    text, ids = body.text, body.input_ids
    if text is not None and ids is not None:
        raise RequestError("text and input_ids are both given: send one of them", param="text")
    if text is None and ids is None:
        raise RequestError("text or input_ids is needed: neither is given", param="text")
    if text is not None:
        return isinstance(text, list), len(text) if isinstance(text, list) else 1
    if not isinstance(ids, list):
        remedy = "must be a list of token ids, or a list of such lists"
        raise RequestError.about("input_ids", ids, remedy)
    if not ids or not isinstance(ids[0], list):
        return False, 1
    limit_prompts(ids, "input_ids")
    return True, len(ids)


def _read_prompts(body: GenerateBody, state: ServerState) -> list[list[int]]:
    reader, ids = state.prompts, body.input_ids
    if isinstance(body.text, list):
        return reader.prompts(body.text, [f"text[{i}]" for i in range(len(body.text))])
    if body.text is not None:
        return reader.prompts([body.text], ["text"])
    if ids and isinstance(ids[0], list):
        return reader.id_lists(ids, "input_ids")
    return [reader.check(ids, "input_ids")]


# ── sampling ─────────────────────────────────────────────────────────────────────────────────

Fields = dict[str, Any]  # of a PromptRequest


def _read_samplings(body: GenerateBody, count: int, state: ServerState) -> list[Fields]:
    given = body.sampling_params
    if isinstance(given, list):
        if len(given) != count:
            wrong = f"the list has {len(given)} entries for {count} prompts"
            raise RequestError(f"sampling_params: {wrong}", param="sampling_params")
        samplings = _read_each(given, state)
    else:
        # One object for all prompts is read once.
        samplings = [_read_sampling(given or GenerateSampling(), "sampling_params.", state)] * count
    if any(one["sampling"].stop for one in samplings):
        state.prompts.need_tokenizer("sampling_params.stop")
    return samplings


def _read_sampling(one: GenerateSampling, where: str, state: ServerState) -> Fields:
    grammar = read_grammar(one, state.grammars, where)
    bad_words, seed = one.bad_word_ids(state.prompts, where), one.chosen_seed
    params = checked(one, state.vocabulary, where, grammar=grammar, bad_word_ids=bad_words)
    stops = StopStrings(params.stop) if params.stop else None
    return {"sampling": params, "seed": seed, "n": one.n, "stops": stops}


def _read_each(given: list[GenerateSampling], state: ServerState) -> list[Fields]:
    known: dict[
        tuple[str, ...], StopStrings | None
    ] = {}  # prompts with the same strings share them
    characters = 0
    samplings = []
    for i, one in enumerate(given):
        made = _read_sampling(one, f"sampling_params[{i}].", state)
        strings = tuple(made["sampling"].stop)
        if strings not in known:
            known[strings] = made["stops"]
            characters += sum(map(len, strings))
        if characters > MAX_STOP_CHARACTERS:
            what = "characters of different stop strings"
            wrong = kinds.TooMany(what, characters, MAX_STOP_CHARACTERS)
            raise RequestError(f"sampling_params: {wrong}", param="sampling_params")
        samplings.append({**made, "stops": known[strings]})
    return samplings


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


RID = kinds.short(MAX_RID_LENGTH)
NAMED = kinds.integers("token ids", MAX_STOP_TOKEN_IDS)

# ── logprobs ─────────────────────────────────────────────────────────────────────────────────


OWN = {
    "return_logprob": kinds.FLAG,
    "logprob_start_len": kinds.INTEGER_KIND,
    "top_logprobs_num": kinds.INTEGER_KIND,
    "token_ids_logprob": NAMED,
    "return_spec_trace": kinds.FLAG,
    "return_hidden_states": kinds.FLAG,
    "return_routed_experts": kinds.FLAG,
    "routed_experts_start_len": kinds.INTEGER_KIND,
    "lora_path": kinds.TEXT,
}


def _own(body: GenerateBody, i: int, count: int) -> Fields:
    """Prompt i's of the fields that may be one value or a list with one per prompt."""
    own = {}
    for name, kind in OWN.items():
        value = getattr(body, name)
        is_list = isinstance(value, list)
        if is_list and kind is NAMED:
            is_list = bool(value) and isinstance(value[0], list)
        if is_list and len(value) != count:
            remedy = f"the list has {len(value)} entries for {count} prompts"
            raise RequestError.about(name, value, remedy)
        value = value[i] if is_list else value
        own[name] = None if value is None else kind.take(value, name)
    return own


def _asks_for_experts(own: Fields, state: ServerState) -> bool:
    asks = bool(own["return_routed_experts"])
    if asks and not state.config.enable_return_routed_experts:
        remedy = "needs a server with --enable-return-routed-experts"
        raise RequestError.about("return_routed_experts", asks, remedy)
    return asks


def _read_logprobs(own: Fields, prompt_length: int, vocab_size: int) -> Fields:
    """What a prompt wants of logprobs."""
    start, best = own["logprob_start_len"], own["top_logprobs_num"]
    named: list[int] = own["token_ids_logprob"] or []
    if not all(0 <= token < vocab_size for token in named):
        remedy = f"each must be between 0 and {vocab_size - 1}"
        raise RequestError.about("token_ids_logprob", named, remedy)
    if not own["return_logprob"]:
        if named:
            remedy = "needs return_logprob: send that as well"
            raise RequestError.about("token_ids_logprob", named, remedy)
        return {}
    start = -1 if start is None else start
    best = best or 0
    if not -1 <= start <= prompt_length:
        raise RequestError.about(
            "logprob_start_len",
            start,
            f"must be between 0 and {prompt_length}, the prompt's length, or -1: output only",
        )
    if not 0 <= best <= MAX_TOP_LOGPROBS:
        remedy = f"must be between 0 and {MAX_TOP_LOGPROBS}"
        raise RequestError.about("top_logprobs_num", best, remedy)
    return {
        "return_logprob": True,
        "logprob_start": -1 if start == prompt_length else start,
        "top_logprobs": best,
        "token_ids_logprob": named,
    }
