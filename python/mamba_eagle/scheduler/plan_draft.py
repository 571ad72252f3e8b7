"""One plan: while it is built, and while its result is awaited."""

from dataclasses import dataclass, field

from mamba_eagle.cache.node import StateKind
from mamba_eagle.core import PLAIN
from mamba_eagle.message import Plan
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import Choice


@dataclass
class PlanDraft:
    """A ``Plan``, and which requests its parts belong to: they keep their slots until its result
    has come."""

    message: Plan
    prompts: list[Request] = field(default_factory=list)  # of ``message.prefill``, in its order
    decodes: list[Request] = field(default_factory=list)  # of ``message.decode``, likewise
    kinds: dict[int, StateKind] = field(default_factory=dict)  # of states for the cache, by slot
    untracked: list[Request] = field(default_factory=list)  # the drafter stops following them
    choice: Choice = Choice(PLAIN)  # of the decode step's shape
    short_of_kv: bool = False  # a running request skips this step for lack of KV slots
    evicts: bool = False  # KV for its prompts, and what waiting requests need was marked for that
    evicts_more: bool = False  # KV for a prompt that running requests would wait for: the next plan
    reads: set[int] = field(default_factory=set)  # state slots that prompts start from

    @property
    def empty(self) -> bool:
        lower_tiers = self.message.copies or self.message.empties_disk
        return not (self.message.releases or self.prompts or self.decodes or lower_tiers)

    @property
    def trees(self) -> list[list[int]]:
        """The nodes' KV slots of each decoding request, the plan's until it is settled."""
        return self.message.decode.kv_slots if self.message.decode is not None else []
