"""``bench``, ``eval`` and ``explain`` ask a running server under one flag."""

from __future__ import annotations

import pytest
from running_server import StartServer

from mamba_eagle import bench_one_batch, explain
from mamba_eagle.eval import few_shot_gsm8k

pytestmark = pytest.mark.e2e


def test_bench_and_eval_take_the_same_url(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--api-key", "secret")
    asked = ["--url", server.base_url.removeprefix("http://"), "--api-key", "secret"]
    sizes = ["--batch-size", "1", "3", "--input-len", "40", "--output-len", "8"]
    bench_one_batch.main([*asked, *sizes])
    said = capsys.readouterr().out
    assert "batch 1, input 40, output 8" in said and "batch 3, input 40, output 8" in said
    assert "Prompts. tokens: 40," in said and "Prompts. tokens: 120," in said
    few_shot_gsm8k.main([*asked, "--num-questions", "8", "--num-shots", "1"])
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("8 of 8 answered, ")
    right = int(said.err.split()[-2])
    assert f"Accuracy: {right / 8:.3f}" in said.out
    explain.main([*asked, "--text", "Question: 3 plus 4?", "--max-new-tokens", "4"])
    assert "tokens: " in capsys.readouterr().out
    server.stop()


def test_the_servers_model_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_one_batch.main(["--url", "x", "--quantization", "int8"])
    assert "the server has its own model" in capsys.readouterr().err
