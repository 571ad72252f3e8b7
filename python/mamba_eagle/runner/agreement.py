"""--check-ranks: whether all ranks have the same requests in the same state."""

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.parallel.groups import Group

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
