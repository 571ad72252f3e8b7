"""What a disk tier has, as a log that survives the process.

A record says what one copy has brought to disk: which tokens of which prefix, in which units. The
scheduler makes the *label* of a record, the runner adds checksums of the units once they are
written. What is evicted is not logged: a record counts until a newer one uses one of its units.
Nothing that is read here is trusted: each record has a checksum, and so has each unit.

    file    [ size | checksum | label, sums ] [ size | checksum | label, sums ] …
"""

import os
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mamba_eagle.cache.node import Node, StateKind
from mamba_eagle.cache.tiers.tier import MAX_FREE_TOKENS, Pieces, Tier
from mamba_eagle.message import TierCopy
from mamba_eagle.message.indices import indices

SUM_BYTES = 8
SALT_BYTES = 17
HEAD_BYTES = 20  # of a framed record: its size and its checksum
NEW_RECORD = -1


class Label(msgspec.Struct, array_like=True):
    """Tokens [start, start + n) of a prefix, and the state or the journal at their end."""

    number: int  # of the copy
    parent: int  # record with the token before ``start``; -1: there is none
    salt: bytes
    start: int
    tokens: bytes  # [n] int32
    kv: bytes  # [n] int32: the tier's slots of these tokens, which are units if they take any
    followed: bool  # by the drafter
    state: bytes  # units
    kind: StateKind
    state_followed: bool
    journal: bytes  # units
    anchor: int  # where the journal begins

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // 4


class Record(msgspec.Struct, array_like=True):
    label: Label
    sums: bytes  # of the units of kv, state and journal, in this order


class Found(NamedTuple):
    records: list[Record]
    ignored: int  # torn or changed ones


def units_of(record: Record) -> np.ndarray:
    """[n] int32, in the order of the record's sums."""
    label = record.label
    own = np.frombuffer(label.state + label.journal, dtype=np.int32)
    if len(record.sums) // SUM_BYTES == len(own):
        return own
    return np.concatenate([np.frombuffer(label.kv, dtype=np.int32), own])


def unit_sum(unit: bytes | memoryview) -> bytes:
    return blake2b(unit, digest_size=SUM_BYTES).digest()


def framed(record: Record) -> bytes:
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(4, "little") + blake2b(data, digest_size=16).digest() + data


def unframed(data: bytes) -> Record:
    """Undoes ``framed``. Raises: msgspec.MsgspecError if the record is torn or changed."""
    if blake2b(data[HEAD_BYTES:], digest_size=16).digest() != data[4:HEAD_BYTES]:
        raise msgspec.DecodeError
    return msgspec.msgpack.decode(data[HEAD_BYTES:], type=Record)


def read_log(path: str) -> Found:
    """All whole records, oldest first."""
    records: list[Record] = []
    ignored = place = 0
    with open(path, "rb") as file:
        data = file.read()
    while place < len(data):
        end = place + HEAD_BYTES + int.from_bytes(data[place : place + 4], "little")
        try:
            records.append(unframed(data[place:end]))
        except msgspec.MsgspecError:
            ignored += 1
        place = end
    return Found(records, ignored)


def live(records: Sequence[Record], num_units: int) -> list[Record]:
    """Those none of whose units a newer record uses, oldest first."""
    taken = {True: np.zeros(num_units, dtype=bool), False: np.zeros(MAX_FREE_TOKENS, dtype=bool)}
    kept: list[Record] = []
    for record in reversed(records):
        label = record.label
        free = len(label.kv) == len(label.tokens)
        own = np.frombuffer(label.state + label.journal, dtype=np.int32)
        tokens = np.frombuffer(label.kv, dtype=np.int32)
        has_units = len(record.sums) // SUM_BYTES > len(own)
        for which, ids in ((True, own), (has_units, tokens)):
            bad = len(ids) and (ids.min() < 0 or ids.max() >= len(taken[which]))
            free = free and not bad and not taken[which][ids].any()
        if free:
            taken[True][own] = taken[has_units][tokens] = True
            kept.append(record)
    return kept[::-1]


