"""Load with aborts and lost connections leaves nothing behind (benchmark/soak.py, for seconds)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]
FLAGS = "--clients 64 --seconds 4 --max-new-tokens 48 --abort-rate 0.5"


def test_soak_leaks_nothing_and_mixes_no_texts(server) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmark.soak", "--base-url", server.base_url, *FLAGS.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Nothing leaked." in run.stdout
    for outcome in ("finished", "aborted", "disconnected"):
        assert f"'{outcome}'" in run.stdout, run.stdout  # all three ways to end were taken
