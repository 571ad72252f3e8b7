"""Where the prefix cache keeps what the device has no room for."""

from dataclasses import dataclass

from mamba_eagle.config.flags import Settings, setting
from mamba_eagle.config.memory import MemorySettings

GB = 1_000_000_000


@dataclass(frozen=True)
class TierSettings(Settings):
    host_cache_gb: float = setting(
        0.0,
        "host memory, in units of 10^9 bytes and of all ranks together, for prefixes that the "
        "prefix cache evicts from the device; 0: they are forgotten",
        group="cache tiers",
    )
    cache_dir: str = setting(
        "",
        "folder in which the prefix cache keeps prefixes, so that they survive a restart; it has "
        "the texts of users in it, and is made for this user alone (default: none)",
    )
    disk_cache_gb: float = setting(
        10.0, "space for prefixes in --cache-dir, in units of 10^9 bytes"
    )

    @property
    def host_cache_bytes(self) -> int:
        return int(self.host_cache_gb * GB)

    @property
    def disk_cache_bytes(self) -> int:
        return int(self.disk_cache_gb * GB) if self.cache_dir else 0

    def tier_problems(self, memory: MemorySettings) -> list[str]:
        wrong = []
        for flag, value in (
            ("--host-cache-gb", self.host_cache_gb),
            ("--disk-cache-gb", self.disk_cache_gb),
        ):
            if not 0 <= value < 1e6:
                wrong.append(f"{flag} {value:g}: must be 0 or more, and below 1000000")
        if self.host_cache_gb and memory.disable_radix_cache:
            wrong.append("--host-cache-gb needs the prefix cache: leave out --disable-radix-cache")
        if self.cache_dir and not self.host_cache_gb:
            wrong.append(
                "--cache-dir: what is read from it passes through host memory: add --host-cache-gb"
            )
        return wrong
