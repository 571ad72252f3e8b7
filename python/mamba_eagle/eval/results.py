"""Lines of benchmark/results: one JSON object a measurement, with what it was made on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from mamba_eagle.eval import machine

COPIED_BYTES = 2**31


def facts(device: str = "auto") -> dict[str, Any]:
    """What each line ends with: gpu (or CPU), copy_tb_s, torch, triton, commit, date.

    Takes 4 GiB of a GPU's memory for a moment, to time its copies. ``device`` as in --device.
    """
    import torch

    name, copied = machine.hardware(device), None
    if name != machine.cpu_model():
        copied = round(copy_tb_s(), 3)
        torch.cuda.empty_cache()  # others shall have that memory, of this process or not
    return {
        "gpu": name,
        "copy_tb_s": copied,
        "torch": version("torch"),
        "triton": version("triton"),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def copy_tb_s() -> float:
    """What the GPU copies from its memory to its memory, bytes read and bytes written, TB/s."""
    import torch

    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return bandwidth_tb_s(lambda: target.copy_(source), 2 * source.nbytes)


def bandwidth_tb_s(launch: Callable[[], object], num_bytes: int) -> float:
    """Not in a graph: there a copy may be given to a slower engine."""
    import triton

    return num_bytes / triton.testing.do_bench(launch, return_mode="median") / 1e9


def append(path: str | Path, lines: Iterable[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
