"""/v1/score and suffixes, over the fake engine."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import TOKENIZER, Others, run, says, serving, silent
from tiny_tokenizer import BOS, byte_level, spell
from tokenizers import AddedToken

from mamba_eagle.message import Generate
from mamba_eagle.server.apis.score import _reply
from mamba_eagle.server.bodies.prompts import FORMS, Infill, InfillTokens
from mamba_eagle.tokenizer.text import TextTokenizer

PATH = "/v1/score"
LABELS = spell("xy")


def test_every_item_is_a_prompt_whose_next_token_names_the_labels() -> None:
    async def test() -> None:
        async with serving(says("z")) as server:
            body = {"query": "ab", "items": ["c", "de"], "label_token_ids": LABELS, "model": "tiny"}
            reply = (await server.post(PATH, **body, return_token_logprobs=True)).json()
            assert reply["object"] == "scoring" and reply["model"] == "tiny"
            assert reply["scores"] == [[math.exp(-0.5), math.exp(-1.5)]] * 2
            assert reply["token_logprobs"] == [[-0.5, -1.5]] * 2
            assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 7
            sent = server.engine.of(Generate)
            assert [TOKENIZER.decode(request.token_ids) for request in sent] == ["abc", "abde"]
            assert all(request.sampling.max_new_tokens == 1 for request in sent)
            assert all(request.token_ids_logprob == LABELS for request in sent)
            own = {**body, "label_token_ids": [[5], [6, 7, 8]], "item_first": True}
            reply = (await server.post(PATH, **own)).json()
            assert [len(row) for row in reply["scores"]] == [1, 3]
            assert TOKENIZER.decode(server.engine.of(Generate)[-1].token_ids) == "deab"
            among = {**body, "apply_softmax": True, "temperature": 0.5}
            scores = (await server.post(PATH, **among)).json()["scores"][0]
            assert scores[0] / scores[1] == pytest.approx(math.exp(2))
            assert sum(scores) == pytest.approx(1)
            ids = {"items": [[5], [6]], "query": [4], "label_token_ids": LABELS}
            assert (await server.post(PATH, **ids)).status_code == 200
            assert server.engine.of(Generate)[-1].token_ids == [4, 6]
            assert (await server.post(PATH, items=[], label_token_ids=[1])).json()["scores"] == []

    run(test())


def test_others_are_served_while_many_labels_are_weighed() -> None:
    async def test() -> None:
        others = Others()
        asked = {"apply_softmax": True, "temperature": 1.0, "return_token_logprobs": True}
        job: Any = SimpleNamespace(prompts=[], model="tiny", body=SimpleNamespace(**asked))
        reply = await _reply(job, [[-1.0] * 1000] * 400)
        assert others.leave() > 3
        names = ("scores", "token_logprobs")
        scores, logprobs = (json.loads(bytes(reply[name][399])) for name in names)
        assert scores == pytest.approx([0.001] * 1000) and logprobs == [-1.0] * 1000

    run(test())


def test_short_bodies_are_read_in_a_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of 2,000 characters before 500 items is a million of text."""
    threads, encode_all = [], TextTokenizer.encode_all

    def noted(*own: Any) -> Any:
        threads.append(threading.current_thread())
        return encode_all(*own)

    monkeypatch.setattr(TextTokenizer, "encode_all", noted)

    async def test() -> None:
        async with serving(says("z")) as server:
            reply = await server.post(PATH, query="ab", items=["c"], label_token_ids=LABELS)
            assert reply.status_code == 200 and threads
            assert threading.main_thread() not in threads

    run(test())


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"items": None}, ["items = null", "strings"]),
    ({"items": ["a", 5]}, ["items = ", "strings"]),
    ({"items": [[1], "a"]}, ["items = ", "lists of token ids"]),
    ({"items": [[300]]}, ["items[0]", "299"]),
    ({"items": [""]}, ["items[0]", "empty"]),
    ({"items": ["a"] * 4097}, ["items: 4097 prompts", "4096"]),
    ({"items": ["x" * 99]}, ["items[0]", "63"]),
    ({"items": ["a"] * 4096, "query": "a" * 1025}, ["query: its 1025 characters", "4096 prompts"]),
    ({"query": [5]}, ["query = [5]", "string"]),
    ({"items": [[5]], "query": "a"}, ['query = "a"', "token ids"]),
    ({"label_token_ids": None}, ["label_token_ids = null"]),
    ({"label_token_ids": []}, ["label_token_ids = []"]),
    ({"label_token_ids": [300]}, ["label_token_ids = [300]", "299"]),
    ({"label_token_ids": [-1]}, ["label_token_ids = [-1]"]),
    ({"label_token_ids": [5, 5]}, ["label_token_ids", "twice"]),
    ({"label_token_ids": [[5], [6]]}, ["label_token_ids", "2 lists for 1 items"]),
    ({"label_token_ids": [["x"]]}, ["label_token_ids[0]", "integers"]),
    ({"label_token_ids": list(range(4097))}, ["label_token_ids: 4097 labels"]),
    ({"temperature": 0, "apply_softmax": True}, ["temperature = 0", "above 0"]),
    ({"temperature": 2}, ["temperature = 2", "apply_softmax"]),
    ({"apply_softmax": 1}, ["apply_softmax = 1"]),
    ({"text_1": "a"}, ["text_1", "not available"]),
    ({"score_extraction_token": "a"}, ["score_extraction_token", "not available"]),
    ({"timeout": -1}, ["timeout = -1"]),
]


