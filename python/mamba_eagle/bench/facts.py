"""What a measurement was made on and with: kept beside each number."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

COPIED_BYTES = 2**31


def facts(device: str = "auto") -> dict[str, Any]:
    """The fields at the end of each line of benchmark/results: gpu (or CPU), copy_tb_s, driver,
    torch, triton, commit, date.

    Takes 4 GiB of a GPU's memory for a moment, to time its copies. ``device`` as in --device.
    """
    name, copied, driver = hardware(device), None, None
    if name != cpu_model():
        copied = round(copy_tb_s(), 3)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        torch.cuda.empty_cache()  # others need that memory, in this process or not
    return {
        "gpu": name,
        "copy_tb_s": copied,
        "driver": driver.partition("\n")[0] if driver else None,
        "torch": version("torch"),
        "triton": version("triton"),
        "commit": commit(),
        "date": today(),
    }


# ── the code ─────────────────────────────────────────────────────────────────────────────────


def commit() -> str:
    """Hash of the checkout that this package lies in, followed by ``+`` if it was changed since;
    "unknown" without one. The environment variable COMMIT names that of a copy without history."""
    if given := os.environ.get("COMMIT"):
        return given
    here = Path(__file__).resolve().parent
    name = ("git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12")
    return _output(*name) or "unknown"


def _output(*command: str) -> str:
    """What a program prints; "" if it cannot be run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def version(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def today() -> str:
    """The date in UTC, as in 2026-11-21."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


# ── the machine ──────────────────────────────────────────────────────────────────────────────


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
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return str(torch.cuda.get_device_name())
    return cpu_model()


def device_name(device: str = "auto") -> str:
    """As ``hardware``, with the number of threads that this process uses of a CPU."""
    name = hardware(device)
    return f"{name}, {torch.get_num_threads()} threads" if name == cpu_model() else name


def copy_tb_s() -> float:
    """Rate of the GPU's own copies within its memory, bytes read and bytes written, TB/s."""
    import triton  # optional: not available for every machine

    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    # not captured in a graph, where a copy may be given to a slower engine
    taken = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * source.nbytes / taken / 1e9)
