"""The interface of drafters. A new drafter is one new file and one line in drafters.py."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool, kv_dtype
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.message import DrafterReads, PrefillItem
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import created_as, weight_problems
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.models.split import Split, split_model, split_pays
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.shard import Shard, local
from mamba_eagle.parallel.shard import problems as split_problems
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.candidates import Frontier
from mamba_eagle.tree.tree import Tree

log = logging.getLogger("mamba_eagle.drafting")


class KeyedNoise(Protocol):
    """What else the target will sample with: noise, and on a CPU the masks of grammars. A drafter
    that heeds it predicts the sampled token rather than the distribution."""

    def best(
        self, logits: Tensor, vocabulary: DraftVocabulary, positions: Tensor, k: int
    ) -> TopTokens:
        """The k best tokens of each lane, and their log-probabilities with noise: logits
        [b, lanes, own V'] of tokens at ``positions`` [b] int64, any float dtype -> [b, lanes, k].

        vocabulary: the drafter's, of which the logits are this rank's.
        """

    def fixed(self, depth: int) -> Sequence[int]:
        """Requests, by index in the batch, whose next tokens the grammar fixes for most of
        ``depth`` levels; their drafts are replaced."""
        return ()

    def of(self, requests: Sequence[int]) -> KeyedNoise:
        """The same for some requests of the batch, by index."""

    def forced(self, requests: int, k: int, levels: int) -> TopTokens | None:
        """The only children of the lanes that were followed last, where the grammar fixes the text
        of all lanes for most of the next ``levels``, as [requests, lanes, k] with other children
        after them that score -inf; None: the drafter must run. levels 0: always children, of which
        a lane whose text is not fixed has none."""
        return None

    def follow(self, frontier: Frontier) -> None:
        """The next call has these lanes, made of the last call's results. Drafters without lanes
        need not call it: what depends on the tokens of lanes is then left out."""
        return None


class StepPart(NamedTuple):
    """A drafter's part in a step, as decided by ``prepare``."""

    shape: TreeShape
    idle: bool = False  # the drafter neither drafts nor observes accepted tokens
    needs_catch_up: Sequence[int] = ()  # request slots for which to call ``catch_up`` first
    longest: int = 0  # most entries that a request's drafter processes before drafting


class Drafter:
    """Proposes a tree for each request and follows the accepted tokens. What a drafter has no use
    for it leaves as it is here.

    Its caches mirror the target's: its pool stores a token's keys and values under the same KV slot
    number as the target's pool, and recurrent states under the same state slot numbers. So a prefix
    that the target finds in the prefix cache is available to the drafter too.

    The drafter does no work for *untracked* requests: it never sees their prompts and may return
    arbitrary drafts. Its caches hold nothing for prefixes that such requests leave in the prefix
    cache; a tracked request that continues one shows it these tokens first.

    Shapes: b requests, T tree nodes, F feature size. ``features`` are the outputs of the target's
    forward pass, F numbers per token: the hidden state after the final norm and those that the
    drafter taps. Slots are request slots, and positions, tokens and slots in tensors are int64.
    """

    # whether ``propose`` and ``observe_accepted`` never wait for the host, so that a captured graph
    # can repeat them
    on_device = True
    # what it must be given of a prefix that it has not followed
    reads: DrafterReads = "features"
    # whether ``prepare`` may ask for ``catch_up``
    catches_up = False
    # whether its own state, or anything else that it needs of a prefix besides keys and values, is
    # kept in state slots alone: then it processes again what the target takes from a journal
    recurrent = False
    # whether the trees of a request depend on what other requests have done: then they are drafted
    # in the order of the plans
    learns_from_all = False
    # where it has what the prefix cache keeps for it, by the same slots as the target
    kv: KVPool | None = None
    pool: StatePool | None = None

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        """The target has processed prompt chunks, concatenated in the order of ``items``.

        tokens [n], features [n, F]; before [items, F]: the feature of the token before each chunk
        (zeros if the chunk starts at position 0).
        """

    def observe_first_tokens(self, slots: Sequence[int], tokens: Tensor, features: Tensor) -> None:
        """The prompts of ``slots`` are finished: tokens [n] were sampled from features [n, F]."""

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        """The host's part of a step that is about to be launched."""
        return StepPart(shape)

    def draft_whole_trees(self) -> None:
        """From now on trees have as many nodes as were planned, however unlikely they are."""

    def catch_up(self, slots: Tensor) -> None:
        """Process the tokens that plain steps added to the requests in ``slots`` [b]; never waits
        for the host if the drafter is ``on_device``."""
        raise AssertionError("only for drafters that catch up")

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        """A decode step, plain or with drafts, has ended; not called if the drafter was idle.

        features: [b, T, F], of all nodes.
        """

    def untrack(self, slots: Sequence[int]) -> None:
        """The requests in ``slots`` are untracked from now on, until they are released."""

    def propose(self, slots: Tensor, part: StepPart, noise: KeyedNoise | None) -> Tree:
        """A tree of ``part.shape``, with at least two nodes, for each request in ``slots`` [b],
        rooted at its last token.

        The shape is not larger than the configured one, and may change from step to step. noise:
        None if all requests are greedy.
        """
        raise AssertionError("a tree of several nodes, but --speculative-algorithm is NONE")

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """The requests in ``slots`` leave. A position >= 0 is the number of first tokens that the
        prefix cache keeps, and the drafter must keep its own caches for them; -1: none."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and caches."""
        return 0


class NoDrafter(Drafter):
    """Plain decoding: ``propose`` is never called."""

    reads = "nothing"

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        return StepPart(shape, idle=True)


@dataclass(frozen=True)
class DraftParts:
    """The parts of the runner that a drafter is built from."""

    config: EngineConfig
    backend: Backend
    target: CausalLM
    table: RequestTable
    kv_slots: int  # in the target's pool
    state_slots: int  # in the target's pool, padding included
    group: Group  # the ranks that hold parts of the same layers
    # constructor, folder, how this rank gets its part of what is there, operations -> module
    load: Callable[[Callable[[], nn.Module], str, Split | None, LayerOps], nn.Module]


def draft_kv(net: ModelConfig, parts: DraftParts, spare: int) -> KVPool:
    """A drafter's pool: the target's KV slots, one for padding, and ``spare`` ones."""
    dtype, stored = parts.backend.dtype, kv_dtype(parts.config.kv_cache_dtype, parts.backend.dtype)
    sizes = (net.num_attention_layers, parts.kv_slots, net.attention)
    return KVPool(*sizes, dtype, parts.backend.device, 1 + spare, stored)


class DraftSource(ABC):
    """A drafter before its weights are loaded: the properties that start-up depends on."""

    tap_layers: tuple[int, ...] = ()  # of the target, as CausalLM.tap takes them

    @property
    def config(self) -> ModelConfig | None:
        """Sizes of its layers, of those that this rank holds; None if it has no network."""
        return None

    @abstractmethod
    def divide(self, shard: Shard, backend: Backend) -> None:
        """Let each rank hold a part, if there is a network; before anything is asked but
        ``problems``. shard: this rank among those that the target's layers are split over."""

    @abstractmethod
    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        """Reads the drafter's config.json. Raises: FileNotFoundError, UnsupportedModel."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Every reason why it cannot draft for this target, each with values and a remedy."""

    @abstractmethod
    def make(self, parts: DraftParts) -> Drafter:
        """Load the weights. Raises: CheckpointError."""


class FolderSource(DraftSource):
    """A drafter in a folder of its own, ``--speculative-draft-model-path``.

    Ranks hold parts of it as they do of the target: of what has a row for each token of its
    vocabulary always, of its layers where that pays.
    """

    must_equal: tuple[str, ...]  # fields of ModelConfig that must equal the target's
    reader = ""  # as ``read_model_config`` has it

    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        self.path, self.target = config.speculative_draft_model_path, target
        self.topk = config.tree_shape.topk
        self.has_files = config.load_format != "dummy"
        self.own = self.read()
        self.head = self.layers = Shard()  # this rank's part of either

    @property
    def config(self) -> ModelConfig:
        tokens = None if self.head.size == 1 else self.head.span(self.vocabulary)
        return replace(local(self.own, self.layers), head_tokens=tokens)

    @property
    def vocabulary(self) -> int:
        """How many tokens it can draft."""
        return self.own.vocab_size

    @property
    def made_for(self) -> int:
        """The hidden size of the target that it was made for."""
        return self.target.hidden_size

    def read(self) -> ModelConfig:
        return read_model_config(self.path, self.reader)

    @abstractmethod
    def module(self, config: ModelConfig | None = None) -> nn.Module:
        """The network, without loaded weights. config: a rank's; None: all of it."""

    def divide(self, shard: Shard, backend: Backend) -> None:
        if shard.size == 1:
            return
        self.head = shard if self.vocabulary >= shard.size else Shard()
        with created_as(backend.dtype, torch.device("meta")):
            whole = self.module()
        pays = split_pays(whole, shard, len(self.own.blocks), backend.place.bytes_per_sum)
        self.layers = shard if pays and not split_problems(self.own, shard.size) else Shard()
        parts = ["copied" if part.size == 1 else "split" for part in (self.head, self.layers)]
        log.info("drafter over %d ranks: vocabulary %s, layers %s", shard.size, *parts)

    def load(self, parts: DraftParts) -> Any:
        """This rank's part of ``module``, with weights. Raises: CheckpointError."""
        with created_as(parts.backend.dtype, torch.device("meta")):
            split = split_model(self.module, self.own, self.layers, head=self.head)
        ops = parts.backend.layer_ops
        if self.layers.size > 1:
            ops = ops.over(parts.group)
        return parts.load(lambda: self.module(self.config), self.path, split, ops)

    def columns(self, parts: DraftParts) -> Columns:
        """The tokens that this rank has the logits of."""
        return Columns(parts.group if self.head.size > 1 else ALONE, self.vocabulary)

    def problems(self) -> list[str]:
        wrong = []
        for name in self.must_equal:
            own, required = getattr(self.own, name), getattr(self.target, name)
            if own != required:
                wrong.append(
                    f"drafter {self.path} has {name} {own}, the target {required}: "
                    "use one that was made for this target"
                )
        if self.made_for != self.target.hidden_size:
            wrong.append(
                f"drafter {self.path} was made for a target of hidden_size {self.made_for}, this "
                f"one has {self.target.hidden_size}: use one that was made for this target"
            )
        if self.topk > self.vocabulary:
            wrong.append(
                f"--speculative-eagle-topk {self.topk}: drafter {self.path} has a vocabulary of "
                f"{self.vocabulary} tokens; set it to {self.vocabulary} at most"
            )
        return wrong + (weight_problems(self.module, self.path) if self.has_files else [])
