"""Data that all processes share: sampling parameters, finish reasons, tree shapes. No torch."""

import json
import math
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from mamba_eagle import limits

# ── values in messages ───────────────────────────────────────────────────────────────────────


def shown(value: Any, most: int = limits.MAX_SHOWN) -> str:
    """A value for an error message or a log line: JSON on one line, at most this many characters.

    The work does not grow with the value, and no control character passes unescaped.
    """
    text = json.dumps(_beginning(value, [most]), ensure_ascii=False, default=repr)
    text = text.translate(_ESCAPED)
    return text if len(text) <= most else text[: most - 3] + "..."


def _beginning(value: Any, budget: list[int]) -> Any:
    """The part of a value that may be seen; what is left out makes the text too long anyway.

    budget: one number, how many more characters or items may be looked at.
    """
    budget[0] -= 1
    most = budget[0] + 1
    if most <= 0:
        return ""
    if isinstance(value, str):
        budget[0] -= len(value[:most])
        return value[: most + 1]
    if isinstance(value, int) and abs(value) >= 2**256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple)):
        return [_beginning(item, budget) for item in islice(value, most)]
    if isinstance(value, dict):
        pairs = islice(value.items(), most)
        return {_beginning(str(key), budget): _beginning(item, budget) for key, item in pairs}
    return value


# What JSON leaves as it is and a terminal acts on: controls of Latin-1, Unicode's own line ends,
# and marks that turn the direction of text; and halves of surrogate pairs, which UTF-8 cannot hold.
_CONTROLS = (*range(0x7F, 0xA0), 0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F))
_MARKS = (*range(0x2066, 0x206A), *range(0xD800, 0xE000), 0xFEFF)
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_MARKS)}


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it, as it cannot halves of surrogate pairs: JSON can write them, and
    Python reads bytes that the locale's encoding does not have as such."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ── sampling ─────────────────────────────────────────────────────────────────────────────────


class Problem(NamedTuple):
    """A sampling parameter that cannot be used, under SamplingParams' name for it."""

    name: str
    value: Any
    remedy: str

    def __str__(self) -> str:
        return f"sampling_params.{self.name} = {shown(self.value)}: {self.remedy}"


class Parameter(NamedTuple):
    """What a sampling parameter does, and what it may be. Bodies of all routes, their defaults and
    bounds in errors, in /openapi.json and in docs/http.md are made of these declarations."""

    about: str
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf  # it must be more than this
    other: float | None = None  # valid though it is outside the bounds
    must: str = ""  # the remedy, if the bounds alone do not say it

    @property
    def remedy(self) -> str:
        if self.must:
            return self.must
        if self.above > -math.inf:
            return f"must be above {self.above:g} and at most {self.most:g}"
        if self.most < math.inf:
            return f"must be between {self.least:.15g} and {self.most:.15g}"
        return f"must be {self.least:g} or more"

    def fits(self, value: float) -> bool:
        return value == self.other or (self.least <= value <= self.most and value > self.above)


TEMPERATURE = Parameter(
    "0: always the best token",
    limits.GREEDY_BELOW,
    limits.MAX_TEMPERATURE,
    other=0,
    must=f"must be 0 (greedy), or between {limits.GREEDY_BELOW} and {limits.MAX_TEMPERATURE:.0f}",
)
TOP_K = Parameter(
    "sample from the k most likely tokens; -1 or 0: all",
    -1,
    must="must be 1 or more, or -1 or 0 for the whole vocabulary",
)
FREQUENCY = Parameter("by the token's count in the output", -limits.MAX_PENALTY, limits.MAX_PENALTY)
PRESENCE = Parameter("for tokens that the output has", -limits.MAX_PENALTY, limits.MAX_PENALTY)
REPETITION = Parameter(
    "divides logits of tokens that came before",
    limits.MIN_REPETITION_PENALTY,
    limits.MAX_REPETITION_PENALTY,
)
SEED = Parameter(
    "makes the output repeatable", 0, limits.MAX_INTEGER, must="must be between 0 and 2**63 - 1"
)


