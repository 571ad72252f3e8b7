"""Rotary position encoding in config.json, in every form that was published."""

import math
from typing import Any

from mamba_eagle.model_config import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    UnsupportedModel,
    YarnScaling,
)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_config(values: dict[str, Any], head_dim: int, part: float = 1.0) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5), or from ``rope_theta`` and ``rope_scaling``.

    Args: part: the fraction of a head that is rotated, if config.json gives none.

    Raises: UnsupportedModel for an unsupported scaling.
    """
    given = _given(values)
    part = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or part
    dim = int(head_dim * part)
    if dim % 2:
        raise UnsupportedModel(f"RoPE on {dim} channels of a head: must be an even number")
    theta = float(given.get("rope_theta") or values.get("rope_theta") or 10000.0)
    return RopeConfig(dim, theta, _scaling(values, given))


def longest_context(values: dict[str, Any]) -> int:
    """The context length that config.json gives, 0 if none. With YaRN it is computed: often only
    the factor was added to a published config and ``max_position_embeddings`` left alone."""
    limit = int(values.get("max_position_embeddings") or 0)
    given = _given(values)
    if _rope_type(given) != "yarn":
        return limit
    return max(limit, int(_factor(values, given) * _trained_length(values, given)))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _rope_type(given: dict[str, Any]) -> str:
    return given.get("rope_type") or given.get("type") or "default"


def _trained_length(values: dict[str, Any], given: dict[str, Any]) -> int:
    for place in (values, given):
        if length := place.get("original_max_position_embeddings"):
            return int(length)
    return int(values["max_position_embeddings"])


def _factor(values: dict[str, Any], given: dict[str, Any]) -> float:
    """By default the ratio of the context length to the trained one."""
    if factor := given.get("factor"):
        return float(factor)
    return float(values["max_position_embeddings"]) / _trained_length(values, given)


def _scaling(values: dict[str, Any], given: dict[str, Any]) -> RopeScaling | None:
    kind = _rope_type(given)
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; known: {list(ROPE_TYPES)}")
    if kind == "linear":
        return LinearScaling(float(given["factor"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(given["factor"]),
            low_turns=float(given["low_freq_factor"]),
            high_turns=float(given["high_freq_factor"]),
            trained_length=_trained_length(values, given),
        )
    if kind == "yarn":
        factor = _factor(values, given)
        return YarnScaling(
            factor=factor,
            low_turns=float(given.get("beta_slow") or 1),
            high_turns=float(given.get("beta_fast") or 32),
            trained_length=_trained_length(values, given),
            magnitude=_yarn_magnitude(given, factor),
            whole_channels=bool(given.get("truncate", True)),
        )
    return None  # dynamic: no effect up to max_position_embeddings, the limit for requests


def _yarn_magnitude(given: dict[str, Any], factor: float) -> float:
    """The paper's ``0.1 ln(factor) + 1``; if both ``mscale`` are given, a ratio of two of these."""
    if (stated := given.get("attention_factor")) is not None:
        return float(stated)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = given.get("mscale"), given.get("mscale_all_dim")
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)
