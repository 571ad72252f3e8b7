"""Where sums are needed, and what a rank asks of a way to make them."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.sum_table import SumMethod


class Site(NamedTuple):
    """Where sums are needed: tensors [n, size] of a dtype on the ranks of ``group``, for n up to
    ``tokens``."""

    group: Group
    tokens: int
    size: int
    dtype: torch.dtype


class JoinedSum(SumMethod):
    """A method that all ranks of a site join together."""

    @classmethod
    @abstractmethod
    def why_not(cls, site: Site) -> str:
        """What is in the way on this rank; "" if nothing is. Compiles what the method needs, and
        exchanges nothing. Raises: anything, which is then in the way."""

    @classmethod
    @abstractmethod
    def join(cls, site: Site) -> JoinedSum:
        """The method, on all ranks at once. Raises: anything."""
