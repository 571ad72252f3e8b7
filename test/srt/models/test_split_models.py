"""A model in parts gives what the whole one gives: all families, any ranks, odd groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_rig import runner_of
from peer_models import PEERS, VOCAB, make_peer
from published import BLOCK, GROUP, write_published
from safetensors.torch import save_file
from tensor_checks import relative_error
from thread_ranks import ThreadGroup, ThreadRanks
from torch import Tensor, nn

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Cuda, Host
from mamba_eagle.config import EngineConfig
from mamba_eagle.drafting import draft_source
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.moe import Experts
from mamba_eagle.layers.ops import TORCH
from mamba_eagle.layers.weights import matrix_layers, weights_come_late
from mamba_eagle.model_config import Mamba2Config, ModelConfig, MoEConfig, Span
from mamba_eagle.models.loader import created_as, load_weights, random_weights
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.models.rooms import FewBitRooms
from mamba_eagle.models.split import split_model
from mamba_eagle.models.staging import Staging
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.shard import Shard, local, problems, split_heads
from mamba_eagle.parallel.stages import (
    Weights,
    balanced,
    given_problems,
    size_problems,
    spans_of,
    staged,
)
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.quantization.matrix import Float8Matrix
from mamba_eagle.quantization.policy import Policy
from mamba_eagle.resolve import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_ERROR = 2e-5
TOKENS = torch.randint(0, VOCAB, (37,), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model.compute_logits(model(TOKENS, FullSequenceContext(1, len(TOKENS))))


def part_of(folder: Path, group: Group) -> nn.Module:
    """A rank's part of the model in a folder, as a runner makes it."""
    config = read_model_config(folder)
    make = model_class(config)
    model = make(local(config, group.shard)).requires_grad_(False)
    load_weights(model, folder, split=split_model(make, config, group.shard))
    prepare_for_inference(model, TORCH.over(group))
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    written: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp(f"split-{name}")
            make_peer(name).save_pretrained(written[name])
        return written[name]

    return write


@pytest.mark.parametrize("name", PEERS)
def test_a_split_model_has_the_logits_of_the_whole_one(name: str, folder) -> None:
    """And equal bits on all ranks, else routers of experts could choose differently."""
    path = folder(name)
    expected = logits_of(part_of(path, ALONE))
    for size in (2, 3, 4):

        def work(group: ThreadGroup) -> Tensor:
            own = logits_of(part_of(path, group))
            return Columns(group, VOCAB).whole(own)

        first, *others = ThreadRanks(size).run(work)
        assert relative_error(first, expected) <= MAX_ERROR
        assert all(torch.equal(other, first) for other in others)


def stage_of(folder: Path, group: ThreadGroup, counts: list[int], taps: tuple[int, ...]) -> Any:
    """What a pipeline stage with so many layers returns."""
    config, stages = read_model_config(folder), group.stages
    make, span = model_class(config), spans_of(counts)[stages.rank]
    own = staged(local(config, group.shard), span, drafts=False)
    model = make(own).requires_grad_(False)
    split = split_model(make, config, group.shard, stages.size)
    random_weights(model, 3, split=split)
    dummies = {name: model.get_parameter(at).clone() for name, at in split.places(model).items()}
    load_weights(model, folder, split=split)
    prepare_for_inference(model, TORCH.over(group, stages))
    model.tap(taps)
    with torch.no_grad():
        features = model(TOKENS, FullSequenceContext(1, len(TOKENS)))
        return model, features, model.compute_logits(features), dummies


@pytest.mark.parametrize("name", PEERS)
def test_stages_have_the_features_of_the_whole_model_bit_for_bit(name: str, folder) -> None:
    """A border between layers changes no sum. Taps of all stages arrive with the last hidden
    states; blocks that layers share are in every stage that uses them."""
    path = folder(name)
    layers = len(read_model_config(path).blocks)
    taps = tuple(range(layers + 1))
    whole = part_of(path, ALONE)
    whole.tap(taps)
    with torch.no_grad():
        expected = whole(TOKENS, FullSequenceContext(1, len(TOKENS)))
        logits = whole.compute_logits(expected)
    counts = [1] * layers
    results = ThreadRanks(1, layers).run(lambda group: stage_of(path, group, counts, taps))
    *earlier, (_, features, found, _) = results
    assert torch.equal(features, expected) and torch.equal(found, logits)
    for model, nothing, _, _ in earlier:
        assert nothing.shape == (len(TOKENS), 0) and not hasattr(model, "lm_head")
        assert sum(p.numel() for p in model.parameters()) < sum(
            p.numel() for p in whole.parameters()
        )
    random_weights(whole, 3)
    dummies = dict(whole.named_parameters())
    for _, _, _, own in results:
        assert all(torch.equal(weight, dummies[name]) for name, weight in own.items())
    held = {name for *_, own in results for name in own}
    assert held == set(dummies), "a weight that no stage has"


