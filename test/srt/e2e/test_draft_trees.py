"""Draft trees of a real request: from the server's /generate, and as explain prints them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mamba_eagle import explain

pytestmark = pytest.mark.e2e

PROMPT = "Question: Tom has 12 apples and buys 7 more. How many apples does Tom have?\nAnswer:"


def assert_trace_tells_the_output(reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    steps = meta["spec_trace"]
    assert steps
    ids, text = [steps[0]["tokens"][0]], steps[0]["token_texts"][0]
    for step in steps:
        assert step["tokens"][0] == ids[-1], "the root is the last token before the step"
        for parent, node in zip(step["accepted"], step["accepted"][1:]):
            assert step["parents"][node] == parent
            ids.append(step["tokens"][node])
            text += step["token_texts"][node]
        ids.append(step["bonus"])
        text += step["bonus_text"]
        assert len(step["tokens"]) == len(step["parents"]) == len(step["scores"])
    assert ids == reply["output_ids"]
    assert text.startswith(reply["text"])  # a stop token is no part of the reply's text
    if "spec_verify_ct" in meta:
        drafts = [len(step["accepted"]) - 1 for step in steps]
        histogram = [drafts.count(i) for i in range(max(drafts) + 1)]
        assert meta["spec_accept_histogram"] == histogram
        assert meta["spec_verify_ct"] == len(steps)
        assert meta["spec_accept_length"] == pytest.approx(len(ids) / len(steps))


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_the_trace_tells_the_output(client: httpx.Client, temperature: float) -> None:
    sampling = {"temperature": temperature, "max_new_tokens": 40, "sampling_seed": 3}
    body = {"text": PROMPT, "sampling_params": sampling}
    reply = client.post("/generate", json={**body, "return_spec_trace": True}).json()
    assert_trace_tells_the_output(reply)
    unasked = client.post("/generate", json=body).json()
    assert unasked["text"] == reply["text"] and "spec_trace" not in unasked["meta_info"]


def test_explain_gives_the_same_with_a_server_and_without(
    start_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = ("--speculative-eagle-topk", "2", "--speculative-draft-p-min", "0")
    server = start_server("--no-speculative-adaptive", *tree)  # the same steps each time

    def explained(*arguments: str) -> str:
        explain.main(["--text", PROMPT, "--max-new-tokens", "30", *arguments])
        return capsys.readouterr().out

    asked = json.loads(explained("--url", server.base_url, "--json"))
    assert_trace_tells_the_output(asked)
    own = json.loads(explained("--json", *tree))
    assert_trace_tells_the_output(own)
    assert own["output_ids"] == asked["output_ids"] and own["text"] == asked["text"]
    for mine, served in zip(own["meta_info"]["spec_trace"], asked["meta_info"]["spec_trace"]):
        assert mine["tokens"] == served["tokens"] and len(mine["tokens"]) == 8
    drawn = explained("--url", server.base_url)
    assert f"text: {asked['text']!r}" in drawn
    assert drawn.count("\nstep ") == len(asked["meta_info"]["spec_trace"])
    server.stop()
