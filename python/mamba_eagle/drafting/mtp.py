"""NEXTN (MTP): the multi-token-prediction modules that were trained with the target."""

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.drafting.base import Drafter, DraftParts, FolderSource
from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.drafting.network import HeadNetwork
from mamba_eagle.drafting.rounded_head import rounded_head
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.linear import Linear
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import CheckpointError, stored_tensors
from mamba_eagle.models.mtp import MtpHead, num_modules, stored_modules
from mamba_eagle.models.qwen_mtp import QwenMtpHead
from mamba_eagle.models.registry import mtp_module, read_model_config


class MtpNetwork(HeadNetwork):
    """The outputs of all K modules for an entry, concatenated.

    Module j of an entry reads module j-1 of the previous entry. Module 0 reads the target's hidden
    state of the previous position, which does not exist for drafted tokens. So the tokens drafted
    at depth d+1 are predicted by module d at depth d, where modules before d are not run:

                 root   depth 1   depth 2
        module 0  *                         * predicts the tokens of the next depth
        module 1  +        *                + is run for later entries, which read its output or
        module 2  +        +         *        attend to its keys and values

    A single module drafts at all depths, because it reads its own output.
    """

    def __init__(
        self, head: MtpHead | QwenMtpHead, target: CausalLM, output: Linear | None = None
    ) -> None:
        super().__init__(head, target, output)
        size, modules = head.config.hidden_size, head.num_modules
        self.size = size
        self.carry_size = (modules - 1) * size
        self.max_depth = modules if modules > 1 else None  # of trees; None: no limit

    def run_entries(
        self, tokens: Tensor, features: Tensor, carry: Tensor, ctx: ForwardContext
    ) -> Tensor:
        embeddings = self.embed(tokens.reshape(-1))
        outputs: list[Tensor] = []
        for module in range(self.head.num_modules):
            previous = features
            if module:
                carried = self._of(module - 1, carry)[:, None]
                previous = torch.cat([carried, outputs[-1][:, :-1]], dim=1)
            flat = self.head(module, embeddings, previous.flatten(0, 1), ctx)
            outputs.append(flat.unflatten(0, tokens.shape))
        return torch.cat(outputs, dim=-1)

    def lanes(self, depth: int, tokens: Tensor, above: Tensor, ctx: ForwardContext) -> Tensor:
        embeddings = self.embed(tokens)
        if self.max_depth is None:
            return self.head(0, embeddings, above, ctx)
        outputs = [above.new_zeros(above.shape[0], depth * self.size)]
        for module in range(depth, self.head.num_modules):
            outputs.append(self.head(module, embeddings, self._of(module - 1, above), ctx))
        return torch.cat(outputs, dim=-1)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        module = 0 if self.max_depth is None else depth
        return self.lm_head(self._of(module, outputs))

    def _of(self, module: int, outputs: Tensor) -> Tensor:
        """The columns of one module: [n, K * size] -> [n, size]."""
        return outputs[:, module * self.size : (module + 1) * self.size].contiguous()


class MtpSource(FolderSource):
    """Modules in the target's own folder, unless a draft model path is given."""

    must_equal = ("vocab_size", "hidden_size")

    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        folder = config.speculative_draft_model_path or config.model_path
        self.steps = config.tree_shape.depth
        super().__init__(replace(config, speculative_draft_model_path=folder), target)

    def read(self) -> ModelConfig:
        self.family = mtp_module(self.path)
        own = read_model_config(self.path, self.family)
        if self.has_files:
            with contextlib.suppress(CheckpointError):  # reported by ``problems``
                return stored_modules(own, stored_tensors(Path(self.path)))
        return own

    def module(self, config: ModelConfig | None = None) -> MtpHead | QwenMtpHead:
        kind = QwenMtpHead if self.family == "qwen_mtp" else MtpHead
        return kind(config or self.own)

    def problems(self) -> list[str]:
        wrong = super().problems()
        if 1 < (modules := num_modules(self.own)) < self.steps:
            wrong.append(
                f"--speculative-num-steps {self.steps}: drafter {self.path} has {modules} modules, "
                f"one per depth of the tree; set it to {modules} at most"
            )
        return wrong

    def make(self, parts: DraftParts) -> Drafter:
        network = MtpNetwork(self.load(parts), parts.target, rounded_head(parts))
        return ModelDrafter(network, self.columns(parts), parts)
