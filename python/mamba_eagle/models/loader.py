"""Weights from safetensors files, or random ones of the right shapes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn


class CheckpointError(ValueError):
    """Files and model do not fit; the text lists every name that is wrong."""


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copy the checkpoint's tensors into the model's parameters, converting dtypes.

    Raises: CheckpointError listing all names that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    parameters = dict(model.named_parameters())
    seen: set[str] = set()
    wrong: list[str] = []
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name not in parameters:
                    wrong.append(f"unexpected: {name}")
                    continue
                seen.add(name)
                value, parameter = file.get_tensor(name), parameters[name]
                if value.shape != parameter.shape:
                    wrong.append(
                        f"shape of {name}: {list(value.shape)} in the file, "
                        f"{list(parameter.shape)} by config.json"
                    )
                    continue
                with torch.no_grad():
                    parameter.copy_(value)
    wrong += [f"missing: {name}" for name in parameters if name not in seen]
    if wrong:
        shown = "\n  ".join(wrong[:40]) + (f"\n  … {len(wrong) - 40} more" if wrong[40:] else "")
        raise CheckpointError(f"{folder} does not fit its config.json:\n  {shown}")


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded ones by their index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing) or 'safetensors files'}; "
            "use --load-format dummy for random weights"
        )
    return files


def random_weights(model: nn.Module, seed: int) -> None:
    """Weights for ``--load-format dummy``: small, finite, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("A_log", "dt_bias"):
                low, high = (0.0, 2.5) if leaf == "A_log" else (-6.0, -2.0)
                values = torch.rand(parameter.shape, generator=generator) * (high - low) + low
            elif leaf == "D" or "norm" in name:
                values = torch.ones(parameter.shape)
            elif leaf == "bias":
                values = torch.zeros(parameter.shape)
            else:
                values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(values)
