"""Grammars in the runner: which request slots have one, and the masks of a step.

The host walks each constrained tree while the device verifies it:

    draft ─ copy tokens, parents ─ verify ──────────────────────────── masks ─ sample ─ commit
    host:                          advance by the last step · walk ────┘

So masks are made when the last step's tokens and this step's trees have reached the host. On a CPU
all of this is work in line, and most masks are never made (constrained_choice.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.place import Place, Timestamp
from mamba_eagle.config import ModelSettings
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.constrain.request import RequestGrammar, fill_masks
from mamba_eagle.constrain.reshape import DraftTree, reshape
from mamba_eagle.constrain.vocabulary import Vocabulary, read_tokenizer
from mamba_eagle.core import SamplingParams
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.tree.tree import Tree


def matchers_for(config: ModelSettings, model: ModelConfig) -> Matchers:
    """Of the tokenizer that ``config`` names."""

    def load() -> Vocabulary:
        text = read_tokenizer(config.tokenizer_path)
        return Vocabulary(text, model.vocab_size, model.eos_token_ids)

    return Matchers(load, model.vocab_size, model.eos_token_ids)


NodeLists = tuple[list[int], list[int]]  # tokens, the root's aside, and parents, of a tree


class TokenMasks(NamedTuple):
    """Which tokens may be sampled at the nodes of constrained requests."""

    rows: Tensor  # [m] int64, indices of nodes in the flat batch [b * T]
    masks: Tensor  # [m, W] int32, a bit per token


class Marks(NamedTuple):
    """What the grammars say of a step, by index in its batch."""

    problems: dict[int, str]  # why a request cannot go on
    refused: dict[int, list[int]]  # nodes that the grammar does not allow, and those below them


class _Unread(NamedTuple):
    """New tokens of a step that may still be on their way to the host."""

    grammars: list[RequestGrammar | None]  # of the batch
    tokens: Tensor  # [b, 1 + D] int64: how many, and the tokens
    here: Timestamp  # when the host may read them


class Constraints:
    """The grammars of the requests that have one."""

    def __init__(self, matchers: Matchers, place: Place) -> None:
        self.matchers, self.place = matchers, place
        self._of: dict[int, RequestGrammar] = {}  # by request slot
        self._output_start: dict[int, int] = {}
        self._unread: deque[_Unread] = deque()
        # On a GPU the host is ahead of the device: it would have to wait for the last tokens
        # before it could draft. May be set to False, for comparison.
        self.steers_drafts = place.on_host

    # ── requests ──

    def admit(self, slot: int, params: SamplingParams, output_start: int) -> None:
        """A request takes the slot. output_start: position of its first output token."""
        self.release(slot)
        if params.is_constrained:
            self._of[slot] = self.matchers.start(params)
            self._output_start[slot] = output_start

    def observe_prompt(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Tokens at ``start`` and after it. Those from output_start on are output, which a
        retracted request processes again."""
        if slot in self._of:
            output = tokens[max(self._output_start[slot] - start, 0) :]
            self._of[slot].advance([int(token) for token in output])

    def release(self, slot: int) -> None:
        """The request in the slot has left."""
        self._of.pop(slot, None)

    def any(self, slots: Sequence[int]) -> bool:
        """Whether a request of a batch has a grammar."""
        return not self._of.keys().isdisjoint(slots)

    # ── tokens that were sampled ──

    def observe(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """A decode step of these request slots has ended, or their prompts: the first counts[i] of
        tokens[i] are new. tokens [b, D], counts [b], int64."""
        if not self.any(slots):
            return
        # not the slots: until the tokens are read, other requests may have taken them
        grammars = [self._of.get(slot) for slot in slots]
        sent = self.place.to_host(torch.cat([counts[:, None], tokens], dim=1))
        self._unread.append(_Unread(grammars, sent, self.place.timestamp()))
        while self._unread and self._unread[0].here.reached:
            self._read()

    def _read(self) -> None:
        """The tokens of the oldest step; waits until they are here."""
        unread = self._unread.popleft()
        unread.here.wait()
        for grammar, (count, *tokens) in zip(unread.grammars, unread.tokens.tolist()):
            if grammar is not None:
                grammar.advance(tokens[:count])

    def read_all(self) -> None:
        """Wait until all grammars are where their requests are."""
        while self._unread:
            self._read()

    # ── drafts, on a CPU ──

    def grammar(self, slot: int) -> RequestGrammar | None:
        """Of the request in the slot; on a CPU it has taken in all that was sampled."""
        return self._of.get(slot)

    def reshape(self, slots: Sequence[int], tree: Tree, max_depth: int) -> Tree:
        """The trees [b, T] of a batch, with the nodes that grammars force and without those that
        they refuse (constrain/reshape.py)."""
        if tree.tokens.shape[1] == 1:
            return tree
        tokens, parents, scores = (
            part.tolist() for part in (tree.tokens, tree.parents, tree.scores)
        )
        changed: dict[int, DraftTree] = {}
        for i, slot in enumerate(slots):
            grammar = self._of.get(slot)
            if grammar is None:
                continue
            own = DraftTree(tokens[i], parents[i], scores[i])
            new = reshape(grammar, own, max_depth)
            if new is not own:
                changed[i] = new
        return _with_trees(tree, changed) if changed else tree

    # ── masks ──

    def masks(
        self, slots: Sequence[int], trees: Mapping[int, NodeLists], nodes: int
    ) -> tuple[TokenMasks | None, Marks]:
        """Of all nodes of those trees, by index in the batch, whose requests have grammars."""
        trees = {i: tree for i, tree in trees.items() if slots[i] in self._of}
        marks = Marks({}, {})
        if not trees:
            return None, marks
        masks = self.host_masks(len(trees) * nodes).fill_(-1).unflatten(0, (len(trees), nodes))
        for row, (i, (tokens, parents)) in enumerate(trees.items()):
            grammar = self._of[slots[i]]
            own = masks[row].numpy().view(np.uint32)
            marks.refused[i] = fill_masks(grammar, tokens, parents, own)
            if grammar.problem:
                marks.problems[i] = grammar.problem
        rows = [i * nodes + node for i in trees for node in range(nodes)]
        return self.send(rows, masks.flatten(0, 1)), marks

    def host_masks(self, count: int) -> Tensor:
        """Room for as many masks, [count, W] int32, to be sent."""
        words = self.matchers.words
        return self.place.host_buffer(4 * count * words).view(torch.int32).view(count, words)

    def send(self, rows: Sequence[int], masks: Tensor) -> TokenMasks:
        """To the device; rows: of the logits [b * T, V]."""
        sent = masks.to(self.place.device, non_blocking=True)
        return TokenMasks(self.place.to_device(rows), sent)


def _with_trees(tree: Tree, changed: dict[int, DraftTree]) -> Tree:
    """The trees of a batch, with others for some requests."""
    whole = Tree(*(part.clone() for part in tree))
    tokens, parents, depths, ancestors, scores = (part.numpy() for part in whole)
    for i, own in changed.items():
        nodes = len(own.tokens)
        tokens[i], parents[i], scores[i] = own
        depths[i], ancestors[i] = 0, np.eye(nodes, dtype=np.bool_)
        for node in range(1, nodes):
            parent = own.parents[node]
            depths[i, node] = depths[i, parent] + 1
            ancestors[i, node] |= ancestors[i, parent]
    return whole


class TreeView:
    """The trees [b, T] of a step, on their way to the host."""

    def __init__(self, constraints: Constraints, tree: Tree) -> None:
        self._constraints = constraints
        self._tokens = constraints.place.to_host(tree.tokens)
        self._parents = constraints.place.to_host(tree.parents)
        self.here = constraints.place.timestamp()  # when they are

    def trees(self) -> list[NodeLists]:
        """By request; waits until the trees and the last step's tokens are here."""
        self.here.wait()
        self._constraints.read_all()
        return list(zip(self._tokens.tolist(), self._parents.tolist()))
