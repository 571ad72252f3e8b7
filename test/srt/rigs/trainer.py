"""A trainer in a process of its own: joins a group as SGLang's clients do, and broadcasts a file's
tensors in the order in which it is told their names."""

from __future__ import annotations

import datetime
import os
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d


def train(told: Connection, address: str, port: int, size: int, path: str, device: str) -> None:
    """told: lists of names that go as one tensor of bytes, or of one alone; size: of the group."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it fails where an engine refuses what it sends
    if on_gpu := device != "cpu":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=60)
    store, _, _ = next(dist.rendezvous(f"tcp://{address}:{port}", 0, size, timeout=timeout))
    name = c10d.GroupName("weight_update_group")
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        "nccl" if on_gpu else "gloo",
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # torch asks for it
    weights = load_file(path, device)
    while True:
        try:
            names = told.recv()
        except EOFError:
            break
        sent = [weights[name] for name in names]
        if len(sent) > 1:
            sent = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent])]
        group.broadcast(sent[0], 0).wait()
    dist.destroy_process_group(group)
