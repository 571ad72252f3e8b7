"""DSpark (arXiv 2607.05147): a Markov head conditions each place on the token before it, and a
confidence head says how likely the place's draft is to be accepted."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.batches import Answer, PaddedAnswers
from mamba_eagle.train.heads.block import Drafted, TrainableBlockDrafter
from mamba_eagle.train.settings import TrainSettings

TOKEN_WEIGHT, DISTANCE_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


class TrainableDspark(TrainableBlockDrafter):
    """Per place: 0.1 of the cross entropy of the answer's token, 0.9 of the total variation
    distance to the target's distribution, and the cross entropy of the confidence with the rate at
    which rejection sampling would accept, ``Σ min(p, q)``."""

    architecture = "Qwen3DSparkModel"
    optional = frozenset(
        {"mask_embedding", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    )

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        super().__init__(settings, target, answers)
        head = self.module.markov_head
        assert head is not None
        with torch.no_grad():  # a new drafter begins as DFlash's
            head.markov_w2.weight.zero_()

    def place_loss(self, drafted: Drafted) -> Tensor:
        log_probs = drafted.logits.log_softmax(-1)
        token_loss = F.nll_loss(log_probs, drafted.labels, reduction="none")
        distance = (drafted.probs - log_probs.exp()).abs().sum(-1) / 2
        markov, confidence = self.module.markov_head, self.module.confidence_head
        assert markov is not None and confidence is not None
        logit = confidence.logit(drafted.hidden, markov.markov_w1(drafted.sources)).float()
        rate = (1 - distance).clamp(0.0, 1.0).detach()
        confidence_loss = F.binary_cross_entropy_with_logits(logit, rate, reduction="none")
        return (
            TOKEN_WEIGHT * token_loss
            + DISTANCE_WEIGHT * distance
            + CONFIDENCE_WEIGHT * confidence_loss
        )

    def biased(self, logits: Tensor, hidden: Tensor, answers: PaddedAnswers) -> Tensor:
        head, blocks = self.module.markov_head, answers.blocks
        assert head is not None
        k, last = hidden.shape[2], answers.tokens.shape[1] - 1
        offsets = torch.arange(k, device=hidden.device)
        places = (blocks.anchors.clamp(min=0)[..., None] + offsets).clamp(max=last)  # [b, A, k]
        before = answers.tokens.gather(1, places.flatten(1)).view(-1, k)  # [b * A, k]
        rows, codes = hidden.flatten(0, 1), []
        state = rows.new_zeros(len(rows), head.rank)
        for j in range(k):
            code, state = head.step(head.markov_w1(before[:, j]), rows[:, j], state)
            codes.append(code)
        chosen = torch.stack(codes, dim=1).flatten(0, 1)[blocks.flat]
        return logits + self._bias(chosen)

    def chains(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        head = self.module.markov_head
        assert head is not None
        logits = self.module.logits(hidden, self.target.lm_head).float()
        tokens, drafts = anchors, []
        state = hidden.new_zeros(len(hidden), head.rank)
        for j in range(hidden.shape[1]):
            code, state = head.step(head.markov_w1(tokens), hidden[:, j], state)
            tokens = (logits[:, j] + self._bias(code)).argmax(-1)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def _bias(self, code: Tensor) -> Tensor:
        assert self.module.markov_head is not None
        return self.module.markov_head.markov_w2(code).float() * self.block.logit_scale
