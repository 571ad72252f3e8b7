"""On a CPU logits do not depend on how a text was made, bit by bit: a token at a time or by drafts,
alone or beside others, with whatever was accepted and folded before. What a product rounds to
integers is then the same, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_models import make_peer
from runner_harness import PLAIN, Engine, Settings
from step_rig import made, partings
from tiny_model import VOCAB, write_delta_model, write_model

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.runner import loading

SIZES = {
    # whole vectors, of states and of keys
    "vectors": {"mamba_head_dim": 16, "ssm_state_size": 64, "head_dim": 32},
    "two-vectors": {"mamba_head_dim": 32, "ssm_state_size": 32, "head_dim": 64, "n_groups": 4},
    "odd": {},
}
# gated DeltaNet; of keys two vectors, five, and no whole one
DELTA_SIZES = {
    "delta-vectors": {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32},
    "delta-five-vectors": {
        "linear_key_head_dim": 80, "linear_value_head_dim": 16, "linear_num_value_heads": 4,
    },
    "delta-odd": {},
}  # fmt: skip
CONVOLUTIONS = ("lfm2-moe",)
SPECULATING = {
    "chain": Settings("NGRAM", topk=1, steps=5, nodes=6),
    "tree": Settings("NGRAM", topk=3, steps=4, nodes=8),
    "tree-fewest-rows": Settings("NGRAM", topk=3, steps=5, nodes=12, rows=12),
    "tree-snapshot": Settings("NGRAM", "snapshot", topk=3, steps=4, nodes=8),
}
LENGTHS, NEW_TOKENS = (5, 37), 36


def written(name: str, folder: Path) -> Path:
    if name in DELTA_SIZES:
        return write_delta_model(folder, **DELTA_SIZES[name])
    if name in CONVOLUTIONS:
        make_peer(name).save_pretrained(folder)
        return folder
    return write_model(folder, scaled=True, intermediate_size=96, **SIZES[name])


@pytest.fixture(scope="module", params=[*SIZES, *DELTA_SIZES, *CONVOLUTIONS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_logits_have_the_same_bits_however_a_text_is_made(quantization: str, model: Path) -> None:
    prompts = [[(7 * k + length) % VOCAB for k in range(length)] for length in LENGTHS]
    plain_scheme = ""
    for name, settings in SPECULATING.items():
        # snapshots of delta rules have bits of their own
        scheme = settings.scheme if "delta" in model.name else "deferred"
        if scheme != plain_scheme:
            plain_scheme = scheme
            engine = Engine(model, None, PLAIN._replace(scheme=scheme), quantization=quantization)
            plain = [made(engine, [prompt], NEW_TOKENS)[0] for prompt in prompts]
        engine = Engine(model, None, settings, quantization=quantization)
        assert not partings(engine, plain, seed=len(name)), name


@pytest.mark.parametrize(
    "name, said", [("kimi-linear", 2), ("ling-3", 2), ("lfm2-moe", 0), ("qwen3.5", 0)]
)
def test_a_model_of_other_bits_in_prompts_is_refused_with_exact(
    name: str, said: int, tmp_path: Path
) -> None:
    make_peer(name).save_pretrained(tmp_path)
    config = EngineConfig(model_path=str(tmp_path), device="cpu", exact=True)
    model = read_model_config(tmp_path)
    if not said:
        assert loading.backend_for(config, model, 0).name == "cpu"
        return
    with pytest.raises(ConfigError) as raised:
        loading.backend_for(config, model, 0)
    assert len(raised.value.problems) == said
    assert all(f"--exact: {model.model_type} has" in text for text in raised.value.problems)
