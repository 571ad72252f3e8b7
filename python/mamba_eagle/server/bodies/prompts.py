"""Texts and token ids become prompts that the engine can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mamba_eagle.core import prompt_problem
from mamba_eagle.limits import MAX_PROMPT_TOKENS, MAX_PROMPTS
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.text import TextTokenizer

# A text of more characters than this for each token that fits is tried in part first.
CHARACTERS_PER_TOKEN = 8
# If the part alone has this many times the tokens that fit, the whole will not have fewer.
CLEARLY = 2
# A normalizer may leave one character of this many.
CHARACTERS_TO_SPARE = 4


@dataclass(frozen=True)
class PromptReader:
    """Encodes and checks; used from several threads. ``tokenizer`` None: token ids only. ``keep``:
    as many of a prompt's last tokens; None: all."""

    tokenizer: TextTokenizer | None
    vocab_size: int
    context_length: int
    keep: int | None = None

    def keeping(self, last: int | None) -> PromptReader:
        """One that takes only the last tokens of each prompt; -1: as many as fit; None: all."""
        return replace(self, keep=self.max_prompt if last == -1 else last)

    @property
    def max_prompt(self) -> int:
        """The longest prompt, in tokens: the first output token must fit too."""
        return self.context_length - 1

    def need_tokenizer(self, what: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, but the server was started with "
                "--skip-tokenizer-init: send input_ids to /generate"
            )
        return self.tokenizer

    def check(self, token_ids: list[Any], name: str) -> list[int]:
        """A prompt that the engine can take.

        Raises: RequestError 400
        """
        if self.keep is not None:
            token_ids = token_ids[-self.keep :]
        problem = prompt_problem(token_ids, self.vocab_size, self.context_length)
        if problem:
            raise RequestError(name + problem, param=name)
        return token_ids

    def encode(
        self, texts: Sequence[str], names: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Each text's tokens; names: the texts' in messages.

        Raises: RequestError 400 for a text that clearly has more tokens than fit.
        """
        if not texts:
            return []
        tokenizer = self.need_tokenizer(names[0])
        if self.keep is not None:
            keep = min(self.keep, self.context_length)
            return tokenizer.encode_all(
                [_end_of(text, tokenizer, keep) for text in texts], add_special_tokens
            )
        for text, name in zip(texts, names):
            self._refuse_endless(tokenizer, text, name)
        return tokenizer.encode_all(texts, add_special_tokens)

    def _refuse_endless(self, tokenizer: TextTokenizer, text: str, name: str) -> None:
        """Saves seconds of encoding, and the memory for millions of tokens."""
        some = CHARACTERS_PER_TOKEN * self.max_prompt
        if len(text) <= some:
            return
        endless = len(text) > CHARACTERS_TO_SPARE * self.max_prompt * tokenizer.longest_token
        if endless or len(tokenizer.encode(text[:some])) > CLEARLY * self.max_prompt:
            raise RequestError(
                f"{name}: the text has {len(text)} characters, far more than the "
                f"{self.max_prompt} tokens that fit: shorten it",
                param=name,
            )

    def prompts(self, texts: Sequence[str], names: Sequence[str]) -> list[list[int]]:
        """Texts as prompts.

        Raises: RequestError 400
        """
        for text, name in zip(texts, names):
            if not text:
                raise RequestError(f'{name} = "": the prompt is empty', param=name)
        encoded = self.encode(texts, names)
        return [self.check(ids, name) for ids, name in zip(encoded, names)]

    def id_lists(self, value: list[Any], name: str) -> list[list[int]]:
        """The prompts of a field that is a list of lists of token ids."""
        limit_prompts(value, name)
        for i, one in enumerate(value):
            if not isinstance(one, list):
                remedy = "must be a list of token ids, as the first is"
                raise RequestError.about(f"{name}[{i}]", one, remedy)
        return [self.check(one, f"{name}[{i}]") for i, one in enumerate(value)]

    def any(self, value: Any, name: str) -> list[list[int]]:
        """The prompts of a field that is a string, token ids, or a list of either.

        Raises: RequestError 400
        """
        if isinstance(value, str):
            return self.prompts([kinds.TEXT.take(value, name)], [name])
        if not isinstance(value, list) or not value:
            raise RequestError.about(name, value, ANY_PROMPTS.must)
        if isinstance(value[0], str):
            limit_prompts(value, name)
            texts = kinds.all_of(value, kinds.as_text)
            if texts is None:
                raise RequestError.about(name, value, "must be a string or a list of strings")
            return self.prompts(texts, [f"{name}[{i}]" for i in range(len(texts))])
        if isinstance(value[0], list):
            return self.id_lists(value, name)
        return [self.check(value, name)]


def _end_of(text: str, tokenizer: TextTokenizer, tokens: int) -> str:
    """Enough of a text for its last ``tokens`` tokens, and for one that the cut may spoil."""
    size = CHARACTERS_PER_TOKEN * tokens
    while size < len(text) and len(tokenizer.encode(text[-size:], False)) <= tokens:
        size *= 4
    return text[-size:]


def limit_prompts(value: Any, name: str, what: str = "prompts", most: int = MAX_PROMPTS) -> None:
    if isinstance(value, list) and len(value) > most:
        raise RequestError(f"{name}: {kinds.TooMany(what, len(value), most)}", param=name)


def limit_shared(shared: str | list[int], count: int, name: str) -> None:
    """shared: a part of each of ``count`` prompts, which are made together. Raises: RequestError"""
    if len(shared) * count > MAX_PROMPT_TOKENS:
        what = "characters" if isinstance(shared, str) else "tokens"
        raise RequestError(
            f"{name}: its {len(shared)} {what} in each of {count} prompts are more than the limit "
            f"of {MAX_PROMPT_TOKENS} together: send fewer prompts at a time",
            param=name,
        )


def count_prompts(value: Any) -> int:
    """How many prompts a field has that may be a list of texts or of lists of ids."""
    batch = isinstance(value, list) and value and isinstance(value[0], (str, list))
    return len(value) if batch else 1


ANY_PROMPTS = kinds.untouched(
    kinds.any_of(kinds.STRING, kinds.IDS, kinds.list_of(kinds.STRING), kinds.list_of(kinds.IDS)),
    "must be a string, a list of token ids, or a list of either",
)


class InfillTokens(NamedTuple):
    """How a family marks a text that is to be filled in (``suffix``); it is known by these tokens.

    The order is ``before`` prompt ``between`` suffix ``after``, or with prompt and suffix
    exchanged. ``after`` "": none."""

    before: str
    between: str
    after: str
    suffix_first: bool = False


# A tokenizer may have a family's tokens though its model was not trained to fill in.
FORMS = (
    # Qwen2.5-Coder, CodeGemma, Granite 4
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite Code
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # Codestral, Mamba-Codestral
    InfillTokens("[SUFFIX]", "[PREFIX]", "", suffix_first=True),
)


class Infill:
    """``ids``: of the form's tokens."""

    def __init__(self, form: InfillTokens, ids: Mapping[str, int], begin: int | None) -> None:
        """begin: the token that begins every text, if there is one."""
        self.form, self._begin = form, begin
        self._before, self._between = [ids[form.before]], [ids[form.between]]
        self._after = [ids[form.after]] if form.after else []

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Infill | None:
        """None: the model has no tokens for it."""
        ids = tokenizer.added_tokens()
        for form in FORMS:
            if all(name in ids for name in form[:3] if name):
                return cls(form, ids, tokenizer.hf.bos_token_id)
        return None

    def around(self, prompt: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The model's prompt. prompt: may begin with the token that begins every text, and so does
        the result; suffix: without special tokens."""
        lead = 1 if prompt and prompt[0] == self._begin else 0
        first, second = list(prompt[lead:]), list(suffix)
        if self.form.suffix_first:
            first, second = second, first
        return [*prompt[:lead], *self._before, *first, *self._between, *second, *self._after]
