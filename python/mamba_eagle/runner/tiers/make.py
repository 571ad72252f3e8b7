"""How large the lower tiers are, and whose blocks they hold."""

import json
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from mamba_eagle.backend.place import Place
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.drafting.base import Drafter
from mamba_eagle.message import TierSizes
from mamba_eagle.runner.pools import Pools
from mamba_eagle.runner.ranks import Ranks
from mamba_eagle.runner.tiers.copies import TierCopies
from mamba_eagle.runner.tiers.disk import DiskUnits
from mamba_eagle.runner.tiers.exports import ExportFiles
from mamba_eagle.runner.tiers.slot_bytes import DeviceSlots

LAYOUT = 1  # of units, records and files; another number makes all folders foreign
STATE_UNIT = 1 << 16  # bytes of a unit, if tokens have no keys and values
SAMPLE = 1 << 12  # bytes
SAMPLES = 256  # per file
# What slots hold depends on these, besides weights and shapes.
SETTINGS = (
    "load_format",
    "dtype",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "mamba_ssm_rounding",
    "mamba_verify_mode",
    "quantization",
    "speculative_draft_model_quantization",
    "speculative_algorithm",
    "device",
)


def tier_copies(
    config: EngineConfig, pools: Pools, drafter: Drafter, place: Place, ranks: Ranks
) -> TierCopies | None:
    """None without --host-cache-gb. All ranks call it together.

    Raises: ConfigError if a tier has room for nothing, or its folder cannot be used."""
    if not config.host_cache_bytes:
        return None
    own = drafter.cached_pools()
    slots = DeviceSlots.of([pools.kv, own.kv], [pools.states, own.states], pools.journals)
    kv, states, journals = (part.size for part in slots)
    unit = kv or STATE_UNIT
    wanted = [-int(kv > 0), -max(1, -(-states // unit)), -max(1, -(-journals // unit))]
    kv_units, state_units, journal_units = (-number for number in ranks.smallest(wanted))
    unit = max(kv, 64, -(-states // state_units), -(-journals // journal_units))
    fit = [config.host_cache_bytes // config.num_ranks // unit, config.disk_cache_bytes // unit]
    host_units, disk_units = ranks.smallest(fit)
    sizes = TierSizes(
        host_units=host_units,
        disk_units=disk_units,
        kv_units=kv_units,
        state_units=state_units,
        journal_units=journal_units,
    )
    least = state_units + 1
    for flag, units in (("--host-cache-gb", host_units), ("--disk-cache-gb", disk_units)):
        if units < least and (flag == "--host-cache-gb" or config.cache_dir):
            size = least * unit * config.num_ranks / 1e9
            raise ConfigError([f"{flag}: one state takes {size:.3f} of it: give more, or 0"])
    exports = ExportFiles(partial(export_facts, config, slots, unit))
    if not config.cache_dir:
        return TierCopies(slots, sizes, unit, place, exports=exports)
    disk = DiskUnits(config.cache_dir, fingerprint(config, slots), disk_units, unit)
    sizes = msgspec.structs.replace(sizes, disk_log=str(disk.log))
    return TierCopies(slots, sizes, unit, place, disk, exports)


def fingerprint(config: EngineConfig, slots: DeviceSlots) -> str:
    """32 digits. Another model, drafter, dtype, layout or version has others: files are compared by
    name, size, time of change and samples of their bytes."""
    found = blake2b(digest_size=16)
    facts = [LAYOUT, version("mamba-eagle"), _layout(slots), [getattr(config, n) for n in SETTINGS]]
    found.update(json.dumps(facts).encode())
    for path in (config.model_path, config.speculative_draft_model_path):
        for file in _weight_files(path):
            found.update(str(file.stat().st_mtime_ns).encode())
            _add_file(found, file, SAMPLES)
    return found.hexdigest()


def export_facts(config: EngineConfig, slots: DeviceSlots, unit_bytes: int) -> dict[str, Any]:
    """What two servers must have in common for one to use what the other has computed. Files of
    weights are compared by name, size and 4 KiB of each MiB: copies have other times."""
    facts = {"version": version("mamba-eagle"), **{n: getattr(config, n) for n in SETTINGS}}
    for name, path in (
        ("model", config.model_path),
        ("drafter", config.speculative_draft_model_path),
    ):
        found = blake2b(digest_size=16)
        for file in _weight_files(path):
            _add_file(found, file, max(SAMPLES, file.stat().st_size >> 20))
        facts[name] = found.hexdigest()
    layout = blake2b(json.dumps([LAYOUT, _layout(slots)]).encode(), digest_size=16)
    return {**facts, "unit_bytes": unit_bytes, "layout": layout.hexdigest()}


def _layout(slots: DeviceSlots) -> list[list[tuple[str, list[int]]]]:
    return [[(str(part.tensor.dtype), part.slot_shape) for part in kind.parts] for kind in slots]


def _weight_files(path: str) -> list[Path]:
    folder = Path(path)
    if not path or folder.is_file():
        return [folder] if path else []
    patterns = ("*.safetensors", "*.gguf", "config.json")
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def _add_file(found: blake2b, path: Path, samples: int) -> None:
    size = path.stat().st_size
    found.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for sample in range(samples):
            file.seek(sample * max(size - SAMPLE, 0) // (samples - 1))
            found.update(file.read(SAMPLE))
