"""SGLang's ``RuntimeEndpoint`` and ``bench_serving``, which read this server as one of theirs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ASSETS, BASE_URL, PROMPT, RESULT, TOKENIZER, check, equal, run

STAND_INS = Path(__file__).with_name("sglang_stand_ins.py")
PROGRAM = """
import sglang as sgl

sgl.set_default_backend(sgl.RuntimeEndpoint({url!r}))
sgl.flush_cache()
assert "max_total_num_tokens" in sgl.get_server_info()


@sgl.function
def problem(s, prompt):
    s += prompt
    s += sgl.gen("answer", max_tokens=150, temperature=0, stop=["Question"])
    s += "\\nIs it more than 9? " + sgl.select("more", choices=["yes", "no"])
    for fork in s.fork(2):
        fork += sgl.gen("again", max_tokens=8, temperature=1.0)
    s += sgl.gen("number", regex="[0-9]{{3}}", max_tokens=8)


state = problem.run(prompt={prompt!r})
assert state["answer"].strip().endswith({result!r}), state["answer"]
assert state["more"] in ("yes", "no")
assert len(state["number"]) == 3 and state["number"].isdigit(), state["number"]
streamed = problem.run(prompt={prompt!r}, stream=True)
assert "".join(streamed.text_iter("answer")).strip() == state["answer"].strip()
many = problem.run_batch([dict(prompt={prompt!r})] * 3, num_threads=3)
assert [one["answer"] for one in many] == [state["answer"]] * 3
"""


@check("RuntimeEndpoint: gen, select, fork, regex, stream, run_batch")
def endpoint() -> None:
    text = PROGRAM.format(url=BASE_URL, prompt=PROMPT, result=RESULT)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def bench(backend: str, *flags: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = [json.loads(line) for line in (ASSETS / "gsm8k_style_test.jsonl").open()][:20]
        asked = [[f"Question: {row['question']}\nAnswer:", row["answer"]] for row in rows]
        turns = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in asked]
        problems = Path(name) / "problems.json"
        problems.write_text(json.dumps([{"conversations": turn} for turn in turns]))
        output = Path(name) / "out.jsonl"
        command = [sys.executable, str(STAND_INS), "sglang.bench_serving", "--backend", backend]
        command += ["--base-url", BASE_URL, "--tokenizer", TOKENIZER, "--num-prompts", "12"]
        command += ["--dataset-name", "sharegpt", "--dataset-path", str(problems)]
        command += ["--max-concurrency", "4", "--output-file", str(output), *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=name)
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-1000:]
        (result,) = [json.loads(line) for line in output.open()]
        equal(result["completed"], 12)
        assert result["total_output_tokens"] > 0 and result["median_ttft_ms"] > 0, result
        if backend == "sglang":
            assert result["accept_length"] > 1, result


@check("bench_serving --backend sglang, with drafts' acceptance")
def bench_generate() -> None:
    bench("sglang", "--flush-cache")


@check("bench_serving --backend sglang-oai-chat")
def bench_chat() -> None:
    bench("sglang-oai-chat")


run("sglang")
