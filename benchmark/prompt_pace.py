"""What pacing prompts beside decode steps costs and gains, in virtual time.

    python -m benchmark.prompt_pace
    python -m benchmark.prompt_pace --chunks 0 512 2048 8192 --scenarios clients-64

The real scheduler, with clients as in benchmark/served.py, and a runner that takes as long as an
H200 with Nemotron-Nano-9B-v2's geometry, as a CPU with the embedded model, or as an H100 and two
pipeline stages of them (lib/virtual.py, lib/virtual_stages.py).
Nothing is computed, so a row takes half a second. Times are in ms; a chunk of 0 is paced.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmark.lib.served import Scenario, Summary, scenarios
from benchmark.lib.virtual import (
    CPU,
    H200,
    H200_FP8,
    H200_PLAIN,
    Costs,
    VirtualRunner,
    VirtualServer,
    play,
    play_arrivals,
    ready,
)
from benchmark.lib.virtual_stages import H100_STAGES, StageCosts, VirtualStages
from mamba_eagle.config import EngineConfig

LOADS = (  # clients, tokens of a prompt, of an answer
    (64, 256, 128),
    (64, 16, 256),
    (64, 512, 128),
    (64, 2048, 128),
    (16, 8192, 256),
    (8, 512, 128),
)
HEADER = (
    f"{'':>24} {'chunk':>6} {'tokens/s':>9} {'TTFT p50':>9} {'p99':>6} "
    f"{'between p50':>11} {'p99':>7} {'p99/p50':>7}"
)


@dataclass
class Setup:
    """A server and its clients; those of ``streams`` are beside the scenario's, and shown."""

    name: str
    costs: Costs
    scenario: Scenario
    streams: Scenario | None = None
    rate: float = 0.0  # of arrivals per second, of one request each; 0: all begin at once

    @property
    def stages(self) -> int:
        return 2 if isinstance(self.costs, StageCosts) else 1


def setups(requests: int) -> Iterator[Setup]:
    by_name = {scenario.name: scenario for scenario in scenarios(requests)}
    for scenario in by_name.values():
        scenario.vocab_size = 131_072
    noisy = replace(H200, jitter=0.05)
    for name in ("clients-64", "clients-8", "clients-128", "prefixes", "chats"):
        yield Setup(name, noisy, by_name[name])
    streams = replace(by_name["clients-64"], name="streams", clients=16, input_len=128)
    yield Setup("16 beside long", noisy, replace(by_name["long"], requests=2), streams)
    many = by_name["clients-64"]
    yield Setup("inputs-2048", noisy, replace(many, input_len=2048))
    yield Setup("launches-30-ms", replace(noisy, launch_pass=0.03, launch_jitter=1.0), many)
    yield Setup("plain-64", replace(H200_PLAIN, jitter=0.05), many)
    yield Setup("fp8-64", replace(H200_FP8, jitter=0.05), many)
    for rate in (5, 30):
        come = replace(many, name="arrivals", clients=400, requests=1)
        yield Setup(f"{rate}-per-second", noisy, come, rate=rate)
    yield Setup("cpu-8", replace(CPU, jitter=0.05), by_name["clients-8"])
    for clients, inputs, outputs in LOADS:
        name = f"{clients} of {inputs}, {outputs}"
        asked = replace(many, name=name, clients=clients, input_len=inputs, output_len=outputs)
        yield Setup(f"{name}, one", H100_STAGES.alone(), asked)
        yield Setup(f"{name}, two", H100_STAGES, asked)


def measure(setup: Setup, chunk: int) -> Summary:
    """Warmed up with one request per client, unless they come at random. chunk: 0: paced."""
    clients = [each for each in (setup.streams, setup.scenario) if each is not None]
    places = 64 if setup.rate else sum(each.clients for each in clients)
    room = ready(places) if setup.costs.overlaps else ready(places, 65_536, 256, 1024)
    config = EngineConfig(
        model_path="virtual",
        max_running_requests=places,
        chunked_prefill_size=min(chunk, room.chunked_prefill_size) or None,
        speculative_algorithm="STANDALONE" if setup.costs.tokens > 1 else "NONE",
        speculative_eagle_topk=3,
        speculative_adaptive=False,
    )
    room.cohorts = setup.stages
    runner = VirtualStages if setup.stages > 1 else VirtualRunner
    server = VirtualServer(setup.costs, config, room, runner)
    if setup.rate:
        return play_arrivals(server, setup.scenario, setup.rate)
    play(server, *(replace(each, name=f"{each.name} before", requests=1) for each in clients))
    return play(server, *clients)[0]


def row(name: str, chunk: int, found: Summary) -> str:
    size = str(chunk) if chunk else "paced"
    return (
        f"{name:>24} {size:>6} {found.tokens_per_second:>9.0f} {found.first_token_p50:>9.0f} "
        f"{found.first_token_p99:>6.0f} {found.inter_token_p50:>11.2f} "
        f"{found.inter_token_p99:>7.2f} {found.inter_token_p99 / found.inter_token_p50:>7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=6, help="of each client")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8192, 0])
    parser.add_argument("--scenarios", nargs="+", help="default: all")
    args = parser.parse_args()
    print(HEADER)
    for setup in setups(args.requests):
        if not args.scenarios or setup.name in args.scenarios:
            for chunk in args.chunks:
                print(row(setup.name, chunk, measure(setup, chunk)), flush=True)


if __name__ == "__main__":
    main()
