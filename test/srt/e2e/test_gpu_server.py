"""The server on a GPU in bfloat16: the embedded model with and without trees, and a 9B geometry."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from near_ties import Answer, assert_only_near_ties, compare, problem_prompts
from runner_harness import PlainModel

from mamba_eagle.embedded import EMBEDDED_MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

PROBLEMS, PARALLEL = 200, 32
NEW_TOKENS = 192
ON_GPU = [
    *("--device", "cuda", "--dtype", "bfloat16", "--mem-fraction-static", "0.9"),
    *("--max-total-tokens", "60000", "--max-mamba-cache-size", "400"),  # two run side by side
    *("--speculative-eagle-topk", "4", "--speculative-num-steps", "5"),
    *("--speculative-num-draft-tokens", "16", "--no-speculative-adaptive"),
]
TREES = {
    "deferred": ["--speculative-algorithm", "EAGLE"],
    "snapshot": ["--speculative-algorithm", "EAGLE", "--mamba-verify-mode", "snapshot"],
}
GEOMETRY = Path(__file__).parents[3] / "benchmark" / "models"
NINE_B = [
    *("--model-path", str(GEOMETRY / "nemotron-nano-9b-v2"), "--load-format", "dummy"),
    *("--skip-tokenizer-init", "--device", "cuda"),
]
DRAFTER = [
    *("--speculative-algorithm", "STANDALONE"),
    *("--speculative-draft-model-path", str(GEOMETRY / "llama-2-layers")),
]


async def post_all(base_url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replies of /generate in the order of the bodies, PARALLEL at a time."""
    gate = asyncio.Semaphore(PARALLEL)
    async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:

        async def post(body: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                reply = await client.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        return await asyncio.gather(*map(post, bodies))


def greedy_body(prompt: list[int], max_new_tokens: int, **others: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    return {"input_ids": prompt, "sampling_params": sampling, **others}


def answers(base_url: str, prompts: list[list[int]]) -> list[Answer]:
    asks = {"return_logprob": True, "top_logprobs_num": 4}
    bodies = [greedy_body(prompt, NEW_TOKENS, **asks) for prompt in prompts]
    found = []
    for reply in asyncio.run(post_all(base_url, bodies)):
        best = reply["meta_info"]["output_top_logprobs"]
        top = [[(logprob, token) for logprob, token, _ in each] for each in best]
        found.append(Answer(reply["output_ids"], top))
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return problem_prompts(PROBLEMS)


@pytest.fixture(scope="module")
def exact() -> PlainModel:
    return PlainModel(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def plain_server(start_server):
    server = start_server(*ON_GPU, "--speculative-algorithm", "NONE")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def plain(plain_server, prompts: list[list[int]]) -> list[Answer]:
    return answers(plain_server.base_url, prompts)


def prefill_gap(base_url: str, tokens: list[int], pair: tuple[int, int]) -> float:
    """Between the logits of two tokens behind ``tokens``, by one prefill; nan: not the best."""
    body = greedy_body(tokens, 1, return_logprob=True, top_logprobs_num=8)
    with httpx.Client(base_url=base_url, timeout=60) as client:
        best = client.post("/generate", json=body).json()["meta_info"]["output_top_logprobs"][0]
    found = {token: logprob for logprob, token, _ in best}
    return found.get(pair[0], float("nan")) - found.get(pair[1], float("nan"))


@pytest.mark.parametrize("mode", TREES)
def test_texts_with_trees_part_only_at_near_ties(
    mode: str,
    start_server,
    plain_server,
    prompts: list[list[int]],
    plain: list[Answer],
    exact: PlainModel,
) -> None:
    server = start_server(*ON_GPU, *TREES[mode])
    found = answers(server.base_url, prompts)
    server.stop()
    comparison = compare(exact.logits, prompts, plain, found)
    print(comparison.report(mode))
    for parting in comparison.partings:
        prefix = [*prompts[parting.prompt], *plain[parting.prompt].tokens[: parting.position]]
        gap = prefill_gap(plain_server.base_url, prefix, parting.tokens)
        print(f"  text {parting.prompt}: gap {gap:+.4f} in a prefill")
        assert abs(gap) <= comparison.bound
    assert len(comparison.plain_errors) > PROBLEMS * 20, "texts of one token would prove nothing"
    assert_only_near_ties(comparison)


@pytest.mark.parametrize("drafter", [[], DRAFTER], ids=["plain", "tree"])
def test_a_nine_b_geometry_answers(drafter: list[str], start_server) -> None:
    begin = time.perf_counter()
    server = start_server(*NINE_B, *drafter, "--no-speculative-adaptive")
    print(f"ready after {time.perf_counter() - begin:.1f} s\n{server.output}")
    table = re.findall(r"^(KV|state slots|rows) .* = +([\d.]+ [GMk]B)$", server.output, re.M)
    assert [name for name, _ in table] == ["KV", "state slots", "rows"]
    prompts = [[7 * i + k for k in range(40)] for i in range(1, 9)]
    asks = {"return_logprob": True}
    bodies = [greedy_body(prompt, 12, **asks) for prompt in prompts]
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_new_tokens": 12}
    bodies += [{**body, "sampling_params": sampling} for body in bodies[:3]]
    replies = asyncio.run(post_all(server.base_url, [*bodies, bodies[0]]))
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        info = client.get("/server_info").json()
    server.stop()
    assert info["internal_states"][0]["num_compiled_kernels"] == 0, server.output
    for reply in replies:
        assert len(reply["output_ids"]) == 12
        assert all(0 <= token < info["vocab_size"] for token in reply["output_ids"])
        logprobs = [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]
        assert all(-30 < logprob < 0 for logprob in logprobs)  # nan is not
        assert bool(drafter) == ("spec_verify_ct" in reply["meta_info"])
