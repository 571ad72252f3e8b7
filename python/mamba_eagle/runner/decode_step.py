"""One decode step on tensors: draft a tree, verify it, keep what the target agrees with.

Between verifying and keeping stands the sampler, which is told by the host what each request asks
for. Everything else here may be captured in a graph (graphs.py) if nothing of it waits for the
host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.drafting.base import Drafter
from mamba_eagle.message import DecodeBatch
from mamba_eagle.models.base import CausalLM
from mamba_eagle.runner.commit import accept_tokens, commit_tokens
from mamba_eagle.runner.contexts import VerifyContext, tree_attention
from mamba_eagle.runner.pools import KVPool, RequestTable
from mamba_eagle.runner.sampler import BatchNoise, SamplingState
from mamba_eagle.runner.transfer import to_device
from mamba_eagle.runner.verify import VerifyScheme
from mamba_eagle.tree.accept import Truncated, truncate
from mamba_eagle.tree.simulate import simulated_walk
from mamba_eagle.tree.tree import Tree, single_node_tree


class Verified(NamedTuple):
    """What the target says of a batch's trees."""

    tree: Tree
    positions: Tensor  # [b, T] int64, the nodes' own
    features: Tensor  # [b, T, F]
    logits: Tensor  # [b, T, V] float32

    def first(self, b: int) -> Verified:
        """Of the first ``b`` requests."""
        tree = Tree(*(part[:b] for part in self.tree))
        return Verified(tree, *(part[:b] for part in self[1:]))


class Outcome(NamedTuple):
    """What a step leaves."""

    accepted: Truncated
    folded: Tensor  # [b] int64, positions of the requests' state slots

    def first(self, b: int) -> Outcome:
        return Outcome(Truncated(*(part[:b] for part in self.accepted)), self.folded[:b])


class DecodeStep:
    """The parts of a step. slots [b] and kv_slots [b, T] (the nodes') are int64."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        table: RequestTable,
        scheme: VerifyScheme,
        drafter: Drafter,
        sampling: SamplingState,
    ) -> None:
        self.model, self.kv, self.table = model, kv, table
        self.scheme, self.drafter, self.sampling = scheme, drafter, sampling
        self.forced_length: float | None = None  # of what is accepted, in a benchmark
        self.num_forced = torch.zeros((), dtype=torch.int64, device=table.processed.device)

    def draft(self, slots: Tensor, kv_slots: Tensor, shape: TreeShape, noisy: bool) -> Tree:
        """noisy: guess what the sampler will take at temperatures above 0."""
        table = self.table
        table.kv_slots[slots, table.processed[slots]] = kv_slots[:, 0]
        if shape == PLAIN:
            return single_node_tree(table.last_token[slots])
        return self.drafter.propose(
            slots, shape, BatchNoise(self.sampling, slots) if noisy else None
        )

    def verify(
        self, slots: Tensor, kv_slots: Tensor, tree: Tree, logits: Tensor | None = None
    ) -> Verified:
        """logits [b*T, V] float32: where they go, if not to new memory."""
        table, shape = self.table, tree.tokens.shape
        run = table.processed[slots]
        attention = tree_attention(
            self.kv, table.kv_slots, slots, run, kv_slots, tree.parents, tree.ancestors
        )
        self.scheme.begin(slots, tree)
        positions = run[:, None] + tree.depths
        context = VerifyContext(self.scheme, attention, positions.reshape(-1))
        features = self.model(tree.tokens.reshape(-1), context)
        made = self.model.compute_logits(features, logits)
        return Verified(tree, positions, features.unflatten(0, shape), made.unflatten(0, shape))

    def commit(
        self, slots: Tensor, kv_slots: Tensor, verified: Verified, target: Tensor, steps: int
    ) -> Outcome:
        """The accepted nodes become part of the sequence: indices only, in every table. target
        [b, T]: the target's own tokens."""
        accepted = self._accept(slots, verified.tree, target, steps)
        self.scheme.accept(accepted, verified.features)
        commit_tokens(self.table, slots, kv_slots, accepted)
        if self.drafter_commits:
            self.drafter.observe_accepted(slots, accepted, verified.features)
        return Outcome(accepted, self.scheme.folded(slots))

    def _accept(self, slots: Tensor, tree: Tree, target: Tensor, steps: int) -> Truncated:
        table = self.table
        if self.forced_length is None:
            return accept_tokens(table, slots, tree, target, steps)
        walked = simulated_walk(tree, target, steps, self.forced_length, self.num_forced)
        self.num_forced += 1
        return truncate(walked, table.stop_tokens[slots], table.remaining[slots])

    @property
    def drafter_commits(self) -> bool:
        """Whether the drafter takes part in committing the step that it was prepared for."""
        return self.drafter.on_device and not self.drafter.idle

    def told(self, slots: Tensor, verified: Verified, accepted: Truncated) -> None:
        """What the host keeps count of."""
        self.sampling.observe_accepted(slots, accepted.tokens, accepted.count)
        if not self.drafter.on_device and not self.drafter.idle:
            self.drafter.observe_accepted(slots, accepted, verified.features)


class EagerRun:
    """A step of one batch, each operation launched by itself."""

    def __init__(self, step: DecodeStep, batch: DecodeBatch) -> None:
        self.step, self.batch = step, batch

    def verify(self) -> Verified:
        """Draft, and what the target says of it."""
        step, batch, device = self.step, self.batch, self.step.table.processed.device
        behind = step.drafter.prepare(batch.slots, batch.shape)
        if behind:
            step.drafter.catch_up(to_device(behind, device=device))
        self.slots = to_device(batch.slots, device=device)
        self.kv_slots = to_device(batch.kv_slots, device=device)
        noisy = step.sampling.any_noise(batch.slots)
        tree = step.draft(self.slots, self.kv_slots, batch.shape, noisy)
        self.verified = step.verify(self.slots, self.kv_slots, tree)
        return self.verified

    def commit(self, target: Tensor) -> Outcome:
        """target [b, T] int64, what the target samples at each node."""
        steps = self.batch.shape.depth
        outcome = self.step.commit(self.slots, self.kv_slots, self.verified, target, steps)
        self.step.told(self.slots, self.verified, outcome.accepted)
        return outcome


class EagerSteps:
    """Steps without graphs."""

    num_bytes = 0

    def __init__(self, step: DecodeStep) -> None:
        self.step = step

    def warm_up(self, shapes: list[TreeShape]) -> None:
        """Nothing to prepare."""

    def prepare(self, batch: DecodeBatch) -> EagerRun:
        return EagerRun(self.step, batch)
