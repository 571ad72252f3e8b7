"""Starts a runner in this process: threads, the other ranks, grammars, and the model."""

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.devices import rank_device, set_threads
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.runner.assemble import START_ERRORS, assemble
from mamba_eagle.runner.constraints import matchers_for
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.ranks import join_ranks
from mamba_eagle.runner.threads import default_threads


def start_rank(config: EngineConfig, rank: int = 0, folder: str = "") -> ModelRunner:
    """Load a rank's part of the model that a resolved ``config`` names, once all ranks are there.
    --cpu-threads holds for the whole process; the calling thread flushes denormals from now on.

    The tokenizer is read for grammars beside the weights, and not beside the first steps, which
    that would hold up by a second.

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
