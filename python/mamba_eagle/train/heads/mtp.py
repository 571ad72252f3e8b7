"""Multi-token prediction (arXiv 2404.19737; sequential modules: arXiv 2412.19437) for a target that
was published without it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.drafting.mtp import MtpNetwork
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.mtp import MtpHead
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.batches import Answer
from mamba_eagle.train.heads.base import initialize
from mamba_eagle.train.heads.config import head_config
from mamba_eagle.train.heads.unrolled import UnrolledHead
from mamba_eagle.train.settings import TrainSettings


class TrainableMtp(UnrolledHead):
    """Embedding and lm_head are the target's."""

    module: MtpHead
    network: MtpNetwork

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        self.config = head_config("NemotronHMTPModel", settings.head_pattern, target.config)
        self.config["mtp_hybrid_override_pattern"] = self.config.pop("hybrid_override_pattern")
        self.config["num_nextn_predict_layers"] = settings.mtp_modules
        head = MtpHead(parse_config(self.config)).float()
        initialize(head, settings.seed)
        with torch.no_grad():  # each module ends in the target's norm, before the target's lm_head
            layers: Any = head.mtp.layers
            for last in layers[head.length - 1 :: head.length]:
                last.final_layernorm.weight.copy_(target.parts.norm.weight)
        self.module = head.to(target.lm_head.weight.device)
        self.network = MtpNetwork(head, target)

    @classmethod
    def problems(cls, settings: TrainSettings, target: ModelConfig) -> list[str]:
        modules, depth = settings.mtp_modules, settings.depth
        if modules in (1, depth):
            return []
        return [
            f"--mtp-modules {modules} with --depth {depth}: module j drafts the token at depth j, "
            "so give as many modules as the depth, or 1 to use a single module at every depth"
        ]

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """With separate modules, module j reads module j - 1 of the preceding entry, never its own
        drafts. So all entries are true ones, and one pass gives every module's output."""
        if self.network.max_depth is None:
            yield from super().unroll(tokens, features, depth)
        else:
            outputs = self.begin(tokens, features).outputs
            for _ in range(depth):
                yield outputs
