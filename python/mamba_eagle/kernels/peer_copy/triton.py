"""Messages between GPUs that reach each other's memory: one kernel writes, one reads.

The receiver has a ring of places for the messages of one sender. Program p of both kernels
copies the same slice, and no program waits for any but its peer:

    send      waits until what was in the place has been taken, writes its slice there, and then
              sets its *posted* flag, in the receiver's memory, to the messages so far (release)
    receive   waits for that flag (acquire), reads its slice, and sets its *taken* flag, in the
              sender's memory

Flags only grow. Numbers of messages come from the host, so these kernels are for no captured graph.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32
BLOCK = 1024  # elements
WORD = 8  # bytes of an element where a message is made of such


class Ends(NamedTuple):
    """Addresses of a message, all in memory that the launching rank reaches."""

    place: int  # in the receiver's ring
    posted: int  # of PROGRAMS int64, the receiver's; first 0
    taken: int  # of PROGRAMS int64, the sender's; first 0


@triton.jit
def _wait_for(flag, least):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < least:
        pass
    tl.debug_barrier()  # no thread goes on before


@triton.jit
def _copy(source, goal, n, program, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's slice of n elements."""
    for first in range(program * BLOCK, n, PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        # not from a cache of this processor, which may be older
        part = tl.load(source + at, mask=at < n, cache_modifier=".cg")
        tl.store(goal + at, part, mask=at < n)
    tl.debug_barrier()  # all threads have written


ADDRESSES = ["own", "place", "posted", "taken"]  # numbers, so that their alignment makes no kinds


@triton.jit(do_not_specialize=[*ADDRESSES, "n", "message"])
def _peer_copy_kernel(
    own,  # address of n elements: the sender's message, or the receiver's room
    place,
    posted,
    taken,
    n,
    message,  # messages before this one
    SENDS: tl.constexpr,
    WORDS: tl.constexpr,  # elements are int64, not bytes
    PLACES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    kind = tl.pointer_type(tl.int64 if WORDS else tl.uint8)
    flags = tl.pointer_type(tl.int64)
    is_posted = posted.to(flags) + program
    is_taken = taken.to(flags) + program
    if SENDS:
        _wait_for(is_taken, message + 1 - PLACES)
        _copy(own.to(kind), place.to(kind), n, program, PROGRAMS, BLOCK)
        tl.atomic_xchg(is_posted, message + 1, sem="release", scope="sys")
    else:
        _wait_for(is_posted, message + 1)
        _copy(place.to(kind), own.to(kind), n, program, PROGRAMS, BLOCK)
        tl.atomic_xchg(is_taken, message + 1, sem="release", scope="sys")


def peer_copy(own: Tensor, ends: Ends, message: int, places: int, sends: bool) -> None:
    """Send ``own``, contiguous, or receive it: as many bytes as a place has, at most.

    message: how many this sender has sent to this ring before. places: of the ring.
    """
    words = own.nbytes % WORD == 0
    assert own.is_contiguous() and (not words or own.data_ptr() % WORD == 0)
    n = own.nbytes // WORD if words else own.nbytes
    numbers = (own.data_ptr(), *ends, n, message)
    _peer_copy_kernel[(PROGRAMS,)](*numbers, sends, words, places, PROGRAMS, BLOCK)
