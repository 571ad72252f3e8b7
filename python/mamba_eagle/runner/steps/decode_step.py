"""One decode step on tensors: draft trees, verify them, commit the nodes that the target accepts.

The sampler runs between verify and commit. All parts may be captured in graphs (graphs.py) if they
never wait for the host; the sampler, where the backend samples in kernels. Elsewhere the host
decides which operations it performs.

A step is a value: the results of the drafter's ``prepare`` and the scheme's ``begin`` are passed
along, and no object remembers which step it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.attention import TreeNodes
from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.contexts import VerifyContext
from mamba_eagle.backend.pools import KVPool, RequestTable
from mamba_eagle.backend.programs import Committed, StepProgram, Verified, network_of
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.core import PLAIN
from mamba_eagle.drafting.base import Drafter, KeyedNoise, StepPart
from mamba_eagle.lora.slots import AdapterSlots
from mamba_eagle.message import DecodeBatch
from mamba_eagle.models.base import CausalLM
from mamba_eagle.runner.constrained_choice import MasksFirst
from mamba_eagle.runner.guide import GrammarGuide
from mamba_eagle.runner.sampler import sample_in_kernels
from mamba_eagle.runner.sampling_state import BatchNoise
from mamba_eagle.runner.steps.routing import Routing
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.simulate import Forced
from mamba_eagle.tree.tree import Tree, single_node_tree


class DecodeStep:
    """The operations of a decode step. In all methods, slots [b] int64 are the request slots and
    kv_slots [b, T] int64 the KV slots of the nodes."""

    def __init__(
        self,
        backend: Backend,
        model: CausalLM,
        kv: KVPool,
        table: RequestTable,
        scheme: StateScheme,
        drafter: Drafter,
        choice: MasksFirst,
        adapters: AdapterSlots,
        routing: Routing,
    ) -> None:
        self.adapters, self.routing = adapters, routing
        self.backend, self.model, self.kv, self.table = backend, model, kv, table
        self.scheme, self.drafter = scheme, drafter
        self.choice, self.chooser, self.constraints = choice, choice.chooser, choice.constraints
        self.sampling = self.chooser.state
        # what runs the target in place of its layers, one by one, and the scheme
        self.program = self._program(adapted=False)
        self.adapted_program = self._program(adapted=True) if adapters.num_slots else None
        self.forced_length: Tensor | None = None  # mean acceptance length to simulate, float64
        self.num_forced = torch.zeros((), dtype=torch.int64, device=backend.device)

    def _program(self, adapted: bool) -> StepProgram | None:
        target = network_of(self.model)
        if target is None or self.routing.kept:  # programs tell nothing of routers
            return None
        return self.backend.step_program(target, self.kv, self.table, self.scheme, adapted)

    def simulate(self, length: float | Tensor) -> None:
        """Accept ``length`` nodes on average, whatever the target's tokens are."""
        self.forced_length = torch.as_tensor(length, dtype=torch.float64).to(self.backend.device)
        self.drafter.draft_whole_trees()

    def release(self, slots: Sequence[int]) -> None:
        """The requests in ``slots`` have left."""
        self.table.remaining.index_fill_(0, self.backend.place.to_device(slots), 0)
        for slot in slots:
            self.sampling.release(slot)
            self.constraints.release(slot)
        self.routing.release(slots)

    def draft(
        self,
        slots: Tensor,
        kv_slots: Tensor,
        part: StepPart,
        noise: KeyedNoise | None,
        reshaped: Callable[[Tree], Tree] = lambda tree: tree,
    ) -> Tree:
        """A tree of ``part.shape`` per request. noise: what else the target will sample with.
        reshaped: what becomes of the drafter's trees before other ranks see them."""
        table = self.table
        self.backend.enter_roots(table, slots, kv_slots)
        if part.shape == PLAIN:
            return single_node_tree(table.last_token[slots])
        return self.chooser.agree(reshaped(self.drafter.propose(slots, part, noise)))

    def verify(
        self,
        slots: Tensor,
        kv_slots: Tensor,
        tree: Tree,
        adapted: bool,
        logits: Tensor | None = None,
    ) -> Verified:
        """Run the target on the trees. adapted: whether any request has an adapter. logits:
        [b*T, V], the model's logits_dtype, written if given; otherwise new memory is used."""
        table, shape = self.table, tree.tokens.shape
        program = self.adapted_program if adapted else self.program
        with self.adapters.over(slots, shape[1]) if adapted else nullcontext():
            if program is not None:
                assert logits is None, "graphs have no programs"
                return program.verify(slots, kv_slots, tree)
            processed = table.processed[slots]
            layout = self.scheme.begin(slots, tree)
            bits = self.scheme.ancestor_bits(layout)
            own = (slots, processed, kv_slots, tree.parents, tree.ancestors, bits)
            nodes = TreeNodes(table.kv_slots, *own)
            attention = self.backend.tree_attention(self.kv, nodes)
            positions = processed[:, None] + tree.depths
            context = VerifyContext(self.scheme, layout, attention, positions.reshape(-1))
            features = self.model(tree.tokens.reshape(-1), context)
            logits = self.model.step_logits(features, logits)
            parts = (features.unflatten(0, shape), logits.unflatten(0, shape))
            return Verified(tree, layout, positions, *parts)

    def sample(self, slots: Tensor, verified: Verified, sampled: bool) -> Tensor:
        """The target's token at each node, [b, T], with nothing that only the host knows.

        sampled: whether any request takes more than an argmax.
        """
        if not sampled:
            return self.chooser.greedy(verified.logits)
        after = verified.positions + 1
        return sample_in_kernels(self.sampling, slots, verified.logits, after, verified.tree)

    def commit(
        self, slots: Tensor, kv_slots: Tensor, verified: Verified, target: Tensor, part: StepPart
    ) -> Committed:
        """Make the accepted nodes part of the sequences; only indices change, in all tables.

        target: [b, T] int64, the target's token at each node.
        """
        committed = self._commit_target(slots, kv_slots, verified, target, part.shape.depth)
        if self.drafter_commits(part):
            self.drafter.observe_accepted(slots, committed.accepted, verified.features)
        return committed

    def _commit_target(
        self, slots: Tensor, kv_slots: Tensor, verified: Verified, target: Tensor, depth: int
    ) -> Committed:
        if verified.program is not None and self.forced_length is None:
            return verified.program.commit(slots, kv_slots, verified, target, depth)
        accepted = self._accept(slots, verified.tree, target, depth)
        self.scheme.accept(verified.layout, accepted, verified.features)
        self.backend.commit_tokens(self.table, slots, kv_slots, accepted)
        return Committed(accepted, self.scheme.folded(slots))

    def _accept(self, slots: Tensor, tree: Tree, target: Tensor, depth: int) -> Truncated:
        inputs = (self.table, slots, tree, target, depth)
        if self.forced_length is None:
            return self.backend.accept_tokens(*inputs)
        forced = Forced(self.forced_length, self.num_forced)
        accepted = self.backend.accept_forced(*inputs, forced)
        self.num_forced += 1
        return accepted

    def drafter_commits(self, part: StepPart) -> bool:
        """Whether the drafter observes accepted tokens as part of ``commit``, on the device."""
        return self.drafter.on_device and not part.idle

    def observe_on_host(
        self,
        slots: Tensor,
        verified: Verified,
        accepted: Truncated,
        part: StepPart,
        counted: bool = False,
    ) -> None:
        """Update the token counts, unless they are ``counted``, and the drafter if it works on the
        host."""
        if not counted:
            self.sampling.observe_accepted(slots, accepted.tokens, accepted.count)
        if not self.drafter.on_device and not part.idle:
            self.drafter.observe_accepted(slots, accepted, verified.features)


