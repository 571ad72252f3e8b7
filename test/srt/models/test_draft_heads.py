"""EAGLE-3 and multi-token-prediction heads against a plain computation from their files, and what
their folders are refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plain_heads
import pytest
import torch
from peer_models import PEERS, make_peer
from safetensors.torch import load_file, save_file
from tiny_heads import EAGLE3_CONFIG, GrowingSequence, write_eagle3_head, write_mtp_head
from tiny_model import MODEL_CONFIG, VOCAB, load_model, write_model
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config import ModelConfig, UnsupportedModel
from mamba_eagle.models.eagle3 import Eagle3Head, layer_ids, published_name, tap_layers
from mamba_eagle.models.loader import CheckpointError, load_weights
from mamba_eagle.models.mtp import MtpHead
from mamba_eagle.models.registry import model_class, read_as
from mamba_eagle.spec.drafters.base import FolderSource
from mamba_eagle.spec.drafters.eagle3 import EagleThreeNetwork, EagleThreeSource
from mamba_eagle.spec.drafters.mtp import MtpNetwork, MtpSource
from mamba_eagle.spec.drafters.network import DraftNetwork

torch.set_num_threads(1)

BATCH, LENGTH, DEEP = 2, 21, 3
TAPS = (0, 2, 4)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def edit(folder: Path, change: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
    """New tensors by name, None removes one; new config values."""
    weights = load_file(folder / "model.safetensors")
    weights = {name: value for name, value in {**weights, **(change or {})}.items()}
    kept = {name: value.contiguous() for name, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


def roughen(folder: Path) -> Path:
    """No weight is left a one or a zero that may be forgotten, and attention is no mere mean."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    change: dict[str, Tensor | None] = {}
    for name, value in weights.items():
        if name.endswith((".D", "norm.weight", "bias", "layernorm.weight")):
            change[name] = value + 0.3 * torch.randn(value.shape, generator=generator)
        if "_proj" in name and "mixer" in name:
            change[name] = value * 4
    return edit(folder, change)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(8))


def run_chain(network: DraftNetwork, tokens: Tensor, features: Tensor) -> Tensor:
    """True entries of whole sequences: tokens [b, l], the target's features [b * l, W]."""
    entries = network.entry_features(features).unflatten(0, tokens.shape)
    entries = torch.stack([plain_heads.behind(each) for each in entries])
    carry = torch.zeros(len(tokens), network.carry_size)
    return network.chain(tokens, entries, carry, FullSequenceContext(*tokens.shape))


def run_drafts(
    network: DraftNetwork, tokens: Tensor, features: Tensor, drafted: list[int]
) -> list[Tensor]:
    """Outputs [O] of the root, which ends ``tokens`` [l], and of the drafted tokens behind it."""
    ctx = GrowingSequence(torch.arange(len(tokens)))
    entries = plain_heads.behind(network.entry_features(features))
    carry = torch.zeros(1, network.carry_size)
    outputs = [network.chain(tokens[None], entries[None], carry, ctx)[0, -1]]
    for depth, token in enumerate(drafted, start=1):
        ctx.then(len(tokens) + depth - 1)
        outputs.append(network.lanes(depth, torch.tensor([token]), outputs[-1][None], ctx)[0])
    return outputs


# ── EAGLE-3 ──


def eagle3_network(folder: Path, target: CausalLM, prepared: bool = False) -> EagleThreeNetwork:
    names = {published_name(name) for name in load_file(folder / "model.safetensors")}
    head = Eagle3Head(read_as("eagle3", folder), names)
    load_weights(head, folder)
    if prepared:
        prepare_for_inference(head)
    return EagleThreeNetwork(head.requires_grad_(False), target)


def tapped(folder: Path, taps: tuple[int, ...] = TAPS) -> CausalLM:
    target = load_model(folder)
    target.tap(taps)
    return target


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
        log_probs = plain_heads.eagle3_log_probs(w, VOCAB, wanted)
        torch.testing.assert_close(network.log_probs(0, made), log_probs, **CLOSE)


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
    log_probs = network.log_probs(0, torch.randn(4, 64))
    assert log_probs.shape == (4, VOCAB) and log_probs.dtype == torch.float32
    assert torch.equal(log_probs.isfinite().all(0), w["t2d"])
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4))


