"""``mamba-eagle explain``: the drawing, and what it says when it cannot draw."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console
from server_harness import listening, run, says, serving

from mamba_eagle import explain

FULL = {
    "tokens": [5, 10, 11, 12, 13],
    "parents": [0, 0, 0, 1, 1],
    "scores": [0.0, -0.105361, None, -0.798508, -1.714798],
    "accepted": [0, 1, 3],
    "bonus": 20,
    "token_texts": [" a", " [b]", "\n", "'c", "\x1b"],
    "bonus_text": "\u202e",
}
PLAIN = {
    "tokens": [20],
    "parents": [0],
    "scores": [0.0],
    "accepted": [0],
    "bonus": 21,
    "token_texts": ["d"],
    "bonus_text": "e",
}
CUT = {  # max_new_tokens ended it at a token that was drafted and agreed with
    "tokens": [21, 22, 23],
    "parents": [0, 0, 1],
    "scores": [0.0, 0.0, -0.693147],
    "accepted": [0],
    "bonus": 22,
}
REPLY = {
    "text": " a [b]'c",
    "output_ids": [5, 10, 12, 20, 21, 22],
    "meta_info": {"prompt_tokens": 4, "spec_trace": [FULL, PLAIN, CUT]},
}
DRAWN = r"""✓ accepted   ★ the target's own next token (bonus)   0.5 how sure the drafter was

step 1: 4 drafted, 2 accepted
' a'
├── ✓ ' [b]' 0.900
│   ├── ✓ "'c" 0.500
│   │   └── ★ '\u202e'
│   └── '\x1b' 0.200
└── '\n' 0.000

step 2: 0 drafted, 0 accepted
'd'
└── ★ 'e'

step 3: 2 drafted, 0 accepted
#21
└── ★ #22 1.000
    └── #23 0.500

text: " a [b]'c"
tokens: 4 in the prompt, 6 new, 5 of them in 3 steps (the first came with the prompt)
acceptance length: 1.67 tokens per step
steps by accepted drafts:
   0     2 ██
   1     0
   2     1 █
"""


def drawing(reply: dict[str, Any], **console: Any) -> str:
    file = io.StringIO()
    explain.show(reply, Console(file=file, width=explain.WIDEST, **console))
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def test_trees_and_summary_as_drawn() -> None:
    """Nothing in a token's text acts on the terminal."""
    assert drawing(REPLY) == DRAWN


def test_a_terminal_gets_colours_as_well() -> None:
    drawn = drawing(REPLY, force_terminal=True, color_system="standard")
    assert "\x1b[32m✓ ' [b]' 0.900\x1b[0m" in drawn
    assert "\x1b[36m★ 'e'\x1b[0m" in drawn


def test_nodes_that_the_grammar_refused_are_marked() -> None:
    step = {
        "tokens": [1, 2, 3, 4],
        "parents": [0, 0, 1, 0],
        "scores": [0.0, -0.1, -0.2, -0.3],
        "accepted": [0],
        "bonus": 4,
        "refused": [1, 2],
    }
    drawn = drawing({**REPLY, "meta_info": {"prompt_tokens": 1, "spec_trace": [step]}})
    assert "✗ refused by the grammar" in drawn and "refused" not in DRAWN
    assert "├── ✗ #2 0.905\n│   └── ✗ #3 0.905\n└── ★ #4 0.741" in drawn


def test_a_deep_chain_is_not_broken() -> None:
    deep = {
        "tokens": list(range(40)),
        "parents": [max(node - 1, 0) for node in range(40)],
        "scores": [-0.1 * node for node in range(40)],
        "accepted": list(range(40)),
        "bonus": 40,
    }
    reply = {**REPLY, "meta_info": {"prompt_tokens": 1, "spec_trace": [deep]}}
    lines = drawing(reply).splitlines()[3:44]
    assert [line.split("#")[1].split(" ")[0] for line in lines] == [str(i) for i in range(41)]


def test_long_histograms_are_scaled_and_no_steps_are_fine() -> None:
    lines = explain.histogram_lines([PLAIN] * 400 + [FULL])
    assert [line.count("█") for line in lines] == [explain.LONGEST_BAR, 0, 1]
    assert "acceptance" not in drawing(
        {**REPLY, "meta_info": {"prompt_tokens": 4, "spec_trace": []}}
    )


def test_a_server_is_asked_and_its_refusals_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with (
            serving(says("hello"), chunk=2, api_key="secret") as server,
            listening(server.app) as client,
        ):
            url = ["--url", f"{client.base_url}/".replace("http://", "")]
            key = ["--api-key", "secret"]

            def ask(*arguments: str) -> str:
                explain.main([*url, "--text", "hi", *arguments])
                return capsys.readouterr().out

            drawn = await asyncio.to_thread(ask, *key, "--max-new-tokens", "4")
            assert "├" not in drawn and "└── ✓ 'h' 0.607" in drawn and "text: 'hell'" in drawn
            raw = json.loads(await asyncio.to_thread(ask, *key, "--json"))
            assert raw["text"] == "hello" and len(raw["meta_info"]["spec_trace"]) == 3
            sampling = server.engine.received[-1].sampling
            assert (sampling.temperature, sampling.seed, sampling.max_new_tokens) == (0.0, 0, 64)
            with pytest.raises(SystemExit, match="answered 401 to /generate: .*--api-key"):
                await asyncio.to_thread(ask)
            with pytest.raises(SystemExit, match="answered 400 to /generate: .*63"):
                await asyncio.to_thread(ask, *key, "--text", "x" * 90)

    run(test())


@contextmanager
def stranger(status: int, content: bytes) -> Iterator[str]:
    """Another server than ours, that answers every POST alike; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *values: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.timeout = 60
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join()


@pytest.mark.parametrize(
    "status, content, says",
    [
        (404, b"<html>", "answered 404 to /generate: is it a mamba-eagle server"),
        (200, b"<html>", "without meta_info.spec_trace"),
        (200, b'{"text": "a", "meta_info": {"spec_verify_ct": 3}}', "without meta_info.spec_trace"),
        (500, b'{"error": {"message": "the server failed"}}', "answered 500 .*: the server failed"),
    ],
)
def test_other_servers_are_named(status: int, content: bytes, says: str) -> None:
    with stranger(status, content) as url, pytest.raises(SystemExit, match=f"{url}: .*{says}"):
        explain.main(["--url", url, "--text", "hi"])


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://nowhere.invalid:5", "ftp://x", "h:x"]
)
def test_a_server_out_of_reach_is_named(url: str) -> None:
    with pytest.raises(SystemExit, match="--url .*: no answer .*mamba-eagle serve"):
        explain.main(["--url", url, "--text", "hi"])


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--text", ""], "--text '': must be text"),
        (["--text", "\udc80"], r"--text '\\udc80': must be text in valid UTF-8"),
        ([], "--text"),
        (["--text", "a", "--url", "x", "--model-path", "y"], "leave the model's flags out"),
        (["--text", "a", "--temperature", "nan"], "temperature = NaN: must be a finite number"),
        (["--text", "a", "--max-new-tokens", "-1"], "max_new_tokens = -1: must be 0 or more"),
        (["--text", "a", "--seed", "-1"], "seed = -1: must be between 0"),
        (["--text", "a", "--model-path", "/nowhere"], "--model-path /nowhere: "),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        explain.main(arguments)
    said = capsys.readouterr().err + str(error.value.code)
    assert says.replace("\\\\", "\\") in said
    assert error.value.code not in (0, None)
