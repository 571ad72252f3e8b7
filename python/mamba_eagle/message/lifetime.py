"""How a process of the engine begins and ends; it must not outlive the server process."""

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from mamba_eagle import logs
from mamba_eagle.config import EngineConfig

# The server process ends the others by this signal. Not by SIGTERM: service managers send that to
# every process of a service at once, and open requests are to finish first.
END_SIGNAL = signal.SIGUSR1
REFUSED = 2  # exit code after settings that cannot work, which it has named
STACKS_SIGNAL = signal.SIGUSR2  # writes the Python stacks of all threads to standard error

PACKAGE = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Start(NamedTuple):
    """What the server process tells a process of the engine."""

    config: EngineConfig
    socket_dir: str
    rank: int = 0


def begin(role: str) -> Start:
    """Reads the command line and sets up logging and signals. From here on SIGINT, SIGTERM and
    SIGHUP are ignored, and END_SIGNAL ends the process at once, until ``end_in_order`` is
    called."""
    parser = argparse.ArgumentParser(description=f"The {role} process; the server starts it.")
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--config-file", required=True, help="EngineConfig as JSON")
    parser.add_argument("--rank", type=int, default=0, help="of several runners")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid of who starts it")
    arguments = parser.parse_args()
    ignore_stops()
    # What starts holds nothing to close; and an exception would be lost in a compiler's callback,
    # or end it with a traceback.
    signal.signal(END_SIGNAL, lambda *_: os._exit(0))
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    die_with_parent(arguments.parent)
    config = msgspec.json.decode(Path(arguments.config_file).read_bytes(), type=EngineConfig)
    logs.set_up(config.log_level, config.log_format, role_name(role, arguments.rank))
    return Start(config, arguments.socket_dir, arguments.rank)


def ignore_stops() -> None:
    """SIGINT, SIGTERM and SIGHUP may be sent to the whole process group; the process that started
    this one decides when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def module_command(module: str) -> list[str]:
    """The command of a process that runs a module of this package. The folder that it is started
    in may have a random.py: modules are looked for there only if the package lies there."""
    is_here = os.path.exists(PACKAGE.name) and os.path.samefile(PACKAGE.name, PACKAGE)
    elsewhere = ["-P"] if sys.version_info >= (3, 11) and not is_here else []
    return [sys.executable, *elsewhere, "-m", module]


def role_name(role: str, rank: int) -> str:
    """What a process is called where it is shown; the first of several runners is "runner"."""
    return f"{role}{rank}" if rank else role


def end_in_order() -> None:
    """From here on END_SIGNAL raises SystemExit in the main thread."""
    signal.signal(END_SIGNAL, _leave)


def _leave(signum: int, frame: FrameType | None) -> None:
    ignore_end_signal()
    raise SystemExit(0)


def ignore_end_signal() -> None:
    """For a process that has begun to close what it holds: a second signal in the middle of that
    would end it with a traceback."""
    signal.signal(END_SIGNAL, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Make sure that this process is killed when its parent ends for any reason. parent: its pid,
    which the process itself can ask for only as long as the parent is there.

    On Linux the kernel does it at once. Strictly, it acts when the parent's *thread* that started
    this process ends, so start it from a thread that lives as long as the parent. Elsewhere, and
    if the parent was gone before this call, a thread that looks every second does it.
    """
    killed_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def killed_with_parent() -> None:
    """The part of ``die_with_parent`` that the kernel does, on Linux."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
