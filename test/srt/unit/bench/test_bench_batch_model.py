"""Batches in this process with the real runner on a small random hybrid model."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from mamba_eagle.bench.batch import BatchEngine, Generation, greedy, sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams

VOCABULARY = 16  # so few tokens that a random draft is right now and then
TARGET = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
}
HEAD = {**TARGET, "architectures": ["EagleHead"], "hybrid_override_pattern": "*-"}
PROMPT_LENGTHS = [40, 1, 17]
OUTPUT = 48


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    folders = {}
    for name, values in (("target", TARGET), ("head", HEAD)):
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps(values))
    return EngineConfig(
        model_path=str(folders["target"]),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(folders["head"]),
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]


def generate(
    config: EngineConfig, prompts: list[list[int]], sampling: SamplingParams | None = None
) -> Generation:
    from mamba_eagle.runner.assemble import assemble

    config = sized_for(config, len(prompts), max(PROMPT_LENGTHS) + OUTPUT)
    return BatchEngine(config, assemble(config)).generate(prompts, sampling or greedy(OUTPUT))


@pytest.fixture(scope="module")
def plain(config: EngineConfig, prompts: list[list[int]]) -> Generation:
    made = generate(replace(config, speculative_algorithm="NONE"), prompts)
    assert [len(tokens) for tokens in made.tokens] == [OUTPUT] * len(prompts)
    assert made.accept_length == 1.0
    return made


@pytest.mark.parametrize("mode", ["deferred", "snapshot"])
@pytest.mark.parametrize("shape", [(4, 4, 12), (3, 1, 4)], ids=["tree", "chain"])
def test_speculation_makes_the_same_tokens(config, prompts, plain, mode, shape) -> None:
    steps, topk, nodes = shape
    made = generate(
        replace(
            config,
            mamba_verify_mode=mode,
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=nodes,
        ),
        prompts,
    )
    assert made.tokens == plain.tokens
    assert made.accept_length > 1.0


def test_prefill_in_chunks_makes_the_same_tokens(config, prompts, plain) -> None:
    made = generate(replace(config, chunked_prefill_size=7), prompts)
    assert made.tokens == plain.tokens


def test_a_batch_makes_what_its_requests_make_alone(config, prompts, plain) -> None:
    for prompt, expected in zip(prompts, plain.tokens):
        assert generate(config, [prompt]).tokens == [expected]


def test_a_second_batch_is_not_changed_by_the_first(config, prompts) -> None:
    from mamba_eagle.runner.assemble import assemble

    config = sized_for(config, len(prompts), max(PROMPT_LENGTHS) + OUTPUT)
    engine = BatchEngine(config, assemble(config))
    first = engine.generate(prompts, greedy(OUTPUT)).tokens
    engine.generate(prompts[::-1], greedy(OUTPUT // 2))
    assert engine.generate(prompts, greedy(OUTPUT)).tokens == first


def test_requests_take_turns_with_dummy_adapters(config, prompts) -> None:
    from mamba_eagle.bench.one_batch import DummyAdapters
    from mamba_eagle.runner.assemble import assemble

    config = sized_for(replace(config, max_loras=2), len(prompts), max(PROMPT_LENGTHS) + OUTPUT)
    runner = assemble(config)
    dummies = DummyAdapters(2, runner.adapters)
    for pair in dummies.adapter.values():
        pair.up.mul_(1e6)  # so that it changes tokens
    plain = BatchEngine(config, runner).generate(prompts, greedy(OUTPUT))
    made = BatchEngine(config, runner, dummies.load).generate(prompts, greedy(OUTPUT))
    assert all(a != b for a, b in zip(made.tokens, plain.tokens))
    slots = runner.adapters._of_request[: len(prompts)]
    assert sorted(slots) == sorted(i % 2 for i in range(len(prompts)))


def test_sampled_tokens_do_not_depend_on_speculation(config, prompts) -> None:
    sampling = SamplingParams(max_new_tokens=OUTPUT, temperature=0.8, seed=5, ignore_eos=True)
    drafted = generate(config, prompts, sampling)
    plain = generate(replace(config, speculative_algorithm="NONE"), prompts, sampling)
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("mode", ["deferred", "snapshot"])
def test_a_forced_length_is_what_every_step_accepts(config, prompts, mode) -> None:
    from mamba_eagle.runner.assemble import assemble

    chain = replace(
        config,
        mamba_verify_mode=mode,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        simulate_acc_len=2.5,
    )
    chain = sized_for(chain, len(prompts), max(PROMPT_LENGTHS) + OUTPUT)
    engine = BatchEngine(chain, assemble(chain))
    made = engine.generate(prompts, greedy(1 + 20))  # the first token is the prompt's
    assert made.accept_lengths == {2: 4 * len(prompts), 3: 4 * len(prompts)}
