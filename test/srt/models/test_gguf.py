"""GGUF files are served as the checkpoints that they were made from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peer_models
import pytest
import torch
from adapter_rig import merge, module_names, write_adapter
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf_writer import PEERS, add, as_published, packed, rounded, takes, write
from runner_harness import Engine, Settings, greedy
from safetensors.numpy import load_file, save_file
from tiny_model import load_model
from torch import Tensor

from mamba_eagle.config import ConfigError, EngineConfig, ServerConfig
from mamba_eagle.gguf_files.file import TENSOR_TYPES, open_gguf
from mamba_eagle.hub import NotFound, checkpoint_folder
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.ops import TORCH
from mamba_eagle.layers.products import PackedProduct
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.lora.peft import AdapterError
from mamba_eagle.lora.slots import AdapterSlots
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import CheckpointError, load_weights
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.models.split import split_model
from mamba_eagle.parallel.shard import Shard, local
from mamba_eagle.quantization.gguf_blocks import BLOCKS, grouped
from mamba_eagle.resolve import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(0, peer_models.VOCAB, (2, 45), generator=torch.Generator().manual_seed(5))
FEW_BITS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K")
# sizes that every type's blocks fit, and multipliers of 1: with them rounding and converting
# commute, so that what is expected can be written as safetensors
WIDE: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 256, "num_heads": 32, "num_hidden_layers": 2},
    "granite": {
        "hidden_size": 256,
        "mamba_n_heads": 32,
        "shared_intermediate_size": 256,
        "intermediate_size": 256,
        "layer_types": ["mamba", "attention"],
        "num_hidden_layers": 2,
    },
    "nemotron-h": {"hidden_size": 256, "hybrid_override_pattern": "M*-", "intermediate_size": 256},
    "qwen3-next": {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_experts": 4,
    },
    "qwen3.5": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "linear_value_head_dim": 256,  # its columns move in whole blocks of every type
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
}


def logits(model: CausalLM) -> Tensor:
    hidden = model(TOKENS.flatten(), FullSequenceContext(*TOKENS.shape))
    return model.compute_logits(hidden)


def checkpoint(name: str, folder: Path, **changes: Any) -> Path:
    """Of transformers, with the config.json of a published one."""
    prefix, settings = PEERS[name]
    peer_models.PEERS[f"gguf-{name}"] = (prefix, {**settings, **changes})
    peer_models.make_peer(f"gguf-{name}").save_pretrained(folder)
    as_published(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(name: str, wide: bool = False) -> tuple[Path, Path]:
        """A checkpoint's folder and its GGUF file."""
        changes = WIDE[name] if wide else {}
        folder = checkpoint(name, tmp_path_factory.mktemp(name), **changes)
        write(folder, file := folder.with_suffix(".gguf"))
        return folder, file

    return make


# ── every family, every type ──


@pytest.mark.parametrize("name", PEERS)
def test_a_file_has_the_checkpoints_config_and_logits(name: str, made) -> None:
    folder, file = made(name)
    config, expected = read_model_config(file), read_model_config(folder)
    shared = ("architecture", "vocab_size", "hidden_size", "blocks", "attention", "moe", "dtype")
    for field in (*shared, "tie_word_embeddings"):
        mine, theirs = getattr(config, field), getattr(expected, field)
        if field == "attention" and theirs is not None:
            if "falcon" not in name:  # there the keys' multiplier is in the weights
                assert mine.scale == pytest.approx(theirs.scale)
            mine = replace(mine, scale=theirs.scale)
        assert mine == theirs, field
    assert config.norm_eps == pytest.approx(expected.norm_eps)
    mine, theirs = config.recurrence, expected.recurrence
    assert mine.num_heads == theirs.num_heads and mine.state_shape == theirs.state_shape
    assert getattr(mine, "norm", None) == getattr(theirs, "norm", None)
    difference = float((logits(load_model(file)) - logits(load_model(folder))).abs().max())
    assert difference <= 5e-5


