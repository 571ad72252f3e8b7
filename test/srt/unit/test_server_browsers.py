"""Pages of any origin may use the server: without these headers a browser hides the answers."""

from __future__ import annotations

from server_harness import run, says, serving

PAGE = {"Origin": "http://some.where:8080"}
ANYONE = ("access-control-allow-origin", "*")


def test_pages_of_any_origin_may_read_every_answer() -> None:
    async def test() -> None:
        async with serving(says("abc"), api_key="secret") as server:
            key = {"Authorization": "Bearer secret"}
            for stream in (False, True):
                body = {"text": "a", "stream": stream}
                reply = await server.client.post("/generate", json=body, headers={**PAGE, **key})
                assert reply.status_code == 200 and ANYONE in reply.headers.items()
            # errors too: a page is to show what was wrong
            refused = await server.client.post("/generate", json={}, headers={**PAGE, **key})
            assert refused.status_code == 400 and ANYONE in refused.headers.items()
            unknown = await server.client.get("/v1/models", headers=PAGE)
            assert unknown.status_code == 401 and ANYONE in unknown.headers.items()

    run(test())


def test_a_browser_may_ask_first_without_the_key() -> None:
    """It never sends one with its preflight request."""
    question = {
        **PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    async def test() -> None:
        async with serving(says("abc"), api_key="secret") as server:
            for path in ("/generate", "/v1/chat/completions", "/flush_cache"):
                reply = await server.client.options(path, headers=question)
                assert reply.status_code == 200 and ANYONE in reply.headers.items()
                assert "POST" in reply.headers["access-control-allow-methods"]
                allowed = reply.headers["access-control-allow-headers"].lower()
                assert "authorization" in allowed and "content-type" in allowed
            assert not server.engine.received

    run(test())


def test_who_is_no_browser_gets_no_such_headers() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            reply = await server.post("/generate", text="a")
            assert "access-control-allow-origin" not in reply.headers

    run(test())
