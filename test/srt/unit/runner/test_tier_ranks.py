"""Files of the prefix cache do not depend on how many ranks the model is split over: what some have
written any others read, and whatever breaks on one rank costs hits alone."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from cache_rig import Sequential, move
from runner_harness import Settings, random_prompt, sampled
from thread_ranks import ThreadGroup
from tiny_drafters import DRAFTERS
from tiny_model import write_delta_model, write_model

from mamba_eagle.backend.place import Host
from mamba_eagle.cache.tiers.disk_log import read_export
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import ExportPrefix, ImportPrefix, PrefixMoved

torch.set_num_threads(1)

PROMPT = random_prompt(150, seed=1)
HOW = sampled(24, 3)


class Case(NamedTuple):
    """A model, its drafter, and TP x PP of servers that follow each other."""

    write: Callable[..., Path]
    changes: dict[str, Any]
    drafter: str
    ways: list[tuple[int, int]]


CASES = {
    # heads and groups in uneven parts, a drafter with states of its own that is split as well
    "mamba": Case(
        write_model,
        {"mamba_num_heads": 9, "n_groups": 3},
        "eagle-mamba",
        [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 1)],
    ),
    "delta-rule": Case(write_delta_model, {}, "eagle", [(2, 1), (1, 1), (1, 3)]),
    "no-attention": Case(
        write_model, {"hybrid_override_pattern": "M-M"}, "ngram", [(1, 2), (1, 1), (2, 1)]
    ),
}


class Served:
    """A case's servers."""

    def __init__(self, case: Case, folder: Path) -> None:
        drafter = DRAFTERS[case.drafter]
        self.settings = Settings(drafter.algorithm, topk=2, steps=3, nodes=6)
        self.model = case.write(folder / "model", **case.changes)
        self.head = drafter.write(folder / "head", self.model)
        self.alone = Sequential(self.settings, self.model, self.head, disable_radix_cache=True)
        self.expected = self.alone.serve(PROMPT, HOW)

    def server(self, tp: int = 1, pp: int = 1, **others: Any) -> Sequential:
        others = {"host_cache_gb": 0.03, "tp_size": tp, "pp_size": pp, **others}
        server = Sequential(self.settings, self.model, self.head, **others)
        for passage in server.engine.scheduler.tiers.passages:
            passage.min_gain = 1  # prompts are short here
        return server

    def on_disk(self, folder: Path, tp: int = 1, pp: int = 1) -> Sequential:
        return self.server(tp, pp, cache_dir=str(folder), disk_cache_gb=0.03)

    def run_on(self, folder: Path, tp: int = 1, pp: int = 1, cut: int = 0) -> int:
        """Serves the prompt, and leaves it on disk. Returns how much of it was there.

        cut: then without so many of its last tokens, which a journal on disk ends with."""
        server = self.on_disk(folder, tp, pp)
        served = server.serve(PROMPT, HOW)
        assert served == self.expected, f"tp {tp}, pp {pp}"
        if cut:
            short = server.serve(PROMPT[:-cut], HOW)
            assert short == self.alone.serve(PROMPT[:-cut], HOW), f"tp {tp}, pp {pp}"
            assert short.cached == len(PROMPT) - cut - 1
        settle(server)
        server.runner.retire()
        return served.cached


def settle(server: Sequential) -> None:
    """What is new goes to disk with the plans of others."""
    for seed in range(2, 5):
        server.serve(random_prompt(9, seed), sampled(3, 1))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    made: dict[str, Served] = {}

    def find(name: str) -> Served:
        if name not in made:
            made[name] = Served(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return find


@pytest.fixture(autouse=True)
def split_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "bytes_per_sum", 0)


def lost(server: Sequential, tier: str) -> int:
    return server.engine.scheduler.cache_use().lost_copies[tier]


@pytest.mark.parametrize("name", CASES)
def test_a_folder_serves_any_number_of_ranks(name: str, served: Any, tmp_path: Path) -> None:
    """Texts and accepted drafts are those of one rank without a cache; all but the first server
    run the last token of the prompt alone."""
    case = served(name)
    hits = [case.run_on(tmp_path, *way, cut=4 * n) for n, way in enumerate(CASES[name].ways)]
    assert hits == [0, *[len(PROMPT) - 1] * (len(hits) - 1)]


