"""What a body asks of the prefix cache: cache_salt, pin_seconds, checkpoint."""

from __future__ import annotations

from mamba_eagle.message import CacheHints
from mamba_eagle.server.fields import Fields

MAX_SALT = 256  # characters
MAX_PIN_SECONDS = 3600
MAX_POSITIONS = 16


def read_cache_hints(fields: Fields, prompt_len: int) -> CacheHints:
    """``checkpoint`` counts tokens of the prompt; of a list of prompts it counts for each.

    Raises: RequestError 400
    """
    salt = fields.text("cache_salt")
    if len(salt) > MAX_SALT:
        raise fields.wrong("cache_salt", f"must have at most {MAX_SALT} characters")
    seconds = fields.number("pin_seconds", 0.0)
    if not 0 <= seconds <= MAX_PIN_SECONDS:
        raise fields.wrong("pin_seconds", f"must be 0 to {MAX_PIN_SECONDS}")
    positions = fields.integers("checkpoint")
    if len(positions) > MAX_POSITIONS:
        raise fields.wrong("checkpoint", f"must have at most {MAX_POSITIONS} positions")
    if not all(0 < position < prompt_len for position in positions):
        raise fields.wrong(
            "checkpoint",
            f"each must be between 1 and {prompt_len - 1}: the prompt has {prompt_len} tokens, and "
            "the last one is always run",
        )
    return CacheHints(salt=salt, pin_seconds=seconds, positions=sorted(set(positions)))
