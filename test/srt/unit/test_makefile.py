"""make, where shells are plain and paths are odd."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INTERPRETER = """#!/bin/sh
case "$2" in venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;; *) printf "[%s]" "$@" ;; esac
"""


def test_paths_may_have_blanks(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    folder = tmp_path / "a b's $x"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    python = folder / "python 3"
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    flags = ["-s", "-C", str(folder), "serve", "PYTHON=./python 3", "ARGS=--model-path 'c d'"]
    ran = subprocess.run(["make", *flags], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("[-m][mamba_eagle.launch_server][--model-path][c d]")


def test_recipes_need_no_bash() -> None:
    assert "bash" not in (ROOT / "Makefile").read_text()