# Parameters that depend on how often a token has occurred in the request.
PENALTIES = frozenset({"frequency_penalty", "presence_penalty", "repetition_penalty"})
# Parameters that leave tokens out before noise chooses: they change nothing at temperature 0.
FILTERS = frozenset({"top_k", "top_p", "min_p"})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends; names and defaults are those of SGLang.

    ``seed`` is filled in before a request reaches the scheduler: noise is keyed by (seed,
    position), so the same seed gives the same text regardless of other requests.
    The server process handles ``stop`` strings, the runner ``stop_token_ids``.
    """

    max_new_tokens: Annotated[int, Parameter("the longest output", 0)] = 128
    min_new_tokens: Annotated[int, Parameter("no end before", 0)] = 0
    temperature: Annotated[float, TEMPERATURE] = 1.0
    top_p: Annotated[float, Parameter("the best tokens of this probability", 0, 1, above=0)] = 1.0
    top_k: Annotated[int, TOP_K] = -1
    min_p: Annotated[float, Parameter("least share of the best token's probability", 0, 1)] = 0.0
    frequency_penalty: Annotated[float, FREQUENCY] = 0.0
    presence_penalty: Annotated[float, PRESENCE] = 0.0
    repetition_penalty: Annotated[float, REPETITION] = 1.0
    stop: Annotated[list[str], Parameter("strings that end the output")] = []
    stop_token_ids: Annotated[list[int], Parameter("tokens that end the output")] = []
    ignore_eos: Annotated[bool, Parameter("go on after the model's end")] = False
    allowed_token_ids: Annotated[list[int], Parameter("no other tokens may come")] = []
    logit_bias: Annotated[dict[int, float], Parameter("token ids, added to their logits")] = {}
    seed: Annotated[int, SEED] = 0
    skip_special_tokens: Annotated[bool, Parameter("leave special tokens out of the text")] = True
    spaces_between_special_tokens: Annotated[bool, Parameter("as transformers decodes them")] = True
    no_stop_trim: Annotated[bool, Parameter("keep what ended the output")] = False
    # what the output may be, as llguidance reads it (constrain/grammar.py); "": anything
    grammar: str = ""
    bad_word_ids: list[list[int]] = []  # sequences of tokens that no output has

    def problems(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> list[Problem]:
        """Every invalid value, with field, value and remedy; [] if all are valid."""
        wrong: list[Problem] = []
        for name, parameter in BOUNDED:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                wrong.append(Problem(name, value, "must be a finite number"))
            elif name == "min_new_tokens" and not 0 <= value <= max(self.max_new_tokens, 0):
                remedy = f"must be between 0 and max_new_tokens ({self.max_new_tokens})"
                wrong.append(Problem(name, value, remedy))
            elif not parameter.fits(value):
                wrong.append(Problem(name, value, parameter.remedy))
        wrong += self._token_problems(vocab_size)
        if not wrong and self._bans_all(vocab_size, eos_token_ids):
            remedy = (
                "these and the model's own end every token of the vocabulary, so no output can "
                "have min_new_tokens: leave some out, or set min_new_tokens to 0"
            )
            wrong.append(Problem("stop_token_ids", self.stop_token_ids, remedy))
        return wrong

    def _token_problems(self, vocab_size: int) -> Iterator[Problem]:
        last = vocab_size - 1
        for name in ("stop_token_ids", "allowed_token_ids"):
            tokens = getattr(self, name)
            if not all(0 <= token <= last for token in tokens):
                yield Problem(name, tokens, f"each must be between 0 and {last}")
        banned = {ids[0] for ids in self.bad_word_ids if len(ids) == 1}
        if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
            remedy = "bad_words forbid each of them: allow others"
            yield Problem("allowed_token_ids", self.allowed_token_ids, remedy)
        bias = self.logit_bias
        if not all(0 <= token <= last for token in bias):
            yield Problem("logit_bias", bias, f"each token id must be between 0 and {last}")
        # NaN does not fit
        most = limits.MAX_LOGIT_BIAS
        if not all(abs(value) <= most for value in bias.values()):
            remedy = f"each bias must be between -{most:.0f} and {most:.0f}"
            yield Problem("logit_bias", bias, remedy)
        if not all(self.stop):
            yield Problem("stop", self.stop, "stop strings must not be empty")

    def _bans_all(self, vocab_size: int, eos_token_ids: Sequence[int]) -> bool:
        """Until min_new_tokens no stop token may be sampled: some other token must be left.

        A logit_bias bans nothing: it is finite, and so are the logits that it is added to.
        """
        if self.min_new_tokens == 0:
            return False
        stops = self.stop_tokens(tuple(eos_token_ids))
        return sum(0 <= token < vocab_size for token in stops) >= vocab_size

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken: at temperature 0, or with a top-k of 1."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_token_rules(self) -> bool:
        return bool(self.allowed_token_ids or self.bad_word_ids)

    @property
    def is_constrained(self) -> bool:
        """Whether masks say at each node which tokens may follow."""
        return bool(self.grammar) or self.has_token_rules

    @property
    def needs_history(self) -> bool:
        """Whether a token's probability depends on how often it has occurred in the request."""
        return any(getattr(self, name) != getattr(NEUTRAL, name) for name in PENALTIES)

    @property
    def reads_history(self) -> bool:
        """Whether the runner must know all tokens of a request, cached ones as well: penalties
        count them, and a retracted request's grammar has to take its output in again."""
        return self.needs_history or self.is_constrained

    def stop_tokens(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """The tokens that end a request: its own, and the model's unless ``ignore_eos`` is set.

        At the end of a grammar there is nothing but the model's: ``ignore_eos`` yields to it.
        """
        own = () if self.ignore_eos and not self.grammar else eos_token_ids
        return frozenset(own) | frozenset(self.stop_token_ids)


# Takes the best token of the model's own logits: whatever differs from it may change tokens.
NEUTRAL = SamplingParams(temperature=0.0)


def declared() -> dict[str, tuple[Any, Parameter]]:
    """The kind of each sampling parameter, and its declaration."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {
        name: (get_args(hint)[0], get_args(hint)[1])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


BOUNDED = [
    (name, parameter) for name, (kind, parameter) in declared().items() if kind in (int, float)
]


class Failure(Enum):
    """What kind of failure ended a request; the HTTP side knows the status that says it."""

    REFUSED = "refused"  # it can never be served as it is
    INTERNAL = "internal"  # the engine failed
    UNAVAILABLE = "unavailable"  # the engine is not there, or no longer
    TIMEOUT = "timeout"  # it did not begin, or end, within the time it had


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended. ``kind`` is stop, length or abort; the other fields belong to one kind
    each."""

    kind: str
    matched: int | str | None = None  # stop: the token id or the string that ended it
    length: int = 0  # length: the number of generated tokens
    message: str = ""  # abort: the reason
    failure: Failure | None = None  # abort: None if it was asked for

    def as_dict(self) -> dict[str, Any]:
        """The JSON object that clients get as meta_info.finish_reason; server/ adds an abort's
        status."""
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.kind == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message}


