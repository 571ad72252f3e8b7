"""Kernels on a CPU reach outside of no array, whatever numbers they meet: they run in a form that
checks it, in a process of its own, since kernels are compiled in one form or the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mamba_eagle.cpu.ops import tree_verify as cpu
from mamba_eagle.machine_code import CHECKED

NO_TOKEN = Path(__file__).parents[1] / "runner" / "test_runner_no_token.py"
# An error in a callback is none in its caller; pytest makes a warning of it.
FAILING = ("-W", "error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.skipif(CHECKED, reason="this is such a process")
def test_no_kernel_reaches_outside_of_an_array() -> None:
    """Engines with weights that are not finite, and the other test of this file. All CPU kernels:
    MAMBA_EAGLE_CHECK_BOUNDS=1 pytest test/srt/kernels test/srt/unit/cpu."""
    files = [__file__, str(NO_TOKEN), "-k", "refused or not_finite and tree"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FAILING, *files],
        # not optimised: most of the time goes to compiling
        env={**os.environ, "MAMBA_EAGLE_CHECK_BOUNDS": "1", "NUMBA_OPT": "0"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert "4 passed" in process.stdout


@pytest.mark.skipif(not CHECKED, reason="kernels are not checked in this process")
@pytest.mark.parametrize("size", [12, 16], ids=["odd", "vectors"])
def test_a_row_in_front_of_its_buffer_is_refused(size: int) -> None:
    H, W, history = 2, 5, 3
    rows = (np.zeros((1, W, H * size + size), np.float32), *np.zeros((2, 1, W, H), np.float32))
    conv_in, state = np.zeros((1, history + W, 4), np.float32), np.zeros((1, H, size, size))
    buffers = cpu.Buffers(conv_in, *rows, state.astype(np.float32))
    path, one = np.zeros((1, history + W), np.int64), np.ones(1, np.int64)
    with pytest.raises(IndexError):
        cpu.fold.serial(one - 1, one, path, one - 1, history, buffers)
