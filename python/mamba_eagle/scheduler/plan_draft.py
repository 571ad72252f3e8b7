"""One plan: while it is built, and while its result is awaited."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mamba_eagle.cache.node import StateKind
from mamba_eagle.cache.slots import HeldSlots
from mamba_eagle.core import PLAIN
from mamba_eagle.message import (
    AdapterCopy,
    AnchorMove,
    DecodeBatch,
    Plan,
    PrefillItem,
    Release,
    TierCopy,
)
from mamba_eagle.message.indices import Indices
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import Choice


class Chunk(NamedTuple):
    """A part of a prompt."""

    request: Request
    held: HeldSlots  # the request's
    item: PrefillItem
    kinds: dict[int, StateKind]  # of its saves, by position


class DecodeItem(NamedTuple):
    """A request's part of the decode step."""

    request: Request
    held: HeldSlots  # the request's
    tree: Indices  # the nodes' KV slots, from Slots.reserve_tree; the plan's until it is settled


@dataclass
class PlanDraft:
    """What becomes a ``Plan``, and which requests its parts belong to.

    Results come in the order of ``chunks`` and ``decodes``.
    """

    number: int
    after: int = 0  # the steps up to this one are committed before it
    releases: list[Release] = field(default_factory=list)
    adapters: list[AdapterCopy] = field(default_factory=list)
    end_trails: list[int] = field(default_factory=list)  # request slots
    moves: list[AnchorMove] = field(default_factory=list)
    copies: list[TierCopy] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)  # copies that were answered
    empties_disk: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[DecodeItem] = field(default_factory=list)
    untracked: list[Request] = field(default_factory=list)  # the drafter stops following them
    choice: Choice = Choice(PLAIN)  # of the decode step's shape
    short_of_kv: bool = False  # a running request skips this step for lack of KV slots
    reads: set[int] = field(default_factory=set)  # state slots that prompts start from

    @property
    def empty(self) -> bool:
        lower_tiers = self.copies or self.empties_disk
        return not (self.releases or self.chunks or self.decodes or lower_tiers)

    def as_message(self) -> Plan:
        decode = None
        if self.decodes:
            decode = DecodeBatch(
                shape=self.choice.shape,
                slots=[item.held.slot for item in self.decodes],
                kv_slots=[item.tree.tolist() for item in self.decodes],
            )
        return Plan(
            step=self.number,
            after=self.after,
            untrack=[each.held.slot for each in self.untracked if each.held is not None],
            releases=self.releases,
            adapters=self.adapters,
            end_trails=self.end_trails,
            copies=self.copies,
            arrived=self.arrived,
            empties_disk=self.empties_disk,
            moves=self.moves,
            prefill=[chunk.item for chunk in self.chunks],
            decode=decode,
        )
