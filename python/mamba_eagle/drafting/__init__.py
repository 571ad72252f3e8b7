"""Drafters: what each proposes, and how it is kept in step with the target."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mamba_eagle.drafters import DRAFTERS

if TYPE_CHECKING:
    from mamba_eagle.drafting.base import DraftSource


def draft_source(algorithm: str) -> type[DraftSource]:
    """The class behind a name that ``--speculative-algorithm`` takes; imports its file."""
    entry = DRAFTERS[algorithm]
    source: type[DraftSource] = getattr(import_module(f"{__name__}.{entry.module}"), entry.source)
    return source
