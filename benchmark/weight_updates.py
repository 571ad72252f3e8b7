"""How long do new weights take while clients wait, and how much memory does a release give back?

    python -m benchmark.weight_updates --folder /dev/shm/updates --disk /tmp/updates
    python -m benchmark.weight_updates --folder /dev/shm/updates --flags "--quantization fp8"

Writes two checkpoints of the geometry of Nemotron-Nano-9B-v2 with random weights below --folder,
unless they are there (the second one has most files in common with the first), and a copy of the
first below --disk, which stays in the page cache. Then, on one server: the second one's weights
beside --clients that are paused and go on; the first one's from the disk; a release and a resume,
which makes the runner anew. Texts must be those of the same weights before. Exits with 1 if not.

On a GPU that is promised with ``--flags --exact`` alone; elsewhere nearly equal logits may fall
either way. ``control_texts`` and ``repeated_texts`` say whether they do without any update.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from safetensors.torch import save_file

from benchmark.lib.client import StreamClient
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results
from mamba_eagle.models.loader import INDEX, created_as, random_weight
from mamba_eagle.models.registry import model_class, read_model_config

GEOMETRY = Path(__file__).parent / "models" / "nemotron-nano-9b-v2"
FILE_BYTES = 2 << 30
PROMPTS = [[11 + number, 300, 44, 61 + number] for number in range(4)]


def write_checkpoint(folder: Path, geometry: Path, seed: int, device: str, most: int = 0) -> None:
    """Random weights under the model's own names, which are the published ones. most: write so many
    bytes; 0: all."""
    folder.mkdir(parents=True)
    shutil.copy(geometry / "config.json", folder)
    sizes = read_model_config(geometry)
    with created_as(torch.bfloat16, torch.device("meta")):
        model = model_class(sizes)(sizes)
    draw = torch.Generator(device).manual_seed(seed)
    places: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    written = 0
    names = dict(model.named_parameters())
    for name, like in names.items():
        value = random_weight(name, like, draw).expand(like.shape).to("cpu", like.dtype)
        part[name] = value.contiguous()
        if sum(held.nbytes for held in part.values()) > FILE_BYTES or name == list(names)[-1]:
            file = f"model-{len(set(places.values())):05}.safetensors"
            save_file(part, folder / file)
            written += (folder / file).stat().st_size
            places |= dict.fromkeys(part, file)
            part = {}
            if 0 < most <= written:
                return
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def make_folders(root: Path, geometry: Path, device: str) -> tuple[Path, Path]:
    first, second = root / "A", root / "B"
    if not first.exists():
        write_checkpoint(first, geometry, 1, device)
        write_checkpoint(second, geometry, 2, device, most=1)
        for file in first.iterdir():
            if not (second / file.name).exists():
                os.link(file, second / file.name)
    return first, second


def gpu_bytes() -> int:
    """In use, by nvidia-smi; 0 without one."""
    asked = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        return int(subprocess.check_output(asked, text=True).split()[0]) << 20
    except (OSError, subprocess.CalledProcessError):
        return 0


class Seen(NamedTuple):
    """Of a server with some weights."""

    texts: list[Any]
    repeats: bool  # whether the same prompts gave the same texts again
    sums: str


class Trainer:
    """What it does to a server, and how long each takes."""

    def __init__(
        self, client: StreamClient, control: httpx.AsyncClient, size: int, sums: bool
    ) -> None:
        """size: of the weights in the files, in bytes. sums: whether checksums are compared."""
        self.client, self.control, self.size, self.sums = client, control, size, sums

    async def post(self, path: str, **body: Any) -> float:
        """Seconds."""
        began = time.perf_counter()
        answer = await self.control.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.text}")
        return time.perf_counter() - began

    async def update(self, folder: Path, version: str) -> dict[str, float]:
        path = "/update_weights_from_disk"
        seconds = await self.post(path, model_path=str(folder), weight_version=version)
        print(f"update to {version}: {seconds:.2f} s", flush=True)
        return {"value": round(seconds, 3), "gb_s": round(self.size / seconds / 1e9, 2)}

    async def seen(self) -> Seen:
        """Run anew, and again behind that, with nothing cached."""
        texts = await self.texts()
        await self.post("/flush_cache")
        sums = "" if not self.sums else await self.checksum()
        return Seen(texts, await self.texts() == texts, sums)

    async def checksum(self) -> str:
        answer = await self.control.post("/weights_checker", json={"action": "checksum"})
        return json.dumps(answer.json()["ranks"])

    async def texts(self) -> list[Any]:
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        bodies = [{"input_ids": ids, "sampling_params": sampling} for ids in PROMPTS]
        return [(await self.client.generate(body))["output_ids"] for body in bodies]

    async def stream(self, number: int, tokens: int, times: list[float]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": [*range(20 + number, 84 + number)], "sampling_params": sampling}
        last: dict[str, Any] = {}
        async with self.client.stream(body) as pieces:
            async for piece in pieces:
                times.append(time.perf_counter())
                last = piece
        return last

    async def update_beside(self, folder: Path, clients: int, tokens: int) -> dict[str, Any]:
        """Pause, update, continue, in the middle of all streams."""
        times: list[list[float]] = [[] for _ in range(clients)]
        streams = [self.stream(number, tokens, times[number]) for number in range(clients)]
        tasks = [asyncio.create_task(each) for each in streams]
        while min(map(len, times)) < tokens // 4:
            await asyncio.sleep(0.05)
        paused = await self.post("/pause_generation", mode="in_place")
        line = await self.update(folder, "B")
        await self.post("/continue_generation")
        replies = await asyncio.gather(*tasks)
        spans = [reply["meta_info"].get("weight_versions", []) for reply in replies]
        whole = all(len(reply["output_ids"]) == tokens for reply in replies)
        if not whole or any([s["version"] for s in span] != ["default", "B"] for span in spans):
            raise RuntimeError("a client's reply is short, or of other weights")
        gaps = sorted(max(b - a for a, b in zip(each, each[1:])) for each in times)
        return {**line, "pause_s": round(paused, 3), "longest_gap_s": round(gaps[-1], 3)}


async def measure(url: str, folders: tuple[Path, Path], args: argparse.Namespace) -> list[Any]:
    first, second = folders
    size = sum(file.stat().st_size for file in first.glob("*.safetensors"))
    lines: list[dict[str, Any]] = []
    routes = httpx.AsyncClient(base_url=url, timeout=300, trust_env=False)
    async with StreamClient(url) as client, routes as control:
        trainer = Trainer(client, control, size, args.checksums)

        def add(name: str, **values: Any) -> None:
            lines.append({"name": name, **values, "gb": round(size / 1e9, 2), "flags": args.flags})
            print(json.dumps(lines[-1]), flush=True)

        of_first = await trainer.seen()
        loads = [trainer.stream(number, args.tokens, []) for number in range(args.clients)]
        await asyncio.gather(*loads)
        of_first_again = await trainer.seen()
        add(
            "update_beside_clients_s",
            clients=args.clients,
            **await trainer.update_beside(second, args.clients, args.tokens),
        )
        of_second = await trainer.seen()
        disk = Path(args.disk) if args.disk else first
        add("update_from_disk_s" if args.disk else "update_s", **await trainer.update(disk, "A"))
        seen = [(of_first, await trainer.seen())]
        add("update_s", **await trainer.update(second, "B again"))
        before = gpu_bytes()
        released = await trainer.post("/release_memory_occupation")
        left = gpu_bytes()
        resumed = await trainer.post("/resume_memory_occupation")
        seen.append((of_second, await trainer.seen()))
        info = await client.server_info()
        pools = sum(info[f"{n}_bytes"] for n in ("weight", "kv", "checkpoint", "verify"))
        add(
            "release_s",
            value=round(released, 3),
            resume_s=round(resumed, 2),
            used_gb=before / 1e9,
            left_gb=left / 1e9,
            pools_gb=pools / 1e9,
            freed=round((before - left) / pools, 3),
        )
        await trainer.update(first, "A again")
        seen.append((of_first, await trainer.seen()))
        compared = {
            "control_texts": [of_first.texts == of_first_again.texts],
            "repeated_texts": [one.repeats for pair in seen for one in pair],
            "same_texts": [a.texts == b.texts for a, b in seen],
        }
        if args.checksums:
            compared["same_weights"] = [a.sums == b.sums for a, b in seen]
        for name, same in compared.items():
            differ = of_first.texts != of_second.texts
            add(name, value=sum(same), of=len(same), each=same, others_differ=differ)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", required=True, help="in memory: below /dev/shm")
    parser.add_argument("--disk", default="")
    parser.add_argument("--geometry", default=str(GEOMETRY), help="folder with a config.json")
    parser.add_argument("--flags", default="", help="added to those of the geometry")
    parser.add_argument("--checksums", action="store_true", help="compare the weights, too")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each of their replies")
    parser.add_argument("--results", default="")
    args = parser.parse_args()
    exit_on_sigterm()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    folders = make_folders(Path(args.folder), Path(args.geometry), device)
    if args.disk and not Path(args.disk).exists():
        shutil.copytree(folders[0], args.disk)
    if device == "cuda":
        torch.cuda.empty_cache()
    print(f"{facts.hardware()}; folders after {time.perf_counter() - began:.0f} s", flush=True)
    flags = f"--model-path {folders[0]} --skip-tokenizer-init --speculative-algorithm NONE"
    with ServerProcess([*shlex.split(flags), *shlex.split(args.flags)]) as server:
        print(f"answers after {time.perf_counter() - began:.0f} s", flush=True)
        lines = asyncio.run(measure(server.base_url, folders, args))
    if args.results:
        results.append(args.results, [{**line, **facts.facts()} for line in lines])
    sys.exit(lines[-1]["value"] != lines[-1]["of"])


if __name__ == "__main__":
    main()
