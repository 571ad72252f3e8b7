"""How many threads a runner computes with on a CPU, unless --cpu-threads says so."""

import os
from contextlib import suppress
from pathlib import Path

MAX_DEFAULT = 32  # few threads read all that a memory can give; more of them only wait
CORES_PER_HELPER = 8  # of this many cores one is left to the server process and the scheduler


def default_threads(ranks: int = 1) -> int:
    """Threads for each of ``ranks`` processes: their part of the cores that are left beside the
    server process and the scheduler, 32 in all at most."""
    cores = usable_cores()
    left = cores - max(1, cores // CORES_PER_HELPER)
    return max(1, min(left, MAX_DEFAULT) // ranks)


def usable_cores(
    topology: Path = Path("/sys/devices/system/cpu"),
    quota: Path = Path("/sys/fs/cgroup/cpu.max"),
) -> int:
    """Cores that this process may use, each counted once however many threads it runs at a time;
    within a container, no more than its share of them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    processors = os.sched_getaffinity(0)
    cores = {_core(topology, processor) for processor in processors}
    count = len(cores)
    with suppress(OSError, ValueError):  # "max 100000": no limit
        allowed, period = quota.read_text().split()
        count = min(count, -(-int(allowed) // int(period)))
    return max(1, count)


def _core(topology: Path, processor: int) -> str:
    """What names the core of a processor: the list of the processors on it."""
    with suppress(OSError):
        return Path(topology, f"cpu{processor}", "topology/thread_siblings_list").read_text()
    return str(processor)
