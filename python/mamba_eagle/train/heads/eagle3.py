"""EAGLE-3 (arXiv 2503.01840): one layer that reads hidden states from three depths of the target
and drafts from a vocabulary of its own. Its outputs do not predict features, so it has no feature
loss."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.drafting.eagle3 import EagleThreeNetwork
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle3 import Eagle3Head, layer_ids, tap_layers
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.batches import Answer
from mamba_eagle.train.heads.base import initialize
from mamba_eagle.train.heads.config import eagle3_config
from mamba_eagle.train.heads.unrolled import UnrolledHead
from mamba_eagle.train.settings import TrainSettings


class TrainableEagle3(UnrolledHead):
    """The embedding is the target's; lm_head starts as the target's weights for the vocabulary."""

    module: Eagle3Head

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        vocab_size = min(settings.draft_vocab_size, target.config.vocab_size)
        self.config = eagle3_config(vocab_size, layer_ids(taps(target.config)), target.config)
        config = parse_config(self.config)
        target.tap(tap_layers(config, len(target.config.blocks)))
        head = Eagle3Head(config).float()
        initialize(head, settings.seed)
        head.choose_tokens(frequent_tokens(answers, vocab_size, target.config.vocab_size))
        self.module = head.to(target.lm_head.weight.device)
        assert head.lm_head is not None  # of its own tokens
        with torch.no_grad():
            head.norm.weight.copy_(target.parts.norm.weight)
            head.lm_head.weight.copy_(target.lm_head.weight[self.ids] * target.logits_scale)
        self.network = EagleThreeNetwork(head, target)

    @property
    def ids(self) -> Tensor:
        """The target's tokens that the head drafts: [D] int64."""
        ids = self.module.target_ids()
        assert ids is not None  # of its own tokens
        return ids

    def target_probs(self, probs: Tensor) -> Tensor:
        return probs[:, self.ids]

    def token_ids(self, choice: Tensor) -> Tensor:
        return self.ids[choice]


def taps(target: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs the head reads: near the front, in the middle and near the end, as in
    the paper's code. A target of fewer than 8 layers is tapped at its first and middle layer and
    after its last."""
    layers = len(target.blocks)
    if layers >= 8:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({0, layers // 2, layers}))


def frequent_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> Tensor:
    """The ``count`` most frequent tokens of the answers in ascending order, int64 [count]. If the
    answers have fewer, the smallest unused token ids fill up."""
    seen = Counter(token for answer in answers for token in answer.tokens[answer.prompt_len :])
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))
