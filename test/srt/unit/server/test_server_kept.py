"""Responses that are kept: continued, fetched, deleted, bounded, each for its key."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from chat_samples import HERMES, WEATHER
from server_harness import Harness, listening, run
from test_server_anthropic import events_of, says
from test_server_chat import chatting, ends, prompt_of
from tiny_tokenizer import spell

from mamba_eagle.core import Failure, FinishReason
from mamba_eagle.message import Generate
from mamba_eagle.server.apis.responses import body as responses
from mamba_eagle.server.apis.responses.kept import KeptResponse, ResponseStore
from mamba_eagle.server.errors import RequestError

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
TEXT = "Rain?</think>Let me look.\n" + HERMES


async def asked(server: Harness, stream: bool = False, **body: Any) -> Any:
    reply = await server.post(PATH, tools=[TOOL], stream=stream, **body)
    assert reply.status_code == 200, reply.text
    return events_of(reply)[-1]["response"] if stream else reply.json()


def refused(reply: httpx.Response, param: str | None = None) -> None:
    assert reply.status_code == 404, reply.text
    error = reply.json()["error"]
    assert error["type"] == "not_found_error" and error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_follow_up_has_the_prompt_of_the_whole_conversation(stream: bool) -> None:
    first = [{"role": "system", "content": "Own"}, {"role": "user", "content": "Hi"}]

    def answered(response: Any) -> list[dict[str, Any]]:
        call = response["output"][-1]
        return [{"type": "function_call_output", "call_id": call["call_id"], "output": "wet"}]

    async def test() -> None:
        async with chatting(ends(TEXT)) as server:
            one = await asked(server, stream, input=first, instructions="Old")
            assert one["store"] is True and one["previous_response_id"] is None
            follow: dict[str, Any] = {"previous_response_id": one["id"], "instructions": "New"}
            two = await asked(server, stream, input=answered(one), **follow)
            assert two["previous_response_id"] == one["id"]
            so_far = [*first, *one["output"], *answered(one)]
            got = prompt_of(server)
            await asked(server, input=so_far, instructions="New")
            assert got == prompt_of(server) and "Old" not in got and "New" in got
            # The second is whole without the first.
            assert (await server.client.delete(f"{PATH}/{one['id']}")).status_code == 200
            three = await asked(server, stream, input="And?", previous_response_id=two["id"])
            got = prompt_of(server)
            so_far += [*two["output"], {"role": "user", "content": "And?"}]
            await asked(server, input=so_far)
            assert got == prompt_of(server) and "New" not in got
            kept = await server.client.get(f"{PATH}/{three['id']}")
            assert kept.status_code == 200 and kept.json() == three

    run(test())


def test_what_is_unknown_or_deleted_or_was_not_to_be_kept_is_not_found() -> None:
    async def gone(server: Harness, id: str) -> None:
        refused(await server.client.get(f"{PATH}/{id}"))
        refused(await server.client.delete(f"{PATH}/{id}"))
        reply = await server.post(PATH, input="Hi", previous_response_id=id)
        refused(reply, "previous_response_id")

    async def test() -> None:
        async with chatting(ends("</think>x")) as server:
            await gone(server, "resp_unknown")
            secret = await asked(server, input="Hi", store=False)
            assert secret["store"] is False
            await gone(server, secret["id"])
            made = await asked(server, input="Hi", rid="my/own")
            deleted = await server.client.delete(f"{PATH}/{made['id']}")
            assert deleted.json() == {"id": "my/own", "object": "response", "deleted": True}
            await gone(server, made["id"])
            made = await asked(server, input="Hi")
            reply = await server.client.get(f"{PATH}/{made['id']}?stream=true")
            assert reply.status_code == 400 and "stream = true" in reply.text
            # An empty id continues nothing.
            assert (await asked(server, input="Hi", previous_response_id=""))["store"]

    run(test())


def test_a_response_is_kept_for_its_key_alone() -> None:
    def as_client(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    async def test() -> None:
        keys = ["mine", "yours"]
        async with chatting(ends("</think>x"), api_key=keys, admin_api_key="admin") as server:
            server.client.headers.update(as_client("mine"))
            url = f"{PATH}/{(await asked(server, input='Hi'))['id']}"
            for other in ("yours", "admin"):
                refused(await server.client.get(url, headers=as_client(other)))
                refused(await server.client.delete(url, headers=as_client(other)))
            mine = {"x-api-key": "mine", "Authorization": "Bearer wrong"}
            assert (await server.client.get(url, headers=mine)).status_code == 200
        async with chatting(ends("</think>x")) as server:
            url = f"{PATH}/{(await asked(server, input='Hi'))['id']}"
            assert (await server.client.get(url, headers=as_client("any"))).status_code == 200

    run(test())


def test_a_response_that_failed_is_not_kept() -> None:
    failure = FinishReason(kind="abort", message="broken", failure=Failure.INTERNAL)

    async def test() -> None:
        async with chatting(says(spell("abc"), failure)) as server:
            server.engine.pause = 0.02
            for stream in (False, True):
                await server.post(PATH, input="Hi", rid="r", stream=stream)
                refused(await server.client.get(f"{PATH}/r"))
            assert len(server.engine.of(Generate)) == 2

    run(test())


def test_a_stream_is_kept_before_its_client_is_told_that_it_is_complete() -> None:
    async def test() -> None:
        async with chatting(ends("</think>abc")) as server, listening(server.app) as client:
            body = {"input": "Hi", "rid": "r", "stream": True}
            async with client.stream("POST", PATH, json=body) as reply:
                async for line in reply.aiter_lines():
                    if line == "event: response.completed":
                        break
                assert (await server.client.get(f"{PATH}/r")).status_code == 200

    run(test())


def test_only_what_was_read_of_an_item_is_kept() -> None:
    """Else a field that nobody looks at could hold what cannot be sent, or megabytes."""
    junk = {"more": "\ud800", "deep": float("inf"), "output": "x" * 2000}

    async def test() -> None:
        async with chatting(ends("</think>x")) as server:
            content = [{"type": "input_text", "text": "Hi", **junk}]
            item = {"role": "user", "content": content, **junk}
            reply = await server.client.post(PATH, content=json.dumps({"input": [item]}).encode())
            assert reply.status_code == 200, reply.text
            shelf = server.app.state.responses.of("")
            kept = shelf.find(reply.json()["id"])
            said = {"type": "message", "role": "user", "content": "Hi"}
            assert kept.items() == [said, *reply.json()["output"]]

    run(test())


def response(size: int) -> KeptResponse:
    return KeptResponse(b"x" * (size - 2), b"[]")


def ids(store: ResponseStore, key: str, count: int) -> list[int]:
    """Which of ``count`` that were put are still there."""
    found = []
    for i in range(count):
        try:
            store.of(key).find(str(i))
        except RequestError:
            continue
        found.append(i)
    return found


def test_the_oldest_of_the_key_with_most_goes_first() -> None:
    store = ResponseStore(most=6, most_bytes=1000)
    for key in ("a", "b"):
        for i in range(3):
            store.keep(key, str(i), response(10))
    for i in range(3, 9):
        store.keep("a", str(i), response(10))
    assert ids(store, "a", 9) == [6, 7, 8] and ids(store, "b", 3) == [0, 1, 2]
    store.keep("b", "3", response(900))  # 960 bytes, but seven
    assert ids(store, "b", 4) == [1, 2, 3] and store.of("b").size == 920
    store.keep("a", "9", response(200))  # six at most, and 1,000 bytes
    assert ids(store, "b", 4) == [] and ids(store, "a", 10) == [6, 7, 8, 9]
    store.keep("b", "4", response(5000))  # more than there is room for
    assert ids(store, "b", 5) == [] and ids(store, "a", 10) == [6, 7, 8, 9]
    store.keep("a", "9", response(50))  # the same once more
    assert store.of("a").size == 80 and len(store.of("a")) == 4
    store.of("a").remove("6")
    assert store.of("a").size == 70


def test_a_conversation_that_goes_on_has_no_more_than_a_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of a row of responses would take longer to read than the last, up to minutes."""
    monkeypatch.setattr(responses, "MAX_MESSAGES", 5)
    long = {"type": "function_call_output", "call_id": "c" * 600_000, "output": "wet"}

    async def test() -> None:
        async with chatting(ends("</think>x"), max_body_size=1) as server:

            async def again(made: dict[str, Any], *items: Any) -> httpx.Response:
                return await server.post(PATH, input=items, previous_response_id=made["id"])

            item = {"role": "user", "content": "a"}
            one = await asked(server, input=[item, item])  # and the reply
            assert (await again(one, item, item)).status_code == 200
            reply = await again(one, item, item, item)
            assert reply.status_code == 400 and "5 items" in reply.text
            two = (await again(await asked(server, input=[long]), long)).json()
            reply = await again(two, item)
            assert reply.status_code == 400 and "--max-body-size" in reply.text

    run(test())
