"""Messages between stages, in Triton's interpreter (test_float8.py starts it): a process per stage,
with memory that all of them see, in place of GPUs that reach each other's."""

from __future__ import annotations

import multiprocessing as mp
import time
from typing import Any

import pytest
import torch
from forms import INTERPRETED
from torch import Tensor

from mamba_eagle.kernels.peer_copy import naive
from mamba_eagle.parallel.groups import Channel

# a message of hidden states takes up to three places, and they are more than there are
SIZES = {Channel.HIDDEN: 40, Channel.TREES: 130, Channel.TOKENS: 144}
LENGTHS = [8, 5, 48, 130, 0, 7, 96, 1, 16, 33]  # bytes; in words and not, in one place and several
WAIT_SECONDS = 60


def message(channel: Channel, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * channel + number)
    length = (LENGTHS[number % len(LENGTHS)],)
    return torch.randint(0, 256, length, dtype=torch.uint8, generator=generator)


def talk(rank: int, rings: list[Tensor], flags: list[Tensor], results: Any) -> None:
    """Of three stages: the first one hands on all it can, the last one is late."""
    from mamba_eagle.kernels.peer_copy import triton as kernel
    from mamba_eagle.parallel.mail import PeerMail

    kernel.PROGRAMS = 2
    torch.set_num_threads(1)
    places = [[x.data_ptr() for x in each] for each in (rings, flags)]
    mail = PeerMail(rank, *places, SIZES)
    expected = {channel: naive.Ring(mail.places) for channel in Channel}
    wrong = 0

    def receive(channel: Channel, number: int) -> int:
        expected[channel].send(message(channel, number))
        found = torch.zeros_like(message(channel, number))
        mail.receive(found, rank - 1 if channel == Channel.HIDDEN else 2, channel)
        return not torch.equal(found, expected[channel].receive())

    def hand_on(number: int) -> None:
        sent = message(Channel.HIDDEN, number)
        mail.send(sent, rank + 1, Channel.HIDDEN)
        sent.zero_()  # launched afterwards

    numbers = range(len(LENGTHS))
    for number in numbers if rank == 0 else ():
        hand_on(number)
    for number in numbers:
        if rank == 2:
            time.sleep(0.01)
            for channel in (Channel.TREES, Channel.TOKENS)[:: 1 if number % 2 else -1]:
                for goal in (0, 1):
                    mail.send(message(channel, number), goal, channel)
        else:
            wrong += receive(Channel.TREES, number) + receive(Channel.TOKENS, number)
        if rank > 0:
            wrong += receive(Channel.HIDDEN, number)
        if rank == 1:
            hand_on(number)
    results.put((rank, wrong))


@pytest.mark.skipif(not INTERPRETED, reason="test_float8.py runs it")
def test_messages_arrive_whole_and_in_the_order_of_their_channel() -> None:
    from mamba_eagle.parallel.mail import PeerMail

    size, count = PeerMail.room(SIZES, 3)
    rings = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(3)]
    flags = [torch.zeros(count, dtype=torch.int64).share_memory_() for _ in range(3)]
    context = mp.get_context("fork")  # they have the same memory then
    results = context.Queue()
    given = [(rank, rings, flags, results) for rank in range(3)]
    others = [context.Process(target=talk, args=each, daemon=True) for each in given]
    for process in others:
        process.start()
    found = dict(results.get(timeout=WAIT_SECONDS) for _ in others)
    for process in others:
        process.join(WAIT_SECONDS)
    assert found == {0: 0, 1: 0, 2: 0}
