"""Tests that run in Triton's interpreter, which must be asked for before triton is imported: so
each file that has some is run once more, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def files_of(item: pytest.Item) -> list[Path]:
    """The test's own file and the neighbours that it runs along."""
    assert isinstance(item, pytest.Function)
    names = getattr(item.function, "neighbours", ())
    return [item.path, *(item.path.with_name(name) for name in names)]


def check(item: pytest.Item) -> None:
    """What a file's ``test_in_the_interpreter`` does."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files_of(item)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout
