"""Which backend a runner will choose, which can be known without torch, which the server process
does not load: it fills in the settings' open ends. A wrong guess costs speed and nothing else."""

import os
import re
from pathlib import Path

from mamba_eagle.config import ModelSettings

PROCESSOR = Path("/proc/cpuinfo")
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA's on Linux, and Windows' within it


def on_cpu(config: ModelSettings) -> bool:
    """Whether the model will run on a CPU: with ``--device auto``, where no GPU has a driver."""
    if config.device != "auto":
        return config.device == "cpu"
    return not any(Path(driver).exists() for driver in GPU_DRIVERS)


def multiplies_integers(config: ModelSettings) -> bool:
    """Whether the backend on a CPU will have products of int8 groups."""
    return config.dtype in ("auto", "float32")


def multiplies_four_bits_faster() -> bool:
    """Whether products of int4 groups will take half the time of int8's: on a processor with AVX2
    that has no instruction for four bytes at once (AVX-512 VNNI), or that Numba takes for one."""
    features = os.environ.get("NUMBA_CPU_FEATURES", "")
    if not features and PROCESSOR.exists():
        features = PROCESSOR.read_text().partition("flags")[2].partition("\n")[0]
    signed = re.findall(r"(-?)(\w+)", features.replace("_", ""))
    found = {name for sign, name in signed if not sign}
    return "avx2" in found and "avx512vnni" not in found
