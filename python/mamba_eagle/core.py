"""Data that all processes share: sampling parameters, finish reasons, tree shapes. No torch."""

from __future__ import annotations

import math
from typing import Any

import msgspec

MAX_TOP_LOGPROBS = 64


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

    def problems(self, vocab_size: int) -> list[str]:
        """Every invalid value, each with field, value and remedy; [] if all are valid."""
        wrong: list[str] = []

        def need(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                wrong.append(f"sampling_params.{name} = {getattr(self, name)!r}: {remedy}")

        def finite(*names: str) -> bool:
            bad = [name for name in names if not math.isfinite(getattr(self, name))]
            for name in bad:
                need(False, name, "must be a finite number")
            return not bad

        need(self.max_new_tokens >= 0, "max_new_tokens", "must be 0 or more")
        need(
            0 <= self.min_new_tokens <= max(self.max_new_tokens, 0),
            "min_new_tokens",
            f"must be between 0 and max_new_tokens ({self.max_new_tokens})",
        )
        if finite("temperature"):
            need(self.temperature >= 0, "temperature", "must be 0 (greedy) or more")
        if finite("top_p"):
            need(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        need(
            self.top_k == -1 or self.top_k >= 1,
            "top_k",
            "must be 1 or more, or -1 for the whole vocabulary",
        )
        if finite("min_p"):
            need(0 <= self.min_p <= 1, "min_p", "must be between 0 and 1")
        for name in ("frequency_penalty", "presence_penalty"):
            if finite(name):
                need(-2 <= getattr(self, name) <= 2, name, "must be between -2 and 2")
        if finite("repetition_penalty"):
            need(
                0 < self.repetition_penalty <= 2, "repetition_penalty", "must be above 0, at most 2"
            )
        need(
            all(0 <= token < vocab_size for token in self.stop_token_ids),
            "stop_token_ids",
            f"each must be between 0 and {vocab_size - 1}",
        )
        need(
            all(0 <= token < vocab_size for token in self.logit_bias),
            "logit_bias",
            f"each token id must be between 0 and {vocab_size - 1}",
        )
        need(
            all(math.isfinite(bias) and abs(bias) <= 1e4 for bias in self.logit_bias.values()),
            "logit_bias",
            "each bias must be a finite number between -10000 and 10000",
        )
        need(all(self.stop), "stop", "stop strings must not be empty")
        need(
            0 <= self.seed < 2**63, "seed", "must be between 0 and 2**63 - 1 (field sampling_seed)"
        )
        return wrong

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

    def stop_tokens(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """The tokens that end a request: its own, and the model's unless ``ignore_eos`` is set."""
        own = () if self.ignore_eos else eos_token_ids
        return frozenset(own) | frozenset(self.stop_token_ids)


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended. ``kind`` is stop, length or abort; the other fields belong to one kind
    each."""

    kind: str
    matched: int | str | None = None  # stop: the token id or the string that ended it
    length: int = 0  # length: the number of generated tokens
    message: str = ""  # abort: the reason
    status_code: int = 0  # abort: the HTTP status of the reply

    def as_dict(self) -> dict[str, Any]:
        """The JSON object that clients get as meta_info.finish_reason."""
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.kind == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message, "status_code": self.status_code}


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
