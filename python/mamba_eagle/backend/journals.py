"""Saved journals: what the last tokens before some position fed into the recurrence.

A state can be continued from its own position only. A *saved journal* makes every position behind
it usable: it holds the inputs of the tokens that follow the state, its *anchor*, so the state after
any of them is the anchor and a fold. Its room is a *journal slot* of C rows, and the token at
position q is always in row ``q % C``:

    position    0 ──────────── anchor ──────────────────── end
                state slot:    journal slot: the inputs of tokens [anchor, end), at most C
                the state here

A row holds a token's raw convolution input, its gates and its feature; what comes out of the
convolution is computed again, which halves the memory. Here all tensor operations are
torch's, on any device, and a replay takes all layers of a group at once; what a CPU does instead is
in cpu/prefill.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.backend.place import Place, zeros
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.prefill import KeptInputs, PrefillContext, PrefillPart
from mamba_eagle.backend.state import KeptRows
from mamba_eagle.layers.recurrent import Inputs, Recurrent
from mamba_eagle.message import AnchorMove, JournalPart, PrefillItem
from mamba_eagle.model_config import RecurrenceConfig

MAX_REPLAY_ELEMENTS = 1 << 25  # of a group's float32 convolution inputs: 128 MiB


class Convolutions(NamedTuple):
    """What a replay needs of all layers' weights."""

    taps: Tensor  # [layers, K, conv_dim] float32
    bias: Tensor  # [layers, 1, conv_dim] float32


class Run(NamedTuple):
    """Consecutive tokens of a flat input, which go to consecutive rows of a journal slot."""

    token: int  # the first one
    slot: int
    row: int  # the first one's
    length: int


class Places(NamedTuple):
    """Which of a flat input's tokens go to which rows."""

    tokens: Tensor  # [n] int64
    slots: Tensor  # [n] int64: journal slots
    rows: Tensor  # [n] int64
    runs: Sequence[Run]  # the same tokens, in sequences


