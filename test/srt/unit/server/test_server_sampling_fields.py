"""Fields of vLLM's and SGLang's sampling, over the fake engine: what goes to the engine, and the
forms of replies."""

from __future__ import annotations

from typing import Any

from fake_engine import FakeEngine, length_of
from server_harness import run, says, serving
from test_server_chat import chatting
from tiny_tokenizer import spell

from mamba_eagle.core import FinishReason
from mamba_eagle.message import Generate, TokenLogprob


def sampling_of(server: Any) -> Any:
    return server.engine.of(Generate)[-1].sampling


def test_bad_words_are_the_tokens_that_spell_them() -> None:
    """Behind a blank, too, where that is other tokens and no more of them: never with bytes."""

    async def test() -> None:
        async with serving(says("hello")) as server:
            body = {"prompt": "a", "bad_words": [" ab", "c"], "allowed_token_ids": spell("abcd")}
            assert (await server.post("/v1/completions", **body)).status_code == 200
            assert sampling_of(server).bad_word_ids == [spell("ab"), spell("c")]
            assert sampling_of(server).allowed_token_ids == spell("abcd")
            own = {"bad_words": ["de"]}
            await server.post("/generate", text=["a", "b"], sampling_params=[own, {}])
            sent = server.engine.of(Generate)[-2:]
            assert [each.sampling.bad_word_ids for each in sent] == [[spell("de")], []]

    run(test())


def entry(token: int, best: int) -> dict[str, Any]:
    """As the fake engine makes them: the token's own is the best."""
    ranked = [(token, -0.5), (3, -1.5), (4, -2.5)][: max(best, 1)]
    text = {3: "\x00", 4: "\x01"}
    return {
        str(each): {"logprob": value, "rank": rank, "decoded_token": text.get(each, chr(each - 3))}
        for rank, (each, value) in enumerate(ranked, 1)
    }


