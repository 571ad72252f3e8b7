"""EAGLE: a small head predicts the target's next hidden states and drafts a tree from them."""

from torch import Tensor

from mamba_eagle.backend.programs import Network
from mamba_eagle.drafting.base import Drafter, DraftParts, FolderSource
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.drafting.rounded_head import rounded_head
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.registry import MODELS


class EagleNetwork(DraftNetwork):
    """The head's output predicts the target's hidden state, and is fed back in its place."""

    def __init__(self, head: EagleHead, target: CausalLM, output: Linear | None = None) -> None:
        """output: what makes logits; None: the target's lm_head."""
        self.head, self.target, self.output = head, target, output
        self.config = head.config
        self.feature_size = head.config.hidden_size

    def run_entries(
        self, tokens: Tensor, features: Tensor, carry: Tensor, ctx: ForwardContext
    ) -> Tensor:
        embedded = self.target.embed(tokens.reshape(-1))
        return self.head(embedded, features.flatten(0, 1), ctx).unflatten(0, tokens.shape)

    def lanes(self, depth: int, tokens: Tensor, above: Tensor, ctx: ForwardContext) -> Tensor:
        return self.head(self.target.embed(tokens), above, ctx)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.target.raw_logits(outputs) if self.output is None else self.output(outputs)

    def parts(self) -> Network | None:
        head, target = self.head, self.target
        if target.logits_scale != 1.0:
            return None
        return Network(
            target.parts.embedding,
            target.embedding_scale,
            tuple(head.layers),
            head.norm,
            self.output or target.lm_head,
            entry=head.fc,
        )

    @property
    def num_bytes(self) -> int:
        output = 0 if self.output is None else weight_bytes(self.output)
        return weight_bytes(self.head) + output


class EagleSource(FolderSource):
    must_equal = ("vocab_size", "hidden_size")

    def problems(self) -> list[str]:
        if (name := self.own.architecture) in MODELS:
            return [
                f"drafter {self.path} is a {name}, a model rather than an EAGLE head: use "
                "--speculative-algorithm STANDALONE to draft with a smaller model"
            ]
        return super().problems()

    def module(self, config: ModelConfig | None = None) -> EagleHead:
        return EagleHead(config or self.own)

    def make(self, parts: DraftParts) -> Drafter:
        head = self.load(parts)
        assert isinstance(head, EagleHead)
        network = EagleNetwork(head, parts.target, rounded_head(parts))
        return ModelDrafter(network, self.columns(parts), parts)
