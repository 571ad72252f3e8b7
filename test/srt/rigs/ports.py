"""Ports for tests that listen on several in a row."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000


def free_ports(count: int) -> int:
    """The first of so many ports that nobody has, on any address.

    Below those that the kernel gives to connections: of these any may be taken, also by a
    connection that was closed within the last minute, and a test run leaves thousands of them.
    """
    end = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    # Each worker of a test run has a part of them: what it finds free it uses only later.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    width = (end - FIRST) // workers
    begin = FIRST + width * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    luck = random.SystemRandom()  # other processes look for ports as well
    while True:
        first = luck.randrange(begin, begin + width - count)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
