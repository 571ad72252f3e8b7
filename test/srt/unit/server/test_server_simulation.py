"""--simulate-acc-len on a server: nobody can take its texts or its numbers for real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner_harness import TREE, accepted, greedy, random_prompt, write_tiny
from server_harness import run, says, serving

from mamba_eagle.config import ServerConfig
from mamba_eagle.server.http.at_reply import SIMULATION_HEADER

GAUGE = 'mamba_eagle:simulated_accept_length{model_name="tiny"}'
HEAD = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "head"}


@pytest.mark.parametrize("length", [0.0, 2.5])
def test_every_reply_says_so(length: float) -> None:
    async def test() -> None:
        async with serving(says("ab"), simulate_acc_len=length) as harness:
            sampling = {"max_new_tokens": 1}
            replies = [
                await harness.post("/generate", text="a", sampling_params=sampling),
                await harness.post("/generate", text=5),
                await harness.client.get("/nowhere"),
                info := await harness.client.get("/server_info"),
            ]
            assert [reply.status_code for reply in replies] == [200, 400, 404, 200]
            marks = {reply.headers.get(SIMULATION_HEADER.decode()) for reply in replies}
            assert marks == {None if length == 0 else "2.5"}
            assert info.json()["simulate_acc_len"] == length
            metrics = await harness.client.get("/metrics")
            assert f"{GAUGE} {length}" in metrics.text

    run(test())


def test_a_request_with_a_grammar_is_refused() -> None:
    async def test() -> None:
        async with serving(says("ab"), simulate_acc_len=2.5) as harness:
            sampling = {"max_new_tokens": 1, "regex": "a+"}
            reply = await harness.post("/generate", text="a", sampling_params=sampling)
            assert reply.status_code == 400, reply.text
            assert "forces tokens that no grammar allows" in reply.text

    run(test())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({**HEAD, "speculative_adaptive": False}, ""),
        (HEAD, "would not accept that many; add --no-speculative-adaptive"),
        ({"speculative_algorithm": "NONE", "speculative_adaptive": False}, "without a drafter"),
        (
            {**HEAD, "speculative_adaptive": False, "speculative_num_steps": 1},
            "must be between 1 and 2, the most that a tree of --speculative-num-steps 1",
        ),
    ],
    ids=["fits", "adaptive", "no-drafter", "too-deep"],
)
def test_what_it_cannot_honour_is_refused(settings: dict, problem: str) -> None:
    config = ServerConfig(model_path="m", simulate_acc_len=2.5, **settings)
    found = [text for text in config.problems() if text.startswith("--simulate-acc-len 2.5: ")]
    assert len(found) == bool(problem)
    assert all(problem in text for text in found)


def test_a_runner_accepts_that_many(tmp_path: Path) -> None:
    engine = write_tiny(tmp_path).engine(TREE, simulate_acc_len=2.5)
    live = engine.start(random_prompt(9, 1), greedy(20))
    engine.finish([live])
    assert accepted([live])[:-1] in ([2, 3] * 3 + [2], [3, 2] * 3 + [3])
