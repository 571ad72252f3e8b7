"""Which web pages may use the server. With a key all may: they cannot do anything without it."""

from __future__ import annotations

import pytest
from server_harness import run, says, serving

from mamba_eagle.config import ServerConfig
from mamba_eagle.server.http.origins import exposure_warning, origin_problems

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


LOCAL_PAGES = ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"]
FOREIGN_PAGES = [
    "http://some.where:8080",
    "https://localhost.some.where",
    "http://127.0.0.1.some.where",
    "null",
    "http://localhost:3000 x",
]


def page(origin: str) -> dict[str, str]:
    return {"Origin": origin}


def test_without_a_key_only_pages_of_this_machine_may_use_it() -> None:
    async def test() -> None:
        async with serving(says("abc")) as server:
            for origin in LOCAL_PAGES:
                body = {"text": "a"}
                reply = await server.client.post("/generate", json=body, headers=page(origin))
                assert reply.status_code == 200
                assert reply.headers["access-control-allow-origin"] == origin
            asked = len(server.engine.received)
            for origin in FOREIGN_PAGES:
                for path in ("/generate", "/abort_request", "/flush_cache"):
                    # As a form sends it: a browser asks nobody before that.
                    headers = {**page(origin), "Content-Type": "text/plain"}
                    content = '{"text": "a", "abort_all": true}'
                    reply = await server.client.post(path, content=content, headers=headers)
                    assert reply.status_code == 403, (origin, path)
                    assert "--cors-origins" in reply.json()["error"]["message"]
                    assert "access-control-allow-origin" not in reply.headers
            assert len(server.engine.received) == asked

    run(test())


def test_the_servers_own_page_may_use_it_by_whatever_name() -> None:
    async def test() -> None:
        async with serving(says("abc"), host="0.0.0.0") as server:
            for headers in (
                {"Host": "gpu7.lab.example:30000", "Origin": "http://gpu7.lab.example:30000"},
                # behind a proxy that changes the name
                {"Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"},
            ):
                reply = await server.client.post("/generate", json={"text": "a"}, headers=headers)
                assert reply.status_code == 200, reply.text

    run(test())


def test_listed_pages_may_use_it_and_no_others() -> None:
    allowed = "https://chat.example"

    async def test() -> None:
        async with serving(says("abc"), cors_origins=f"{allowed}, http://other:81") as server:
            for origin, status in ((allowed, 200), ("http://other:81", 200), (PAGE["Origin"], 403)):
                body = {"text": "a"}
                reply = await server.client.post("/generate", json=body, headers=page(origin))
                assert reply.status_code == status
        async with serving(says("abc"), cors_origins="off") as server:
            reply = await server.client.get("/v1/models", headers=page(LOCAL_PAGES[0]))
            assert reply.status_code == 403
        async with serving(says("abc"), cors_origins="*") as server:
            reply = await server.client.get("/v1/models", headers=PAGE)
            assert reply.status_code == 200 and ANYONE in reply.headers.items()

    run(test())


def test_an_image_of_another_site_does_not_flush_the_cache() -> None:
    """Its request names no origin."""

    async def test() -> None:
        async with serving(says("abc")) as server:
            image = {"Sec-Fetch-Site": "cross-site"}
            assert (await server.client.get("/flush_cache", headers=image)).status_code == 403
            assert (await server.client.get("/", headers=image)).status_code == 200  # a link
            assert (await server.client.get("/flush_cache")).status_code == 200

    run(test())


def test_a_page_whose_name_points_at_this_machine_is_refused() -> None:
    """To the browser it is of the server's own origin."""

    async def test() -> None:
        rebound = {"Host": "evil.example:30000", "Origin": "http://evil.example:30000"}
        async with serving(says("abc")) as server:
            for host in ("evil.example:30000", "evil.example", "127.0.0.1.evil.example"):
                reply = await server.client.get("/v1/models", headers={"Host": host})
                assert reply.status_code == 403 and "Host" in reply.json()["error"]["message"]
            for host in ("localhost:30000", "127.0.0.1", "[::1]:30000", "server", "my.local", ""):
                reply = await server.client.get("/v1/models", headers={"Host": host})
                assert reply.status_code == 200, host
        async with serving(says("abc"), api_key="secret") as server:
            key = {"Authorization": "Bearer secret"}
            reply = await server.client.get("/v1/models", headers={**rebound, **key})
            assert reply.status_code == 200

    run(test())


@pytest.mark.parametrize(
    ("value", "settings", "works"),
    [
        ("auto", {"host": "0.0.0.0"}, True),
        ("off", {"host": "0.0.0.0"}, True),
        ("*", {"host": "0.0.0.0"}, False),
        ("*", {"host": "0.0.0.0", "api_key": "secret"}, True),
        ("*", {"host": "127.0.0.1"}, True),
        ("*", {"host": "::1"}, True),
        ("https://a.example,http://b:81", {"host": "0.0.0.0"}, True),
        ("https://a.example/", {}, False),
        ("a.example", {}, False),
        ("https://[::1", {}, False),
        (" , ", {}, False),
        ("", {}, False),
    ],
)
def test_the_setting_is_checked(value: str, settings: dict[str, str], works: bool) -> None:
    problems = origin_problems(ServerConfig(cors_origins=value, **settings))
    assert (problems == []) == works
    assert all(problem.startswith("--cors-origins ") for problem in problems)


def test_a_server_that_anyone_may_use_says_so() -> None:
    assert "--api-key" in (exposure_warning(ServerConfig(host="0.0.0.0")) or "")
    assert "--api-key" in (exposure_warning(ServerConfig(host="::")) or "")
    assert exposure_warning(ServerConfig(host="0.0.0.0", api_key="secret")) is None
    for host in ("127.0.0.1", "localhost", "::1"):
        assert exposure_warning(ServerConfig(host=host)) is None
