"""Which replica a request goes to: what its cache has of the prompt, against how busy it is."""

from collections.abc import Mapping

# How far the replica with most of a prompt may be ahead of the idlest, in open requests. This is a
# lot: a chat that moves takes all its later turns, and a second copy of its past, with it.
IMBALANCE = 8
WORTH_IT = 0.1  # of the prompt; what all prompts begin with should not bind them
CLOSE = 4  # a difference of fewer open requests does not decide where a new prompt goes


class Scores:
    """Ranks replicas, which have names."""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[str, int] = {}  # when a new prompt came to each

    def ranked(
        self, overlaps: Mapping[str, int], length: int, open_requests: Mapping[str, int]
    ) -> list[str]:
        """The replicas of ``open_requests``, best first.

        overlaps: tokens of the prompt that a hit would give, by replica; none if missing.
        length: of the prompt, in tokens.
        """
        least = min(open_requests.values(), default=0)
        most = max(overlaps.values(), default=0)
        if most > 0 and most >= WORTH_IT * length:

            def cost(replica: str) -> float:
                excess = open_requests[replica] - least
                return 1 - overlaps.get(replica, 0) / most + excess / IMBALANCE

            return sorted(open_requests, key=cost)

        def place(replica: str) -> tuple[int, int]:
            return (open_requests[replica] - least) // CLOSE, self._turns.get(replica, 0)

        # New prompts take turns: by load alone, chats that come at once do not spread evenly.
        names = sorted(open_requests, key=place)
        self._turn += 1
        self._turns.update(dict.fromkeys(names[:1], self._turn))
        return names
