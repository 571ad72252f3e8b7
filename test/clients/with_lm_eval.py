"""``lm-eval``: completions (likelihoods, texts) and chats. Its likelihoods are compared with those
that transformers computes, by likelihoods.py in an environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import ASSETS, MODEL, V1, check, equal, run

QUESTIONS = 12
LIMIT = 2e-4  # natural logarithm, of a whole text
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{prompt}}}}{{{{right}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{{prompt}}}}}"
doc_to_target: "{{{{result}}}}"
generation_kwargs: {{until: ["Question"], max_gen_toks: 150, do_sample: false}}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "#### (\\\\d+)"}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match}}]
"""


def documents() -> list[dict[str, str]]:
    rows = [json.loads(line) for line in (ASSETS / "gsm8k_style_test.jsonl").open()][:QUESTIONS]
    return [
        {
            "prompt": f"Question: {row['question']}\nAnswer:",
            "question": row["question"],
            "right": " " + row["answer"],
            "wrong": " " + rows[i - 1]["answer"],
            "result": row["answer"].rpartition("#### ")[2],
        }
        for i, row in enumerate(rows)
    ]


def evaluate(model: str, task: str, *flags: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metrics and samples of a run of the command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, documents())))
        prompt = "question" if "--apply_chat_template" in flags else "prompt"
        definition = {"choices": CHOICES, "rolling": ROLLING, "texts": TEXTS}[task]
        (folder / f"{task}.yaml").write_text(definition.format(data=data, prompt=prompt))
        route = "chat/completions" if "chat" in model else "completions"
        settings = f"model={MODEL},base_url={V1}/{route},num_concurrent=8,max_length=2048"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", task]
        command += ["--model_args", settings, "--include_path", name, "--log_samples"]
        command += ["--output_path", str(folder / "out"), *flags]
        environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HOME": str(folder / "hf")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=name)
        assert done.returncode == 0, done.stderr[-2000:]
        (results,) = (folder / "out").rglob("results_*.json")
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.open()]
        return json.loads(results.read_text())["results"][task], lines


def compare(pairs: list[dict[str, Any]]) -> None:
    """pairs: context, continuation, and the likelihood that lm-eval got."""
    script = Path(__file__).with_name("likelihoods.py")
    done = subprocess.run(
        [os.environ["MAMBA_EAGLE_PYTHON"], str(script)],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    difference = json.loads(done.stdout)["max_difference"]
    print(f"{len(pairs)} likelihoods differ from transformers' by {difference:.1e} at most")
    assert difference <= LIMIT, difference


def answer_of(sample: dict[str, Any]) -> float:
    value = sample["resps"][0][0]
    return float(value[0] if isinstance(value, list) else value)


@check("local-completions: multiple choice, loglikelihoods as transformers'")
def choices() -> None:
    metrics, samples = evaluate("local-completions", "choices")
    equal(len(samples), QUESTIONS)
    assert metrics["acc,none"] >= 0.9, metrics
    pairs = []
    for sample in samples:
        for arguments, reply in zip(sample["arguments"].values(), sample["resps"]):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            pairs.append({"context": context, "text": continuation, "value": float(reply[0][0])})
    equal(len(pairs), 2 * QUESTIONS)
    compare(pairs)


@check("local-completions: loglikelihood_rolling as transformers'")
def rolling() -> None:
    _, samples = evaluate("local-completions", "rolling")
    texts = [sample["arguments"]["gen_args_0"]["arg_0"] for sample in samples]
    compare([{"context": "", "text": t, "value": answer_of(s)} for t, s in zip(texts, samples)])


@check("local-completions: generate_until")
def texts() -> None:
    metrics, samples = evaluate("local-completions", "texts")
    equal(len(samples), QUESTIONS)
    assert metrics["exact_match,last"] >= 0.5, metrics


@check("local-chat-completions: generate_until with the chat template")
def chats() -> None:
    metrics, samples = evaluate("local-chat-completions", "texts", "--apply_chat_template")
    equal(len(samples), QUESTIONS)
    assert metrics["exact_match,last"] >= 0.5, metrics


run("lm_eval")
