"""A runner does once all that serving can ask for, before it is ready."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from mamba_eagle import message
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.layers.layer import Layer
from mamba_eagle.message.indices import indices
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.steps.graphs import RehearsedSteps


def warm_up(runner: ModelRunner) -> None:
    """Launch everything that serving can need, so that no request waits for a kernel that is
    compiled or a graph that is captured. All ranks must do alike, though machines may differ."""
    backend = runner.backend
    backend.build_kernels(lambda: rehearse(runner))
    _generate(runner)
    if runner.adapters.num_slots:
        _generate(runner, adapter=0)
    forms = backend.other_forms()
    most = -runner.parts.ranks.smallest([-len(forms)])[0]  # of any rank
    for i in range(most):
        with forms[i] if i < len(forms) else nullcontext():
            _generate(runner)
    runner.capture()
    runner.step.num_forced.zero_()  # ranks warm up with steps of different kinds


def rehearse(runner: ModelRunner) -> None:
    """The same, and captures nothing. Ranks exchange nothing either: another one may have found its
    kernels where an earlier start left them, and rehearse nothing."""
    with runner.parts.ranks.quiet():
        _generate(runner)
        if runner.parts.captures:
            runner.make_steps(RehearsedSteps)


def _generate(runner: ModelRunner, adapter: int = -1) -> None:
    """All that a plan can ask for, once; and mask logits. adapter: the slot of one."""
    has_journals, processed = runner.journals.num_slots > 0, runner.step.table.processed
    shape = runner.config.tree_shape
    for plan in warm_up_plans(shape, has_journals, adapter, lambda: int(processed[0])):
        runner.execute(plan)
    if not runner.backend.place.on_host:
        _rehearse_layers(runner)
    if not runner.model.config.is_last_stage:
        return
    # one row of two, as for the first request that has a grammar
    backend, model = runner.backend, runner.model
    masks = torch.full((1, runner.constraints.matchers.words), -1, dtype=torch.int32)
    logits = torch.zeros(
        2, model.config.vocab_size, dtype=model.logits_dtype, device=backend.device
    )
    backend.mask_logits(logits, backend.place.to_device([0]), masks.to(backend.device))


@torch.inference_mode()
def _rehearse_layers(runner: ModelRunner) -> None:
    for module in runner.model.modules():
        if isinstance(module, Layer):
            module.rehearse(runner.backend.device)
    runner.adapters.rehearse()


def warm_up_plans(
    shape: TreeShape, has_journals: bool, adapter: int, processed: Callable[[], int]
) -> Iterator[message.Plan]:
    """Make two tokens with logprobs, greedy and then sampled, and keep the request's rows; with
    journal slots (``has_journals``) also save them and replay them.

    Leftovers in request slot 0, state slot 0, journal slot 0 and the KV slots are overwritten by
    the requests that take these slots.

    Args:
        adapter: the slot of the request's adapter, or -1: it has none.
        processed: the number of tokens that request slot 0 has processed. A model whose logits are
            not finite accepts none in a step, and then there is no row to fold.
    """
    for temperature, top_k in ((0.0, -1), (1.0, 2)):
        prompt = message.PrefillItem(
            slot=0,
            state_slot=0,
            start=0,
            token_ids=indices([0]),
            kv_slots=indices([0]),
            first=message.FirstChunk(
                sampling=SamplingParams(
                    temperature=temperature, top_k=top_k, max_new_tokens=2, ignore_eos=True
                ),
                output_start=1,
                return_logprob=True,
                top_logprobs=1,
                adapter=adapter,
            ),
        )
        moves = []
        if has_journals:
            prompt.journal = message.JournalPart(0, 0, 1)
            prompt.trail = 0
            moves = [message.AnchorMove(prompt.journal, state_slot=0)]
        tree = message.DecodeBatch(
            shape=shape, slots=[0], kv_slots=[list(range(1, 1 + shape.nodes))]
        )
        yield message.Plan(step=0, prefill=[prompt])
        yield message.Plan(step=0, decode=tree)
        yield message.Plan(step=0, releases=[message.Release(0, fold_to=processed())], moves=moves)
