"""Messages between pipeline stages whose GPUs reach each other's memory.

They are kernels on the stream of the steps: no host waits, nothing is connected late, and a message
waits for no message of another channel. NCCL promises none of this. A sender waits while its ring
is full. The last stage never does, since plans in flight fit into a ring; so it always goes on, and
so do the stages that wait for it, directly or not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mamba_eagle.kernels.peer_copy.triton import PROGRAMS, Ends, peer_copy
from mamba_eagle.parallel.groups import Channel, Group, Mail
from mamba_eagle.parallel.sums.shared_memory import ends_within, share

ALIGNED = 16  # bytes, of places
INT64 = 8  # bytes of a flag
TRIAL_SECONDS = 120


class PeerMail(Mail):
    """One rank's letters to and from the others. Of each channel, a rank gets those of one sender
    at most."""

    def __init__(
        self,
        rank: int,
        rings: Sequence[int],
        flags: Sequence[int],
        sizes: Mapping[Channel, int],
        memory: object = None,
    ) -> None:
        """rings, flags: addresses of each rank's memory, as this one sees them. sizes: bytes of a
        place of each channel, the same on all ranks; longer messages take several. memory: kept
        while this object is."""
        self.rank, self.rings, self.flags, self.memory = rank, rings, flags, memory
        self.places = places_of(len(rings))
        self.sizes = {channel: _aligned(size) for channel, size in sizes.items()}
        self.sent: Counter[tuple[Channel, int]] = Counter()
        self.received: Counter[Channel] = Counter()

    @staticmethod
    def room(sizes: Mapping[Channel, int], ranks: int) -> tuple[int, int]:
        """Bytes of a rank's rings, and how many flags it has."""
        rings = places_of(ranks) * sum(_aligned(size) for size in sizes.values())
        return rings, (max(sizes) + 1) * ranks * 2 * PROGRAMS

    def send(self, x: Tensor, rank: int, channel: Channel) -> None:
        """x, contiguous, may be changed by what is launched afterwards."""
        for piece in self._pieces(x, channel):
            message = self.sent[channel, rank]
            self.sent[channel, rank] += 1
            ends = self._ends(channel, self.rank, rank, message)
            peer_copy(piece, ends, message, self.places, sends=True)

    def receive(self, x: Tensor, rank: int, channel: Channel) -> None:
        """Into x, contiguous, of the size that is sent."""
        for piece in self._pieces(x, channel):
            message = self.received[channel]
            self.received[channel] += 1
            ends = self._ends(channel, rank, self.rank, message)
            peer_copy(piece, ends, message, self.places, sends=False)

    def _pieces(self, x: Tensor, channel: Channel) -> Iterator[Tensor]:
        most = self.sizes[channel] // x.itemsize
        return iter(x.view(-1).split(most) if x.numel() else ())

    def _ends(self, channel: Channel, sender: int, receiver: int, message: int) -> Ends:
        before = sum(size for other, size in self.sizes.items() if other < channel)
        place = self.places * before + message % self.places * self.sizes[channel]
        ranks = len(self.rings)
        posted = ((channel * ranks + sender) * 2) * PROGRAMS * INT64
        taken = ((channel * ranks + receiver) * 2 + 1) * PROGRAMS * INT64
        return Ends(
            self.rings[receiver] + place, self.flags[receiver] + posted, self.flags[sender] + taken
        )


def places_of(stages: int) -> int:
    """Of a ring: two messages of a channel for each plan in flight, one more than there are
    stages, and those of one plan that is over."""
    return 2 * (stages + 2)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def join_mail(group: Group, sizes: Mapping[Channel, int]) -> PeerMail:
    """The mail of the ranks of ``group``, tried once; all of them together.

    Raises: RuntimeError if something else arrives than was sent.
    """
    what = "pipeline stages that send each other their first messages"
    with ends_within(TRIAL_SECONDS, what, remedy="--pp-turns"):
        rings, flags = PeerMail.room(sizes, group.size)
        memory = share(group, rings, torch.uint8), share(group, flags, torch.int64)
        ring_of, flags_of = (part.addresses.tolist() for part in memory)
        mail = PeerMail(group.rank, ring_of, flags_of, sizes, memory)
        _try(mail, group)
    return mail


def _try(mail: PeerMail, group: Group) -> None:
    """Messages of both kinds of elements, one of several pieces, more than there are places."""
    last = group.size - 1
    for channel, size in mail.sizes.items():
        hands_on = channel == Channel.HIDDEN
        goals = [group.rank + 1] if hands_on else range(last)
        sends = group.rank < last if hands_on else group.rank == last
        receives = group.rank > 0 if hands_on else group.rank < last
        source = group.rank - 1 if hands_on else last
        for number, bytes_ in enumerate([3, 24, 2 * size + 8] * mail.places):
            expected = torch.full((bytes_,), number, dtype=torch.uint8, device=group.device)
            if sends:
                for goal in goals:
                    mail.send(expected, goal, channel)
            if receives:
                found = torch.empty_like(expected)
                mail.receive(found, source, channel)
                if not torch.equal(found, expected):
                    raise RuntimeError(f"stages: something else arrives over {channel.name}")
