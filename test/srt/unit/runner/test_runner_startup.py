"""What a runner says about itself, and the settings it refuses, each with its value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from runner_harness import (
    TREE,
    Engine,
    PlainModel,
    Settings,
    Tiny,
    greedy,
    random_prompt,
)
from safetensors.torch import load_file, save_file
from tensor_checks import host_backend
from tiny_drafters import DRAFTERS
from tiny_model import EOS, VOCAB, write_head, write_model
from tokenizers import Tokenizer

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Cuda, Host
from mamba_eagle.bench.batch import BatchEngine
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.core import TreeShape
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.memory import default_rows, min_rows, row_bytes, state_bytes

NINE_B = Path(__file__).parents[4] / "benchmark" / "models" / "nemotron-nano-9b-v2"

torch.set_num_threads(1)


def test_a_runner_says_what_it_holds(tiny: Tiny) -> None:
    ready = tiny.engine(context_length=300, max_total_tokens=123).runner.ready
    assert (ready.max_kv_slots, ready.context_length) == (123, 300)
    assert (ready.max_state_slots, ready.max_running_requests) == (24, 5)
    assert (ready.vocab_size, ready.eos_token_ids) == (VOCAB, [EOS])
    assert ready.details["architecture"] == "NemotronHForCausalLM"
    assert tiny.engine().runner.ready.context_length == 512


def test_a_head_that_does_not_fit_is_refused_with_every_reason(tiny: Tiny, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", hidden_size=32, vocab_size=VOCAB)
    head = write_head(tmp_path / "head", other, hidden_size=32, vocab_size=95)
    with pytest.raises(ConfigError) as refused:
        assemble(TREE.config(tiny.model, head))
    assert len(refused.value.problems) == 2
    assert "vocab_size 95, the target 96" in str(refused.value)
    assert "hidden_size 32, the target 64" in str(refused.value)


def test_all_that_is_wrong_with_a_drafter_is_said_at_once(tiny: Tiny, tmp_path: Path) -> None:
    """Tree, vocabulary, size, and weights that are missing or of another shape."""
    other = write_model(tmp_path / "other", hidden_size=32, vocab_size=VOCAB)
    head = write_head(tmp_path / "head", other, hidden_size=32, vocab_size=95)
    weights = load_file(head / "model.safetensors")
    del weights["norm.weight"]
    weights["fc.bias"] = weights["fc.bias"][:5].clone()
    save_file(weights, head / "model.safetensors")
    settings = {"speculative_draft_model_path": str(head), "speculative_num_draft_tokens": 99}
    with pytest.raises(ConfigError) as refused:
        resolve(EngineConfig(model_path=str(tiny.model), speculative_algorithm="EAGLE", **settings))
    said = str(refused.value)
    for part in (
        "--speculative-num-draft-tokens 99: must be",
        "vocab_size 95, the target 96",
        "hidden_size 32, the target 64",
        "missing: norm.weight",
        "shape of fc.bias: [5] in the file, [32] by config.json",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, 0, 1), ("num-steps 0", "topk 0", "num-draft-tokens 1: must be between 2 and 64")),
        ((-1, 64, 65), ("num-steps -1", "topk 64: must be between 1 and 63", "tokens 65")),
        ((3, 1, 5), ("tokens 5: must be at most 4, the root and the candidates of 3 levels",)),
        ((2, 3, 14), ("tokens 14: must be at most 13",)),
    ],
)
def test_every_reason_against_a_tree_is_said(
    shape: tuple[int, int, int], said: tuple[str, ...]
) -> None:
    steps, topk, nodes = shape
    wrong = TreeShape(depth=steps, topk=topk, nodes=nodes).problems()
    assert len(wrong) == len(said)
    for problem, part in zip(wrong, said):
        assert part in problem


def test_a_head_of_another_kind_is_named_and_not_its_weights(tiny: Tiny) -> None:
    given = {"model_path": str(tiny.model), "speculative_draft_model_path": str(tiny.head)}
    for algorithm in ("EAGLE3", "MTP", "NEXTN", "STANDALONE", "NGRAM"):
        with pytest.raises(ConfigError) as refused:
            resolve(EngineConfig(speculative_algorithm=algorithm, **given))
        assert refused.value.problems == [
            f"--speculative-algorithm {algorithm}: {tiny.head} has a head for EAGLE; leave the "
            "flag out, or name the folder of another drafter"
        ]


def test_a_model_is_no_eagle_head(tiny: Tiny) -> None:
    with pytest.raises(ConfigError) as refused:
        assemble(TREE.config(tiny.model, tiny.model))
    (problem,) = refused.value.problems
    assert f"{tiny.model} is a NemotronHForCausalLM, a model rather than an EAGLE head" in problem


def test_a_long_list_of_weights_is_cut(tiny: Tiny, tmp_path: Path) -> None:
    others = {f"layers.9.{i}.weight": torch.ones(1) for i in range(60)}
    head = write_head(tmp_path, tiny.model)
    save_file({**load_file(head / "model.safetensors"), **others}, head / "model.safetensors")
    with pytest.raises(ConfigError) as refused:
        assemble(TREE.config(tiny.model, head))
    assert len(refused.value.problems) == 41
    assert refused.value.problems[-1] == f"{head}: … 20 more"


def test_a_folder_that_is_not_given_is_one_problem(tiny: Tiny) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(EngineConfig(model_path=str(tiny.model), speculative_algorithm="STANDALONE"))
    (problem,) = refused.value.problems
    assert "needs --speculative-draft-model-path" in problem


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafters_folder_says_what_it_is_for(tiny: Tiny, tmp_path: Path, drafter: str) -> None:
    """--speculative-draft-model-path alone is enough."""
    known = DRAFTERS[drafter]
    folder = known.write(tmp_path, tiny.model)
    config = resolve(
        EngineConfig(model_path=str(tiny.model), speculative_draft_model_path=str(folder or ""))
    )
    algorithm = known.algorithm.replace("NEXTN", "MTP")  # two names of one
    assert config.speculative_algorithm == (algorithm if folder else "NONE")


def test_sizes_that_cannot_serve_one_request_are_refused(tiny: Tiny) -> None:
    config = dataclasses.replace(TREE.config(tiny.model, tiny.head), mamba_rows=11)
    with pytest.raises(ConfigError, match="--mamba-rows 11: must be at least 12 with"):
        assemble(config)
    config = dataclasses.replace(TREE.config(tiny.model, tiny.head), max_total_tokens=25)
    with pytest.raises(ConfigError, match="--max-total-tokens 25: one request needs 26 KV slots"):
        assemble(config)
    config = dataclasses.replace(TREE.config(tiny.model, tiny.head), context_length=513)
    with pytest.raises(ConfigError, match="--context-length 513.*512"):
        assemble(config)


def backends() -> dict[str, Backend]:
    """Of both kinds; the GPU's is asked for its numbers alone."""
    triton = pytest.importorskip("mamba_eagle.backend.triton.backend")
    return {"cpu": host_backend(), "cuda": triton.TritonBackend(Host(), torch.bfloat16, False)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_tree_gets_rows_enough_where_no_flag_says_how_many(device: str) -> None:
    backend = backends()[device]
    for steps, nodes in ((5, 8), (30, 40), (24, 3)):
        config = EngineConfig(
            speculative_algorithm="EAGLE",
            speculative_num_steps=steps,
            speculative_num_draft_tokens=nodes,
        )
        least = min_rows(config, backend)
        assert default_rows(config, backend) >= max(least, nodes + 1)


def test_a_running_request_of_a_nine_b_model_takes_no_more_than_a_quarter_of_a_state_more() -> None:
    model = read_model_config(NINE_B)
    config = EngineConfig(speculative_algorithm="EAGLE", speculative_num_draft_tokens=8)
    rows = default_rows(config, backends()["cuda"])
    beside = row_bytes(model, "deferred", rows, model.hidden_size, itemsize=2)
    assert beside <= 0.25 * state_bytes(model, ssm_itemsize=4, itemsize=2)


def test_a_containers_limit_bounds_the_memory(tmp_path: Path) -> None:
    unlimited = Host().memory(tmp_path / "none").free
    assert unlimited > 2 << 20
    for limit, free in (("max\n", None), ("1048576\n", 1048576 - 700_000 + 300_000), ("5", 0)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("700000\n")
        stat = "anon 400000\nactive_file 100000\ninactive_file 200000\n"
        (tmp_path / "memory.stat").write_text(stat)
        found = Host().memory(tmp_path).free
        assert found == free if free is not None else found > 2 << 20


def test_help_says_how_many_slots_there_are_at_most() -> None:
    slots = {spec.name: spec.metadata["help"] for spec in dataclasses.fields(EngineConfig)}
    most = f"on a CPU {Host.max_kv_slots} and on a GPU {Cuda.max_kv_slots} at most"
    assert most in slots["max_total_tokens"]
    assert f"on a CPU {Host.max_cached_states} at most" in slots["max_mamba_cache_size"]


def test_what_does_not_fit_the_memory_is_refused_with_the_numbers(tiny: Tiny) -> None:
    config = TREE.config(tiny.model, tiny.head, max_mamba_cache_size=10**9)
    with pytest.raises(ConfigError) as refused:
        assemble(config)
    for part in ("1000000000 states", "900 tokens", "5 requests", "GB: lower --max-runn", "-rows"):
        assert part in str(refused.value)
    tiers = {"host_cache_gb": 0.05, "cache_dir": str(tiny.model / "tier"), "disk_cache_gb": 0.0}
    with pytest.raises(
        ConfigError, match="--disk-cache-gb: one state .* give more, or leave it out"
    ):
        assemble(TREE.config(tiny.model, tiny.head, **tiers))


@pytest.mark.parametrize("pattern", ["*-*-", "MM-"], ids=["attention-alone", "mamba-alone"])
def test_a_model_with_one_kind_of_memory_is_served(pattern: str, tmp_path: Path) -> None:
    """Without recurrence a checkpoint is the last token's feature and nothing else; without
    attention there is no KV at all, but for the head's."""
    model = write_model(tmp_path / "model", hybrid_override_pattern=pattern)
    head = write_head(tmp_path / "head", model)
    plain = PlainModel(model)
    for settings in (TREE, Settings("NONE"), Settings(scheme="snapshot")):
        engine = Engine(model, head, settings)
        live = engine.generate(random_prompt(20, 0), greedy(15), cuts=(7,))
        assert live.output == plain.choices(live)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gives_the_text_where_no_two_logits_are_close(dtype: str) -> None:
    """In float32 the best logit leads by 1.9 or more along this answer."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    question = "Tom has 3 apples and buys 14 more. How many apples does he have now?"
    config = resolve(
        EngineConfig(
            dtype=dtype, device="cpu", cpu_threads=1, max_total_tokens=200, max_mamba_cache_size=4
        )
    )
    runner = assemble(dataclasses.replace(config, max_running_requests=2))
    assert runner.kv.k.dtype == getattr(torch, dtype)
    prompt = tokenizer.encode(f"Question: {question}\nAnswer:").ids
    tokens = BatchEngine(config, runner).generate([prompt], greedy(28)).tokens[0]
    text = " Then Tom has 3 + 14 = <<3+14=17>>17 apples.\n#### 17"
    assert tokenizer.decode(tokens) == text


def test_dummy_weights_are_the_same_for_the_same_seed(tiny: Tiny) -> None:
    def outputs(seed: int) -> list[int]:
        engine = tiny.engine("none", load_format="dummy", random_seed=seed)
        return engine.generate(random_prompt(5, 0), greedy(8)).output

    assert outputs(1) == outputs(1) != outputs(2)