def test_eagle3_weights_that_are_not_stored_are_the_targets(model: Path, tmp_path: Path) -> None:
    """lm_head, of a head with the whole vocabulary; the embedding, unless there is one."""
    folder = write_eagle3_head(tmp_path / "whole", model, draft_vocab_size=None)
    target = tapped(model)
    own = eagle3_network(folder, target)
    edit(folder, {"lm_head.weight": None})
    outputs = torch.randn(3, 64)
    torch.testing.assert_close(
        eagle3_network(folder, target).log_probs(0, outputs), own.log_probs(0, outputs)
    )
    tokens = random_tokens(LENGTH)
    assert torch.equal(own.embed(tokens), target.embed(tokens))
    edit(folder, {"embed_tokens.weight": torch.randn(VOCAB, 64)})
    embedded = eagle3_network(folder, target).embed(tokens)
    assert torch.equal(embedded, load_file(folder / "model.safetensors")["embed_tokens.weight"][tokens])


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
    assert ModelConfig.from_pretrained(folder).vocab_size == VOCAB
    torch.testing.assert_close(run_chain(eagle3_network(folder, target), tokens, features), wanted)


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
    assert tap_layers(read_as("eagle3", tmp_path), layers) == taps
    named["eagle_aux_hidden_state_layer_ids"] = layer_ids(taps)
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE3_CONFIG, "eagle_config": named}))
    assert tap_layers(read_as("eagle3", tmp_path), layers) == taps
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
    config = ModelConfig.from_pretrained(tmp_path)
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


# ── multi-token prediction ──

MODULES = {"published": (1, "*E"), "mamba": (2, "M-"), "three": (3, "*-"), "both": (2, "M*")}


def mtp_network(folder: Path, target: CausalLM, prepared: bool = False) -> MtpNetwork:
    head = MtpHead(read_as("mtp", folder))
    load_weights(head, folder)
    if prepared:
        prepare_for_inference(head)
    return MtpNetwork(head.requires_grad_(False), target)


def plain_modules(
    folder: Path, target: CausalLM, tokens: Tensor, hidden: Tensor, count: int
) -> list[Tensor]:
    """What each module makes of a true sequence: tokens [l], the target's hidden [l, h]."""
    w, config = load_file(folder / "model.safetensors"), read_config(folder)
    made = [hidden]
    for module in range(count):
        ahead = plain_heads.behind(made[-1])
        made.append(plain_heads.mtp(w, config, module, target.embed(tokens), ahead))
    return made[1:]


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("prepared", [False, True], ids=["full", "inference"])
@pytest.mark.parametrize(("count", "pattern"), MODULES.values(), ids=MODULES)
def test_mtp_modules_are_what_their_file_says(
    model: Path, tmp_path: Path, count: int, pattern: str, prepared: bool
) -> None:
    named = {"num_nextn_predict_layers": count, "mtp_hybrid_override_pattern": pattern}
    folder = roughen(write_mtp_head(tmp_path, model, **named))
    target = load_model(model)
    network = mtp_network(folder, target, prepared)
    tokens = random_tokens(BATCH, LENGTH)
    hidden = target(tokens.flatten(), FullSequenceContext(BATCH, LENGTH))
    outputs = run_chain(network, tokens, hidden)
    for row, own, made in zip(tokens, hidden.unflatten(0, tokens.shape), outputs):
        wanted = plain_modules(folder, target, row, own, count)
        torch.testing.assert_close(made, torch.cat(wanted, dim=-1), **CLOSE)
        for depth in range(count):
            log_probs = target.compute_logits(wanted[depth]).log_softmax(-1)
            torch.testing.assert_close(network.log_probs(depth, made), log_probs, **CLOSE)


