"""Drives a StateScheme without a model: random layer inputs, random trees, random accepts.

Beside it runs the plain recurrence in float64, token by token, for every node of every tree: what
the scheme must equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from forms import backend_of
from tensor_checks import relative_error
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import KeptRows, SchemeSize, StateScheme
from mamba_eagle.kernels.causal_conv.naive import convolve, step_sizes
from mamba_eagle.kernels.delta_rule import naive
from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.layers.delta_rule import GatedDeltaNet
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import DeltaConfig, Mamba2Config
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.qwen3_5 import Qwen35DeltaNet
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree, ancestor_matrix

HIDDEN = 8
KEPT_ROWS = 11
CPU = torch.device("cpu")


def mamba_config(
    conv_kernel: int = 4,
    num_heads: int = 4,
    head_dim: int = 6,
    state_size: int = 5,
    num_groups: int = 2,
    time_step_limit: tuple[float, float] = (0.0, float("inf")),
) -> Mamba2Config:
    """Small sizes, nearly all of them different."""
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=num_groups,
        conv_kernel=conv_kernel,
        conv_bias=True,
        time_step_limit=time_step_limit,
        chunk_size=16,
    )


def delta_config(
    head_dim: int = 5, state_size: int = 6, conv_kernel: int = 4, max_beta: float = 1.0
) -> DeltaConfig:
    """Two key heads, and four of values."""
    return DeltaConfig(4, head_dim, state_size, 2, conv_kernel, max_beta=max_beta)


def random_mixer(
    config: Mamba2Config | DeltaConfig, index: int, seed: int
) -> Mamba2Mixer | GatedDeltaNet:
    kind = Qwen35DeltaNet if isinstance(config, DeltaConfig) else Mamba2Mixer
    layer: Any = kind(config, HIDDEN, index, 1e-5)
    random_weights(layer, seed)
    generator = torch.Generator().manual_seed(seed)
    parts = [layer.conv1d.weight]
    if isinstance(layer, Mamba2Mixer):
        parts += [layer.conv1d.bias, layer.D]
    with torch.no_grad():
        for part in parts:
            part.copy_(0.5 * torch.randn(part.shape, generator=generator))
        layer.dt_bias.copy_(4 * torch.rand(config.num_heads, generator=generator) - 4)
    return layer.requires_grad_(False)


class Sequence(NamedTuple):
    """The state of one layer after a sequence, in float64."""

    state: Tensor  # [H, P, N]
    history: Tensor  # [K-1, conv_dim], raw convolution inputs, oldest first

    def after(self, layer: Any, xbc: Tensor, dt: Tensor) -> tuple[Sequence, Tensor]:
        """The state after one more token, and the token's output y [H, P]; raw xbc [conv_dim] and
        dt [gate_size]."""
        window = torch.cat([self.history, xbc.double()[None]])
        bias = layer.conv1d.bias
        convolved = convolve(window, layer.conv1d.weight[:, 0].t(), bias)
        if isinstance(layer, GatedDeltaNet):
            node = delta_step(layer, convolved, dt, self.state)
            return Sequence(node.state, window[1:]), node.o
        x, B, C = layer.split_xbc(convolved[None])
        step = step_sizes(dt[None], layer.dt_bias, layer.config.time_step_limit)
        A = -torch.exp(layer.A_log.double())
        y, states = recurrence_oracle(x, step, A, B, C, layer.D, self.state)
        return Sequence(states[0], window[1:]), y[0]


def delta_step(layer: GatedDeltaNet, convolved: Tensor, dt: Tensor, state: Tensor) -> naive.Node:
    """A token of a delta rule, from what its convolution made, in float64."""
    c = layer.config
    q, k, v = convolved.split([c.key_size, c.key_size, c.inner_size])
    q, k = (part.view(c.num_groups, -1) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(c.num_heads // c.num_groups, 0)[None] for part in (q, k))
    decay, beta = dt.double().split(c.num_heads)
    g = -layer.A_log.double().exp() * F.softplus(decay + layer.dt_bias.double())
    gates = (g[None], c.max_beta * beta.sigmoid()[None])
    tokens = naive.gated_delta(q * c.state_size**-0.5, k, v.view(1, c.num_heads, -1), *gates)
    return naive.step(tokens, 0, state)


class RequestState(NamedTuple):
    """A request after some token: each layer's memory, and the token's feature."""

    layers: list[Sequence]
    feature: Tensor  # [hidden]


class Inputs(NamedTuple):
    """Inputs of all layers for the nodes of b trees, and the target's hidden states."""

    xbc: list[Tensor]  # per layer: [b, T, conv_dim]
    dt: list[Tensor]  # per layer: [b, T, gate_size]
    hidden: Tensor  # [b, T, hidden]


