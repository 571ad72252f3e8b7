"""A model whose weights are replaced in their places is one that starts with the new ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_rig import runner_of
from derived_weights import Seen, made_of_weights, texts, weights_in
from peer_models import make_peer
from published import write_published
from rollout_rig import shaken
from safetensors.torch import load_file, save_file
from tensor_checks import torch_path
from tiny_model import write_delta_model, write_model
from torch import Tensor

from mamba_eagle.backend.place import Host
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.layers.layer import Layer, per_layer
from mamba_eagle.message import Generate
from mamba_eagle.models.loader import stored_tensors
from mamba_eagle.models.staging import PIECE, Staging
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.refill import tensors_in
from mamba_eagle.runner.renewal import Renewal, update_problems

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ["nemotron-3-nano", "qwen3-next", "lfm2"]  # stacked, fused, tied
HOST = Host()
STAGING = Staging(HOST.device, HOST.host_buffer, HOST.timestamp)


@per_layer
def doubled(layer: Layer) -> list[Tensor]:
    """What a kernel might keep."""
    return [2 * weight.detach() for weight in layer._parameters.values() if weight is not None]


def engine_of(folder: Path) -> OfflineEngine:
    values = {"max_total_tokens": 500, "speculative_algorithm": "NONE", "dtype": "bfloat16"}
    values["disable_radix_cache"] = True  # a scheduler empties it before
    config = resolve(EngineConfig(model_path=str(folder), device="cpu", **values))
    return OfflineEngine(config, assemble(config))


def tokens(engine: OfflineEngine) -> list[int]:
    sampling = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    engine.add(Generate(rid="one", token_ids=list(range(5, 60)), sampling=sampling))
    found: list[int] = []
    while not engine.idle:
        found += [token for output in engine.step() for token in output.token_ids]
    return found


def captured(runner: Any) -> Renewal:
    """As of a runner whose steps are graphs."""
    runner.parts = runner.parts._replace(captures=True)
    return Renewal(runner)


@pytest.mark.parametrize("family", FAMILIES)
def test_refilled_models_are_those_that_start_with_the_weights(family: str, tmp_path: Path) -> None:
    folders = [tmp_path / "A", tmp_path / "B"]
    for folder in folders:
        make_peer(family).to(torch.bfloat16).save_pretrained(folder)
    weights = load_file(folders[1] / "model.safetensors")
    shaken(weights)
    save_file(weights, folders[1] / "model.safetensors")
    engines = [engine_of(folder) for folder in folders]
    models = [engine.runner.model for engine in engines]
    for model in models:
        for layer in model.modules():
            if isinstance(layer, Layer):
                doubled(layer)
    before, wanted = (dict(tensors_in(model, "", set())) for model in models)
    places = {path: held.data_ptr() for path, held in before.items()}
    assert any("derived" in path for path in places)
    first, others = tokens(engines[0]), tokens(engines[1])

    renewal = captured(engines[0].runner)
    assert not renewal.change(weights_in(folders[1]), pytest.fail)
    assert renewal.runner is engines[0].runner
    assert renewal.config.model_path == str(folders[1])
    after = dict(tensors_in(models[0], "", set()))
    assert {path: held.data_ptr() for path, held in after.items()} == places
    for path, held in wanted.items():
        assert torch.equal(after[path], held), path
    assert tokens(engines[0]) == others != first
    assert not renewal.change(weights_in(folders[0]), pytest.fail)
    assert tokens(engines[0]) == first


FORMS = {
    "float32": {"dtype": "float32"},
    "fp8": {"quantization": "fp8", "quantize_lm_head": True},
    "stochastic": {"mamba_ssm_dtype": "bfloat16"},
    "two-ranks": {"tp_size": 2},
    "fp8-on-two-ranks": {"tp_size": 2, "quantization": "fp8"},
}


@pytest.mark.parametrize("kind", ["mamba2", "delta"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_runner_is_left_of_the_old_weights(
    form: str, kind: str, tmp_path: Path
) -> None:
    """Whatever refers to it, and in whatever form."""
    write = write_model if kind == "mamba2" else write_delta_model
    folders = [write(tmp_path / name, seed) for seed, name in enumerate("AB")]
    values = {"max_total_tokens": 500, "speculative_algorithm": "NONE", **FORMS[form]}
    values |= {"device": "cpu", "max_running_requests": 4}
    configs = [resolve(EngineConfig(model_path=str(each), **values)) for each in folders]
    with torch_path():
        runners = [runner_of(config) for config in configs]
        first, wanted = [Seen(*pair) for pair in zip(configs, runners)]
        ways = made_of_weights(first, wanted)
        assert len(ways) > 10 and first.texts != wanted.texts
        ranks = getattr(runners[0], "runners", runners[:1])
        renewals = [captured(runner) for runner in ranks]
        group = getattr(runners[0], "ranks", None)
        change = weights_in(folders[1])
        if group is None:
            assert not renewals[0].change(change, pytest.fail)
        else:
            assert group.run(lambda g: renewals[g.number].change(change, pytest.fail)) == ["", ""]
        assert [renewal.runner for renewal in renewals] == ranks
        after = Seen(configs[1], runners[0])
    assert after.texts == wanted.texts
    assert [way for way in ways if after.sums.get(way) != wanted.sums[way]] == []


def test_ranks_take_other_parts_of_weights_whose_scales_are_those_of_blocks(tmp_path: Path) -> None:
    """Of 80 channels 40 each, and then 32 and 48: the same model in other bits."""
    sizes = {"moe_intermediate_size": 80, "shared_expert_intermediate_size": 80}
    folders = [tmp_path / "plain", tmp_path / "blocks"]
    make_peer("qwen3-next", **sizes).save_pretrained(folders[0])
    write_published(folders[1], "qwen3-next", "fp8-block", **sizes)
    values = {"max_total_tokens": 500, "speculative_algorithm": "NONE", "max_running_requests": 4}
    values |= {"device": "cpu", "tp_size": 2}
    configs = [resolve(EngineConfig(model_path=str(each), **values)) for each in folders]
    with torch_path():
        ranks, wanted = (runner_of(config) for config in configs)
        expected = [texts(*pair, seed=1) for pair in zip(configs, (ranks, wanted))]
        assert expected[0] != expected[1]
        renewals = [captured(runner) for runner in ranks.runners]
        for number in (1, 0):
            change = weights_in(folders[number])
            done = ranks.ranks.run(lambda g, c=change: renewals[g.number].change(c, lambda: None))
            assert done == ["", ""]
            ranks.runners = [renewal.runner for renewal in renewals]
            assert texts(configs[number], ranks, seed=1) == expected[number]
    with_adapters = [replace(config, max_loras=2) for config in configs]
    (wrong,) = update_problems(with_adapters[1], with_adapters[0])
    assert "32 channels share a scale, and 1 do" in wrong and "parts of their adapters" in wrong
    assert not update_problems(*(replace(config, tp_size=1) for config in with_adapters))


def test_a_runner_is_replaced_whose_weights_have_no_places_of_their_own(tmp_path: Path) -> None:
    """Zamba2's layers share modules."""
    make_peer("zamba2").save_pretrained(tmp_path)
    runner = engine_of(tmp_path).runner
    renewal = captured(runner)
    assert not renewal.change(weights_in(tmp_path), lambda: None)
    assert renewal.runner is not runner


def test_staged_tensors_are_those_of_the_files(tmp_path: Path) -> None:
    sizes = {"large": (PIECE // 8 + 5, 3), "row": (7,), "one": (), "whole": (PIECE // 4,)}
    draw = torch.Generator().manual_seed(0)
    wanted = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    wanted["short"] = wanted["large"].bfloat16()
    for name, value in wanted.items():
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    save_file({f"{n} again": v for n, v in wanted.items()}, tmp_path / "all.safetensors")
    stored = stored_tensors(tmp_path)
    found = STAGING.tensors(list(stored.values()))
    for name, value in zip(stored, found, strict=True):
        assert torch.equal(value, wanted[name.removesuffix(" again")]), name


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(PIECE)}, tmp_path / "model.safetensors")
    stored = list(stored_tensors(tmp_path).values())
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match="shorter"):
        list(STAGING.tensors(stored))