@pytest.mark.parametrize("pattern", ["*-", "M-", "*M"])
def test_the_token_at_a_depth_comes_from_the_module_of_that_depth(
    model: Path, tmp_path: Path, pattern: str
) -> None:
    """Three modules, drafts as deep as they go: module d of the entry at depth d is what it would
    be if the drafted tokens were the text, its input from the target ending d tokens earlier."""
    named = {"num_nextn_predict_layers": DEEP, "mtp_hybrid_override_pattern": pattern}
    folder = roughen(write_mtp_head(tmp_path, model, **named))
    target = load_model(model)
    network = mtp_network(folder, target)
    assert network.max_depth == DEEP
    tokens, drafted = random_tokens(LENGTH), [5, 60]
    hidden = target(tokens, FullSequenceContext(1, LENGTH))
    unknown = torch.full((len(drafted), 64), 1e4)  # would be seen in any output it reaches
    whole = torch.cat([tokens, torch.tensor(drafted)])
    wanted = plain_modules(folder, target, whole, torch.cat([hidden, unknown]), DEEP)
    for depth, made in enumerate(run_drafts(network, tokens, hidden, drafted)):
        for module in range(depth, DEEP):
            own = made[64 * module : 64 * (module + 1)]
            torch.testing.assert_close(own, wanted[module][LENGTH - 1 + depth], **CLOSE)
        log_probs = target.compute_logits(wanted[depth][LENGTH - 1 + depth][None]).log_softmax(-1)
        torch.testing.assert_close(network.log_probs(depth, made[None]), log_probs, **CLOSE)


def test_a_single_module_drafts_from_its_own_output(model: Path, tmp_path: Path) -> None:
    folder = roughen(write_mtp_head(tmp_path, model, mtp_hybrid_override_pattern="*E"))
    w, target = load_file(folder / "model.safetensors"), load_model(model)
    network = mtp_network(folder, target)
    assert network.max_depth is None and network.carry_size == 0
    tokens, drafted = random_tokens(LENGTH), [5, 60, 7]
    hidden = target(tokens, FullSequenceContext(1, LENGTH))
    ahead, config = plain_heads.behind(hidden), read_config(folder)
    for depth, made in enumerate(run_drafts(network, tokens, hidden, drafted)):
        whole = torch.cat([tokens, torch.tensor(drafted[:depth], dtype=torch.int64)])
        wanted = plain_heads.mtp(w, config, 0, target.embed(whole), ahead)
        torch.testing.assert_close(made, wanted[-1], **CLOSE)
        ahead = torch.cat([ahead, wanted[-1:]])


@pytest.mark.parametrize("cut", [1, 8])
def test_modules_in_a_row_go_on_where_a_chunk_ended(model: Path, tmp_path: Path, cut: int) -> None:
    """The carry is all that an entry needs of the one ahead of it."""
    folder = roughen(write_mtp_head(tmp_path, model, num_nextn_predict_layers=DEEP))
    target = load_model(model)
    network = mtp_network(folder, target)
    tokens = random_tokens(1, LENGTH)
    hidden = target(tokens.flatten(), FullSequenceContext(1, LENGTH))
    wanted = run_chain(network, tokens, hidden)
    entries, ctx = plain_heads.behind(hidden)[None], GrowingSequence(torch.arange(LENGTH))
    carry = torch.zeros(1, network.carry_size)
    first = network.chain(tokens[:, :cut], entries[:, :cut], carry, ctx)
    carry = first[:, -1, : network.carry_size]
    second = network.chain(tokens[:, cut:], entries[:, cut:], carry, ctx)
    torch.testing.assert_close(torch.cat([first, second], dim=1), wanted, **CLOSE)


def test_mtp_modules_are_read_beside_the_target(model: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    alone = write_mtp_head(tmp_path / "head", folder, **MODEL_CONFIG_OF_HEAD)
    write_mtp_head(folder, folder)
    assert any(name.startswith("mtp.") for name in load_file(folder / "model.safetensors"))
    load_model(folder)  # the target itself does without them
    source = MtpSource(engine_config(folder, ""), ModelConfig.from_pretrained(folder))
    assert source.path == str(folder) and source.problems() == []
    ours, theirs = (MtpHead(read_as("mtp", place)) for place in (folder, alone))
    load_weights(ours, folder)
    load_weights(theirs, alone)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])


MODEL_CONFIG_OF_HEAD = {
    name: MODEL_CONFIG[name]
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
}