def in_few_bits(source: Path, out: Path, dtype: str) -> tuple[Path, Path]:
    """A checkpoint with the dequantized weights, and the file with those of few bits."""
    shutil.copytree(source, folder := out / "rounded")
    write(folder, file := out / "model.gguf", dtype)
    found = load_file(folder / "model.safetensors")
    kept = ("conv1d", "norm", "router", "gate.weight")
    changed = 0
    for label, value in found.items():
        if takes(dtype, label, value) and not any(part in label for part in kept):
            found[label] = rounded(value, dtype)
            changed += 1
    assert changed > 4
    save_file(found, folder / "model.safetensors")
    return folder, file


@pytest.mark.parametrize("dtype", FEW_BITS)
@pytest.mark.parametrize("name", WIDE)
def test_matrices_of_few_bits_are_what_the_file_says(
    name: str, dtype: str, tmp_path: Path, made
) -> None:
    """The logits are those of a safetensors checkpoint with the dequantized weights."""
    folder, file = in_few_bits(made(name, wide=True)[0], tmp_path, dtype)
    stored = {info.dtype for info in open_gguf(file).tensors.values()}
    assert stored == {"F32", dtype}
    difference = float((logits(load_model(file)) - logits(load_model(folder))).abs().max())
    assert difference <= 5e-5


@pytest.mark.parametrize("dtype", BLOCKS)
def test_blocks_become_groups_without_a_change_of_any_number(dtype: str) -> None:
    kind = GGMLQuantizationType[dtype]
    value = np.random.default_rng(0).standard_normal((3, 6, 512)).astype(np.float32)
    raw = packed(value, kind)
    matrix = grouped(torch.from_numpy(raw), dtype)
    assert matrix.shape == value.shape
    assert np.array_equal(matrix.dequantize().numpy(), quants.dequantize(raw, kind))
    # the blocks are what they are meant to be: at most half a step of the number of bits away
    assert np.abs(value - matrix.dequantize().numpy()).max() < 8.0 / 2**matrix.bits


def test_every_type_that_is_taken_can_be_dequantized() -> None:
    for name in TENSOR_TYPES:
        kind = GGMLQuantizationType[name]
        block, size = quants.GGML_QUANT_SIZES[kind]
        assert quants.dequantize(np.zeros((2, size), np.uint8), kind).shape == (2, block)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["granite", "nemotron-h", "qwen3.5"])
def test_a_rank_gets_its_part(name: str, rank: int, tmp_path: Path, made) -> None:
    """Q8_0, so that scales are cut with their numbers; the part of what is dequantized whole."""
    folder, _ = made(name, wide=True)
    write(folder, file := tmp_path / "model.gguf", "Q8_0")
    config, shard = read_model_config(file), Shard(rank, 2)
    whole = dict(load_model(file).named_parameters())
    split = split_model(model_class(config), config, shard)
    assert split is not None
    part = model_class(config)(local(config, shard))
    load_weights(part, file, split=split)
    cut = 0
    for label, parameter in part.named_parameters():
        expected = split.cuts[label].of(whole[label]) if label in split.cuts else whole[label]
        assert torch.equal(parameter, expected), label
        cut += label in split.cuts
    assert cut > 5


@pytest.mark.parametrize("adapted", [False, True])
def test_a_file_is_served_as_its_checkpoint(adapted: bool, tmp_path: Path, made) -> None:
    """From a prompt in chunks, through trees of n-grams; with an adapter as the merged one."""
    folder, file = made("nemotron-h")
    if adapted:
        adapter = write_adapter(tmp_path / "adapter", folder, 1)
        folder = merge(tmp_path / "merged", folder, adapter)
    texts = []
    for path in (folder, file):
        slots = {"max_loras": 1} if adapted and path is file else {}
        engine = Engine(path, None, Settings("NGRAM"), context_length=160, **slots)
        if slots:
            engine.runner.adapters.keep(7, engine.runner.adapters.read(str(adapter)))
            engine.runner.adapters.load(0, 7)
        asks = {"adapter": 0} if slots else {}
        live = engine.admit(TOKENS[0].tolist(), greedy(16), **asks)
        engine.prefill(live, cuts=(7, 33))
        engine.finish([live])
        texts.append(live.output)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["granite", "nemotron-h", "qwen3.5"])
