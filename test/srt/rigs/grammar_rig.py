"""A vocabulary for the tiny model, grammars over it, and the plain model under a grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from llguidance import TokenizerWrapper
from runner_harness import Engine, Live, PlainModel
from torch import Tensor

from mamba_eagle.chat.family import Tags
from mamba_eagle.chat.thinking import thinking_first
from mamba_eagle.constrain.grammar import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.constrain.vocabulary import Vocabulary
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.sampling_noise.torch import gumbel

PAD, BOS, EOS, SECOND_EOS = 0, 1, 2, 95
VOCAB, LAST_TEXT = 96, 94
WORDS = ['":', '{"', '","', "tr", "ue", "true", "ab", "abc", " }", "12", "yes", '"}', "no", ", "]
LETTERS = [*'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.- \n_<>/=()+*#!?;%&@$']
PERSON = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "string", "maxLength": 4},
        "c": {"enum": ["yes", "no", True]},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}
REASONED = thinking_first(regex_grammar("[0-9]{3}"), Tags("{", "#"), "open")
assert REASONED is not None
GRAMMARS = {
    "schema": json_schema_grammar(PERSON, whitespace=""),
    "regex": regex_grammar(r"[a-c]{2,5}(-[0-9]{2}){1,3}"),
    "choice": choice_grammar(["yes", "no", "abcabc", "true"]),
    "reasoning": REASONED,
    "open": regex_grammar("[a-z ]+"),
}


class Letters:
    """What llguidance asks of a tokenizer: bytes by id, and a greedy encoding."""

    eos_token_id, bos_token_id, special_token_ids = EOS, BOS, [PAD, BOS, EOS, SECOND_EOS]

    def __init__(self, size: int = VOCAB) -> None:
        texts = [*LETTERS, *WORDS]
        self.tokens = [b"<pad>", b"<s>", b"</s>"] + [text.encode() for text in texts]
        self.tokens += [b"<unused%d>" % i for i in range(len(self.tokens), size)]
        self.special_token_ids = [PAD, BOS, EOS, *range(3 + len(texts), size)]

    def __call__(self, text: str | bytes) -> list[int]:
        text, ids = text.encode() if isinstance(text, str) else text, []
        known = {self.tokens[i]: i for i in range(3, VOCAB) if i not in self.special_token_ids}
        while text:
            length = next(n for n in range(8, 0, -1) if text[:n] in known)
            ids.append(known[text[:length]])
            text = text[length:]
        return ids


@cache
def vocabulary(eos: tuple[int, ...] = (EOS,), size: int = VOCAB) -> Vocabulary:
    return Vocabulary(TokenizerWrapper(Letters()), size, eos)


def constrain(engine: Engine) -> Engine:
    """Give an engine of the tiny model, which has no tokenizer, this vocabulary."""
    matchers = Matchers(lambda: vocabulary(engine.eos), VOCAB, engine.eos)
    engine.runner.constraints.matchers = matchers
    return engine


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(Letters().tokens[token] for token in tokens).decode()


def allowed(grammar: str, output: Sequence[int], eos: tuple[int, ...] = (EOS,)) -> Tensor:
    """[V] bool, by a matcher that has seen nothing else."""
    matcher = vocabulary(eos).matcher(grammar)
    assert matcher.try_consume_tokens(list(output)) == len(output), matcher.get_error()
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(mask, bitorder="little")[:VOCAB].astype(bool))


def allowed_by(sampling: SamplingParams, output: Sequence[int], eos: tuple[int, ...]) -> Tensor:
    """[V] bool: by the grammar, if there is one, and by the rules of tokens, from their words."""
    mask = torch.ones(VOCAB, dtype=torch.bool)
    if sampling.grammar:
        mask = allowed(sampling.grammar, output, eos)
    if sampling.allowed_token_ids:
        mask &= torch.isin(torch.arange(VOCAB), torch.tensor(sampling.allowed_token_ids))
    for ids in sampling.bad_word_ids:
        if [*output, ids[-1]][-len(ids) :] == ids:
            mask[ids[-1]] = False
    return mask


def plain_choices(plain: PlainModel, live: Live, eos: tuple[int, ...]) -> list[int]:
    """The token that the plain model samples at each position of the output, under the grammar."""
    first, sampling = live.prompt_len, live.sampling
    logits = plain.logits(live.tokens[:-1])[first - 1 :]
    positions = torch.arange(first, first + logits.shape[0])
    noise = gumbel(torch.full_like(positions, sampling.seed), positions, logits.shape[1])
    for i in range(len(live.output)):
        mask = allowed_by(sampling, live.output[:i], eos)
        logits[i] = logits[i].masked_fill(~mask, -torch.inf)
    return (logits + sampling.temperature * noise).argmax(1).tolist()


def under(name: str, max_new_tokens: int = 40, seed: int | None = None, **others) -> SamplingParams:
    """Sampling parameters with one of GRAMMARS; greedy without a seed."""
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(
        grammar=GRAMMARS[name].text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed or 0,
        **others,
    )


def fits(name: str, text: str) -> bool:
    """Whether a complete text is what the grammar wants, by Python's own means."""
    import json

    from jsonschema import Draft202012Validator

    if name == "schema":
        return Draft202012Validator(PERSON).is_valid(json.loads(text))
    patterns = {
        "regex": r"[a-c]{2,5}(-[0-9]{2}){1,3}",
        "choice": "yes|no|abcabc|true",
        "reasoning": r"[^#]*#\s*[0-9]{3}",
        "open": "[a-z ]+",
    }
    return re.fullmatch(patterns[name], text) is not None
