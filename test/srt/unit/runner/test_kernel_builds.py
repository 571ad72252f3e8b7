"""Kernels that are built before a server is ready: all that serving can need.

Without a GPU nothing can be launched. But which kernels a launch asks for can be seen anywhere: a
dry run takes each launch as done. So a runner warms up, then serves a mixed load, and must not ask
for any kernel that it did not ask for before.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from runner_harness import Engine, Live, Settings, greedy, random_prompt, sampled
from test_runner_graphs import LikeGpu, without_graphs
from tiny_model import GPU_DELTA_SIZES, write_delta_model, write_head, write_model

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mamba_eagle.backend.triton import attention, exact_products, experts
from mamba_eagle.backend.triton.backend import TritonBackend
from mamba_eagle.backend.triton.builds import (
    Build,
    DryRun,
    KernelBuilds,
    compile_build,
    dry_run,
)
from mamba_eagle.backend.triton.exact_backend import ExactBackend
from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.kernels.delta_rule import triton as delta
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.float8 import gluon as float8_gluon
from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.kernels.four_bit import gluon as four_bit_gluon
from mamba_eagle.kernels.four_bit import gluon_batches as four_bit_batches
from mamba_eagle.kernels.four_bit import triton as four_bit
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.prefill_plan import Prompt, prefill_plan
from mamba_eagle.kernels.prompt_attention import gluon as prompt_attention
from mamba_eagle.kernels.recurrence import gluon_prompts as recurrence_prompts
from mamba_eagle.kernels.recurrence import gluon_verify as recurrence
from mamba_eagle.kernels.tree_verify import gluon as tree_gluon
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.layers.adapters import AdapterSize, reading
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.block_attention import block_mask
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.mlp import GatedMLP
from mamba_eagle.layers.moe import LatentMoE
from mamba_eagle.message import PrefillItem
from mamba_eagle.model_config import AttentionConfig, MoEConfig
from mamba_eagle.runner import loading
from mamba_eagle.runner.compilations import Compilations
from mamba_eagle.tree.shapes import step_shapes

STEPS = 25
TREE = Settings(topk=3, steps=3, nodes=8, fused=False)
SETTINGS = {
    "eagle": TREE,
    "standalone-snapshot": TREE._replace(algorithm="STANDALONE", scheme="snapshot"),
    "delta-rule": TREE._replace(algorithm="NONE"),
    "exact": TREE,
    "exact-delta-rule": TREE._replace(algorithm="NONE"),
    "adapters": TREE,
}


class NoDevice:
    """As far as Triton asks before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton believes that there is one."""
    if torch.cuda.is_available():
        pytest.skip("e2e/test_gpu_server.py counts real compilations")
    driver.set_active(NoDevice())
    backend = TritonBackend(LikeGpu(), torch.float32, flashinfer=False)
    monkeypatch.setattr(loading, "choose_backend", lambda *_: backend)
    without_graphs(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """The least that the kernels take, and what drafts for it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_model(
        folder / "model", hybrid_override_pattern="M*-", mamba_head_dim=16, mamba_num_heads=2,
        n_groups=1,
    )  # fmt: skip
    head = write_head(folder / "head", model)
    delta = write_delta_model(folder / "delta", **GPU_DELTA_SIZES)
    return {
        "model": model, "EAGLE": head, "STANDALONE": model, "NONE": None,
        "delta-rule": delta, "exact-delta-rule": delta,
    }  # fmt: skip


