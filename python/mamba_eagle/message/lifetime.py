"""How the scheduler and runner processes start and end; they must not outlive their parent."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from mamba_eagle.config import EngineConfig

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Start(NamedTuple):
    """The arguments that the launcher passes to a process."""

    config: EngineConfig
    socket_dir: str


def begin(role: str) -> Start:
    """Read the command line and set up logging and signals. SIGTERM now raises SystemExit(0).

    role: the name of the process in its log lines.
    """
    parser = argparse.ArgumentParser(description=f"The {role} process; the server starts it.")
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--config-file", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    # Ctrl-C signals the whole process group, but the launcher decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent()
    config = msgspec.json.decode(Path(arguments.config_file).read_bytes(), type=EngineConfig)
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"[%(asctime)s {role}] %(levelname)s: %(message)s",
    )
    return Start(config, arguments.socket_dir)


def _leave(signum: int, frame: FrameType | None) -> None:
    ignore_signals()
    raise SystemExit(0)


def ignore_signals() -> None:
    """Ignore SIGTERM while the process exits: another signal would interrupt the cleanup and print
    a traceback."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent(check_seconds: float = 1.0) -> None:
    """Make sure that this process is killed when its parent ends for any reason.

    On Linux the kernel does so at once. Strictly, it does so when the *thread* that started this
    process ends, so start it from a thread that lives as long as the parent. A thread that checks
    every ``check_seconds`` covers other systems, and a parent that ended before this call.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(check_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
