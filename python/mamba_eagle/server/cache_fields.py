"""What a body asks of the prefix cache: cache_salt, pin_seconds, checkpoint."""

from __future__ import annotations

from mamba_eagle.limits import MAX_CACHE_SALT, MAX_CHECKPOINTS, MAX_PIN_SECONDS
from mamba_eagle.message import CacheHints
from mamba_eagle.server.fields import Fields


def read_cache_hints(fields: Fields, prompt_len: int) -> CacheHints:
    """``checkpoint`` counts tokens of the prompt; of a list of prompts it counts for each.

    Raises: RequestError 400
    """
    salt = fields.text("cache_salt")
    if len(salt) > MAX_CACHE_SALT:
        raise fields.wrong("cache_salt", f"must have at most {MAX_CACHE_SALT} characters")
    seconds = fields.number("pin_seconds", 0.0)
    if not 0 <= seconds <= MAX_PIN_SECONDS:
        raise fields.wrong("pin_seconds", f"must be 0 to {MAX_PIN_SECONDS}")
    positions = fields.integers("checkpoint", "positions", MAX_CHECKPOINTS)
    if not all(0 < position < prompt_len for position in positions):
        raise fields.wrong(
            "checkpoint",
            f"each must be between 1 and {prompt_len - 1}: the prompt has {prompt_len} tokens, and "
            "the last one is always run",
        )
    return CacheHints(salt=salt, pin_seconds=seconds, positions=sorted(set(positions)))
