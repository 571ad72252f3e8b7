"""Lower tiers of the prefix cache: whatever moves, each request gets its own text, and no slot and
no unit is lost.

Invariants go by their names in docs/design/cache-tiers.md.
"""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_runner import Server, expected_text
from fake_tiers import TieredRunner, tiered_server

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import StateKind, salt_number
from mamba_eagle.cache.tiers import disk_log
from mamba_eagle.cache.tiers.disk_log import SUM_BYTES, Label, Record, framed, live, read_log
from mamba_eagle.cache.tiers.tier import Pieces, Tier
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import TierSizes
from mamba_eagle.message.indices import indices

POOLS = {  # KV slots, state slots, request slots
    "few-states": (2000, 5, 4),
    "few-kv": (150, 40, 8),
    "tiny": (112, 3, 3),
}
SIZES = {
    "host": TierSizes(host_units=600, kv_units=1, state_units=7, journal_units=3),
    "small-host": TierSizes(host_units=90, kv_units=1, state_units=7, journal_units=3),
    "disk": TierSizes(host_units=200, disk_units=900, kv_units=1, state_units=7, journal_units=3),
}


SAMPLING = SamplingParams(max_new_tokens=4, ignore_eos=True)


def config() -> EngineConfig:
    return EngineConfig(
        chunked_prefill_size=32,
        mamba_checkpoint_interval=16,
        speculative_algorithm="EAGLE",
        speculative_num_steps=3,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=6,
        speculative_adaptive=False,
    )


def sizes_in(folder: Path, name: str) -> TierSizes:
    """Without records of an earlier process."""
    (folder / "log").touch()
    return msgspec.structs.replace(SIZES[name], disk_log=str(folder / "log"))


def ask(server: Server, rid: str, prompt: list[int], **hints) -> None:
    server.add(rid, prompt, SamplingParams(max_new_tokens=4, ignore_eos=True), **hints)
    server.finish()


