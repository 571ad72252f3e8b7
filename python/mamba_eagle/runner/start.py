"""Starts a runner in this process: threads, the other ranks, grammars, and the model."""

import os
from contextlib import suppress
from pathlib import Path

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.devices import rank_device, set_threads
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.runner.assemble import START_ERRORS, assemble
from mamba_eagle.runner.constraints import matchers_for
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.ranks import join_ranks

MAX_DEFAULT = 32  # few threads read all that a memory can give; more of them only wait
CORES_PER_HELPER = 8  # of this many cores one is left to the server process and the scheduler


def default_threads(ranks: int = 1) -> int:
    """Threads for each of ``ranks`` processes: their part of the cores that are left beside the
    server process and the scheduler, 32 in all at most."""
    cores = usable_cores()
    left = cores - max(1, cores // CORES_PER_HELPER)
    return max(1, min(left, MAX_DEFAULT) // ranks)


def usable_cores(
    topology: Path = Path("/sys/devices/system/cpu"), quota: Path = Path("/sys/fs/cgroup/cpu.max")
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


def start_rank(config: EngineConfig, rank: int = 0, folder: str = "") -> ModelRunner:
    """Load a rank's part of the model that a resolved ``config`` names, once all ranks are there.
    --cpu-threads holds for the whole process; the calling thread flushes denormals from now on.

    The tokenizer, which grammars need, is read while the weights are: later it would hold up the
    first steps by a second.

    folder: of the sockets, where ranks find each other.
    Raises: ConfigError, also for a checkpoint that cannot be read or does not fit.
    """
    threads = config.cpu_threads or default_threads(config.ranks_per_node)
    set_threads(threads, rank_device(config, rank))
    try:
        ranks = join_ranks(config, rank, folder)
        matchers = matchers_for(config, read_model_config(config.model_path))
        if ranks.samples and config.tokenizer_path:
            matchers.prepare()
        runner = assemble(config, ranks, matchers)
    except ConfigError:
        raise
    except START_ERRORS as error:
        raise ConfigError([str(error)]) from error
    matchers.wait()
    return runner
