"""What a measurement was made on: to be printed and kept beside each number."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def commit() -> str:
    """Hash of the checkout this package lies in, with ``+`` if it was changed since; or unknown. A
    copy without its history can be given it in the environment, as COMMIT."""
    if known := os.environ.get("COMMIT"):
        return known
    here = Path(__file__).resolve().parent
    try:
        name = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12"]
        run = subprocess.run(name, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip() or "unknown"


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware(device: str = "auto") -> str:
    """The GPU's name, or the CPU's; ``device`` as in --device."""
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return str(torch.cuda.get_device_name())
    return cpu_model()


def device_name(device: str = "auto") -> str:
    """As :func:`hardware`, with the number of threads this process uses of a CPU."""
    import torch

    name = hardware(device)
    return f"{name}, {torch.get_num_threads()} threads" if name == cpu_model() else name
