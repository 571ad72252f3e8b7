"""Sampling parameters of a body, under SGLang's names and OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mamba_eagle.core import SamplingParams, shown
from mamba_eagle.limits import (
    GREEDY_BELOW,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_SAMPLES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, as_number
from mamba_eagle.server.grammars import Grammars, read_grammar
from mamba_eagle.tokenizer.stop import StopStrings


class Sampling(NamedTuple):
    """``seed`` None: the request did not say."""

    params: SamplingParams
    n: int
    seed: int | None
    stops: StopStrings


class Vocabulary(NamedTuple):
    """What token ids of a request are checked against."""

    size: int
    eos_token_ids: Sequence[int]


def read_seed(fields: Fields) -> int | None:
    for name in ("sampling_seed", "seed"):
        if fields.raw(name) is not None:
            seed = fields.integer(name, 0)
            if seed < 0:
                raise fields.wrong(name, "must be between 0 and 2**63 - 1")
            return seed
    return None


def read_samples(fields: Fields) -> int:
    n = fields.integer("n", 1)
    if not 1 <= n <= MAX_SAMPLES:
        raise fields.wrong("n", f"must be between 1 and {MAX_SAMPLES}")
    return n


def read_stop(fields: Fields) -> list[str]:
    """Stop strings: not too many, and not too long."""
    strings = fields.texts("stop", "stop strings", MAX_STOP_STRINGS)
    longest = max(strings, key=len, default="")
    if len(longest) > MAX_STOP_LENGTH:
        own = Fields({"stop": longest}, fields.where)
        raise own.wrong(
            "stop",
            f"the string has {len(longest)} characters but may have at most {MAX_STOP_LENGTH}: "
            "shorten it",
        )
    total = sum(map(len, strings))
    if total > MAX_STOP_CHARACTERS:
        raise fields.too_many("stop", "characters of stop strings", total, MAX_STOP_CHARACTERS)
    return strings


def read_logit_bias(fields: Fields) -> dict[int, float]:
    value = fields.raw("logit_bias")
    if value is None:
        return {}
    remedy = "must be an object from token ids to finite numbers"
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", remedy)
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise fields.too_many("logit_bias", "entries", len(value), MAX_LOGIT_BIAS_ENTRIES)
    bias: dict[int, float] = {}
    for key, number in value.items():
        converted = as_number(number)
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 19 else None
        if token is None or converted is None:
            raise fields.wrong("logit_bias", remedy)
        bias[token] = converted
    return bias


def read_temperature(fields: Fields, default: float) -> float:
    value = fields.number("temperature", default)
    return 0.0 if 0 < value < GREEDY_BELOW else value


def check(
    params: SamplingParams,
    vocabulary: Vocabulary,
    where: str = "",
    names: Mapping[str, str] | None = None,
) -> None:
    """names: the route's own names of parameters, where they are not SamplingParams'.

    Raises: RequestError with every value that is out of range.
    """
    problems = params.problems(*vocabulary)
    if not problems:
        return
    parts = []
    for name, value, remedy in problems:
        for ours, theirs in (names or {}).items():
            remedy = remedy.replace(ours, theirs)
        parts.append(f"{where}{(names or {}).get(name, name)} = {shown(value)}: {remedy}")
    raise RequestError("; ".join(parts), param=parts[0].partition(" = ")[0])


def read_params(
    fields: Fields, max_new_tokens: int, min_new_tokens: int, grammar: str
) -> SamplingParams:
    """What all routes name alike, unchecked; the limits' names differ. grammar: as
    ``read_grammar`` returns it.

    Raises: RequestError for what is of the wrong kind, or too much of it.
    """
    default = SamplingParams()
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=read_temperature(fields, default.temperature),
        top_p=fields.number("top_p", default.top_p),
        top_k=fields.integer("top_k", default.top_k),
        min_p=fields.number("min_p", default.min_p),
        frequency_penalty=fields.number("frequency_penalty", default.frequency_penalty),
        presence_penalty=fields.number("presence_penalty", default.presence_penalty),
        repetition_penalty=fields.number("repetition_penalty", default.repetition_penalty),
        stop=read_stop(fields),
        stop_token_ids=fields.integers("stop_token_ids", "token ids", MAX_STOP_TOKEN_IDS),
        ignore_eos=fields.flag("ignore_eos"),
        logit_bias=read_logit_bias(fields),
        skip_special_tokens=fields.flag("skip_special_tokens", default.skip_special_tokens),
        spaces_between_special_tokens=fields.flag(
            "spaces_between_special_tokens", default.spaces_between_special_tokens
        ),
        no_stop_trim=fields.flag("no_stop_trim"),
        grammar=grammar,
    )


def read_sampling(fields: Fields, vocabulary: Vocabulary, grammars: Grammars) -> Sampling:
    """Raises: RequestError"""
    default = SamplingParams()
    params = read_params(
        fields,
        fields.integer("max_new_tokens", default.max_new_tokens),
        fields.integer("min_new_tokens", default.min_new_tokens),
        read_grammar(fields, grammars),
    )
    check(params, vocabulary, fields.where)
    return Sampling(params, read_samples(fields), read_seed(fields), StopStrings(params.stop))
