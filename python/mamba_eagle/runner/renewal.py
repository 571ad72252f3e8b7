"""Other weights for a runner that serves, and its memory given back.

Where steps are captured, other weights take the places of the old ones (refill.py). Elsewhere a
runner is replaced as a whole: the old one's weights, pools, programs and graphs go. Either way,
what stands then is what a server that starts with these weights has, bit by bit, however they are
packed, fused, split, rounded or captured. What stays is what no weight is in: the processes, the
groups of ranks, compiled kernels, compiled grammars and the numbers of slots. The scheduler has
taken every slot from its requests and emptied its cache before.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.core import shown
from mamba_eagle.drafting import draft_source
from mamba_eagle.lora.slots import HostAdapter
from mamba_eagle.message import ChangeModel, Weights
from mamba_eagle.models.loader import weight_problems
from mamba_eagle.models.received import complete, forget
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.runner.assemble import START_ERRORS, assemble, refill
from mamba_eagle.runner.loading import give_back_freed_memory
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.ranks import Ranks

WITHOUT_WEIGHTS = ("NONE", "NGRAM")  # drafters


class Kept(NamedTuple):
    """What a runner and the next one share."""

    config: EngineConfig
    ranks: Ranks
    matchers: Matchers
    adapters: dict[int, HostAdapter]  # those that were read

    @classmethod
    def of(cls, runner: ModelRunner) -> Kept:
        memory = runner.memory
        config = dataclasses.replace(  # as many slots as the scheduler knows of
            runner.config,
            max_total_tokens=memory.kv_slots,
            max_mamba_cache_size=memory.state_slots,
            max_journals=memory.journals,
        )
        parts = runner.parts
        return cls(config, parts.ranks, runner.constraints.matchers, runner.adapters.kept)


class Renewal:
    """The runner that serves; none while its memory is given back."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner: ModelRunner | None = runner
        self.started_with = runner.config
        # what is received, for the ranks of its node
        self.writes = runner.parts.ranks.number % runner.config.ranks_per_node == 0
        self.kept: Kept | None = None  # since the first change
        self.released: set[str] = set()

    def change(self, asked: ChangeModel, let_go: Callable[[], None]) -> str:
        """Why nothing has changed; "" if all has. All ranks call it together.

        let_go: drops what else refers to the runner.
        Raises: ConfigError if the new one cannot be made, when the old one is gone.
        """
        if self.runner is not None:
            self.kept = Kept.of(self.runner)
        assert self.kept is not None
        if asked.weights is not None:
            before = self.kept.config
            config = other_folders(before, asked.weights)
            wrong = self._complete(asked.weights, before) or update_problems(config, before)
            found = self.kept.ranks.every("\n".join(wrong), str)
            kept, gone = (before, config) if any(found) else (config, before)
            if self.writes:
                forget(folders_of(gone) - folders_of(kept))
            if any(found):
                return next(filter(None, found))
            self.kept = self.kept._replace(config=config)
            if not asked.release and self._refilled(config):
                return ""
        self.released = self.released.union(asked.release).difference(asked.resume)
        if self.runner is not None:
            self.runner.retire()
            self.runner = None
            let_go()
            gc.collect()
            give_back_freed_memory()
        if not self.released:
            try:
                self.runner = assemble(self.kept.config, self.kept.ranks, self.kept.matchers)
            except START_ERRORS as error:
                raise ConfigError([f"the weights could not be replaced: {error}"]) from error
            for number, adapter in self.kept.adapters.items():
                self.runner.adapters.keep(number, adapter)
        return ""

    def _refilled(self, config: EngineConfig) -> bool:
        """Whether all ranks have put the weights in the places of the old ones, from which
        captured steps read them. On a CPU programs hold weights in forms of their own. Drafters
        may derive some of the target's; lower tiers of the cache are those of other weights."""
        runner = self.runner
        if runner is None or not runner.parts.captures or runner.copies is not None:
            return False
        if config.speculative_algorithm not in WITHOUT_WEIGHTS:
            return False
        done = refill(runner, config)
        return runner.parts.ranks.smallest([done]) == [1]

    @property
    def config(self) -> EngineConfig:
        """With the folders that are served."""
        return self.kept.config if self.kept is not None else self.started_with

    def _complete(self, weights: Weights, before: EngineConfig) -> list[str]:
        """Make checkpoints of what groups have sent; all ranks wait for it."""
        assert self.kept is not None
        wrong = []
        if weights.received and self.writes:
            pairs = {
                weights.target: before.model_path,
                weights.drafter: before.speculative_draft_model_path,
            }
            try:
                for folder, base in pairs.items():
                    if folder and base:
                        complete(folder, base)
            except (OSError, ValueError) as error:
                wrong = [f"what was received: {error}"]
        self.kept.ranks.smallest([1])
        return wrong

    def close(self) -> None:
        """Leave the other ranks."""
        if self.writes:
            forget(folders_of(self.config))
        if self.runner is not None:
            self.runner.close()
        elif self.kept is not None:
            self.kept.ranks.close()


def other_folders(config: EngineConfig, weights: Weights) -> EngineConfig:
    """The settings of a runner with these weights. A head in the target's folder moves with it."""
    old = config.model_path
    target, drafter = weights.target or old, weights.drafter
    if not drafter:
        drafter = config.speculative_draft_model_path
        drafter = target if drafter == old else drafter
    return dataclasses.replace(config, model_path=target, speculative_draft_model_path=drafter)


def folders_of(config: EngineConfig) -> set[str]:
    return {config.model_path, config.speculative_draft_model_path} - {""}


def update_problems(new: EngineConfig, old: EngineConfig) -> list[str]:
    """Why the folders of ``new`` cannot take the place of those of ``old``: names, shapes and
    dtypes of all their tensors, from the headers of their files, and the sizes in config.json."""
    if old.load_format == "dummy":
        return ["--load-format dummy: this server has random weights and reads no files"]
    if new.speculative_draft_model_path and new.speculative_algorithm == "NONE":
        return [
            f"{new.speculative_draft_model_path}: this server has no drafter "
            "(--speculative-algorithm NONE); leave it out"
        ]
    folders = (new.model_path, new.speculative_draft_model_path)
    try:
        absent = [path for path in folders if path and not Path(path).exists()]
        if absent:
            return [f"{shown(path)}: there is no such folder on the server" for path in absent]
        sizes, served = read_model_config(new.model_path), read_model_config(old.model_path)
        if sizes != served:
            return [f"{new.model_path}: its config.json is that of another model"]
        if new.tp_size > 1 and new.adapter_slots and sizes.scale_group != served.scale_group:
            return [
                f"{new.model_path}: {sizes.scale_group} channels share a scale, and "
                f"{served.scale_group} do in what is served, so ranks would need other parts of "
                "their adapters: start a server with it"
            ]
        wrong = weight_problems(lambda: model_class(sizes)(sizes), new.model_path)
        if new.speculative_algorithm != "NONE":
            source = draft_source(new.speculative_algorithm)
            wrong += source(new, sizes).problems()
            before = source(old, sizes).config
            if not wrong and source(new, sizes).config != before:
                wrong.append(f"{folders[1]}: its config.json is that of another drafter")
        return wrong
    except (*START_ERRORS, OSError, ValueError) as error:
        return [f"{new.model_path}: {error}"]
