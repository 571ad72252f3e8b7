"""The embedded model's config.json, and the folder that its training writes and reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from mamba2_math.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_json
from mamba_eagle.train.trainer import save_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

_PATTERN = "M-M*M-M-M*M-"

# time_step_min is next to nothing because transformers clamps dt to it in its chunked scan and not
# in decode, and not 0 because transformers takes its logarithm when it initializes a model.
# time_step_limit is left at its default, [0, inf], which plain JSON cannot say.
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "num_hidden_layers": len(_PATTERN),
    "hybrid_override_pattern": _PATTERN,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "chunk_size": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "time_step_min": 1e-9,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "intermediate_size": 768,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": True,
    "initializer_range": 0.02,
    "hidden_dropout": 0.0,
    "max_position_embeddings": 8192,
    "num_logits_to_keep": 1,
    "use_cache": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def save_model(
    model: nn.Module, folder: Path, tokenizer_folder: Path, config: dict[str, Any]
) -> None:
    """A complete checkpoint of a language model: weights, configs and tokenizer."""
    save_weights(model.state_dict(), folder, config)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    write_json(folder / "generation_config.json", {**generation, "do_sample": False})
    for name in TOKENIZER_FILES:
        if folder.resolve() != tokenizer_folder.resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copies a folder's weights into the model, in the model's own dtype and device."""
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict(weights, strict=True)
