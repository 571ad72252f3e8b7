"""The rule from logits to tokens, in torch, for one rank and for ranks that each have a part of the
vocabulary (``Columns``). kernels/sampling/ has it in Triton, and naive.py there is its oracle.

The token of a node is ``argmax(filter(logits') / temperature + gumbel(seed, position))``, and
``argmax(logits')`` at temperature 0. logits' are the logits after, in this order, penalties, bias,
the ban of stop tokens, and the mask of the request's grammar. It is computed as
``argmax(filter(logits') + temperature * gumbel)``, which is the same and needs no case for
temperature 0.

A request's tokens do not depend on its batch: all operations treat requests separately and see only
those that ask for them, and all sums that decide which tokens are kept are integer sums, which do
not depend on the order of addition.

Shapes: b requests, T tree nodes, V vocabulary, own V of it on this rank, R request slots. The host
knows from a batch's request slots which operations it needs; nothing here waits for a device other
than the host.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.core import PENALTIES
from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.sampling.tables import MASS, SampledNodes
from mamba_eagle.parallel.vocabulary import Columns, Order
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.tree.tree import Tree, single_node_tree

FIRST_TRY = 256  # tokens that the CPU sorts first for a top-p, before it sorts all of them


class Scored(NamedTuple):
    """The nodes of a batch, whose tokens are to be chosen."""

    slots: list[int]  # [b] request slots
    logits: Tensor  # [b, T, V], any float dtype, or a rank's columns of these
    positions: Tensor  # [b, T] int64, absolute, of the sampled token: the node's own + 1
    tree: Tree | None = None  # None: T is 1, and the node is the last token counted


class Requests(NamedTuple):
    """Some requests of a batch, with a tree of T nodes each."""

    state: SamplingState
    columns: Columns  # of the vocabulary, on this rank
    slots: list[int]
    nodes: SampledNodes

    def number(self, name: str) -> Tensor:
        """A parameter of each request: [b, 1, 1] float32."""
        return self.state.number(name)[self.nodes.slots][:, None, None]

    def integer(self, name: str) -> Tensor:
        """The same of INTEGERS: [b, 1, 1] int64."""
        return self.state.integer(name)[self.nodes.slots][:, None, None]

    def own(self, table: Tensor) -> Tensor:
        """This rank's columns of a table [R, V]: [b, 1, own V]."""
        return self.columns.of(table)[self.nodes.slots].unsqueeze(1)

    def noise(self) -> RowNoise:
        """Of all nodes, one after the other."""
        state, (slots, positions, *_) = self.state, self.nodes
        seeds, temperatures = (
            part[slots, None].expand_as(positions).reshape(-1)
            for part in (state.integer("seed"), state.number("temperature"))
        )
        return RowNoise(seeds, positions.reshape(-1), temperatures, state.vocab_size)


# ── what changes single logits, one token each: logits [b, T, own V] float32 -> the same ─────────


def penalised(logits: Tensor, requests: Requests) -> Tensor:
    """A token that has occurred, in the prompt or in the output up to a node, gets less likely."""
    counts = _output_counts(requests)
    repetition, frequency, presence = (
        requests.number(f"{name}_penalty") for name in ("repetition", "frequency", "presence")
    )
    seen = (counts > 0) | requests.own(requests.state.prompt_seen)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def _output_counts(requests: Requests) -> Tensor:
    """How often each token is in the output, as seen by each node: [b, T, own V] int32.

    A node adds its ancestors and itself, except for the root, which is already counted.
    """
    _, positions, tokens, ancestors = requests.nodes
    counts = requests.own(requests.state.output_counts).repeat(1, positions.shape[1], 1)
    begin, end = requests.columns.span
    index = tokens.unsqueeze(1).expand_as(ancestors)[:, :, 1:] - begin
    is_own = (index >= 0) & (index < end - begin)
    added = (ancestors[:, :, 1:] & is_own).int()
    return counts.scatter_add_(2, index.clamp(0, end - begin - 1), added)


def biased(logits: Tensor, requests: Requests) -> Tensor:
    return logits + requests.own(requests.state.bias)


def without_stops(logits: Tensor, requests: Requests) -> Tensor:
    """Without stop tokens as long as the output has fewer than min_new_tokens."""
    state, nodes = requests.state, requests.nodes
    early = nodes.positions < state.integer("ban_until")[nodes.slots].unsqueeze(1)
    return logits.masked_fill(early.unsqueeze(2) & requests.own(state.stops), -torch.inf)


