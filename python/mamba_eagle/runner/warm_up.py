"""Plans that make a runner do once all that serving can ask for."""

from __future__ import annotations

from collections.abc import Iterator

from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.message import (
    AnchorMove,
    DecodeBatch,
    JournalPart,
    Plan,
    PrefillItem,
    Release,
)
from mamba_eagle.message.indices import indices


def warm_up_plans(shape: TreeShape, has_journals: bool) -> Iterator[Plan]:
    """Make two tokens, greedy and then sampled, and keep the request's rows; with journal slots
    (``has_journals``) also save them and replay them.

    Leftovers in request slot 0, state slot 0, journal slot 0 and the KV slots are overwritten by
    the requests that take these slots.
    """
    for temperature, top_k in ((0.0, -1), (1.0, 2)):
        prompt = PrefillItem(
            slot=0,
            state_slot=0,
            start=0,
            token_ids=indices([0]),
            kv_slots=indices([0]),
            sampling=SamplingParams(
                temperature=temperature, top_k=top_k, max_new_tokens=2, ignore_eos=True
            ),
            output_start=1,
        )
        moves = []
        if has_journals:
            prompt.journal = JournalPart(0, 0, 1)
            prompt.trail = 0
            moves = [AnchorMove(prompt.journal, state_slot=0)]
        tree = DecodeBatch(shape=shape, slots=[0], kv_slots=[list(range(1, 1 + shape.nodes))])
        yield Plan(step=0, prefill=[prompt])
        yield Plan(step=0, decode=tree)
        yield Plan(step=0, releases=[Release(0, fold_to=2)], moves=moves)
