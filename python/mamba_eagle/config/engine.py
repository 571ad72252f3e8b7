"""What the scheduler and the runner need to know."""

import dataclasses
from dataclasses import dataclass

from mamba_eagle.config.drafting import DraftSettings
from mamba_eagle.config.flags import Settings, setting
from mamba_eagle.config.memory import AdapterSettings, MambaSettings, MemorySettings, TierSettings
from mamba_eagle.config.model import ModelSettings, RankSettings
from mamba_eagle.drafters import DRAFTERS


@dataclass(frozen=True)
class LogSettings(Settings):
    log_level: str = setting(
        "info",
        "least severe messages that are logged",
        ("debug", "info", "warning", "error"),
        group="logging",
    )
    log_format: str = setting("text", "text, or one JSON object per line", ("text", "json"))


# The fields of a dataclass are those of its last base first: so they stand in --help.
@dataclass(frozen=True)
class EngineConfig(
    LogSettings,
    AdapterSettings,
    DraftSettings,
    MambaSettings,
    TierSettings,
    MemorySettings,
    RankSettings,
    ModelSettings,
):
    """The settings of scheduler and runner: all groups, and what they must have in common."""

    @property
    def quantizations(self) -> dict[str, str]:
        """What the flags for weights of few bits say, the target's and the drafter's."""
        drafter = self.speculative_draft_model_quantization
        given = {"--quantization": self.quantization}
        if drafter != "same" and self.speculative_algorithm != "NONE":
            given["--speculative-draft-model-quantization"] = drafter
        return given

    def problems(self) -> list[str]:
        wrong = super().problems()
        for flag, kind in self.quantizations.items():
            wrong += self.products_missing(flag, kind)
        wrong += self.sum_problems(self.device)
        wrong += self.tier_problems(self)
        wrong += self._inexact() if self.exact else []
        drafter = DRAFTERS.get(self.speculative_algorithm)
        if drafter and drafter.needs_folder and not self.speculative_draft_model_path:
            wrong.append(
                f"--speculative-algorithm {self.speculative_algorithm} needs "
                "--speculative-draft-model-path, the folder of a drafter made for "
                f"{self.model_path}"
            )
        return wrong

    def _inexact(self) -> list[str]:
        """What --exact cannot promise its bits beside."""
        given = (
            ("--dtype", self.dtype, "float32", "bfloat16"),
            ("--quantization", self.quantization, "nvfp4", "auto or fp8"),
            ("--cpu-prompt-dtype", self.cpu_prompt_dtype, "bfloat16", "float32"),
            ("--mamba-verify-mode", self.mamba_verify_mode, "snapshot", "deferred"),
            ("--kv-cache-dtype", self.kv_cache_dtype, "fp8_e4m3", "auto"),
        )
        on_host = self.device == "cpu"
        wrong = [
            f"{flag} {value}: with --exact use {remedy}"
            for flag, value, other, remedy in given
            if value == other and not (on_host and flag == "--dtype")
        ]
        if self.mamba_ssm_dtype != "float32":
            wrong.append(f"--mamba-ssm-dtype {self.mamba_ssm_dtype}: with --exact use float32")
        if on_host:
            return wrong
        if self.pp_size > 1:
            wrong.append(f"--pp-size {self.pp_size}: with --exact use 1, or --tp-size instead")
        if self.adapter_slots:
            wrong.append("--lora-modules, --max-loras: not with --exact; leave them out")
        return wrong


def engine_part(config: EngineConfig) -> EngineConfig:
    """The settings that scheduler and runner need, and no others."""
    return EngineConfig(
        **{spec.name: getattr(config, spec.name) for spec in dataclasses.fields(EngineConfig)}
    )
