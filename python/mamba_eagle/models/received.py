"""Folders of weights that came in parts: files with what was sent, and links to the files that have
the rest, joined by an index."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mamba_eagle.core import shown
from mamba_eagle.hub import is_gguf
from mamba_eagle.message import TensorInfo
from mamba_eagle.message.channel import PID_FILE, RECEIVED_PREFIX
from mamba_eagle.models.loader import INDEX, Checkpoint, read_header, shortened, stored_tensors


def is_received(path: str) -> bool:
    return Path(path).name.startswith(RECEIVED_PREFIX)


def transfer_problems(
    path: str, tensors: Sequence[TensorInfo], is_unused: Callable[[str], bool]
) -> list[str]:
    """Why these tensors cannot take the place of those in a checkpoint. is_unused: whether a model
    ignores a name that the checkpoint lacks."""
    if is_gguf(path):
        return [
            f"{path}: a GGUF file has other names than trainers send: serve the safetensors that "
            "it was made of, with --quantization for as few bits"
        ]
    checkpoint = Checkpoint(Path(path))
    rounded = {matrix.values for matrix in checkpoint.packed.values()}
    wrong = []
    for each in tensors:
        name, dtype, shape = shown(each.name), shown(each.dtype), each.shape
        stored, kind = checkpoint.stored.get(each.name), getattr(torch, each.dtype, None)
        if not isinstance(kind, torch.dtype):
            wrong.append(f"dtype of {name}: torch has no {dtype}")
        elif stored is None:
            wrong += [] if is_unused(each.name) else [f"unexpected: {name}"]
        elif tuple(shape) != stored.shape:
            wrong.append(f"shape of {name}: {shape} is sent, {list(stored.shape)} is served")
        elif kind.is_floating_point != stored.is_floating_point:
            wrong.append(f"dtype of {name}: {dtype} is sent, {stored.dtype} is served")
        elif each.name in rounded and kind.itemsize * stored.numel != stored.nbytes:
            wrong.append(
                f"dtype of {name}: {dtype} is sent, {stored.dtype} with scales is served: send it "
                "rounded, with its scales, or serve the unquantized checkpoint with "
                "--quantization, which rounds what it is sent as at a start"
            )
    if len({each.name for each in tensors}) < len(tensors):
        wrong.append("a name is there twice")
    return shortened(wrong)


def add_part(folder: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file of their own. Raises: OSError"""
    path = Path(folder)
    path.mkdir(mode=0o700, exist_ok=True)
    (path / PID_FILE).write_text(str(os.getpid()))
    save_file(tensors, path / f"received-{time.time_ns()}.safetensors")  # several may come at once


def complete(folder: str, before: str) -> None:
    """Make a checkpoint of the parts and of what ``before`` has beside them. Raises: OSError"""
    path = Path(folder)
    places: dict[str, str] = {}
    for part in sorted(path.glob("received-*")):
        places |= dict.fromkeys(read_header(part), part.name)
    links: dict[Path, str] = {}
    for name, stored in stored_tensors(Path(before)).items():
        if name not in places:
            places[name] = links.setdefault(stored.file, f"kept-{len(links):05}.safetensors")
    for file, link in links.items():
        # a folder that was received itself goes when this one takes its place
        join: Any = os.link if is_received(before) else os.symlink
        join(os.path.abspath(file), path / link)
    for file in Path(before).glob("*.json"):
        shutil.copy(file, path)
    (path / INDEX).write_text(json.dumps({"weight_map": places}))


def forget(folders: Iterable[str]) -> None:
    """Remove those that were received."""
    for folder in filter(is_received, folders):
        shutil.rmtree(folder, ignore_errors=True)
