"""Executes plans, one step at a time. No policy."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from mamba_eagle.backend.prefill import fold_released
from mamba_eagle.backend.programs import Verified
from mamba_eagle.config import EngineConfig
from mamba_eagle.message import DecodeBatch, Plan, Ready, Release, StepResult
from mamba_eagle.runner.compilations import Compilations
from mamba_eagle.runner.constraints import TreeView
from mamba_eagle.runner.memory import MemoryPlan
from mamba_eagle.runner.pools import Pools
from mamba_eagle.runner.ranks import Ranks, check_agreement
from mamba_eagle.runner.sampler import Scored
from mamba_eagle.runner.steps.decode_step import DecodeStep, Drafted, EagerRun, EagerSteps
from mamba_eagle.runner.steps.graphs import GraphedRun, GraphedSteps
from mamba_eagle.runner.steps.launched import Launched, PendingDecode
from mamba_eagle.runner.steps.prompt_graphs import LEAST_FREE
from mamba_eagle.runner.steps.prompts import PromptRunner
from mamba_eagle.runner.tiers.copies import StepCopies, TierCopies
from mamba_eagle.runner.turns import Begun, Turns, draftable
from mamba_eagle.tree.shapes import step_shapes

Run = EagerRun | GraphedRun


class Parts(NamedTuple):
    """What ``assemble`` makes a runner of."""

    config: EngineConfig
    ranks: Ranks
    memory: MemoryPlan
    pools: Pools
    step: DecodeStep  # with backend, model, drafter and what chooses tokens
    cohorts: int  # groups of requests whose decode steps stages execute at the same time
    drafts: bool  # this stage has the drafter
    captures: bool  # steps can be captured in graphs, on all ranks
    copies: TierCopies | None = None  # of lower tiers of the prefix cache, if there are any


def checks_ranks(config: EngineConfig, plan: Plan) -> bool:
    """Whether all ranks compare their tables after this step."""
    return config.check_ranks > 0 and plan.step % config.check_ranks == 0


class ModelRunner:
    """Owns all tensors. The scheduler assigns the request slots, KV slots and state slots.

    A step handles releases, then prompt chunks, then one tree per decoding request: draft, verify,
    accept. Results are Python lists.
    """

    ready: Ready  # set when the start is over

    def __init__(self, parts: Parts) -> None:
        self.parts, self.config, step, pools = parts, parts.config, parts.step, parts.pools
        self.group, self.stages = parts.ranks.group, parts.ranks.stages
        self.memory, self.step, self.backend = parts.memory, step, step.backend
        self.table, self.kv, self.pool, self.scheme, self.journals = pools
        self.copies = parts.copies
        self.drafter, self.chooser = step.drafter, step.chooser
        self.constraints, self.model, self.adapters = step.constraints, step.model, step.adapters
        if self.config.simulate_acc_len:
            step.simulate(self.config.simulate_acc_len)
        self.prompts = PromptRunner(step, self.pool, self.journals)
        self.steps: EagerSteps | GraphedSteps = EagerSteps(step)
        # called before a launch waits for the device: the caller can send the last results first
        self.before_waiting: Callable[[], None] = lambda: None
        self._ended = self.backend.place.timestamp()  # end of the previous step
        several = self.stages.size > 1 and parts.cohorts > 1
        self.defers = several and not self.model.config.is_last_stage
        # ranks on GPUs would wait for each other to agree on what has come
        agrees = self.backend.place.on_host or self.group.size == 1
        self.drafts_ahead = several and parts.drafts and agrees
        self.turns = Turns()
        self._committed = -1  # the newest step that is, where nothing is deferred
        self._drafted: dict[int, tuple[Run, Drafted]] = {}  # ahead, by step
        self.compilations: Compilations | None = None  # counted from the end of the start on
        self.graphs_at_start = 0

    def begin_serving(self, ready: Ready) -> None:
        """The start is over; what is compiled or captured from now on is counted."""
        self.compilations = Compilations()
        self.graphs_at_start = self.steps.num_graphs
        self.ready = ready

    def adopt(self, config: EngineConfig) -> None:
        """Its settings name other folders now."""
        self.config, self.parts = config, self.parts._replace(config=config)

    @property
    def num_compiled(self) -> int:
        """Kernels that were compiled or loaded, and graphs that were captured, since the start."""
        if self.compilations is None:
            return 0
        return self.compilations.count + self.steps.num_graphs - self.graphs_at_start

    @property
    def overlaps(self) -> bool:
        """Whether ``launch`` returns before the device is done."""
        return self.backend.place.overlaps

    def execute(self, plan: Plan) -> StepResult:
        """Execute a plan and wait for its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched | Begun:
        """Start to execute a plan.

        On a GPU this returns once all work has been launched, and the next plan may be launched
        before the result is read. Steps are executed in the order of the plans. Where stages
        work at the same time, one before the last does what it can, and commits the step when a
        later plan needs it.

        Raises: RanksDiffer with --check-ranks; PlanTooEarly.
        """
        self.turns.wait_for(plan)
        launched: list[Launched] = []
        work = self._execute(plan, launched)
        if next(work, self) is self:
            return launched[0]
        begun = Begun(plan, work, launched.pop, self.turns)
        self.turns.add(begun)
        if checks_ranks(self.config, plan):
            self.turns.commit()
        return begun

    @torch.inference_mode()
    def look_ahead(self, upcoming: Sequence[Plan]) -> None:
        """Draft for plans that have come and are to be launched next, up to the first that needs a
        step not committed yet: earlier stages wait for these trees. To be called before each
        launch, on all ranks of a stage.

        Raises: PlanTooEarly.
        """
        if not self.drafts_ahead:
            return
        (count,) = self.group.smallest([len(upcoming)])  # what all of them have received
        for plan in draftable(upcoming[:count], self._committed, self.config.check_ranks):
            if plan.step not in self._drafted:
                assert plan.decode is not None
                if plan.untrack:
                    self.drafter.untrack(plan.untrack)
                run = self.steps.prepare(plan.decode)
                self._drafted[plan.step] = run, run.draft()

    def _execute(self, plan: Plan, launched: list[Launched]) -> Iterator[None]:
        """All that a plan asks for, appended to ``launched`` at the end. Pauses once, where it
        needs the Turn, if this runner ``defers``."""
        now = self.backend.place.timestamp
        began = now()
        ahead = self._drafted.pop(plan.step, None)
        if plan.untrack and ahead is None:
            self.drafter.untrack(plan.untrack)
        if plan.releases:
            self._release(plan.releases)
        for load in plan.adapters:
            self.adapters.load(load.slot, load.number)
        if self.copies is not None:
            self.copies.leave(plan)
        self.journals.end_trails(plan.end_trails)
        self.journals.move(plan.moves)
        if self.copies is not None:
            self.copies.come(plan)
        prompts = self.prompts.run(plan.prefill) if plan.prefill else None
        if prompts is not None and not self.defers:
            self.prompts.finish(prompts)
        commit, decode_began = None, began
        if plan.decode is not None:
            run, drafted = ahead or (self.steps.prepare(plan.decode), None)
            decode_began = now()
            commit = self._verify(plan.decode, run, drafted)
        if self.defers:
            yield
            if prompts is not None:
                self.prompts.finish(prompts)
        trees = commit() if commit is not None else None
        if checks_ranks(self.config, plan):
            check_agreement(plan.step, self.table, self.scheme, self.group)
            check_agreement(plan.step, self.table, self.scheme, self.stages, "stage")
        previous, self._ended, self._committed = self._ended, now(), plan.step
        times = (previous, began, decode_began, self._ended)
        copies = StepCopies.of(self.copies, plan) if self.copies is not None else None
        launched.append(Launched(plan.step, prompts, trees, *times, self.num_compiled, copies))

    def _verify(
        self, batch: DecodeBatch, run: Run, drafted: Drafted | None
    ) -> Callable[[], PendingDecode]:
        """Draft, unless that is done, and verify. Returns what commits the step."""
        run.resume()
        trees, view = drafted or run.draft(), None
        if self.constraints.any(batch.slots):
            view = TreeView(self.constraints, trees.tree)
        verified = run.verify(trees)
        return lambda: self._commit(batch, run, trees, verified, view)

    def _commit(
        self,
        batch: DecodeBatch,
        run: Run,
        drafted: Drafted,
        verified: Verified,
        view: TreeView | None,
    ) -> PendingDecode:
        run.resume()
        target, marks = None, None
        width = verified.tree.tokens.shape[1]
        experts = self.step.routing.of([(slot, width) for slot in batch.slots])
        if view is not None or not run.samples:
            nodes = Scored(batch.slots, verified.logits, verified.positions + 1, verified.tree)
            if view is None:
                target = self.chooser.sample(nodes)
            else:
                self.before_waiting()
                target, marks = self.step.choice.choose(nodes, view)
        committed = run.commit(drafted, verified, target)
        accepted = committed.accepted
        self.constraints.observe(batch.slots, accepted.tokens, accepted.count)
        if any(self.journals.has_trail[slot] for slot in batch.slots):
            self.scheme.keep_rows(run.slots, accepted, verified.features, self.journals.kept)
        return PendingDecode(self.chooser, self.table, batch, verified, committed, marks, experts)

    def _release(self, releases: Sequence[Release]) -> None:
        slots = [release.slot for release in releases]
        self.journals.end_trails(slots)
        self.drafter.release(slots, [max(each.fold_to, each.keep_to) for each in releases])
        fold_released(self.table, self.scheme, releases, self.backend.place)
        self.step.release(slots)
        self.prompts.pooling.release(slots)

    def capture(self) -> None:
        """From now on steps are graphs, if they can be; all kinds of them are captured again."""
        if self.parts.captures:
            # NCCL would wait for ever for the earlier graphs
            self.steps.close()
            self.prompts.graphs.close()
            self.steps = self.make_steps(GraphedSteps)
            place, graphs = self.backend.place, self.prompts.graphs
            most = self.config.chunked_prefill_size or place.prompt_tokens
            [free] = self.parts.ranks.smallest([place.memory().free])
            graphs.capture(self.config.max_running_requests, most if free > LEAST_FREE else 0)

    @torch.inference_mode()
    def make_steps(self, kind: type[GraphedSteps]) -> GraphedSteps:
        running, shape = self.config.max_running_requests, self.config.tree_shape
        steps = kind(self.step, running, shape.nodes, self.model.head_tokens.size)
        steps.warm_up(step_shapes(shape, self.config.speculative_adaptive))
        return steps

    def retire(self) -> None:
        """Nothing may be launched afterwards; the ranks stay together."""
        self.turns.commit()
        self.steps.close()
        self.prompts.graphs.close()
        if self.copies is not None:
            self.copies.close()
        if self.compilations is not None:
            self.compilations.close()

    def close(self) -> None:
        """Leave the other ranks as well. Graphs go first: NCCL would wait for those that hold its
        operations for ever."""
        self.retire()
        self.parts.ranks.close()
