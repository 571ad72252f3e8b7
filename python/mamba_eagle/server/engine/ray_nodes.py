"""Ranks on other machines: actors of one Ray placement group, a bundle for each machine.

    server process, a driver ── start, look, write_stacks, stop ──▶ NodeRanks, on another node
       │ children                                                      │ children
    scheduler, runner ◀──── plans and results (message/link.py) ────▶ runner2, runner3

Ray places the actors, starts them, and finds out that a machine or an actor is lost. The first
bundle holds the GPUs of this machine's ranks, which are children of the server process as without
Ray.
"""

import asyncio
import contextlib
import logging
import random
import signal
import socket
from collections.abc import Coroutine
from typing import Any, NamedTuple

import ray
import zmq
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mamba_eagle import __version__
from mamba_eagle.backend.forecast import on_cpu
from mamba_eagle.config import ConfigError, EngineConfig, ServerConfig, engine_part
from mamba_eagle.message import BEAT_SECONDS, Heartbeat, ToWatchdog
from mamba_eagle.message.channel import Receiver, new_socket_dir, remove_socket_dir
from mamba_eagle.message.link import FIXED_PORTS, CurvePair, Link, write_link
from mamba_eagle.server.engine.checkpoints import fingerprint, same_settings
from mamba_eagle.server.engine.children import Child, end_children, engine_child, write_settings
from mamba_eagle.server.engine.nodes import ENDED, LOST_NODE, Fault, Nodes, OnFault, fault

# An event loop may stand still for long while several processes load models on few cores.
SILENCE_SECONDS = 30.0
# When a process ends by itself, another may be the cause, one that it exchanged tensors with: wait
# this long for that one's report before naming a fault.
JUDGE_SECONDS = 2.0
STOP_SECONDS = 5.0  # for the ranks of other nodes to end

log = logging.getLogger("mamba_eagle.server")


class NodeStart(NamedTuple):
    """What a node needs in order to run its ranks."""

    node: int
    version: str
    given: EngineConfig  # the flags; each node finds the folders of names for itself
    resolved: EngineConfig  # what the first node makes of them
    fingerprint: str  # of the checkpoints
    link: Link


class Seen(NamedTuple):
    """What became known of a node since the last look."""

    beats: list[Heartbeat]
    fault: Fault | None


class NodeRanks:
    """The actor of one node. Its ranks are its children, which the kernel ends with it."""

    def __init__(self) -> None:
        self.socket_dir = new_socket_dir()
        context = zmq.Context(io_threads=1)
        self.heartbeats: Receiver[ToWatchdog] = Receiver(context, self.socket_dir, "to_watchdog")
        self.children: list[Child] = []
        self.fault: Fault | None = None

    async def start(self, start: NodeStart) -> str | Fault:
        """The machine's name, or why its ranks cannot run."""
        if start.version != __version__:
            return fault(f"has mamba-eagle {__version__}, and node 0 {start.version}", 2)
        try:
            # may load from Hugging Face, for minutes
            config = await asyncio.to_thread(
                same_settings, start.given, start.resolved, start.fingerprint
            )
            self._start_ranks(config, start)
        except ConfigError as error:
            return fault("; ".join(error.problems), 2)
        except OSError as error:
            return fault(f"cannot start its processes: {error.strerror}", 1)
        return socket.gethostname()

    def _start_ranks(self, config: EngineConfig, start: NodeStart) -> None:
        write_link(self.socket_dir, start.link)
        write_settings(self.socket_dir, config)
        first = start.node * config.ranks_per_node
        for rank in range(first, first + config.ranks_per_node):
            child = engine_child("runner", rank, self.socket_dir, self._ended)
            self.children.append(child)
            print(f"{child.role} process: pid {child.pid}", flush=True)

    def _ended(self, child: Child) -> None:
        """The first one that was killed is the reason for others."""
        found = fault(child.how_it_ended(), child.process.returncode)
        self.fault = min(self.fault or found, found, key=lambda one: one.weight)

    async def look(self) -> Seen:
        beats = []
        while (beat := self.heartbeats.receive(timeout_ms=0)) is not None:
            beats.append(beat)
        return Seen(beats, self.fault)

    async def write_stacks(self) -> None:
        for child in self.children:
            child.dump_stacks()

    async def stop(self) -> None:
        await asyncio.to_thread(end_children, self.children)
        remove_socket_dir(self.socket_dir)