def test_adapters_fit_matrices_whose_rows_and_columns_a_file_has_moved(
    name: str, tmp_path: Path, made
) -> None:
    """The logits are those of a checkpoint of the dequantized weights with the adapter merged."""
    folder, file = in_few_bits(made(name, wide=True)[0], tmp_path, "Q8_0")
    own = load_model(file)
    slots = adapter_slots(own)
    leaves = ("q_proj", "k_proj", "in_proj", "in_proj_qkv", "in_proj_z", "out_proj", "down_proj")
    modules = [each for each in module_names(folder, leaves) if ".experts." not in each]
    adapter = write_adapter(tmp_path / "adapter", folder, 1, 3, modules)
    slots.keep(0, slots.read(str(adapter)))
    slots.load(0, 0)
    slots.admit(0, 0)
    with torch.no_grad(), slots.over(torch.tensor([0]), TOKENS.numel()):
        found = logits(own)
    wanted = logits(load_model(merge(tmp_path / "merged", folder, adapter)))
    assert float((found - wanted).abs().max()) <= 5e-4
    assert float((found - logits(own)).abs().max()) > 0.1


def adapter_slots(model: CausalLM) -> AdapterSlots:
    prepare_for_inference(model, TORCH)
    return AdapterSlots(model, None, TORCH, 1, 4, 1, torch.device("cpu"))


def test_adapters_are_refused_where_a_file_hides_factors(tmp_path: Path, made) -> None:
    """They are in Falcon's weights alone, so what they make of an adapter is not known. What else
    is wrong with it is listed as well."""
    folder, file = made("falcon-h1")
    modules = module_names(folder, ("q_proj",))
    adapter = write_adapter(tmp_path / "adapter", folder, 1, 9, modules)
    with pytest.raises(AdapterError, match=r"(?s)rank 9: .*factors that its GGUF file does not"):
        adapter_slots(load_model(file)).read(str(adapter))


@pytest.mark.parametrize("dtype", BLOCKS)
def test_a_cpu_multiplies_what_the_file_holds(dtype: str, tmp_path: Path, made) -> None:
    """Nothing is kept twice or in more bits, lm_head that is the embedding included; and texts do
    not depend on drafts."""
    folder, _ = made("granite", wide=True)
    write(folder, file := tmp_path / "model.gguf", dtype)
    texts = []
    for algorithm in ("NONE", "NGRAM"):
        engine = Engine(file, None, Settings(algorithm), context_length=160)
        live = engine.start(TOKENS[0].tolist(), greedy(16), cuts=(7, 33))
        engine.finish([live])
        texts.append(live.output)
    assert texts[0] == texts[1]
    model = engine.runner.model
    held = sum(info.nbytes for info in open_gguf(file).tensors.values())
    # scales and minimums of Q4_K are float32 once they are multiplied out
    assert weight_bytes(model) <= held * {"Q8_0": 1.03, "Q4_0": 1.03, "Q4_K": 1.34}[dtype]
    assert isinstance(model.lm_head.packed, PackedProduct)


# ── where from ──


def test_a_folder_stands_for_its_only_file(made, tmp_path: Path) -> None:
    _, file = made("mamba2")
    shutil.copy(file, tmp_path / "one.gguf")
    assert checkpoint_folder(str(tmp_path)) == tmp_path / "one.gguf"
    assert checkpoint_folder(str(file)) == file
    config = resolve(ServerConfig(model_path=str(tmp_path), speculative_algorithm="NONE"))
    assert config.model_path == config.tokenizer_path == str(tmp_path / "one.gguf")
    shutil.copy(file, tmp_path / "two.gguf")
    with pytest.raises(NotFound, match=r"several GGUF files .* name one of them: one.gguf, two"):
        checkpoint_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="--model-path /not/there.gguf: no such file; give"):
        resolve(EngineConfig(model_path="/not/there.gguf"))


