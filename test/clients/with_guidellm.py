"""``guidellm``: its benchmark over the chat route, with its own count of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ASSETS, BASE_URL, MODEL, TOKENIZER, check, equal, run

REQUESTS = 10
NEW_TOKENS = 32


@check("run: concurrent streams of chats, every request complete")
def concurrent() -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = [json.loads(line) for line in (ASSETS / "gsm8k_style_test.jsonl").open()][:20]
        asked = [{"prompt": r["question"], "output_tokens_count": NEW_TOKENS} for r in rows]
        data, output = Path(name) / "data.jsonl", Path(name) / "out.json"
        data.write_text("\n".join(map(json.dumps, asked)))
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={BASE_URL},model={MODEL}"]
        command += ["--profile", "kind=concurrent,streams=2"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", f"kind=json_file,path={data}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        command += ["--output", f"kind=json,path={output}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=name)
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-1000:]
        (benchmark,) = json.loads(output.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        equal((totals["successful"], totals["errored"]), (REQUESTS, 0))
        equal(benchmark["metrics"]["output_token_count"]["successful"]["max"], NEW_TOKENS)


run("guidellm")
