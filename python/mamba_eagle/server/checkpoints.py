"""Whether nodes have the same checkpoints: ranks of different ones would make nonsense together."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mamba_eagle.config import EngineConfig


def fingerprint(config: EngineConfig) -> str:
    """Of a resolved config: the contents of config.json, and names and sizes of the files of
    weights. The weights themselves are not read."""
    digest = hashlib.sha256()
    for folder in (config.model_path, config.speculative_draft_model_path):
        if not folder:
            continue
        settings = Path(folder, "config.json")
        digest.update(settings.read_bytes() if settings.exists() else b"-")
        if config.load_format != "dummy":
            for path in sorted(Path(folder).glob("*.safetensors")):
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
