"""What a runner does differently where the layers are split over pipeline stages.

The last stage drafts, samples and answers. The others learn from it which trees they verify and
which tokens the target takes at their nodes; what follows from these (accepted paths, folds, rows)
each works out for its own layers, as a single runner does. Docs: docs/design/parallel.md.
"""

import logging

import torch
from torch import Tensor, nn

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.token_ops import TokenLogprobs
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.drafting import base as drafting
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import created_as
from mamba_eagle.models.split import Split
from mamba_eagle.parallel.groups import Channel, Group, Mail
from mamba_eagle.parallel.shard import local
from mamba_eagle.parallel.stages import (
    RECURRENT,
    Weights,
    balanced,
    given_problems,
    spans_of,
    staged,
)
from mamba_eagle.runner.chooser import Chooser
from mamba_eagle.runner.constraints import Constraints, TokenMasks
from mamba_eagle.runner.memory import state_bytes
from mamba_eagle.runner.ranks import Ranks
from mamba_eagle.runner.sampler import Scored
from mamba_eagle.tree.tree import Tree, empty_trees

log = logging.getLogger("mamba_eagle.runner")


class EarlierStageChooser(Chooser):
    """Learns what the last stage has chosen."""

    def _sampled(self, nodes: Scored, allowed: TokenMasks | None) -> Tensor:
        return torch.zeros_like(nodes.positions)  # overwritten

    def samples_in_graphs(self, sampled: bool) -> bool:
        return False

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """They are not read: the last stage answers."""
        none = tokens.new_zeros(len(tokens), top)
        return TokenLogprobs(torch.zeros_like(tokens), none, none)

    def relay(self, tree: Tree) -> None:
        packed = self.stages.from_last(tree.packed(), Channel.TREES)
        arrived = Tree.unpacked(packed, tree.scores)
        torch._foreach_copy_(list(tree[:3]), list(arrived[:3]))
        tree.ancestors.copy_(arrived.ancestors)


class DrafterElsewhere(drafting.NoDrafter):
    """Of the stages before the last one, which has the drafter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def propose(
        self, slots: Tensor, part: drafting.StepPart, noise: drafting.KeyedNoise | None
    ) -> Tree:
        """Room for the trees."""
        return empty_trees(len(slots), part.shape.nodes, self.device)


def agree_on_drafting(drafter: drafting.Drafter, stages: Group) -> None:
    """All stages get trees within their captured steps, or all of them before; and all work at the
    same time, or take turns."""
    found = stages.smallest([drafter.on_device, not drafter.learns_from_all])
    if isinstance(drafter, DrafterElsewhere):
        drafter.on_device, drafter.learns_from_all = bool(found[0]), not found[1]


class ConstraintsElsewhere(Constraints):
    """Of the same stages: grammars are followed where tokens are sampled."""

    def admit(self, slot: int, params: SamplingParams, output_start: int) -> None: ...


def own_part(
    config: EngineConfig,
    model: ModelConfig,
    split: Split | None,
    source: drafting.DraftSource | None,
    backend: Backend,
    ranks: Ranks,
) -> ModelConfig:
    """The sizes of this rank's part of the target. Stages have layers as --pp-layers says, or
    balanced by bytes; the same on all ranks. model: the whole one.

    Raises: ConfigError for numbers that do not fit the model.
    """
    own = local(model, ranks.group.shard)
    if split is None or ranks.stages.size == 1:
        return own
    if counts := config.stage_layers:
        if wrong := given_problems(model, counts):
            raise ConfigError(wrong)
        spans = spans_of(counts)
    else:
        weights = stage_weights(config, model, split, source, backend)
        spans = balanced(model, weights, config.pp_size)
    log.info("layers by stage: %s", ", ".join(f"{begin}-{end - 1}" for begin, end in spans))
    return staged(own, spans[ranks.stages.rank], drafts=source is not None)


def stage_weights(
    config: EngineConfig,
    model: ModelConfig,
    split: Split,
    source: drafting.DraftSource | None,
    backend: Backend,
) -> Weights:
    """What layers are balanced by: weights in the model's dtype, and a state for each request that
    may run. source: of the drafter, if there is one."""
    whole = split.whole
    assert isinstance(whole, CausalLM)
    itemsize = backend.dtype.itemsize
    states = state_bytes(model, getattr(torch, config.mamba_ssm_dtype).itemsize, itemsize)
    state = states // (model.num_recurrent_layers or 1) * config.max_running_requests
    seen: set[int] = set()
    layers = [
        parameter_bytes(layer, seen) + (state if kind in RECURRENT else 0)
        for layer, kind in zip(whole.parts.layers, model.blocks)
    ]
    embedding = parameter_bytes(whole.parts.embedding)
    last = parameter_bytes(whole.lm_head)
    if source is not None:
        last += 0 if model.tie_word_embeddings else embedding
    if isinstance(source, drafting.FolderSource):
        with created_as(backend.dtype, torch.device("meta")):
            last += parameter_bytes(source.module())
    return Weights(layers, embedding, last)


def parameter_bytes(module: nn.Module, seen: set[int] | None = None) -> int:
    """Bytes of its parameters that are not in ``seen`` yet; they are added to it, so weights that
    layers share count once."""
    seen = set() if seen is None else seen
    total = 0
    for parameter in module.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            total += parameter.nbytes
    return total


def mail_for(config: EngineConfig, ranks: Ranks, backend: Backend, model: CausalLM) -> Mail | None:
    """What carries messages between stages on GPUs, on all ranks together; None: NCCL does, and
    stages take turns. model: this rank's, with its taps."""
    stages = ranks.stages
    on_gpus = stages.size > 1 and not backend.place.on_host
    if not on_gpus or config.pp_turns or config.nnodes > 1:
        return None
    # Triton, and torch's distributed package
    from mamba_eagle.parallel.mail import join_mail
    from mamba_eagle.parallel.sums.shared_memory import share_problem

    if problem := share_problem(stages):
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
