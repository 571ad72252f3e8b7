"""How processes of the engine end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STARTING = """
import ctypes, os, sys
from mamba_eagle.message import lifetime
lifetime.begin("runner")
def called_by_a_compiler():
    os.kill(os.getpid(), lifetime.END_SIGNAL)
ctypes.CFUNCTYPE(None)(called_by_a_compiler)()
print("it goes on")
"""


def test_a_stop_in_the_middle_of_a_compilation_is_not_lost(tmp_path: Path) -> None:
    """ctypes prints and forgets what a callback raises."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    flags = ["--socket-dir", str(tmp_path), "--config-file", str(config)]
    ran = subprocess.run([sys.executable, "-c", STARTING, *flags], capture_output=True, timeout=100)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
