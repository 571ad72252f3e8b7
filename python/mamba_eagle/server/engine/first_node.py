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
from typing import Any

import msgspec
import zmq
import zmq.asyncio

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
from mamba_eagle.server.engine.checkpoints import fingerprint
from mamba_eagle.server.engine.members import Member, Members
from mamba_eagle.server.engine.node_settings import (
    ClusterKeys,
    cluster_key,
    init_address_in_numbers,
    loopback_warning,
)
from mamba_eagle.server.engine.nodes import ENDED, LOST_NODE, Fault, Nodes, OnFault, fault

# When a process ends by itself, another may be the cause, one that it exchanged tensors with: wait
# this long for that one's report before naming a fault.
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


class Handshakes:
    """Connections that fail, as they do with another --cluster-key."""

    def __init__(self, socket: zmq.asyncio.Socket, address: str) -> None:
        """address: for the log."""
        self.address = address
        self.failed = 0
        self._socket, self._monitor = socket, socket.get_monitor_socket(FAILED)

    async def watch(self) -> None:
        warned_at = -LOG_SECONDS
        while True:
            await self._monitor.recv_multipart()
            self.failed += 1
            if time.monotonic() - warned_at >= LOG_SECONDS:
                warned_at = time.monotonic()
                log.warning(
                    "connection to %s refused: wrong --cluster-key, or another version",
                    self.address,
                )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()


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
            on_stop: called when a node was asked to stop.

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
        self.members = Members(config)
        self.faults: list[Fault] = []  # until one is chosen
        self.stopped = False
        self.beats: deque[Heartbeat] = deque(maxlen=1000)  # not taken before all is ready
        self.tasks: list[asyncio.Task[None]] = []
        self.guard = Guard(context, self.keys.others.public)
        shadow = zmq.asyncio.Context.shadow(context.underlying)
        self.socket = shadow.socket(zmq.ROUTER)
        self.socket.linger = GOODBYE_MS
        self.socket.router_mandatory = True  # so that sending to a lost node is an error
        keep_watch(self.socket)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self.handshakes = Handshakes(self.socket, config.dist_init_addr)

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
        for work in (self._listen(), self._watch(), self.handshakes.watch()):
            self._run(work)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        self.tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what connects the nodes failed", exc_info=error)
            self.on_fault(Fault(LOST_NODE, f"what connects the nodes failed: {error!r}", 1))

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
            if member := self.members.by_connection(identity):
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
                self.on_stop(f"{member} was asked to stop")

    def _join(self, identity: bytes, join: Join) -> None:
        if self.members.by_connection(identity):
            return  # it was not sure whether the first one had come
        if reason := "node 0 is ending" if self.stopped else self.members.refusal(join):
            log.warning("%s may not join: %s", shown(join.name), reason)
            self._send(identity, Refused(reason=reason))
            return
        log.info("%s has joined", self.members.add(identity, join))
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

    def _send(self, identity: bytes, message: Message) -> bool:
        """Without waiting. False if the connection is gone."""
        parts = [identity, encode(message)]
        sent = self.socket.send_multipart(parts, flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        error = sent.exception()  # it is done at once
        return not (isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH)

    def _send_all(self, message: Message) -> None:
        for member in self.members:
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
            for member in self.members:
                member.silence += seconds
            self._look(waited)

    def _look(self, waited: float) -> None:
        """waited: seconds since the start."""
        for member in self.members:
            if member.silence >= SILENCE_SECONDS:
                text = f"the agent of {member} has not answered for {SILENCE_SECONDS:g} s"
                self.on_fault(Fault(LOST_NODE, text, 1))
        if self.members.missing and waited >= self.config.dist_timeout:
            self.on_fault(Fault(LOST_NODE, self.members.absence(self.handshakes.failed), 1))

    def judge(self, found: Fault) -> None:
        """A process has ended, here or elsewhere. One that was killed is the reason for others; one
        that ended by itself may be the result of a failure that was not reported yet."""
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
        self.handshakes.close()
        self.socket.close()
        self.guard.stop()


def lost(member: Member) -> Fault:
    text = f"the connection to {member} was lost: its agent was killed, or it cannot be reached"
    return Fault(LOST_NODE, text, 1)
