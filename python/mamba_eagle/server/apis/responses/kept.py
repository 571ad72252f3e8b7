"""Responses that are kept: in memory, each for the API key that made it."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_KEPT_BYTES, MAX_KEPT_RESPONSES
from mamba_eagle.server.errors import RequestError


@dataclass(frozen=True)
class KeptResponse:
    """As JSON. ``input``: the items before the reply, those of earlier responses among them, so
    that none of these must be kept for it."""

    reply: bytes
    input: bytes

    @property
    def size(self) -> int:
        return len(self.reply) + len(self.input)

    def items(self) -> list[dict[str, Any]]:
        """The conversation so far, without instructions."""
        return [*msgspec.json.decode(self.input), *msgspec.json.decode(self.reply)["output"]]


class Shelf:
    """The responses of one key by their ids, the oldest first; ``size`` in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._responses: dict[str, KeptResponse] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def find(self, id: str, param: str | None = None) -> KeptResponse:
        """param: the field that names it. Raises: RequestError 404"""
        try:
            return self._responses[id]
        except KeyError:
            remedy = (
                "no such response is kept: it was made with store: false or with another API key, "
                "was deleted, or went to make room; send the whole conversation as input"
            )
            name = param or "response"
            raise RequestError(f"{name} = {shown(id)}: {remedy}", 404, param) from None

    def put(self, id: str, response: KeptResponse) -> None:
        if id in self._responses:
            self.remove(id)
        self._responses[id] = response
        self.size += response.size

    def remove(self, id: str) -> None:
        """Raises: RequestError 404"""
        self.size -= self.find(id).size
        del self._responses[id]

    def remove_oldest(self) -> None:
        self.remove(next(iter(self._responses)))


class ResponseStore:
    """All shelves, which together hold ``most`` responses of ``most_bytes``. The oldest of the
    key that takes most of it goes first, so that no key can push out what others keep."""

    def __init__(self, most: int = MAX_KEPT_RESPONSES, most_bytes: int = MAX_KEPT_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._shelves: defaultdict[str, Shelf] = defaultdict(Shelf)

    def of(self, key: str) -> Shelf:
        """key: a valid one, or "" on a server that has none."""
        return self._shelves[key]

    def keep(self, key: str, id: str, response: KeptResponse) -> None:
        self.of(key).put(id, response)
        shelves = self._shelves.values()
        while (
            sum(map(len, shelves)) > self.most
            or sum(shelf.size for shelf in shelves) > self.most_bytes
        ):
            max(shelves, key=self._share).remove_oldest()

    def _share(self, shelf: Shelf) -> float:
        return max(len(shelf) / self.most, shelf.size / self.most_bytes)
