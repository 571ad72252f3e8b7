"""Which of the other nodes are there, and which may join."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mamba_eagle import __version__
from mamba_eagle.config import ServerConfig
from mamba_eagle.core import shown
from mamba_eagle.message.nodes import Join


@dataclass
class Member:
    """A node that has joined."""

    node_rank: int
    name: str  # of the machine
    identity: bytes  # of its connection
    silence: float = 0.0  # seconds since it was last heard of

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.name})"


class Members:
    """The nodes that have joined, one per node rank."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._members: dict[int, Member] = {}  # by node rank

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.config.nnodes) if rank not in self._members]

    def by_connection(self, identity: bytes) -> Member | None:
        return next((member for member in self if member.identity == identity), None)

    def add(self, identity: bytes, join: Join) -> Member:
        member = Member(join.node_rank, shown(join.name)[1:-1], identity)
        self._members[join.node_rank] = member
        return member

    def refusal(self, join: Join) -> str:
        """Why a node may not join; empty if it may."""
        config = self.config
        if join.version != __version__:
            return f"it has mamba-eagle {shown(join.version)}, and node 0 {__version__}"
        if join.nnodes != config.nnodes:
            return f"it has --nnodes {join.nnodes}, and node 0 --nnodes {config.nnodes}"
        if not 0 < join.node_rank < config.nnodes:
            return f"--node-rank {join.node_rank}: must be 1 to {config.nnodes - 1}"
        if known := self._members.get(join.node_rank):
            return (
                f"{known} has joined before; give each node a --node-rank of its own, and start "
                "node 0 again after a node was lost"
            )
        return ""

    def absence(self, failed: int) -> str:
        """That those who are missing have not joined in time. failed: connections."""
        nodes = " and ".join(f"node {rank}" for rank in self.missing)
        have = "has" if len(self.missing) == 1 else "have"
        text = (
            f"{nodes} {have} not joined at {self.config.dist_init_addr} within --dist-timeout "
            f"{self.config.dist_timeout} s"
        )
        if failed:
            text += f"; {failed} connections failed, as they do with another --cluster-key"
        return text
