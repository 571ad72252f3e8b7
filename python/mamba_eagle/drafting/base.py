"""What the runner asks of a drafter. A new drafter is one new file and one line in drafters.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import TreeShape
from mamba_eagle.message import PrefillItem
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import weight_problems
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree

Model = TypeVar("Model", bound=nn.Module)


class KeyedNoise(Protocol):
    """The noise that the target will sample with: a drafter that uses it guesses the sample and not
    only the distribution."""

    def __call__(self, log_probs: Tensor, positions: Tensor) -> Tensor:
        """log_probs [b, lanes, V] of tokens at ``positions`` [b] -> the same, of the samples."""


class StepPart(NamedTuple):
    """A drafter's part in a step, as ``prepare`` has decided it."""

    shape: TreeShape
    idle: bool = False  # it neither drafts nor hears what was accepted
    needs_catch_up: Sequence[int] = ()  # request slots for which ``catch_up`` must come first
    longest: int = 0  # entries that a request takes in before drafting, at most


class Drafter(ABC):
    """Proposes a tree for each request and learns what became of the sequence.

    Its caches follow the target's: entries of a token stand under that token's KV slot in a pool
    of its own, its recurrent states under the target's state slots. So a prefix that the target
    finds in the radix cache is there for the drafter too.

    The drafter does no work for *untracked* requests: it never sees their prompts and may return
    arbitrary drafts. Prefixes that such requests leave in the radix cache are unknown to it.

    ``features`` are what the target's forward pass returns: F numbers per token, the hidden state
    after the final norm and those that the drafter taps.
    """

    on_device = True  # whether ``propose`` and ``observe_accepted`` are the device's work alone, so
    # that a captured graph can repeat them

    @abstractmethod
    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        """Prompt chunks were run, one behind the other: tokens [n], features [n, F]; before
        [items, F]: of the tokens ahead of each chunk (zeros at position 0)."""

    @abstractmethod
    def observe_first_tokens(self, slots: Sequence[int], tokens: Tensor, features: Tensor) -> None:
        """The prompts in ``slots`` are over: tokens [n] were sampled from features [n, F]."""

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        """The host's part of a step that is about to be run."""
        return StepPart(shape)

    def catch_up(self, slots: Tensor) -> None:
        """Take in what plain steps added to the requests in ``slots`` [b]; the device's work alone
        where the drafter is ``on_device``."""
        raise AssertionError("only of a drafter that asks for it")

    @abstractmethod
    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        """A decode step in which it was not idle has ended, plain or with drafts. features
        [b, T, F], of all nodes."""

    @abstractmethod
    def untrack(self, slots: Sequence[int]) -> None:
        """The requests in ``slots`` are untracked from now on, until they are released."""

    @abstractmethod
    def propose(self, slots: Tensor, part: StepPart, noise: KeyedNoise | None) -> Tree:
        """A tree of ``part.shape``, two nodes or more, for each request in ``slots`` [b], rooted at
        its last token. The shape is no larger than the configured one, and may change from step
        to step. noise: None if all requests are greedy."""

    @abstractmethod
    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Requests leave. position >= 0: its first so many tokens stay in the prefix cache, and
        what the drafter knows of them goes with them."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of weights and caches."""


class NoDrafter(Drafter):
    """Plain decoding: no tree is ever asked for."""

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        return StepPart(shape, idle=True)

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None: ...

    def observe_first_tokens(
        self, slots: Sequence[int], tokens: Tensor, features: Tensor
    ) -> None: ...

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None: ...

    def untrack(self, slots: Sequence[int]) -> None: ...

    def propose(self, slots: Tensor, part: StepPart, noise: KeyedNoise | None) -> Tree:
        raise AssertionError("a tree of several nodes, but --speculative-algorithm is NONE")

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None: ...

    @property
    def num_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class DraftParts:
    """What a drafter is built from."""

    config: EngineConfig
    backend: Backend
    target: CausalLM
    table: RequestTable
    kv_slots: int
    state_slots: int
    load: Callable[[Callable[[], nn.Module], str], nn.Module]  # a maker and a folder -> a model


class DraftSource(ABC):
    """A drafter before its weights are loaded: what start-up must know of it."""

    tap_layers: tuple[int, ...] = ()  # of the target, as CausalLM.tap takes them

    @property
    @abstractmethod
    def config(self) -> ModelConfig | None:
        """Sizes of its layers, for the memory plan; None: it has none."""

    @property
    def rows(self) -> int:
        """Rows per request that its recurrent layers need, for the memory plan."""
        return 0

    @abstractmethod
    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        """Reads the drafter's config.json. Raises: FileNotFoundError, UnsupportedModel."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Every reason why it cannot draft for this target, with values and what to do."""

    @abstractmethod
    def make(self, parts: DraftParts) -> Drafter:
        """Loads the weights. Raises: CheckpointError."""


class FolderSource(DraftSource):
    """A drafter in a folder of its own, ``--speculative-draft-model-path``."""

    must_equal: tuple[str, ...]  # what of config.json must be as the target's

    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        self.path, self.target = config.speculative_draft_model_path, target
        self.has_files = config.load_format != "dummy"
        self.own = self.read()

    @property
    def config(self) -> ModelConfig:
        return self.own

    def read(self) -> ModelConfig:
        return read_model_config(self.path)

    @abstractmethod
    def module(self) -> nn.Module:
        """The network, its weights not loaded."""

    def problems(self) -> list[str]:
        wrong = []
        for name in self.must_equal:
            own, wanted = getattr(self.own, name), getattr(self.target, name)
            if own != wanted:
                wrong.append(
                    f"drafter {self.path} has {name} {own}, the target {wanted}: "
                    "use one that was made for this target"
                )
        return wrong + (weight_problems(self.module, self.path) if self.has_files else [])
