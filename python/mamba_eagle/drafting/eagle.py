"""EAGLE: a small head predicts the target's next hidden states and drafts a tree from them."""

from mamba_eagle.backend.programs import Network
from mamba_eagle.drafting.base import Drafter, DraftParts, FolderSource
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.network import HeadNetwork
from mamba_eagle.drafting.rounded_head import rounded_head
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.registry import MODELS


class EagleNetwork(HeadNetwork):
    """The head's output predicts the target's hidden state."""

    head: EagleHead

    def parts(self) -> Network | None:
        head, target = self.head, self.target
        if target.logits_scale != 1.0:
            return None
        own = (target.parts.embedding, target.embedding_scale, tuple(head.layers), head.norm)
        return Network(*own, self.output or target.lm_head, entry=head.fc)


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
        network = EagleNetwork(self.load(parts), parts.target, rounded_head(parts))
        return ModelDrafter(network, self.columns(parts), parts)