def random_tree(batch: int, nodes: int, max_depth: int, generator: torch.Generator) -> Tree:
    """Any shape; nodes in order of depth, as trees always are."""
    all_parents = []
    for _ in range(batch):
        parents, depths = [0], [0]
        for node in range(1, nodes):
            # close parents make deep trees
            order = torch.randperm(node, generator=generator).tolist()
            reach = 3 if float(torch.rand((), generator=generator)) < 0.7 else node
            near = [p for p in order if p >= node - reach and depths[p] < max_depth]
            parent = (near or [p for p in order if depths[p] < max_depth])[0]
            parents.append(parent)
            depths.append(depths[parent] + 1)
        by_depth = sorted(range(nodes), key=lambda node: depths[node])
        place = {node: i for i, node in enumerate(by_depth)}
        all_parents.append([place[parents[node]] for node in by_depth])
    return tree_of(torch.tensor(all_parents))


def tree_of(parents: Tensor) -> Tree:
    """parents [b, T] -> a tree whose tokens mean nothing."""
    ancestors = ancestor_matrix(parents, parents.shape[1])
    depths = ancestors.sum(2) - 1
    zeros = torch.zeros_like(parents)
    return Tree(zeros, parents, depths, ancestors, zeros.float())


def chain_tree(batch: int, nodes: int) -> Tree:
    return tree_of((torch.arange(nodes) - 1).clamp(min=0).expand(batch, -1))


def path_to(tree: Tree, row: int, node: int) -> list[int]:
    return tree.ancestors[row, node].nonzero()[:, 0].tolist()


def truncated(paths: list[list[int]], counts: list[int]) -> Truncated:
    """The paths ``paths[i]`` from the root, of which the first ``counts[i]`` nodes are kept."""
    longest = max(map(len, paths))
    padded = [path + [path[-1]] * (longest - len(path)) for path in paths]
    nodes = torch.tensor(padded)
    count = torch.tensor(counts)
    return Truncated(nodes, torch.zeros_like(nodes), count, count == 0)