@pytest.mark.parametrize("journals", [0, 6])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pool", POOLS)
def test_same_text_whatever_tier_a_prefix_is_in(pool, sizes, journals, tmp_path) -> None:
    """A fifth of the copies from and to disk fail."""
    rng = random.Random(f"{pool} {sizes} {journals}")
    runner = TieredRunner(
        *POOLS[pool],
        400,
        journals=journals,
        journal_rows=24,
        sizes=sizes_in(tmp_path, sizes),
        rng=rng,
        lost=0.2,
    )
    server, wanted = tiered_server(config(), runner, rng), {}
    trunks = [[rng.randrange(50) for _ in range(40)] for _ in range(6)]
    for i in range(30):
        prompt = rng.choice(trunks)[: rng.randint(10, 40)]
        prompt += [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        sampling = SamplingParams(
            max_new_tokens=rng.choice([1, 5, 12]), ignore_eos=True, seed=rng.randrange(3)
        )
        wanted[f"r{i}"] = expected_text(prompt, sampling)
        server.add(f"r{i}", prompt, sampling, salt=rng.choice(["", "", "x"]))
        for _ in range(rng.choice([0, 1, 6, 10])):
            server.step()
    server.finish()
    assert server.texts == wanted
    assert runner.loads > 0 or sizes == "small-host"


def test_all_prefixes_come_back_after_far_more_than_fits(tmp_path) -> None:
    """SGLang #39436: with budgets of their own for KV and for states, none of 8 came back."""
    rng = random.Random(1)
    sizes = TierSizes(host_units=3200, kv_units=1, state_units=7, journal_units=3)
    server = tiered_server(config(), TieredRunner(120, 4, 2, 400, sizes=sizes, rng=rng), rng)
    prompts = [[rng.randrange(50) for _ in range(60)] for _ in range(40)]
    for i, prompt in enumerate(prompts):
        ask(server, f"first{i}", prompt)
    for i, prompt in enumerate(prompts[:8]):
        ask(server, f"again{i}", prompt)
        assert server.last[f"again{i}"].cached_tokens == len(prompt) - 1
        assert server.texts[f"again{i}"] == server.texts[f"first{i}"]


def ask_about_documents(config: EngineConfig) -> dict[str, set[int]]:
    """Without rows of a prompt's last tokens: states are behind the questions. Documents of 80
    tokens are evicted before the next question; returns what was cached then, by question."""
    rng, cached = random.Random(1), {}
    sizes = TierSizes(host_units=3200, kv_units=1, state_units=7, journal_units=3)
    server = tiered_server(config, TieredRunner(150, 6, 2, 400, sizes=sizes, rng=rng), rng)
    documents = [[i, *(rng.randrange(50) for _ in range(79))] for i in range(8)]
    for turn in ("first", "second", "third"):
        for i, document in enumerate(documents):
            prompt = document + [rng.randrange(50) for _ in range(7)]
            ask(server, f"{turn}{i}", prompt)
            assert server.texts[f"{turn}{i}"] == expected_text(prompt, SAMPLING)
        cached[turn] = {server.last[f"{turn}{i}"].cached_tokens for i in range(8)}
    return cached


def test_another_question_finds_a_document_that_was_evicted() -> None:
    assert ask_about_documents(config()) == {"first": {0}, "second": {64}, "third": {64}}


def test_a_document_that_was_run_twice_is_found() -> None:
    """Where no spare states are kept."""
    without = dataclasses.replace(config(), mamba_checkpoint_interval=0)
    assert ask_about_documents(without) == {"first": {0}, "second": {0}, "third": {80}}


def test_spare_states_below_cost_nothing_but_room() -> None:
    """40 units: a token takes 1, a state 7."""
    tier = Tier(1, 40, msgspec.structs.replace(SIZES["host"], host_units=40), False)
    cache, tokens = tier.cache, np.arange(20, dtype=np.int32)

    def save(position: int, kind: StateKind) -> bool:
        slot = tier.reserve_state(spare=kind == "document")
        return slot is not None and cache.attach_state(leaf, position, slot, kind)

    leaf = cache.insert(cache.root, tokens, tier.reserve_kv(20)).node
    assert save(20, "tail") and save(8, "document")
    assert save(12, "document") and cache.match(tokens, 11, uses=False).position == 0
    assert tier.reserve_kv(14, spare=True) is None and save(10, "document")
    assert save(16, "branch") and not save(14, "document")
    assert [cache.match(tokens, limit).position for limit in (15, 19, 20)] == [0, 16, 20]
    tier.check_integrity(0)


def test_states_that_save_little_over_shallower_ones_do_not_go_down() -> None:
    """Of a chat whose turns are short, those go that are 20 tokens behind the last that went."""
    rng = random.Random(1)
    sizes = TierSizes(host_units=3200, kv_units=1, state_units=7, journal_units=3)
    runner = TieredRunner(300, 40, 2, 400, sizes=sizes, rng=rng)
    server = tiered_server(dataclasses.replace(config(), mamba_checkpoint_interval=0), runner, rng)
    (passage,) = server.scheduler.tiers.passages
    passage.min_worth = 20
    chat = [rng.randrange(50) for _ in range(7)]
    for turn in range(12):
        ask(server, f"turn{turn}", chat)
        chat += [*server.texts[f"turn{turn}"], *(rng.randrange(50) for _ in range(3))]
    for i in range(8):
        ask(server, f"other{i}", [rng.randrange(50) for _ in range(200)])
    below, found = passage.lower.cache, []
    for position in range(len(chat)):
        hit = below.match(np.asarray(chat, dtype=np.int32), position, uses=False)
        if hit.anchor == position > 0:
            found.append(position)
    assert len(found) == 4 and all(b - a >= 20 for a, b in zip([0, *found], found))
    ask(server, "again", chat)
    assert len(chat) - server.last["again"].cached_tokens < 20 + 7


def test_salts_share_nothing_below(tmp_path) -> None:
    rng = random.Random(1)
    server = tiered_server(
        config(), TieredRunner(120, 3, 2, 400, sizes=SIZES["host"], rng=rng), rng
    )
    prompts = [[rng.randrange(50) for _ in range(50)] for _ in range(8)]
    for i, prompt in enumerate(prompts):
        ask(server, f"first{i}", prompt, salt="a")
    ask(server, "other", prompts[0], salt="b")
    ask(server, "same", prompts[0], salt="a")
    assert server.last["other"].cached_tokens == 0
    assert server.last["same"].cached_tokens == 49


def test_a_flush_empties_all_tiers(tmp_path) -> None:
    rng = random.Random(1)
    runner = TieredRunner(120, 3, 2, 400, sizes=sizes_in(tmp_path, "disk"), rng=rng)
    server = tiered_server(config(), runner, rng)
    prompts = [[rng.randrange(50) for _ in range(50)] for _ in range(5)]
    for i, prompt in enumerate(prompts):
        ask(server, f"first{i}", prompt)
    server.scheduler.flush()
    ask(server, "again", prompts[0])
    assert server.last["again"].cached_tokens == 0
    assert runner.emptied == 1


def test_a_tier_is_as_its_log_says(tmp_path) -> None:
    """A scheduler that starts with the log of another one hits what that one had on disk."""
    rng = random.Random(1)
    sizes = sizes_in(tmp_path, "disk")
    runner = TieredRunner(120, 3, 2, 400, sizes=sizes, rng=rng, journals=2, journal_rows=24)
    server = tiered_server(config(), runner, rng)
    trunk = [rng.randrange(50) for _ in range(30)]
    prompts = [trunk + [rng.randrange(50) for _ in range(20)] for _ in range(8)]
    for i, prompt in enumerate(prompts):
        ask(server, f"first{i}", prompt)
    Path(sizes.disk_log).write_bytes(b"".join(framed(record) for record in runner.records))
    again = TieredRunner(120, 3, 2, 400, sizes=sizes, rng=rng, journals=2, journal_rows=24)
    again.units[2] = runner.units[2]
    server = tiered_server(config(), again, rng)
    for i, prompt in enumerate(prompts):
        ask(server, f"again{i}", prompt)
        assert server.last[f"again{i}"].cached_tokens == len(prompt) - 1
        assert server.texts[f"again{i}"] == expected_text(prompt, SAMPLING)


def record_of(number: int, units: list[int]) -> Record:
    tokens = np.arange(len(units), dtype=np.int32).tobytes()
    label = Label(
        number, -1, b"", 0, tokens, indices(units).tobytes(), True, b"", "tail", True, b"", 0
    )
    return Record(label, bytes(8 * len(units)))


def test_a_torn_or_changed_record_is_ignored_and_counted(tmp_path) -> None:
    frames = [framed(record_of(i, [i])) for i in range(3)]
    path = tmp_path / "log"
    changed = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
    path.write_bytes(frames[0] + changed + frames[2] + frames[2][:9])
    found = read_log(str(path))
    assert [record.label.number for record in found.records] == [0, 2]
    assert found.ignored == 2


def test_a_record_counts_until_a_newer_one_uses_its_units() -> None:
    records = [record_of(1, [0, 1]), record_of(2, [2, 3]), record_of(3, [3, 4]), record_of(4, [9])]
    assert [record.label.number for record in live(records, 6)] == [1, 3]


def test_units_of_an_export_are_found_by_one_seek_for_each_record(tmp_path, monkeypatch) -> None:
    """60,000 tokens took 0.25 s, in which the scheduler planned no step."""
    path, seeks, record = tmp_path / "export", [], record_of(1, [*range(50)])
    record.sums = random.Random(1).randbytes(50 * SUM_BYTES)
    path.write_bytes(b'{"unit_bytes":8}\n' + framed(record) + bytes(8 * 50))

    class File(io.BufferedReader):
        def seek(self, *place):
            seeks.append(place)
            return super().seek(*place)

    monkeypatch.setattr(disk_log, "open", lambda path, mode: File(io.FileIO(path)), raising=False)
    found = disk_log.read_export(str(path))
    start = path.stat().st_size - 8 * 50
    assert [found.units[unit].offset for unit in range(50)] == [start + 8 * i for i in range(50)]
    assert found.units[1].sum == record.sums[SUM_BYTES : 2 * SUM_BYTES]
    assert len(seeks) == 1


def test_units_have_one_owner() -> None:
    pool = SlotAllocator(10)
    pieces = Pieces(pool, 3, "piece")
    slots = [pieces.allocate(1) for _ in range(3)]
    assert pieces.allocate(1) is None and pool.num_free == 1
    taken = [unit for slot in slots if slot for unit in pieces.units(slot[0])]
    assert len(set(taken)) == 9
    pieces.free(slots[1] or ())
    assert pool.num_free == 4 and len(pieces.allocate(1) or ()) == 1


def test_the_salts_of_adapters_are_marked() -> None:
    """What they have computed is not kept on disk, where their numbers mean nothing later."""
    assert salt_number("x", 3) >> 128 == 1 and salt_number("x") >> 128 == 0
