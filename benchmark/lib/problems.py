"""Problems in GSM8K's form as token ids."""

from __future__ import annotations

from tokenizers import Tokenizer

from mamba_eagle.eval.gsm8k import Example, make_prompt


def prompt_ids(problems: list[Example], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the problems' prompts, without solved examples."""
    texts = [make_prompt([], problem.question) for problem in problems]
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
