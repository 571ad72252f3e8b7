"""Ray Serve's choice of a replica by what the replicas' caches have, as their KV events say."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from mamba_eagle.cluster.event_index import EventIndex, EventSource
from mamba_eagle.cluster.replica import EVENTS
from mamba_eagle.cluster.scores import ranked


class EventRouter(RequestRouter):
    """Lives in the ingress. Requests without tokens go by load."""

    def initialize_state(self, **_: Any) -> None:
        self._index = EventIndex()
        self._open: Counter[ReplicaID] = Counter()  # requests
        self._turns: dict[str, int] = {}  # when each replica was last chosen
        self._turn = 0
        self._following: set[asyncio.Task[None]] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        sources = {
            str(replica.replica_id): EventSource(*replica.routing_stats[EVENTS])
            for replica in replicas
            if EVENTS in replica.routing_stats
        }
        task = asyncio.get_running_loop().create_task(self._index.follow(sources))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Each in a rank of its own, the best first."""
        tokens = pending_request.args[0].tokens if pending_request is not None else ()
        overlaps = await self._index.overlaps(tokens)
        replicas = {str(replica.replica_id): replica for replica in candidate_replicas}
        waiting = {name: self._open[one.replica_id] for name, one in replicas.items()}
        names = ranked(overlaps, len(tokens), waiting, self._turns)
        if tokens and names:
            self._turn += 1
            self._turns[names[0]] = self._turn
        return [[replicas[name]] for name in names]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._open[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open[replica_id] -= 1
