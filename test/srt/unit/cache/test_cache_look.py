"""What the cache tells of itself: /cache, /metrics, ``mamba-eagle explain --cache``."""

from __future__ import annotations

import asyncio
import io

import pytest
from fake_runner import FakeRunner, Server
from rich.console import Console
from server_harness import listening, run, says, serving

from mamba_eagle import explain, explain_cache
from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import as_tokens
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.cache.slot_pools import top_nodes
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams

SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
SHOWN = {
    "kv_slots": {"total": 100, "free": 40, "cached": 50, "locked": 20, "pinned": 10},
    "states": {"total": 8, "free": 3, "cached": 4, "used": 1, "pinned": 2},
    "journals": {"total": 4, "free": 1, "cached": 2},
    "prompt_tokens": 140,
    "cached_tokens": 70,
    "hits": {"tail": 3, "output": 1},
    "saved_tokens": {"tail": 50, "output": 20},
    "evicted_states": 2,
    "evicted_tokens": 30,
    "loaded_tokens": {},
    "lost_copies": {},
}
DRAWN = """\
KV slots: 100 = 50 cached (20 of them being read) + 10 held by requests + 40 free; 10 pinned
states: 8 = 4 cached + 1 held by requests + 3 free; 2 pinned
journals: 4 = 2 cached + 1 held by requests + 1 free
prompts: 70 of 140 tokens were cached (50%)
evicted: 2 states, 30 tokens
hits by the kind of state:
  tail         3         50 tokens
  output       1         20 tokens

tokens of a prompt or output   ● a state after them, and why it was saved   ○ spare, not hit
0
└── 0 … 20  ● tail  2 s ago  read by 1
    ├── 20 … 25  2 min ago
    ├── 20 … 29  ○ spare  10 d ago
    └── … 1 more
"""


def cache_of(*prompts: list[int]) -> RadixCache:
    cache = RadixCache(SlotAllocator(1000), SlotAllocator(8))
    for prompt in prompts:
        slots = cache.kv.allocate(len(prompt))
        assert slots is not None
        done = cache.insert(cache.root, as_tokens(prompt), slots)
        cache.kv.free(slots[: len(slots) - done.taken])
    return cache


def test_the_most_recently_used_nodes_come_first_and_after_their_parents():
    cache = cache_of([1, 2, 3], [1, 2, 4, 4], [5], [6, 6])
    node = cache.insert(cache.root, as_tokens([5, 7]), cache.kv.allocate(2)).node
    cache.attach_state(node, 2, cache.state_slots.allocate(1)[0], "spare")
    cache.lock(node)
    nodes = top_nodes(cache.root, 100)
    where = [(each.parent, each.start, each.tokens, each.children) for each in nodes]
    assert where == [(-1, 0, 1, 1), (0, 1, 1, 0), (-1, 0, 2, 0), (-1, 0, 2, 2), (3, 2, 1, 0)] + [
        (3, 2, 2, 0)
    ]
    assert [each.kind for each in nodes] == ["", "spare", "", "", "", ""]
    assert nodes[1].evicted_first and [each.locks for each in nodes] == [1, 1, 0, 0, 0, 0]
    assert all(0 <= each.age < 600 for each in nodes)
    for limit in range(6):
        assert [each.start for each in top_nodes(cache.root, limit)] == [
            each.start for each in nodes[:limit]
        ]


