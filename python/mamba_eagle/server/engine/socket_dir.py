"""The private folder of the pipes, and the folders that killed servers have left behind."""

import os
import tempfile
from itertools import chain
from pathlib import Path

from mamba_eagle.config import ConfigError
from mamba_eagle.message.channel import (
    PID_FILE,
    PIPES,
    make_socket_dir,
    memory_dir,
    remove_socket_dir,
)

MAX_ADDRESS = 107  # bytes of a Unix socket's path


def new_socket_dir() -> str:
    """A folder that names this process as its owner.

    Raises: ConfigError when it cannot be made, or its path is too long for a socket.
    """
    try:
        remove_stale_dirs()
        path = make_socket_dir()
        Path(path, PID_FILE).write_text(str(os.getpid()))
    except OSError as error:
        raise ConfigError(
            [f"no folder for sockets can be made ({error}): set TMPDIR to one that can be written"]
        ) from None
    longest = max(len(os.fsencode(os.path.join(path, pipe))) for pipe in PIPES)
    if longest > MAX_ADDRESS:
        remove_socket_dir(path)
        raise ConfigError(
            [
                f"TMPDIR = {tempfile.gettempdir()!r}: sockets in it have paths of {longest} bytes, "
                f"{MAX_ADDRESS} is the limit; set TMPDIR to a folder with a shorter path"
            ]
        )
    return path


def remove_stale_dirs() -> None:
    """Removes the folders of this user whose server was killed before it could remove them."""
    found = (Path(place).glob("mamba-eagle-*") for place in {tempfile.gettempdir(), memory_dir()})
    for path in chain.from_iterable(found):
        try:
            if path.stat().st_uid != os.getuid() or path.is_symlink():
                continue
            os.kill(int((path / PID_FILE).read_text()), 0)
        except ProcessLookupError:
            remove_socket_dir(str(path))
        except (OSError, ValueError):
            continue  # no pid file yet, or a process of another user: it may be in use
