"""Draft heads, by the ``architectures`` entry of their config.json: which algorithm drafts so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADS = {
    "EagleHead": "EAGLE",
    "LlamaForCausalLMEagle3": "EAGLE3",
    "Eagle3LlamaForCausalLM": "EAGLE3",
    "Eagle3DraftModel": "EAGLE3",
    "Eagle3Speculator": "EAGLE3",
    "NemotronHMTPModel": "MTP",
}


def head_algorithm(values: dict[str, Any]) -> str | None:
    """Of a config.json; None: it is a model and no head."""
    architecture = (values.get("architectures") or ["?"])[0]
    if architecture not in HEADS and "draft_vocab_size" in values:
        return "EAGLE3"  # SafeAILab's heads bear their target's name
    return HEADS.get(architecture)


def head_in(folder: str | Path) -> str | None:
    """The algorithm that a folder's head is for; None: it has a model, or cannot be read."""
    try:
        values = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return head_algorithm(values) if isinstance(values, dict) else None


def draft_algorithm(folder: str | Path) -> str:
    """What a drafter's folder is for: a head's algorithm, STANDALONE for a model. Of a folder that
    cannot be read STANDALONE, too: the error comes when it is loaded."""
    return head_in(folder) or "STANDALONE"
