"""``suffix``: a prompt whose continuation must lead to a given text, for models that were trained
to fill in. Each family has special tokens for it, by which it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mamba_eagle.tokenizer.text import TextTokenizer


class InfillTokens(NamedTuple):
    """The order is ``before`` prompt ``between`` suffix ``after``, or with prompt and suffix
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