def test_stages_hold_equal_bytes_and_a_mamba_layer_each() -> None:
    config = ModelConfig(
        "", "", 8, 8, ("recurrent", "mlp", "attention", "recurrent") * 4, 1e-5, None, None, 8, 8, ()
    )
    even = Weights([10] * 16)
    assert balanced(config, even, 2) == [Span(0, 8), Span(8, 16)]
    # lm_head and drafter weigh as much as three layers
    assert balanced(config, Weights([10] * 16, last=40), 2) == [Span(0, 10), Span(10, 16)]
    for stages in (3, 4, 8):
        spans = balanced(config, Weights([1, 50, 1, 1] * 4), stages)
        assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert all("recurrent" in config.blocks[b:e] for b, e in spans) and spans[-1].end == 16
    assert size_problems(config, 8) == []
    assert size_problems(config, 9) == [
        "--pp-size 9: the model has 8 recurrent layers; set it to 8"
    ]
    assert given_problems(config, [8, 8]) == []
    assert "15 layers, the model has 16" in given_problems(config, [8, 7])[0]
    assert "stage 1 would have no recurrent layer" in given_problems(config, [5, 2, 9])[0]


def test_a_rank_reads_no_more_than_its_part(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding, norms and router are copied; of all else there is a part per rank, and B and C of
    a group that several ranks need."""
    path = folder("nemotron-3-nano")
    config = read_model_config(path)
    model = part_of(path, ALONE)
    copied = sum(p.nbytes for n, p in model.named_parameters() if "embed" in n or "norm" in n)
    whole = sum(p.nbytes for p in model.parameters())
    for size in (2, 4):
        ranks = ThreadRanks(size).run(lambda group: part_of(path, group))
        for part in ranks:
            own = sum(p.nbytes for p in part.parameters())
            assert own <= copied + (whole - copied) / size * 1.25
    experts, moe = ranks[1].backbone.layers[1].mixer.experts, config.moe
    assert moe is not None
    assert experts.up_proj.shape[:2] == (moe.num_experts, moe.intermediate_size // 4)


@pytest.mark.parametrize("name", ["nemotron-3-nano", "granite"])
def test_a_rank_cuts_what_was_staged_as_what_it_reads_in_part(name: str, folder) -> None:
    """Experts that are stored one by one, and stacked."""
    path, host = folder(name), Host()
    config = read_model_config(path)
    make = model_class(config)
    for rank in range(2):
        found = []
        for staging in (None, Staging(host.device, host.host_buffer, host.timestamp)):
            shard = Shard(rank, 2)
            model = make(local(config, shard)).requires_grad_(False)
            load_weights(model, path, None, split_model(make, config, shard), staging)
            found.append(model.state_dict())
        assert all(torch.equal(*pair) for pair in zip(*(each.values() for each in found)))


@pytest.mark.parametrize(
    ("algorithm", "folder", "pays"),
    [
        ("EAGLE", "eagle-head", True),
        ("DFLASH", "dflash-6-layers", True),
        ("STANDALONE", "llama-2-layers", False),
    ],
)
def test_layers_of_a_drafter_are_split_where_that_pays(
    algorithm: str, folder: str, pays: bool
) -> None:
    """At the sizes of the 9B target on two GPUs; their vocabulary always is."""
    models = Path(__file__).parents[3] / "benchmark/models"
    config = EngineConfig(
        model_path=str(models / "nemotron-nano-9b-v2"),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(models / folder),
        load_format="dummy",
    )
    source = draft_source(algorithm)(config, read_model_config(config.model_path))
    backend = Backend(Cuda(torch.device("meta")), torch.bfloat16)
    whole = source.config
    source.divide(Shard(1, 2), backend)
    assert source.config is not None and whole is not None and whole.attention is not None
    assert source.config.head_tokens == Span(65536, 131072)
    heads = whole.attention.num_heads
    assert source.config.attention == whole.attention or pays
    assert source.config.attention.num_heads == (heads // 2 if pays else heads)  # type: ignore[union-attr]


def test_dummy_weights_are_parts_of_the_whole_models(folder) -> None:
    config = read_model_config(folder("nemotron-3-super"))
    make = model_class(config)

    def made(shard: Shard) -> nn.Module:
        with created_as(torch.float32, torch.device("cpu")):
            model = make(local(config, shard))
        random_weights(model, 7, split=split_model(make, config, shard))
        return model

    whole = made(Shard())
    for rank in range(3):
        shard = Shard(rank, 3)
        split = split_model(make, config, shard)
        assert split is not None
        for name, value in made(shard).named_parameters():
            expected = whole.get_parameter(name)
            if name in split.cuts:
                expected = split.cuts[name].of(expected)
            assert torch.equal(value, expected), name


# ── any number of groups ─────────────────────────────────────────────────────────────────────

GROUPS = [  # heads, groups, ranks
    (16, 8, 2),
    (16, 8, 16),
    (16, 1, 4),
    (16, 2, 4),
    (15, 3, 5),
    (12, 2, 3),
    (12, 4, 3),
    (10, 5, 4),  # ranks of different sizes
    (7, 1, 3),
]


@pytest.mark.parametrize("norm", ["gate_first", "norm_first", "gate_only"])
@pytest.mark.parametrize("heads, groups, size", GROUPS)
def test_heads_and_groups_split_in_any_way(
    heads: int, groups: int, size: int, norm: str, tmp_path: Path
) -> None:
    whole = {
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_heads": heads,
        "head_dim": 4,
        "state_size": 8,
        "num_hidden_layers": 2,
        "n_groups": groups,
        "use_bias": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))

    def config() -> ModelConfig:
        found = read_model_config(tmp_path)
        assert found.recurrence is not None
        return replace(found, recurrence=replace(found.recurrence, norm=norm))

    make = model_class(config())
    model = make(config())
    random_weights(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(-2, 1.5, generator=torch.Generator().manual_seed(1))
            elif "proj" in name:
                parameter.mul_(8)
    save_file({n: p.detach() for n, p in model.named_parameters()}, tmp_path / "model.safetensors")
    expected = logits_of(model)

    def work(group: ThreadGroup) -> Tensor:
        part = make(local(config(), group.shard)).requires_grad_(False)
        load_weights(part, tmp_path, split=split_model(make, config(), group.shard))
        prepare_for_inference(part, TORCH.over(group))
        mixer = part.parts.layers[0].mixer
        assert isinstance(mixer, Mamba2Mixer) and mixer.config.num_heads < heads
        return Columns(group, VOCAB).whole(logits_of(part))

    for found in ThreadRanks(size).run(work):
        assert relative_error(found, expected) <= MAX_ERROR


def test_a_collective_is_only_needed_where_groups_lie_on_several_ranks() -> None:
    config = read_model_config_of(heads=128, groups=8)
    assert all(
        local(config, Shard(rank, size)).recurrence.norm_groups is None  # type: ignore[union-attr]
        for size in (2, 4, 8)
        for rank in range(size)
    )
    # groups 1 and 2 of three lie on ranks 0 and 1, and on 1 and 2: all ranks take part
    config = read_model_config_of(heads=12, groups=3)
    locals_ = [local(config, Shard(rank, 4)).recurrence for rank in range(4)]
    assert all(mamba is not None and mamba.norm_groups is not None for mamba in locals_)


def read_model_config_of(heads: int, groups: int) -> ModelConfig:
    return ModelConfig(
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        vocab_size=VOCAB,
        hidden_size=24,
        blocks=("recurrent",),
        norm_eps=1e-5,
        recurrence=Mamba2Config(heads, 4, 8, groups, 4, True, (0.0, float("inf")), 16),
        attention=None,
        intermediate_size=0,
        max_position_embeddings=64,
        eos_token_ids=(0,),
    )


@pytest.mark.parametrize("heads, groups, size", [*GROUPS, (2, 1, 4), (3, 3, 5), (40, 8, 16)])
def test_every_head_is_on_one_rank_with_its_group(heads: int, groups: int, size: int) -> None:
    seen = []
    for rank in range(size):
        own = split_heads(Shard(rank, size), heads, groups)
        served = own.heads.size // len(own.groups)
        for i, head in enumerate(range(own.heads.begin, own.heads.end)):
            assert own.groups[i // served] == head // (heads // groups)
        seen += [] if own.idle else range(own.heads.begin, own.heads.end)
    assert seen == list(range(heads))


@pytest.mark.parametrize("count", [1, 5, 16, 112, 15680, 131072, 7 * 16 + 3])
def test_parts_cover_everything_once_and_are_nearly_equal(count: int) -> None:
    for size in (1, 2, 3, 5, 8):
        for spans in (
            [Shard(rank, size).span(count) for rank in range(size)],
            [Shard(rank, size).width(count) for rank in range(size)],
        ):
            assert [x for span in spans for x in range(*span)] == list(range(count))
            assert max(s.size for s in spans) - min(s.size for s in spans) <= 16 + count % 16


@pytest.mark.parametrize(
    ("count", "block", "sizes"),
    [
        (1856, 1, [928, 928]),
        (1856, 1, [464] * 4),
        (1856, 1, [608, 624, 624]),
        (1856, 128, [896, 960]),
        (1856, 128, [384, 512, 512, 448]),
        (768, 128, [384, 384]),
        (768, 128, [128, 256, 128, 256]),
        (512, 128, [64] * 8),  # fewer blocks than ranks
    ],
)
def test_channels_are_divided_between_blocks_that_share_a_scale(
    count: int, block: int, sizes: list[int]
) -> None:
    spans = [Shard(rank, len(sizes), block).width(count) for rank in range(len(sizes))]
    assert [x for span in spans for x in range(*span)] == list(range(count))
    assert [span.size for span in spans] == sizes


@pytest.mark.parametrize(("width", "experts"), [(1856, 2), (2688, 2), (512, 1), (1024, 1)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ranks_part_of_shared_experts_is_as_wide_as_so_many_routed_ones(
    width: int, experts: int, size: int
) -> None:
    """So that one launch multiplies both."""
    for shard in (Shard(rank, size) for rank in range(size)):
        assert shard.width(experts * width).size == experts * shard.width(width).size


def test_a_model_with_too_narrow_experts_is_refused() -> None:
    config = replace(read_model_config_of(heads=8, groups=2), moe=MoEConfig(4, 2, 6))
    assert problems(config, 6) == []
    (problem,) = problems(config, 8)
    assert problem == "--tp-size 8: the model has 6 channels in an expert; set it to 6"
    assert config.moe is not None
    shared = replace(config, moe=replace(config.moe, shared_intermediate_size=5))
    (problem,) = problems(shared, 6)
    assert problem == "--tp-size 6: the model has 5 channels in the shared experts; set it to 5"


def test_a_model_with_too_few_heads_is_refused() -> None:
    config = read_model_config_of(heads=6, groups=2)
    assert problems(config, 6) == []
    (problem,) = problems(config, 8)
    assert problem == "--tp-size 8: the model has 6 heads in a Mamba2 layer; set it to 6"


# ── matrices of few bits ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block", [None, (8, 16)], ids=["scale-per-row", "scale-per-block"])
@pytest.mark.parametrize(
    "cut",
    [
        rows(Span(8, 24)),
        rows(Span(0, 8), Span(24, 40)),
        columns(Span(16, 48)),
        once(40, Shard(1, 2)),
    ],
    ids=["rows", "rows-of-several-spans", "columns", "of-another-rank"],
)
def test_a_matrix_of_few_bits_is_cut_with_its_scales(
    cut: Cut, block: tuple[int, int] | None
) -> None:
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    scale = torch.rand(*((40, 1) if block is None else (5, 3))) + 0.5
    matrix = Float8Matrix(weight.to(torch.float8_e4m3fn), scale, block)
    found = cut.of(matrix)
    assert isinstance(found, Tensor if cut.zero else Float8Matrix)
    whole = found if cut.zero else found.dequantize()
    assert torch.equal(whole, cut.of(matrix.dequantize()))


EXPERTS = {  # gated, relu², and relu² with another width around them
    "qwen3-next": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
    "nemotron-3-nano": {"moe_intermediate_size": 112},
    "nemotron-3-super": {"moe_intermediate_size": 112, "moe_latent_size": 48},
}
FEW_BITS = ("fp8-block", "compressed-token", "modelopt-fp8", "modelopt-nvfp4")


@pytest.mark.parametrize("form", FEW_BITS)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_few_bits_are_split_with_their_scales(
    name: str, form: str, tmp_path: Path
) -> None:
    """Each rank has its channels of all experts in their few bits, and together they have the
    logits of the whole model."""
    write_published(tmp_path, name, form, **EXPERTS[name])
    config = read_model_config(tmp_path)
    assert config.scale_group == {"fp8-block": BLOCK, "modelopt-nvfp4": GROUP}.get(form, 1)
    make, whole = model_class(config), part_of(tmp_path, ALONE)
    expected = logits_of(whole)
    for size in (2, 3):
        for shard in (Shard(rank, size) for rank in range(size)):
            with weights_come_late():
                part = make(local(config, shard))
            split = split_model(make, config, shard)
            keeps = lambda matrix, device: matrix.few_bits  # noqa: E731
            rooms = FewBitRooms(part, torch.device("cpu"), Policy(), keeps)
            load_weights(part, tmp_path, rooms, split)
            stacks = [each for each in matrix_layers(part) if isinstance(each[1], Experts)]
            assert stacks
            for label, layer in stacks:
                for leaf in layer.matrix_names:
                    found = layer.matrices[leaf]
                    cut = split.cuts[f"{label}.{leaf}"]
                    assert found.shape == getattr(layer, leaf).shape
                    wanted = cut.of(whole.get_parameter(f"{label}.{leaf}"))
                    assert torch.equal(found.dequantize(), wanted), (label, leaf)

        def work(group: ThreadGroup) -> Tensor:
            return Columns(group, VOCAB).whole(logits_of(part_of(tmp_path, group)))

        for found in ThreadRanks(size).run(work):
            assert relative_error(found, expected) <= MAX_ERROR


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_channels_are_divided_between_groups_that_are_to_share_a_scale(
    mode: str, tmp_path: Path
) -> None:
    """Of 192 channels four ranks would have 48 each, which are no whole groups of 32."""
    sizes = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 384}
    make_peer("qwen3-next", **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    values = {"speculative_algorithm": "NONE", "device": "cpu", "max_total_tokens": 300}
    config = EngineConfig(model_path=str(tmp_path), quantization=mode, tp_size=4, **values)
    models = [runner.model for runner in runner_of(resolve(config)).runners]
    mixtures = [model.parts.layers[0].mlp for model in models]
    down = [mixture.experts.matrices["down_proj"] for mixture in mixtures]
    shared = [mixture.shared_expert.down_proj.matrix for mixture in mixtures]
    assert all(matrix.few_bits for matrix in (*down, *shared))
    assert [matrix.shape[-1] for matrix in down] == [32, 64, 32, 64]
    assert [matrix.shape[-1] for matrix in shared] == [96] * 4


@pytest.mark.parametrize("block", [None, (8, 16)], ids=["scale-per-row", "scale-per-block"])
@pytest.mark.parametrize(
    "cut", [rows(Span(8, 24)), rows(Span(0, 8), Span(24, 32)), columns(Span(16, 48))]
)
def test_a_stack_of_experts_is_cut_as_each_of_them(cut: Cut, block: tuple[int, int] | None) -> None:
    weight = torch.randn(3, 40, 48, generator=torch.Generator().manual_seed(1))
    scale = torch.rand(3, *((40, 1) if block is None else (5, 3))) + 0.5
    matrix = Float8Matrix(weight.to(torch.float8_e4m3fn), scale, block)
    found = cut.of_stack().of(matrix)
    assert isinstance(found, Float8Matrix)
    each = torch.stack([cut.of(weight) for weight in matrix.dequantize()])
    assert torch.equal(found.dequantize(), each)
    assert cut.of_stack().of_one(is_half=False) == cut


def test_a_cut_inside_a_block_gives_the_weight_itself(caplog: pytest.LogCaptureFixture) -> None:
    matrix = Float8Matrix(torch.ones(40, 48).to(torch.float8_e4m3fn), torch.rand(5, 3), (8, 16))
    found = rows(Span(4, 24)).of(matrix)
    assert torch.equal(found, matrix.dequantize()[4:24])
    assert "loses its few bits" in caplog.text
