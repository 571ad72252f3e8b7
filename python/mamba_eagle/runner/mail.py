"""What carries messages between pipeline stages on GPUs."""

import logging

import torch

from mamba_eagle.backend.base import Backend
from mamba_eagle.config import EngineConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.parallel.groups import Channel, Mail
from mamba_eagle.runner.ranks import Ranks

log = logging.getLogger("mamba_eagle.runner")


def mail_for(config: EngineConfig, ranks: Ranks, backend: Backend, model: CausalLM) -> Mail | None:
    """What carries messages between stages on GPUs, on all ranks together; None: NCCL does, and
    stages take turns. model: this rank's, with its taps."""
    stages = ranks.stages
    on_gpus = stages.size > 1 and not backend.place.on_host
    if not on_gpus or config.pp_turns or config.nnodes > 1:
        return None
    from mamba_eagle.parallel.mail import join_mail, mail_problem  # loads Triton

    if problem := mail_problem(stages):
        log.warning("stages take turns: %s", problem)
    if not ranks.smallest([not problem])[0]:
        return None
    nodes = config.max_running_requests * config.tree_shape.nodes
    # prompts in pieces of a quarter
    rows = max(nodes, (config.chunked_prefill_size or backend.place.prompt_tokens) // 4)
    bytes_of_trees = nodes * (24 + config.tree_shape.nodes)
    sizes = {
        Channel.HIDDEN: rows * model.handed_size * backend.dtype.itemsize,
        Channel.TREES: bytes_of_trees + 64,
        Channel.TOKENS: bytes_of_trees,
    }
    mail = join_mail(stages, sizes)
    torch.cuda.empty_cache()  # pools get what is free
    return mail
