"""What a processor can multiply by."""

from __future__ import annotations

import os
from pathlib import Path

CPU_FEATURES = {
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
}


def cpu_features() -> list[str]:
    """Those of the processor's instructions that decide how fast products are, or those to which
    Numba is narrowed."""
    if narrowed := os.environ.get("NUMBA_CPU_FEATURES"):
        return [name for name in CPU_FEATURES if f"+{name}" in narrowed.split(",")]
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return [name for name in line.split() if name in CPU_FEATURES]
    except OSError:
        pass
    return []
