"""The model's tokenizer: text to ids, chats to text, and detokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamba_eagle.tokenizer.detokenize import Detokenizer, detokenizer_factory


class TemplateError(ValueError):
    """The chat template is missing or does not take these messages."""


class TextTokenizer:
    """Wraps a fast tokenizer of transformers; encoding is as ``tokenizer.encode(text)`` does it."""

    def __init__(self, tokenizer: Any) -> None:
        self.hf = tokenizer
        self._factory = detokenizer_factory(tokenizer)
        self.token_text = self._factory.token_text
        self.token_bytes = self._factory.token_bytes
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, path: str) -> TextTokenizer:
        """From a folder; nothing is fetched.

        Raises: OSError or ValueError when the folder has no fast tokenizer.
        """
        # Imported here: it takes seconds, and the engine loads its weights meanwhile.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("it has no tokenizer.json (a fast tokenizer is needed)")
        return cls(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As ``encode``, many at once on all cores."""
        if not texts:
            return []
        ids: list[list[int]] = self.hf(texts, add_special_tokens=add_special_tokens).input_ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return self._factory.make(prompt_ids, skip_special_tokens)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for the next assistant turn.

        Raises: TemplateError
        """
        if not getattr(self.hf, "chat_template", None):
            raise TemplateError(
                "this model's tokenizer has no chat template: use /v1/completions or /generate"
            )
        try:
            text: str = self.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever Jinja or they themselves choose
            raise TemplateError(
                f"the chat template does not take these messages: {error}"
            ) from None
        return text
