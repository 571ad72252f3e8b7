"""The agent of a node other than the first: joins node 0, runs this node's ranks, ends with it.

dial node 0 ─▶ Welcome ─▶ find checkpoints ─▶ start ranks ─▶ beats ─▶ StopNode, or node 0 is lost
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mamba_eagle import __version__, logs
from mamba_eagle.config import ConfigError, EngineConfig, ServerConfig, engine_part, flag_of
from mamba_eagle.core import shown
from mamba_eagle.message import BEAT_SECONDS, Message, ToWatchdog
from mamba_eagle.message.channel import Receiver, remove_socket_dir
from mamba_eagle.message.lifetime import role_name
from mamba_eagle.message.link import Link, call, keep_watch, write_link
from mamba_eagle.message.nodes import (
    SILENCE_SECONDS,
    FirstBeat,
    Join,
    NodeBeat,
    NodeFailed,
    Refused,
    StopAsked,
    StopNode,
    Welcome,
    WriteStacks,
    decode_to_agent,
    encode,
)
from mamba_eagle.message.ranks import RANK_ENVIRONMENT
from mamba_eagle.resolve import resolve
from mamba_eagle.server.engine.checkpoints import fingerprint
from mamba_eagle.server.engine.children import Child, end_children, engine_command
from mamba_eagle.server.engine.first_node import FAILED
from mamba_eagle.server.engine.launch import Ending
from mamba_eagle.server.engine.node_settings import (
    ClusterKeys,
    cluster_key,
    init_address_in_numbers,
    node_problems,
)
from mamba_eagle.server.engine.socket_dir import new_socket_dir

GOODBYE_SECONDS = 0.5  # for what node 0 sent before its connection was lost
ANSWER_SECONDS = 10.0  # for node 0 to end after a rank of this node has
FOLDERS = ("model_path", "tokenizer_path", "speculative_draft_model_path")

log = logging.getLogger("mamba_eagle.agent")


def launch_agent(config: ServerConfig) -> Ending:
    """Runs this node's share until node 0 ends, or is lost.

    Raises: ConfigError with every setting that cannot work.
    """
    if problems := node_problems(config):
        raise ConfigError(problems)
    logs.set_up(config.log_level, config.log_format, f"node{config.node_rank}")
    socket_dir = new_socket_dir()
    try:
        return asyncio.run(Agent(config, socket_dir).run())
    finally:
        remove_socket_dir(socket_dir)


class Agent:
    """Lives on an event loop."""

    def __init__(self, config: ServerConfig, socket_dir: str) -> None:
        self.config, self.socket_dir = config, socket_dir
        self.address = init_address_in_numbers(config)
        self.keys = ClusterKeys.derive(cluster_key(config))
        self.children: list[Child] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.joined = False
        self.told_to_stop = False
        self.silence = 0.0  # seconds since node 0 was last heard of, once it has let this node in

    @property
    def place(self) -> str:
        return f"node 0 at {self.config.dist_init_addr}"

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        self.ending: asyncio.Future[Ending] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        context = zmq.asyncio.Context(io_threads=1)
        plain: zmq.Context[Any] = zmq.Context.shadow(context.underlying)
        self.heartbeats: Receiver[ToWatchdog] = Receiver(plain, self.socket_dir, "to_watchdog")
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = int(GOODBYE_SECONDS * 1000)
        self.socket.reconnect_ivl_max = 2000
        keep_watch(self.socket)
        monitor = self.socket.get_monitor_socket(FAILED | zmq.Event.DISCONNECTED)
        call(self.socket, *self.address, self.keys.others, self.keys.first.public)
        logs.say(f"agent process: pid {os.getpid()}")
        self._join()
        for work in (self._listen(), self._watch(), self._watch_connection(monitor)):
            self._start(work)
        try:
            return await self.ending
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            for task in self.tasks:
                task.cancel()
            await asyncio.to_thread(end_children, self.children)
            self.socket.disable_monitor()
            monitor.close()
            self.socket.close()
            self.heartbeats.close()
            context.term()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        self.tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the agent failed", exc_info=error)
            self._end(1, f"the agent of node {self.config.node_rank} failed: {error!r}")

    def _send(self, message: Message) -> None:
        self.socket.send(encode(message))

    def _end(self, code: int, text: str) -> None:
        """The first one counts."""
        if not self.ending.done():
            self.ending.set_result(Ending(code, text))

    def _signalled(self) -> None:
        """The first signal asks node 0 to finish what is open and to end; the second does not
        wait for that."""
        if self.joined and not self.told_to_stop:
            self.told_to_stop = True
            self._send(StopAsked())
        else:
            self._end(0, "")

    # ── node 0 ───────────────────────────────────────────────────────────────────────────────

    def _join(self) -> None:
        self._send(
            Join(
                version=__version__,
                node_rank=self.config.node_rank,
                nnodes=self.config.nnodes,
                name=socket.gethostname(),
            )
        )

    async def _listen(self) -> None:
        while True:
            content = await self.socket.recv()
            self.silence = 0.0
            try:
                message = decode_to_agent(content)
            except msgspec.DecodeError:
                self._end(1, f"{self.place} has another version of mamba-eagle than {__version__}")
                return
            match message:
                case Welcome():
                    self.joined = True
                    logs.say(f"Node {self.config.node_rank} has joined {self.place}")
                    self._start(self._start_ranks(message))
                case Refused():
                    self._end(1, f"{self.place} does not let this node join: {message.reason}")
                case WriteStacks():
                    for child in self.children:
                        child.dump_stacks()
                case StopNode():
                    ended = f"node 0 has ended: {message.text}" if message.code else ""
                    self._end(1 if message.code else 0, ended)
                case FirstBeat():
                    pass

    async def _watch(self) -> None:
        """Sends beats, and ends when node 0 sends none."""
        last, waited = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            seconds = min(now - last, 2 * BEAT_SECONDS)  # the rest of a gap: suspended
            last, waited = now, waited + seconds
            if not self.joined:
                if waited >= self.config.dist_timeout:
                    limit = f"--dist-timeout {self.config.dist_timeout} s"
                    self._end(1, f"{self.place} has not answered within {limit}")
                continue
            self.silence += seconds
            if self.silence >= SILENCE_SECONDS:
                self._end(1, f"{self.place} has not answered for {SILENCE_SECONDS:g} s")
            beats = []
            while (beat := self.heartbeats.receive(timeout_ms=0)) is not None:
                beats.append(beat)
            self._send(NodeBeat(beats=beats))

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = int.from_bytes((await monitor.recv_multipart())[0][:2], "little")
            if event & FAILED:
                self._end(
                    1,
                    f"{self.place} broke off the handshake: its --cluster-key is another one, or "
                    "something else listens there",
                )
            elif self.joined:
                await asyncio.sleep(GOODBYE_SECONDS)
                self._end(1, f"the connection to {self.place} was lost")
            else:
                self._join()  # it may have gone with the question

    # ── ranks ────────────────────────────────────────────────────────────────────────────────

    async def _start_ranks(self, welcome: Welcome) -> None:
        if differing := differences(engine_part(self.config), welcome.given):
            log.warning("node 0's flags count: %s", "; ".join(differing))
        try:
            # may load from Hugging Face, for minutes
            config = await asyncio.to_thread(same_settings, welcome)
        except ConfigError as error:
            self._fail("; ".join(error.problems), 2)
            return
        link = Link(
            host=self.address.host,
            port=self.address.port,
            is_first=False,
            own=welcome.own,
            peer=welcome.server_key,
            ranks_per_node=config.ranks_per_node,
        )
        write_link(self.socket_dir, link)
        config_file = Path(self.socket_dir, "config.json")
        config_file.write_text(json.dumps(dataclasses.asdict(config)))
        first = self.config.node_rank * config.ranks_per_node
        for rank in range(first, first + config.ranks_per_node):
            command = engine_command("runner", self.socket_dir, str(config_file), rank)
            role = role_name("runner", rank)
            try:
                child = Child(role, command, self._child_ended, RANK_ENVIRONMENT)
            except OSError as error:
                self._fail(f"cannot start the {role} process: {error.strerror}", 1)
                return
            self.children.append(child)
            logs.say(f"{role} process: pid {child.pid}")

    def _child_ended(self, child: Child) -> None:
        if not self.ending.done():
            self._fail(child.how_it_ended(), child.process.returncode)

    def _fail(self, text: str, code: int) -> None:
        """Node 0 decides what the reason was, and ends all nodes."""
        log.error("%s", text)
        self._send(NodeFailed(text=text, code=code))
        loop = asyncio.get_running_loop()
        loop.call_later(ANSWER_SECONDS, self._end, 1, text)


def in_flags(value: object) -> str:
    return "auto" if value is None else shown(value)


def differences(own: EngineConfig, other: EngineConfig) -> list[str]:
    """The settings in which this node's flags differ from node 0's."""
    return [
        f"{flag_of(spec.name)} {in_flags(theirs)} instead of {in_flags(mine)}"
        for spec in dataclasses.fields(EngineConfig)
        if (mine := getattr(own, spec.name)) != (theirs := getattr(other, spec.name))
    ]


def same_settings(welcome: Welcome) -> EngineConfig:
    """Node 0's settings with the folders that names have on this machine.

    Raises: ConfigError if that is not what node 0 has.
    """
    config = resolve(welcome.given)
    folders = {name: getattr(welcome.resolved, name) for name in FOLDERS}
    found = differences(dataclasses.replace(config, **folders), welcome.resolved)
    if found:
        raise ConfigError([f"node 0 has {'; '.join(found)}: are its files others than here?"])
    with contextlib.suppress(OSError):  # what cannot be read, the ranks report
        if fingerprint(config) != welcome.fingerprint:
            raise ConfigError(
                [
                    f"the checkpoint in {config.model_path} (or its drafter's) is not node 0's: "
                    "config.json, or names or sizes of the weights differ"
                ]
            )
    return config
