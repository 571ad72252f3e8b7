"""Blocks of the prefix cache between device, host memory and disk: what comes back is bit for bit
what went, or an error."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from mamba_eagle.backend.place import Cuda, Host, Place
from mamba_eagle.cache.tiers.disk_log import Label, read_log
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.message import Blocks, Plan, StepResult, TierCopy, TierSizes
from mamba_eagle.message.indices import indices
from mamba_eagle.parallel.groups import ALONE
from mamba_eagle.runner.tiers.copies import StepCopies, TierCopies
from mamba_eagle.runner.tiers.disk import DamagedUnits, DiskUnits
from mamba_eagle.runner.tiers.host import runs
from mamba_eagle.runner.tiers.slot_bytes import DeviceSlots, Part, SlotBytes
from mamba_eagle.runner.tiers.whole import WholeUnits, shares_of

UNIT = 96  # bytes
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def place_of(device: str) -> Place:
    if device == "cpu":
        return Host()
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Cuda(torch.device("cuda", 0))


def random_slots(device: torch.device) -> DeviceSlots:
    """Of dtypes and shapes as models have them; slots come first, or after the layers."""

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape).to(dtype).to(device)

    bits = torch.randint(256, (2, 20, 2, 8), dtype=torch.uint8).to(device)
    return DeviceSlots(
        SlotBytes([Part(tensor(2, 20, 2, 4, dtype=torch.bfloat16), 1), Part(bits, 1, "bits")]),
        SlotBytes(
            [
                Part(tensor(3, 5, 4, 6, dtype=torch.float32), 1),
                Part(tensor(5, 7, dtype=torch.half), 0, "feature"),
            ]
        ),
        SlotBytes([Part(tensor(2, 4, 9, dtype=torch.bfloat16), 1)]),
    )


def sizes_of(whole: WholeUnits) -> TierSizes:
    kv, state, journal = whole.sizes
    return TierSizes(
        host_units=60, disk_units=80, kv_units=kv, state_units=state, journal_units=journal
    )


def ids(*values: int):
    return indices(values)


def finish(copies: TierCopies, *moved: TierCopy) -> list[int]:
    """Does them in one plan; returns which were lost."""
    plan = Plan(step=1, copies=list(moved))
    copies.leave(plan)
    copies.come(plan)
    result = StepResult(step=1)
    while copies.launched:
        StepCopies.of(copies, plan).report(result)
    return result.lost


def held(slots: DeviceSlots, kv: list[int], state: int, journal: int) -> list[torch.Tensor]:
    device = slots.kv.parts[0].tensor.device
    chosen = (kv, [state], [journal])
    found = []
    for part, each in zip(slots, chosen):
        rows = torch.ones(len(each), part.size + -part.size % 8, dtype=torch.uint8, device=device)
        part.read(torch.tensor(each, device=device), rows)
        found.append(rows.cpu())
    return found


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_comes_up_is_bit_for_bit_what_went_down(device: str, tmp_path: Path) -> None:
    """Device, host, disk, host, device; from scattered slots to others."""
    place = place_of(device)
    slots = random_slots(place.device)
    whole = WholeUnits([shares_of(slots)], ALONE)
    sizes = sizes_of(whole)
    disk = DiskUnits(str(tmp_path), "0" * 32, sizes.disk_units, whole.unit_bytes)
    copies = TierCopies(slots, sizes, whole, place, disk)
    before = held(slots, [3, 9, 4, 17], 2, 1)
    k, j = sizes.state_units, sizes.journal_units
    above = Blocks(0, ids(3, 9, 4, 17), ids(2), ids(1))
    host = Blocks(1, ids(5, 6, 40, 7), ids(*range(10, 10 + k)), ids(*range(30, 30 + j)))
    below = Blocks(2, ids(70, 3, 2, 1), ids(*range(50, 50 + k)), ids(*range(20, 20 + j)))
    other = Blocks(1, ids(59, 0, 1, 58), ids(*range(41, 41 + k)), ids(*range(20, 20 + j)))
    back = Blocks(0, ids(0, 19, 8, 1), ids(4), ids(3))
    assert not finish(copies, TierCopy(1, above, host), TierCopy(2, host, below, label_of(below)))
    copies.host.data[[5, 6, 40, 7]] = 0
    assert not finish(copies, TierCopy(3, below, other))
    assert not finish(copies, TierCopy(4, other, back))
    after = held(slots, [0, 19, 8, 1], 4, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    copies.close()


def test_runs_are_units_that_follow_each_other() -> None:
    assert list(runs(ids(4, 5, 6, 2, 9, 10))) == [
        (0, slice(4, 7)),
        (3, slice(2, 3)),
        (4, slice(9, 11)),
    ]
    assert list(runs(ids(4, 5, 6, 9), most=2)) == [
        (0, slice(4, 6)),
        (2, slice(6, 7)),
        (3, slice(9, 10)),
    ]
    assert not list(runs(ids()))


# ── disk ──


def label_of(blocks: Blocks) -> bytes:
    tokens = np.zeros(len(blocks.kv), dtype=np.int32).tobytes()
    state, journal = blocks.state.tobytes(), blocks.journal.tobytes()
    label = Label(1, -1, b"", 0, tokens, blocks.kv.tobytes(), True, state, "tail", True, journal, 0)
    return msgspec.msgpack.encode(label)


def disk_in(folder: Path, fingerprint: str = "0" * 32) -> DiskUnits:
    disk = DiskUnits(str(folder), fingerprint, 20, UNIT)
    disk.restore()
    return disk


def rows_of(seed: int) -> torch.Tensor:
    return torch.randint(
        256, (3, UNIT), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def write(disk: DiskUnits, units: list[int], rows: torch.Tensor) -> None:
    disk.write(ids(*units), rows, label_of(Blocks(2, ids(*units), ids(), ids())))


def read(disk: DiskUnits, units: list[int]) -> torch.Tensor:
    rows = torch.empty(len(units), UNIT, dtype=torch.uint8)
    disk.read(ids(*units), rows)
    return rows


def test_units_survive_a_restart(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    write(disk, [4, 5, 9], rows_of(1))
    disk.close()
    disk = disk_in(tmp_path)
    assert torch.equal(read(disk, [4, 5, 9]), rows_of(1))
    disk.close()


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    disk = disk_in(tmp_path / "new")
    write(disk, [4, 5, 9], rows_of(1))
    folder = disk.log.parent
    for path, mode in ((tmp_path / "new", 0o700), (folder, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir())
    disk.close()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    write(disk, [4, 5, 9], rows_of(1))
    path = disk.log.with_name("units")
    data = np.memmap(path, mode="r+")
    data[5 * UNIT + 7] ^= 4
    data.flush()
    with pytest.raises(DamagedUnits, match="unit 5"):
        read(disk, [4, 5, 9])
    assert torch.equal(read(disk, [4]), rows_of(1)[:1])
    disk.close()


@pytest.mark.parametrize("parts", [0, 1])
def test_a_full_disk_loses_what_was_being_written_alone(tmp_path: Path, monkeypatch, parts) -> None:
    """Whatever part of it was written over what was there before."""
    disk = disk_in(tmp_path)
    write(disk, [1, 2, 3], rows_of(1))
    write(disk, [7, 8, 9], rows_of(2))
    real, calls = os.pwrite, []

    def full(file: int, data: bytes, place: int) -> int:
        calls.append(place)
        if len(calls) > parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        write(disk, [1, 3, 5], rows_of(3))
    monkeypatch.undo()
    with pytest.raises(DamagedUnits):
        read(disk, [1])
    assert torch.equal(read(disk, [7, 8, 9]), rows_of(2))
    assert len(read_log(str(disk.log)).records) == 2
    disk.close()


def test_a_record_that_does_not_fit_leaves_the_log_whole(tmp_path: Path, monkeypatch) -> None:
    disk = disk_in(tmp_path)
    write(disk, [1, 2, 3], rows_of(1))
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:11]))
    with pytest.raises(OSError, match="no room"):
        write(disk, [4, 5, 6], rows_of(2))
    monkeypatch.undo()
    write(disk, [7, 8, 9], rows_of(3))
    found = read_log(str(disk.log))
    assert len(found.records) == 2 and found.ignored == 0
    disk.close()


def test_a_kill_while_units_are_written_is_found_at_the_next_read(tmp_path: Path) -> None:
    """The log still says what was there before."""
    disk = disk_in(tmp_path)
    write(disk, [1, 2, 3], rows_of(1))
    os.pwrite(disk._units, b"half", 2 * UNIT)
    disk.close()
    disk = disk_in(tmp_path)
    with pytest.raises(DamagedUnits):
        read(disk, [1, 2, 3])
    disk.close()


def test_what_was_overwritten_leaves_the_log(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    for seed in range(30):
        write(disk, [1, 2, 3], rows_of(seed))
    size = disk.log.stat().st_size
    disk.close()
    disk = disk_in(tmp_path)
    assert disk.log.stat().st_size == size // 30
    assert torch.equal(read(disk, [1, 2, 3]), rows_of(29))
    disk.close()


def test_other_weights_find_nothing_and_remove_it(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    write(disk, [1, 2, 3], rows_of(1))
    disk.close()
    (tmp_path / "of the operator").mkdir()
    other = disk_in(tmp_path, "1" * 32)
    assert read_log(str(other.log)).records == []
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "of the operator", "1" * 32}
    other.close()


def test_a_folder_serves_one_server(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    with pytest.raises(ConfigError, match="another server uses it"):
        disk_in(tmp_path)
    disk.close()


def test_a_folder_of_no_user_is_named() -> None:
    with pytest.raises(ConfigError, match='--cache-dir "~no-such-user/x": .*home directory'):
        DiskUnits("~no-such-user/x", "0" * 32, 1, 1)


def test_an_emptied_disk_is_empty_after_a_restart(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    write(disk, [1, 2, 3], rows_of(1))
    disk.empty()
    with pytest.raises(DamagedUnits):
        read(disk, [1])
    write(disk, [1, 2, 3], rows_of(2))
    assert torch.equal(read(disk, [1, 2, 3]), rows_of(2))
    disk.close()


def test_settings_that_cannot_work_are_named() -> None:
    def problems(**settings: object) -> str:
        return " ".join(EngineConfig(**settings).problems())

    assert "add --host-cache-gb" in problems(cache_dir="x")
    assert "--host-cache-gb -1" in problems(host_cache_gb=-1.0)
    assert "--disable-radix-cache" in problems(host_cache_gb=1.0, disable_radix_cache=True)
    assert "--cache-dir needs" in problems(cache_dir="x", disable_radix_cache=True)
