"""A random hybrid model and a draft head for it, small enough to run a step in milliseconds.

The numbers are odd on purpose (head_dim 12, two groups, chunks of 16), so that a mixed-up dimension
or a boundary off by one does not fit by chance.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import load_weights, random_weights
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM
from mamba_eagle.models.registry import model_class, parse_config, read_model_config

VOCAB = 96
CHUNK = 16
EOS = 2

MODEL_CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "chunk_size": CHUNK,
    "time_step_min": 1e-9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 112,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
}

DELTA_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "partial_rotary_factor": 0.4,
    "rope_theta": 10000.0,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
}

# The least that a GPU's kernels take.
GPU_DELTA_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

HEAD_CONFIG = {
    "architectures": ["EagleHead"],
    "model_type": "eagle",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "hybrid_override_pattern": "*-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}


def write_model(
    folder: Path, seed: int = 0, finer: bool = False, scaled: bool = False, **changes: object
) -> Path:
    """A target whose text depends on all of its history, with logits about 4 wide: the best two
    are far apart beside any rounding, and sampling at temperature 1 still chooses. Weights are
    bfloat16 numbers, as published ones are, unless ``finer``. scaled: norms and D are not ones."""
    config = {**MODEL_CONFIG, **changes}
    model = NemotronHForCausalLM(parse_config(config))
    random_weights(model, seed)
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(20.0)
        model.lm_head.weight.mul_(10.0)
        for name, parameter in model.named_parameters():
            if "mixer" in name and name.endswith(("_proj.weight", "conv1d.weight")):
                parameter.mul_(3.0)
            if name.endswith("dt_bias"):
                parameter.add_(2.0)  # steps of 0.02 to 0.7: heads forget in 2 to 100 tokens
            if scaled and ("norm" in name or name.endswith("D")):
                parameter.mul_(1 + torch.rand_like(parameter) / 2)
    if not finer:
        round_to_bfloat16(model)
    return write_folder(folder, config, model)


def write_delta_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """The same with gated DeltaNet layers, of Qwen3.5 or another family (``architectures``)."""
    config = {**DELTA_CONFIG, **changes}
    parsed = parse_config(config)
    model = model_class(parsed)(parsed)
    random_weights(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(20.0)
            elif "lm_head" in name:
                parameter.mul_(10.0)
            elif name.endswith("_proj.weight") or "conv1d" in name or "in_proj" in name:
                parameter.mul_(3.0)
            elif "norm" in name:
                parameter.copy_(torch.rand_like(parameter) / 2 + ("linear_attn" in name))
    round_to_bfloat16(model)
    return write_folder(folder, config, model)


def write_head(folder: Path, model_folder: Path, seed: int = 1, **changes: object) -> Path:
    """A head that guesses right now and then: a random one whose ``fc`` is a least-squares fit of
    the target's hidden states on random tokens. Its attention sees the whole prefix."""
    target = load_model(model_folder)
    config = {**HEAD_CONFIG, "vocab_size": target.config.vocab_size, **changes}
    head = EagleHead(parse_config(config))
    random_weights(head, seed)
    generator = torch.Generator().manual_seed(seed)
    batch, length = 60, 50
    vocab = target.config.vocab_size
    tokens = torch.randint(0, vocab, (batch * length,), generator=generator)
    with torch.no_grad():
        hidden = target(tokens, FullSequenceContext(batch, length)).unflatten(0, (batch, length))
        embeddings = target.embed(tokens).unflatten(0, (batch, length))
        inputs = torch.cat([embeddings[:, 1:], hidden[:, :-1]], dim=2).flatten(0, 1)
        fit = torch.linalg.lstsq(inputs.double(), hidden[:, 1:].flatten(0, 1).double()).solution
        head.fc.weight.copy_(fit.t())
    round_to_bfloat16(head)
    return write_folder(folder, config, head)


def load_model(folder: Path) -> CausalLM:
    """The model alone, without a runner, as a full forward pass needs it."""
    config = read_model_config(folder)
    model = model_class(config)(config)
    load_weights(model, folder)
    return model.requires_grad_(False)


def load_head(folder: Path) -> EagleHead:
    head = EagleHead(read_model_config(folder))
    load_weights(head, folder)
    return head.requires_grad_(False)


def round_to_bfloat16(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def write_folder(folder: Path, config: dict[str, object], model: nn.Module) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    return folder
