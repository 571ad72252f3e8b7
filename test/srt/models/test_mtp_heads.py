"""Multi-token-prediction modules against a plain computation from their files, and what their
folders are refused for."""

from __future__ import annotations

import json
from pathlib import Path

import plain_heads
import pytest
import torch
from head_rig import (
    BATCH,
    CLOSE,
    LENGTH,
    edit,
    engine_config,
    problems_of,
    random_tokens,
    roughen,
    run_chain,
    run_drafts,
)
from safetensors.torch import load_file
from tensor_checks import host_backend
from tiny_heads import GrowingSequence, log_probs, write_mtp_head
from tiny_model import MODEL_CONFIG, load_model, write_model
from torch import Tensor

from mamba_eagle.drafting.mtp import MtpNetwork, MtpSource
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config_json import read_values
from mamba_eagle.models.loader import load_weights
from mamba_eagle.models.mtp import MtpHead
from mamba_eagle.models.registry import read_model_config

torch.set_num_threads(1)

DEEP = 3
MODULES = {"published": (1, "*E"), "mamba": (2, "M-"), "three": (3, "*-"), "both": (2, "M*")}
SIZES_OF_THE_TARGET = {
    name: MODEL_CONFIG[name]
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def mtp_network(folder: Path, target: CausalLM, prepared: bool = False) -> MtpNetwork:
    head = MtpHead(read_model_config(folder, "mtp"))
    load_weights(head, folder)
    if prepared:
        prepare_for_inference(head, host_backend().layer_ops)
    return MtpNetwork(head.requires_grad_(False), target)


def plain_modules(
    folder: Path, target: CausalLM, tokens: Tensor, hidden: Tensor, count: int
) -> list[Tensor]:
    """What each module makes of a true sequence: tokens [l], the target's hidden [l, h]."""
    w, config = load_file(folder / "model.safetensors"), read_values(folder)
    made = [hidden]
    for module in range(count):
        ahead = plain_heads.behind(made[-1])
        made.append(plain_heads.mtp(w, config, module, target.embed(tokens), ahead))
    return made[1:]


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
            exact = target.compute_logits(wanted[depth]).log_softmax(-1)
            torch.testing.assert_close(log_probs(network, depth, made), exact, **CLOSE)


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
        exact = target.compute_logits(wanted[depth][LENGTH - 1 + depth][None]).log_softmax(-1)
        torch.testing.assert_close(log_probs(network, depth, made[None]), exact, **CLOSE)


def test_a_single_module_drafts_from_its_own_output(model: Path, tmp_path: Path) -> None:
    folder = roughen(write_mtp_head(tmp_path, model, mtp_hybrid_override_pattern="*E"))
    w, target = load_file(folder / "model.safetensors"), load_model(model)
    network = mtp_network(folder, target)
    assert network.max_depth is None and network.carry_size == 0
    tokens, drafted = random_tokens(LENGTH), [5, 60, 7]
    hidden = target(tokens, FullSequenceContext(1, LENGTH))
    ahead, config = plain_heads.behind(hidden), read_values(folder)
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
    first = network.run_entries(tokens[:, :cut], entries[:, :cut], carry, ctx)
    carry = first[:, -1, : network.carry_size]
    second = network.run_entries(tokens[:, cut:], entries[:, cut:], carry, ctx)
    torch.testing.assert_close(torch.cat([first, second], dim=1), wanted, **CLOSE)


def test_mtp_modules_are_read_beside_the_target(model: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    alone = write_mtp_head(tmp_path / "head", folder, **SIZES_OF_THE_TARGET)
    write_mtp_head(folder, folder)
    assert any(name.startswith("mtp.") for name in load_file(folder / "model.safetensors"))
    load_model(folder)  # the target itself does without them
    source = MtpSource(engine_config(folder, ""), read_model_config(folder))
    assert source.path == str(folder) and source.problems() == []
    ours, theirs = (MtpHead(read_model_config(place, "mtp")) for place in (folder, alone))
    load_weights(ours, folder)
    load_weights(theirs, alone)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])


def test_a_layer_that_is_repeated_is_stored_once(tmp_path: Path) -> None:
    config = {**MODEL_CONFIG, "num_nextn_predict_layers": 3, "mtp_layers_block_type": ["attention"]}
    for repeated, blocks in ((False, 3), (True, 1)):
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "mtp_use_repeated_layer": repeated})
        )
        head = MtpHead(read_model_config(tmp_path, "mtp"))
        assert len(head.mtp.layers) == head.num_modules == blocks
        assert head.config.num_attention_layers == blocks


def test_a_module_that_is_counted_by_its_uses_is_repeated(model: Path, tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5946 wrote the number of uses for the number of modules."""
    folder = write_mtp_head(tmp_path, model, num_nextn_predict_layers=1)
    edit(folder, num_nextn_predict_layers=2)
    source = MtpSource(engine_config(model, folder), read_model_config(model))
    assert source.problems() == [] and source.module().num_modules == 1
    assert source.config.num_attention_layers == 1
    edit(folder, {"mtp.layers.2.norm.weight": torch.ones(64)})
    assert "missing: mtp.layers.3.norm.weight" in problems_of(MtpSource, folder, model)


# ── what is refused ──


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
        f"--speculative-num-steps 5: drafter {tmp_path} has 3 modules, one per depth of the tree; "
        "set it to 3 at most"
    ]


def test_a_target_without_mtp_modules_is_named(model: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"{model}/config.json: num_nextn_predict_layers is None"
    ):
        MtpSource(engine_config(model, ""), read_model_config(model))
