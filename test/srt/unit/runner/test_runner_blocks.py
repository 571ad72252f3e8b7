"""Trees of block drafters through the runner, against their definition. (Texts: test_drafters.py.)

The text does not depend on drafts, so nothing else would notice a drafter that reads the wrong
context, or whose rows stand in the wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain_blocks import Form, block_rows, path_log_probs
from runner_harness import (
    Engine,
    Live,
    Settings,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from safetensors.torch import load_file, save_file
from test_runner_drafts import assert_trees_are_the_heads
from tiny_blocks import DFLASH_CONFIG, DSPARK_CONFIG, write_block_drafter
from tiny_model import VOCAB, load_model, write_model
from torch import Tensor

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.drafting import drafter_problems
from mamba_eagle.kernels.four_bit.torch import dequantize
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.dflash import published_name
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.models.registry import parse_config
from mamba_eagle.resolve import head_in, resolve

torch.set_num_threads(1)

TREE = Settings(topk=3, steps=4, nodes=9)
SHAPES = {
    "tree": TREE,
    "chain": Settings(topk=1, steps=4, nodes=5),
    "tree-torch": TREE._replace(fused=False),
    "tree-snapshot": TREE._replace(scheme="snapshot"),
}


class Drafter(NamedTuple):
    """A published layout, and what it means."""

    algorithm: str
    config: dict[str, Any]
    form: Form
    taps: tuple[int, ...]  # layers of the target whose outputs are read
    optional: tuple[str, ...] = ()
    stored: Callable[[dict[str, Any], dict[str, Tensor]], tuple[dict, dict]] | None = None


def speculators(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict, dict]:
    """Its layer's config apart, and inputs of layers rather than outputs."""
    own = {"draft_vocab_size", "mask_token_id", "block_size", "markov_rank", "markov_head_type"}
    own |= {"enable_confidence_head"}
    outer = {name: value for name, value in config.items() if name in own}
    outer |= {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [i + 1 for i in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
    }
    left_out = {*own, "architectures", "dflash_config"}
    layer = {name: value for name, value in config.items() if name not in left_out}
    return {**outer, "transformer_layer_config": layer}, {
        **weights,
        "verifier_norm.weight": torch.ones(64),
    }


def prefixed(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict, dict]:
    return config, {f"model.{name}": value for name, value in weights.items()}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def quantized(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict, dict]:
    """What NVIDIA stores in NVFP4: ``fc``, the MLPs and ``markov_w2``; here at random."""
    generator, stored = torch.Generator().manual_seed(0), dict(weights)
    for name in [n for n in weights if n.startswith("fc.") or ".mlp." in n or "markov_w2" in n]:
        rows, columns = weights[name].shape
        shape = (rows, columns // 2)
        stored[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scale = torch.rand(rows, columns // 16, generator=generator) + 0.5
        stored[f"{name}_scale"] = scale.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_2"] = torch.tensor(0.02)
    assert len(stored) > len(weights) + 12
    return {
        **config,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    }, stored


ROPE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
ZLAB = Form(4, 2, 24, 6, 5, False, (3, 0), (False, False))
SPARK = Form(4, 2, 24, 5, 5, True, (7, 7), (True, True), kind="vanilla")
DRAFTERS = {
    "zlab": Drafter("DFLASH", DFLASH_CONFIG, ZLAB, (0, 1, 3)),
    # a window makes a layer causal where nothing else is said
    "zlab-silent": Drafter(
        "DFLASH",
        {
            **without(DFLASH_CONFIG, "block_size"),
            "attention_bias": True,
            "dflash_config": {"mask_token_id": 7, "block_size": 6, "target_layer_ids": [1]},
            "input_embedding_scale": 2.0,
            "partial_rotary_factor": 0.5,
        },
        ZLAB._replace(mask=7, causal=(True, False), embedding_scale=2.0),
        (1,),
        ("mask_embedding", "lm_head.weight"),
    ),
    "dspark": Drafter("DSPARK", DSPARK_CONFIG, SPARK, (1, 3)),
    "nvidia-dspark": Drafter(
        "DSPARK",
        {
            **DSPARK_CONFIG,
            "dspark_bonus_anchor": True,
            "sample_from_anchor": False,
            "block_size": 6,
            "has_embed_tokens": True,
            "rope_parameters": ROPE,
        },
        SPARK._replace(from_anchor=False, rows=6, yarn=ROPE),
        (1, 3),
        stored=prefixed,
    ),
    "speculators-rnn": Drafter(
        "DSPARK",
        {
            **without(DSPARK_CONFIG, "attention_sink_bias", "block_size"),
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 4,
            "block_size": 4,
            "draft_vocab_size": 60,
            "markov_head_type": "rnn",
            "enable_confidence_head": True,
        },
        SPARK._replace(rows=4, windows=(0, 4), causal=(False, True), kind="rnn"),
        (1, 3),
        stored=speculators,
    ),
    "nvidia-nvfp4": Drafter(
        "DSPARK",
        {**DSPARK_CONFIG, "architectures": ["Qwen3DSparkModel"], "sample_from_anchor": True},
        SPARK,
        (1, 3),
        stored=quantized,
    ),
    "narrow-gated": Drafter(
        "DSPARK",
        {
            **DSPARK_CONFIG,
            "hidden_size": 48,
            "target_hidden_size": 64,
            "markov_head_type": "gated",
            "logit_scale": 0.5,
        },
        SPARK._replace(kind="gated", logit_scale=0.5),
        (1, 3),
    ),
}


def write(drafter: Drafter, folder: Path, model: Path) -> Path:
    write_block_drafter(folder, model, drafter.config, optional=drafter.optional)
    if drafter.stored is not None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        config, weights = drafter.stored(config, weights)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors")
    return folder


def make_engine(drafter: Drafter, folder: Path, model: Path, settings: Settings) -> Engine:
    settings = settings._replace(
        algorithm=drafter.algorithm, steps=min(settings.steps, drafter.form.rows - 1)
    )
    return Engine(model, write(drafter, folder, model), settings)


class PlainDrafts:
    """The drafter's definition, behind the target over whole sequences."""

    def __init__(self, drafter: Drafter, folder: Path, model: Path) -> None:
        self.form, self.target = drafter.form, load_model(model)
        self.target.tap(tuple(layer + 1 for layer in drafter.taps))
        stored = load_file(folder / "model.safetensors")
        for name in [name for name, value in stored.items() if value.dtype == torch.uint8]:
            scale, whole = (stored.pop(f"{name}{end}") for end in ("_scale", "_scale_2"))
            stored[name] = dequantize(stored[name], scale, None, whole.reshape(1, 1))
        self.weights = {published_name(name): value.double() for name, value in stored.items()}
        self.rows: dict[int, Tensor] = {}  # by length of what is known

    def log_probs(self, tokens: list[int], drafted: int) -> Tensor:
        """What it says about the token behind ``tokens``, whose last ``drafted`` are its own
        guesses. [V]"""
        root, target = len(tokens) - drafted - 1, self.target
        if root not in self.rows:
            features = target(torch.tensor(tokens[:root]), FullSequenceContext(1, root))
            embedding = target.parts.embedding.weight.double()
            taps = features[:, 64:].double()
            self.rows[root] = block_rows(self.weights, self.form, taps, tokens[root], embedding)
        lm_head = target.lm_head.weight.double()
        path = tokens[root:]
        found = path_log_probs(self.weights, self.form, self.rows[root], path, lm_head, VOCAB)
        return found.float()


def assert_drafts_are_its_own(live: Live, drafter: Drafter, folder: Path, model: Path) -> None:
    assert_trees_are_the_heads(live, PlainDrafts(drafter, folder, model))


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [(name, "tree") for name in DRAFTERS]
    + [(name, shape) for name in ("zlab", "dspark") for shape in SHAPES if shape != "tree"],
)
def test_trees_are_scored_as_the_definition_says(
    model: Path, tmp_path: Path, drafter: str, shape: str
) -> None:
    """In a batch, over accepted drafts, from prompts in chunks and behind plain steps."""
    chosen = DRAFTERS[drafter]
    engine = make_engine(chosen, tmp_path, model, SHAPES[shape])
    lives = [
        engine.start(random_prompt(19, 1), sampled(6, 1)),
        engine.start(random_prompt(1, 2), greedy(6)),
        engine.start(random_prompt(26, 3), greedy(6), cuts=(5, 6, 20)),
    ]
    engine.finish(lives)
    if drafter not in ("narrow-gated", "nvidia-nvfp4"):  # whose weights are random
        assert max(accepted(lives)) > 1
    for live in lives:
        assert_drafts_are_its_own(live, chosen, tmp_path, model)


@pytest.mark.parametrize("drafter", ["zlab", "dspark"])
def test_a_cached_prefix_is_there_for_the_drafter(
    model: Path, tmp_path: Path, drafter: str
) -> None:
    """As the definition says, and so as without a hit."""
    chosen = DRAFTERS[drafter]
    engine = make_engine(chosen, tmp_path, model, TREE)
    first = engine.start(random_prompt(24, 6), greedy(12))
    engine.finish([first])
    prefix = engine.release(first, fold_to=first.processed)
    assert prefix is not None
    live = engine.start([*prefix.tokens, *random_prompt(5, 7)], greedy(12), hit=prefix)
    engine.finish([live])
    assert_drafts_are_its_own(live, chosen, tmp_path, model)


# ── what is refused ──


def problems(model: Path, folder: Path, algorithm: str, **settings: int) -> list[str]:
    config = EngineConfig(
        model_path=str(model),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(folder),
        **settings,
    )
    return drafter_problems(config)


def test_every_reason_against_a_block_drafter_is_named(model: Path, tmp_path: Path) -> None:
    folder = write(DRAFTERS["zlab"], tmp_path / "drafter", model)
    assert problems(model, folder, "DFLASH") == []
    other = write_model(
        tmp_path / "other", vocab_size=128, hidden_size=80, hybrid_override_pattern="M*"
    )
    found = "\n".join(
        problems(other, folder, "DFLASH", speculative_num_steps=6, speculative_eagle_topk=60)
    )
    for words in (
        "has vocab_size 96, the target 128",
        "was made for a target of hidden_size 64, this one has 80",
        "--speculative-num-steps 6: drafter .* drafts 5 tokens in a row at most .block_size 6.",
        r"reads the outputs of layers \[0, 1, 3\] of a target with 2 layers: set target_layer_ids",
    ):
        assert re.search(words, found), words
    reduced = write(DRAFTERS["speculators-rnn"], tmp_path / "reduced", model)
    assert problems(model, reduced, "DSPARK", speculative_num_steps=4) == []
    found = "\n".join(
        problems(model, reduced, "DSPARK", speculative_num_steps=1, speculative_eagle_topk=61)
    )
    assert "has a vocabulary of 60 tokens; set it to 60 at most" in found


def test_weights_that_are_missing_or_unexpected_are_named(model: Path, tmp_path: Path) -> None:
    folder = write(DRAFTERS["dspark"], tmp_path, model)
    weights = load_file(folder / "model.safetensors")
    weights["conv.weight"] = weights.pop("layers.1.self_attn.k_norm.weight")
    save_file(weights, folder / "model.safetensors")
    found = problems(model, folder, "DSPARK", speculative_num_steps=4)
    assert found == [
        f"{folder}: unexpected: conv.weight",
        f"{folder}: missing: layers.1.self_attn.k_norm.weight",
    ]


def test_folders_say_what_they_are_for(model: Path, tmp_path: Path) -> None:
    for name, drafter in DRAFTERS.items():
        folder = write(drafter, tmp_path / name, model)
        assert head_in(folder) == drafter.algorithm
    folder = tmp_path / "dspark"
    with pytest.raises(ConfigError, match=f"DFLASH: {folder} has a head for DSPARK; leave"):
        resolve(
            EngineConfig(
                model_path=str(model),
                speculative_algorithm="DFLASH",
                speculative_draft_model_path=str(folder),
            )
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": None, "dflash_config": {}}, "lacks 'block_size'"),
        ({"markov_head_type": "attention"}, "markov_head_type 'attention' .* vanilla, gated, rnn"),
        ({"markov_rank": 0}, "markov_rank 0: must be a whole number from 1 on"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers; there are 2"),
        (
            {"layer_types": ["sliding_attention"] * 2, "dflash_config": {"mask_token_id": 5}},
            "sliding_window 0: must be a whole number",
        ),
        (
            {"dflash_config": {"mask_token_id": VOCAB}},
            f"mask_token_id {VOCAB}: must be a token of the vocabulary of {VOCAB}",
        ),
        ({"dflash_config": {"mask_token_id": 5}}, "lacks 'target_layer_ids'"),
        (
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": "all"}},
            "target_layer_ids 'all': must be a list of layer numbers",
        ),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino' is not supp"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"is_neox_style": False}, "is_neox_style False is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' is not supported"),
    ],
)
def test_another_layout_is_refused(changes: dict[str, Any], words: str) -> None:
    config = {**without(DSPARK_CONFIG, "sliding_window"), **changes}
    with pytest.raises(UnsupportedModel, match=words):
        parse_config(config)


def test_a_token_map_that_leads_astray_is_refused(model: Path, tmp_path: Path) -> None:
    folder = write(DRAFTERS["speculators-rnn"], tmp_path, model)
    weights = load_file(folder / "model.safetensors")
    weights["d2t"][3] = VOCAB
    save_file(weights, folder / "model.safetensors")
    settings = Settings("DSPARK", topk=2, steps=3, nodes=6)
    with pytest.raises(CheckpointError, match=rf"{folder}: d2t maps to token {VOCAB + 3}"):
        Engine(model, folder, settings)


def test_a_shortlist_keeps_the_drafts_that_are_in_it(model: Path, tmp_path: Path) -> None:
    """Of all tokens but one it changes no tree here; of two, a depth has no other tokens."""
    asked, trees = greedy(8), {}
    for size in (None, VOCAB - 1, 2):
        changed = {**DSPARK_CONFIG, "dspark_draft_topk": size}
        drafter = DRAFTERS["dspark"]._replace(config=changed)
        engine = make_engine(drafter, tmp_path / str(size), model, TREE._replace(topk=2, nodes=6))
        live = engine.start(random_prompt(9, 1), asked)
        engine.finish([live])
        trees[size] = live.proposals
    assert [tree.tokens for tree in trees[VOCAB - 1]] == [tree.tokens for tree in trees[None]]
    for tree in trees[2]:
        depths = [0]
        for parent in tree.parents[1:]:
            depths.append(depths[parent] + 1)
        for depth in range(1, max(depths) + 1):
            seen = {token for token, own in zip(tree.tokens, depths) if own == depth}
            assert len(seen) <= 2, "two tokens for each row"
