"""What slime, TRL and prime-rl send, to a server, with what they read of the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_rig import checkpoint
from running_server import StartServer

from mamba_eagle.embedded import EMBEDDED_MODEL

IDS = [257, 300, 44, 61]
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def trainer(start_server: StartServer) -> Iterator[httpx.Client]:
    """A client with the admin key of a server of its own."""
    flags = ("--admin-api-key", "admin", "--logprobs-at-temperature")
    server = start_server("--max-running-requests", "8", *flags)
    with httpx.Client(base_url=server.base_url, timeout=120, headers=ADMIN) as client:
        yield client
    server.stop()


def send(client: httpx.Client, path: str, body: Any = None, method: str = "POST") -> Any:
    answer = client.request(method, path, json=body)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text


def test_slime(trainer: httpx.Client) -> None:
    send(trainer, "/health_generate", method="GET")
    sampling = {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 12,
        "ignore_eos": True,  # not slime's: a sample may end before
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 3,
    }
    body = {"input_ids": IDS, "sampling_params": sampling, "return_logprob": True}
    headers = {"X-SMG-Routing-Key": "a"}
    meta = trainer.post("/generate", json=body, headers=headers).json()["meta_info"]
    tokens = [item[1] for item in meta["output_token_logprobs"]]
    assert len(tokens) == meta["completion_tokens"] and meta["finish_reason"]["type"] == "length"
    assert {"cached_tokens", "spec_accept_token_num", "spec_draft_token_num"} <= meta.keys()
    assert (meta["spec_verify_ct"], meta["weight_version"]) > (0, "")
    send(trainer, "/pause_generation", {})
    send(trainer, "/abort_request", {"abort_all": True})
    send(trainer, "/flush_cache", method="GET")
    path = {"model_path": str(EMBEDDED_MODEL), "load_format": "auto", "weight_version": "7"}
    assert send(trainer, "/update_weights_from_disk", path)["success"]
    send(trainer, "/continue_generation", {})
    assert send(trainer, "/get_weight_version", method="GET") == {"weight_version": "7"}
    again = send(trainer, "/generate", body)["meta_info"]
    assert again["output_token_logprobs"] == meta["output_token_logprobs"]
    assert again["weight_version"] == "7"
    send(trainer, "/release_memory_occupation", {})
    send(trainer, "/resume_memory_occupation", {"tags": ["weights"]})
    send(trainer, "/resume_memory_occupation", {"tags": ["cuda_graph"]})  # older ones apart
    send(trainer, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert send(trainer, "/v1/loads?include=core", method="GET")["loads"][0]["num_reqs"] == 0


def test_prime_rl(trainer: httpx.Client) -> None:
    send(trainer, "/liveness", method="GET")
    sampling = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "logprobs": 1}
    sampling["ignore_eos"] = True  # not prime-rl's: a sample may end before
    body = {"token_ids": IDS, "sampling_params": sampling, "cache_salt": "4"}
    first = send(trainer, "/inference/v1/generate", body)
    (choice,) = first["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 12
    names = [item["token"] for item in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    send(trainer, "/pause?mode=keep&clear_cache=false")
    assert send(trainer, "/is_paused", method="GET") == {"is_paused": True}
    send(trainer, "/update_weights", {"weight_dir": str(EMBEDDED_MODEL)})
    send(trainer, "/resume")
    (again,) = send(trainer, "/inference/v1/generate", body)["choices"]
    assert again["token_ids"] == choice["token_ids"]


def test_trl(trainer: httpx.Client) -> None:
    for path in ("/v1/models", "/health", "/server_info?config_format=json"):
        send(trainer, path, method="GET")
    assert send(trainer, "/get_world_size", method="GET") == {"world_size": 1}
    body = {
        "model": send(trainer, "/v1/models", method="GET")["data"][0]["id"],
        "prompt": [IDS, IDS[:2]],
        "n": 2,
        "max_tokens": 8,
        "ignore_eos": True,  # not TRL's: a sample may end before
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choices = send(trainer, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [IDS, IDS, IDS[:2], IDS[:2]]
    for choice in choices:
        named = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == named and len(named) == 8
    send(trainer, "/reset_prefix_cache")
    group = {"master_address": "localhost", "master_port": 1, "world_size": 2, "timeout": 0.5}
    answer = trainer.post("/init_weight_transfer_engine", json={"init_info": group})
    assert answer.status_code == 400 and "did not meet" in answer.text


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/sleep"])
def test_only_the_operator_may(trainer: httpx.Client, path: str) -> None:
    assert trainer.post(path, json={}, headers={"Authorization": "Bearer x"}).status_code == 401


def test_what_is_wrong_is_named(trainer: httpx.Client, tmp_path: Path) -> None:
    wrong = {
        "/pause?mode=now": None,
        "/pause?mode=keep&clear_cache=1": None,
        "/pause_generation": {"mode": "now"},
        "/resume_memory_occupation": {"tags": ["weights"]},
        "/release_memory_occupation": {"tags": "all"},
        "/update_weights": {"update_info": {"names": ["a"]}},
        "/update_weights_from_disk": {"model_path": str(tmp_path)},
        "/inference/v1/generate": {"token_ids": [-1]},
        "/init_weights_update_group": {"master_address": "localhost"},
    }
    for path, body in wrong.items():
        answer = trainer.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], path
    assert send(trainer, "/generate", {"input_ids": IDS})["output_ids"]


def test_checks_tell_whether_an_update_has_come(trainer: httpx.Client, tmp_path: Path) -> None:
    """SGLang's, which keeps a snapshot, and vLLM's, whose caller keeps the checksums."""
    other = checkpoint(tmp_path / "other")
    refused = trainer.post("/weights_checker", json={"action": "compare"})
    assert refused.status_code == 400 and "snapshot" in refused.text
    send(trainer, "/weights_checker", {"action": "snapshot"})
    before = send(trainer, "/weight_checker", {"action": "checksum"})["checksums"]
    compare = {"action": "compare", "baseline": before}
    assert send(trainer, "/weight_checker", compare) == {"match": True, "mismatches": []}
    send(trainer, "/weights_checker", {"action": "compare"})
    send(trainer, "/update_weights_from_disk", {"model_path": str(other)})
    differ = send(trainer, "/weight_checker", compare)["mismatches"]
    changed = [name for name in differ if "up_proj" in name]
    assert changed and not [name for name in differ if "norm" in name and "drafter" not in name]
    answer = trainer.post("/weights_checker", json={"action": "compare"})
    assert answer.status_code == 400 and changed[0] in answer.text
    send(trainer, "/update_weights_from_disk", {"model_path": str(EMBEDDED_MODEL)})
    assert send(trainer, "/weight_checker", compare)["match"]
    assert trainer.post("/weight_checker", json={"action": "reset"}).status_code == 400
    assert send(trainer, "/weight_info", method="GET").keys() == {"weight_version"}


def test_requests_are_aborted_by_name_and_all_at_once(trainer: httpx.Client) -> None:
    send(trainer, "/pause_generation", {"mode": "in_place"})
    long = {"max_new_tokens": 5000, "ignore_eos": True}
    found: dict[str, Any] = {}

    def generate(name: str) -> None:
        body = {"input_ids": IDS, "rid": name, "sampling_params": long}
        found[name] = send(trainer, "/generate", body)["meta_info"]["finish_reason"]["type"]

    threads = [threading.Thread(target=generate, args=(name,), daemon=True) for name in "abc"]
    for thread in threads:
        thread.start()
    while send(trainer, "/v1/loads?include=core", method="GET")["loads"][0]["num_reqs"] < 3:
        time.sleep(0.05)
    assert send(trainer, "/abort_requests", {"request_ids": []})["aborted"] == 0
    assert send(trainer, "/abort_requests", {"request_ids": ["a", "none"]})["aborted"] == 1
    assert send(trainer, "/abort_requests", {})["aborted"] == 2
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys("abc", "abort")
    send(trainer, "/continue_generation", {})
