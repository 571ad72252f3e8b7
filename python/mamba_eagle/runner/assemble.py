"""Makes a runner: weights, pools, drafter, and all else that outlives a step.

``assemble`` is the order of the start. Each line needs what those before it made; what can be
refused is refused before weights are read. All ranks pass through it together.
"""

import logging
import time
from functools import partial

from mamba_eagle.backend.base import Backend
from mamba_eagle.config import ConfigError, EngineConfig, MemorySettings
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.drafting.base import Drafter, DraftParts, DraftSource, FolderSource, NoDrafter
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.lora.slots import AdapterSlots
from mamba_eagle.message import Ready, TierSizes
from mamba_eagle.model_config import ModelConfig, Span, UnsupportedModel
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.models.registry import model_class
from mamba_eagle.models.split import Split
from mamba_eagle.parallel.shard import problems as split_problems
from mamba_eagle.parallel.stages import size_problems
from mamba_eagle.runner import loading, stages
from mamba_eagle.runner.chooser import Chooser, ShardedChooser
from mamba_eagle.runner.constrained_choice import MasksFirst, MasksOnDemand
from mamba_eagle.runner.constraints import Constraints, matchers_for
from mamba_eagle.runner.masks_ahead import MasksWhileVerifying
from mamba_eagle.runner.memory import memory_table, plan_memory, size_text
from mamba_eagle.runner.model_runner import ModelRunner, Parts
from mamba_eagle.runner.pools import Pools, context_length, make_pools
from mamba_eagle.runner.ranks import ONE_RANK, Ranks
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.runner.steps.decode_step import DecodeStep
from mamba_eagle.runner.steps.routing import Routing
from mamba_eagle.runner.sums import sums_for
from mamba_eagle.runner.tiers.copies import TierCopies
from mamba_eagle.runner.tiers.make import tier_copies
from mamba_eagle.runner.tiers.slot_bytes import DeviceSlots, Held
from mamba_eagle.runner.warm_up import warm_up

log = logging.getLogger("mamba_eagle.runner")

START_ERRORS = (ConfigError, UnsupportedModel, CheckpointError, FileNotFoundError)


def assemble(
    config: EngineConfig, ranks: Ranks = ONE_RANK, matchers: Matchers | None = None
) -> ModelRunner:
    """A runner that is warm: no request will wait for a kernel or a graph.

    ranks: the others that the model is split over. matchers: of grammars, where they have begun to
    load the vocabulary.

    Raises: ConfigError, UnsupportedModel, CheckpointError, FileNotFoundError.
    """
    group = ranks.group
    whole = loading.whole_model(config)
    wrong = split_problems(whole, group.size) + size_problems(whole, ranks.stages.size)
    if config.enable_return_routed_experts and (whole.moe is None or ranks.stages.size > 1):
        wrong.append("--enable-return-routed-experts: needs experts, and --pp-size 1: leave it out")
    if wrong:
        raise ConfigError(wrong)
    backend = loading.backend_for(config, whole, ranks.number)
    source = loading.draft_source_for(config, whole, group.shard, backend)
    split = loading.split_of(whole, group.shard, ranks.stages.size, backend.dtype)
    own = stages.own_part(config, whole, split, source, backend, ranks)
    backend.prepare_builds(f"{config} {own}")
    length = context_length(config, own)
    load = loading.Loader(config, backend)
    ops = backend.layer_ops.over(group, ranks.stages)
    model = load(lambda: model_class(whole)(own), config.model_path, split, ops)
    group.sums = sums_for(config, group, backend, own.hidden_size)
    adapters = _adapter_slots(config, model, split, backend)
    if source is not None:
        model.tap(source.tap_layers)
    if not own.is_last_stage:
        source = None  # the last stage drafts
    ranks.stages.mail = stages.mail_for(config, ranks, backend, model)
    memory = plan_memory(config, model, source, backend).agreed(ranks)
    weights = f"weights {size_text(weight_bytes(model))}"
    log.info("memory:\n%s", memory_table(memory, config, weights))
    pools = make_pools(config, model, memory, backend)
    choice = _make_choice(config, own, backend, pools, ranks, matchers)
    table, states = pools.table, pools.states.feature.shape[0]
    parts = DraftParts(
        config, backend, model, table, memory.kv_slots, states, group, load.of_drafter()
    )
    drafter = _make_drafter(source, parts)
    stages.agree_on_drafting(drafter, ranks.stages)
    requests = config.max_running_requests + backend.place.padding_slots
    most = max(requests * config.tree_shape.nodes, config.chunked_prefill_size or 0)
    routing = Routing(model, config.enable_return_routed_experts, most, backend.place)
    step = DecodeStep(
        backend, model, pools.kv, table, pools.scheme, drafter, choice, adapters, routing
    )
    copies = _tier_copies(config, whole, pools, step, source, ranks)
    captures = bool(ranks.smallest([_never_waits(config, step)])[0])
    cohorts = _num_cohorts(config, step, ranks)
    runner = ModelRunner(
        Parts(config, ranks, memory, pools, step, cohorts, source is not None, captures, copies)
    )
    warm_up(runner)
    runner.begin_serving(_describe(runner, length))
    return runner


def refill(runner: ModelRunner, config: EngineConfig) -> bool:
    """Put the weights of ``config`` in the places of the target's, while no request holds a slot.

    False: that cannot be done, and the runner is good for nothing.

    Raises: as ``assemble``.
    """
    model, backend, ranks = runner.model, runner.backend, runner.parts.ranks
    began = time.perf_counter()
    whole = loading.whole_model(config)
    if ranks.group.size > 1 and whole.scale_group != model.config.scale_group:
        return False  # ranks have other parts of it
    split = loading.split_of(whole, ranks.group.shard, ranks.stages.size, backend.dtype)
    load, make = loading.Loader(config, backend), partial(model_class(whole), model.config)
    if not load.refill(model, make, config.model_path, split):
        return False
    runner.journals.forget_weights()
    runner.adopt(config)
    backend.place.timestamp().wait()  # until then the files must stay
    loading.give_back_freed_memory()
    log.info("weights are replaced, in %.2f s", time.perf_counter() - began)
    return True