class RayNodes(Nodes):
    """The other nodes, as the server process sees them. Lives on its event loop."""

    def __init__(
        self, config: ServerConfig, given: EngineConfig, socket_dir: str, on_fault: OnFault
    ) -> None:
        """given: the settings before they were resolved."""
        super().__init__(on_fault)
        self.config, self.given, self.socket_dir = config, given, socket_dir
        self.group: PlacementGroup | None = None
        self.actors: list[Any] = []
        self.work: list[asyncio.Task[None]] = []
        self.faults: list[Fault] = []
        self.beats: list[Heartbeat] = []
        self.stopping: list[Any] = []

    async def start(self) -> None:
        try:
            # In a thread: in the main one it would replace the handler of SIGTERM.
            await asyncio.to_thread(ray.init, "auto", logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            text = (
                f"--nnodes {self.config.nnodes} needs a Ray cluster, and this machine in it "
                f"({error}): ray start --head here, and ray start --address on the others"
            )
            self.on_fault(Fault(LOST_NODE, text, 2))
            return
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray's C++ aborts at SIGTERM
            signal.signal(number, signal.getsignal(number))
        host = ray.util.get_node_ip_address()
        own, theirs = CurvePair.new(), CurvePair.new()
        remote_ranks = self.config.num_ranks - self.config.ranks_per_node
        link = Link(
            host=host,
            port=free_ports(host, FIXED_PORTS + remote_ranks),
            is_first=True,
            own=own,
            peer=theirs.public,
            ranks_per_node=self.config.ranks_per_node,
        )
        write_link(self.socket_dir, link)
        self._begin(self._place(link.for_others(theirs)))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        self.work.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the watch over other nodes failed", exc_info=error)
            self.on_fault(fault(f"the watch over other nodes failed: {error!r}", 1))

    async def _place(self, link: Link) -> None:
        """Takes a share of each machine, and starts the actors there."""
        each = {"CPU": 1.0} if on_cpu(self.config) else {"GPU": float(self.config.ranks_per_node)}
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        nodes = self.config.nnodes
        self.group = placement_group(
            [each] * nodes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[here, *({} for _ in range(nodes - 1))],
        )
        try:
            await asyncio.wait_for(_reply(self.group.ready()), self.config.dist_timeout)
        except asyncio.TimeoutError:
            text = (
                f"Ray found no {nodes} machines, this one among them, with {each} free on each "
                f"within --dist-timeout {self.config.dist_timeout} s: see ray status"
            )
            self.on_fault(Fault(LOST_NODE, text, 1))
            return
        start = NodeStart(
            0, __version__, self.given, engine_part(self.config), fingerprint(self.config), link
        )
        for node in range(1, nodes):
            place = PlacementGroupSchedulingStrategy(self.group, node)
            actor = ray.remote(NodeRanks).options(
                num_cpus=each.get("CPU", 0.0),
                num_gpus=each.get("GPU", 0.0),
                scheduling_strategy=place,
            )
            self.actors.append(actor.remote())
            self._begin(self._watch(self.actors[-1], start._replace(node=node)))

    async def _watch(self, actor: Any, start: NodeStart) -> None:
        """Starts the ranks of a node, and asks for news of them until something has ended."""
        name = f"node {start.node}"
        try:
            started = await _reply(actor.start.remote(start))
            if isinstance(started, Fault):
                self.on_fault(started._replace(text=f"{name}: {started.text}"))
                return
            name = f"{name} ({started})"
            while (seen := await _within(actor.look.remote(), SILENCE_SECONDS)) is not None:
                self.beats += seen.beats
                if seen.fault is not None:
                    self.judge(seen.fault._replace(text=f"{name}: {seen.fault.text}"))
                    return
                await asyncio.sleep(BEAT_SECONDS)
            text = f"the actor of {name} has not answered for {SILENCE_SECONDS:g} s"
        except RayError as error:
            log.debug("of %s", name, exc_info=error)
            text = f"{name} was lost: its Ray actor was killed, or it cannot be reached"
        self.on_fault(Fault(LOST_NODE, text, 1))

    def judge(self, found: Fault) -> None:
        """A process has ended, here or elsewhere. One that was killed is the reason for others; one
        that ended by itself may be the result of a failure that was not reported yet."""
        self.faults.append(found)
        if found.weight < ENDED:
            self.on_fault(found)
        elif len(self.faults) == 1:
            self._begin(self._judge_later())

    async def _judge_later(self) -> None:
        await asyncio.sleep(JUDGE_SECONDS)
        self.on_fault(min(self.faults, key=lambda one: one.weight))

    def take_beats(self) -> list[Heartbeat]:
        beats, self.beats = self.beats, []
        return beats

    def write_stacks(self) -> None:
        for actor in self.actors:
            actor.write_stacks.remote()

    def stop(self) -> None:
        for task in self.work:
            task.cancel()
        self.stopping = [actor.stop.remote() for actor in self.actors]

    async def close(self) -> None:
        for stopping in self.stopping:
            with contextlib.suppress(RayError):  # it is lost, and its ranks with it
                await _within(stopping, STOP_SECONDS)
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        if ray.is_initialized():
            if self.group is not None:
                remove_placement_group(self.group)  # and the actors in it
            ray.shutdown()


async def _reply(reference: Any) -> Any:
    """Raises: RayError"""
    return await reference


async def _within(reference: Any, seconds: float) -> Any | None:
    """The reply of an actor; None if there is none in time. Counted in beats: while this process
    was suspended, no time passed.

    Raises: RayError
    """
    reply = asyncio.ensure_future(_reply(reference))
    for _ in range(int(seconds / BEAT_SECONDS)):
        done, _ = await asyncio.wait({reply}, timeout=BEAT_SECONDS)
        if done:
            return reply.result()
    reply.cancel()
    return None


def free_ports(host: str, count: int) -> int:
    """The first of ``count`` successive ports that are free, below those that the kernel chooses.

    Raises: OSError if a hundred trials find none.
    """
    problem: OSError | None = None
    for first in random.sample(range(20_000, 32_000), 100):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server((host, port)))
                return first
            except OSError as error:
                problem = error
    raise OSError(f"no {count} successive ports of {host} are free") from problem
