"""A router for Ray Serve to compare others with: replicas in turn."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RoundRobin(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        self._turn += 1
        ordered = sorted(candidate_replicas, key=lambda one: str(one.replica_id))
        first = self._turn % len(ordered)
        return [[one] for one in ordered[first:] + ordered[:first]]
