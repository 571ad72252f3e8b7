"""NGRAM: no weights. Drafts the tokens that followed the same n-gram earlier, in the request's own
text or in those of finished requests."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import TreeShape
from mamba_eagle.drafting import ngram_trie as cpu
from mamba_eagle.drafting.base import Drafter, DraftParts, DraftSource, KeyedNoise, StepPart
from mamba_eagle.message import PrefillItem
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree

MAX_LEFT = 64  # texts that wait to be counted
MAX_LEFT_TOKENS = 65536  # of one of them: its last ones


class NgramIndex:
    """N-grams of up to ``depth`` tokens in one trie, which has two kinds of roots:

        finished          one root for the texts of all finished requests
        roots[slot]       one root per running request, for its prompt and output

    When a request leaves, the kept part of its text is counted below ``finished``, and its root is
    released.
    The n-grams below that root are no longer used, so they are the first to be evicted. All n-grams
    share ``capacity`` nodes; when these run out, the least recently seen ones are evicted.
    """

    def __init__(self, requests: int, positions: int, capacity: int, depth: int) -> None:
        """requests: number of request slots. positions: length of the longest text, in tokens.

        Raises: ValueError if ``capacity`` is below ``min_capacity``.
        """
        minimum = self.min_capacity(requests, depth)
        if capacity < minimum:
            raise ValueError(f"capacity {capacity}: must be {minimum} or more")
        self.depth = depth
        # untouched pages of zeros cost no memory
        self.nodes = np.zeros((capacity + 1, cpu.FIELDS), np.int32)
        self.buckets = np.zeros(1 << capacity.bit_length(), np.int32)
        self.state = np.zeros(2, np.int64)
        self.texts = np.zeros((requests, positions), np.int32)
        self.lengths = np.zeros(requests, np.int64)
        self.counted = np.zeros(requests, np.int64)  # tokens counted below the request's root
        self.roots = np.zeros(requests, np.int64)  # node of the request's root; 0: no request
        # texts of requests that have left, from the first token on that is not counted
        self.left: deque[tuple[NDArray[np.int32], int]] = deque(maxlen=MAX_LEFT)
        self.may_count = cpu.MAX_COUNTED  # tokens of these in this step
        self.finished = int(cpu.new_root(self.nodes, self.buckets, self.state))

    @staticmethod
    def min_capacity(requests: int, depth: int) -> int:
        """Nodes for all roots, one n-gram, and one node to reuse."""
        return requests + 1 + depth + 1

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request takes request slot ``slot``; ``tokens`` are the start of its text."""
        self.roots[slot] = cpu.new_root(self.nodes, self.buckets, self.state)
        self.lengths[slot] = self.counted[slot] = 0
        self.append(slot, tokens)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the request's text; n-grams are counted when it is next drafted
        for."""
        first = int(self.lengths[slot])
        self.texts[slot, first : first + len(tokens)] = tokens
        self.lengths[slot] += len(tokens)

    def end(self, slot: int, keep: int) -> None:
        """The request leaves; the first ``keep`` tokens of its text join the finished texts, in
        this step or, if these are many, in later ones."""
        self.nodes[self.roots[slot], cpu.USED] = 0
        self.roots[slot] = 0
        end = min(keep, int(self.lengths[slot]))
        if end > 0:
            self.left.append((self.texts[slot, max(end - MAX_LEFT_TOKENS, 0) : end].copy(), 0))
        self._count_finished()

    def begin_step(self) -> None:
        self.may_count = cpu.MAX_COUNTED
        self._count_finished()

    def _count_finished(self) -> None:
        while self.left and self.may_count:
            text, first = self.left.popleft()
            until = min(first + self.may_count, len(text))
            trie = (self.nodes, self.buckets, self.state)
            cpu.count(*trie, self.finished, text, first, until, self.depth)
            self.may_count -= until - first
            if until < len(text):
                self.left.appendleft((text, until))

    def draft(self, slots: Sequence[int], shape: TreeShape, *tree: NDArray[Any]) -> None:
        """The most probable tree of ``shape`` for each of the request slots ``slots`` [b].

        tree: arrays to write to, shaped and typed like the fields of ``tree.tree.Tree``.
        """
        trie, depths = (self.nodes, self.buckets, self.state), (shape.topk, shape.depth)
        texts = (self.finished, self.roots, self.texts, self.lengths, self.counted)
        cpu.draft(trie, *texts, np.array(slots), self.depth, *depths, tree)

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.buckets.nbytes + self.texts.nbytes


MAX_UNREAD = 256  # steps whose tokens may stay on the device until the next draft needs them


class NgramDrafter(Drafter):
    """All work is done on the host. The tokens that steps accept are copied from the device when
    the next trees are needed; the trees of a step are copied to the device at once."""

    on_device = False
    reads = "nothing"  # all tokens of a cached prefix come with its first chunk
    learns_from_all = True

    def __init__(self, index: NgramIndex, table: RequestTable, place: Place) -> None:
        self.index, self.table, self.place = index, table, place
        self.unread: list[Tensor] = []  # [b, 2 + D] int64: slot, count, tokens
        self.untracked: set[int] = set()
        self.salted: set[int] = set()  # others may not see their texts, not in drafts either

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        for item in items:
            if item.first is not None:
                history = item.first.history
                assert len(history) == item.start, "the plan lacks the cached prefix's tokens"
                self.index.begin(item.slot, history)
                if item.first.salted:
                    self.salted.add(item.slot)
            self.index.append(item.slot, item.token_ids)

    def observe_first_tokens(self, slots: Sequence[int], tokens: Tensor, features: Tensor) -> None:
        device_slots = self.place.to_device(slots)
        self._remember(device_slots, torch.ones_like(device_slots), tokens[:, None])

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        self.index.begin_step()
        return StepPart(shape, idle=self.untracked.issuperset(slots))

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        self._remember(slots, accepted.count, accepted.tokens)

    def untrack(self, slots: Sequence[int]) -> None:
        """N-grams already counted for these requests are dropped."""
        self._read()
        for slot in slots:
            if self.index.roots[slot]:
                self.index.end(slot, 0)
            self.index.begin(slot, [])
        self.untracked.update(slots)

    def _remember(self, slots: Tensor, counts: Tensor, tokens: Tensor) -> None:
        self.unread.append(torch.cat([slots[:, None], counts[:, None], tokens], dim=1))
        if len(self.unread) > MAX_UNREAD:
            self._read()

    def _read(self) -> None:
        """Append the accepted tokens of unread steps to the texts; waits for the device."""
        for step in self.unread:
            for slot, count, *new in step.tolist():
                self._append(slot, new[:count])
        self.unread.clear()

    def _append(self, slot: int, tokens: list[int]) -> None:
        if slot not in self.untracked:
            self.index.append(slot, tokens)

    def propose(self, slots: Tensor, part: StepPart, noise: KeyedNoise | None) -> Tree:
        """``noise`` is ignored: only few tokens of the vocabulary have a probability here."""
        self._read()
        b, shape = len(slots), part.shape
        buffer = self.place.host_buffer(sum(_field_bytes(b, shape.nodes)))
        fields = _fields(buffer, b, shape.nodes)
        self.index.draft(slots.tolist(), shape, *(field.numpy() for field in fields))
        fields = _fields(buffer.to(self.place.device, non_blocking=True), b, shape.nodes)
        if self.untracked:  # the index does not have their last tokens
            fields.tokens[:, 0] = self.table.last_token[slots]
        return fields

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        self._read()
        for slot, position in zip(slots, positions, strict=True):
            # the last token is part of the text, although the target has not processed it
            self.index.end(slot, 0 if slot in self.salted else position + 1)
        self.untracked.difference_update(slots)
        self.salted.difference_update(slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index, on the host."""
        return self.index.num_bytes