class SavedJournals:
    """``num_slots`` journal slots of ``size`` rows for all recurrent layers of one model.

    The scheduler assigns the slots. A request whose output is kept has one of its own, its
    *trail*, to which the rows of accepted tokens are copied after each step.
    """

    def __init__(
        self,
        num_slots: int,
        size: int,
        mixers: Sequence[Recurrent],
        pool: StatePool,
        table: RequestTable,
        place: Place,
    ) -> None:
        """mixers: those of the model, in the order of the pool's layers."""
        self.num_slots, self.size, self.pool, self.table = num_slots, size, pool, table
        self.mixers, self.place = list(mixers), place
        slots = num_slots + 1 if num_slots else 0  # the last one is for what is not kept
        layers, _, _, channels = pool.conv.shape if self.mixers else (0, 0, 0, 0)
        gates = self.mixers[0].config.gate_size if self.mixers else 0
        device, dtype = pool.conv.device, pool.conv.dtype
        self.conv_in = zeros(layers, slots, size, channels, dtype=dtype, device=device)
        self.gates = zeros(layers, slots, size, gates, dtype=torch.float32, device=device)
        features = pool.feature.shape[1]
        self.feature = zeros(
            slots, size, features, dtype=pool.feature.dtype, device=pool.feature.device
        )
        requests = table.processed.shape[0]
        self.trail = torch.full_like(table.processed, num_slots)  # [requests] journal slots
        self.has_trail = [False] * requests
        # where a state scheme writes the rows of output tokens
        self.kept = KeptRows(self.conv_in, self.gates, self.feature, self.trail, table.processed)
        self._weights: Convolutions | None = None

    # ── prompts ──

    def begin(self, items: Sequence[PrefillItem]) -> None:
        """Before a pass over prompt chunks: bring the states of those that start inside a journal
        to their positions, in the requests' own state slots."""
        for item in items:
            if item.first is not None and (rows := item.first.replay) is not None:
                if item.source != item.state_slot:
                    self.pool.copy(item.source, item.state_slot)
                self.replay(rows, item.state_slot)

    def places(self, parts: Sequence[PrefillPart]) -> Places | None:
        """The rows that a pass over these chunks has to keep; None if there are none."""
        found, runs = [], []
        for part in parts:
            item, journal = part.item, part.item.journal
            if journal is None:
                continue
            first = max(journal.start, item.start)
            end = min(journal.end, item.start + part.length)
            while first < end:
                row = first % self.size
                count = min(end - first, self.size - row)
                runs.append(Run(part.first + first - item.start, journal.slot, row, count))
                first += count
        for token, slot, row, count in runs:
            found += [(token + k, slot, row + k) for k in range(count)]
        if not found:
            return None
        tokens, slots, rows = self.place.to_device(list(zip(*found)))
        return Places(tokens, slots, rows, runs)

    def keep(self, ctx: PrefillContext, places: Places) -> None:
        """The pass writes these rows as well."""
        ctx.keep, ctx.kept = partial(self.write, places), partial(self._kept, places)

    def _kept(self, places: Places, n: int) -> KeptInputs:
        rows = places.tokens.new_full((n,), -1)
        rows[places.tokens] = places.slots * self.size + places.rows
        return KeptInputs(rows, self.conv_in, self.gates)

    def write(self, places: Places, layer: Recurrent, channels: Tensor, raw: Tensor) -> None:
        """channels [n, conv_dim] before the convolution and raw gates [n, ·], of a pass."""
        at = (layer.index, places.slots, places.rows)
        self.conv_in[at] = channels[places.tokens].to(self.conv_in.dtype)
        self.gates[at] = self._gates(layer, raw[places.tokens])

    def _gates(self, layer: Any, raw: Tensor) -> Tensor:
        """Of raw gates [n, ·] -> [n, gate_size]."""
        return layer.gates(raw)

    def write_features(self, places: Places, features: Tensor) -> None:
        """features [n, F], of the same pass."""
        self.feature[places.slots, places.rows] = features[places.tokens].to(self.feature.dtype)

    # ── outputs ──

    def start_trails(self, items: Sequence[PrefillItem]) -> None:
        """The output of finished prompts is to be kept, or not."""
        for item in items:
            if item.is_last and (item.trail >= 0 or self.has_trail[item.slot]):
                self.has_trail[item.slot] = item.trail >= 0
                self.trail[item.slot] = item.trail if item.trail >= 0 else self.num_slots

    def end_trails(self, slots: Sequence[int]) -> None:
        """Nothing more is kept of the requests in ``slots``."""
        for slot in slots:
            if self.has_trail[slot]:
                self.has_trail[slot] = False
                self.trail[slot] = self.num_slots

    def move(self, moves: Sequence[AnchorMove]) -> None:
        """Bring anchors of running requests forward, so that their journals have room again."""
        for move in moves:
            if move.save >= 0:
                self.pool.copy(move.state_slot, move.save)
            if move.save_journal >= 0:
                self._copy(move.journal.slot, move.save_journal)
            self.replay(move.journal, move.state_slot)

    def _copy(self, source: int, target: int) -> None:
        """All rows of journal slot ``source`` to journal slot ``target``."""
        for part in (self.conv_in, self.gates):
            part[:, target].copy_(part[:, source])
        self.feature[target].copy_(self.feature[source])

    # ── replay ──

    def features(self, slot: int, start: int, end: int) -> Tensor:
        """[end - start, F]: of tokens in journal slot ``slot``."""
        index = torch.arange(start, end, device=self.feature.device)
        return self.feature[slot, index % self.size]

    def replay(self, part: JournalPart, state_slot: int) -> None:
        """Advance the state in ``state_slot``, which is that after ``part.start`` tokens, by the
        rows of tokens [part.start, part.end)."""
        count = part.end - part.start
        assert 0 < count <= self.size, f"{count} of {self.size} rows"
        if self.mixers:
            self._replay_rows(part, state_slot)
        self.pool.feature[state_slot].copy_(self.feature[part.slot, (part.end - 1) % self.size])

    def _replay_rows(self, part: JournalPart, state_slot: int) -> None:
        """``replay`` of the recurrent state and its history."""
        count = part.end - part.start
        rows = torch.arange(part.start, part.end, device=self.trail.device) % self.size
        key = self.pool.rounding.cache_key(part.end, rows.device)
        group = max(1, MAX_REPLAY_ELEMENTS // (count * self.conv_in.shape[3]))
        for first in range(0, len(self.mixers), group):
            layers = slice(first, first + group)
            self._replay_layers(layers, part.slot, rows, state_slot, key)

    def _replay_layers(
        self, layers: slice, slot: int, rows: Tensor, state_slot: int, key: Tensor | None
    ) -> None:
        weights, pool, count = self._convolutions(), self.pool, len(rows)
        raw = torch.cat([pool.conv[layers, state_slot], self.conv_in[layers, slot][:, rows]], dim=1)
        taps = weights.taps[layers]
        width = taps.shape[1]
        out = weights.bias[layers].expand(-1, count, -1)
        for tap in range(width):
            out = torch.addcmul(out, raw[:, tap : tap + count].float(), taps[:, tap, None])
        if self.mixers[0].config.conv_silu:
            out = F.silu(out)
        inputs = Inputs(out.to(raw.dtype), self.gates[layers, slot][:, rows])
        mixers = self.mixers[layers]
        folded = mixers[0].advance(mixers, inputs, pool.ssm[layers, state_slot])
        pool.ssm[layers, state_slot] = pool.rounding.round_layers(folded, key, layers.start)
        pool.conv[layers, state_slot] = raw[:, count:]

    def forget_weights(self) -> None:
        """What was derived of weights is derived anew: others are in their places."""
        self._weights = None

    def _convolutions(self) -> Convolutions:
        if self._weights is None:
            taps = [mixer.conv1d.weight.detach()[:, 0].t().float() for mixer in self.mixers]
            bias = [
                taps[0].new_zeros(taps[0].shape[1])
                if mixer.conv1d.bias is None
                else mixer.conv1d.bias.detach().float()
                for mixer in self.mixers
            ]
            self._weights = Convolutions(torch.stack(taps), torch.stack(bias)[:, None])
        return self._weights

    @property
    def num_bytes(self) -> int:
        return self.conv_in.nbytes + self.gates.nbytes + self.feature.nbytes


def journal_bytes(
    config: RecurrenceConfig | None, layers: int, rows: int, feature_size: int, itemsize: int
) -> int:
    """Bytes of a journal slot."""
    per_layer = 0 if config is None else config.conv_dim * itemsize + config.gate_size * 4
    return rows * (layers * per_layer + feature_size * itemsize)
