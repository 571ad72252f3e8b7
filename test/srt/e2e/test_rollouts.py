"""Weights of a running engine are replaced, its memory is given back, and texts are exact."""

from __future__ import annotations

import gc
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_rig import merge, write_adapter
from rollout_rig import PROMPTS, SAMPLED, Change, checkpoint, post, texts
from running_server import need_weights

from mamba_eagle import Engine, EngineError
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.models.loader import CheckpointError


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_weights(EMBEDDED_MODEL)
    return checkpoint(tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings: dict[str, Any] = {"max_running_requests": 8, "speculative_adaptive": False}
    with Engine(device="cpu", in_process=True, **settings) as engine:
        yield engine


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=str)
def test_new_weights_give_what_a_server_that_starts_with_them_gives(
    other: Path, settings: dict[str, Any]
) -> None:
    """And the old ones give again what they gave, whether prompts are cached or not."""
    both = {"device": "cpu", "max_running_requests": 8, "in_process": True}
    drafter = str(EMBEDDED_DRAFTERS["EAGLE"])
    with Engine(str(other), speculative_draft_model_path=drafter, **both, **settings) as started:
        wanted = texts(started)
    with Engine(**both, **settings) as engine:
        before = texts(engine)
        update = "/update_weights_from_disk"
        assert post(engine, update, model_path=str(other), weight_version="b").status == 200
        assert texts(engine) == texts(engine) == wanted != before
        assert post(engine, update, model_path=str(EMBEDDED_MODEL)).status == 200
        assert texts(engine) == texts(engine) == before


def test_a_drafter_is_updated_alone_and_changes_no_text(engine: Engine, tmp_path: Path) -> None:
    before = texts(engine)
    head = checkpoint(tmp_path / "head", like=EMBEDDED_DRAFTERS["EAGLE"])
    path = "/update_weights_from_disk"
    assert post(engine, path, draft_model_path=str(head)).status == 200
    drafts = engine.generate(PROMPTS[0], SAMPLED)["meta_info"]["spec_num_correct_drafts"]
    assert texts(engine) == before
    assert post(engine, path, draft_model_path=str(EMBEDDED_DRAFTERS["EAGLE"])).status == 200
    again = engine.generate(PROMPTS[0], SAMPLED)["meta_info"]["spec_num_correct_drafts"]
    assert again > drafts and texts(engine) == before


def without_one(weights: dict[str, torch.Tensor]) -> None:
    del weights["backbone.layers.1.mixer.up_proj.weight"]


def with_a_foreign_one(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.weight"] = torch.zeros(3)


def of_another_shape(weights: dict[str, torch.Tensor]) -> None:
    weights["backbone.layers.1.mixer.up_proj.weight"] = torch.zeros(3, 5)


def of_integers(weights: dict[str, torch.Tensor]) -> None:
    name = "backbone.layers.1.mixer.up_proj.weight"
    weights[name] = weights[name].to(torch.int8)


@pytest.mark.parametrize("change", [without_one, with_a_foreign_one, of_another_shape, of_integers])
def test_a_wrong_update_is_refused_by_name_and_changes_nothing(
    engine: Engine, tmp_path: Path, change: Change
) -> None:
    before = texts(engine)
    wrong = checkpoint(tmp_path / "wrong", change)
    answer = post(engine, "/update_weights_from_disk", model_path=str(wrong), weight_version="no")
    message = answer.body["error"]["message"]
    assert answer.status == 400
    assert "layers.1.mixer.up_proj.weight" in message or "model.layers.0.weight" in message
    assert texts(engine) == before
    assert engine.generate("1", SAMPLED)["meta_info"]["weight_version"] != "no"


def test_a_folder_that_is_no_checkpoint_of_this_model_is_refused(
    engine: Engine, tmp_path: Path
) -> None:
    before = texts(engine)
    cut, pickled, larger, deep = (tmp_path / name for name in ("cut", "pickled", "larger", "deep"))
    for folder in (cut, pickled, larger, deep):
        shutil.copytree(EMBEDDED_MODEL, folder)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    values = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**values, "vocab_size": 4096}))
    (deep / "config.json").write_text('{"vocab_size":' + "[" * 100_000)
    reasons = {
        cut: "incomplete",
        pickled: "can run code",
        larger: "another model",
        deep: "not valid JSON",
        tmp_path / "absent": "no such folder",
        tmp_path / ("x" * 300): "File name too long",
        EMBEDDED_DRAFTERS["EAGLE"]: "another model",
    }
    for folder, reason in reasons.items():
        answer = post(engine, "/update_weights_from_disk", model_path=str(folder))
        assert (answer.status, reason in str(answer.body)) == (400, True), answer
    for body in ({}, {"model_path": 3}, {"model_path": "x", "load_format": "pickle"}):
        assert post(engine, "/update_weights_from_disk", **body).status == 400
    assert "pickle" in str(post(engine, "/update_weights_from_tensor").body)
    assert texts(engine) == before


