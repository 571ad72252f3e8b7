"""A runner in this process, with what a server's runner process does before it makes its own."""

from __future__ import annotations

import torch

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.devices import set_threads
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.runner.assemble import START_ERRORS
from mamba_eagle.runner.constraints import matchers_for
from mamba_eagle.runner.leader import LeadingRunner, runner_for
from mamba_eagle.runner.model_runner import ModelRunner


def make_runner(config: EngineConfig, grammars: bool = False) -> ModelRunner | LeadingRunner:
    """Load the model that a resolved ``config`` names, with --tp-size in several processes, of
    which this one is the first. --cpu-threads holds for the whole process; without it torch's own
    number stays. This thread flushes denormals from now on.

    Args:
        grammars: the tokenizer is read for them beside the weights, and not beside the first steps,
            which it would hold up. With one rank.
    Raises: ConfigError, also for a checkpoint that cannot be read or does not fit.
    """
    if config.nnodes > 1:
        raise ConfigError(["--nnodes: is for a server; this command runs on one machine"])
    set_threads(config.cpu_threads or torch.get_num_threads())
    matchers = None
    try:
        if grammars:
            matchers = matchers_for(config, read_model_config(config.model_path))
            matchers.prepare()
        runner = runner_for(config, matchers)
    except ConfigError:
        raise
    except START_ERRORS as error:
        raise ConfigError([str(error)]) from error
    if matchers is not None:
        matchers.wait()
    return runner
