"""How a rank joins the others, and whether all of them have the same requests in the same state."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.config import EngineConfig
from mamba_eagle.devices import rank_device
from mamba_eagle.message.link import read_link
from mamba_eagle.message.ranks import MEETING_FILE
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.shard import Shard

T = TypeVar("T")


class Ranks(NamedTuple):
    """The others that a rank exchanges tensors with."""

    group: Group = ALONE  # that hold parts of the same layers
    stages: Group = ALONE  # that hold the same part of other layers, one per pipeline stage
    beside: Group = ALONE  # all of them, for host memory and a thread beside the steps

    @property
    def number(self) -> int:
        """Of this rank: stage by stage."""
        return self.stages.rank * self.group.size + self.group.rank

    @property
    def samples(self) -> bool:
        """Whether this rank chooses tokens, beside others of the last stage."""
        return self.stages.rank == self.stages.size - 1

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks; waits for the device."""
        return self.stages.smallest(self.group.smallest(numbers))

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sum of each number over all ranks; waits for the device."""
        return self.stages.total(self.group.total(numbers))

    def every(self, value: T, kind: type[T]) -> list[T]:
        """What each rank has, by number, as JSON; waits for the device."""
        text = msgspec.json.encode(value)
        length = -self.smallest([-len(text)])[0]
        device = (self.group if self.group.size > 1 else self.stages).device
        own = torch.tensor(list(text.ljust(length)), dtype=torch.uint8, device=device)
        found = self.stages.gather(self.group.gather(own)).view(-1, length)
        return [msgspec.json.decode(bytes(each), type=kind) for each in found.tolist()]

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within, nothing is exchanged (``Group.quiet``)."""
        with self.group.quiet(), self.stages.quiet():
            yield

    def close(self) -> None:
        """Leave them; nothing may follow."""
        (self.group if self.group.size > 1 else self.stages).close()


ONE_RANK = Ranks()


def join_ranks(config: EngineConfig, rank: int, folder: str) -> Ranks:
    """The groups of this rank, once all ranks are there. folder: of the sockets, private.

    Ranks are numbered stage by stage: rank 5 of two stages with four ranks is the second one of the
    last stage.

    Raises: ConfigError if there are fewer GPUs than ranks.
    """
    device = rank_device(config, rank)
    if config.num_ranks == 1:
        return ONE_RANK
    # takes a while to import, and a single rank does without
    from mamba_eagle.parallel.distributed import FileMeeting, ProcessGroup, StoreMeeting, meet

    link, file = read_link(folder), FileMeeting(os.path.join(folder, MEETING_FILE))
    meeting = file if link is None else StoreMeeting(link.host, link.port)
    width, stages = config.tp_size, config.pp_size
    among_all = Shard(rank, config.num_ranks)
    meet(among_all, device, meeting)
    beside: Group = ALONE
    if config.host_cache_gb:
        host = torch.device("cpu")
        beside = ProcessGroup(among_all, host, [range(config.num_ranks)], "gloo")
    stage, part = divmod(rank, width)
    if stages == 1:
        return Ranks(ProcessGroup(Shard(part, width), device), beside=beside)
    column = Shard(stage, stages)
    across = [range(first, config.num_ranks, width) for first in range(width)]
    found = ProcessGroup(column, device, across)
    found.connect()
    if width == 1:
        return Ranks(stages=found, beside=beside)
    inside = [range(first, first + width) for first in range(0, config.num_ranks, width)]
    return Ranks(ProcessGroup(Shard(part, width), device, inside), found, beside)


# ── --check-ranks ──

FACTOR = 0x2545F4914F6CDD1D  # odd; of Marsaglia's xorshift*


class RanksDiffer(RuntimeError):
    """Ranks that have to agree do not; the text names the first field that differs."""


def check_agreement(
    step: int, table: RequestTable, scheme: StateScheme, group: Group, member: str = "rank"
) -> None:
    """Compares the tables of all ranks, request slot by request slot; waits for the device. member:
    what a rank of the group is called.

    Raises: RanksDiffer, on all ranks.
    """
    slots = torch.arange(table.processed.shape[0], device=table.processed.device)
    fields = {
        "last_token": table.last_token,
        "processed": table.processed,
        "remaining": table.remaining,
        "stop_tokens": table.stop_tokens,
        "state_slot": table.state_slot,
        "kv_slots": table.kv_slots,
        "folded": scheme.folded(slots),
    }
    hashes = torch.stack([row_hashes(values) for values in fields.values()])
    found = group.gather(hashes)  # [ranks, fields, request slots]
    differs = (found != found[:1]).nonzero()
    if not len(differs):
        return
    rank, field, slot = min(differs.tolist(), key=lambda place: place[1:])
    values = {name: values[slot].tolist() for name, values in fields.items()}
    name = list(fields)[field]
    raise RanksDiffer(
        f"after step {step}, {member} {rank} differs from {member} 0 in {name} of request slot "
        f"{slot}; {member} {group.rank} has {str(values[name])[:200]}"
    )


def row_hashes(values: Tensor) -> Tensor:
    """One number for each row: [R] or [R, n] int64 -> [R] int64."""
    if values.dim() == 1:
        return values
    powers = torch.arange(1, values.shape[1] + 1, device=values.device) * FACTOR
    return ((values + 1) * (powers | 1)).sum(dim=1)
