"""sampling_params of a body, under SGLang's names."""

from __future__ import annotations

from typing import NamedTuple

from mamba_eagle.core import SamplingParams
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, as_number

CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag", "stop_regex")
MAX_SAMPLES = 1024


class Sampling(NamedTuple):
    """``seed`` None: the request did not say."""

    params: SamplingParams
    n: int
    seed: int | None


def refuse_constraints(fields: Fields) -> None:
    for name in CONSTRAINTS:
        # An empty list asks for nothing; sglang.lang sends one with each request.
        if fields.raw(name) not in (None, []):
            raise fields.wrong(
                name, "constrained output is not available in this server; leave the field out"
            )


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


def read_logit_bias(fields: Fields) -> dict[int, float]:
    value = fields.raw("logit_bias")
    if value is None:
        return {}
    remedy = "must be an object from token ids to finite numbers"
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", remedy)
    bias: dict[int, float] = {}
    for key, number in value.items():
        converted = as_number(number)
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 19 else None
        if token is None or converted is None:
            raise fields.wrong("logit_bias", remedy)
        bias[token] = converted
    return bias


def check(params: SamplingParams, vocab_size: int, where: str = "sampling_params.") -> None:
    """Raises: RequestError with every value that is out of range."""
    problems = params.problems(vocab_size)
    if problems:
        message = "; ".join(problems).replace("sampling_params.", where)
        raise RequestError(message, param=message.split(" = ")[0])


def read_params(fields: Fields, max_new_tokens: int, min_new_tokens: int) -> SamplingParams:
    """What all routes name alike, unchecked; the limits' names differ.

    Raises: RequestError for what is of the wrong kind.
    """
    default = SamplingParams()
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=fields.number("temperature", default.temperature),
        top_p=fields.number("top_p", default.top_p),
        top_k=fields.integer("top_k", default.top_k),
        min_p=fields.number("min_p", default.min_p),
        frequency_penalty=fields.number("frequency_penalty", default.frequency_penalty),
        presence_penalty=fields.number("presence_penalty", default.presence_penalty),
        repetition_penalty=fields.number("repetition_penalty", default.repetition_penalty),
        stop=fields.texts("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        logit_bias=read_logit_bias(fields),
        skip_special_tokens=fields.flag("skip_special_tokens", default.skip_special_tokens),
        spaces_between_special_tokens=fields.flag(
            "spaces_between_special_tokens", default.spaces_between_special_tokens
        ),
        no_stop_trim=fields.flag("no_stop_trim"),
    )


def read_sampling(fields: Fields, vocab_size: int) -> Sampling:
    """Raises: RequestError"""
    refuse_constraints(fields)
    default = SamplingParams()
    params = read_params(
        fields,
        fields.integer("max_new_tokens", default.max_new_tokens),
        fields.integer("min_new_tokens", default.min_new_tokens),
    )
    check(params, vocab_size, fields.where)
    return Sampling(params, read_samples(fields), read_seed(fields))
