"""Weights from safetensors files, or random ones of the right shapes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from mamba_eagle.models.base import Target
from mamba_eagle.models.config import read_json, read_values
from mamba_eagle.models.quantization import (
    FLOAT8,
    SCALE_NAMES,
    dequantize,
    is_scale,
    quantization,
)

log = logging.getLogger("mamba_eagle.models")

PROGRESS_FROM_BYTES = 1 << 30  # smaller checkpoints are there before a bar could be read
MAPPED_BYTES = 256 << 20  # of a file that may stay in memory while it is copied


class CheckpointError(ValueError):
    """Files and model do not fit; the text lists every name that is wrong."""


@contextlib.contextmanager
def created_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Modules made inside have their parameters on ``device``, in ``dtype`` unless they choose."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Copy the checkpoint's tensors into the model's parameters, converting dtypes.

    Tensor by tensor: beside the parameters no more than a part of one file is in memory.

    Raises: CheckpointError listing all names that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    files = checkpoint_files(folder)
    parameters = dict(model.named_parameters())
    place: Callable[[str], Target | None] = getattr(model, "target", Target)
    quantized = Quantized(folder, file_of_tensors(files))
    seen: dict[str, set[int | None]] = {}
    wrong: list[str] = []
    total = sum(path.stat().st_size for path in files)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"loading {folder.name}",
        disable=total < PROGRESS_FROM_BYTES,
    ) as progress:
        for name, value in checkpoint_tensors(files, total // 20):
            progress.update(value.nbytes)
            target = None if is_scale(name) else place(name)
            if target is None:
                continue
            parameter = parameters.get(target.name)
            if parameter is None:
                wrong.append(f"unexpected: {name}")
                continue
            seen.setdefault(target.name, set()).add(target.index)
            if not value.is_floating_point():
                wrong.append(f"dtype of {name}: {value.dtype} is of a quantization not supported")
                continue
            if value.dtype in FLOAT8:
                try:
                    value = quantized.read(name, value)
                except ValueError as error:
                    wrong.append(f"scale of {name}: {error}")
                    continue
            problem = copy(parameter, target, value)
            if problem:
                wrong.append(f"shape of {name}: {problem}")
    for name, parameter in parameters.items():
        wrong += [f"missing: {gap}" for gap in gaps(name, parameter, seen.get(name, set()))]
    if wrong:
        shown = "\n  ".join(wrong[:40]) + (f"\n  … {len(wrong) - 40} more" if wrong[40:] else "")
        raise CheckpointError(f"{folder} does not fit its config.json:\n  {shown}")


def copy(parameter: nn.Parameter, target: Target, value: Tensor) -> str | None:
    """Returns: what is wrong with the shape, if anything; then nothing is copied."""
    room: Tensor = parameter.detach()
    if target.index is not None:
        if target.index >= room.shape[0]:
            return f"number {target.index} of {room.shape[0]} by config.json"
        room = room[target.index]
    if value.shape != room.shape:
        return f"{list(value.shape)} in the file, {list(room.shape)} by config.json"
    if isinstance(target.scale, Tensor) or target.scale != 1.0:
        value = value.float() * target.scale
    room.copy_(value)
    return None


def gaps(name: str, parameter: nn.Parameter, seen: set[int | None]) -> list[str]:
    """Names of what was not in the checkpoint; of a stacked parameter, the slices."""
    if not seen:
        return [name]
    if None in seen:
        return []
    return [f"{name}[{i}]" for i in range(parameter.shape[0]) if i not in seen]


class Quantized:
    """Finds the scales of float8 weights, wherever in the checkpoint they are."""

    def __init__(self, folder: Path, file_of: dict[str, Path]) -> None:
        found = quantization(read_values(folder))
        if found.method:
            log.info("%s: %s weights are widened as they are loaded", folder, found.name)
        if found.kv_cache:
            log.info("%s: KV stays in the model's dtype, not %s", folder, found.kv_cache)
        self.file_of, self.block = file_of, found.block

    def read(self, name: str, value: Tensor) -> Tensor:
        """Raises: ValueError when there is no scale, or one that does not fit."""
        for end in SCALE_NAMES:
            if path := self.file_of.get(name + end):
                with safe_open(path, framework="pt") as file:
                    return dequantize(value, file.get_tensor(name + end), self.block)
        raise ValueError(f"the weight is {value.dtype}, and no {name}{SCALE_NAMES[0]} is there")


def file_of_tensors(files: list[Path]) -> dict[str, Path]:
    """Which file has which tensor, by the files' headers.

    Raises: CheckpointError naming every file that is broken.
    """
    found: dict[str, Path] = {}
    broken = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            broken.append(f"{path}: {error}")
    if broken:
        raise CheckpointError(
            "not safetensors files, or not all of them; download them again (of a clone: "
            "git lfs pull):\n  " + "\n  ".join(broken)
        )
    return found


class Opened(NamedTuple):
    """A tensor of a file and what it is called."""

    name: str
    value: Tensor


def checkpoint_tensors(files: list[Path], mapped_bytes: int) -> Iterator[Opened]:
    """All tensors, on the CPU. A file is opened anew when much of it has been read: what was
    looked at stays in memory until the file is closed."""
    limit = max(1 << 20, min(MAPPED_BYTES, mapped_bytes))
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        at = 0
        while at < len(names):
            left = limit
            with safe_open(path, framework="pt") as file:
                while at < len(names) and left > 0:
                    value = file.get_tensor(names[at])
                    left -= value.nbytes
                    yield Opened(names[at], value)
                    del value
                    at += 1


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded ones by their index."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
        files = [folder / name for name in names]
    elif whole.is_file():
        files = [whole]  # beside it there may be the same in another layout
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing) or 'safetensors files'}; pickled weights ("
            f"{', '.join(sorted(path.name for path in folder.glob('*.bin'))[:3]) or '*.bin'}) can "
            "run code and are not read: convert them once with torch.load(path, weights_only=True) "
            "and safetensors.torch.save_file({n: t.clone() for n, t in weights.items()}, "
            "'model.safetensors'). --load-format dummy makes random weights"
        )
    return files


def random_weights(model: nn.Module, seed: int) -> None:
    """Weights for ``--load-format dummy``: small, finite, the same for the same seed.

    They are made where the parameters are.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            device, leaf = parameter.device, name.rsplit(".", 1)[-1]
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            made = {"generator": generators[device], "device": device}
            if leaf in ("A_log", "dt_bias"):
                low, high = (0.0, 2.5) if leaf == "A_log" else (-6.0, -2.0)
                values = torch.rand(parameter.shape, **made) * (high - low) + low
            elif leaf == "D" or "norm" in name:
                values = torch.ones((), device=device)
            elif leaf.endswith("bias"):
                values = torch.zeros((), device=device)
            else:
                values = torch.randn(parameter.shape, dtype=parameter.dtype, **made) * 0.05
            parameter.copy_(values)