def _field_bytes(b: int, nodes: int) -> list[int]:
    """Bytes of tokens, parents, depths, scores and ancestors, in order of falling alignment."""
    return [8 * b * nodes] * 3 + [4 * b * nodes, b * nodes * nodes]


def _fields(buffer: Tensor, b: int, nodes: int) -> Tree:
    """A tree whose tensors lie in ``buffer`` [bytes] uint8."""
    tokens, parents, depths, scores, ancestors = buffer.split(_field_bytes(b, nodes))
    return Tree(
        tokens=tokens.view(torch.int64).view(b, nodes),
        parents=parents.view(torch.int64).view(b, nodes),
        depths=depths.view(torch.int64).view(b, nodes),
        ancestors=ancestors.view(torch.bool).view(b, nodes, nodes),
        scores=scores.view(torch.float32).view(b, nodes),
    )


class NgramSource(DraftSource):
    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        self.engine = config

    def divide(self, shard: Shard, backend: Backend) -> None: ...

    def problems(self) -> list[str]:
        wrong = []
        depth = self.engine.speculative_ngram_max_trie_depth
        capacity = self.engine.speculative_ngram_capacity
        requests = self.engine.max_running_requests
        if depth < 2:
            wrong.append(
                f"--speculative-ngram-max-trie-depth {depth}: must be 2 or more, "
                "for a matched token and the one that follows it"
            )
        minimum = NgramIndex.min_capacity(requests, max(depth, 2))
        if capacity < minimum:
            wrong.append(
                f"--speculative-ngram-capacity {capacity}: must be {minimum} or more "
                f"with {requests} requests and n-grams of {depth} tokens"
            )
        return wrong

    def make(self, parts: DraftParts) -> Drafter:
        requests, positions = parts.table.kv_slots.shape
        capacity = self.engine.speculative_ngram_capacity
        depth = self.engine.speculative_ngram_max_trie_depth
        index = NgramIndex(requests, positions, capacity, depth)
        return NgramDrafter(index, parts.table, parts.backend.place)
