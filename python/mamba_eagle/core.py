"""Data that all processes share: sampling parameters, finish reasons, tree shapes. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import msgspec

from mamba_eagle.limits import (
    GREEDY_BELOW,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SHOWN,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)

# ── values in messages ───────────────────────────────────────────────────────────────────────


def shown(value: Any, most: int = MAX_SHOWN) -> str:
    """A value for an error message or a log line: JSON on one line, at most so many characters.

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
# and marks that turn the direction of text.
_CONTROLS = (*range(0x7F, 0xA0), 0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F))
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *range(0x2066, 0x206A), 0xFEFF)}


# ── sampling ─────────────────────────────────────────────────────────────────────────────────


class Problem(NamedTuple):
    """A sampling parameter that cannot be used, under SamplingParams' name for it."""

    name: str
    value: Any
    remedy: str

    def __str__(self) -> str:
        return f"sampling_params.{self.name} = {shown(self.value)}: {self.remedy}"


# notes a problem unless the named field fits: field, whether its value does, what it must be
Need: TypeAlias = Callable[[str, Callable[[Any], bool], str], None]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends; names and defaults are those of SGLang.

    ``seed`` is filled in before a request reaches the scheduler: noise is keyed by (seed,
    position), so the same seed gives the same text regardless of other requests.
    The server process handles ``stop`` strings, the runner ``stop_token_ids``.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    seed: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    # what the output may be, as llguidance reads it (constrain/grammar.py); "": anything
    grammar: str = ""

    def problems(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> list[Problem]:
        """Every invalid value, with field, value and remedy; [] if all are valid."""
        wrong: list[Problem] = []

        def need(name: str, fits: Callable[[Any], bool], remedy: str) -> None:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                remedy = "must be a finite number"
            elif fits(value):
                return
            wrong.append(Problem(name, value, remedy))

        self._check_numbers(need)
        self._check_tokens(need, vocab_size)
        if not wrong and self._bans_all(vocab_size, eos_token_ids):
            remedy = (
                "these and the model's own end every token of the vocabulary, so no output can "
                "have min_new_tokens: leave some out, or set min_new_tokens to 0"
            )
            wrong.append(Problem("stop_token_ids", self.stop_token_ids, remedy))
        return wrong

    def _check_numbers(self, need: Need) -> None:
        need("max_new_tokens", lambda value: value >= 0, "must be 0 or more")
        need(
            "min_new_tokens",
            lambda value: 0 <= value <= max(self.max_new_tokens, 0),
            f"must be between 0 and max_new_tokens ({self.max_new_tokens})",
        )
        need(
            "temperature",
            lambda value: value == 0 or GREEDY_BELOW <= value <= MAX_TEMPERATURE,
            f"must be 0 (greedy), or between {GREEDY_BELOW} and {MAX_TEMPERATURE:.0f}",
        )
        need("top_p", lambda value: 0 < value <= 1, "must be above 0 and at most 1")
        need(
            "top_k",
            lambda value: value == -1 or value >= 1,
            "must be 1 or more, or -1 for the whole vocabulary",
        )
        need("min_p", lambda value: 0 <= value <= 1, "must be between 0 and 1")
        for name in ("frequency_penalty", "presence_penalty"):
            need(
                name,
                lambda value: abs(value) <= MAX_PENALTY,
                f"must be between -{MAX_PENALTY:.0f} and {MAX_PENALTY:.0f}",
            )
        need(
            "repetition_penalty",
            lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
            f"must be between {MIN_REPETITION_PENALTY} and {MAX_REPETITION_PENALTY:.0f}",
        )
        need("seed", lambda value: 0 <= value < 2**63, "must be between 0 and 2**63 - 1")

    def _check_tokens(self, need: Need, vocab_size: int) -> None:
        def bias_fits(bias: dict[int, float]) -> bool:  # which NaN does not
            return all(abs(value) <= MAX_LOGIT_BIAS for value in bias.values())

        need(
            "stop_token_ids",
            lambda ids: all(0 <= token < vocab_size for token in ids),
            f"each must be between 0 and {vocab_size - 1}",
        )
        need(
            "logit_bias",
            lambda bias: all(0 <= token < vocab_size for token in bias),
            f"each token id must be between 0 and {vocab_size - 1}",
        )
        need(
            "logit_bias",
            bias_fits,
            f"each bias must be between -{MAX_LOGIT_BIAS:.0f} and {MAX_LOGIT_BIAS:.0f}",
        )
        need("stop", all, "stop strings must not be empty")

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
    def needs_history(self) -> bool:
        """Whether a token's probability depends on how often it has occurred in the request."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def reads_history(self) -> bool:
        """Whether the runner must know all tokens of a request, those that it finds cached, too:
        penalties count them, and a retracted request's grammar has to take its output in again."""
        return self.needs_history or bool(self.grammar)

    def stop_tokens(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """The tokens that end a request: its own, and the model's unless ``ignore_eos`` is set.

        At the end of a grammar there is nothing but the model's: ``ignore_eos`` yields to it.
        """
        own = () if self.ignore_eos and not self.grammar else eos_token_ids
        return frozenset(own) | frozenset(self.stop_token_ids)


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
    failure: Failure | None = None  # abort: None if the client, or somebody for it, asked for it

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

    At least one output token must fit behind it.
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
        max_nodes = 1 + self.topk + (self.depth - 1) * self.topk**2
        if not wrong and self.nodes > max_nodes:
            wrong.append(
                f"--speculative-num-draft-tokens {self.nodes}: must be at most {max_nodes}, "
                f"the root and the candidates of {self.depth} levels with top-k {self.topk}"
            )
        return wrong


PLAIN = TreeShape()  # the root alone