def prompt_problem(token_ids: Sequence[Any], vocab_size: int, context_length: int) -> str:
    """Why a model cannot take this prompt, as the end of a sentence that names it; "" if it can.

    At least one output token must fit after it.
    """
    if not token_ids:
        return ": the prompt is empty"
    if len(token_ids) >= context_length:
        return (
            f": the prompt has {len(token_ids)} tokens, but at most {context_length - 1} fit (the "
            f"context of {context_length} less one for the output): shorten it"
        )
    # Only a wrong one is looked for in Python: prompts may have a million tokens.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return ""
    position, token = next(
        (position, token)
        for position, token in enumerate(token_ids)
        if type(token) is not int or not 0 <= token < vocab_size
    )
    return (
        f"[{position}] = {shown(token)}: must be a token id, an integer between 0 and "
        f"{vocab_size - 1}"
    )


MEMORY_TAGS = ("weights", "kv_cache")  # whose memory can be given back
DEFAULT_VERSION = "default"  # of the weights that the server was started with
# How hidden states after the final norm become one vector of a prompt.
POOLINGS = ("last", "mean")


# ── draft trees ──────────────────────────────────────────────────────────────────────────────

MAX_TREE_NODES = 64  # ancestor sets are packed into one int64


class TreeShape(msgspec.Struct, frozen=True, array_like=True):
    """A draft tree with ``topk`` lanes, ``depth`` levels, and ``nodes`` nodes including the root.

    One node is plain decoding; a tree with topk 1 is a chain.
    """

    topk: int = 1
    depth: int = 0
    nodes: int = 1

    @property
    def name(self) -> str:
        """The name in /metrics and /server_info."""
        return f"{self.topk}x{self.depth}x{self.nodes}" if self.nodes > 1 else "plain"

    @property
    def max_nodes(self) -> int:
        """The root and the candidates of all levels."""
        return 1 + self.topk + (self.depth - 1) * self.topk**2

    def problems(self) -> list[str]:
        """Every reason why such a tree cannot be formed, naming the flag; [] if it can."""
        wrong = []
        for flag, value in (("num-steps", self.depth), ("eagle-topk", self.topk)):
            if not 1 <= value < MAX_TREE_NODES:
                wrong.append(
                    f"--speculative-{flag} {value}: must be between 1 and {MAX_TREE_NODES - 1}"
                )
        if not 2 <= self.nodes <= MAX_TREE_NODES:
            wrong.append(
                f"--speculative-num-draft-tokens {self.nodes}: must be between 2 and "
                f"{MAX_TREE_NODES}, the root included"
            )
        if not wrong and self.nodes > self.max_nodes:
            wrong.append(
                f"--speculative-num-draft-tokens {self.nodes}: must be at most {self.max_nodes}, "
                f"the root and the candidates of {self.depth} levels with top-k {self.topk}"
            )
        return wrong


PLAIN = TreeShape()  # the root alone
