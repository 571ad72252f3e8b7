"""DFLASH: a few attention layers draft a whole block in one pass."""

from pathlib import Path

from mamba_eagle.config import EngineConfig
from mamba_eagle.drafting.base import Drafter, DraftParts, FolderSource
from mamba_eagle.drafting.block_drafter import BlockDrafter
from mamba_eagle.drafting.block_trees import BlockTrees, MarginalTrees
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.dflash import BlockDraftModel, published_name
from mamba_eagle.models.dflash_config import block_config
from mamba_eagle.models.loader import stored_tensors
from mamba_eagle.models.registry import read_as


class DFlashSource(FolderSource):
    must_equal = ("vocab_size",)
    trees: type[BlockTrees] = MarginalTrees

    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        super().__init__(config, target)
        self.shape = config.tree_shape
        self.block = block_config(self.own)
        self.tap_layers = self.block.taps

    def read(self) -> ModelConfig:
        return read_as("dflash_config", self.path)

    @property
    def made_for(self) -> int:
        return self.block.target_hidden_size

    def problems(self) -> list[str]:
        wrong, block, shape = super().problems(), self.block, self.shape
        if shape.depth > block.max_drafts:
            wrong.append(
                f"--speculative-num-steps {shape.depth}: drafter {self.path} drafts "
                f"{block.max_drafts} tokens in a row at most (block_size {block.rows}); set it to "
                f"{block.max_drafts} at most"
            )
        layers, taps = len(self.target.blocks), self.tap_layers
        if sorted(set(taps)) != list(taps) or taps[0] < 0 or taps[-1] > layers:
            wrong.append(
                f"drafter {self.path} reads the outputs of layers {[tap - 1 for tap in taps]} of a "
                f"target with {layers} layers: set target_layer_ids in config.json to increasing "
                f"numbers between 0 and {layers - 1}"
            )
        return wrong

    @property
    def vocabulary(self) -> int:
        return self.block.draft_vocab_size

    def module(self, config: ModelConfig | None = None) -> BlockDraftModel:
        names = None
        if self.has_files:
            names = {published_name(name) for name in stored_tensors(Path(self.path))}
        return BlockDraftModel(config or self.own, names)

    def make(self, parts: DraftParts) -> Drafter:
        model = self.load(parts)
        assert isinstance(model, BlockDraftModel)
        model.check_tokens(self.path)
        vocabulary = DraftVocabulary(parts.backend, self.columns(parts), model.target_ids())
        trees = self.trees(model, parts.target.own_head, vocabulary)
        return BlockDrafter(model, trees, parts)
