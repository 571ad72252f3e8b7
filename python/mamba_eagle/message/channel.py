"""Typed ZMQ pipes between the processes, in a folder that only the current user can access. If it
holds a link (link.py), pipes of ranks on other machines lead there."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from mamba_eagle import message
from mamba_eagle.config import ConfigError
from mamba_eagle.core import is_unicode
from mamba_eagle.message.indices import from_wire, to_wire
from mamba_eagle.message.link import read_link

T = TypeVar("T")

# name of the pipe -> the type of its messages
PIPES: dict[str, Any] = {
    "to_scheduler": message.ToScheduler,
    "to_server": message.ToServer,
    "to_runner": message.ToRunner,
    "from_runner": message.FromRunner,
    "to_watchdog": message.ToWatchdog,
}


# in a private folder: the process that it belongs to
PID_FILE = "server.pid"
MAX_ADDRESS = 107  # bytes of a Unix socket's path
# a folder of weights that ranks were sent; it goes with the rank that made it
RECEIVED_PREFIX = "mamba-eagle-weights-"


def memory_dir() -> str:
    """Where files are memory, if there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def make_socket_dir() -> str:
    """A new private folder (mode 0700) for the pipes; the caller removes it at exit."""
    return tempfile.mkdtemp(prefix="mamba-eagle-")


def remove_socket_dir(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def new_socket_dir() -> str:
    """A folder that names this process as its owner.

    Raises: ConfigError when it cannot be made, or its path cannot be a socket's.
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
        why = f"sockets in it have paths of {longest} bytes, {MAX_ADDRESS} is the limit"
    elif not is_unicode(path):
        why = "addresses of sockets are UTF-8, and it is not"
    else:
        return path
    remove_socket_dir(path)
    raise ConfigError(
        [f"TMPDIR = {tempfile.gettempdir()!r}: {why}; set TMPDIR to a folder with another path"]
    )


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


def address(socket_dir: str, pipe: str, rank: int = 0) -> str:
    """The ZMQ address of a pipe in the folder ``socket_dir``; each rank has its own."""
    return "ipc://" + os.path.join(socket_dir, f"{pipe}_{rank}" if rank else pipe)


class Sender(Generic[T]):
    """The pushing end. It connects, so either side may start first. Not safe across threads.

    What goes to several runners is encoded once. Each has a pipe of its own: one that is slow
    delays no other, and nothing is ever dropped, as a publisher would."""

    def __init__(
        self, context: zmq.Context[Any], socket_dir: str, pipe: str, ranks: Iterable[int] = (0,)
    ) -> None:
        """ranks: of the runners at the other end, if it leads to runners."""
        assert pipe in PIPES
        self._sockets = [_pushing(context, socket_dir, pipe, rank) for rank in ranks]
        self._encode = msgspec.msgpack.Encoder(enc_hook=to_wire).encode

    def send(self, item: T) -> None:
        encoded = self._encode(item)
        for socket in self._sockets:
            socket.send(encoded)

    def linger(self, milliseconds: int) -> None:
        """How long what was sent may still be delivered after ``close``; and how long ``send`` may
        wait from now on for a receiver on another machine, before it raises zmq.Again."""
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, milliseconds)
            socket.setsockopt(zmq.SNDTIMEO, milliseconds)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


def _pushing(context: zmq.Context[Any], socket_dir: str, pipe: str, rank: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    link = read_link(socket_dir)
    port = link.port_of(pipe, rank) if link else None
    # Node 0 also has senders of results: the runners beside the scheduler.
    if link is None or port is None or (link.is_first and pipe == "from_runner"):
        socket.connect(address(socket_dir, pipe, rank))
    else:
        link.open(socket, port)
    return socket


class Receiver(Generic[T]):
    """The pulling end, which binds. Several senders may share one."""

    def __init__(
        self, context: zmq.Context[Any], socket_dir: str, pipe: str, rank: int = 0
    ) -> None:
        """rank: of the runner that receives."""
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        link = read_link(socket_dir)
        port = link.port_of(pipe, rank) if link else None
        if link is None or port is None or link.is_first:
            self.socket.bind(address(socket_dir, pipe, rank))
        if link is not None and port is not None:
            link.open(self.socket, port)  # what was bound before stays a plain Unix socket
        self._decode = msgspec.msgpack.Decoder(PIPES[pipe], dec_hook=from_wire).decode

    def receive(self, timeout_ms: int = -1) -> T | None:
        """The next message; None if none arrives within ``timeout_ms`` (-1: wait forever)."""
        if timeout_ms == 0:
            return self._take()
        deadline, left = time.monotonic() + timeout_ms / 1000, timeout_ms
        while self.socket.poll(left):
            if (item := self._take()) is not None:
                return item
            # A peer on another machine has proved who it is: that is readable, but no message.
            if timeout_ms > 0:
                left = max(0, int(1000 * (deadline - time.monotonic())))
        return None

    def _take(self) -> T | None:
        """A message that is there; None if there is none."""
        try:
            return self._decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close()