def test_prompt_logprobs_have_vllms_form() -> None:
    """Of every choice on completions, of the reply on chats; the output's own stay as they are."""

    async def test() -> None:
        async with serving(says("xyz")) as server:
            body = {"prompt": ["ab", "c"], "prompt_logprobs": 2, "max_tokens": 2}
            choices = (await server.post("/v1/completions", **body)).json()["choices"]
            b = spell("b")[0]
            assert choices[0]["prompt_logprobs"] == [None, entry(b, 2)]
            assert choices[1]["prompt_logprobs"] == [None]
            assert [choice["logprobs"] for choice in choices] == [None, None]
            both = (await server.post("/v1/completions", **body, logprobs=1)).json()["choices"]
            assert [len(best) for best in both[0]["logprobs"]["top_logprobs"]] == [1, 1]
            assert both[0]["prompt_logprobs"] == [None, entry(b, 2)]
            echo = {"echo": True, "logprobs": 3}
            both = (await server.post("/v1/completions", **body, **echo)).json()["choices"]
            assert both[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
            assert both[0]["prompt_logprobs"] == [None, entry(b, 2)]

    run(test())


def test_a_rank_is_told_where_it_is_known() -> None:
    class Unlikely(FakeEngine):
        def _logprob(self, token: int, request: Generate) -> TokenLogprob:
            return TokenLogprob(token, -9.0, [(-0.1, 60), (-0.2, token)][: request.top_logprobs])

    async def test() -> None:
        async with serving(says("xyz"), engine=Unlikely) as server:
            b = str(spell("b")[0])
            for best, rank in ((0, None), (1, None), (2, 2)):
                body = {"prompt": "ab", "prompt_logprobs": best}
                (choice,) = (await server.post("/v1/completions", **body)).json()["choices"]
                found = choice["prompt_logprobs"][1]
                assert len(found) == (2 if best else 1) and found[b]["rank"] == rank

    run(test())


def test_a_chats_prompt_logprobs_are_of_its_whole_prompt() -> None:
    async def test() -> None:
        async with chatting(says("xyz")) as server:
            messages = [{"role": "user", "content": "hi"}]
            body = {"messages": messages, "prompt_logprobs": 0, "max_tokens": 2}
            reply = (await server.post("/v1/chat/completions", **body)).json()
            sent = server.engine.of(Generate)[-1]
            found = [None, *(entry(token, 1) for token in sent.token_ids[1:])]
            assert [one and list(one) for one in reply["prompt_logprobs"]] == [
                one and list(one) for one in found
            ]
            assert reply["choices"][0]["logprobs"] is None
            plain = (await server.post("/v1/chat/completions", messages=messages)).json()
            assert "prompt_logprobs" not in plain

    run(test())


def test_a_truncated_prompt_keeps_its_end() -> None:
    async def test() -> None:
        async with serving(says("xyz"), context_length=12) as server:
            long = "abcdefghijklmnop"
            assert (await server.post("/v1/completions", prompt=long)).status_code == 400
            for last, kept in ((3, "nop"), (-1, long[-11:]), (99, None)):
                # even of a text that is refused by its length alone
                body = {"prompt": "z" * 9000 + long, "truncate_prompt_tokens": last}
                reply = await server.post("/v1/completions", **body)
                assert reply.status_code == (200 if kept else 400), reply.text
                if kept:
                    assert server.engine.of(Generate)[-1].token_ids == spell(kept)
                    assert reply.json()["usage"]["prompt_tokens"] == len(kept)

    run(test())


def test_the_best_of_some_samples_come_by_their_mean_logprobs() -> None:
    """Per token: the longest has the lowest sum."""
    outputs = {0: ("aaaa", -0.5), 1: ("b", -0.9), 2: ("c", -0.6)}

    class Different(FakeEngine):
        def _logprob(self, token: int, request: Generate) -> TokenLogprob:
            return TokenLogprob(token, outputs[number_of(request)][1])

    def number_of(request: Generate) -> int:
        return int(request.rid.partition("#")[0][-1])

    def script(request: Generate) -> tuple[list[int], FinishReason]:
        tokens = spell(outputs[number_of(request)][0])
        return tokens, length_of(tokens)

    async def test() -> None:
        async with serving(script, engine=Different) as server:
            body = {"prompt": "x", "best_of": 3, "n": 2}
            reply = (await server.post("/v1/completions", **body)).json()
            found = [(choice["index"], choice["text"]) for choice in reply["choices"]]
            assert found == [(0, "aaaa"), (1, "c")]
            assert reply["choices"][0]["logprobs"] is None
            assert reply["usage"]["completion_tokens"] == 6
            (one,) = (await server.post("/v1/completions", **{**body, "n": 1})).json()["choices"]
            assert one["text"] == "aaaa"

    run(test())


def test_named_tokens_have_their_logprobs_at_each_place() -> None:
    async def test() -> None:
        async with serving(says("xyz")) as server:
            body = {"text": "ab", "return_logprob": True, "logprob_start_len": 0}
            named = {**body, "token_ids_logprob": [7, 9], "sampling_params": {"max_new_tokens": 2}}
            meta = (await server.post("/generate", **named)).json()["meta_info"]
            row = [[-0.5, 7, None], [-1.5, 9, None]]
            assert meta["output_token_ids_logprobs"] == [row, row]
            assert meta["input_token_ids_logprobs"] == [None, row]
            many = {**named, "text": ["a", "b"], "token_ids_logprob": [[7], []]}
            first, second = (await server.post("/generate", **many)).json()
            assert first["meta_info"]["output_token_ids_logprobs"] == [row[:1]] * 2
            assert "output_token_ids_logprobs" not in second["meta_info"]
            events = await server.events("/generate", **named, incremental=True)
            told = [event["meta_info"]["output_token_ids_logprobs"] for event in events]
            assert sum(told, []) == [row, row]

    run(test())