class Load:
    """Requests of all kinds that come and go. No kernel runs, so their tokens mean nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.random = engine, random.Random(1)
        self.live: list[Live] = []
        self.shapes = step_shapes(engine.shape, adaptive=True)

    def step(self, number: int) -> None:
        engine, rng = self.engine, self.random
        new = [self.admit(number) for _ in range(rng.randint(0, 3)) if engine.free_slots]
        items: list[PrefillItem] = []
        for live in new:
            length = len(live.tokens)
            items.append(engine.chunk(live, length, saves=(length // 2,)))
        decode = self.live[: rng.randint(0, len(self.live))]
        untrack = self.live[:1] if rng.random() < 0.2 else None
        shape = rng.choice(self.shapes)
        engine.execute(prefill=items, decode=decode or None, shape=shape, untrack=untrack)
        self.live += new
        while self.live and (not engine.free_slots or rng.random() < 0.4):
            live = self.live.pop(0)
            engine.release(live, fold_to=len(live.kv) if rng.random() < 0.5 else -1)

    def admit(self, number: int) -> Live:
        rng = self.random
        prompt = random_prompt(rng.choice([1, 2, 5, 16, 40, 64, 65, 90]), number)
        slot = rng.randrange(-1, self.engine.runner.adapters.num_slots)
        if rng.random() < 0.5:
            asked = {"return_logprob": True, "top_logprobs": 3, "adapter": slot}
            return self.engine.admit(prompt, greedy(20), **asked)
        stops = list(range(3, 3 + rng.randint(1, 40)))
        limits = {"top_k": rng.choice([-1, 5]), "repetition_penalty": rng.choice([1.0, 1.2])}
        return self.engine.admit(
            prompt, sampled(20, number, stop_token_ids=stops, **limits), adapter=slot
        )


def names(builds: set[Build]) -> list[str]:
    return [f"{build.name}: {build.data}" for build in sorted(builds)]


def test_what_was_compiled_before_is_not_launched_in_a_dry_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[bool] = []
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, grid, warmup, **options: launched.append(not warmup)
    )
    x = torch.zeros(2, 8)
    with dry_run():
        gated_norm(x, x, x[0], 1, 1e-5)
    gated_norm(x, x, x[0], 1, 1e-5)
    assert launched == [False, True]


def test_a_default_device_holds_for_all_constructors_after_a_dry_run() -> None:
    """torch lists them once, when a default device first matters."""
    known = torch.utils._device._device_constructors
    known.cache_clear()  # as in a process that has not had one
    with dry_run(), torch.device("meta"):
        torch.ones(1)
    with torch.device("meta"):
        assert torch.empty(1).is_meta and torch.empty_like(torch.zeros(1)).is_meta
    assert torch.empty in known()


@triton.autotune([triton.Config({}, num_warps=warps) for warps in (1, 2)], key=[])
@triton.jit
def _doubled(x):
    tl.store(x, 2 * tl.load(x))


def test_all_forms_of_a_kernel_that_is_tuned_are_built(hopper: None) -> None:
    with dry_run() as run:
        _doubled[(1,)](torch.ones(1))
    assert len(run.builds) == 2 and not _doubled.cache  # nothing was timed, so nothing is chosen
    for build in run.builds:
        compile_build(build)


@triton.jit
def _copied(x, y):
    y.store([0, 0], x.load([0, 0]))


def test_a_kernel_is_looked_up_once_for_each_kind_of_arguments(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[object] = []
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *a, **o: looked_up.append(self) or run(self, *a, **o)
    )

    def blocks(size: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(torch.zeros(64, 64), [size, size])

    with dry_run() as found:
        for size in (16, 16, 32, 16):
            _copied[(1,)](blocks(size), blocks(size))
    assert len(looked_up) == len(found.builds) == 2


@pytest.mark.parametrize("rows, window, causal", [(5, 0, True), (8, 3, False), (70, 66, False)])
def test_what_a_block_sees_is_known_after_a_dry_run(rows: int, window: int, causal: bool) -> None:
    """It is kept for all steps, those of the dry run included."""
    attention._block_masks.cache_clear()
    case = (2, rows, window, causal, torch.device("cpu"))
    with dry_run():
        attention._block_masks(*case)
    masks = attention._block_masks(*case)
    seen = masks.repeat_interleave(64, 2) >> torch.arange(64).repeat(masks.shape[2]) & 1
    wanted = torch.zeros(rows, seen.shape[2], dtype=torch.int64)
    wanted[:, :rows] = block_mask(rows, window, causal)
    assert torch.equal(seen, wanted.expand(2, -1, -1))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mixed_load_asks_for_no_kernel_that_the_start_did_not(
    hopper: None, folders: dict[str, Path | None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exact := name.startswith("exact"):
        monkeypatch.setattr(exact_products, "forbid_partial_sums", lambda: None)
        backend = ExactBackend(LikeGpu(), torch.bfloat16)
        monkeypatch.setattr(loading, "choose_backend", lambda *_: backend)
    settings, model = SETTINGS[name], folders.get(name, folders["model"])
    assert model is not None
    with dry_run() as run:
        engine = Engine(
            model, folders[settings.algorithm], settings, max_running_requests=4,
            max_mamba_cache_size=300, max_total_tokens=6000, exact=exact,
            max_loras=2 if name == "adapters" else None,
        )  # fmt: skip
        engine.overwrites = False
        known, graphs = set(run.builds), engine.runner.steps.num_graphs
        assert len(known) > 20 and graphs > 5
        load = Load(engine)
        for number in range(STEPS):
            load.step(number)
        assert names(set(run.builds) - known) == []
        assert engine.runner.steps.num_graphs == graphs and engine.runner.num_compiled == 0


def test_rows_with_adapters_ask_for_no_other_kernels_of_experts(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shared experts run apart, for any number of tokens."""
    monkeypatch.setattr(experts, "capability", lambda device: (9, 0))
    cpu, ops, size = torch.device("cpu"), TritonOps(), 64
    layer = LatentMoE(MoEConfig(8, 2, 32, 32), size, bias=False).bfloat16().requires_grad_(False)
    prepare_for_inference(layer, ops)
    assert layer.experts.fused is not None and layer.experts.fused.shared
    down = layer.shared_experts.down_proj
    down.additions = ops.additions([AdapterSize(1, 16, 32, size, 0)], torch.bfloat16, cpu)
    with dry_run() as run:
        for tokens in (1, *down.additions.sizes):
            down.additions(
                torch.zeros(tokens, size).bfloat16(),
                torch.zeros(tokens, 32).bfloat16(),
                torch.zeros(tokens, dtype=torch.int64),
            )
        layer.rehearse(cpu)
        known = set(run.builds)
        for tokens in (1, 2, 20, 40, 64, 65, 300):
            with reading(torch.zeros(tokens, dtype=torch.int64)):
                layer(torch.zeros(tokens, size).bfloat16())
        assert names(set(run.builds) - known) == []


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_products_of_several_projections_ask_for_no_kernel_that_they_did_not_rehearse(
    hopper: None, kind: str
) -> None:
    """Even if no other layer's product has a bias, or as many rows."""
    cpu, size = torch.device("cpu"), 64
    layer: Layer
    if kind == "mlp":
        layer = GatedMLP(size, 1024, bias=True)
    else:
        layer = Attention(AttentionConfig(64, 32, 16, bias=True), size, 0, 1e-5)
    prepare_for_inference(layer.bfloat16().requires_grad_(False), TritonOps())
    joined = layer.products[0] if isinstance(layer, GatedMLP) else layer.qkv
    assert joined is not None
    with dry_run() as run:
        layer.rehearse(cpu)
        known = set(run.builds)
        for tokens in (1, 2, 20, 40, 64, 65, 300):
            joined(torch.zeros(tokens, size).bfloat16())
        assert names(set(run.builds) - known) == [] and known


