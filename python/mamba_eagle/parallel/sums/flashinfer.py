"""FlashInfer's one-shot all-reduce, alone or with the residual stream and its norm
(https://docs.flashinfer.ai/api/comm.html).

Its ``trtllm`` workspace is asked for by name: what "auto" may choose needs NVLink multicast.
"""

from __future__ import annotations

import logging
import weakref
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.config import FLASHINFER_SUMS
from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.parallel.sum_table import FusedSum, NormedSum
from mamba_eagle.parallel.sums.shared_memory import members, peers_problem
from mamba_eagle.parallel.sums.site import JoinedSum, Site

log = logging.getLogger("mamba_eagle.parallel")

DTYPES = (torch.bfloat16, torch.float16)
ACCESS_BYTES = 16  # of each thread; a token has a whole number of them
MAX_THREADS = 8 * 1024  # of a token


class FlashInferSum(FusedSum, JoinedSum):
    """Each rank pushes its part to all others; sums in the order of the ranks, in float32."""

    name = "flashinfer"

    def __init__(self, workspace: Any) -> None:
        from flashinfer import comm  # an optional package for GPUs

        self.workspace = workspace
        weakref.finalize(self, workspace.destroy).atexit = False
        self._fusion = comm.allreduce_fusion
        self._plain = comm.AllReduceFusionPattern.kAllReduce
        self._normed = comm.AllReduceFusionPattern.kARResidualRMSNorm

    @classmethod
    def why_not(cls, site: Site) -> str:
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        if site.group.size not in FLASHINFER_SUMS:
            return f"it has kernels for {FLASHINFER_SUMS} ranks"
        if site.dtype not in DTYPES:
            return f"{site.dtype} is not of 16 bits"
        threads, rest = divmod(site.size * site.dtype.itemsize, ACCESS_BYTES)
        if rest or threads > MAX_THREADS:
            return f"it has no kernel for {site.size} columns"
        if problem := peers_problem(site):
            return problem
        from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

        log.info("flashinfer's sums: compiled unless an earlier start has, which takes minutes")
        get_trtllm_comm_module()  # by nvcc; a rank waits for another that is at it
        return ""

    @classmethod
    def join(cls, site: Site) -> FlashInferSum:
        from flashinfer import comm

        group = members(site)
        return cls(
            comm.create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=group.size,
                rank=group.rank,
                max_token_num=site.tokens,
                hidden_dim=site.size,
                dtype=site.dtype,
                group=group.torchs,
            )
        )

    def sum(self, x: Tensor) -> Tensor:
        return self._fusion(
            input=x,
            workspace=self.workspace,
            pattern=self._plain,
            launch_with_pdl=launches_overlap(x.device),
            output=torch.empty_like(x),
            use_oneshot=True,
            fp32_acc=True,
        )

    def sum_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> NormedSum:
        # Launched early, it reads the stream before the last kernel has ended, and that is the
        # product which made ``added``.
        made = NormedSum(torch.empty_like(added), torch.empty_like(stream))
        self._fusion(
            input=added,
            workspace=self.workspace,
            pattern=self._normed,
            launch_with_pdl=launches_overlap(added.device),
            residual_in=stream,
            residual_out=made.stream,
            norm_out=made.normed,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=True,
            fp32_acc=True,
        )
        return made
