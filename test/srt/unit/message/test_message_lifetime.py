"""How processes of the engine end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mamba_eagle.message.lifetime import PACKAGE, module_command

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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no -P")
def test_a_process_takes_no_modules_from_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the package, where nobody has installed it."""
    monkeypatch.chdir(tmp_path)
    Path("random.py").write_text("raise SystemExit('not this one')")
    command = [*module_command("mamba_eagle.scheduler.process"), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    monkeypatch.chdir(PACKAGE.parent)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-S", *module_command("mamba_eagle.limits")[1:]]
    assert subprocess.run(command, timeout=100).returncode == 0