class Rig:
    """One scheme, its pools, and the plain run of each request. scheme: deferred or snapshot; with
    the suffix "-torch", without fused CPU kernels; with "-triton", the GPU's."""

    def __init__(
        self,
        scheme: str,
        rows: int,
        max_depth: int = 6,
        config: Mamba2Config | DeltaConfig | None = None,
        num_layers: int = 2,
        requests: int = 5,
        state_slots: int = 9,
        dtype: torch.dtype = torch.float32,
        ssm_dtype: torch.dtype = torch.float32,
        rounding: str = "nearest",
        seed: int = 0,
        max_nodes: int = 0,
    ) -> None:
        self.config: Any = config or mamba_config()
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = [random_mixer(self.config, i, seed + i).to(dtype) for i in range(num_layers)]
        self.table = RequestTable(requests, 64, CPU)
        name, _, form = scheme.partition("-")
        backend = backend_of(form or "cpu", dtype)
        rule = backend.state_rounding(rounding, ssm_dtype, self.table)
        self.pool = StatePool(num_layers, state_slots, self.config, HIDDEN, rule, dtype, CPU)
        size = SchemeSize(num_layers, HIDDEN, rows, nodes=max_nodes, accepts=max_depth)
        self.scheme: StateScheme = backend.state_scheme(
            name, self.config, size, self.table, self.pool
        )
        self.kept = self.room_for_rows(requests)
        self.max_depth, self.dtype = max_depth, dtype
        self.plain: dict[int, dict[int, RequestState]] = {}  # slot -> position -> state
        self.folds = 0

    def room_for_rows(self, requests: int) -> KeptRows:
        """A journal slot for each request slot, and one for padding."""
        layers, slots, dtype = len(self.layers), requests + 1, self.pool.conv.dtype
        return KeptRows(
            torch.zeros(layers, slots, KEPT_ROWS, self.config.conv_dim, dtype=dtype),
            torch.zeros(layers, slots, KEPT_ROWS, self.config.gate_size),
            torch.zeros(slots, KEPT_ROWS, HIDDEN, dtype=dtype),
            torch.arange(requests),
            self.table.processed,
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    # ── the life of a request ──

    def admit(self, slot: int, state_slot: int, position: int = 17) -> None:
        """Start a request after a prompt of ``position`` tokens, with a random state."""
        for part in (self.pool.ssm, self.pool.conv):
            part[:, state_slot] = self.normal(*part[:, state_slot].shape).to(part.dtype)
        self.pool.feature[state_slot] = self.normal(HIDDEN)
        self.table.state_slot[slot] = state_slot
        self.table.processed[slot] = position
        self.scheme.start(torch.tensor([slot]), torch.tensor([state_slot]))
        self.plain[slot] = {position: self.stored(state_slot)}

    def stored(self, state_slot: int) -> RequestState:
        pool = self.pool
        layers = [
            Sequence(pool.ssm[i, state_slot].double(), pool.conv[i, state_slot].double())
            for i in range(len(self.layers))
        ]
        return RequestState(layers, pool.feature[state_slot].clone())

    def finish(self, slot: int, position: int | None = None) -> RequestState:
        """Bring the state slot to ``position`` (all that was run) and return what it holds."""
        state_slot = int(self.table.state_slot[slot])
        run, folded = int(self.table.processed[slot]), self.folded(slot)
        keep = (run if position is None else position) - folded
        self.scheme.finish(*(torch.tensor([n]) for n in (slot, state_slot, keep)))
        return self.stored(state_slot)

    def folded(self, slot: int) -> int:
        return int(self.scheme.folded(torch.tensor([slot]))[0])

    # ── a verify step ──

    def random_inputs(self, batch: int, nodes: int) -> Inputs:
        layers = range(len(self.layers))
        return Inputs(
            [self.normal(batch, nodes, self.config.conv_dim).to(self.dtype) for _ in layers],
            [self.normal(batch, nodes, self.config.gate_size).to(self.dtype) for _ in layers],
            self.normal(batch, nodes, HIDDEN).to(self.dtype),
        )

    def verify(self, slots: list[int], tree: Tree, inputs: Inputs) -> list[Tensor]:
        """Verify the trees. Returns the output of each layer, [b, T, H, P]."""
        before = [self.folded(slot) for slot in slots]
        self.layout = self.scheme.begin(torch.tensor(slots), tree)
        self.folds += sum(self.folded(slot) > was for slot, was in zip(slots, before))
        c, outputs = self.config, []
        for layer, xbc, dt in zip(self.layers, inputs.xbc, inputs.dt):
            gates = self.scheme.gates_of(layer, dt.flatten(0, 1))
            y = self.scheme.verify(layer, self.layout, xbc.flatten(0, 1), gates)
            outputs.append(y.view(*xbc.shape[:2], c.num_heads, c.head_dim))
        return outputs

    def accept(self, slots: list[int], accepted: Truncated, hidden: Tensor) -> None:
        self.scheme.accept(self.layout, accepted, hidden)
        self.table.processed[slots] += accepted.count

    def plain_nodes(
        self, slot: int, row: int, tree: Tree, inputs: Inputs
    ) -> tuple[list[RequestState], list[list[Tensor]]]:
        """Each node after its root path, and each layer's outputs of the nodes."""
        states: list[RequestState] = []
        outputs: list[list[Tensor]] = [[] for _ in self.layers]
        for node in range(tree.parents.shape[1]):
            start = self.plain[slot][int(self.table.processed[slot])]
            before = states[int(tree.parents[row, node])] if node else start
            after = []
            for i, layer in enumerate(self.layers):
                xbc, dt = inputs.xbc[i][row, node], inputs.dt[i][row, node]
                sequence, y = before.layers[i].after(layer, xbc, dt)
                after.append(sequence)
                outputs[i].append(y)
            states.append(RequestState(after, inputs.hidden[row, node]))
        return states, outputs

    def step(self, slots: list[int], tree: Tree, ends: list[int], counts: list[int]) -> float:
        """Verify random inputs, accept ``counts[r]`` nodes of the path to ``ends[r]``, keep the
        plain run going. Returns the largest error of a node's output."""
        inputs = self.random_inputs(len(slots), tree.parents.shape[1])
        outputs = self.verify(slots, tree, inputs)
        worst = 0.0
        paths = [path_to(tree, row, end) for row, end in enumerate(ends)]
        for row, slot in enumerate(slots):
            states, expected = self.plain_nodes(slot, row, tree, inputs)
            for found, exact in zip(outputs, expected):
                for node, y in enumerate(exact):
                    worst = max(worst, relative_error(found[row, node], y))
            run = int(self.table.processed[slot])
            for i, node in enumerate(paths[row][: counts[row]]):
                self.plain[slot][run + 1 + i] = states[node]
        accepted = truncated(paths, counts)
        self.accept(slots, accepted, inputs.hidden)
        self.check_kept_rows(slots, accepted, inputs)
        return worst

    def check_kept_rows(self, slots: list[int], accepted: Truncated, inputs: Inputs) -> None:
        """What the accepted tokens fed into the recurrence can be kept, in rows by position."""
        config, kept = self.config, self.kept
        self.scheme.keep_rows(torch.tensor(slots), accepted, inputs.hidden, kept)
        for row, slot in enumerate(slots):
            end, count = int(self.table.processed[slot]), int(accepted.count[row])
            for node, position in zip(accepted.nodes[row], range(end - count, end)):
                at = (slot, position % KEPT_ROWS)
                assert torch.equal(kept.feature[at], inputs.hidden[row, node])
                for i, layer in enumerate(self.layers):
                    xbc, dt = inputs.xbc[i][row, node], inputs.dt[i][row, node]
                    wanted = layer.gates(dt)
                    if isinstance(config, Mamba2Config):
                        wanted = step_sizes(dt[None], layer.dt_bias, config.time_step_limit)[0]
                    assert torch.equal(kept.conv_in[i][at], xbc)
                    assert relative_error(kept.gates[i][at], wanted) < 1e-5

    def random_step(self, slots: list[int], nodes: int, ended: tuple[int, ...] = ()) -> float:
        """A random tree, and for each request a random walk in it that may be cut short."""
        tree = random_tree(len(slots), nodes, self.max_depth - 1, self.generator)
        ends = torch.randint(0, nodes, (len(slots),), generator=self.generator).tolist()
        counts = []
        for row, (slot, end) in enumerate(zip(slots, ends)):
            most = len(path_to(tree, row, end))
            cut = float(torch.rand((), generator=self.generator)) < 0.2
            fewer = int(torch.randint(0, most + 1, (), generator=self.generator))
            counts.append(0 if slot in ended else fewer if cut else most)
        return self.step(slots, tree, ends, counts)


def assert_same_state(found: RequestState, expected: RequestState, tolerance: float = 2e-6) -> None:
    """The state up to rounding; convolution inputs and the feature bit for bit."""
    for ours, plain in zip(found.layers, expected.layers):
        assert relative_error(ours.state, plain.state) < tolerance
        assert torch.equal(ours.history, plain.history)
    assert torch.equal(found.feature, expected.feature)
