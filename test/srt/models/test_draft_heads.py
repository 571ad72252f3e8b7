"""EAGLE-3 heads against a plain computation from their files, the target's hidden states that they
take, and what their folders are refused for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plain_heads
import pytest
import torch
from head_rig import (
    BATCH,
    CLOSE,
    LENGTH,
    eagle3_network,
    edit,
    engine_config,
    problems_of,
    random_tokens,
    roughen,
    run_chain,
    run_drafts,
    tapped,
)
from peer_models import PEERS, make_peer
from safetensors.torch import load_file, save_file
from tiny_heads import EAGLE3_CONFIG, log_probs, write_eagle3_head
from tiny_model import VOCAB, load_model, write_model

from mamba_eagle.drafting.eagle3 import EagleThreeSource
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.eagle3 import (
    LAYER_IDS,
    Eagle3Head,
    layer_ids,
    tap_layers,
)
from mamba_eagle.models.loader import CheckpointError, load_weights
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.resolve import head_in

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}], ids=["plain", "normed"])
@pytest.mark.parametrize("prepared", [False, True], ids=["full", "inference"])
def test_an_eagle3_head_is_what_its_file_says(
    model: Path, tmp_path: Path, changes: dict, prepared: bool
) -> None:
    folder = roughen(write_eagle3_head(tmp_path, model, **changes))
    w, target = load_file(folder / "model.safetensors"), tapped(model)
    network = eagle3_network(folder, target, prepared)
    tokens = random_tokens(BATCH, LENGTH)
    features = target(tokens.flatten(), FullSequenceContext(BATCH, LENGTH))
    outputs = run_chain(network, tokens, features)
    for row, own, made in zip(tokens, features.unflatten(0, tokens.shape), outputs):
        given = plain_heads.behind(own[:, 64:] @ w["fc.weight"].T)
        config = {**EAGLE3_CONFIG, **changes}
        wanted = plain_heads.eagle3(w, config, target.embed(row), given)
        torch.testing.assert_close(made, wanted, **CLOSE)
        exact = plain_heads.eagle3_log_probs(w, VOCAB, wanted)
        torch.testing.assert_close(log_probs(network, 0, made), exact, **CLOSE)


def test_eagle3_drafts_feed_back_what_is_ahead_of_the_norm(model: Path, tmp_path: Path) -> None:
    folder = roughen(write_eagle3_head(tmp_path, model))
    w, target = load_file(folder / "model.safetensors"), tapped(model)
    network = eagle3_network(folder, target)
    tokens, drafted = random_tokens(LENGTH), [5, 60, 7]
    features = target(tokens, FullSequenceContext(1, LENGTH))
    given = plain_heads.behind(features[:, 64:] @ w["fc.weight"].T)
    for depth, made in enumerate(run_drafts(network, tokens, features, drafted)):
        whole = torch.cat([tokens, torch.tensor(drafted[:depth], dtype=torch.int64)])
        wanted = plain_heads.eagle3(w, EAGLE3_CONFIG, target.embed(whole), given)
        torch.testing.assert_close(made, wanted[-1], **CLOSE)
        given = torch.cat([given, wanted[-1:]])


def test_an_eagle3_head_drafts_only_tokens_that_it_knows(model: Path, tmp_path: Path) -> None:
    folder = write_eagle3_head(tmp_path, model)
    w = load_file(folder / "model.safetensors")
    network = eagle3_network(folder, tapped(model))
    known = torch.arange(60) + w["d2t"]
    assert torch.equal(w["t2d"].nonzero().flatten(), known) and w["d2t"].max() > 0
    found = log_probs(network, 0, torch.randn(4, 64))
    assert found.shape == (4, VOCAB) and found.dtype == torch.float32
    assert torch.equal(found.isfinite().all(0), w["t2d"])
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(4))


def test_eagle3_weights_that_are_not_stored_are_the_targets(model: Path, tmp_path: Path) -> None:
    """lm_head, of a head with the whole vocabulary; the embedding, unless there is one."""
    folder = write_eagle3_head(tmp_path / "whole", model, draft_vocab_size=None)
    target = tapped(model)
    own = eagle3_network(folder, target)
    edit(folder, {"lm_head.weight": None})
    outputs = torch.randn(3, 64)
    torch.testing.assert_close(
        log_probs(eagle3_network(folder, target), 0, outputs), log_probs(own, 0, outputs)
    )
    tokens = random_tokens(LENGTH)
    assert torch.equal(own.embed(tokens), target.embed(tokens))
    edit(folder, {"embed_tokens.weight": torch.randn(VOCAB, 64)})
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(eagle3_network(folder, target).embed(tokens), stored[tokens])


def test_eagle3_heads_under_speculators_names_are_the_same(model: Path, tmp_path: Path) -> None:
    folder = write_eagle3_head(tmp_path / "head", model)
    tokens, target = random_tokens(1, LENGTH), tapped(model)
    features = target(tokens.flatten(), FullSequenceContext(1, LENGTH))
    wanted = run_chain(eagle3_network(folder, target), tokens, features)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    outer = {"draft_vocab_size": config.pop("draft_vocab_size"), "norm_before_residual": False}
    ids = config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(
        json.dumps(
            {
                **outer,
                "architectures": ["Eagle3Speculator"],
                "eagle_aux_hidden_state_layer_ids": ids,
                "transformer_layer_config": {**config, "tie_word_embeddings": True},
            }
        )
    )
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    assert read_model_config(folder).vocab_size == VOCAB
    torch.testing.assert_close(run_chain(eagle3_network(folder, target), tokens, features), wanted)


def test_eagle3_heads_that_bear_their_targets_name_are_known(model: Path, tmp_path: Path) -> None:
    write_eagle3_head(tmp_path, model, architectures=["LlamaForCausalLMEagle3"])
    for name in ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Qwen3ForCausalLM"):
        edit(tmp_path, architectures=[name])
        assert head_in(tmp_path) == "EAGLE3"
    assert head_in(model) is None


# ── taps ──


@pytest.mark.parametrize(
    ("ids", "layers", "taps"),
    [
        (None, 52, (2, 26, 49)),  # where no layers are named
        ([1, 25, 48], 52, (2, 26, 49)),  # outputs, as NVIDIA writes them
        ([2, 26, 49], 52, (2, 26, 49)),  # inputs
        ([24, 30, 36], 36, (24, 30, 36)),  # the last layer's output
    ],
)
def test_tapped_layers_are_read_under_both_conventions(
    ids: list[int] | None, layers: int, taps: tuple[int, ...], tmp_path: Path
) -> None:
    named = {"eagle_aux_hidden_state_layer_ids": ids}
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE3_CONFIG, "eagle_config": named}))
    assert tap_layers(read_model_config(tmp_path, "eagle3"), layers) == taps
    named["eagle_aux_hidden_state_layer_ids"] = layer_ids(taps)
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE3_CONFIG, "eagle_config": named}))
    assert tap_layers(read_model_config(tmp_path, "eagle3"), layers) == taps
    with pytest.raises(ValueError, match="1, 2, 3"):
        layer_ids((1, 2, 3))


def test_taps_are_what_goes_into_the_layers(model: Path) -> None:
    plain, tokens = load_model(model), random_tokens(LENGTH)
    ctx = FullSequenceContext(1, LENGTH)
    states = [plain.embed(tokens)]
    for layer in plain.parts.layers:
        states.append(layer(states[-1], ctx))
    wanted = torch.cat([plain.parts.norm(states[-1]), states[0], states[3], states[4]], dim=-1)
    target = tapped(model, (0, 3, 4))
    for _ in range(2):
        assert torch.equal(target(tokens, FullSequenceContext(1, LENGTH)), wanted)
    assert target.feature_size == wanted.shape[1]


@pytest.mark.parametrize("family", PEERS)
def test_every_family_can_be_tapped(family: str, tmp_path: Path) -> None:
    make_peer(family).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    target, tokens = model_class(config)(config), random_tokens(LENGTH)
    load_weights(target, tmp_path)
    size, last = config.hidden_size, len(target.parts.layers)
    with torch.no_grad():
        plain = target(tokens, FullSequenceContext(1, LENGTH))
        target.tap((0, last))
        features = target(tokens, FullSequenceContext(1, LENGTH))
        assert torch.equal(features[:, :size], plain)
        assert torch.equal(features[:, size : 2 * size], target.embed(tokens))
        normed = target.parts.norm.forward(features[:, 2 * size :])
        assert torch.equal(normed, plain)


# ── what is refused ──


def test_every_reason_against_an_eagle3_head_is_named(model: Path, tmp_path: Path) -> None:
    assert problems_of(EagleThreeSource, write_eagle3_head(tmp_path, model), model) == []
    edit(
        tmp_path,
        {
            "fc.weight": torch.zeros(64, 128),
            "norm.weight": None,
            "midlayer.self_attn.q_norm.weight": torch.ones(24),
            "d2t": torch.zeros(60),
        },
        vocab_size=100,
        target_hidden_size=32,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 9]},
    )
    assert sorted(problems_of(EagleThreeSource, tmp_path, model)) == [
        f"drafter {tmp_path} has vocab_size 100, the target 96: use one that was made for this "
        "target",
        f"drafter {tmp_path} reads the inputs of layers [3, 9] of a target with 4 layers: set "
        "eagle_config.eagle_aux_hidden_state_layer_ids in config.json to increasing numbers "
        "between 0 and 4",
        f"drafter {tmp_path} was made for a target of hidden_size 32, this one has 64: use one "
        "that was made for this target",
        "dtype of d2t: F32 in the file, an integer dtype in the model",
        "missing: embed_tokens.weight",
        "missing: norm.weight",
        "shape of fc.weight: [64, 128] in the file, [64, 64] by config.json",
        "unexpected: midlayer.self_attn.q_norm.weight",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; known: 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ({"eagle_config": {LAYER_IDS: ["2", "5", "9"]}}, "'5', '9'.: must be whole numbers"),
        ({"hidden_size": "64"}, 'hidden_size = "64": must be a whole number'),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_another_layout_of_eagle3_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    config = {**EAGLE3_CONFIG, **changes}
    given = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(UnsupportedModel, match=words):
        read_model_config(tmp_path, "eagle3")


def test_lanes_are_no_more_than_the_tokens_that_a_head_knows(model: Path, tmp_path: Path) -> None:
    folder = write_eagle3_head(tmp_path, model)
    config = replace(engine_config(model, folder), speculative_eagle_topk=61)
    assert EagleThreeSource(config, read_model_config(model)).problems() == [
        f"--speculative-eagle-topk 61: drafter {folder} has a vocabulary of 60 tokens; "
        "set it to 60 at most"
    ]


@pytest.mark.parametrize(
    ("offsets", "words"),
    [({59: 37}, "token 96 of a vocabulary of 96"), ({1: -1}, "two draft tokens to one token")],
)
def test_a_token_map_that_leads_astray_is_refused(
    model: Path, tmp_path: Path, offsets: dict[int, int], words: str
) -> None:
    folder = write_eagle3_head(tmp_path, model)
    d2t = torch.zeros(60, dtype=torch.int64)
    for i, offset in offsets.items():
        d2t[i] = offset
    edit(folder, {"d2t": d2t})
    head = Eagle3Head(read_model_config(folder, "eagle3"))
    load_weights(head, folder)
    with pytest.raises(CheckpointError, match=words):
        head.check_tokens("a head")
