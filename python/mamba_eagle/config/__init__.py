"""Every setting, once: frozen dataclasses, from which the command line is made. Plain data;
resolve.py fills in what takes a look at files."""

from mamba_eagle.config.drafting import DraftSettings
from mamba_eagle.config.engine import EngineConfig, engine_part
from mamba_eagle.config.flags import (
    ConfigError,
    Parser,
    add_arguments,
    flag_of,
    from_arguments,
    from_keywords,
    setting,
)
from mamba_eagle.config.memory import MambaSettings, MemorySettings
from mamba_eagle.config.model import (
    NO_SUMS_ON_A_CPU,
    ON_A_CPU,
    ON_A_GPU,
    ModelSettings,
    RankSettings,
)
from mamba_eagle.config.server import HttpSettings, ServerConfig, own_engine_part
