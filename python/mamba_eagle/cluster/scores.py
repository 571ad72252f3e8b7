"""Which replica a request goes to: what its cache has of the prompt, against how busy it is."""

from __future__ import annotations

from collections.abc import Mapping

# So far may the replica with most of a prompt be ahead of the idlest, in open requests. This is a
# lot: a chat that moves takes all its later turns, and a second copy of its past, with it.
IMBALANCE = 8
WORTH_IT = 0.1  # of the prompt; what all prompts begin with should not bind them


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
    most = max(overlaps.values(), default=0)
    known = most if most >= WORTH_IT * length else 0

    def cost(replica: str) -> tuple[float, int]:
        lost = 1 - overlaps.get(replica, 0) / known if known else 0.0
        excess = open_requests[replica] - least
        return lost + excess / IMBALANCE, turns.get(replica, 0)

    return sorted(open_requests, key=cost)
