"""Whether nodes have the same checkpoints: ranks of different ones would make nonsense together."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mamba_eagle.config import EngineConfig


def fingerprint(config: EngineConfig) -> str:
    """Of a resolved config: the contents of config.json, and names and sizes of the files of
    weights; the model may be a single file. The weights themselves are not read."""
    digest = hashlib.sha256()
    for name in filter(None, (config.model_path, config.speculative_draft_model_path)):
        folder = Path(name)
        settings = folder / "config.json"
        digest.update(settings.read_bytes() if settings.exists() else b"-")
        files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
        for path in files if config.load_format != "dummy" else ():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