def _adapter_slots(
    config: EngineConfig, model: CausalLM, split: Split | None, backend: Backend
) -> AdapterSlots:
    """All empty; in memory before the pools, which take what is left."""
    requests = config.max_running_requests + backend.place.padding_slots
    sizes = (config.adapter_slots, config.max_lora_rank, requests)
    return AdapterSlots(model, split, backend.layer_ops, *sizes, backend.device)


def _make_choice(
    config: EngineConfig,
    model: ModelConfig,
    backend: Backend,
    pools: Pools,
    ranks: Ranks,
    matchers: Matchers | None,
) -> MasksFirst:
    """What chooses tokens from the logits. Ranks and stages exchange what is sampled, so they make
    all masks first and do so once."""
    running = config.max_running_requests + backend.place.padding_slots
    sampling = SamplingState(
        running, model.vocab_size, model.eos_token_ids, backend, whole=ranks.group.size == 1
    )
    samples: type[Chooser] = Chooser if ranks.group.size == 1 else ShardedChooser
    kind = Constraints
    if not model.is_last_stage:
        samples, kind = stages.EarlierStageChooser, stages.ConstraintsElsewhere
    chooser = samples(sampling, ranks.group, ranks.stages)
    constraints = kind(matchers or matchers_for(config, model), backend.place)
    if ranks.group.size > 1 or ranks.stages.size > 1:
        return MasksFirst(constraints, chooser)
    choice = MasksOnDemand if backend.place.on_host else MasksWhileVerifying
    return choice(constraints, chooser, pools.table)


def _make_drafter(source: DraftSource | None, parts: DraftParts) -> Drafter:
    if not parts.target.config.is_last_stage:
        return stages.DrafterElsewhere(parts.backend.device)
    return NoDrafter() if source is None else source.make(parts)


def _tier_copies(
    config: EngineConfig,
    whole: ModelConfig,
    pools: Pools,
    step: DecodeStep,
    source: DraftSource | None,
    ranks: Ranks,
) -> TierCopies | None:
    """whole: the target's. source: of the drafter that is here."""
    layers, shard = step.model.config.held_layers, ranks.group.shard
    held = [Held("target", pools.kv, pools.states, whole, shard, layers)]
    if isinstance(source, FolderSource):
        layers, drafter = Span(0, len(source.own.blocks)), step.drafter
        held.append(Held("drafter", drafter.kv, drafter.pool, source.own, source.layers, layers))
    slots = DeviceSlots.of(held, pools.journals)
    return tier_copies(config, slots, step.backend.place, ranks)


def _never_waits(config: MemorySettings, step: DecodeStep) -> bool:
    """Whether no part of a step waits for the host, so that steps can be captured."""
    backend, model = step.backend, step.model.config
    if config.disable_cuda_graph or backend.place.on_host:
        return False
    if model.attention is not None and not backend.attention_on_device:
        return False
    return step.scheme.on_device and backend.experts_on_device(model.moe)


def _num_cohorts(config: EngineConfig, step: DecodeStep, ranks: Ranks) -> int:
    """Groups of requests whose steps different stages execute at the same time. On GPUs without
    mail stages take turns, since the operations of a communicator have one order. So they do for
    drafters whose trees depend on the steps before."""
    can = step.backend.place.on_host or ranks.stages.mail is not None
    can &= not step.drafter.learns_from_all and not config.pp_turns
    return ranks.stages.size if can else 1


def _describe(runner: ModelRunner, length: int) -> Ready:
    """length: most tokens of a request."""
    config, ranks, memory, pools, step = runner.parts[:5]
    model, backend, drafter, journals = step.model, step.backend, step.drafter, pools.journals
    sizes = {
        "weight_bytes": weight_bytes(model),
        "kv_bytes": pools.kv.num_bytes,
        "checkpoint_bytes": pools.states.num_bytes,
        "journal_bytes": journals.num_bytes,
        "verify_bytes": pools.scheme.num_bytes,
        "draft_bytes": drafter.num_bytes,
        "adapter_bytes": step.adapters.nbytes,
        "graph_bytes": runner.steps.num_bytes,
    }
    return Ready(
        rank=ranks.number,
        max_kv_slots=memory.kv_slots,
        max_state_slots=memory.state_slots,
        max_running_requests=config.max_running_requests,
        context_length=length,
        vocab_size=model.config.vocab_size,
        eos_token_ids=list(model.config.eos_token_ids),
        chunked_prefill_size=backend.place.prompt_tokens,
        max_journals=journals.num_slots,
        journal_rows=journals.size,
        moves_anchors=not drafter.recurrent,
        drafter_reads=drafter.reads,
        cohorts=runner.parts.cohorts,
        tiers=runner.copies.sizes if runner.copies is not None else TierSizes(),
        details={
            "architecture": model.config.architecture,
            "model_type": model.config.model_type,
            "device": str(backend.device),
            "dtype": str(backend.dtype).removeprefix("torch."),
            "tp_size": ranks.group.size,
            "pp_size": ranks.stages.size,
            # of all ranks together
            **dict(zip(sizes, ranks.total(list(sizes.values())))),
            "layers": len(model.config.blocks),
            "rows_per_request": memory.rows,
            "pointwise_ops": backend.layer_ops.name,
            "sums": ranks.group.sums.text,
        },
    )
