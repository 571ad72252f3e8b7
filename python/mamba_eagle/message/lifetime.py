"""How a process of the engine begins and ends; it must not outlive the one that started it."""

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
    """What the launcher tells a process of the engine."""

    config: EngineConfig
    socket_dir: str


def begin(role: str) -> Start:
    """The command line is read, logging and signals are set. SIGTERM is now a SystemExit."""
    parser = argparse.ArgumentParser(description=f"The {role} process; the server starts it.")
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--config-file", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole process group; the launcher decides when this process ends
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
    """From where a process ends by itself on: one more SIGTERM must not interrupt what is being
    closed or destroyed, which would print a traceback."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent(check_seconds: float = 1.0) -> None:
    """From now on this process is killed when its parent ends, however that ends.

    On Linux the kernel does it, at once: strictly, when the parent's *thread* that started this
    process ends, so start it from a thread that lives as long as the parent. Elsewhere, and if
    the parent was gone before this call, a thread that looks each ``check_seconds`` does it.
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
