"""Thousands of bodies with something wrong in them: each is answered, none with a 5xx, and the
server goes on. MAMBA_EAGLE_CHAOS_SCALE multiplies their number."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from body_kinds import INNER, OUT_OF_RANGE, ROUTES, WRONG, Route
from chaos_rig import (
    PATIENCE,
    SCALE,
    SEED,
    Start,
    assert_serves,
    eventually,
    report,
    running_requests,
)
from chat_rig import TEMPLATE, family_file
from rich_bodies import (
    RIGHT,
    Path,
    a_text,
    a_value,
    paths_of,
    value_at,
    with_value,
    written,
    wrong_for,
)
from running_server import RunningServer

CLIENTS = 8
PER_ROUTE = 500 * SCALE if SCALE > 1 else 60  # random bodies
KEY = {"x-api-key": "operator"}
FLAGS = ("--admin-api-key", KEY["x-api-key"], "--schedule-policy", "priority")
SHORT = ("--context-length", "256")  # random bodies may ask for all that fits
QUERIES = {  # routes without a body, and right parameters of their addresses
    "/tokenizer_info": {},
    "/cache": {"nodes": "5", "text": "1"},
    "/flush_cache": {"timeout": "0"},
}


class Case(NamedTuple):
    path: str
    content: bytes = b""
    names: tuple[str, ...] = ()  # of which the error must name one; (): it may be fine
    method: str = "POST"


def with_field(route: Route, name: str, value: Any) -> dict[str, Any]:
    if name in route.fields:
        return {**route.right, name: value}
    return {**route.right, route.within: {**route.right[route.within], name: value}}


def kinds_of(route: Route) -> dict[str, str]:
    return {**route.fields, **(INNER if route.within else {})}


def one_wrong_value() -> Iterator[Case]:
    """Each field of each route with each value that is of another kind or out of range."""
    for route in ROUTES:
        for name, kind in kinds_of(route).items():
            for value in WRONG[kind] + OUT_OF_RANGE.get(name, []):
                yield Case(route.path, json.dumps(with_field(route, name, value)).encode(), (name,))


def one_wrong_inside(rng: random.Random, path: str, right: dict[str, Any], at: Path) -> Case:
    """A right body with a value of another kind somewhere."""
    body = with_value(right, at, wrong_for(value_at(right, at), rng))
    # Some messages name what the value stands in, but never less than the field.
    names = [written(at[:end]) for end in range(len(at), 0, -1)]
    return Case(path, json.dumps(body).encode(), tuple(names))


def wrong_inside(rng: random.Random) -> Iterator[Case]:
    for path, right in RIGHT:
        for at in paths_of(right):
            yield one_wrong_inside(rng, path, right, at)


def random_case(rng: random.Random, path: str) -> Case:
    """One value that is wrong, some fields with any values, or a right body's bytes with a few
    changed."""
    if path in QUERIES:
        return random_query(rng, path)
    right = rng.choice([body for own, body in RIGHT if own == path])
    places = list(paths_of(right))
    if rng.random() < 0.5:
        return one_wrong_inside(rng, path, right, rng.choice(places))
    body: Any = right
    for _ in range(rng.randrange(4)):
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier one removed it
            body = with_value(body, rng.choice(places), a_value(rng))
    text = bytearray(json.dumps(body).encode())
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = rng.choice(b'\x00\xff"\\{}[],:0-e. nNaI')
    return Case(path, bytes(text))


def random_query(rng: random.Random, path: str) -> Case:
    values = ["", "0", "-1", "nan", "1e9", "9" * 400, "\ud800", a_text(rng)]
    if path != "/flush_cache":  # it would wait
        values += ["1", "٣"]
    asked = {name: rng.choice(values) for name in QUERIES[path]} | {"x": rng.choice(values)}
    query = urllib.parse.urlencode(asked, errors="surrogatepass")
    if rng.random() < 0.2:
        query = query.replace("%", rng.choice(["%%", "%", "&"]))
    return Case(f"{path}?{query}", method="GET")


# ── sending ──────────────────────────────────────────────────────────────────────────────────


def send(client: httpx.Client, case: Case) -> str:
    """What is wrong with the answer; "" if nothing."""
    where = f"{case.path} {case.names[:1]} {case.content[:300]!r}: "
    try:
        reply = client.request(case.method, case.path, content=case.content)
    except httpx.HTTPError as error:
        return where + repr(error)
    if reply.status_code >= 500:
        return f"{where}{reply.status_code} {reply.text[:300]}"
    if reply.status_code == 200:
        if '"code":500' in reply.text:
            return f"{where}an error in the stream: {reply.text[-300:]}"
        return f"{where}was taken" if case.names else ""
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{where}{reply.status_code} without a message: {reply.text[:300]}"
    if len(message) > 1500:
        return f"{where}a message of {len(message)} characters"
    if "a request of this name is running" in message:
        return ""  # another client's case has the same rid
    named = not case.names or any(name in message for name in case.names)
    if reply.status_code != 400 or not named:
        return f"{where}{reply.status_code} {message} does not name {case.names}"
    return ""


def send_all(server: RunningServer, cases: list[Case]) -> list[str]:
    """Over a few connections at once."""

    def work(part: list[Case]) -> list[str]:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE, headers=KEY) as client:
            return [problem for case in part if (problem := send(client, case))]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        parts = pool.map(work, [cases[i::CLIENTS] for i in range(CLIENTS)])
        return [problem for part in parts for problem in part]


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    family = family_file("qwen3", tmp_path_factory.mktemp("family"))
    chat = ("--chat-template", TEMPLATE, "--tool-call-parser", family)
    return start(*FLAGS, *SHORT, *chat).wait_until_ready()


def assert_unharmed(server: RunningServer) -> None:
    """It serves, nothing runs, every slot is free or cached, and nothing was logged in anger."""
    assert_serves(server)
    eventually(lambda: not running_requests(server), "all requests have ended")
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE, headers=KEY) as client:
        assert client.post("/flush_cache?timeout=60").status_code == 200
        state = client.get("/server_info").json()["internal_states"][0]
    assert state["num_free_kv_slots"] == state["max_total_num_tokens"]
    assert state["num_free_checkpoints"] == state["max_mamba_cache_size"]
    assert "Traceback" not in server.output, server.output[-3000:]


def test_what_is_right_is_taken(server: RunningServer) -> None:
    """Else the other tests would find only what is wrong for another reason."""
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE, headers=KEY) as client:
        for path, body in RIGHT:
            reply = client.post(path, json=body)
            assert reply.status_code == 200 and '"code":' not in reply.text, (path, reply.text)
        for path, query in QUERIES.items():
            assert client.get(path, params=query).status_code == 200


def test_one_wrong_value_is_refused_by_name(server: RunningServer) -> None:
    cases = [*one_wrong_value(), *wrong_inside(random.Random(SEED))]
    assert len(cases) > 1000
    problems = send_all(server, cases)
    assert not problems, "\n".join(problems[:10])
    assert_unharmed(server)


def test_random_bodies_never_fail(server: RunningServer) -> None:
    rng = random.Random(SEED)
    # A profile that begins leaves a file.
    paths = sorted({path for path, _ in RIGHT} - {"/start_profile"} | set(QUERIES))
    cases = [random_case(rng, path) for path in paths for _ in range(PER_ROUTE)]
    problems = send_all(server, cases)
    assert not problems, "\n".join(problems[:10])
    assert_unharmed(server)
    report("fuzz", len(cases), "bodies", seed=SEED, without_an_answer=0, server_errors=0)
