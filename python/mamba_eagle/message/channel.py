"""Typed ZMQ pipes between the processes, in a folder that only the current user can access."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from mamba_eagle import message

T = TypeVar("T")

# name of the pipe -> the type of its messages; ``to_tokenizer`` leads to the server process
PIPES: dict[str, Any] = {
    "to_scheduler": message.ToScheduler,
    "to_tokenizer": message.ToTokenizer,
    "to_runner": message.ToRunner,
    "from_runner": message.FromRunner,
    "to_watchdog": message.ToWatchdog,
}


def make_socket_dir() -> str:
    """A new private folder (mode 0700) for the pipes; the caller removes it at exit."""
    return tempfile.mkdtemp(prefix="mamba-eagle-")


def remove_socket_dir(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def address(socket_dir: str, pipe: str) -> str:
    """The ZMQ address of a pipe in the folder ``socket_dir``."""
    return "ipc://" + os.path.join(socket_dir, pipe)


class Sender(Generic[T]):
    """The pushing end. It connects, so either side may start first. Not safe across threads."""

    def __init__(self, context: zmq.Context[Any], socket_dir: str, pipe: str) -> None:
        assert pipe in PIPES
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(address(socket_dir, pipe))
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, item: T) -> None:
        self.socket.send(self._encode(item))

    def close(self) -> None:
        self.socket.close()


class Receiver(Generic[T]):
    """The pulling end, which binds. Several senders may share one."""

    def __init__(self, context: zmq.Context[Any], socket_dir: str, pipe: str) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address(socket_dir, pipe))
        self._decode = msgspec.msgpack.Decoder(PIPES[pipe]).decode

    def receive(self, timeout_ms: int = -1) -> T | None:
        """The next message; None if none arrives within ``timeout_ms`` (-1: wait forever)."""
        if timeout_ms != 0 and not self.socket.poll(timeout_ms):
            return None
        try:
            return self._decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close()
