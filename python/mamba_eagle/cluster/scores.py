"""Which replica a request goes to: what its cache has of the prompt, against how busy it is."""

from __future__ import annotations

from collections.abc import Mapping

# Eight more open requests outweigh a cache that has the whole prompt.
IMBALANCE = 8


def ranked(
    overlaps: Mapping[str, int],
    length: int,
    open_requests: Mapping[str, int],
    turns: Mapping[str, int],
) -> list[str]:
    """The replicas of ``open_requests``, best first.

    overlaps: tokens of the prompt that a hit would give, by replica; none if missing.
    length: of the prompt, in tokens.
    turns: when each was last chosen. Of equal ones the first is who has waited longest, so that
    prompts without a past spread evenly even if all come at once.
    """
    least = min(open_requests.values(), default=0)

    def cost(replica: str) -> tuple[float, int]:
        missing = 1 - overlaps.get(replica, 0) / max(length, 1)
        excess = open_requests[replica] - least
        return missing + excess / IMBALANCE, turns.get(replica, 0)

    return sorted(open_requests, key=cost)
