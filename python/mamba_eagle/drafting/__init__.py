"""Drafters: how each proposes trees and follows the sequences that the target accepts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mamba_eagle.drafters import DRAFTERS

if TYPE_CHECKING:
    from mamba_eagle.drafting.base import DraftSource


def draft_source(algorithm: str) -> type[DraftSource]:
    """The class for a value of ``--speculative-algorithm``; imports its module.

    Raises: KeyError for NONE and for names that are not in ``DRAFTERS``.
    """
    entry = DRAFTERS[algorithm]
    source: type[DraftSource] = getattr(import_module(f"{__name__}.{entry.module}"), entry.source)
    return source