class Labels:
    """Makes the labels of copies to a tier, and the tier from the records of an earlier process."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.record_of = np.full(tier.kv.total, -1, dtype=np.int64)  # by the KV slot of a token
        self.ignored = 0

    def label(
        self, copy: TierCopy, node: Node, start: int, kv: Sequence[int], anchor: int
    ) -> bytes:
        """node: ends where the copy's tokens do. kv: the tier's slots of [start, node.end).
        anchor: where the journal begins, if there is one."""
        self.record_of[np.asarray(kv, dtype=np.int64)] = copy.number
        parts = [part.tokens[max(start - part.start, 0) :] for part in node.ancestors()]
        tokens = b"".join(part.tobytes() for part in reversed(parts))
        return msgspec.msgpack.encode(
            Label(
                copy.number,
                self._record_before(node, start),
                node.salt.to_bytes(SALT_BYTES, "little"),
                start,
                tokens,
                indices(kv).tobytes(),
                node.followed,
                copy.target.state.tobytes(),
                node.kind,
                node.state_followed,
                copy.target.journal.tobytes(),
                anchor,
            )
        )

    def _record_before(self, node: Node, start: int) -> int:
        for part in node.ancestors():
            if part.start < start:
                return int(self.record_of[part.kv_slots[start - part.start - 1]])
        return NEW_RECORD

    def restore(self, path: str) -> int:
        """Fills the empty tier. Returns a number above those of all copies so far."""
        found = read_log(path)
        self.ignored = found.ignored
        self.fill(live(found.records, self.tier.units.total))
        return max((record.label.number for record in found.records), default=0) + 1

    def fill(self, records: Sequence[Record]) -> None:
        """The empty tier has what they say. No unit is in two of them."""
        tier, labels = self.tier, [record.label for record in records]
        labels.sort(key=lambda label: (label.start, label.number))
        tier.kv.claim(indices(b"".join(label.kv for label in labels)))
        tier.units.claim(indices(b"".join(label.state + label.journal for label in labels)))
        nodes: dict[int, Node] = {}
        for label in labels:
            if (node := self._add(label, nodes)) is not None:
                nodes[label.number] = node
            else:
                tier.kv.free(indices(label.kv))
                tier.units.free(indices(label.state + label.journal))

    def _add(self, label: Label, nodes: dict[int, Node]) -> Node | None:
        """The node at its end; None if what comes before it is not there."""
        cache, tier = self.tier.cache, self.tier
        node = cache.root
        if label.start:
            parent = nodes.get(label.parent)
            if parent is None or label.start > parent.end:
                return None
            node = cache.node_at(parent, label.start)
        if label.tokens:
            tokens, kv = np.frombuffer(label.tokens, dtype=np.int32), indices(label.kv)
            salt = int.from_bytes(label.salt, "little")
            cache.lock(node)
            done = cache.insert(node, tokens, kv, salt, label.followed)
            cache.unlock(node)
            tier.kv.free(kv[: len(kv) - done.taken])
            node = done.node
            self.record_of[np.frombuffer(label.kv, dtype=np.int32)] = label.number
        for given, pieces in ((label.state, tier.states), (label.journal, tier.journals)):
            if given:
                self._attach(label, node, pieces, pieces.adopt(indices(given)))
        return node

    def _attach(self, label: Label, node: Node, pieces: Pieces, slot: int) -> None:
        cache = self.tier.cache
        if pieces is self.tier.states:
            took = cache.attach_state(node, node.end, slot, label.kind, label.state_followed)
        else:
            took = cache.attach_journal(node, label.anchor, slot, node.end)
        if not took:
            pieces.free([slot])


# ── a prefix in a file that one server writes and another one reads ──
#
#     file    facts, as one line of JSON
#             [ size | checksum | label, sums ] units of kv, state, journal      for each copy
#
# What is read is trusted as little: what records name is counted.

MAX_FACTS = 1 << 16  # bytes


class TornFile(ValueError):
    """What was exported is not whole."""


class PlacedUnit(NamedTuple):
    offset: int  # in the file, in bytes
    sum: bytes


class ExportFile(NamedTuple):
    facts: dict[str, Any]  # of the server that wrote it
    records: list[Record]
    units: dict[int, PlacedUnit]  # by number


def read_export(path: str) -> ExportFile:
    """All but the units themselves. Raises: TornFile."""
    records: list[Record] = []
    units: dict[int, PlacedUnit] = {}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            facts = msgspec.json.decode(file.readline(MAX_FACTS), type=dict[str, Any])
            unit_bytes = msgspec.convert(facts.get("unit_bytes"), int)
            while file.tell() < size:
                head = file.read(HEAD_BYTES)
                record = unframed(head + file.read(int.from_bytes(head[:4], "little")))
                sums = [
                    record.sums[i : i + SUM_BYTES] for i in range(0, len(record.sums), SUM_BYTES)
                ]
                placed = map(PlacedUnit, count(file.tell(), unit_bytes), sums)
                units.update(zip(units_of(record).tolist(), placed, strict=True))
                file.seek(len(sums) * unit_bytes, os.SEEK_CUR)  # once: there may be a million units
                records.append(record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TornFile("it is not what /export_prefix has answered, or a part of it") from error
        if file.tell() != size or sorted(units) != list(range(len(units))):
            raise TornFile("it is not whole")
    return ExportFile(facts, records, units)


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The first fact in which two servers differ, with both values; "" if there is none."""
    for name in ours | theirs:
        if theirs.get(name) != ours.get(name):
            return f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} here"
    return ""