def export(server: Sequential, path: Path) -> list[bytes]:
    """The file's units in order of the tokens that they belong to."""
    asked = ExportPrefix(call_id=1, token_ids=PROMPT, salt="", path=str(path))
    assert move(server, asked) == PrefixMoved(call_id=1, tokens=len(PROMPT) - 1)
    file, data = read_export(str(path)), path.read_bytes()
    size = file.facts["unit_bytes"]
    found = []
    for record in sorted(file.records, key=lambda each: each.label.start):
        label = record.label
        for units in (label.kv, label.state, label.journal):
            offsets = [file.units[unit].offset for unit in np.frombuffer(units, np.int32)]
            found += [data[offset : offset + size] for offset in offsets]
    return found


@pytest.mark.parametrize("way", [(2, 1), (3, 1), (1, 2)], ids=str)
def test_what_moves_between_servers_of_other_ranks_is_equal_bit_for_bit(
    way: tuple[int, int], served: Any, tmp_path: Path
) -> None:
    """One runs the prompt, several ranks decode and hand it on, one decodes again."""
    case = served("mamba")
    first, several, last = case.server(), case.server(*way), case.server()
    first.serve(PROMPT, SamplingParams(max_new_tokens=0))
    sent = export(first, tmp_path / "0")
    for server, number in ((several, 1), (last, 2)):
        path = str(tmp_path / str(number - 1))
        assert move(server, ImportPrefix(call_id=2, path=path)).tokens == len(PROMPT) - 1
        assert export(server, tmp_path / str(number)) == sent
        served_there = server.serve(PROMPT, HOW)
        assert served_there == case.expected and served_there.cached == len(PROMPT) - 1


def test_a_refusal_reaches_the_rank_that_answers(served: Any, tmp_path: Path) -> None:
    case = served("mamba")
    first, stages = case.server(2), case.server(1, 2)
    first.serve(PROMPT, SamplingParams(max_new_tokens=0))
    export(first, tmp_path / "0")
    data = (tmp_path / "0").read_bytes()
    facts, rest = data.split(b"\n", 1)
    foreign = msgspec.json.encode({**msgspec.json.decode(facts), "model": "é" * 600}) + b"\n" + rest
    changed = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    for content, reason in ((foreign, "model: 'é"), (changed, "is not what was written")):
        (tmp_path / "1").write_bytes(content)
        reply = move(stages, ImportPrefix(call_id=3, path=str(tmp_path / "1")))
        assert reason in reply.problem and not reply.tokens
    assert lost(stages, "other") == 2
    assert stages.serve(PROMPT, HOW) == case.expected


@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
def test_a_flipped_bit_costs_all_ranks_the_hit(
    way: tuple[int, int], served: Any, tmp_path: Path
) -> None:
    case = served("mamba")
    case.run_on(tmp_path, *way)
    (units,) = tmp_path.glob("*/units")
    data = np.memmap(units, mode="r+")
    data[np.flatnonzero(data)[::50]] ^= 4
    data.flush()
    server = case.on_disk(tmp_path, *way)
    found = server.serve(PROMPT, HOW)
    assert found == case.expected and found.cached == 0 and lost(server, "disk") == 1
    server.runner.retire()


@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
def test_a_full_disk_costs_all_ranks_what_was_being_written(
    way: tuple[int, int], served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = served("mamba")
    server = case.on_disk(tmp_path, *way)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert server.serve(PROMPT, HOW) == case.expected
        settle(server)
    assert lost(server, "disk") > 0 and server.serve(PROMPT, HOW) == case.expected
    later = random_prompt(100, seed=8)
    server.serve(later, HOW)
    settle(server)
    server.runner.retire()
    other = case.on_disk(tmp_path)
    assert other.serve(later, HOW) == case.alone.serve(later, HOW)
    assert other.engine.scheduler.cache_use().loaded_tokens["disk"] == len(later) - 1
    other.runner.retire()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["_collect", "_hand_out"])
def test_a_rank_that_dies_in_the_middle_of_a_copy_costs_that_copy_alone(
    rank: int, when: str, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end too, since no one knows what has become of it. What had been written before
    is there for the next server."""
    case = served("mamba")
    case.run_on(tmp_path)
    server = case.on_disk(tmp_path, 2)

    def die(group: ThreadGroup, *_: Any) -> None:
        if group.rank == rank:
            group.meeting.barrier.abort()
        raise threading.BrokenBarrierError

    monkeypatch.setattr(ThreadGroup, when, die)
    with pytest.raises(threading.BrokenBarrierError):
        server.serve(random_prompt(40, seed=9) if when == "_collect" else PROMPT, HOW)
        settle(server)
    monkeypatch.undo()
    monkeypatch.setattr(Host, "bytes_per_sum", 0)
    server.runner.retire()
    assert case.run_on(tmp_path) == len(PROMPT) - 1
