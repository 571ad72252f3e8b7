"""How many files and sockets this process may open: each connection is one of them."""

import contextlib
import os
import resource
from typing import NamedTuple

# The server process has about 25 open when it is ready; loading takes some more for a while.
MIN_DESCRIPTORS = 64
USED_WHEN_READY = 32  # assumed where they cannot be counted
RESERVE = 8  # for files that are opened while connections are at their limit
MAX_SPARE = 256


def raise_limit(wanted: int) -> int:
    """Raises the limit to ``wanted``, or to this user's maximum; gives what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def problems() -> list[str]:
    """Why the server cannot even start."""
    limit = raise_limit(MIN_DESCRIPTORS)
    if limit >= MIN_DESCRIPTORS:
        return []
    return [
        f"ulimit -n {limit}: the server needs {MIN_DESCRIPTORS} open files or more, and one more "
        "for each connection; raise the limit"
    ]


class Room(NamedTuple):
    """How many connections there can be."""

    connections: int
    spare: int  # beyond those, for telling clients that there is no room


def room_for_connections(wanted: int) -> Room:
    """What of ``wanted`` connections fits beside what is open now."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = USED_WHEN_READY
    spare = min(MAX_SPARE, wanted // 4 + 1)
    available = raise_limit(wanted + spare + used + RESERVE) - used - RESERVE
    if available < wanted + spare:
        spare = max(1, min(spare, available // 3))
        wanted = max(1, available - spare)
    return Room(wanted, spare)
