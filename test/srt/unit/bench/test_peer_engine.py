"""The SGLang benchmark, with an engine that answers as 0.5.17 did and a clock that it moves."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from mamba_eagle.models.registry import model_class, read_model_config

PATH = Path(__file__).parents[4] / "benchmark/peers/sglang_engine.py"
ARGS = argparse.Namespace(input_len=256, output_len=96, simulate_acc_len=3.0)
# meta_info of a request for 96 tokens, as far as it is read
PLAIN_INFO = {"prompt_tokens": 256, "completion_tokens": 96, "e2e_latency": 0.8}
TREE_INFO = {**PLAIN_INFO, "spec_verify_ct": 32, "spec_accept_length": 3.0}


@pytest.fixture
def peer(monkeypatch):
    spec = importlib.util.spec_from_file_location("sglang_engine", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sglang_engine", module)
    spec.loader.exec_module(module)
    return module


class Engine:
    """Takes 0.05 s for prompts, then ``step`` seconds a step."""

    def __init__(self, peer, monkeypatch, step: float, info: dict) -> None:
        self.now, self.step, self.info = 0.0, step, info
        self.steps = info.get("spec_verify_ct", info["completion_tokens"] - 1)
        monkeypatch.setattr(peer.time, "perf_counter", lambda: self.now)

    def generate(self, input_ids, sampling_params) -> list[dict]:
        assert all(len(prompt) == 256 for prompt in input_ids)
        assert sampling_params["ignore_eos"] and sampling_params["temperature"] == 0
        self.now += 0.05
        if sampling_params["max_new_tokens"] > 1:
            self.now += self.step * self.steps
        return [{"output_ids": [], "meta_info": self.info} for _ in input_ids]


@pytest.mark.parametrize(
    "info, step, name, length",
    [(PLAIN_INFO, 0.008, "decode_step_ms", 1.0), (TREE_INFO, 0.018, "tree_step_ms", 2.969)],
    ids=["plain", "tree"],
)
def test_lines_follow_from_what_the_engine_answers(
    peer, monkeypatch, info, step, name, length
) -> None:
    engine = Engine(peer, monkeypatch, step, info)
    batch = peer.measure(engine.generate, 8, 256, 96, repeats=3)
    lines = peer.result_lines(batch, ARGS, info is TREE_INFO, {"gpu": "a GPU"})
    values = {line["name"]: line["value"] for line in lines}
    tokens = 8 * 95 / (engine.steps * step)
    assert values == {
        "prefill_s": pytest.approx(0.05),
        name: pytest.approx(step * 1e3),
        "tokens_per_s": pytest.approx(tokens, rel=1e-5),
    }
    for line in lines:
        assert line["engine"] == "sglang" and line["batch"] == 8 and line["gpu"] == "a GPU"
        assert line["accept_length"] == length
        assert line["simulated_accept_length"] == (3.0 if info is TREE_INFO else None)
        json.dumps(line)


def test_the_tree_is_the_only_thing_in_which_the_engines_differ(peer) -> None:
    plain, tree = (peer.engine_arguments(32, is_tree) for is_tree in (False, True))
    assert tree.items() > plain.items()
    assert {name for name in tree if name not in plain} == {
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
    }
    assert plain["max_running_requests"] == plain["cuda_graph_max_bs_decode"] == 32


def test_the_geometries_are_models_that_we_serve(peer) -> None:
    target, draft = (read_model_config(path) for path in (peer.TARGET, peer.DRAFT))
    assert target.vocab_size == draft.vocab_size == peer.VOCABULARY
    assert {model_class(config).__name__ for config in (target, draft)} == {
        "NemotronHForCausalLM",
        "LlamaForCausalLM",
    }
