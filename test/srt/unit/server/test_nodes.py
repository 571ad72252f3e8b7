"""Node 0 and agents in one event loop, over real sockets; ranks are processes that only sleep."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from ports import free_ports

from mamba_eagle.config import EngineConfig, ServerConfig, engine_part
from mamba_eagle.message import Heartbeat, Message
from mamba_eagle.message.link import call, read_link
from mamba_eagle.message.nodes import Join, NodeBeat, NodeFailed, Refused, decode_to_agent, encode
from mamba_eagle.resolve import resolve
from mamba_eagle.server.engine import agent, first_node, members
from mamba_eagle.server.engine.agent import Agent
from mamba_eagle.server.engine.first_node import OtherNodes
from mamba_eagle.server.engine.launch import Ending
from mamba_eagle.server.engine.node_settings import ClusterKeys
from mamba_eagle.server.engine.nodes import Fault, fault

KEY = "a key that is long enough"
HOST = "127.0.0.2"  # so that what listens on other addresses shows
WAIT_SECONDS = 120.0  # only what hangs takes so long


def settings(port: int, **changes) -> ServerConfig:
    values = {
        "device": "cpu",
        "tp_size": 4,
        "nnodes": 2,
        "dist_init_addr": f"{HOST}:{port}",
        "cluster_key": KEY,
        "log_level": "warning",
    }
    return ServerConfig(**{**values, **changes})


class FirstNode:
    """Node 0 without an engine of its own."""

    def __init__(self, folder: Path, **changes) -> None:
        self.config = settings(free_ports(8), **changes)
        self.folder = str(folder)
        self.faults: list[Fault] = []
        self.stops: list[str] = []
        self.context = zmq.Context()
        self.nodes = OtherNodes(
            resolve(self.config),
            engine_part(self.config),
            self.context,
            self.folder,
            self.faults.append,
            self.stops.append,
        )
        self.nodes.start()

    def wait_no_longer(self) -> None:
        """As if --dist-timeout, here of one second, were over: how long a node takes to join
        depends on the machine."""
        self.nodes.config = self.nodes.members.config = dataclasses.replace(
            self.nodes.config, dist_timeout=1
        )

    def close(self) -> None:
        """Without a word to the agents, as the kernel does for a process that was killed."""
        if not self.context.closed:
            self.nodes.close()
            self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def first_node_in(folder: Path, **changes) -> AsyncIterator[FirstNode]:
    node = FirstNode(folder, **changes)
    try:
        yield node
    finally:
        node.close()


@contextlib.asynccontextmanager
async def agent_of(node: FirstNode, **changes) -> AsyncIterator[tuple[Agent, asyncio.Task[Ending]]]:
    """changes: of its flags."""
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(node.config, **{"node_rank": 1, **changes})
        made = Agent(config, folder)
        task = asyncio.ensure_future(made.run())
        try:
            yield made, task
        finally:
            if not task.done():
                made._end(0, "")
            await task


async def until(reached: Callable[[], object]) -> None:
    async def look() -> None:
        while not reached():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), WAIT_SECONDS)


@pytest.fixture(autouse=True)
def signals_as_they_are() -> Iterator[None]:
    """An agent that has ended ignores them, and so would every later test and its processes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that only sleep, and beats without long pauses."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(agent, "engine_command", lambda *_: sleep)
    for module in (agent, first_node):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(agent, "GOODBYE_SECONDS", 0.1)
    monkeypatch.setattr(first_node, "JUDGE_SECONDS", 0.5)
    monkeypatch.delenv("MAMBA_EAGLE_CLUSTER_KEY", raising=False)


