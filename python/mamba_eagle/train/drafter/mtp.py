"""Multi-token prediction (arXiv 2404.19737; modules in a row: arXiv 2412.19437) for a target that
was published without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mamba_eagle.drafting.mtp import MtpNetwork
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.mtp import MtpHead
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.drafter.batches import Answer
from mamba_eagle.train.drafter.recipe import Recipe, begin, unroll
from mamba_eagle.train.drafter.settings import TrainSettings
from mamba_eagle.train.drafter.shapes import head_values
from mamba_eagle.train.init import initialize


class MtpRecipe(Recipe):
    """Embedding and lm_head are the target's."""

    network: MtpNetwork

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        self.config = head_values("NemotronHMTPModel", settings.head_pattern, target.config)
        self.config["mtp_hybrid_override_pattern"] = self.config.pop("hybrid_override_pattern")
        self.config["num_nextn_predict_layers"] = settings.mtp_modules
        head = MtpHead(parse_config(self.config)).float()
        initialize(head, settings.seed)
        with torch.no_grad():  # each module ends in the same norm, in front of the same lm_head
            for last in head.mtp.layers[head.length - 1 :: head.length]:
                last.final_layernorm.weight.copy_(target.parts.norm.weight)
        self.module = head.to(target.lm_head.weight.device)
        self.network = MtpNetwork(head, target)

    @classmethod
    def problems(cls, settings: TrainSettings, target: ModelConfig) -> list[str]:
        modules, depth = settings.mtp_modules, settings.depth
        if modules in (1, depth):
            return []
        return [
            f"--mtp-modules {modules} with --depth {depth}: module j guesses the token at depth j, "
            "so give as many modules as the depth, or 1 to repeat a single one"
        ]

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """Module j of K reads module j-1 of the entry ahead, never its own guesses: true entries
        are all there is, and hold every module's output."""
        if self.network.max_depth is None:
            yield from unroll(self.network, tokens, features, depth)
        else:
            outputs = begin(self.network, tokens, features).outputs
            for _ in range(depth):
                yield outputs

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.network.logits(depth, outputs).float()

    def weights(self) -> dict[str, Tensor]:
        return self.module.published_weights()
