"""What is wrong with a folder is said by name, before anything of it is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_rig import PREFIX, Served, module_names, write_adapter, write_tensors
from runner_harness import Settings, greedy, random_prompt
from safetensors.torch import load_file
from tiny_model import write_model

from mamba_eagle.lora.peft import AdapterError, PeftFolder
from mamba_eagle.message import Generate
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.runner.assemble import assemble

torch.set_num_threads(1)
MIXER = "backbone.layers.0.mixer.in_proj"
A, B = (f"{PREFIX}{MIXER}.lora_{side}.weight" for side in "AB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> OfflineEngine:
    config = Settings("NONE").config(model, None, max_loras=2, max_lora_rank=8)
    return OfflineEngine(config, assemble(config))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model, 0, 4)


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        change(tensors)
        write_tensors(folder, tensors, **config)

    return apply


def configured(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


def too_deep(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r":' + "[" * 100_000)


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return changed(lambda tensors: tensors.update({new: tensors.pop(old)}))


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "no-config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "no-object": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "JSON object"),
    "too-deep": (too_deep, "is not valid JSON"),
    "pickled": (pickled, "files of pickled objects are not read"),
    "truncated": (truncated, "copy or download it again"),
    "no-tensors": (changed(dict.clear), "has no tensor"),
    "another-kind": (configured(peft_type="LOHA"), 'peft_type = "LOHA": must be LORA'),
    "half-of-a-pair": (configured(peft_type="\ud800"), r'peft_type = "\ud800": must be LORA'),
    "dora": (configured(use_dora=True), "use_dora = true: DoRA"),
    "whole-modules": (configured(modules_to_save=["lm_head"]), "modules_to_save"),
    "routed-experts": (
        configured(target_parameters=["mlp.experts.gate_up_proj"]),
        "routed experts take no adapter",
    ),
    "bias": (configured(bias="lora_only"), 'bias = "lora_only"'),
    "no-rank": (configured(r=None), "r = null: must be a number above 0"),
    "no-alpha": (configured(lora_alpha="many"), 'lora_alpha = "many"'),
    "too-large-alpha": (configured(lora_alpha=10**400), "lora_alpha = "),
    "pattern": (configured(rank_pattern={"(": 3}), "rank_pattern"),
    "pattern-with-flags": (configured(rank_pattern={"(?i)in_proj": 3}), "rank_pattern"),
    "pattern-of-one-library": (configured(rank_pattern={r"\p{Foo}": 3}), "rank_pattern"),
    "pattern-without-end": (
        configured(alpha_pattern={r"(\w|\w|.)+\3\3\3\d": 3}),
        f"{MIXER}: a pattern of adapter_config.json takes too long",
    ),
    "another-rank": (configured(r=3), "4 in A"),
    "integers": (changed(lambda t: t.update({A: t[A].int()})), "dtype of"),
    "a-vector": (changed(lambda t: t.update({A: t[A][0]})), "is not that of a matrix"),
    "not-finite": (changed(lambda t: t[B].fill_(float("nan"))), "not all numbers are finite"),
    "half-a-pair": (changed(lambda t: t.pop(B)), f"missing: lora_B of {MIXER}"),
    "another-shape": (
        changed(lambda t: t.update({B: t[B][:-1].contiguous()})),
        f"shape of {MIXER}: ",
    ),
    "a-foreign-module": (renamed(A, A.replace("layers.0", "layers.99")), "missing: lora_A"),
    "a-foreign-name": (renamed(A, "lora_A"), "lora_A: must be base_model.model.MODULE"),
    "an-embedding": (
        changed(
            lambda t: t.update({
                name.replace(MIXER, "lm_head"): t.pop(name)
                for name in (A, B)
            })
        ),
        "unexpected: lm_head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_refused_by_name(engine: OfflineEngine, folder: Path, name: str) -> None:
    spoil, message = WRONG[name]
    spoil(folder)
    served = Served(engine, [engine.runner])
    problem = served.load("wrong", folder)
    assert message in problem and str(folder) in problem
    served.settle()
    assert not engine.runner.adapters._kept and served.scheduler.of("wrong") is None


def test_a_rank_above_the_slots_is_refused(
    engine: OfflineEngine, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", model, 0, 9)
    assert "larger --max-lora-rank" in Served(engine, [engine.runner]).load("a", folder)


def test_scales_and_ranks_of_single_modules(folder: Path) -> None:
    """As PEFT has them: by the end of a name, or a pattern; rsLoRA divides by the root."""
    plain = PeftFolder(str(folder)).read()
    configured(alpha_pattern={"in_proj": 2}, use_rslora=True)(folder)
    given = PeftFolder(str(folder)).read()
    torch.testing.assert_close(given[MIXER].up, plain[MIXER].up * (2 / 2) / 2)
    other = "backbone.layers.0.mixer.out_proj"
    torch.testing.assert_close(given[other].up, plain[other].up * (8 / 2) / 2)
    configured(rank_pattern={"in_proj": 3})(folder)
    with pytest.raises(AdapterError, match=f"rank of {MIXER}: 4 in A"):
        PeftFolder(str(folder))


def test_a_server_without_slots_loads_none(model: Path, folder: Path) -> None:
    config = Settings("NONE").config(model, None)
    engine = OfflineEngine(config, assemble(config))
    assert "--max-loras" in Served(engine, [engine.runner]).load("a", folder)
    assert engine.runner.adapters.nbytes == 0


def test_loads_and_unloads_leave_nothing(
    engine: OfflineEngine, model: Path, tmp_path: Path
) -> None:
    """Beside requests, in any order: what is kept are those with a name."""
    served, rng = Served(engine, [engine.runner]), random.Random(3)
    some = module_names(model)[:3]
    folders = [write_adapter(tmp_path / f"{i}", model, i, 2, some) for i in range(3)]
    names: set[str] = set()
    for turn in range(60):
        name = f"a{rng.randrange(5)}"
        if rng.random() < 0.6:
            assert served.load(name, rng.choice(folders)) == ""
            names.add(name)
        elif name in names:
            assert served.unload(name) == ""
            names.remove(name)
        if names:
            params, chosen = greedy(rng.choice([2, 9])), rng.choice(sorted(names))
            prompt = random_prompt(4, turn)
            engine.add(Generate(rid=f"{turn}", token_ids=prompt, sampling=params, adapter=chosen))
        for _ in range(rng.randrange(4)):
            engine.step()
        served.settle()
        engine.scheduler.check_integrity()
    while not engine.idle:
        engine.step()
    served.settle()
    numbers = {served.scheduler.of(name).number for name in names}  # type: ignore[union-attr]
    assert set(engine.runner.adapters._kept) == numbers
    for name in names:
        assert served.unload(name) == ""
    served.settle()
    assert not engine.runner.adapters._kept
