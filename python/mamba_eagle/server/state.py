"""What all routes share."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from mamba_eagle.config import ServerConfig
from mamba_eagle.metrics import Recorder
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.lifetime import Lifetime
from mamba_eagle.tokenizer.manager import (
    DuplicateRid,
    EngineDead,
    QueueFull,
    TokenizerManager,
    TooManySamples,
)
from mamba_eagle.tokenizer.sample import LiveRequest, PromptRequest
from mamba_eagle.tokenizer.text import TextTokenizer

# A text of this many characters takes about 10 ms; longer ones are tokenized in a thread, so that
# streams and /health do not wait for them.
LONG_TEXT = 20_000
# A text is refused by its length alone, without seconds of tokenizing, if its tokens do not fit
# even where a tokenizer's normalizer leaves one character of so many.
CHARACTERS_TO_SPARE = 4


@dataclass
class ServerState:
    config: ServerConfig
    manager: TokenizerManager
    recorder: Recorder
    started: float = field(default_factory=time.time)
    lifetime: Lifetime = field(default_factory=Lifetime)

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model_path

    @property
    def vocab_size(self) -> int:
        return self.manager.engine.vocab_size

    @property
    def context_length(self) -> int:
        return self.manager.engine.context_length

    @property
    def max_prompt(self) -> int:
        """The longest prompt, in tokens: the first output token must fit too."""
        return self.context_length - 1

    def model_config(self) -> dict[str, Any]:
        """The checkpoint's config.json; {} if it cannot be read."""
        try:
            values = json.loads((Path(self.config.model_path) / "config.json").read_text())
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def need_tokenizer(self, what: str) -> TextTokenizer:
        if self.manager.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, but the server was started with "
                "--skip-tokenizer-init: send input_ids to /generate"
            )
        return self.manager.tokenizer

    async def encode(
        self, text: str, field_name: str, add_special_tokens: bool = True
    ) -> list[int]:
        tokenizer = self.need_tokenizer(field_name)
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        if len(text) > CHARACTERS_TO_SPARE * self.max_prompt * tokenizer.longest_token:
            raise RequestError(
                f"{field_name}: the text has {len(text)} characters, far more than the "
                f"{self.max_prompt} tokens that fit: shorten it",
                param=field_name,
            )
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    def check_prompt(self, token_ids: list[Any], field_name: str) -> list[int]:
        """A prompt that the engine can take.

        Raises: RequestError 400
        """
        if not token_ids:
            raise RequestError(f"{field_name}: the prompt is empty", param=field_name)
        if len(token_ids) > self.max_prompt:
            raise RequestError(
                f"{field_name}: the prompt has {len(token_ids)} tokens, but at most "
                f"{self.max_prompt} fit (the context of {self.context_length} less one for the "
                "output): shorten it",
                param=field_name,
            )
        for position, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{field_name}[{position}] = {token!r}: must be a token id, an integer "
                    f"between 0 and {self.vocab_size - 1}",
                    param=field_name,
                )
        return token_ids

    def submit(self, rid: str, prompts: list[PromptRequest]) -> LiveRequest:
        """Raises: RequestError 400 or 503."""
        try:
            return self.manager.submit(rid, prompts)
        except DuplicateRid as error:
            raise RequestError(str(error), param="rid") from None
        except TooManySamples as error:
            raise RequestError(str(error), param="n") from None
        except QueueFull as error:
            raise RequestError(str(error), 503, retry_after=1) from None
        except EngineDead as error:
            raise RequestError(str(error), 503) from None


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
