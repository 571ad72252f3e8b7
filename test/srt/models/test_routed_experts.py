"""A reply's routed experts are those that the routers chose, with drafts, chunks and retraction."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_models import VOCAB, make_peer

from mamba_eagle import Engine, EngineError
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.experts.torch import Routes
from mamba_eagle.layers.moe import Router
from mamba_eagle.message import Generate
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.tokenizer.sample import LiveRequest, Sample

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[k % VOCAB for k in range(i, 4 * i)] for i in (15, 5, 19, 15, 15)]
TIGHT = {"max_total_tokens": 150, "chunked_prefill_size": 32}


def engine_of(model: Path, **settings: Any) -> OfflineEngine:
    values = {"device": "cpu", "enable_return_routed_experts": True, "max_running_requests": 5}
    config = resolve(EngineConfig(model_path=str(model), **{**values, **settings}))
    return OfflineEngine(config, assemble(config))


def served(engine: OfflineEngine) -> tuple[list[Sample], int]:
    """All prompts at once, of which the second asks for nothing; and how many were retracted."""
    samples = []
    for i, ids in enumerate(PROMPTS):
        sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=i)
        asked = {"token_ids": ids, "sampling": sampling, "return_routed_experts": i != 1}
        prompt = Generate(rid=str(i), **asked)
        samples.append(Sample(LiveRequest(str(i)), prompt, str(i), str(i), i, None))
        assert not engine.add(Generate(rid=str(i), **asked))
    retracted = 0
    while not engine.idle:
        for output in engine.step():
            samples[int(output.rid)].take(output)
            retracted += output.finish is not None and output.retractions
    return samples, retracted


def chosen(model: Path, ids: list[int], layers: int) -> np.ndarray[Any, Any]:
    """What the routers say when the text is a prompt in one piece: [tokens, layers, k]."""
    engine = engine_of(model, enable_return_routed_experts=False, disable_radix_cache=True)
    found: dict[int, torch.Tensor] = {}

    def watched(number: int, router: Router) -> Callable[[torch.Tensor], Routes]:
        def forward(hidden: torch.Tensor) -> Routes:
            routes = Router.forward(router, hidden)
            found[number] = routes.experts.clone()
            return routes

        return forward

    for number, layer in enumerate(engine.runner.model.parts.layers):
        for part in layer.modules():
            if isinstance(part, Router):
                part.forward = watched(number, part)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    engine.add(Generate(rid="a", token_ids=ids, sampling=sampling))
    engine.step()
    nothing = torch.zeros_like(next(iter(found.values())))
    each = [found.get(number, nothing) for number in range(layers)]
    return torch.stack(each, dim=1).numpy().astype(np.int32)


@pytest.mark.parametrize("name", ["nemotron-3-super", "qwen3-next"])
@pytest.mark.parametrize("drafts", ["NONE", "NGRAM"])
def test_experts_are_those_that_routers_chose(name: str, drafts: str, tmp_path: Path) -> None:
    make_peer(name).save_pretrained(tmp_path / "model")
    engine = engine_of(tmp_path / "model", speculative_algorithm=drafts, **TIGHT)
    samples, retracted = served(engine)
    layers = len(engine.runner.model.parts.layers)
    assert retracted
    assert samples[1].routed_experts == b""
    for sample in (samples[0], samples[2], samples[4]):
        ids = sample.prompt.token_ids + sample.output_ids[:-1]
        found = np.frombuffer(sample.routed_experts, dtype="<i4").reshape(len(ids), layers, -1)
        wanted = chosen(tmp_path / "model", ids, layers)
        assert np.array_equal(np.sort(found, -1), np.sort(wanted, -1)), sample.rid


def test_a_model_without_experts_has_none_to_return(tmp_path: Path) -> None:
    make_peer("bamba").save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        engine_of(tmp_path / "model")


def test_replies_carry_them_for_cached_prompts_too(tmp_path: Path) -> None:
    make_peer("qwen3-next").save_pretrained(tmp_path / "model")
    both: dict[str, Any] = {"device": "cpu", "in_process": True, "skip_tokenizer_init": True}
    params = {"max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True}
    asked = {"input_ids": PROMPTS[0], "sampling_params": params, "return_routed_experts": True}
    with Engine(str(tmp_path / "model"), enable_return_routed_experts=True, **both) as engine:
        first, again = (engine.generate(**asked)["meta_info"] for _ in range(2))
        plain = engine.generate(input_ids=PROMPTS[0], sampling_params=params)["meta_info"]
        later = engine.generate(**asked, routed_experts_start_len=30)["meta_info"]
        as_vllm = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True}
        body = {
            "token_ids": PROMPTS[0],
            "sampling_params": {**as_vllm, "routed_experts_prompt_start": 30},
        }
        of_ids = asyncio.run(engine.async_post("/inference/v1/generate", body)).body
    assert plain["cached_tokens"] > 0 and "routed_experts" not in plain
    found = np.frombuffer(base64.b64decode(first["routed_experts"]), dtype="<i4")
    layers = found.reshape(len(PROMPTS[0]) + 8, 4, 3)
    assert layers[:, 0].any(1).all() and not layers[:, 1].any(), "layer 1 has no experts"
    assert again["routed_experts"] == first["routed_experts"] and again["cached_tokens"] == 0
    assert later["cached_tokens"] > 0
    assert base64.b64decode(later["routed_experts"]) == layers[30:].tobytes()
    experts = np.load(io.BytesIO(base64.b64decode(of_ids["choices"][0]["routed_experts"])))
    assert of_ids["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert np.array_equal(experts, layers[30:])
    with (
        Engine(str(tmp_path / "model"), **both) as engine,
        pytest.raises(EngineError, match="--enable-return-routed-experts"),
    ):
        engine.generate(**asked)
