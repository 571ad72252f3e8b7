"""Adapters: which are served from the start, and how many at the same time."""

from dataclasses import dataclass

from mamba_eagle.config.flags import Settings, setting

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
