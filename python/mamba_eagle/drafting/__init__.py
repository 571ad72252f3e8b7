"""Drafters, by the name that ``--speculative-algorithm`` takes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mamba_eagle.drafting.base import DraftSource


class Entry(NamedTuple):
    """Where a drafter is, and what it needs. Imported when chosen: flags need no torch."""

    module: str
    source: str  # a DraftSource
    needs_folder: bool = True  # --speculative-draft-model-path
    needs_history: bool = False  # it reads PrefillItem.history


DRAFTERS = {
    "EAGLE": Entry("eagle", "EagleSource"),
    "EAGLE3": Entry("eagle3", "EagleThreeSource"),
    "NEXTN": Entry("mtp", "MtpSource", needs_folder=False),
    "MTP": Entry("mtp", "MtpSource", needs_folder=False),
    "STANDALONE": Entry("standalone", "StandaloneSource"),
    "NGRAM": Entry("ngram", "NgramSource", needs_folder=False, needs_history=True),
}


def draft_source(algorithm: str) -> type[DraftSource]:
    entry = DRAFTERS[algorithm]
    source: type[DraftSource] = getattr(import_module(f"{__name__}.{entry.module}"), entry.source)
    return source


def needs_history(algorithm: str) -> bool:
    """Whether the drafter must be told the tokens of a prefix that the cache served."""
    entry = DRAFTERS.get(algorithm)
    return entry is not None and entry.needs_history
