"""Pipes to other machines: TCP instead of Unix sockets, encrypted and authenticated by CURVE.

The folder of a process's sockets may hold a ``Link``. Then the pipes of ranks on other nodes lead
through TCP; what sends and receives does not notice. Only node 0 listens:

    port      control: the agents of the other nodes (server/engine/first_node.py)
    port + 1  the store through which ranks find each other (parallel/meeting.py), not encrypted
    port + 2  results, and that a rank is ready
    port + 3  plans, one port for each rank of another node
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

LINK_FILE = "link.json"
FIXED_PORTS = 3  # besides those of plans
DOMAIN = "mamba-eagle"  # of ZMQ's authentication
# ZMQ's own, from a thread that Python cannot hold up: a machine that does not answer is cut off.
PING_MS, PONG_MS = 500, 5000


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
            return self.port + 2
        if pipe == "to_runner" and rank >= self.ranks_per_node:
            return self.port + FIXED_PORTS + rank - self.ranks_per_node
        return None

    @property
    def store_port(self) -> int:
        """Where ranks find each other."""
        return self.port + 1

    def open(self, socket: zmq.Socket[Any], port: int) -> None:
        """Attaches a socket to a port of node 0: there it listens, elsewhere it connects.

        Raises: zmq.ZMQError if the port is taken.
        """
        if self.is_first:
            listen(socket, self.host, port, self.own)
        else:
            call(socket, self.host, port, self.own, self.peer)


def endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(socket: zmq.Socket[Any], host: str, port: int, own: CurvePair) -> None:
    """Binds a socket to one address, for those whom the context's ``Guard`` admits; no one can
    connect without a guard. What the socket was bound to before stays as it is."""
    socket.ipv6 = ":" in host
    socket.tcp_keepalive = 1
    socket.curve_server = True
    socket.curve_secretkey = own.secret.encode()
    socket.zap_domain = DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.bind(endpoint(host, port))


def call(socket: zmq.Socket[Any], host: str, port: int, own: CurvePair, server: str) -> None:
    """Connects a socket to one that ``listen`` has bound. server: its public key."""
    socket.ipv6 = ":" in host
    socket.tcp_keepalive = 1
    socket.curve_serverkey = server.encode()
    socket.curve_publickey = own.public.encode()
    socket.curve_secretkey = own.secret.encode()
    socket.connect(endpoint(host, port))


def keep_watch(socket: zmq.Socket[Any]) -> None:
    """For the control sockets, at both ends, before they are attached. Not for plans: a connection
    that is cut off loses what was on its way."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, PONG_MS


class Guard:
    """Admits to the listening sockets of a context who has one of the given keys, and no one else.
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
    with open(Path(socket_dir, LINK_FILE), "wb", opener=_private) as file:
        file.write(msgspec.json.encode(link))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_link(socket_dir: str) -> Link | None:
    """None on a single machine."""
    try:
        content = Path(socket_dir, LINK_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(content, type=Link)
