"""What drafting costs on a GPU: a step's time and the part of it that drafting takes, by drafter.

    python -m benchmark.draft_share --results benchmark/results/gpu.jsonl

Random weights of the target's geometry, and drafters of published shapes at its width; the
acceptance length is forced, so that all of a step is done although no draft is right. A step is
the runner's, from the plan to the end of its work. Drafting is timed by itself, as a captured
graph, on requests in the middle of their output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mamba_eagle.bench import experts, facts, results
from mamba_eagle.bench.batch import BatchEngine, greedy, sized_for
from mamba_eagle.bench.one_batch import release_memory
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import PLAIN
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner
from mamba_eagle.runner.model_runner import ModelRunner

MODELS = Path(__file__).parent / "models"
INPUT, OUTPUT, ACCEPTED = 256, 96, 3.0
REPLAYS = 50
SHAPES = {8: {"topk": 3, "nodes": 8}, 16: {"topk": 4, "nodes": 16}}


class Candidate(NamedTuple):
    algorithm: str
    folder: str  # "": the target's
    depth: int


CANDIDATES = {
    "EAGLE": Candidate("EAGLE", "eagle-head", 5),
    "MTP": Candidate("MTP", "", 5),
    "STANDALONE": Candidate("STANDALONE", "llama-2-layers", 5),
    "DFLASH": Candidate("DFLASH", "dflash-6-layers", 7),
    "DSPARK": Candidate("DSPARK", "dspark-6-layers", 7),
}


OF_ANY_TARGET = [name for name, candidate in CANDIDATES.items() if candidate.folder]


class Target(NamedTuple):
    folder: str
    bits: str
    routing: str  # of experts
    layers: int = 0  # its first ones; 0: all

    def config(self) -> dict[str, Any]:
        whole = read_config(self.folder)
        if self.layers:
            whole["num_hidden_layers"] = self.layers
            for name in ("hybrid_override_pattern", "layers_block_type"):
                if name in whole:
                    whole[name] = whole[name][: self.layers]
        return whole


def read_config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / folder / "config.json").read_text())
    return config


def written(config: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drafter_for(whole: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config.json of a drafter of the target's width, vocabulary and layers."""
    own = read_config(folder)
    own["vocab_size"] = whole["vocab_size"]
    if (block := own.get("dflash_config")) is not None:
        taps, layers = len(block["target_layer_ids"]), whole["num_hidden_layers"]
        block["target_layer_ids"] = [layers * tap // taps for tap in range(taps)]
    if folder != CANDIDATES["STANDALONE"].folder:
        own["hidden_size"] = whole["hidden_size"]
    return own


def engine_config(
    target: Target, name: str, nodes: int, batches: list[int], bits: str, room: Path
) -> EngineConfig:
    whole = target.config()
    config = EngineConfig(
        model_path=written(whole, room / "target"),
        load_format="dummy",
        device="cuda",
        quantization=target.bits,
        chunked_prefill_size=8192,
        speculative_algorithm="NONE",
    )
    if name in CANDIDATES:
        candidate, shape = CANDIDATES[name], SHAPES[nodes]
        path = config.model_path
        if candidate.folder:
            path = written(drafter_for(whole, candidate.folder), room / "drafter")
        config = dataclasses.replace(
            config,
            speculative_algorithm=candidate.algorithm,
            speculative_draft_model_path=path,
            speculative_num_steps=candidate.depth,
            speculative_eagle_topk=shape["topk"],
            speculative_num_draft_tokens=nodes,
            speculative_draft_model_quantization=bits,
        )
    return sized_for(resolve(config), max(batches), INPUT + OUTPUT)


@torch.inference_mode()
def draft_seconds(runner: ModelRunner, batch: int) -> float:
    """Seconds of ``propose`` alone for the first ``batch`` request slots, as a graph."""
    step, shape, place = runner.step, runner.config.tree_shape, runner.backend.place
    slots = place.to_device(range(batch))
    kv_slots = slots.new_full((batch, shape.nodes), runner.kv.padding_slot)
    part = step.drafter.prepare(list(range(batch)), shape)

    def draft() -> Any:
        return step.draft(slots, kv_slots, part, None)

    draft()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPLAYS


def measure(
    target: Target, name: str, nodes: int, batches: list[int], bits: str
) -> list[dict[str, Any]]:
    """bits: how the drafter's weights are kept."""
    with tempfile.TemporaryDirectory() as room:
        config = engine_config(target, name, nodes, batches, bits, Path(room))
        if config.tree_shape != PLAIN:
            config = dataclasses.replace(config, simulate_acc_len=ACCEPTED)
        runner = make_runner(config)
    assert isinstance(runner, ModelRunner)
    if runner.model.config.moe is not None:
        experts.watch(runner, target.routing)
    engine, found = BatchEngine(config, runner), []
    for batch in batches:
        prompts = synthetic_prompts(config, engine.ready.vocab_size, batch, INPUT)
        engine.generate(prompts, greedy(8))
        made = engine.generate(prompts, greedy(OUTPUT))
        drafting = 0.0
        if config.tree_shape != PLAIN:
            run = engine.start(prompts, greedy(OUTPUT))
            drafting = draft_seconds(runner, batch)
            run.finish()
        step = made.median_decode_latency
        found.append(
            {
                "name": "draft_share",
                "model": target.folder,
                "layers": target.layers or None,
                "quantization": target.bits,
                "drafter": name,
                "drafter_quantization": bits,
                "nodes": nodes,
                "batch": batch,
                "step_ms": round(step * 1e3, 3),
                "draft_ms": round(drafting * 1e3, 3),
                "share": round(drafting / step, 4),
                "accept_length": round(made.accept_length, 3),
            }
        )
        print(row(found[-1]), flush=True)
    return found


def row(line: dict[str, Any]) -> str:
    return (
        f"{line['drafter']:<11}{line['drafter_quantization']:<7}{line['nodes']:>6}{line['batch']:>7}{line['step_ms']:>10.3f}"
        f"{line['draft_ms']:>10.3f}{100 * line['share']:>8.1f} %{line['accept_length']:>10.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="nemotron-nano-9b-v2", help="in benchmark/models")
    parser.add_argument("--layers", type=int, default=0, help="of the target, the first ones")
    parser.add_argument("--quantization", default="auto", help="of the target")
    parser.add_argument("--dummy-routing", choices=("model", "uniform", "same"), default="uniform")
    parser.add_argument("--drafters", nargs="+", default=OF_ANY_TARGET, choices=CANDIDATES)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--bits",
        nargs="+",
        default=["auto"],
        choices=("auto", "fp8", "nvfp4", "none"),
        help="kinds of the drafter's weights",
    )
    parser.add_argument("--results", default="", help="append one JSON line per number")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: needs a CUDA GPU")
    machine = facts.facts("cuda")
    target = Target(args.model, args.quantization, args.dummy_routing, args.layers)
    print(
        f"{'drafter':<11}{'bits':<7}{'nodes':>6}{'batch':>7}{'step ms':>10}{'draft ms':>10}", end=""
    )
    print(f"{'share':>10}{'accepted':>10}")
    cases = [("NONE", 1, "auto")]
    cases += [(each, n, bits) for each in args.drafters for n in args.nodes for bits in args.bits]
    for name, nodes, bits in cases:
        release_memory()
        lines = measure(target, name, nodes, args.batch_size, bits)
        if args.results:
            results.append(args.results, [{**line, **machine} for line in lines])


if __name__ == "__main__":
    main()
