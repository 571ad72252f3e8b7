"""Pipes to other machines: TCP instead of Unix sockets, encrypted and authenticated by CURVE.

The folder of a process's sockets may hold a ``Link``. Then the pipes of ranks on other nodes lead
through TCP; what sends and receives does not notice. Only node 0 listens:

    port      the store through which ranks find each other (parallel/distributed.py), not encrypted
    port + 1  results, and that a rank is ready
    port + 2  plans, one port for each rank of another node
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

LINK_FILE = "link.json"
FIXED_PORTS = 2  # besides those of plans
DOMAIN = "mamba-eagle"  # of ZMQ's authentication


class CurvePair(msgspec.Struct, frozen=True):
    """A key pair of CURVE in ZMQ's Z85 notation."""

    public: str
    secret: str

    @staticmethod
    def new() -> CurvePair:
        public, secret = zmq.curve_keypair()
        return CurvePair(public.decode(), secret.decode())


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes of a node reach those of others. The keys are made for one start of node 0:
    what is left over from an earlier one cannot connect."""

    host: str  # of node 0
    port: int
    is_first: bool  # whether this is node 0
    own: CurvePair
    peer: str  # public key of the other side: of node 0, or of all other nodes
    ranks_per_node: int

    def port_of(self, pipe: str, rank: int) -> int | None:
        """The port of a pipe that leads to another machine; None for one that does not."""
        if pipe == "from_runner":
            return self.port + 1
        if pipe == "to_runner" and rank >= self.ranks_per_node:
            return self.port + FIXED_PORTS + rank - self.ranks_per_node
        return None

    def for_others(self, own: CurvePair) -> Link:
        """The link of the other nodes, which all have the same key pair."""
        link = {"is_first": False, "own": own, "peer": self.own.public}
        return msgspec.structs.replace(self, **link)

    def open(self, socket: zmq.Socket[Any], port: int) -> None:
        """Attaches a socket to a port of node 0: there it listens, elsewhere it connects.

        Raises: zmq.ZMQError if the port is taken.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        endpoint = f"tcp://{host}:{port}"
        socket.ipv6 = ":" in self.host
        socket.tcp_keepalive = 1
        socket.curve_secretkey = self.own.secret.encode()
        if not self.is_first:
            socket.curve_serverkey = self.peer.encode()
            socket.curve_publickey = self.own.public.encode()
            socket.connect(endpoint)
            return
        socket.curve_server = True
        # Without a Guard no one is admitted.
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.bind(endpoint)


class Guard:
    """Admits to the listening sockets of a context those who have the given key, and no one else.
    To be stopped before the context is terminated."""

    def __init__(self, context: zmq.Context[Any], public_key: str) -> None:
        self._key = public_key.encode()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key

    def stop(self) -> None:
        self._authenticator.stop()


def write_link(socket_dir: str, link: Link) -> None:
    """Only this user may read it, as everything in the folder."""
    path = Path(socket_dir, LINK_FILE)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(msgspec.json.encode(link))


def read_link(socket_dir: str) -> Link | None:
    """None on a single machine."""
    try:
        content = Path(socket_dir, LINK_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(content, type=Link)
