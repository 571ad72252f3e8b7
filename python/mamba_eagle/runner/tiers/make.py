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
from mamba_eagle.message import TierSizes
from mamba_eagle.runner.ranks import Ranks
from mamba_eagle.runner.tiers.copies import TierCopies
from mamba_eagle.runner.tiers.disk import DiskUnits, ExportFiles
from mamba_eagle.runner.tiers.slot_bytes import DeviceSlots
from mamba_eagle.runner.tiers.whole import Share, WholeUnits, shares_of

LAYOUT = 2  # of units, records and files; another number makes all folders foreign
SAMPLE = 1 << 12  # bytes
SAMPLES = 256  # per file
# What slots hold depends on these, besides weights and shapes. The bits of a drafter's weights are
# left out: they change drafts alone, and may depend on the number of ranks.
SETTINGS = tuple(
    "load_format dtype kv_cache_dtype mamba_ssm_dtype mamba_ssm_rounding mamba_verify_mode "
    "quantization speculative_algorithm device".split()
)


def tier_copies(
    config: EngineConfig, slots: DeviceSlots, place: Place, ranks: Ranks
) -> TierCopies | None:
    """None without --host-cache-gb. All ranks call it together.

    Raises: ConfigError if a tier has room for nothing, or its folder cannot be used."""
    if not config.host_cache_bytes:
        return None
    whole = WholeUnits(ranks.every(shares_of(slots), list[list[Share]]), ranks.beside)
    widest, unit, (kv, state, journal) = max(whole.own_bytes), whole.unit_bytes, whole.sizes
    sizes = TierSizes(
        host_units=config.host_cache_bytes // config.num_ranks // widest,
        disk_units=config.disk_cache_bytes // unit,
        kv_units=kv,
        state_units=state,
        journal_units=journal,
    )
    for flag, units, size in (
        ("--host-cache-gb", sizes.host_units, widest * config.num_ranks),
        ("--disk-cache-gb", sizes.disk_units, unit),
    ):
        if units <= state and (flag == "--host-cache-gb" or config.cache_dir):
            given = f"{flag}: one state takes {(state + 1) * size / 1e9:.3f} of it"
            raise ConfigError([f"{given}: give more, or leave it out"])
    disk = None
    if config.cache_dir and ranks.number == 0:
        disk = DiskUnits(config.cache_dir, fingerprint(config, whole), sizes.disk_units, unit)
    path = ranks.every("" if disk is None else str(disk.log), str)[0]
    sizes = msgspec.structs.replace(sizes, disk_log=path)
    exports = ExportFiles(partial(export_facts, config, whole)) if ranks.number == 0 else None
    return TierCopies(slots, sizes, whole, place, disk, exports)


def fingerprint(config: EngineConfig, whole: WholeUnits) -> str:
    """32 digits. Another model, drafter, dtype, layout or version has others: files are compared by
    name, size, time of change and samples of their bytes."""
    found = blake2b(digest_size=16)
    facts = [LAYOUT, version("mamba-eagle"), whole.layout, [getattr(config, n) for n in SETTINGS]]
    found.update(json.dumps(facts).encode())
    for path in (config.model_path, config.speculative_draft_model_path):
        for file in _weight_files(path):
            found.update(str(file.stat().st_mtime_ns).encode())
            _add_file(found, file, SAMPLES)
    return found.hexdigest()


def export_facts(config: EngineConfig, whole: WholeUnits) -> dict[str, Any]:
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
    layout = blake2b(json.dumps([LAYOUT, whole.layout]).encode(), digest_size=16)
    return {**facts, "unit_bytes": whole.unit_bytes, "layout": layout.hexdigest()}


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