def test_a_layer_that_is_repeated_is_stored_once(tmp_path: Path) -> None:
    config = {**MODEL_CONFIG, "num_nextn_predict_layers": 3, "mtp_layers_block_type": ["attention"]}
    for repeated, blocks in ((False, 3), (True, 1)):
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "mtp_use_repeated_layer": repeated})
        )
        head = MtpHead(read_as("mtp", tmp_path))
        assert len(head.mtp.layers) == head.num_modules == blocks
        assert head.config.num_attention_layers == blocks


# ── what is refused ──


def engine_config(model: Path, head: Path | str) -> EngineConfig:
    return EngineConfig(model_path=str(model), speculative_draft_model_path=str(head))


def problems_of(source: type[FolderSource], head: Path, target: Path) -> list[str]:
    made = source(engine_config(target, head), ModelConfig.from_pretrained(target))
    return [line.replace(f"{head}: ", "") for line in made.problems()]


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
        f"drafter {tmp_path} reads the inputs of layers [3, 9] of a target with 4 layers: name "
        "them, rising from 0 to 4, in config.json as eagle_config.eagle_aux_hidden_state_layer_ids",
        f"drafter {tmp_path} was made for a target of hidden_size 32, this one has 64: use one "
        "that was made for this target",
        "dtype of d2t: F32 in the file, but these are whole numbers",
        "missing: embed_tokens.weight",
        "missing: norm.weight",
        "shape of fc.weight: [64, 128] in the file, [64, 64] by config.json",
        "unexpected: midlayer.self_attn.q_norm.weight",
    ]


def test_every_reason_against_mtp_modules_is_named(model: Path, tmp_path: Path) -> None:
    head = write_mtp_head(tmp_path / "head", model, mtp_hybrid_override_pattern="*E")
    assert problems_of(MtpSource, head, model) == []
    edit(
        head,
        {
            "mtp.layers.0.hnorm.weight": None,
            "mtp.layers.1.mixer.experts.5.up_proj.weight": None,
            "mtp.layers.2.norm.weight": torch.ones(64),
        },
    )
    target = write_model(tmp_path / "wide", vocab_size=128, hidden_size=80)
    assert sorted(problems_of(MtpSource, head, target)) == [
        f"drafter {head} has hidden_size 64, the target 80: use one that was made for this target",
        f"drafter {head} has vocab_size 96, the target 128: use one that was made for this target",
        "missing: mtp.layers.0.hnorm.weight",
        "missing: mtp.layers.1.mixer.experts.up_proj[5]",
        "unexpected: mtp.layers.2.norm.weight",
    ]


def test_modules_draft_no_more_tokens_than_they_are(model: Path, tmp_path: Path) -> None:
    write_mtp_head(tmp_path, model, num_nextn_predict_layers=3)
    wrong = problems_of(MtpSource, tmp_path, model)
    assert wrong == [
        f"--speculative-num-steps 5: drafter {tmp_path} has 3 modules, one for each token ahead; "
        "set it to 3 at most"
    ]


def test_a_target_without_mtp_modules_is_named(model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{model}: num_nextn_predict_layers is None"):
        MtpSource(engine_config(model, ""), ModelConfig.from_pretrained(model))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; known: 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ({"norm_before_fc": True}, "norm_before_fc True"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_another_layout_of_eagle3_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    config = {**EAGLE3_CONFIG, **changes}
    given = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(UnsupportedModel, match=words):
        read_as("eagle3", tmp_path)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [({59: 37}, "token 96 of a vocabulary of 96"), ({1: -1}, "one token of the target to two")],
)
def test_a_token_map_that_leads_astray_is_refused(
    model: Path, tmp_path: Path, offsets: dict[int, int], words: str
) -> None:
    folder = write_eagle3_head(tmp_path, model)
    d2t = torch.zeros(60, dtype=torch.int64)
    for i, offset in offsets.items():
        d2t[i] = offset
    edit(folder, {"d2t": d2t})
    head = Eagle3Head(read_as("eagle3", folder))
    load_weights(head, folder)
    with pytest.raises(CheckpointError, match=words):
        head.check_tokens()
