"""STANDALONE: a smaller model (attention, Mamba2 or hybrid) drafts from tokens alone."""

from torch import Tensor

from mamba_eagle.drafting.base import Drafter, DraftParts, FolderSource
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.registry import model_class


class StandaloneNetwork(DraftNetwork):
    """Entries take no features: the model's own caches hold the context."""

    feature_size = 0
    reads_above = False

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.config = model.config

    def run_entries(
        self, tokens: Tensor, features: Tensor, carry: Tensor, ctx: ForwardContext
    ) -> Tensor:
        return self.model(tokens.reshape(-1), ctx).unflatten(0, tokens.shape)

    def lanes(self, depth: int, tokens: Tensor, above: Tensor, ctx: ForwardContext) -> Tensor:
        return self.model(tokens, ctx)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.model.raw_logits(outputs)

    @property
    def num_bytes(self) -> int:
        return weight_bytes(self.model)


class StandaloneSource(FolderSource):
    must_equal = ("vocab_size",)

    def module(self, config: ModelConfig | None = None) -> CausalLM:
        return model_class(self.own)(config or self.own)

    def make(self, parts: DraftParts) -> Drafter:
        return ModelDrafter(StandaloneNetwork(self.load(parts)), self.columns(parts), parts)