# ── which tokens are kept: -inf in place of the others. Of equal logits lower ids rank first. ────


def best(logits: Tensor, requests: Requests) -> Tensor:
    """Top-k, then top-p of the tokens that it leaves."""
    limits = [requests.state.limits[slot] for slot in requests.slots]
    whole = order = requests.columns.order(logits)
    last = None
    if max(limits) > 0:
        order = whole.first(max(limits)) if min(limits) > 0 else whole
        limit = requests.integer("top_k")
        last = order.last_kept(None, limit, [max(limits)], None if min(limits) > 0 else limit < 1)
    if any(requests.state.asks(slot, {"top_p"}) for slot in requests.slots):
        last = _last_of_top_p(order, last, requests)
    assert last is not None  # requests that ask for neither are not here
    return logits.masked_fill(whole.keys < last, -torch.inf)


def _last_of_top_p(order: Order, last: Tensor | None, requests: Requests) -> Tensor:
    """The key of the last token that has less than top_p of the mass ranked before it, and is not
    after ``last``: [b, T, 1]."""
    state, columns, share = requests.state, requests.columns, requests.number("top_p")
    scaled = (order.scores - columns.largest(order.scores)).div_(requests.number("temperature"))
    mass = scaled.exp_().mul_(MASS).long()
    if last is not None:
        mass.masked_fill_(order.keys < last, 0)
    limit = (columns.total(mass).double() * share).long().clamp_(min=1)
    free = None if all(state.asks(slot, {"top_p"}) for slot in requests.slots) else share >= 1.0
    # Only the device knows how many tokens a top-p without top-k keeps. Where the host does not
    # wait for it, there is a single try with all tokens. The result is the same.
    width = state.vocab_size
    tries = [min(FIRST_TRY, width), width] if state.backend.place.on_host else [width]
    found = order.last_kept(mass, limit, tries, free)
    return found if last is None else found.maximum(last)


def min_p(logits: Tensor, requests: Requests) -> Tensor:
    """Those with p >= min_p * max(p), in logits; the filters before this one keep the best token.
    The table has ``temperature * log(min_p)``."""
    floor = requests.columns.largest(logits) + requests.number("min_p")
    return logits.masked_fill(logits < floor, -torch.inf)


# In this order, each for the requests that ask for one of its parameters.
Operation = tuple[Callable[[Tensor, Requests], Tensor], Collection[str]]
ADJUSTMENTS: tuple[Operation, ...] = (
    (penalised, PENALTIES),
    (biased, {"logit_bias"}),
    (without_stops, {"min_new_tokens"}),
)
CHOICES: tuple[Operation, ...] = ((best, {"top_k", "top_p"}), (min_p, {"min_p"}))


def apply(operations: Sequence[Operation], logits: Tensor, requests: Requests) -> Tensor:
    """logits [b, T, own V] float32 -> the same; not in place."""
    for operation, names in operations:
        asking = [i for i, slot in enumerate(requests.slots) if requests.state.asks(slot, names)]
        if len(asking) == len(requests.slots):
            logits = operation(logits, requests)
        elif asking:
            select = requests.state.backend.place.to_device(asking)
            nodes = SampledNodes(*(part[select] for part in requests.nodes))
            some = requests._replace(slots=[requests.slots[i] for i in asking], nodes=nodes)
            logits = logits.index_copy(0, select, operation(logits[select], some))
    return logits


# ── beside it ────────────────────────────────────────────────────────────────────────────────────


def nodes_of(slots: Tensor, positions: Tensor, tree: Tree | None) -> SampledNodes:
    """slots: [b] int64. positions: [b, T] int64 of the sampled tokens. tree: None if T is 1."""
    tree = tree or single_node_tree(slots)  # whose root's token is not looked at
    return SampledNodes(slots, positions, tree.tokens, tree.ancestors)


def sample_in_kernels(
    state: SamplingState, slots: Tensor, logits: Tensor, positions: Tensor, tree: Tree | None
) -> Tensor:
    """The same rule with no decision on the host: a graph may capture it. slots: [b] int64."""
    assert state.tables is not None
    return state.backend.sample_nodes(logits, nodes_of(slots, positions, tree), state.tables)
