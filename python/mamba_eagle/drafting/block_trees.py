"""Trees of tokens from the rows of one pass.

Candidates are added depth by depth and chosen as for EAGLE-2 trees (tree/candidates.py), but the
network does not run again: row d says what comes at depth d + 1.

Shapes: b requests, D rows that predict (the depth of the tree), k lanes, V vocabulary, V' of it
that the drafter knows.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from mamba_eagle.drafting.base import KeyedNoise
from mamba_eagle.drafting.vocabulary import DraftVocabulary, Shortlist
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.models.dflash import BlockDraftModel, Head
from mamba_eagle.models.markov import MarkovHead
from mamba_eagle.tree.candidates import Candidates


class Block(NamedTuple):
    """What a pass gives."""

    hidden: Tensor  # [b, D, hidden_size], after the final norm
    anchors: Tensor  # [b] int64, tokens
    first: Tensor  # [b] int64, the position that row 0 predicts


class BlockTrees(ABC):
    """How trees grow from the rows of a block."""

    def __init__(self, model: BlockDraftModel, lm_head: Head, vocabulary: DraftVocabulary) -> None:
        """lm_head: the target's; of either, this rank has the logits of its own tokens."""
        self.model, self.lm_head, self.vocabulary = model, lm_head, vocabulary

    @abstractmethod
    def grow(self, grown: Candidates, block: Block, noise: KeyedNoise | None) -> None:
        """Add candidates for D depths."""

    def best(
        self, logits: Tensor, positions: Tensor, noise: KeyedNoise | None, k: int
    ) -> TopTokens:
        """The k best tokens of each lane: logits [b, lanes, own V'] of tokens at ``positions`` [b]
        -> [b, lanes, k]."""
        if noise is None:
            return self.vocabulary.best(logits, k)
        return noise.best(logits, self.vocabulary, positions, k)


class MarginalTrees(BlockTrees):
    """DFlash: each row has a distribution of its own, whatever stands in the rows before it, so
    all lanes of a depth get the same children."""

    def grow(self, grown: Candidates, block: Block, noise: KeyedNoise | None) -> None:
        b, depth, _ = block.hidden.shape
        k = grown.topk
        logits = self.model.logits(block.hidden.flatten(0, 1), self.lm_head)
        by_row = logits.view(b, depth, 1, -1)
        if noise is None:
            rows = self.best(by_row.view(1, b * depth, -1), block.first, None, k)
            parts = (part.view(b, depth, 1, k).unbind(1) for part in rows)
            tops = [TopTokens(*pair) for pair in zip(*parts, strict=True)]
        else:
            tops = [self.best(by_row[:, d], block.first + d, noise, k) for d in range(depth)]
        for d, children in enumerate(tops):
            lanes = k if d else 1
            grown.expand(TopTokens(*(part.expand(-1, lanes, -1) for part in children)))


class MarkovTrees(BlockTrees):
    """DSpark: a row's distribution depends on the token before it, so each lane's children are
    drawn from a distribution of its own, at the price of a product of low rank per depth.

    With ``dspark_draft_topk`` M the children are among the M best tokens of the row without that
    dependence, and only M rows of the product's weight are read.
    """

    def __init__(self, model: BlockDraftModel, lm_head: Head, vocabulary: DraftVocabulary) -> None:
        super().__init__(model, lm_head, vocabulary)
        assert model.markov_head is not None
        self.head: MarkovHead = model.markov_head
        self.scale = model.block.logit_scale
        wanted, known = model.block.draft_topk, model.block.draft_vocab_size
        # a weight of few bits is multiplied whole
        whole = not wanted or wanted >= known or self.head.markov_w2.matrix is not None
        self.shortlist = 0 if whole else wanted

    def grow(self, grown: Candidates, block: Block, noise: KeyedNoise | None) -> None:
        b, depth, _ = block.hidden.shape
        head, k = self.head, grown.topk
        logits = self.model.logits(block.hidden.flatten(0, 1), self.lm_head).view(b, depth, -1)
        listed = None
        if self.shortlist:
            found = self.vocabulary.shortlist(logits.flatten(0, 1), self.shortlist)
            listed = found.unflatten((b, depth))
        tokens = block.anchors[:, None]  # [b, lanes]
        state = block.hidden.new_zeros(b, 1, head.rank)
        for d in range(depth):
            lanes = tokens.shape[1]
            hidden = block.hidden[:, d, None].expand(-1, lanes, -1).flatten(0, 1)
            step = head.step(head.markov_w1(tokens.reshape(-1)), hidden, state.flatten(0, 1))
            row = None if listed is None else listed.row(d)
            bias = self._bias(step.code.view(b, lanes, -1), row)
            biased = logits[:, d, None] + (bias if self.scale == 1.0 else bias * self.scale)
            frontier = grown.expand(self.best(biased, block.first + d, noise, k))
            tokens = frontier.tokens
            if head.has_state:
                above = frontier.lanes[..., None].expand(-1, -1, head.rank)
                state = step.state.view(b, lanes, -1).gather(1, above)

    def _bias(self, code: Tensor, listed: Shortlist | None) -> Tensor:
        """What the head adds to logits: code [b, lanes, r] -> [b, lanes, own V']; -inf for draft
        tokens that are not ``listed``, if that is given, [b, M]."""
        weight, lanes = self.head.markov_w2.weight, code.shape[1]
        if listed is None:
            return self.head.markov_w2(code.flatten(0, 1)).unflatten(0, code.shape[:2])
        rows = weight[listed.places]  # [b, M, r]
        own = (code @ rows.transpose(1, 2)).to(code.dtype)
        if listed.kept is not None:
            own = own.masked_fill(~listed.kept[:, None], float("-inf"))
        bias = own.new_full((*code.shape[:2], len(weight)), float("-inf"))
        return bias.scatter_(2, listed.places[:, None].expand(-1, lanes, -1), own)