def test_an_update_that_fails_when_the_old_weights_are_gone_ends_the_engine(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, for the call and for those that wait."""

    def fails(*_: Any) -> None:
        raise CheckpointError("the disk is on fire")

    settings: dict[str, Any] = {"speculative_algorithm": "NONE", "max_running_requests": 2}
    with Engine(device="cpu", in_process=True, **settings) as engine:
        monkeypatch.setattr("mamba_eagle.runner.renewal.assemble", fails)
        with pytest.raises(EngineError, match="on fire") as error:
            engine.update_weights_from_disk(str(other))
        assert error.value.status == 503
        with pytest.raises(EngineError):
            engine.generate("1")


def test_adapters_outlive_an_update(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", EMBEDDED_MODEL, 1, 4)
    settings: dict[str, Any] = {"speculative_algorithm": "NONE", "max_loras": 1}
    with Engine(device="cpu", in_process=True, max_running_requests=2, **settings) as engine:

        def adapted() -> Any:
            reply = engine.generate(PROMPTS[0], SAMPLED, return_logprob=True, lora_path="a")
            return reply["meta_info"]["output_token_logprobs"]

        load = {"lora_name": "a", "lora_path": str(folder)}
        assert post(engine, "/load_lora_adapter", **load).status == 200
        before = adapted()
        assert before != texts(engine, PROMPTS[:1])[0]
        engine.update_weights_from_disk(str(EMBEDDED_MODEL))
        assert adapted() == before
        engine.release_memory_occupation()
        refused = post(engine, "/load_lora_adapter", **load)
        assert refused.status == 400 and "released" in str(refused.body)
        engine.resume_memory_occupation()
        assert adapted() == before
        assert post(engine, "/load_lora_adapter", **load).status == 200


def test_grammars_hold_for_adapters(tmp_path: Path) -> None:
    """With drafts, beside others: a text is the one of the merged model under the same grammar."""
    folder = write_adapter(tmp_path / "adapter", EMBEDDED_MODEL, 1, 4)
    merged = merge(tmp_path / "merged", EMBEDDED_MODEL, folder)
    wanted: list[dict[str, Any]] = [{"regex": r"[0-9]{6}(, [0-9]{1,3}){4}"}, {}]
    params = [{**SAMPLED, "ignore_eos": False, "max_new_tokens": 40, **one} for one in wanted]
    both: dict[str, Any] = {"device": "cpu", "in_process": True, "max_running_requests": 4}
    both["speculative_draft_model_path"] = str(EMBEDDED_DRAFTERS["EAGLE"])
    prompts = PROMPTS[:1] * 2
    found = {}
    for path in (EMBEDDED_MODEL, merged):
        with Engine(str(path), lora_modules=(f"a={folder}",), **both) as engine:
            for name in (None, "a"):
                replies = engine.generate(prompts, params, lora_path=[name, name])
                found[path, name] = [reply["text"] for reply in replies]
    assert found[EMBEDDED_MODEL, "a"] == found[merged, None] != found[EMBEDDED_MODEL, None]
    pattern = re.compile(wanted[0]["regex"])
    assert all(
        pattern.fullmatch(texts[0]) and not pattern.match(texts[1]) for texts in found.values()
    )


def test_an_engine_is_paused_by_its_methods(engine: Engine) -> None:
    before = texts(engine)
    engine.pause_generation("in_place")
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(texts(engine)))
    thread.start()
    engine.reset_prefix_cache()
    engine.release_memory_occupation()
    assert not waiting
    engine.continue_generation()
    assert not waiting, "its memory is still away"
    engine.resume_memory_occupation()
    thread.join()
    assert waiting == [before]


def tensor_bytes() -> int:
    gc.collect()
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    }
    return sum(found.values())


def test_released_memory_is_free_and_comes_back(engine: Engine, other: Path) -> None:
    """In between the weights may be updated; who came meanwhile runs with the new ones."""
    before, held = texts(engine), tensor_bytes()
    assert post(engine, "/release_memory_occupation").status == 200
    assert tensor_bytes() < held / 20
    assert post(engine, "/update_weights_from_disk", model_path=str(other)).status == 200
    assert post(engine, "/release_memory_occupation", tags=["kv_cache"]).status == 400
    assert post(engine, "/release_memory_occupation", tags=["graphs"]).status == 400
    assert post(engine, "/resume_memory_occupation", tags=["weights"]).status == 200
    assert tensor_bytes() < held / 20
    assert post(engine, "/resume_memory_occupation", tags=["kv_cache"]).status == 200
    assert texts(engine) != before
    assert post(engine, "/update_weights", weight_dir=str(EMBEDDED_MODEL)).status == 200
    assert texts(engine) == before
    assert tensor_bytes() < held * 1.02


def test_a_running_request_goes_on_with_the_new_weights_and_says_since_when(
    engine: Engine, other: Path
) -> None:
    update, before = "/update_weights_from_disk", texts(engine)
    body = {**SAMPLED, "max_new_tokens": 200}
    pieces = engine.stream(PROMPTS[0], body)
    first = next(pieces)
    assert post(engine, update, model_path=str(other), weight_version="b").status == 200
    ids = first["output_ids"] + [token for piece in pieces for token in piece["output_ids"]]
    last = engine.generate(PROMPTS[0], body)["output_ids"]
    assert len(ids) == 200 and ids != last
    # what came after the update is what a prompt of all that came before is continued by
    assert post(engine, "/pause").status == 200
    assert post(engine, "/resume").status == 200
    prompt = engine.tokenizer.encode(PROMPTS[0])
    cut = len(first["output_ids"]) + 100
    rest = {**body, "max_new_tokens": 200 - cut}
    again = engine.generate(input_ids=prompt + ids[:cut], sampling_params=rest)
    assert again["output_ids"] == ids[cut:]
    assert again["meta_info"]["weight_versions"] == [{"version": "b", "start": 0, "end": 200 - cut}]
    assert post(engine, update, model_path=str(EMBEDDED_MODEL), weight_version="a").status == 200
    assert texts(engine) == before
