"""Executes plans, one step at a time. No policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.drafting.base import Drafter, DraftParts, DraftSource, NoDrafter
from mamba_eagle.kernels.compilations import Compilations
from mamba_eagle.kernels.threads import num_threads, parallel_forms
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.message import (
    DecodeBatch,
    Plan,
    Release,
    RunnerReady,
    StepResult,
)
from mamba_eagle.model_config import ModelConfig, UnsupportedModel
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.models.split import Split
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.shard import local
from mamba_eagle.parallel.shard import problems as split_problems
from mamba_eagle.parallel.stages import size_problems, staged
from mamba_eagle.runner.agreement import check_agreement
from mamba_eagle.runner.chooser import make_chooser
from mamba_eagle.runner.constrained_choice import MasksFirst, MasksOnDemand
from mamba_eagle.runner.constraints import Constraints, TreeView, matchers_for
from mamba_eagle.runner.loading import Loader, backend_for, draft_source_for, split_of
from mamba_eagle.runner.masks_ahead import MasksWhileVerifying
from mamba_eagle.runner.memory import (
    DraftSize,
    MemoryPlan,
    memory_table,
    plan_memory,
    size_text,
)
from mamba_eagle.runner.pools import context_length, make_pools
from mamba_eagle.runner.sampler import SamplingState
from mamba_eagle.runner.stages import (
    ConstraintsElsewhere,
    DrafterElsewhere,
    EarlierStageChooser,
    LastStageChooser,
    agree_on_drafting,
    layers_by_stage,
)
from mamba_eagle.runner.steps.decode_step import (
    DecodeStep,
    EagerRun,
    EagerSteps,
    Verified,
    make_step,
)
from mamba_eagle.runner.steps.graphs import GraphedRun, GraphedSteps, RehearsedSteps
from mamba_eagle.runner.steps.launched import Launched, PendingDecode, Times
from mamba_eagle.runner.steps.prompts import PromptRunner
from mamba_eagle.runner.sums import sums_for
from mamba_eagle.runner.turns import Begun, Turns, draftable
from mamba_eagle.runner.warm_up import warm_up_plans
from mamba_eagle.tree.shapes import step_shapes

log = logging.getLogger("mamba_eagle.runner")


class ModelRunner:
    """Owns all tensors. The scheduler assigns the request slots, KV slots and state slots.

    A step handles releases, then prompt chunks, then one tree per decoding request: draft, verify,
    accept. Results are Python lists.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: Group = ALONE,
        stages: Group = ALONE,
        matchers: Matchers | None = None,
    ) -> None:
        """group: the ranks that each layer is split over; stages: those that the layers are split
        over, one after the other. Each rank has a runner of its own and executes the same plans.
        matchers: of grammars, where they have begun to load the vocabulary.

        Raises: ConfigError, UnsupportedModel, CheckpointError, FileNotFoundError.
        """
        self.config, self.group, self.stages, self._matchers = config, group, stages, matchers
        whole = read_model_config(config.model_path)
        if wrong := split_problems(whole, group.size) + size_problems(whole, stages.size):
            raise ConfigError(wrong)
        rank = stages.rank * group.size + group.rank
        self.backend = backend_for(config, whole.dtype, rank)
        source = draft_source_for(config, whole, group.shard, self.backend)
        split = split_of(whole, group.shard, stages.size, self.backend.dtype)
        self.model_config = local(whole, group.shard)
        if split is not None and stages.size > 1:
            spans = layers_by_stage(config, whole, split, source, self.backend)
            self.model_config = staged(
                self.model_config, spans[stages.rank], drafts=source is not None
            )
        self.backend.prepare_builds(f"{config} {self.model_config}")
        self.context_length = context_length(config, self.model_config)
        self.shape = config.tree_shape

        self.load = Loader(config, self.backend)
        self.model = self._load_target(whole, split)
        if source is not None:
            self.model.tap(source.tap_layers)
        if not self.model_config.is_last_stage:
            source = None  # the last stage drafts
        self.memory = self._plan_memory(source)
        weights = f"weights {size_text(weight_bytes(self.model))}"
        log.info("memory:\n%s", memory_table(self.memory, config, weights))
        self._make_pools()
        self.drafter = self._make_drafter(source)
        agree_on_drafting(self.drafter, stages)
        self.step = self._make_step()
        self.prompts = PromptRunner(
            self.step, self.pool, self.journals, self.model_config.eos_token_ids
        )
        self.steps: EagerSteps | GraphedSteps = EagerSteps(self.step)
        # called when a launch is about to wait for the device, where the last step's result is by
        # then: whoever sends results can do so first
        self.before_waiting: Callable[[], None] = lambda: None
        self._ended = self.backend.place.timestamp()  # end of the previous step
        self._begin_turns(drafts=source is not None)
        self.compilations: Compilations | None = None  # counted from the end of the start on
        self.warm_up()
        self.compilations = Compilations()
        self.graphs_at_start = self.steps.num_graphs
        self.ready = self._describe()

    def _begin_turns(self, drafts: bool) -> None:
        """drafts: whether this stage does."""
        several = self.stages.size > 1 and self._num_cohorts() > 1
        self.defers = several and not self.model_config.is_last_stage
        self.drafts_ahead = several and drafts
        self.turns = Turns()
        self._committed = -1  # the newest step that is, where nothing is deferred
        self._drafted: dict[int, EagerRun | GraphedRun] = {}  # ahead, by step

    def _load_target(self, whole: ModelConfig, split: Split | None) -> CausalLM:
        """This rank's part of it, and how its parts of layers are added up."""
        config, group, make = self.config, self.group, model_class(whole)
        ops = self.backend.layer_ops.over(group, self.stages)
        model = self.load(lambda: make(self.model_config), config.model_path, split, ops)
        group.sums = sums_for(config, group, self.backend, self.model_config.hidden_size)
        return model

    def _plan_memory(self, source: DraftSource | None) -> MemoryPlan:
        """With as many slots as fit on every rank of every stage."""
        own = plan_memory(
            self.config,
            self.model_config,
            self.model.feature_size,
            DraftSize(source.config, source.rows) if source and source.config else None,
            self.backend,
        )
        kv_slots, states, journals = self._smallest([own.kv_slots, own.state_slots, own.journals])
        return own._replace(kv_slots=kv_slots, state_slots=states, journals=journals)

    def _make_drafter(self, source: DraftSource | None) -> Drafter:
        if not self.model_config.is_last_stage:
            return DrafterElsewhere(self.backend.device)
        if source is None:
            return NoDrafter()
        parts = DraftParts(
            config=self.config,
            backend=self.backend,
            target=self.model,
            table=self.table,
            kv_slots=self.memory.kv_slots,
            state_slots=self.pool.feature.shape[0],
            group=self.group,
            load=self.load.of_drafter(),
        )
        return source.make(parts)

    def _make_step(self) -> DecodeStep:
        step = make_step(
            self.backend,
            self.model,
            self.kv,
            self.table,
            self.scheme,
            self.drafter,
            self.sampling,
            self._make_choice(),
        )
        step.forced_length = self.config.simulate_acc_len or None
        if step.forced_length is not None:
            self.drafter.draft_whole_trees()
        return step

    def _make_choice(self) -> MasksFirst:
        """Ranks that share the vocabulary exchange what they sample, so they make all masks first
        and do so once."""
        if not self.chooser.has_all_logits:
            return MasksFirst(self.constraints, self.chooser)
        on_host = self.backend.place.on_host
        kind = MasksOnDemand if on_host else MasksWhileVerifying
        return kind(self.constraints, self.chooser, self.sampling, self.table)

    # ── one step ──

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
        before the result is read. Steps are executed in the order of the plans. On a CPU a stage
        before the last one does what it can, and commits the step when a later plan needs it.

        Raises: RanksDiffer with --check-ranks; PlanTooEarly.
        """
        self.turns.wait_for(plan)
        launched: list[Launched] = []
        work = self._execute(plan, launched)
        if next(work, self) is self:
            return launched[0]
        begun = Begun(plan, work, launched.pop, self.turns)
        self.turns.add(begun)
        if self._checks(plan):
            self.turns.commit()
        return begun

    @torch.inference_mode()
    def look_ahead(self, upcoming: Sequence[Plan]) -> None:
        """Draft for plans that have come and are to be launched next, as far as the steps that they
        need are committed: earlier stages wait for these trees. To be called before each launch, on
        all ranks of a stage.

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
                run.draft()
                self._drafted[plan.step] = run

    def _checks(self, plan: Plan) -> bool:
        """Whether all ranks compare their tables after this step."""
        every = self.config.check_ranks
        return every > 0 and plan.step % every == 0

    def _execute(self, plan: Plan, launched: list[Launched]) -> Iterator[None]:
        """All that a plan asks for, appended to ``launched`` at the end. Pauses once, where it
        needs the Turn, if this runner ``defers``."""
        now = self.backend.place.timestamp
        began = now()
        drafted = self._drafted.pop(plan.step, None)
        if plan.untrack and drafted is None:
            self.drafter.untrack(plan.untrack)
        if plan.releases:
            self._release(plan.releases)
        self.journals.end_trails(plan.end_trails)
        self.journals.move(plan.moves)
        prompts = self.prompts.run(plan.prefill) if plan.prefill else None
        if prompts is not None and not self.defers:
            self.prompts.finish(prompts)
        commit, decode_began = None, began
        if plan.decode is not None:
            run = drafted or self.steps.prepare(plan.decode)
            decode_began = now()
            commit = self._verify(plan.decode, run, drafted is not None)
        if self.defers:
            yield
            if prompts is not None:
                self.prompts.finish(prompts)
        trees = commit() if commit is not None else None
        if self._checks(plan):
            check_agreement(plan.step, self.table, self.scheme, self.group)
            check_agreement(plan.step, self.table, self.scheme, self.stages, "stage")
        previous, self._ended, self._committed = self._ended, now(), plan.step
        times = Times(previous, began, decode_began, self._ended)
        launched.append(Launched(plan.step, prompts, trees, times, self.num_compiled))

    def _verify(
        self, batch: DecodeBatch, run: EagerRun | GraphedRun, is_drafted: bool
    ) -> Callable[[], PendingDecode]:
        """Draft, unless that ``is_drafted``, and verify. Returns what commits the step."""
        tree, view = run.tree if is_drafted else run.draft(), None
        if self.constraints.any(batch.slots):
            view = self.constraints.view(batch.slots, tree)
        verified = run.verify()
        return lambda: self._commit(batch, run, verified, view)

    def _commit(
        self,
        batch: DecodeBatch,
        run: EagerRun | GraphedRun,
        verified: Verified,
        view: TreeView | None,
    ) -> PendingDecode:
        target, marks = None, None
        at = (batch.slots, verified.logits, verified.positions + 1, verified.tree)
        if view is not None:
            self.before_waiting()
            target, marks = self.step.choice.choose(*at, view)
        elif not run.samples:
            target = self.chooser.sample(*at)
        outcome = run.commit(target)
        self.constraints.observe_accepted(batch.slots, outcome.accepted)
        if any(self.journals.has_trail[slot] for slot in batch.slots):
            self.scheme.keep_rows(
                run.slots, outcome.accepted, verified.features, self.journals.kept
            )
        return PendingDecode(self.chooser, self.table, batch, verified, outcome, marks)

    def _release(self, releases: Sequence[Release]) -> None:
        slots = [release.slot for release in releases]
        self.journals.end_trails(slots)
        self.drafter.release(slots, [max(each.fold_to, each.keep_to) for each in releases])
        kept = [(release.slot, release.fold_to) for release in releases if release.fold_to >= 0]
        if kept:
            kept_slots, ends = self.backend.place.to_device(list(zip(*kept)))
            keep = ends - self.scheme.folded(kept_slots)
            self.scheme.finish(kept_slots, self.table.state_slot[kept_slots], keep)
        self.table.remaining.index_fill_(0, self.backend.place.to_device(slots), 0)
        for slot in slots:
            self.sampling.release(slot)
            self.constraints.release(slot)
            self.prompts.pooling.release(slot)

    def simulate_accept_length(self, length: float) -> None:
        """Make steps accept ``length`` nodes on average, whatever the target's tokens are.

        For benchmarks with dummy weights. Call it before the first step.
        """
        self.step.forced_length = length
        self.drafter.draft_whole_trees()
        if self._capturable():
            self.steps = self._make_steps(GraphedSteps)
        self.step.num_forced.zero_()

    def close(self) -> None:
        """To be called before the ranks leave each other; nothing may be launched afterwards. NCCL
        waits for the graphs that hold its operations, and would wait for ever."""
        self.turns.commit()
        self.steps.close()

    # ── start-up ──

    def warm_up(self) -> None:
        """Launch everything that serving can need, so that no request waits for a kernel that is
        compiled or a graph that is captured."""
        self.backend.build_kernels(self._rehearse)
        self._generate()
        if self.backend.place.on_host:
            with self.backend.long_prompts():
                self._generate()
                if self._most_threads() > 1:
                    with parallel_forms():
                        self._generate()
        if self._capturable():
            self.steps = self._make_steps(GraphedSteps)
        self.step.num_forced.zero_()  # ranks warm up with steps of different kinds

    def _rehearse(self) -> None:
        """As ``warm_up``, and captures nothing. Ranks exchange nothing either: another one may have
        found its kernels where an earlier start left them, and rehearse nothing."""
        with self.group.quiet(), self.stages.quiet():
            self._generate()
            if self._capturable():
                self._make_steps(RehearsedSteps)

    def _generate(self) -> None:
        """All that a plan can ask for, once; and mask logits."""
        for plan in warm_up_plans(self.shape, self.journals.num_slots > 0):
            self.execute(plan)
        if not self.model_config.is_last_stage:
            return
        # one row of two, as for the first request that has a grammar
        vocab, device = self.model_config.vocab_size, self.backend.device
        masks = torch.full((1, self.constraints.matchers.words), -1, dtype=torch.int32)
        logits = torch.zeros(2, vocab, dtype=self.model.logits_dtype, device=device)
        self.backend.mask_logits(logits, self.backend.place.to_device([0]), masks.to(device))

    @torch.inference_mode()
    def _make_steps(self, kind: type[GraphedSteps]) -> GraphedSteps:
        running, vocab = self.config.max_running_requests, self.model.head_tokens.size
        steps = kind(self.step, running, self.shape.nodes, vocab)
        steps.warm_up(step_shapes(self.shape, self.config.speculative_adaptive))
        return steps

    def _capturable(self) -> bool:
        """Whether no part of a step waits for the host, on any rank: all must warm up alike."""
        return bool(self._smallest([self._never_waits()])[0])

    def _smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks of all stages."""
        return self.stages.smallest(self.group.smallest(numbers))

    def _most_threads(self) -> int:
        """Of any rank: machines may differ, and all ranks must warm up alike."""
        return -self._smallest([-num_threads()])[0]

    def _total(self, numbers: Sequence[int]) -> list[int]:
        """The sum of each number over all ranks of all stages."""
        return self.stages.total(self.group.total(numbers))

    def _never_waits(self) -> bool:
        if self.config.disable_cuda_graph or not self.backend.captures_graphs:
            return False
        model = self.model_config
        if model.attention is not None and not self.backend.attention_on_device:
            return False
        return self.scheme.on_device and self.backend.experts_on_device(model.moe)

    def _make_pools(self) -> None:
        """And what chooses tokens from the logits."""
        config, model, backend = self.config, self.model_config, self.backend
        self.table, self.kv, self.pool, self.scheme, self.journals = make_pools(
            config, self.model, self.memory, backend
        )
        running = config.max_running_requests + backend.place.padding_slots
        self.sampling = SamplingState(
            running, model.vocab_size, model.eos_token_ids, backend, whole=self.group.size == 1
        )
        self.chooser = make_chooser(self.sampling, self.group)
        kind = Constraints
        if not model.is_last_stage:
            self.chooser = EarlierStageChooser(self.sampling, self.stages)
            kind = ConstraintsElsewhere
        elif self.stages.size > 1:
            self.chooser = LastStageChooser(self.chooser, self.stages)
        self.constraints = kind(self._matchers or matchers_for(config, model), backend.place)

    def _num_cohorts(self) -> int:
        """Groups of requests whose steps different stages execute at the same time. On a GPU a
        captured step has one place for its inputs and outputs, and the operations of a communicator
        have one order, so stages take turns there. So they do for drafters whose trees depend on
        the steps before."""
        can = self.backend.place.on_host and not self.drafter.learns_from_all
        return self.stages.size if can else 1

    def _describe(self) -> RunnerReady:
        memory = self.memory
        # of all ranks together
        weights, kv, states, journals, verify, draft, graphs = self._total(
            [
                weight_bytes(self.model),
                self.kv.num_bytes,
                self.pool.num_bytes,
                self.journals.num_bytes,
                self.scheme.num_bytes,
                self.drafter.num_bytes,
                self.steps.num_bytes,
            ]
        )
        return RunnerReady(
            rank=self.stages.rank * self.group.size + self.group.rank,
            max_kv_slots=memory.kv_slots,
            max_state_slots=memory.state_slots,
            max_running_requests=self.config.max_running_requests,
            context_length=self.context_length,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=list(self.model_config.eos_token_ids),
            pid=os.getpid(),
            chunked_prefill_size=self.backend.place.prompt_tokens,
            max_journals=self.journals.num_slots,
            journal_rows=self.journals.size,
            moves_anchors=not self.drafter.recurrent,
            drafter_reads=self.drafter.reads,
            cohorts=self._num_cohorts(),
            details={
                "architecture": self.model_config.architecture,
                "model_type": self.model_config.model_type,
                "device": str(self.backend.device),
                "dtype": str(self.backend.dtype).removeprefix("torch."),
                "tp_size": self.group.size,
                "pp_size": self.stages.size,
                "weight_bytes": weights,
                "kv_bytes": kv,
                "checkpoint_bytes": states,
                "journal_bytes": journals,
                "verify_bytes": verify,
                "draft_bytes": draft,
                "graph_bytes": graphs,
                "rows_per_request": memory.rows,
                "pointwise_ops": self.backend.layer_ops.name,
                "sums": self.group.sums.text,
            },
        )


START_ERRORS = (ConfigError, UnsupportedModel, CheckpointError, FileNotFoundError)
