"""A model that does not fit in memory is refused before its weights are read."""

from __future__ import annotations

import pytest
import torch

from mamba_eagle.backend.place import FreeMemory, Host
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.models import loader
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.models.rooms import least_bytes, refuse_too_large
from mamba_eagle.quantization.policy import Policy
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner


def empty_model() -> torch.nn.Module:
    config = read_model_config(str(EMBEDDED_MODEL))
    with torch.device("meta"):
        return model_class(config)(config)


@pytest.mark.parametrize("mode", ["none", "int8", "int4"])
def test_the_bound_is_below_what_the_weights_take_and_not_far(mode: str) -> None:
    config = resolve(EngineConfig(device="cpu", quantization=mode, speculative_algorithm="NONE"))
    kept = weight_bytes(make_runner(config).model)
    bound = least_bytes(empty_model(), Policy(mode), stored=2.0)
    # the files have two bytes an element; groups of integers have scales beside them
    assert 0.75 * kept < bound <= kept


def test_no_tensor_is_read_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "memory", lambda self: FreeMemory(1_000_000, None, "memory"))
    monkeypatch.setattr(loader, "checkpoint_tensors", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match=r"take at least .* GB and 0.0 GB of memory are free"):
        make_runner(resolve(EngineConfig(device="cpu")))


def test_what_would_fit_is_named() -> None:
    model = empty_model()
    sizes = {mode: least_bytes(model, Policy(mode), 4.0) for mode in ("none", "int8", "int4")}

    def refusal(free: int) -> str:
        with pytest.raises(ConfigError) as caught:
            refuse_too_large(model, "folder", Policy("none"), 4.0, free, on_host=True)
        return str(caught.value)

    assert "--quantization int8 takes" in refusal(sizes["none"] - 1)
    between = refusal((sizes["int8"] + sizes["int4"]) // 2)
    assert "int8" not in between and "--quantization int4 takes" in between
    assert "take a smaller model" in refusal(1000)
    refuse_too_large(model, "folder", Policy("none"), 4.0, sizes["none"], on_host=True)
