"""Calls that must come, from the embedded model, by HTTP: valid, and the same however served.

MAMBA_EAGLE_CHAOS_SCALE multiplies their number; 34 makes more than 200 chats of each form.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from chat_rig import TEMPLATE, body_of, check_calls, family_file, plain, streamed
from running_server import StartServer

SCALE = int(os.environ.get("MAMBA_EAGLE_CHAOS_SCALE", "1"))
CHATS = 6 * SCALE
FAMILIES = ("nemotron_3", "qwen3")  # arguments in tags, arguments in JSON


@pytest.mark.e2e
@pytest.mark.timeout(300 + 10 * CHATS)
@pytest.mark.parametrize("family", FAMILIES if SCALE > 1 else FAMILIES[:1])
def test_required_calls_fit_their_schemas_with_and_without_drafts(
    family: str, start_server: StartServer, tmp_path: Path
) -> None:
    flags = ("--chat-template", TEMPLATE, "--tool-call-parser", family_file(family, tmp_path))
    servers = [start_server(*flags, "--speculative-algorithm", kind) for kind in ("EAGLE", "NONE")]
    clients = [httpx.Client(base_url=server.base_url, timeout=300) for server in servers]

    def chat(number: int) -> int:
        body = body_of(number)
        answers = []
        for client in clients:
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, (number, reply.text)
            (choice,) = reply.json()["choices"]
            calls = check_calls(body, choice)
            answers += [plain(choice), plain(streamed(client, body))]
        assert all(answer == answers[0] for answer in answers), (number, answers)
        return calls

    with ThreadPoolExecutor(4) as pool:
        calls = sum(pool.map(chat, range(CHATS)))
    assert calls >= CHATS // 2
    for server in servers:
        server.stop()