def test_an_agent_runs_its_share_with_node_zeros_settings(tmp_path, caplog, capfd) -> None:
    async def test() -> None:
        changes = {"speculative_num_steps": 3, "tp_size": 1, "dist_timeout": 599}
        async with first_node_in(tmp_path) as node, agent_of(node, **changes) as (other, task):
            await until(lambda: len(other.children) == 2)
            other.config = dataclasses.replace(other.config, dist_timeout=0)
            found = msgspec.json.decode(
                Path(other.socket_dir, "config.json").read_bytes(), type=EngineConfig
            )
            assert found == engine_part(resolve(node.config))
            link, own = read_link(other.socket_dir), read_link(node.folder)
            assert link is not None and own is not None
            assert (link.peer, own.peer) == (own.own.public, link.own.public)
            mode = Path(other.socket_dir, "link.json").stat().st_mode
            assert stat.S_IMODE(mode) == 0o600
            assert KEY not in str(list(Path(other.socket_dir).glob("*.json")))
            assert [child.role for child in other.children] == ["runner2", "runner3"]
            await asyncio.sleep(0.3)  # past --dist-timeout, which is over for it
            assert not node.faults  # once it has ended, its connection is lost
            node.nodes.stop(0, "")
            assert await task == Ending(0, "")
        assert all(child.process.returncode is not None for child in other.children)

    asyncio.run(test())
    assert "--speculative-num-steps auto instead of 3" in caplog.text
    assert "--tp-size 4 instead of 1" in caplog.text
    assert "dist-timeout" not in caplog.text
    assert capfd.readouterr().out.startswith("agent process: pid ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nnodes": 3, "tp_size": 6}, "--nnodes 3, and node 0 --nnodes 2"),
        ({"version": "0.0.1"}, 'mamba-eagle "0.0.1", and node 0 '),
        ({"twice": True}, "node 1 (me) has joined before; give each node a --node-rank of its own"),
    ],
    ids=["number", "version", "same-rank"],
)
def test_who_does_not_fit_may_not_join(tmp_path, monkeypatch, changes, reason) -> None:
    version, twice = changes.pop("version", ""), changes.pop("twice", False)
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    if version:
        monkeypatch.setattr(agent, "__version__", version)

    async def test() -> None:
        async with first_node_in(tmp_path) as node, contextlib.AsyncExitStack() as stack:
            if twice:
                first, _ = await stack.enter_async_context(agent_of(node))
                await until(lambda: first.joined)
            async with agent_of(node, **changes) as (_, task):
                ending = await asyncio.wait_for(task, WAIT_SECONDS)
            assert ending.code == 1 and "does not let this node join: " in ending.message
            assert reason in ending.message
            assert not node.faults
            assert not twice or first.joined

    asyncio.run(test())


def test_another_key_is_said_at_both_ends(tmp_path, caplog) -> None:
    async def test() -> None:
        async with first_node_in(tmp_path) as node:
            async with agent_of(node, cluster_key=KEY + "?") as (_, task):
                ending = await asyncio.wait_for(task, WAIT_SECONDS)
            assert ending.code == 1
            assert f"node 0 at {HOST}:" in ending.message and "--cluster-key" in ending.message
            await until(lambda: node.nodes.handshakes.failed)
            node.wait_no_longer()
            await until(lambda: node.faults)
            text = node.faults[0].text
            assert text.startswith("node 1 has not joined at") and "--dist-timeout 1 s" in text
            assert "connections failed" in text and "--cluster-key" in text

    asyncio.run(test())
    assert "wrong --cluster-key" in caplog.text


def test_absent_nodes_are_named(tmp_path) -> None:
    async def test() -> None:
        async with first_node_in(tmp_path, nnodes=4) as node:
            async with agent_of(node, node_rank=2):
                await until(lambda: node.nodes.members)
                node.wait_no_longer()
                await until(lambda: node.faults)
            assert node.faults[0].text.startswith("node 1 and node 3 have not joined at")

    asyncio.run(test())


def test_an_agent_does_not_wait_for_ever(tmp_path) -> None:
    async def test() -> Ending:
        with tempfile.TemporaryDirectory() as folder:
            return await Agent(settings(free_ports(8), node_rank=1, dist_timeout=1), folder).run()

    code, text = asyncio.run(test())
    assert code == 1 and "has not answered within --dist-timeout 1 s" in text


def test_a_killed_rank_is_named_and_not_those_that_waited_for_it(tmp_path, monkeypatch) -> None:
    """The runner of node 0 says first that it has ended, since its connection broke."""
    monkeypatch.setattr(first_node, "JUDGE_SECONDS", WAIT_SECONDS)

    async def test() -> None:
        async with first_node_in(tmp_path) as node, agent_of(node) as (other, task):
            await until(lambda: len(other.children) == 2)
            node.nodes.judge(fault("the runner process ended with exit code 1: gloo", 1))
            pid = other.children[1].pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: node.faults)
            found = node.faults[0]
            assert f"the runner3 process (pid {pid}) was killed by SIGKILL" in found.text
            assert found.text.startswith("node 1 (") and found.code == 1
            node.nodes.stop(found.code, found.text)
            ending = await task
            assert ending.code == 1 and found.text in ending.message

    asyncio.run(test())


def test_a_rank_that_ends_by_itself_is_named_if_nothing_else_was_wrong(tmp_path) -> None:
    async def test() -> None:
        async with first_node_in(tmp_path) as node, agent_of(node) as (other, _):
            await until(lambda: len(other.children) == 2)
            node.nodes.judge(fault("first", 3))
            node.nodes.judge(fault("second", 1))
            await until(lambda: node.faults)
            assert [(one.text, one.code) for one in node.faults] == [("first", 3)]

    asyncio.run(test())


def join(node_rank: int) -> Join:
    return Join(version=members.__version__, node_rank=node_rank, nnodes=2, name="box")


def member(node: FirstNode, context: zmq.Context) -> zmq.Socket:
    """An agent's socket that has joined as node 1, and does nothing by itself."""
    keys = ClusterKeys.derive(KEY)
    made = context.socket(zmq.DEALER)
    call(made, *node.nodes.address, keys.others, keys.first.public)
    made.send(encode(join(node_rank=1)))
    return made


