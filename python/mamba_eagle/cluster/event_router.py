"""Ray Serve's choice of a replica by what the replicas' caches have, as their KV events say."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp  # Ray's; a request costs a fraction of httpx's time
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mamba_eagle.cluster.event_index import EventIndex
from mamba_eagle.cluster.prompts import to_tokenize
from mamba_eagle.cluster.replica import EventSource, Forwarded
from mamba_eagle.cluster.scores import Scores

log = logging.getLogger("mamba_eagle.cluster")
TIMEOUT = aiohttp.ClientTimeout(10)  # seconds
KEY_HEADERS = ("authorization", "x-api-key")


class EventRouter(RequestRouter):
    """Lives in the ingress. Requests without a prompt go by load."""

    def initialize_state(self, **_: Any) -> None:
        self._index = EventIndex()
        self._client: aiohttp.ClientSession | None = None  # it belongs to the loop of requests
        self._published: dict[str, EventSource] = {}
        self._open: Counter[ReplicaID] = Counter()  # requests
        self._scores = Scores()
        self._following: set[asyncio.Task[None]] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._published = {
            str(replica.replica_id): EventSource(**replica.routing_stats)
            for replica in replicas
            if replica.routing_stats  # Ray asks for them when it has started
        }
        task = asyncio.get_running_loop().create_task(self._index.follow(self._published))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Each in a rank of its own, the best first."""
        tokens = await self._tokens(pending_request.args[0]) if pending_request is not None else ()
        overlaps = await self._index.overlaps(tokens)
        replicas = {str(replica.replica_id): replica for replica in candidate_replicas}
        waiting = {name: self._open[one.replica_id] for name, one in replicas.items()}
        names = self._scores.ranked(overlaps, len(tokens), waiting)
        return [[replicas[name]] for name in names]

    async def _tokens(self, request: Forwarded) -> Sequence[int]:
        """Tokens of the prompt, as the server of some replica makes them; () if it goes by load."""
        asked = to_tokenize(request.path.partition("?")[0], request.body)
        if isinstance(asked, list):
            return asked
        if not self._published:
            return ()
        url = random.choice(list(self._published.values())).url
        headers = [one for one in request.headers if one[0].lower() in KEY_HEADERS]
        if self._client is None:
            self._client = aiohttp.ClientSession(timeout=TIMEOUT)
        try:
            async with self._client.post(f"{url}/tokenize", json=asked, headers=headers) as reply:
                # The request's own reply will say what is wrong with it.
                return (await reply.json())["tokens"] if reply.status == 200 else ()
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
            log.warning("a prompt was not tokenized, and goes by load: %r", error)
            return ()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._open[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open[replica_id] -= 1