OVERLOADS = """
import gc, sys, tempfile
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from runner_harness import Settings, write_tiny
from test_kernel_builds import Load
from mamba_eagle.runner.compilations import Compilations
from mamba_eagle.kernels.gated_norm.triton import gated_norm

def overloads():
    found = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
    return {(each.py_func.__qualname__, str(s)) for each in found for s in each.signatures}

tiny = write_tiny(Path(tempfile.mkdtemp()))
engine = tiny.engine(Settings(topk=3, steps=3, nodes=8), max_mamba_cache_size=300)
known, seen, load = overloads(), Compilations(), Load(engine)
assert len(known) > 10
for number in range(15):
    load.step(number)
assert not overloads() - known, sorted(overloads() - known)
assert seen.count == 0 and engine.runner.num_compiled == 0
"""


def test_a_cpu_compiles_nothing_after_its_start() -> None:
    """Not even from Numba's cache; in a process that has run nothing else."""
    here = Path(__file__).parent
    path = os.pathsep.join(
        [str(here), str(here.parents[1] / "rigs"), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-c", OVERLOADS]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert Path(knobs.cache.dir) == tmp_path
    yield tmp_path


def launch_noise() -> None:
    from mamba_eagle.kernels.sampling_noise.triton import gumbel

    gumbel(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 64)


def test_what_a_dry_run_finds_is_compiled_once(
    hopper: None, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a process of its own, for a device that is not there; a second start looks no further than
    at the note."""
    builds = KernelBuilds("a model", processes=1)
    builds.build(launch_noise)
    (machine_code,) = cache.glob("*/*.cubin")
    assert machine_code.name == "_gumbel_kernel.cubin"
    again = KernelBuilds("a model", processes=1)
    assert again.builders is None
    again.build(lambda: pytest.fail("there is nothing to rehearse"))
    other = KernelBuilds("another model", processes=1)
    assert other.builders is not None
    run = DryRun()
    run.builds[Build("nowhere", "kernel", "{}", ("cuda", 90, 32))] = None
    assert other.builders.build(run) == 1
    assert "not built ahead: kernel: " in caplog.text, "the launch will raise it"
    assert [process.returncode for process in other.builders.processes] == [0]


def small_tree() -> tuple[RowBuffers, TreeLayout, Sizes]:
    sizes, b, T, M = Sizes(heads=2, head_dim=32, groups=1, state_size=32), 1, 5, 12
    H, P, G, N = sizes
    numbers, some = torch.zeros(b, M + T, H), torch.zeros(b, dtype=torch.int64)
    rows = RowBuffers(torch.zeros(b, M + T, H * P + G * N).bfloat16(), numbers, numbers)
    nodes, path = torch.zeros(b, T, dtype=torch.int64), torch.zeros(b, M, dtype=torch.int64)
    step = TreeLayout(some, some, path, some, nodes, nodes, nodes, path, some != 0, some)
    return rows, step, sizes


def verify_in_registers() -> None:
    rows, step, sizes = small_tree()
    C, D, state = rows.xB[:, :5, -32:], rows.dt[0, 0], torch.zeros(1, 2, 32, 32)
    tree_gluon.tree_verify(rows, C, D, state.bfloat16(), step, sizes)


def verify_token_by_token() -> None:
    rows, step, sizes = small_tree()
    C, D, state = rows.xB[:, :5, -32:].contiguous(), rows.dt[0, 0], torch.zeros(1, 2, 32, 32)
    recurrence.tree_verify(rows, C, D, D, state, step, sizes)


def scan_token_by_token() -> None:
    xbc, dt, state = torch.zeros(16, 128).bfloat16(), torch.zeros(16, 2), torch.zeros(1, 2, 32, 32)
    x, B, C = (part.view(16, -1, 32) for part in xbc.split([64, 32, 32], dim=1))
    plan = prefill_plan([Prompt(0, 16, 0, ((16, 0),))])
    recurrence_prompts.scan(x, dt, dt[0], B, C, dt[0], state, plan)


def four_bit_weight() -> four_bit.Weight:
    codes, scale = torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 8)
    parts = (codes, scale.to(torch.float8_e4m3fn), None, torch.ones(1, 1))
    return four_bit.weight_of(*parts, torch.bfloat16)


def multiply_in_registers() -> None:
    four_bit_gluon.product(torch.zeros(3, 128).bfloat16(), four_bit_weight(), None)


def multiply_by_warp_groups() -> None:
    for n in (65, 72):  # one kernel, and one that puts columns in order
        four_bit_batches.product(torch.zeros(n, 128).bfloat16(), four_bit_weight(), None)


def multiply_blocks_in_registers() -> None:
    x = Rounded(torch.zeros(3, 256).to(torch.float8_e4m3fn), torch.zeros(3, 2), 128)
    weight = torch.zeros(5120, 256).to(torch.float8_e4m3fn)
    operands = x, weight, torch.zeros(40, 2), None, torch.bfloat16, (128, 128)
    float8_gluon.product(*operands, torch.empty(0))


def verify_few_nodes() -> None:
    step, sizes = (
        small_tree()[1]._replace(rows=torch.zeros(1, 4, dtype=torch.int64)),
        (2, 64, 1, 64),
    )
    rows = DeltaRows(torch.zeros(1, 16, 4), torch.zeros(1, 16, 64), torch.zeros(1, 16, 128))
    convolved, state = torch.zeros(1, 4, 256).bfloat16(), torch.zeros(1, 2, 64, 64)
    delta.tree_verify(rows, rows.gates[0], convolved, state, step, Sizes(*sizes), 1e-6)


def attend_by_warp_groups() -> None:
    q, keys = torch.zeros(8, 4, 256).bfloat16(), torch.zeros(128, 2, 256).bfloat16()
    for _ in range(2):  # one kernel
        tiles = torch.zeros(1, 4, dtype=torch.int32)
        prompt_attention.prompt_attention(q, keys, keys, tiles, 1.0)


@pytest.mark.parametrize(
    "module, launch, kernels",
    [
        (tree_gluon, verify_in_registers, 1),
        (delta.gluon, verify_few_nodes, 1),
        (float8_gluon, multiply_blocks_in_registers, 1),
        (prompt_attention, attend_by_warp_groups, 1),
        (four_bit_gluon, multiply_in_registers, 1),
        (four_bit_batches, multiply_by_warp_groups, 2),
        (recurrence, verify_token_by_token, 1),
        (recurrence_prompts, scan_token_by_token, 1),
    ],
)
def test_a_kernel_in_registers_compiles(
    hopper: None,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    launch: Callable[[], None],
    kernels: int,
) -> None:
    """Nothing but a GPU can run it; Triton's version decides whether it compiles."""
    monkeypatch.setattr(module, "capability", lambda _: (9, 0), raising=False)
    with dry_run() as run:
        launch()
    builds = [build for build in run.builds if build.module == module.__name__]
    for build in builds:
        compile_build(build)
    assert len(builds) == len(list(cache.glob("*/*.cubin"))) == kernels


def test_a_kernel_that_is_compiled_late_is_counted(hopper: None, cache: Path) -> None:
    with dry_run() as run:
        launch_noise()
    (build,) = run.builds
    assert json.loads(build.data)["options"]["num_warps"] == 4
    seen = Compilations()
    assert seen.count == 0
    compile_build(build)
    assert seen.names == ["_gumbel_kernel"]
    knobs.compilation.listener = None