def said_to(made: zmq.Socket) -> Message | None:
    try:
        return decode_to_agent(made.recv(zmq.NOBLOCK))
    except zmq.Again:
        return None


@pytest.mark.parametrize("closes", [True, False], ids=["killed", "hangs"])
def test_a_lost_node_is_the_reason_for_what_follows(tmp_path, monkeypatch, closes) -> None:
    """The runner of node 0 ends by itself when the other one's connections close."""
    if not closes:
        monkeypatch.setattr(first_node, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(first_node, "JUDGE_SECONDS", WAIT_SECONDS)

    async def test() -> str:
        context = zmq.Context()
        async with first_node_in(tmp_path) as node:
            made = member(node, context)
            await until(lambda: node.nodes.members)
            node.nodes.judge(fault("the runner process ended with exit code 1: gloo", 1))
            if closes:
                made.close(linger=0)
            await until(lambda: node.faults)
            made.close(linger=0)
        context.term()
        return node.faults[0].text

    said = "the connection to node 1 (box) was lost" if closes else "the agent of node 1 (box) has"
    assert asyncio.run(test()).startswith(said)


def test_beats_of_ranks_are_passed_on_and_only_of_its_own(tmp_path) -> None:
    async def test() -> None:
        context = zmq.Context()
        async with first_node_in(tmp_path) as node:
            made = member(node, context)
            await until(lambda: said_to(made))
            made.send(encode(join(node_rank=1)))  # again, which changes nothing
            beats = [Heartbeat(role="runner", rank=rank) for rank in range(5)]
            made.send(encode(NodeBeat(beats=beats)))
            await until(lambda: node.nodes.beats)
            assert [beat.rank for beat in node.nodes.take_beats()] == [2, 3]
            assert node.nodes.take_beats() == []
            assert not isinstance(said_to(made), Refused)
            made.send(b"\x93 not a message")
            await until(lambda: getattr(said_to(made), "reason", "").startswith("sends what"))
            made.send(encode(NodeFailed(text="x" * 5000, code=-9)))
            await until(lambda: node.faults)
            assert len(node.faults[0].text) < 600
            made.close(linger=0)
        context.term()

    asyncio.run(test())


def test_garbage_disturbs_nobody_and_other_addresses_are_closed(tmp_path) -> None:
    async def test() -> None:
        async with first_node_in(tmp_path) as node, agent_of(node) as (other, task):
            await until(lambda: len(other.children) == 2)
            port = node.nodes.address.port
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            connections = [socket.create_connection((HOST, port)) for _ in range(20)]
            for number, connection in enumerate(connections):
                with contextlib.suppress(OSError):
                    connection.sendall(os.urandom(100 * number))
            (mark,) = node.nodes.members
            mark.silence = 1.0
            await until(lambda: mark.silence < 0.5)
            for connection in connections:
                connection.close()
            assert not node.faults and not task.done()

    asyncio.run(test())


def test_an_agent_ends_with_node_zero(tmp_path) -> None:
    async def test() -> None:
        async with first_node_in(tmp_path) as node:
            async with agent_of(node) as (other, task):
                await until(lambda: len(other.children) == 2)
                node.close()
                ending = await asyncio.wait_for(task, WAIT_SECONDS)
            assert ending.code == 1 and ending.message.startswith("the connection to node 0 at")
            assert all(child.process.returncode is not None for child in other.children)

    asyncio.run(test())


def test_a_signal_at_an_agent_asks_node_zero_to_stop(tmp_path) -> None:
    async def test() -> None:
        async with first_node_in(tmp_path) as node, agent_of(node) as (other, task):
            await until(lambda: other.joined)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: node.stops)
            assert node.stops[0].endswith("was asked to stop") and not task.done()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(task, WAIT_SECONDS) == Ending(0, "")

    asyncio.run(test())


def test_other_files_are_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(agent, "fingerprint", lambda config: "another")

    async def test() -> None:
        async with first_node_in(tmp_path) as node, agent_of(node) as (other, _):
            await until(lambda: node.faults)
            assert "is not node 0's: config.json, or names or sizes" in node.faults[0].text
            assert not other.children

    asyncio.run(test())


def test_a_taken_port_is_named(tmp_path) -> None:
    async def test() -> None:
        with socket.create_server((HOST, 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError) as caught:
                FirstNode(tmp_path, dist_init_addr=f"{HOST}:{port}")
        assert f"cannot listen on {HOST} port {port}: Address already in use" in str(caught.value)

    asyncio.run(test())


def test_settings_on_the_wire_are_typed(tmp_path) -> None:
    """What another node may send is data of known types; a wrong one is no message."""
    config = json.loads(msgspec.json.encode(EngineConfig()))
    config["tp_size"] = "2"
    welcome = {"type": "Welcome", "given": config, "resolved": config, "fingerprint": ""}
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        decode_to_agent(msgspec.msgpack.encode(welcome))