def test_files_of_names_come_from_the_local_cache(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copy(made("mamba2")[1], snapshot / "tiny-F32.gguf")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert checkpoint_folder("someone/tiny/tiny-F32.gguf") == snapshot / "tiny-F32.gguf"
    with pytest.raises(NotFound, match="huggingface.co did not give someone/tiny/other.gguf"):
        checkpoint_folder("someone/tiny/other.gguf")


# ── refused ──


def edited(file: Path, out: Path, skip: str = "", **changes: Any) -> Path:
    """The file with other metadata: dots as two underscores."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    reader = GGUFReader(file)
    architecture = changes.pop("general.architecture", None)
    found = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture or found)
    for key, field in reader.fields.items():
        own = key.startswith("GGUF.") or key == "general.architecture"
        if not own and key != skip and key not in changes:
            add(writer, key, field.contents())
    for key, value in changes.items():
        add(writer, key, value)
    for tensor in reader.tensors:
        if tensor.name != skip:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba2", {"general__architecture": "rwkv7"}, "architecture 'rwkv7'; known in GGUF"),
        ("mamba2", {"split__count": 3}, "one of 3 parts .* llama-gguf-split --merge"),
        ("mamba2", {"skip": "mamba2.ssm.state_size"}, "lacks mamba2.ssm.state_size"),
        ("mamba2", {"mamba2__ssm__time_step_rank": 0}, "ssm.time_step_rank is 0, and must be"),
        ("granite", {"granitehybrid__attention__head_count": 0}, "attention.head_count is 0"),
        ("mamba2", {"mamba2__block_count": 4000000000}, "block_count is 4000000000, 0 of them"),
        ("mamba2", {"skip": "token_embd.weight"}, "no tensor token_embd.weight"),
        ("falcon-h1", {"falcon-h1__rope__scaling__type": "yarn"}, "rope.scaling.type 'yarn'"),
        ("falcon-h1", {"falcon-h1__rope__dimension_count": 8}, "on 8 of 16 channels"),
        ("nemotron-3-nano", {"nemotron_h_moe__expert_group_count": 4}, "experts in 4 groups"),
        ("nemotron-h", {"skip": "blk.2.ffn_up.weight"}, "layer 2 has none of ssm_in.weight"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, made, tmp_path: Path
) -> None:
    file = edited(made(name)[1], tmp_path / "edited.gguf", **changes)
    with pytest.raises(UnsupportedModel, match=message):
        read_model_config(file)


def test_missing_and_unknown_tensors_are_listed_with_their_names(made, tmp_path: Path) -> None:
    file = edited(made("mamba2")[1], tmp_path / "a.gguf", skip="blk.1.ssm_norm.weight")
    with pytest.raises(CheckpointError, match=r"missing: backbone.layers.1.mixer.norm.weight"):
        load_model(file)
    file = edited(made("mamba2")[1], tmp_path / "b.gguf", mamba2__block_count=2)
    config = read_model_config(file)
    model = model_class(config)(config)
    with pytest.raises(CheckpointError, match=r"unexpected: blk.2.attn_norm.weight"):
        load_weights(model, file)


def test_layers_for_drafting_are_left_out(made, tmp_path: Path) -> None:
    """They are counted with the others, and come last."""
    changes = {"mamba2__block_count": 3, "mamba2__nextn_predict_layers": 1}
    file = edited(made("mamba2")[1], tmp_path / "draft.gguf", **changes)
    assert load_model(file).config.blocks == ("recurrent",) * 2


def test_broken_files_are_named(made, tmp_path: Path) -> None:
    data = made("mamba2")[1].read_bytes()
    at = data.index(b"blk.0.ssm_in.weight") + len("blk.0.ssm_in.weight") + 4 + 16
    assert data[at : at + 4] == b"\0\0\0\0"  # the type of that tensor: F32
    offset = int.from_bytes(data[at + 4 : at + 12], "little")
    closer = (offset - 32).to_bytes(8, "little")
    cases = {
        "overlap": (
            data[: at + 4] + closer + data[at + 12 :],
            "ssm_in.weight begins at byte .* ins",
        ),
        "pointer": (b"version https://git-lfs.github.com/spec/v1", "is not a GGUF file"),
        "empty": (b"", "is not a GGUF file"),
        "short": (data[:-1000], "ends after .* download it again"),
        "header": (data[:300], "the header cannot be read"),
        "version": (data[:4] + b"\1" + data[5:], "GGUF version 1; known"),
        "counts": (data[:8] + b"\xff" * 8 + data[16:], "the header cannot be read"),
        "iq4": (data[:at] + b"\x14" + data[at + 1 :], r"\(1 × IQ4_NL\); known: F32, F16"),
        "type": (data[:at] + b"\xfe" + data[at + 1 :], r"1 × type 254"),
    }
    for name, (content, message) in cases.items():
        (file := tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(UnsupportedModel, match=message):
            open_gguf(file)
    (file := tmp_path / "model-00001-of-00003.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        open_gguf(file)
