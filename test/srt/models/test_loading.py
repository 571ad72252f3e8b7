"""Checkpoints as they are published: names, shards, hub names, quantized weights, memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peer_models import CHUNK, PEERS, VOCAB, make_peer, peer_logits
from safetensors.torch import load_file, save_file
from tiny_model import load_model
from torch import Tensor

from mamba_eagle.config import ConfigError, EngineConfig, ServerConfig
from mamba_eagle.hub import NotFound, checkpoint_folder
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models import loader
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config_json import read_json
from mamba_eagle.models.falcon_h1 import multipliers
from mamba_eagle.models.loader import CheckpointError, created_as, random_weights
from mamba_eagle.models.registry import model_class, parse_config, read_model_config
from mamba_eagle.resolve import resolve

TOKENS = torch.randint(0, VOCAB, (2, 45), generator=torch.Generator().manual_seed(5))


def logits(model: CausalLM) -> Tensor:
    hidden = model(TOKENS.flatten(), FullSequenceContext(*TOKENS.shape))
    return model.compute_logits(hidden).unflatten(0, TOKENS.shape)


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**values, **changes}))


def saved(name: str, folder: Path) -> tuple[Any, Path]:
    model = make_peer(name)
    model.save_pretrained(folder)
    return model, folder


def test_multipliers_are_what_the_config_says_whatever_the_model_is_made_as() -> None:
    """Weights are multiplied as they are read, on the CPU, before they are rounded."""
    config = parse_config(PEERS["falcon-h1"][1] | {"architectures": ["FalconH1ForCausalLM"]})
    expected = multipliers(config)
    with created_as(torch.bfloat16, torch.device("meta")):
        found = multipliers(config)
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


# ── names ──


def test_state_spaces_names_and_config_give_the_same_model(tmp_path: Path) -> None:
    peer, folder = saved("mamba2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    embedding = weights.pop("backbone.embeddings.weight")
    weights["backbone.embedding.weight"] = embedding
    weights["lm_head.weight"] = embedding.clone()  # tied, and published all the same
    save_file(weights, folder / "model.safetensors")
    (folder / "generation_config.json").unlink()
    state_spaces = {
        "d_model": 64,
        "d_intermediate": 0,
        "n_layer": 3,
        "vocab_size": VOCAB - 3,
        "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 24, "chunk_size": CHUNK},
        "attn_layer_idx": [],
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(state_spaces))
    assert (logits(load_model(folder)) - peer_logits(peer, TOKENS)).abs().max() <= 2e-4


def test_mtp_layers_beside_the_model_are_left_out(tmp_path: Path) -> None:
    _, folder = saved("nemotron-3-super", tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "mtp.layers.0.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    load_model(folder)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    _, folder = saved("nemotron-3-nano", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["backbone.layers.1.mixer.experts.5.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing: .*layers\.1\.mixer\.experts\.up_proj\[5\]"
    ):
        load_model(folder)


def test_a_shared_block_published_more_than_once_is_read(tmp_path: Path) -> None:
    peer, folder = saved("zamba2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        if "layers.1.shared_transformer" in name and "adapter" not in name:
            weights[name.replace("layers.1.", "layers.4.")] = weights[name].clone()
    save_file(weights, folder / "model.safetensors")
    assert (logits(load_model(folder)) - peer_logits(peer, TOKENS)).abs().max() <= 2e-4


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_of_a_multimodal_checkpoint_the_text_part_is_read(name: str, tmp_path: Path) -> None:
    """As transformers writes one: its sizes in text_config, its tensors under a prefix, those of
    the vision part beside them."""
    prefix = PEERS[name][0]
    text = make_peer(name)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 4}
    kind = getattr(transformers, f"{prefix}Config")
    config = kind(text_config=text.config.to_dict(), vision_config=vision)
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    parts = ("model.language_model.", "model.visual.", "lm_head.")
    assert {part for name in stored for part in parts if name.startswith(part)} == set(parts)
    found = logits(load_model(tmp_path))
    assert (found - peer_logits(text, TOKENS)).abs().max() <= 2e-4
    save_file({**stored, "model.audio.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.audio.weight"):
        load_model(tmp_path)


def test_frequencies_that_older_checkpoints_have_are_left_out(tmp_path: Path) -> None:
    peer, folder = saved("llama-linear", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors")
    assert (logits(load_model(folder)) - peer_logits(peer, TOKENS)).abs().max() <= 2e-4


def test_the_same_weights_in_another_layout_are_left_out(tmp_path: Path) -> None:
    _, folder = saved("mamba2", tmp_path)
    save_file({"layers.0.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    load_model(folder)


# ── what is refused ──


def test_broken_files_are_all_named(tmp_path: Path) -> None:
    _, folder = saved("mamba2", tmp_path)
    whole = folder / "model.safetensors"
    (folder / "half.safetensors").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (folder / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    whole.rename(folder / "good.safetensors")
    with pytest.raises(CheckpointError, match=r"git lfs pull") as refused:
        load_model(folder)
    broken = [line.strip().split(":")[0] for line in str(refused.value).splitlines()[1:]]
    assert broken == [str(folder / "half.safetensors"), str(folder / "pointer.safetensors")]


def described(**tensors: tuple[int, int]) -> bytes:
    """A safetensors file of 16 bytes whose header says where tensors of bytes begin and end."""
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in tensors.items()
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(described(a=(0, 12), b=(8, 16)), id="overlap"),
        pytest.param(described(a=(0, 8), b=(0, 8), c=(8, 16)), id="the same bytes twice"),
        pytest.param(described(a=(0, 4), b=(8, 16)), id="a hole"),
        pytest.param(described(a=(0, 8)), id="bytes of no tensor"),
        pytest.param(described(a=(0, 16), b=(16, 32)), id="outside"),
    ],
)
def test_tensors_that_do_not_fill_their_file_side_by_side_are_refused(
    content: bytes, tmp_path: Path
) -> None:
    (file := tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        loader.stored_tensors(tmp_path)


def test_a_tensor_of_two_files_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file(
            {"a": torch.ones(3), f"b{number}": torch.ones(3)}, tmp_path / f"{number}.safetensors"
        )
    with pytest.raises(
        CheckpointError, match=r"tensors twice.*\n  a: in .*1.safetensors and "
    ) as error:
        loader.stored_tensors(tmp_path)
    assert "b: in" not in str(error.value)


@pytest.mark.parametrize("places", [None, [], {"a": 1}])
def test_an_index_without_files_is_named(places: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"index.json: weight_map must name a file"):
        loader.stored_tensors(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("text", "words"), [("{ no", "is not valid JSON: Expecting"), ("[1]", r"holds \[1\] instead")]
)
def test_a_description_that_is_no_json_object_is_named(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    _, folder = saved("mamba2", tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(UnsupportedModel, match=f"{name}.*{words}"):
        read_model_config(folder)


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be read: Is a directory"):
        read_json(tmp_path)  # as without permission, which the tests' user may have


def test_weights_that_may_not_be_read_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests' user may be root
    with pytest.raises(CheckpointError, match="may not read .*model.safetensors: change mode"):
        loader.stored_tensors(tmp_path)


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    _, folder = saved("mamba2", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*save_file"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'.*BambaForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, folder = saved("bamba", tmp_path)
    edit(folder, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        read_model_config(folder)


@pytest.mark.parametrize("name", ["mamba_n_heads", "vocab_size", "hidden_size"])
def test_a_config_that_lacks_something_is_refused_by_name(name: str, tmp_path: Path) -> None:
    _, folder = saved("bamba", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    del values[name]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=f"BambaForCausalLM lacks '{name}'"):
        read_model_config(folder)


# ── where from, into what ──


def test_names_come_from_the_local_cache_and_are_refused_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / commit
    saved("mamba2", snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert checkpoint_folder("someone/tiny") == snapshot
    assert checkpoint_folder("someone/tiny", commit) == snapshot
    config = resolve(ServerConfig(model_path="someone/tiny", speculative_algorithm="NONE"))
    assert config.model_path == config.tokenizer_path == str(snapshot)
    assert config.served_model_name == "someone/tiny"
    assert resolve(ServerConfig()).served_model_name == "mamba2-math-6m"
    with pytest.raises(NotFound, match="huggingface.co did not give someone/tiny, revision v2"):
        checkpoint_folder("someone/tiny", "v2")
    with pytest.raises(ConfigError, match="--model-path someone/else: no such folder, not in the"):
        resolve(EngineConfig(model_path="someone/else"))
    with pytest.raises(ConfigError, match="--model-path /not/there: no such folder; give"):
        resolve(EngineConfig(model_path="/not/there"))
    with pytest.raises(ConfigError, match="--model-path .*: the folder has neither config.json"):
        resolve(EngineConfig(model_path=str(refs)))


def test_parameters_are_made_in_the_wanted_dtype_but_for_the_few_that_must_be_exact() -> None:
    config = parse_config(
        {**make_peer("nemotron-3-nano").config.to_dict(), "architectures": ["NemotronHForCausalLM"]}
    )
    with created_as(torch.bfloat16, torch.device("cpu")):
        model = model_class(config)(config)
    assert torch.get_default_dtype() == torch.float32
    random_weights(model, 0)
    exact = {n.rsplit(".", 1)[1] for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert exact == {"A_log", "D", "dt_bias", "e_score_correction_bias"}


def test_large_checkpoints_show_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, folder = saved("mamba2", tmp_path / "some-model")
    capfd.readouterr()
    load_model(folder)
    assert "loading" not in capfd.readouterr().err
    monkeypatch.setattr(loader, "PROGRESS_FROM_BYTES", 0)
    load_model(folder)
    assert re.search(r"loading some-model: +100%", capfd.readouterr().err)


MEASURE = """
import sys, torch
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.models.loader import created_as, load_weights

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(Embedding(1 << 14, 640) for _ in range(12))

with created_as(torch.bfloat16, torch.device("cpu")):
    model = Big()
before = peak()
load_weights(model, sys.argv[1])
size = sum(p.nbytes for p in model.parameters())
print((peak() - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    weights = {f"parts.{i}.weight": torch.ones(1 << 14, 640).bfloat16() for i in range(12)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    run = [sys.executable, "-c", MEASURE, str(tmp_path)]
    share = float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert 0.9 < share <= 1.2
