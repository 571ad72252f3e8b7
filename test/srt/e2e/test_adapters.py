"""Adapters over HTTP: a server with eight of them, in three slots, with drafts and few pages, says
what merged models say; adapters come and go meanwhile, and memory does not grow."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from adapter_rig import merge, write_adapter
from cache_rig import Sequential
from runner_harness import Settings, greedy, random_prompt, sampled
from running_server import StartServer
from tiny_model import write_head, write_model

COUNT = 8
# of each adapter; 100 for a run of 10⁵ tokens
PROMPTS = int(os.environ.get("MAMBA_EAGLE_CASES", "2"))
# 1000 in the long form
LOADS = int(os.environ.get("MAMBA_EAGLE_LOADS", "20"))
FLAGS = (
    "--skip-tokenizer-init", "--device", "cpu", "--max-running-requests", "8", "--max-loras", "3",
    "--max-total-tokens", "260", "--max-mamba-cache-size", "12", "--speculative-algorithm", "EAGLE",
    "--context-length", "256",
)  # fmt: skip


def test_eight_adapters_are_eight_merged_models(start_server: StartServer, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    head = write_head(tmp_path / "head", model)
    folders = [write_adapter(tmp_path / f"a{i}", model, i, 4 + i) for i in range(COUNT)]
    merged = [merge(tmp_path / f"merged{i}", model, folder) for i, folder in enumerate(folders)]
    named = [f"a{i}={folder}" for i, folder in enumerate(folders[:4])]
    server = start_server(
        *("--model-path", str(model), "--speculative-draft-model-path", str(head)),
        *("--lora-modules", *named, *FLAGS),
    )
    asked = [(number, adapter) for number in range(PROMPTS) for adapter in range(-1, COUNT)]

    def params(number: int) -> Any:
        return greedy(120) if number % 2 else sampled(120, seed=number)

    def prompt(number: int) -> list[int]:
        return random_prompt(30, 5)[: 15 * (number % 3)] + random_prompt(7, number)

    with httpx.Client(base_url=server.base_url, timeout=300) as client:

        def answer(job: tuple[int, int]) -> list[int]:
            number, adapter = job
            given = params(number)
            body = {
                "input_ids": prompt(number),
                "sampling_params": {
                    "max_new_tokens": given.max_new_tokens,
                    "temperature": given.temperature,
                    "sampling_seed": given.seed,
                    "ignore_eos": True,
                },
                "lora_path": f"a{adapter}" if adapter >= 0 else None,
            }
            reply = client.post("/generate", json=body).raise_for_status().json()
            return reply["output_ids"]  # type: ignore[no-any-return]

        for i in range(4, COUNT):
            load(client, f"a{i}", folders[i])
        with ThreadPoolExecutor(12) as pool:
            found = dict(zip(asked, pool.map(answer, asked), strict=True))
        runner = psutil.Process(server.pids()["runner"])
        come_and_go(client, folders, 10)
        before = runner.memory_info().rss
        come_and_go(client, folders, LOADS)
        grown = runner.memory_info().rss - before
        state = client.get("/server_info").json()["internal_states"][0]
    one = sum(file.stat().st_size for file in folders[-1].iterdir())
    assert grown < 4 * one + LOADS * one // 10 + 2**20
    assert state["num_retracted_reqs"] > 0
    for adapter, folder in enumerate([model, *merged], start=-1):
        plain = Sequential(Settings("NONE"), folder, None, disable_radix_cache=True)
        for number in range(PROMPTS):
            wanted = plain.serve(prompt(number), params(number)).tokens
            assert found[number, adapter] == wanted, (number, adapter)


def load(client: httpx.Client, name: str, folder: Path) -> None:
    body = {"lora_name": name, "lora_path": str(folder)}
    client.post("/load_lora_adapter", json=body).raise_for_status()


def come_and_go(client: httpx.Client, folders: list[Path], turns: int) -> None:
    """Each is used once, so that it lies in a slot."""
    for turn in range(turns):
        load(client, "guest", folders[turn % len(folders)])
        short = {"max_new_tokens": 2, "temperature": 0}
        body = {"input_ids": [5, 6], "sampling_params": short, "lora_path": "guest"}
        client.post("/generate", json=body).raise_for_status()
        client.post("/unload_lora_adapter", json={"lora_name": "guest"}).raise_for_status()
