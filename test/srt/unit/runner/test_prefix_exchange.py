"""What one server's cache has of a prompt, in another server: its text is the other's own, with
drafts, and only what is whole and of the same model is taken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from cache_rig import Sequential, move
from runner_harness import Settings, random_prompt, sampled
from tiny_model import write_head, write_model

from mamba_eagle.cache.tiers.disk_log import difference, read_export
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import ExportPrefix, ImportPrefix, PrefixMoved

torch.set_num_threads(1)

TREE = Settings(topk=2, steps=3, nodes=6)
PROMPT = random_prompt(120, seed=1)
ONLY_PROMPT = SamplingParams(max_new_tokens=0)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), model)


def exported(server: Sequential, path: Path, prompt: list[int] = PROMPT) -> PrefixMoved:
    server.serve(prompt, ONLY_PROMPT)
    return move(server, ExportPrefix(call_id=1, token_ids=prompt, salt="", path=str(path)))


def imported(server: Sequential, path: Path) -> PrefixMoved:
    return move(server, ImportPrefix(call_id=2, path=str(path)))


@pytest.fixture(scope="module")
def prefill(model: Path, head: Path) -> Sequential:
    return Sequential(TREE, model, head, host_cache_gb=0.02)


@pytest.fixture
def decode(model: Path, head: Path) -> Sequential:
    return Sequential(TREE, model, head, host_cache_gb=0.02)


@pytest.fixture(scope="module")
def wary(model: Path, head: Path) -> Sequential:
    """One that is sent what it must not take."""
    return Sequential(TREE, model, head, host_cache_gb=0.02)


def refusal(server: Sequential, path: Path) -> str:
    """Why it did not take the file, which is counted and leaves nothing."""
    use = server.engine.scheduler.cache_use
    before = use().lost_copies["other"]
    reply = imported(server, path)
    assert use().lost_copies["other"] == before + 1 and not reply.tokens
    assert server.engine.scheduler.state()["num_host_tokens"] == 0
    return reply.problem


@pytest.fixture(scope="module")
def file(prefill: Sequential, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "prefix"
    assert exported(prefill, path) == PrefixMoved(call_id=1, tokens=len(PROMPT) - 1)
    assert path.stat().st_mode & 0o777 == 0o600
    return path


def test_a_server_that_imports_runs_the_last_token_alone(
    file: Path, decode: Sequential, model: Path, head: Path
) -> None:
    """Text and accepted drafts are those of a server that has run the prompt itself; also of a
    prompt that goes on, and of one that is cut where rows of a journal reach."""
    alone = Sequential(TREE, model, head, disable_radix_cache=True)
    assert imported(decode, file).tokens == len(PROMPT) - 1
    served = decode.serve(PROMPT, sampled(40, 3))
    assert served == alone.serve(PROMPT, sampled(40, 3))
    assert served.cached == len(PROMPT) - 1
    assert imported(decode, file).tokens == len(PROMPT) - 1  # it has it already
    longer = [*PROMPT, 5, 6, 7]
    assert decode.serve(longer, sampled(9, 4)) == alone.serve(longer, sampled(9, 4))


def test_imports_of_one_prefix_at_once_leave_it_there_once(file: Path, decode: Sequential) -> None:
    exchange = decode.engine.scheduler.tiers.exchange
    assert exchange is not None
    for number in (1, 2, 3):
        exchange.receive(ImportPrefix(call_id=number, path=str(file)))
    while not decode.engine.idle:
        decode.step()  # with its books of units
    assert {reply.tokens for reply in exchange.take_replies()} == {len(PROMPT) - 1}
    assert decode.engine.scheduler.state()["num_host_tokens"] == len(PROMPT) - 1
    assert decode.serve(PROMPT, ONLY_PROMPT).cached == len(PROMPT) - 1


def test_models_without_attention_move_too(tmp_path: Path) -> None:
    """Their tokens take no units."""
    folder = write_model(tmp_path / "states", hybrid_override_pattern="M-M")
    one, other = (Sequential(Settings("NGRAM"), folder, None, host_cache_gb=0.02) for _ in "ab")
    alone = Sequential(Settings("NGRAM"), folder, None, disable_radix_cache=True)
    path = tmp_path / "prefix"
    assert exported(one, path).tokens == imported(other, path).tokens == len(PROMPT) - 1
    served = other.serve(PROMPT, sampled(12, 3))
    assert served == alone.serve(PROMPT, sampled(12, 3)) and served.cached == len(PROMPT) - 1


def damaged(data: bytes, how: str) -> bytes:
    facts, rest = data.split(b"\n", 1)
    if how == "torn":
        return data[:-1]
    if how == "changed-unit":
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    if how == "changed-record":
        return facts + b"\n" + rest[:40] + bytes([rest[40] ^ 1]) + rest[41:]
    if how == "foreign":
        return b"\x00" * 50
    return facts + b"\n"  # empty


@pytest.mark.parametrize("how", ["torn", "changed-unit", "changed-record", "foreign", "empty"])
def test_what_is_torn_or_changed_is_ignored_and_counted(
    file: Path, wary: Sequential, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "prefix"
    path.write_bytes(damaged(file.read_bytes(), how))
    assert refusal(wary, path)


@pytest.mark.parametrize("name", ["version", "dtype", "model", "drafter", "layout"])
def test_another_model_dtype_or_version_is_refused_by_its_name(
    file: Path, wary: Sequential, tmp_path: Path, name: str
) -> None:
    facts, rest = file.read_bytes().split(b"\n", 1)
    other = {**msgspec.json.decode(facts), name: "other"}
    path = tmp_path / "prefix"
    path.write_bytes(msgspec.json.encode(other) + b"\n" + rest)
    assert refusal(wary, path).startswith(f"{name}: 'other' there, ")


def test_copies_of_a_model_are_the_same_and_others_are_not(
    file: Path, model: Path, head: Path, tmp_path: Path
) -> None:
    """Times of the files do not matter, their bytes do."""
    ours = read_export(str(file)).facts
    for seed, same in ((None, True), (7, False)):
        folder = tmp_path / str(seed)
        if seed is None:
            folder.mkdir()
            for each in model.iterdir():
                (folder / each.name).write_bytes(each.read_bytes())
        else:
            write_model(folder, seed=seed)
        server = Sequential(TREE, folder, head, host_cache_gb=0.02)
        copies = server.runner.copies
        assert copies is not None and copies.exports is not None
        copies.close()  # its thread has ended
        assert (difference(ours, copies.exports.facts) == "") is same


def test_a_prompt_that_is_not_there_is_not_exported(prefill: Sequential, tmp_path: Path) -> None:
    asked = ExportPrefix(call_id=1, token_ids=[*range(5, 90)], salt="", path=str(tmp_path / "x"))
    assert "nothing of the prompt is cached" in move(prefill, asked).problem
    assert not list(tmp_path.iterdir())
