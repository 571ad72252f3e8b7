"""Pipes between machines, checkpoints on them, and what tells of several nodes."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import zmq
from ports import free_ports
from server_harness import run, says, serving

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.engine import Engine
from mamba_eagle.message import Plan, Shutdown, StepResult
from mamba_eagle.message.channel import Receiver, Sender
from mamba_eagle.message.link import CurvePair, Guard, Link, read_link, write_link
from mamba_eagle.parallel.distributed import interface_of, own_address_towards
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner
from mamba_eagle.server.engine.checkpoints import fingerprint, same_settings
from mamba_eagle.server.engine.children import Watchdog

WAIT_MS = 20_000


def test_ranks_must_divide() -> None:
    problem = "--nnodes 3: 4 processes cannot be spread evenly over 3 machines"
    assert problem in EngineConfig(nnodes=3, tp_size=4).problems()[0]
    assert EngineConfig(nnodes=0).problems() == ["--nnodes 0: must be 1 or more"]


def links(folders: list[Path], host: str = "127.0.0.1") -> None:
    """Node 0's folder, that of node 1, and one of an earlier start, each with its link."""
    ours, theirs, port = CurvePair.new(), CurvePair.new(), free_ports(4)
    common = {"host": host, "port": port, "ranks_per_node": 1}
    link = Link(is_first=True, own=ours, peer=theirs.public, **common)
    made = [link, link.for_others(theirs), link.for_others(CurvePair.new())]
    for folder, link in zip(folders, made):
        folder.mkdir()
        write_link(str(folder), link)


def test_plans_and_results_cross_and_leftovers_get_none(tmp_path: Path) -> None:
    """A rank of an earlier start, which has other keys, neither takes a plan nor sends a result."""
    folders = [tmp_path / name for name in ("first", "other", "old")]
    links(folders)
    first, other, old = map(str, folders)
    context, far = zmq.Context(), zmq.Context()
    link = read_link(first)
    assert link is not None
    guard = Guard(context, link.peer)
    results: Receiver = Receiver(context, first, "from_runner")
    plans: Sender = Sender(context, first, "to_runner", range(2))
    leftover_plans: Receiver = Receiver(far, old, "to_runner", 1)
    leftover: Sender = Sender(far, old, "from_runner")
    leftover.send(StepResult(step=9))
    near: Receiver = Receiver(context, first, "to_runner", 0)
    there: Receiver = Receiver(far, other, "to_runner", 1)
    try:
        for step in range(20):
            plans.send(Plan(step=step))
        for receiver in (near, there):
            steps = [receiver.receive(WAIT_MS).step for _ in range(20)]
            assert steps == list(range(20))
        for folder, step in ((first, 1), (other, 2)):
            answering: Sender = Sender(far, folder, "from_runner")
            # That the connection is made wakes the receiver, and is no message.
            sending = threading.Timer(0.3, answering.send, [StepResult(step=step)])
            sending.start()
            assert results.receive().step == step
            sending.join()
            answering.close()
        assert leftover_plans.receive(0) is None and results.receive(100) is None
        there.close()
        plans.linger(50)
        with pytest.raises(zmq.Again):  # a receiver that is gone is not waited for
            for _ in range(100_000):
                plans.send(Shutdown())
    finally:
        guard.stop()
        context.destroy(linger=0)
        far.destroy(linger=0)


def test_checkpoints_are_told_apart_without_reading_weights(tmp_path: Path) -> None:
    def found(name: str, settings: str, weights: int, **fields) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(settings)
        (folder / "model.safetensors").write_bytes(b"x" * weights)
        return fingerprint(EngineConfig(model_path=str(folder), **fields))

    same = found("a", "{}", 10)
    assert found("b", "{}", 10) == same
    assert len({same, found("b", "{ }", 10), found("b", "{}", 11)}) == 3
    dummy = {"load_format": "dummy"}
    assert found("a", "{}", 10, **dummy) == found("b", "{}", 11, **dummy)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    one = fingerprint(EngineConfig(model_path=str(file)))
    file.write_bytes(b"xx")
    assert fingerprint(EngineConfig(model_path=str(file))) != one


def test_a_node_runs_only_what_the_first_one_has(tmp_path: Path) -> None:
    given = EngineConfig(speculative_algorithm="NONE")
    first = resolve(given)
    elsewhere = dataclasses.replace(first, model_path="/another/folder")
    assert same_settings(given, elsewhere, fingerprint(first)) == first
    with pytest.raises(ConfigError, match="is not node 0's"):
        same_settings(given, first, "another")
    other = dataclasses.replace(first, speculative_algorithm="EAGLE")
    with pytest.raises(ConfigError, match='algorithm "EAGLE" instead of "NONE": are its files'):
        same_settings(given, other, fingerprint(first))


def test_the_interface_of_an_address() -> None:
    assert own_address_towards("127.0.0.1", 5000) == "127.0.0.1"
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == interface_of("::1") == "lo"
    assert interface_of("203.0.113.77") is None


def test_the_watchdog_says_on_which_node_a_rank_is() -> None:
    watchdog = Watchdog(2.0, 4, 2)
    watchdog._scheduler.silence = watchdog._runners[0].silence = watchdog._runners[1].silence = -9
    assert watchdog.tick(2.0) == "the runner2 (node 1) process has not answered for 2 s"


def test_metrics_tell_how_the_model_is_split() -> None:
    async def test() -> None:
        async with serving(says("abc"), tp_size=4, nnodes=2) as server:
            lines = (await server.client.get("/metrics")).text.splitlines()
        for kind, size in (("tp", 4), ("pp", 1), ("nodes", 2)):
            labels = f'kind="{kind}",model_name="tiny"'
            assert f"mamba_eagle:parallel_size{{{labels}}} {size:.1f}" in lines

    run(test())


def test_what_runs_on_one_machine_refuses_nodes() -> None:
    with pytest.raises(ConfigError, match="nnodes: is for a server"):
        Engine(nnodes=2, tp_size=2)
    with pytest.raises(ConfigError, match="--nnodes: is for a server; this command runs on one"):
        make_runner(EngineConfig(nnodes=2, tp_size=2))