class Drafted(NamedTuple):
    """The trees of a batch, before the target has seen them."""

    tree: Tree
    kv_slots: Tensor  # [b, T] int64, of its nodes; fewer than planned where all chains end early


class EagerRun:
    """A step of one batch, with each operation launched separately."""

    samples = False  # ``commit`` needs the tokens

    def __init__(self, step: DecodeStep, batch: DecodeBatch, part: StepPart) -> None:
        self.step, self.batch, self.part = step, batch, part
        place = step.backend.place
        self.slots = place.to_device(batch.slots)
        self.kv_slots = place.to_device(batch.kv_slots)

    def draft(self) -> Drafted:
        """Draft trees."""
        sampling, constraints, slots = self.step.sampling, self.step.constraints, self.batch.slots
        keyed = BatchNoise(sampling, self.slots) if sampling.any_need(slots) else None
        noise: KeyedNoise | None = keyed
        steers = constraints.steers_drafts and self.part.shape != PLAIN and constraints.any(slots)
        if steers:
            guide = GrammarGuide(constraints, slots, sampling, keyed)
            noise = guide if guide.grammars else noise
        inputs = (self.slots, self.kv_slots, self.part, noise)
        depth = self.part.shape.depth
        if steers:
            tree = self.step.draft(*inputs, lambda tree: constraints.reshape(slots, tree, depth))
        else:
            tree = self.step.draft(*inputs)
        if self.part.shape != PLAIN:
            self.step.chooser.relay(tree)
        kv_slots = self.kv_slots
        if (drafted := tree.tokens.shape[1]) < kv_slots.shape[1]:
            kv_slots = kv_slots[:, :drafted].contiguous()
        return Drafted(tree, kv_slots)

    def resume(self) -> None:
        """Before anything of this step is read, since others may have been executed meanwhile."""

    def verify(self, drafted: Drafted) -> Verified:
        """Run the target on the drafted trees."""
        adapted = self.step.adapters.any(self.batch.slots)
        return self.step.verify(self.slots, drafted.kv_slots, drafted.tree, adapted)

    def commit(self, drafted: Drafted, verified: Verified, target: Tensor | None) -> Committed:
        """Commit the accepted nodes. target: [b, T] int64, the token sampled at each node."""
        assert target is not None
        step, part = self.step, self.part
        committed = step.commit(self.slots, drafted.kv_slots, verified, target, part)
        step.observe_on_host(self.slots, verified, committed.accepted, part)
        return committed


class EagerSteps:
    """Steps without graphs."""

    num_bytes = 0
    num_graphs = 0

    def __init__(self, step: DecodeStep) -> None:
        self.step = step

    def prepare(self, batch: DecodeBatch) -> EagerRun:
        """Prepare a step; this is not part of its measured time."""
        drafter = self.step.drafter
        part = drafter.prepare(batch.slots, batch.shape)
        if part.needs_catch_up:
            drafter.catch_up(self.step.backend.place.to_device(part.needs_catch_up))
        return EagerRun(self.step, batch, part)

    def close(self) -> None: ...
