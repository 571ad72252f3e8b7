"""Writes a checkpoint: config.json and model.safetensors in one folder."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_weights(weights: dict[str, Tensor], folder: Path, config: dict[str, Any]) -> None:
    """Writes weights and config, creating ``folder`` if needed. Floating-point tensors are stored
    as bfloat16. The weights file is replaced atomically, so readers never see a partial one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in weights.items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
    write_json(folder / "config.json", config)
