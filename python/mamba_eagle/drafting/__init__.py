"""Drafters: how each proposes trees and follows the sequences that the target accepts."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from mamba_eagle.config import EngineConfig
from mamba_eagle.drafters import DRAFTERS
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.registry import read_model_config

if TYPE_CHECKING:
    from mamba_eagle.drafting.base import DraftSource


def draft_source(algorithm: str) -> type[DraftSource]:
    """The class for a value of ``--speculative-algorithm``; imports its module.

    Raises: KeyError for NONE and for names that are not in ``DRAFTERS``.
    """
    entry = DRAFTERS[algorithm]
    source: type[DraftSource] = getattr(import_module(f"{__name__}.{entry.module}"), entry.source)
    return source


def drafter_problems(config: EngineConfig) -> list[str]:
    """Every reason why the drafter of ``config`` does not fit its target, as seen from config.json
    and the headers of its files.

    [] if a folder cannot be read here; the runner repeats the check when it starts.
    """
    entry, draft = DRAFTERS.get(config.speculative_algorithm), config.speculative_draft_model_path
    if entry is None or (entry.needs_folder and not draft):
        return []
    folders = (config.model_path, draft or config.model_path)
    if not all(map(os.path.isdir, folders)):
        return []
    try:
        target = read_model_config(config.model_path)
        return draft_source(config.speculative_algorithm)(config, target).problems()
    except (OSError, UnsupportedModel) as error:
        return [str(error)]
