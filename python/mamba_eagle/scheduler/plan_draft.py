"""One plan: while it is built, and while its result is awaited."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mamba_eagle.cache.node import StateKind
from mamba_eagle.cache.slots import HeldSlots
from mamba_eagle.core import PLAIN
from mamba_eagle.message import DecodeBatch, Plan, PrefillItem
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
    tree: Indices  # the nodes' KV slots, from Slots.reserve_kv; the plan's until it is settled


@dataclass
class PlanDraft:
    """What becomes a ``Plan``, and which requests its parts belong to.

    Results come in the order of ``chunks`` and ``decodes``.
    """

    message: Plan  # without its prompts and trees
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[DecodeItem] = field(default_factory=list)
    untracked: list[Request] = field(default_factory=list)  # the drafter stops following them
    choice: Choice = Choice(PLAIN)  # of the decode step's shape
    short_of_kv: bool = False  # a running request skips this step for lack of KV slots
    reads: set[int] = field(default_factory=set)  # state slots that prompts start from

    @property
    def empty(self) -> bool:
        lower_tiers = self.message.copies or self.message.empties_disk
        return not (self.message.releases or self.chunks or self.decodes or lower_tiers)

    def as_message(self) -> Plan:
        """The whole plan."""
        plan = self.message
        if self.decodes:
            plan.decode = DecodeBatch(
                shape=self.choice.shape,
                slots=[item.held.slot for item in self.decodes],
                kv_slots=[item.tree.tolist() for item in self.decodes],
            )
        plan.untrack = [each.held.slot for each in self.untracked if each.held is not None]
        plan.prefill = [chunk.item for chunk in self.chunks]
        return plan
