"""EAGLE-3 (arXiv 2503.01840): one layer on hidden states from three depths of the target, with a
vocabulary of its own. Its outputs are no guesses of features, so there is no distance to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.drafting.eagle3 import EagleThreeNetwork
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle3 import Eagle3Head, layer_ids, tap_layers
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.drafter.batches import Answer
from mamba_eagle.train.drafter.recipe import Recipe
from mamba_eagle.train.drafter.settings import TrainSettings
from mamba_eagle.train.drafter.shapes import eagle3_values
from mamba_eagle.train.init import initialize


class Eagle3Recipe(Recipe):
    """The embedding is the target's; lm_head begins as the target's rows of the tokens chosen."""

    network: EagleThreeNetwork

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        vocab = min(settings.draft_vocab_size, target.config.vocab_size)
        self.config = eagle3_values(vocab, layer_ids(taps(target.config)), target.config)
        config = parse_config(self.config)
        target.tap(tap_layers(config, len(target.config.blocks)))
        head = Eagle3Head(config).float()
        initialize(head, settings.seed)
        self.ids = frequent_tokens(answers, vocab, target.config.vocab_size)
        head.choose_tokens(self.ids)
        self.module = head.to(target.lm_head.weight.device)
        self.ids = self.ids.to(target.lm_head.weight.device)
        with torch.no_grad():
            head.norm.weight.copy_(target.parts.norm.weight)
            head.lm_head.weight.copy_(target.lm_head.weight[self.ids] * target.logits_scale)
        self.network = EagleThreeNetwork(head, target)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.network.logits(0, outputs).float()

    def wanted(self, wanted: Tensor) -> Tensor:
        return wanted[:, self.ids]

    def token_ids(self, choice: Tensor) -> Tensor:
        return self.ids[choice]

    def weights(self) -> dict[str, Tensor]:
        return self.module.published_weights()


def taps(target: ModelConfig) -> tuple[int, ...]:
    """Layers at whose inputs hidden states are taken: near the front, in the middle and near the
    end, as in the paper's code; of a few layers: the first, the middle one and what leaves the
    last."""
    layers = len(target.blocks)
    if layers >= 8:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({0, layers // 2, layers}))


def frequent_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> Tensor:
    """The ``count`` tokens that are most frequent in the answers, rising; those of lower number
    where the answers have fewer. int64 [count]."""
    seen = Counter(token for answer in answers for token in answer.tokens[answer.prompt_len :])
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))