def test_hits_are_counted_by_what_they_hit():
    serving = Server(
        EngineConfig(speculative_algorithm="NONE", mamba_checkpoint_interval=64),
        FakeRunner(5000, 40, 4, 1000),
    )

    def serve(rid: str, prompt: list[int]) -> int:
        serving.add(rid, prompt, SHORT)
        serving.finish()
        return serving.last[rid].cached_tokens

    def hits() -> dict[str, int]:
        return {kind: n for kind, n in serving.scheduler.cache_use().hits.items() if n}

    prompt = [(i * i + i // 7) % 50 for i in range(300)]
    assert serve("first", prompt) == 0 and hits() == {}
    assert serve("again", prompt) == 299 and hits() == {"tail": 1}
    answer = serving.texts["first"]
    assert serve("chat", prompt + answer + [1, 2, 3]) == 303 and hits() == {"tail": 1, "output": 1}
    assert serve("fork", [*prompt[:200], 49, 48]) == 192
    assert hits() == {"tail": 1, "output": 1, "document": 1}
    assert serve("fork again", [*prompt[:200], 47, 46]) == 200
    assert hits() == {"tail": 1, "output": 1, "document": 1, "branch": 1}
    use, state = serving.scheduler.cache_use(), serving.scheduler.state()
    assert use.saved_tokens == {
        "tail": 299,
        "output": 303,
        "spare": 0,
        "document": 192,
        "branch": 200,
        "asked": 0,
        "journal": 0,
    }
    assert sum(use.saved_tokens.values()) == state["cached_tokens_total"]
    assert state["num_locked_tokens"] == state["num_used_checkpoints"] == 0
    assert use.evicted_states == use.evicted_tokens == 0


def test_evictions_are_counted_and_a_flush_is_none():
    cache = cache_of([1, 2, 3], [4, 5])
    cache.attach_state(cache.root.children[4], 2, cache.state_slots.allocate(1)[0])
    assert cache.evict_kv(4) == 5 and (cache.evicted_kv, cache.evicted_states) == (5, 1)
    cache.insert(cache.root, as_tokens([1]), cache.kv.allocate(1))
    cache.flush()
    assert (cache.evicted_kv, cache.evicted_states) == (5, 1)


def test_the_route_gives_numbers_and_no_tokens() -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            reply = (await server.client.get("/cache")).json()
            nodes = reply.pop("nodes")
            assert reply == SHOWN and [node["tokens"] for node in nodes] == [20, 5, 9]
            assert len((await server.client.get("/cache?nodes=1")).json()["nodes"]) == 1
            for wrong in ("-1", "1001", "x", "1.5", "٣", "0000000012345"):
                refused = await server.client.get("/cache", params={"nodes": wrong})
                assert refused.status_code == 400
                assert "must be 0 to 1000" in refused.json()["error"]["message"]

    run(test())


def test_the_text_is_shown_to_the_operator_alone() -> None:
    async def test() -> None:
        async with serving(says("x"), api_key="client", admin_api_key="boss") as server:

            async def ask(key: str, query: str = "text=1"):
                headers = {"x-api-key": key}
                return await server.client.get(f"/cache?{query}", headers=headers)

            assert (await ask("client")).status_code == (await ask("wrong")).status_code == 401
            nodes = (await ask("boss")).json()["nodes"]
            assert [node["text"] for node in nodes] == ["hello", "", ""]
            assert all("token_ids" not in node for node in nodes)
            assert all("text" not in node for node in (await ask("client", "")).json()["nodes"])
            assert (await ask("boss", "text=yes")).status_code == 400
            info = (await server.client.get("/server_info", headers={"x-api-key": "boss"})).text
            assert '"admin_api_key":"***"' in info.replace(" ", "") and "boss" not in info
        async with serving(says("x")) as server:
            refused = await server.client.get("/cache?text=1")
            assert refused.status_code == 403
            assert "--admin-api-key" in refused.json()["error"]["message"]

    run(test())


def test_metrics_have_hits_by_kind() -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            lines = (await server.client.get("/metrics")).text.splitlines()
            for name, value in (
                ('cache_hits_total{kind="tail",model_name="tiny"}', 3.0),
                ('cache_saved_tokens_total{kind="output",model_name="tiny"}', 20.0),
                ('cache_evicted_states_total{model_name="tiny"}', 2.0),
                ('cache_evicted_tokens_total{model_name="tiny"}', 30.0),
            ):
                assert f"mamba_eagle:{name} {value}" in lines

    run(test())


def test_explain_draws_what_a_server_tells(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with serving(says("x")) as server, listening(server.app) as client:
            await asyncio.to_thread(explain.main, ["--cache", "--url", str(client.base_url)])

    run(test())
    assert capsys.readouterr().out == DRAWN


def test_an_empty_cache_is_drawn_without_a_tree() -> None:
    file = io.StringIO()
    explain_cache.show({**SHOWN, "nodes": []}, Console(file=file, width=200))
    assert file.getvalue() == DRAWN[: DRAWN.index("\n\n") + 1]


@pytest.mark.parametrize("flags", [["--cache"], ["--cache", "--url", "x", "--text", "y"]], ids=str)
def test_explain_needs_a_server_to_look_into(flags, capsys) -> None:
    with pytest.raises(SystemExit):
        explain.main(flags)
    assert "give --url, and no --text" in capsys.readouterr().err
