"""A FakeRunner with lower tiers of the cache: units that record what was written to them.

Copies beside the steps end when chance wants it, and some of them fail. What is read from a unit is
what was written there, or the test fails when the runner uses it.
"""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import msgspec
from fake_runner import FakeRunner, Server

from mamba_eagle.cache.tiers.disk_log import SUM_BYTES, Label, Record
from mamba_eagle.message import Blocks, Plan, StepResult, TierCopy, TierSizes


class TieredRunner(FakeRunner):
    """``lost``: the share of copies from and to disk that fail."""

    def __init__(
        self,
        *arguments: Any,
        sizes: TierSizes,
        rng: random.Random,
        lost: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(*arguments, **others)
        self.ready.tiers, self.tiered, self.rng, self.lost = sizes, True, rng, lost
        self.units: dict[int, list[Any]] = {
            1: [None] * sizes.host_units,
            2: [None] * sizes.disk_units,
        }
        self.under_way: dict[int, bool] = {}  # whether it works, by number
        self.loads = self.emptied = 0
        self.records: list[Record] = []  # what a real one would have logged

    def execute(self, plan: Plan) -> StepResult:
        result = super().execute(plan)
        for number, works in list(self.under_way.items()):
            if self.rng.random() < 0.5:
                del self.under_way[number]
                (result.copied if works else result.lost).append(number)
        return result

    def leave(self, plan: Plan) -> None:
        self.emptied += plan.empties_disk
        for copy in plan.copies:
            if copy.source.tier == 0:
                self._to_units(copy.target, self._read(copy.source))
            elif copy.target.tier != 0:
                self._beside(copy)

    def _beside(self, copy: TierCopy) -> None:
        source, target = self.units[copy.source.tier], self.units[copy.target.tier]
        damaged = any(source[unit] == "damaged" for unit in _all(copy.source))
        works = self.under_way[copy.number] = self.rng.random() >= self.lost and not damaged
        for old, new in zip(_all(copy.source), _all(copy.target), strict=True):
            target[new] = source[old] if works else "damaged"
        if works and copy.label:
            label = msgspec.msgpack.decode(copy.label, type=Label)
            self.records.append(Record(label, bytes(SUM_BYTES * len(_all(copy.target)))))

    def come(self, plan: Plan) -> None:
        for copy in plan.copies:
            if copy.target.tier == 0:
                self.loads += 1
                self.under_way[copy.number] = True
                self._write(copy)

    def _read(self, blocks: Blocks) -> Blocks | Any:
        state = [self.state_slots[slot] for slot in blocks.state]
        journal = [dict(self.journals[slot]) for slot in blocks.journal]
        return [self.kv[slot] for slot in blocks.kv], state, journal

    def _to_units(self, target: Blocks, found: Any) -> None:
        kv, state, journal = found
        units = self.units[target.tier]
        for unit, value in zip(target.kv, kv, strict=True):
            units[unit] = value
        for ids, values in ((target.state, state), (target.journal, journal)):
            assert bool(len(ids)) == bool(values)
            for part, unit in enumerate(ids):
                units[unit] = (part, values[0])

    def _write(self, copy: TierCopy) -> None:
        source, target, units = copy.source, copy.target, self.units[copy.source.tier]
        for slot, unit in zip(target.kv, source.kv, strict=True):
            self.kv[slot] = units[unit]
        self.drafter.overwritten(target.kv)
        for slots, ids, write in (
            (target.state, source.state, self.state_slots),
            (target.journal, source.journal, self.journals),
        ):
            for slot in slots:
                parts = [units[unit] for unit in ids]
                assert [part for part, _ in parts] == list(range(len(ids)))
                assert all(value == parts[0][1] for _, value in parts), "parts of two states"
                write[slot] = deepcopy(parts[0][1])


def _all(blocks: Blocks) -> list[int]:
    return [*blocks.kv, *blocks.state, *blocks.journal]


def tiered_server(config, runner: TieredRunner, rng: random.Random) -> Server:
    """A load pays for any token that it saves, so that short prompts have loads."""
    server = Server(config, runner, rng)
    for passage in server.scheduler.tiers.passages:
        passage.min_gain = 1
    return server
