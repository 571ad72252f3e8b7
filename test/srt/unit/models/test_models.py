"""Models against transformers in float32, and what configs and checkpoints are refused for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import CHUNK, MODEL_CONFIG, load_model, write_head, write_model
from torch import Tensor

from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.model_config import ModelConfig, UnsupportedModel
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import CheckpointError, load_weights, random_weights
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM
from mamba_eagle.models.registry import model_class, parse_config, read_model_config

torch.set_num_threads(1)

# time_step_min 1e-9 in all of them: transformers takes it for the lower limit of dt in its chunked
# scan (but not where it decodes), and published checkpoints mean no such limit
PEER_CONFIGS = {
    "pattern-two-groups-head-of-12": {},
    "list-one-group-head-of-20": {
        "hybrid_override_pattern": None,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba", "mlp", "attention"],
        "n_groups": 1,
        "mamba_num_heads": 5,
        "mamba_head_dim": 20,
        "ssm_state_size": 10,
        "use_conv_bias": False,
        "layer_norm_epsilon": 1e-3,
    },
    "new-names-two-groups-head-of-24": {
        "hybrid_override_pattern": None,
        "layers_block_type": ["linear_attention", "linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 24,
        "num_key_value_heads": 4,
        "conv_kernel": 3,
        "chunk_size": 8,
    },
}


def write_for_both(folder: Path, changes: dict[str, object]) -> Path:
    """A checkpoint in which no weight is a one or a zero that may be forgotten."""
    changes = {"bos_token_id": 1, "pad_token_id": 0, **changes}
    config = {name: value for name, value in (MODEL_CONFIG | changes).items() if value is not None}
    write_model(folder, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if "norm" in name or name.endswith((".D", "conv1d.bias")):
            weights[name] = value + 0.5 * torch.randn(value.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def peers_logits(folder: Path, tokens: Tensor) -> Tensor:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(tokens, use_cache=False).logits


def our_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = load_model(folder)
    hidden = model(tokens.flatten(), FullSequenceContext(*tokens.shape))
    return model.compute_logits(hidden).unflatten(0, tokens.shape)


@pytest.mark.parametrize("changes", PEER_CONFIGS.values(), ids=PEER_CONFIGS)
def test_logits_equal_those_of_transformers(changes: dict, tmp_path: Path) -> None:
    folder = write_for_both(tmp_path, changes)
    tokens = torch.randint(0, 96, (2, 3 * CHUNK + 5), generator=torch.Generator().manual_seed(1))
    expected = peers_logits(folder, tokens)
    assert expected.std() > 1.0, "flat logits would hide a difference"
    assert (our_logits(folder, tokens) - expected).abs().max() <= 1e-4


@pytest.mark.skipif(
    not (EMBEDDED_MODEL / "model.safetensors").is_file(), reason="the embedded model is not there"
)
def test_logits_of_the_embedded_model_equal_those_of_transformers() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = "Question: Tom has 3 apples and buys 14 more. How many apples does he have now?\nAnswer:"
    tokens = torch.tensor([tokenizer.encode(text * 3).ids])
    expected = peers_logits(EMBEDDED_MODEL, tokens)
    assert (our_logits(EMBEDDED_MODEL, tokens) - expected).abs().max() <= 1e-4


# ── what is refused ──


def edit_weights(folder: Path, change: dict[str, Tensor | None]) -> None:
    """New tensors by name; None removes one."""
    weights = load_file(folder / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    save_file(weights, folder / "model.safetensors")


def test_a_checkpoint_that_does_not_fit_is_refused_with_every_name(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_weights(
        tmp_path,
        {
            "backbone.layers.0.mixer.A_log": None,
            "lm_head.weight": None,
            "backbone.layers.9.mixer.D": torch.zeros(3),
            "backbone.layers.2.mixer.up_proj.bias": torch.zeros(112),
            "backbone.norm_f.weight": torch.zeros(63),
            "backbone.layers.3.mixer.conv1d.weight": torch.zeros(160, 1, 3),
        },
    )
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path)
    lines = sorted(line.strip() for line in str(refused.value).splitlines()[1:])
    assert lines == [
        "missing: backbone.layers.0.mixer.A_log",
        "missing: lm_head.weight",
        "shape of backbone.layers.3.mixer.conv1d.weight: [160, 1, 3] in the file, "
        "[160, 1, 4] by config.json",
        "shape of backbone.norm_f.weight: [63] in the file, [64] by config.json",
        "unexpected: backbone.layers.2.mixer.up_proj.bias",
        "unexpected: backbone.layers.9.mixer.D",
    ]


def test_a_folder_without_weights_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks safetensors files.*--load-format dummy"):
        load_model(tmp_path)


def test_sharded_checkpoints_load_and_missing_shards_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "whole")
    write_model(tmp_path / "shards")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    shards = tmp_path / "shards"
    (shards / "model.safetensors").unlink()
    names = sorted(whole)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: whole[name] for name in names if files[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name, parameter in load_model(shards).named_parameters():
        assert torch.equal(parameter, whole[name])
    (shards / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks .*part-1\.safetensors"):
        load_model(shards)


def test_weights_of_another_dtype_are_converted(tmp_path: Path) -> None:
    write_model(tmp_path)
    exact = load_file(tmp_path / "model.safetensors")
    edit_weights(tmp_path, {name: value.bfloat16() for name, value in exact.items()})
    for name, parameter in load_model(tmp_path).named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, exact[name].bfloat16().float())


def config_with(**changes: object) -> ModelConfig:
    values = {**MODEL_CONFIG, **changes}
    return parse_config({k: v for k, v in values.items() if v is not None})


def test_unknown_layer_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"\['X'\].*known"):
        config_with(hybrid_override_pattern="M*XM-")
    with pytest.raises(UnsupportedModel, match=r"\['mtp', 'swa'\].*known"):
        config_with(layers_block_type=["mamba", "swa", "mlp", "mtp", "swa"])
    with pytest.raises(UnsupportedModel, match="neither layers_block_type nor hybrid_override"):
        config_with(hybrid_override_pattern=None)


def test_other_activations_are_refused_by_name() -> None:
    """Their weights would load, and give another text."""
    with pytest.raises(UnsupportedModel, match="mlp_hidden_act 'silu'.*relu2"):
        config_with(mlp_hidden_act="silu")
    with pytest.raises(UnsupportedModel, match="mamba_hidden_act 'gelu'.*silu"):
        config_with(mamba_hidden_act="gelu")
    assert config_with(mlp_hidden_act="relu2", mamba_hidden_act="silu") == config_with()


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'GPT2LMHeadModel'.*NemotronHForCausalLM"):
        config_with(architectures=["GPT2LMHeadModel"])
    assert model_class(config_with()) is NemotronHForCausalLM


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.*give the folder of a checkpoint"):
        read_model_config(tmp_path / "nowhere")


def test_both_forms_of_the_layer_order_mean_the_same() -> None:
    expected = config_with()
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    old_names = {"M": "mamba", "*": "attention", "-": "mlp"}
    for kinds in (names, old_names):
        blocks = [kinds[letter] for letter in "M*-M"]
        for field in ("layers_block_type", "layer_types"):
            listed = config_with(hybrid_override_pattern=None, **{field: blocks})
            assert listed == expected
    assert expected.blocks == ("recurrent", "attention", "mlp", "recurrent")
    assert (expected.num_recurrent_layers, expected.num_attention_layers) == (2, 1)


def test_time_step_limits_are_read_and_kept_to() -> None:
    infinite = config_with(time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert infinite.recurrence is not None and infinite.recurrence == config_with().recurrence
    limited = config_with(time_step_limit=[0.25, 0.5])
    mixer = NemotronHForCausalLM(limited).backbone.layers[0].mixer
    random_weights(mixer, seed=0)
    steps = mixer.requires_grad_(False).step_size(
        torch.linspace(-10, 10, 50)[:, None].expand(-1, 8)
    )
    assert float(steps.min()) == 0.25 and float(steps.max()) == 0.5


def test_stop_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    assert read_model_config(tmp_path).eos_token_ids == (11, 12)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", ["</s>", 2.5, [2, None], {"id": 2}, True], ids=repr)
def test_a_stop_token_of_the_wrong_type_is_named(tmp_path: Path, file: str, eos: object) -> None:
    write_model(tmp_path)
    path = tmp_path / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, "eos_token_id": eos}))
    with pytest.raises(UnsupportedModel) as caught:
        read_model_config(tmp_path)
    assert f"eos_token_id = {json.dumps(eos)}" in str(caught.value)


def test_a_head_is_loaded_from_its_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_head(tmp_path / "head", tmp_path / "model")
    head = EagleHead(read_model_config(tmp_path / "head"))
    load_weights(head, tmp_path / "head")
