"""How many requests, tokens and adapters there is room for, on the device and below, and which come
first."""

import math
from dataclasses import dataclass

from mamba_eagle.config.flags import Settings, setting
from mamba_eagle.events_config import read_events_config


@dataclass(frozen=True)
class MemorySettings(Settings):
    max_running_requests: int = setting(
        32,
        "maximum number of requests decoded at the same time",
        minimum=1,
        group="memory and scheduling",
    )
    max_total_tokens: int | None = setting(
        None,
        "number of KV slots, one per token; auto: what fits into memory, on a CPU 65536 and on a "
        "GPU 2000000 at most",
        minimum=1,
    )
    max_mamba_cache_size: int | None = setting(
        None,
        "number of state slots, for running requests and the prefix cache; auto: what fits into "
        "memory, on a CPU 192 at most beside those of running requests",
        minimum=1,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of keys and values in KV slots; auto: --dtype; fp8_e4m3: half of the memory of 16 "
        "bits, rounded",
        ("auto", "fp8_e4m3"),
    )
    max_journals: int = setting(
        -1,
        "number of saved journals, each with which the prefix cache continues at any of the tokens "
        "that follow a state; -1: half as many as state slots on a CPU, none on a GPU; 0: none",
    )
    mem_fraction_static: float = setting(
        0.85,
        "fraction of a GPU's memory for weights and pools; on a CPU, for pools, of what is free "
        "beside the weights",
    )
    chunked_prefill_size: int | None = setting(
        None,
        "maximum number of prompt tokens per step; auto: 1024 on a CPU, 8192 on a GPU",
        minimum=1,
    )
    schedule_policy: str = setting(
        "fcfs",
        "order of waiting requests; fcfs: first come, first served; lpm: longest cached prefix "
        "first; priority: by the field of that name, and running requests step back for higher "
        "ones",
        ("fcfs", "lpm", "priority"),
    )
    enable_return_routed_experts: bool = setting(
        False,
        "requests may ask for the experts of each token (return_routed_experts), which keeps them "
        "of all steps; on a CPU, layers run one by one",
    )
    logprobs_at_temperature: bool = setting(
        False,
        "logprobs of output tokens are those of the distribution at the request's temperature, as "
        "trainers compute them; without, the model's own, at temperature 1",
    )
    queue_timeout: float = setting(
        0.0, "seconds that a request may wait to be started; then it gets status 504; 0: no limit"
    )
    disable_radix_cache: bool = setting(False, "do not reuse the prefixes of earlier requests")
    kv_events_config: str = setting(
        "",
        "publishes which blocks of tokens the prefix cache could reuse, in vLLM's format over ZMQ; "
        'a JSON object, such as {"endpoint": "tcp://127.0.0.1:5557"} (default: none); prompts can '
        "be read from it",
    )
    disable_overlap_schedule: bool = setting(
        False, "wait for the result of each step before planning the next"
    )
    disable_cuda_graph: bool = setting(
        False, "on a GPU, launch the operations of a step one by one"
    )

    @property
    def num_journals(self) -> int | None:
        """None: to be derived from the number of state slots."""
        if self.disable_radix_cache:
            return 0
        return None if self.max_journals < 0 else self.max_journals

    def problems(self) -> list[str]:
        wrong = super().problems()
        try:
            read_events_config(self.kv_events_config)
        except ValueError as error:
            wrong += str(error).splitlines()
        if self.max_journals < -1:
            wrong.append(
                f"--max-journals {self.max_journals}: must be 0 or more, or -1 for half as many as "
                "state slots"
            )
        if not 0 < self.mem_fraction_static <= 1:
            wrong.append(
                f"--mem-fraction-static {self.mem_fraction_static}: must be above 0 and at most 1"
            )
        if not 0 <= self.queue_timeout < math.inf:
            wrong.append(f"--queue-timeout {self.queue_timeout:g}: must be 0 seconds or more")
        return wrong


@dataclass(frozen=True)
class MambaSettings(Settings):
    mamba_ssm_dtype: str = setting(
        "float32",
        "dtype of the recurrent states in state slots",
        ("float32", "bfloat16", "float16"),
        group="Mamba2 layers",
    )
    mamba_ssm_rounding: str = setting(
        "stochastic",
        "how a state is rounded to 16 bits when it is written; stochastic: up or down at random, "
        "by the request's seed and the position, so that the average is right",
        ("stochastic", "nearest"),
    )
    mamba_verify_mode: str = setting(
        "deferred",
        "how trees are verified; deferred: one row per node, folded into the state later; "
        "snapshot: one state per node",
        ("deferred", "snapshot"),
    )
    mamba_rows: int | None = setting(
        None, "rows buffered per request, one per token; auto: derived from the tree", minimum=1
    )
    mamba_checkpoint_interval: int = setting(
        64,
        "tokens between the states kept inside a prompt, while state slots are free; 0: keep none",
        minimum=0,
    )


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
        for flag, given in (
            ("--host-cache-gb", self.host_cache_gb),
            ("--cache-dir", self.cache_dir),
        ):
            if given and memory.disable_radix_cache:
                wrong.append(f"{flag} needs the prefix cache: leave out --disable-radix-cache")
        if self.cache_dir and not self.host_cache_gb:
            wrong.append(
                "--cache-dir: what is read from it passes through host memory: add --host-cache-gb"
            )
        return wrong


DEFAULT_SLOTS = 8


@dataclass(frozen=True)
class AdapterSettings(Settings):
    lora_modules: tuple[str, ...] = setting(
        (),
        "adapters that are served from the start, as NAME=FOLDER; requests choose one by its name",
        group="adapters",
        may_be_empty=False,
        repeats=True,
        alias="--lora-paths",  # SGLang's
    )
    max_loras: int | None = setting(
        None,
        "adapters that requests may use at the same time, each with a slot on the device; others "
        "are kept on the host and wait for one; auto: 8 with --lora-modules, else adapters cannot "
        "be loaded",
        minimum=1,
    )
    max_lora_rank: int = setting(
        64, "the highest rank of an adapter, which each slot has room for", minimum=1
    )

    @property
    def adapter_slots(self) -> int:
        return self.max_loras or (DEFAULT_SLOTS if self.lora_modules else 0)

    @property
    def first_adapters(self) -> dict[str, str]:
        """Folders by name, of --lora-modules."""
        pairs = (given.partition("=") for given in self.lora_modules)
        return {name: folder for name, _, folder in pairs}

    def problems(self) -> list[str]:
        wrong = super().problems()
        for given in self.lora_modules:
            name, _, folder = given.partition("=")
            if not name or not folder:
                wrong.append(f"--lora-modules {given}: must be NAME=FOLDER")
        if len(self.first_adapters) < len(self.lora_modules):
            wrong.append("--lora-modules: a name is given twice")
        return wrong
