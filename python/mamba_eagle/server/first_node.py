"""Node 0's end of its connections to the agents of the other nodes (agent.py).

All of them join, are heard of every BEAT_SECONDS, and end together: when one is lost, when a rank
on it ends, or when node 0 does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mamba_eagle import __version__
from mamba_eagle.config import EngineConfig, ServerConfig, engine_part
from mamba_eagle.core import shown
from mamba_eagle.message import BEAT_SECONDS, Heartbeat, Message
from mamba_eagle.message.link import CurvePair, Guard, Link, keep_watch, listen, write_link
from mamba_eagle.message.nodes import (
    SILENCE_SECONDS,
    FirstBeat,
    Join,
    NodeBeat,
    NodeFailed,
    Refused,
    StopAsked,
    StopNode,
    ToFirstNode,
    Welcome,
    WriteStacks,
    decode_to_first,
    encode,
)
from mamba_eagle.server.checkpoints import fingerprint
from mamba_eagle.server.node_settings import (
    ClusterKeys,
    cluster_key,
    init_address_in_numbers,
    loopback_warning,
)
from mamba_eagle.server.nodes import ENDED, LOST_NODE, Fault, Nodes, OnFault, fault

# When a process ends by itself, others may be to blame: those it exchanged tensors with. For so
# long reports of them are waited for, and lost nodes found.
JUDGE_SECONDS = 2.0
GOODBYE_MS = 500  # time for StopNode to reach the others
MAX_MESSAGE = 2**20  # bytes
FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
LOG_SECONDS = 10.0  # between two warnings of connections that fail

log = logging.getLogger("mamba_eagle.server")


@dataclass
class Member:
    """A node that has joined."""

    node_rank: int
    name: str  # of the machine
    identity: bytes  # of its connection
    silence: float = 0.0  # seconds since it was last heard of

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.name})"


class OtherNodes(Nodes):
    """Lives on the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        given: EngineConfig,
        context: zmq.Context[Any],
        socket_dir: str,
        on_fault: OnFault,
        on_stop: Callable[[str], None],
    ) -> None:
        """Writes the link of this node's processes to ``socket_dir``.

        Args:
            config: resolved.
            given: the flags as they were given.
            on_stop: is told that a node was told to stop.

        Raises: ConfigError
        """
        super().__init__(on_fault)
        self.config, self.given, self.on_stop = config, given, on_stop
        self.address = init_address_in_numbers(config)
        self.keys = ClusterKeys.derive(cluster_key(config))
        self.fingerprint = fingerprint(config)
        self.session, self.ranks_pair = CurvePair.new(), CurvePair.new()
        link = Link(
            host=self.address.host,
            port=self.address.port,
            is_first=True,
            own=self.session,
            peer=self.ranks_pair.public,
            ranks_per_node=config.ranks_per_node,
        )
        write_link(socket_dir, link)
        self.members: dict[int, Member] = {}  # by node rank
        self.faults: list[Fault] = []  # until one is chosen
        self.failed_handshakes = 0
        self.warned_at = -LOG_SECONDS
        self.stopped = False
        self.beats: deque[Heartbeat] = deque(maxlen=1000)  # nobody takes them before all is ready
        self.tasks: list[asyncio.Task[None]] = []
        self.guard = Guard(context, self.keys.others.public)
        shadow = zmq.asyncio.Context.shadow(context.underlying)
        self.socket = shadow.socket(zmq.ROUTER)
        self.socket.linger = GOODBYE_MS
        self.socket.router_mandatory = True  # so that sending to a lost node is an error
        keep_watch(self.socket)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self.monitor = self.socket.get_monitor_socket(FAILED)

    def start(self) -> None:
        try:
            listen(self.socket, *self.address, self.keys.first)
        except zmq.ZMQError as error:
            raise OSError(
                error.errno,
                f"cannot listen on {self.address.host} port {self.address.port}: {error.strerror}; "
                "--dist-init-addr must be a free port of an address of node 0",
            ) from None
        if warning := loopback_warning(self.config):
            log.warning(warning)
        for work in (self._listen(), self._watch(), self._watch_handshakes()):
            self._run(work)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        self.tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what connects the nodes failed", exc_info=error)
            self.on_fault(Fault(LOST_NODE, f"what connects the nodes failed: {error!r}", 1))

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.config.nnodes) if rank not in self.members]

    # ── what agents say ──────────────────────────────────────────────────────────────────────

    async def _listen(self) -> None:
        while True:
            identity, *content = await self.socket.recv_multipart()
            try:
                message = decode_to_first(content[-1] if content else b"")
            except msgspec.DecodeError:
                # It has the key: another version of this package.
                self._send(identity, Refused(reason="sends what this version does not understand"))
                continue
            if isinstance(message, Join):
                self._join(identity, message)
                continue
            for member in self.members.values():
                if member.identity == identity:
                    member.silence = 0.0
                    self._heard(member, message)

    def _heard(self, member: Member, message: ToFirstNode) -> None:
        match message:
            case NodeBeat():
                each = self.config.ranks_per_node
                first = member.node_rank * each
                self.beats += [b for b in message.beats if first <= b.rank < first + each]
            case NodeFailed():
                self.judge(fault(f"{member}: {message.text[:500]}", message.code))
            case StopAsked():
                self.on_stop(f"{member} was told to stop")

    def _join(self, identity: bytes, join: Join) -> None:
        if any(member.identity == identity for member in self.members.values()):
            return  # it was not sure whether the first one had come
        if reason := self._refusal(join):
            log.warning("%s may not join: %s", shown(join.name), reason)
            self._send(identity, Refused(reason=reason))
            return
        member = Member(join.node_rank, shown(join.name)[1:-1], identity)
        self.members[join.node_rank] = member
        log.info("%s has joined", member)
        self._send(
            identity,
            Welcome(
                given=self.given,
                resolved=engine_part(self.config),
                fingerprint=self.fingerprint,
                server_key=self.session.public,
                own=self.ranks_pair,
            ),
        )

    def _refusal(self, join: Join) -> str:
        config = self.config
        if self.stopped:
            return "node 0 is ending"
        if join.version != __version__:
            return f"it has mamba-eagle {shown(join.version)}, and node 0 {__version__}"
        if join.nnodes != config.nnodes:
            return f"it has --nnodes {join.nnodes}, and node 0 --nnodes {config.nnodes}"
        if not 0 < join.node_rank < config.nnodes:
            return f"--node-rank {join.node_rank}: must be 1 to {config.nnodes - 1}"
        if known := self.members.get(join.node_rank):
            return (
                f"{known} has joined before; give each node a --node-rank of its own, and start "
                "node 0 again after a node was lost"
            )
        return ""

    def _send(self, identity: bytes, message: Message) -> bool:
        """Without waiting. False if the connection is gone."""
        parts = [identity, encode(message)]
        sent = self.socket.send_multipart(parts, flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        error = sent.exception()  # it is done at once
        return not (isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH)

    def _send_all(self, message: Message) -> None:
        for member in self.members.values():
            if not self._send(member.identity, message):
                self.on_fault(lost(member))

    # ── who is there ─────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        last, waited = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            # For most of a longer gap this process was suspended, and perhaps the others with it.
            seconds = min(now - last, 2 * BEAT_SECONDS)
            last, waited = now, waited + seconds
            self._send_all(FirstBeat())
            for member in self.members.values():
                member.silence += seconds
            self._look(waited)

    def _look(self, waited: float) -> None:
        """waited: seconds since the start."""
        for member in self.members.values():
            if member.silence >= SILENCE_SECONDS:
                text = f"the agent of {member} has not answered for {SILENCE_SECONDS:g} s"
                self.on_fault(Fault(LOST_NODE, text, 1))
        if self.missing and waited >= self.config.dist_timeout:
            self.on_fault(Fault(LOST_NODE, self._absence(), 1))

    def _absence(self) -> str:
        nodes = " and ".join(f"node {rank}" for rank in self.missing)
        have = "has" if len(self.missing) == 1 else "have"
        text = (
            f"{nodes} {have} not joined at {self.config.dist_init_addr} within --dist-timeout "
            f"{self.config.dist_timeout} s"
        )
        if self.failed_handshakes:
            text += (
                f"; {self.failed_handshakes} connections failed, as they do with another "
                "--cluster-key"
            )
        return text

    async def _watch_handshakes(self) -> None:
        while True:
            await self.monitor.recv_multipart()
            self.failed_handshakes += 1
            if time.monotonic() - self.warned_at >= LOG_SECONDS:
                self.warned_at = time.monotonic()
                log.warning(
                    "somebody connected to %s with another --cluster-key, or is no node of this "
                    "version",
                    self.config.dist_init_addr,
                )

    def judge(self, found: Fault) -> None:
        """A process has ended, here or elsewhere. One that was killed is the reason for others; one
        that ended by itself may be the consequence of what is yet to be heard of."""
        self.faults.append(found)
        if found.weight < ENDED:
            self.on_fault(found)
        elif len(self.faults) == 1:
            self._run(self._judge_later())

    async def _judge_later(self) -> None:
        await asyncio.sleep(JUDGE_SECONDS)
        self.on_fault(min(self.faults, key=lambda one: one.weight))

    # ── what the launcher wants ──────────────────────────────────────────────────────────────

    def take_beats(self) -> list[Heartbeat]:
        beats = list(self.beats)
        self.beats.clear()
        return beats

    def write_stacks(self) -> None:
        self._send_all(WriteStacks())

    def stop(self, code: int, text: str) -> None:
        if not self.stopped:
            self.stopped = True
            self._send_all(StopNode(code=code, text=text))

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self.guard.stop()


def lost(member: Member) -> Fault:
    text = f"the connection to {member} was lost: its agent was killed, or it cannot be reached"
    return Fault(LOST_NODE, text, 1)
