"""EAGLE-3: a head on three of the target's hidden states, often with a smaller vocabulary."""

from pathlib import Path

from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.drafting.base import Drafter, DraftParts, FolderSource
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.network import HeadNetwork
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models import eagle3
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import stored_tensors


class EagleThreeNetwork(HeadNetwork):
    """An entry's feature is computed from the tapped hidden states."""

    head: eagle3.Eagle3Head

    def __init__(self, head: eagle3.Eagle3Head, target: CausalLM) -> None:
        super().__init__(head, target)
        self.first_tap = target.config.hidden_size
        if head.embed_tokens is not None:
            self.embed = head.embed_tokens
        if head.lm_head is not None:
            self.lm_head = head.lm_head
        assert head.config.attention is not None and head.config.attention.rope is not None
        self.rotary = Rotary(head.config.attention.rope)

    def entry_features(self, target: Tensor) -> Tensor:
        return self.head.fuse(target[:, self.first_tap :])

    def run(self, tokens: Tensor, features: Tensor, ctx: ForwardContext) -> Tensor:
        ctx.rotation = self.rotary(ctx.positions, features.device)
        return super().run(tokens, features, ctx)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.lm_head(self.head.normed(outputs))

    def target_ids(self) -> Tensor | None:
        return self.head.target_ids()


class EagleThreeSource(FolderSource):
    must_equal = ("vocab_size",)
    reader = "eagle3"

    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        super().__init__(config, target)
        self.tap_layers = eagle3.tap_layers(self.own, len(target.blocks))

    @property
    def made_for(self) -> int:
        return eagle3.target_hidden_size(self.own)

    def problems(self) -> list[str]:
        wrong = super().problems()
        layers, taps = len(self.target.blocks), self.tap_layers
        if sorted(set(taps)) != list(taps) or taps[0] < 0 or taps[-1] > layers:
            wrong.append(
                f"drafter {self.path} reads the inputs of layers {list(taps)} of a target with "
                f"{layers} layers: set eagle_config.eagle_aux_hidden_state_layer_ids in "
                f"config.json to increasing numbers between 0 and {layers}"
            )
        return wrong

    @property
    def vocabulary(self) -> int:
        return eagle3.draft_vocab_size(self.own)

    def module(self, config: ModelConfig | None = None) -> eagle3.Eagle3Head:
        names = (
            map(eagle3.published_name, stored_tensors(Path(self.path))) if self.has_files else ()
        )
        return eagle3.Eagle3Head(config or self.own, {*names} or eagle3.OWN_WEIGHTS)

    def make(self, parts: DraftParts) -> Drafter:
        head: eagle3.Eagle3Head = self.load(parts)
        head.check_tokens(self.path)
        return ModelDrafter(EagleThreeNetwork(head, parts.target), self.columns(parts), parts)
