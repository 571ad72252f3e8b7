"""Bodies that a hostile client might send; what each of them does to others is to be little.

benchmark/flood.py measures it, and test/srt/chaos/test_floods.py sends them while streams run.

    python -m benchmark.lib.attacks 30000 "a million texts"

sends one of them again and again until it is killed.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmark.lib.grammar_bombs import GRAMMAR_BOMBS

MIB = 2**20
# What a process that sends them costs by itself on a machine of few cores: it computes and sends
# nothing.
CONTROL = "nothing, but a busy process"


class Attack(NamedTuple):
    path: str
    body: Callable[[], bytes]  # takes a while for some
    statuses: tuple[int, ...] = (400,)  # that a server with default limits may answer


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _generate(**values: Any) -> bytes:
    return _json({"text": "a", **values})


def _sampling(**values: Any) -> bytes:
    return _generate(sampling_params=values)


def _repeated(inner: bytes, count: int) -> bytes:
    return b'{"x":[' + b",".join([inner] * count) + b"]}"


def _messages(count: int, content: str) -> bytes:
    return _json({"messages": [{"role": "user", "content": content}] * count})


STREAMED = {"max_new_tokens": 200, "ignore_eos": True}
CHAT = "/v1/chat/completions"

# Those that once stopped everybody else for seconds, then what else might.
ATTACKS: dict[str, Attack] = {
    "a million texts": Attack("/generate", lambda: _json({"text": ["a"] * 10**6})),
    "a million lists to detokenize": Attack(
        "/detokenize", lambda: _json({"tokens": [[1]] * 10**6})
    ),
    "250k chat messages": Attack(CHAT, lambda: _messages(250_000, "")),
    "100k stop strings, n 256": Attack(
        "/generate",
        lambda: _sampling(stop=[f"zz{i}" for i in range(10**5)], n=256, max_new_tokens=1),
    ),
    "a token of 32 MiB": Attack(
        "/generate", lambda: _json({"input_ids": [1, "x" * (32 * MIB)]}), (413,)
    ),
    "a token of 7 MiB": Attack("/generate", lambda: _json({"input_ids": [1, "x" * (7 * MIB)]})),
    "logit_bias of a million": Attack(
        "/generate", lambda: _sampling(logit_bias={str(i): 1 for i in range(10**6)}), (400, 413)
    ),
    "rid of 1 MB, streamed": Attack(
        "/generate", lambda: _generate(rid="r" * 10**6, stream=True, sampling_params=STREAMED)
    ),
    "rid of 100 kB, n 1024": Attack(
        "/generate",
        lambda: _generate(rid="r" * 10**5, sampling_params={"n": 1024, "max_new_tokens": 0}),
    ),
    "model of 1 MB, streamed": Attack(
        "/v1/completions",
        lambda: _json(
            {"prompt": "a", "model": "default" * 10**6, "stream": True, "max_tokens": 200}
        ),
    ),
    "a million texts to tokenize": Attack("/tokenize", lambda: _json({"prompt": ["a"] * 10**6})),
    "8 MiB of text to tokenize": Attack(
        "/tokenize", lambda: _json({"prompt": "a word " * 1_190_000})
    ),
    "a text of 500 kB": Attack("/generate", lambda: _json({"text": "a word " * 70_000})),
    "a text of 250 kB": Attack("/generate", lambda: _json({"text": "a word " * 36_000})),
    "1.3 million token ids": Attack("/generate", lambda: _json({"input_ids": [12345] * 1_300_000})),
    "2.7 million empty lists": Attack("/generate", lambda: _repeated(b"[]", 2_700_000)),
    "700k keys": Attack("/generate", lambda: _json({str(i): 1 for i in range(700_000)})),
    "230k long numbers": Attack(
        "/generate", lambda: _repeated(b"1.23456789012345678901234e-300", 230_000)
    ),
    "8 MiB of escapes": Attack("/generate", lambda: b'{"text":"' + b"\\u00e9" * 1_390_000 + b'"}'),
    "an array 8 million deep": Attack("/generate", lambda: b'{"text":' + b"[" * (8 * MIB - 16)),
    "60 MiB of spaces": Attack("/generate", lambda: b" " * (60 * MIB), (413,)),
    "4,000 chat messages": Attack(CHAT, lambda: _messages(4000, "hi"), (200, 400)),
    "500 texts, prefill only": Attack(
        "/generate",
        lambda: _json({"text": ["a"] * 500, "sampling_params": {"max_new_tokens": 0}}),
        (200, 503),
    ),
}


# Grammars that would take for ever: whatever they are answered, others do not notice.
BOMBS: dict[str, Attack] = {
    name: Attack("/generate", partial(_sampling, max_new_tokens=8, **bomb), (200, 400, 503))
    for name, bomb in GRAMMAR_BOMBS.items()
}


def send_forever(port: int, name: str) -> None:
    """Prints a line when it begins, then the status and the length of each answer."""
    os.nice(10)  # a client is on another machine: what it computes is not to slow this one
    path, body = "", b""
    if name != CONTROL:
        attack = (ATTACKS | BOMBS)[name]
        path, body = attack.path, attack.body()
    print("ready", flush=True)
    while name == CONTROL:
        pass
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            size = 0
            while part := response.read(MIB):
                size += len(part)
            print(response.status, size, flush=True)
        except OSError as error:
            print(type(error).__name__, 0, flush=True)
            time.sleep(0.05)
        connection.close()


if __name__ == "__main__":
    send_forever(int(sys.argv[1]), sys.argv[2])
