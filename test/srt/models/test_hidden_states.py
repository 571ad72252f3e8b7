"""A reply's hidden states are those that transformers computes, with drafts, chunks and
retraction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_models import VOCAB, make_peer, peer_hidden

from mamba_eagle import Engine, EngineError
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.tokenizer.sample import LiveRequest, Sample

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[k % VOCAB for k in range(i, 4 * i)] for i in (15, 5, 19, 15, 15)]


@pytest.mark.parametrize("drafts", ["NONE", "NGRAM"])
def test_states_are_those_of_transformers(drafts: str, tmp_path: Path) -> None:
    peer = make_peer("bamba")
    peer.save_pretrained(tmp_path / "model")
    config = EngineConfig(
        model_path=str(tmp_path / "model"),
        device="cpu",
        speculative_algorithm=drafts,
        max_running_requests=5,
        max_total_tokens=150,
        chunked_prefill_size=32,
    )
    engine = OfflineEngine(resolve(config), assemble(resolve(config)))
    samples, retracted = [], 0
    for i, ids in enumerate(PROMPTS):
        sampling = SamplingParams(max_new_tokens=24 if i != 3 else 0, ignore_eos=True, seed=i)
        asked = {"token_ids": ids, "sampling": sampling, "return_hidden_states": i != 1}
        prompt = Generate(rid=str(i), **asked)
        samples.append(Sample(LiveRequest(str(i)), prompt, str(i), str(i), i, None))
        assert not engine.add(Generate(rid=str(i), **asked))
    while not engine.idle:
        for output in engine.step():
            samples[int(output.rid)].take(output)
            retracted += output.finish is not None and output.retractions
    assert retracted
    assert samples[1].hidden == []
    for sample in (samples[0], samples[2], samples[3], samples[4]):
        ids = sample.prompt.token_ids
        found = np.stack([np.frombuffer(row, dtype="<f4") for row in sample.hidden])
        wanted = peer_hidden(peer, ids + sample.output_ids[:-1])[len(ids) - 1 :]
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-3)


def test_replies_and_last_events_carry_them(tmp_path: Path) -> None:
    peer = make_peer("bamba")
    peer.save_pretrained(tmp_path / "model")
    params = {"max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True}
    asked: dict[str, Any] = {"input_ids": PROMPTS[0], "sampling_params": params}
    with Engine(
        str(tmp_path / "model"), device="cpu", in_process=True, skip_tokenizer_init=True
    ) as engine:
        assert "hidden_states" not in engine.generate(**asked)["meta_info"]
        asked["return_hidden_states"] = True
        reply = engine.generate(**asked)
        events = list(engine.stream(**asked))
        with pytest.raises(EngineError, match="limit of 4096"):
            engine.generate(**{**asked, "sampling_params": {**params, "n": 500}})
    first, *others = reply["meta_info"]["hidden_states"]
    wanted = peer_hidden(peer, PROMPTS[0] + reply["output_ids"][:-1])[len(PROMPTS[0]) - 1 :]
    found = torch.tensor([*first, *others])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    assert all("hidden_states" not in event["meta_info"] for event in events[:-1])
    assert len(events[-1]["meta_info"]["hidden_states"]) == len(wanted)
