"""An update of the weights whose tensors come in several calls: nothing of it is used before all of
it is there."""

import os
import shutil
import uuid
from dataclasses import dataclass, field

from mamba_eagle.message import Weights
from mamba_eagle.message.channel import RECEIVED_PREFIX, memory_dir


@dataclass
class Incoming:
    """What has come so far, in a folder each for the target and the drafter."""

    begun: bool = False  # /start_weight_update says where it ends; else a pause does
    is_drafter: bool = False  # of what comes next
    receiving: int = 0  # calls under way
    version: str = ""
    problem: str = ""  # a part of it was refused, so the rest is, too
    folders: dict[bool, str] = field(default_factory=dict)  # by whether it is the drafter's

    def folder(self) -> str:
        """Where the next tensors go."""
        name = f"{RECEIVED_PREFIX}{uuid.uuid4().hex}"
        return self.folders.setdefault(self.is_drafter, os.path.join(memory_dir(), name))

    def fail(self, problem: str) -> None:
        for folder in self.folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        self.folders.clear()
        self.problem = problem

    def weights(self) -> Weights:
        target, drafter = self.folders.get(False, ""), self.folders.get(True, "")
        return Weights(target=target, drafter=drafter, version=self.version, received=True)
