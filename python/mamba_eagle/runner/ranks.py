"""How a rank joins the others."""

from __future__ import annotations

import os

from mamba_eagle.backend.choose import rank_device
from mamba_eagle.config import EngineConfig
from mamba_eagle.message.link import read_link
from mamba_eagle.message.ranks import MEETING_FILE
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.shard import Shard


def join_ranks(config: EngineConfig, rank: int, folder: str) -> Group:
    """The group of all ranks, once they are all there. folder: of the sockets, private.

    Raises: ConfigError if there are fewer GPUs than ranks.
    """
    device = rank_device(config, rank)
    if config.num_ranks == 1:
        return ALONE
    # takes a while to import, and a single rank does without
    from mamba_eagle.parallel.distributed import ProcessGroup
    from mamba_eagle.parallel.meeting import FileMeeting, Meeting, StoreMeeting

    link = read_link(folder)
    meeting: Meeting = FileMeeting(os.path.join(folder, MEETING_FILE))
    if link is not None:
        meeting = StoreMeeting(link.host, link.store_port)
    return ProcessGroup(Shard(rank, config.num_ranks), device, meeting)