def test_bad_bodies_are_named() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            for body, parts in BAD:
                right = {"items": ["a"], "label_token_ids": [5]}
                reply = await server.post(PATH, **{**right, **body})
                assert reply.status_code == 400, (body, reply.text)
                for part in parts:
                    assert part in reply.json()["error"]["message"], reply.text
            assert server.engine.of(Generate) == []

    run(test())


# ── suffix ───────────────────────────────────────────────────────────────────────────────────


def filling(form: InfillTokens) -> TextTokenizer:
    """Bytes, and this form's tokens from 300 on; they are not called special, as Qwen's are not."""
    tokenizer = byte_level()
    padding = [AddedToken(f"<{number}>") for number in range(259, 300)]
    added = [AddedToken(name) for name in form[:3] if name]
    tokenizer.hf.add_tokens(padding + added)
    return TextTokenizer(tokenizer.hf)


@pytest.mark.parametrize("form", FORMS, ids=[form.before for form in FORMS])
def test_a_suffix_stands_where_the_family_wants_it(form: InfillTokens) -> None:
    async def test() -> None:
        tokenizer = filling(form)
        async with serving(says("x"), tokenizer=tokenizer, vocab_size=310) as server:
            body = {"prompt": ["ab", "c"], "suffix": "yz", "max_tokens": 1}
            reply = await server.post("/v1/completions", **body)
            assert reply.status_code == 200, reply.text
            sent = [request.token_ids for request in server.engine.of(Generate)]
            parts = {"ab": spell("ab"), "yz": spell("yz")}
            first, second = ("yz", "ab") if form.suffix_first else ("ab", "yz")
            wanted = [300, *parts[first], 301, *parts[second]]
            assert sent[0] == wanted + ([302] if form.after else [])
            await server.post("/v1/completions", prompt=[BOS, 7], suffix="yz", max_tokens=1)
            ids = server.engine.of(Generate)[-1].token_ids
            assert ids[:2] == [BOS, 300] and ids.count(BOS) == 1
            echo = await server.post("/v1/completions", **body, echo=True)
            assert echo.status_code == 400 and "echo = true" in echo.text
            long = await server.post("/v1/completions", **{**body, "suffix": "y" * 70})
            assert long.status_code == 400 and "prompt[0]" not in long.text and "63" in long.text
            plain = await server.post("/v1/completions", prompt="ab", suffix="", max_tokens=1)
            assert plain.status_code == 200
            assert server.engine.of(Generate)[-1].token_ids == spell("ab")

    run(test())


def test_half_a_familys_tokens_are_none() -> None:
    tokenizer = byte_level()
    tokenizer.hf.add_tokens([AddedToken("<|fim_prefix|>"), AddedToken("<|fim_suffix|>")])
    assert Infill.of(TextTokenizer(tokenizer.hf)) is None
