"""One plan while it is built, and while its result is awaited."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mamba_eagle.core import PLAIN
from mamba_eagle.message import DecodeBatch, Plan, PrefillItem, Release
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import Choice


class Chunk(NamedTuple):
    request: Request
    item: PrefillItem
    spare_saves: frozenset[int]  # positions of saves that nobody is known to ask for


class DecodeItem(NamedTuple):
    request: Request
    kv_slots: list[int]  # one a tree node; in flight they are the step's


@dataclass
class PlanDraft:
    """Whose each part of the plan is; results come in the same order."""

    number: int
    releases: list[Release] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    rows: list[DecodeItem] = field(default_factory=list)
    untrack: list[int] = field(default_factory=list)  # slots of requests the drafter gives up
    choice: Choice = Choice(PLAIN)  # the shape of the rows' trees
    short_of_kv: bool = False  # a running request has to skip it for want of KV slots
    reads: set[int] = field(default_factory=set)  # state slots that its prefill starts from

    @property
    def empty(self) -> bool:
        return not (self.releases or self.chunks or self.rows)

    def plan(self) -> Plan:
        decode = None
        if self.rows:
            decode = DecodeBatch(
                shape=self.choice.shape,
                slots=[row.request.slot for row in self.rows],
                kv_slots=[row.kv_slots for row in self.rows],
            )
        return Plan(
            step=self.number,
            untrack=self.untrack,
            releases=self.releases,
            prefill=[chunk.item for chunk in self.chunks],
            decode=decode,
        )
