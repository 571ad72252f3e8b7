"""How much of a prompt each replica's cache has, by the replicas' KV events.

The index, and what listens, is NVIDIA Dynamo's (``ai-dynamo-runtime``): it lives in this process
and needs no service beside it. What was sent before it listened, or is missed, it asks to be
replayed.
"""

import asyncio
from collections.abc import Mapping, Sequence

from dynamo.llm import SelectionService

from mamba_eagle.cluster.replica import EventSource
from mamba_eagle.events_config import BLOCK

SCOPE = {"model_name": "model"}  # one index has the replicas of one model


class EventIndex:
    """Replicas have names. Use it from one event loop."""

    def __init__(self) -> None:
        self._service = SelectionService(indexer_threads=1)
        self._workers: dict[str, int] = {}  # Dynamo's number of each replica
        self._made = 0
        self._changing = asyncio.Lock()

    async def follow(self, sources: Mapping[str, EventSource]) -> None:
        """Listens to these replicas, and forgets all others."""
        async with self._changing:
            for name in self._workers.keys() - sources.keys():
                await self._service.delete_worker(self._workers.pop(name))
            for name in sources.keys() - self._workers.keys():
                self._made += 1
                await self._service.upsert_worker(self._worker(name, sources[name]))
                self._workers[name] = self._made

    def _worker(self, name: str, source: EventSource) -> dict[str, object]:
        return {
            **SCOPE,
            "worker_id": self._made,
            "endpoint": name,  # Dynamo sends nothing there
            "block_size": BLOCK,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "kv_events_endpoints": {0: source.endpoint},
            "replay_endpoint": source.replay_endpoint,
        }

    async def overlaps(self, tokens: Sequence[int]) -> dict[str, int]:
        """Tokens at a prompt's beginning that each replica has, in whole blocks, without the last
        token: that one runs in any case."""
        most = (len(tokens) - 1) // BLOCK
        if not self._workers or most < 1:
            return {}
        scores = await self._service.overlap_scores({**SCOPE, "token_ids": list(tokens)})
        names = {number: name for name, number in self._workers.items()}
        return {
            names[one["worker_id"]]: min(one["device_blocks"], most) * BLOCK
            for one in scores["workers"]
            if one["worker_id"] in names
        }

    def close(self) -> None:
        self._service.shutdown()
