"""The runner of a command that has no server: benchmarks."""

import dataclasses

import torch

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.runner.leader import LeadingRunner
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.start import start_rank


def make_runner(config: EngineConfig) -> ModelRunner | LeadingRunner:
    """All ranks of a resolved ``config`` as one runner, with those that do not answer in processes
    of their own. A single rank has torch's number of threads, unless --cpu-threads gives one.

    Raises: as ``start_rank``.
    """
    if config.nnodes > 1:
        raise ConfigError(["--nnodes: is for a server; this command runs on one machine"])
    if config.num_ranks > 1:
        return LeadingRunner(config)
    threads = config.cpu_threads or torch.get_num_threads()
    return start_rank(dataclasses.replace(config, cpu_threads=threads))
