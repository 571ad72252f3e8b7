"""Lists of indices travel as bytes, and arrive as they were."""

from __future__ import annotations

import msgspec
import pytest

from mamba_eagle.core import SamplingParams
from mamba_eagle.message import FirstChunk, Plan, PrefillItem
from mamba_eagle.message.indices import from_wire, indices, to_wire


def test_a_plan_arrives_as_it_was_and_takes_four_bytes_per_slot():
    item = PrefillItem(
        slot=1,
        state_slot=2,
        start=50_000,
        token_ids=indices([7, 2**31 - 1]),
        kv_slots=indices([3, 4]),
        first=FirstChunk(
            sampling=SamplingParams(), output_start=9, prefix_kv_slots=indices(range(50_000))
        ),
    )
    wire = msgspec.msgpack.Encoder(enc_hook=to_wire).encode(Plan(step=1, prefill=[item]))
    assert len(wire) < 4 * 50_000 + 300
    (back,) = msgspec.msgpack.Decoder(Plan, dec_hook=from_wire).decode(wire).prefill
    assert (
        back == item and back.token_ids.tolist() == [7, 2**31 - 1] and len(back.first.history) == 0
    )


def test_what_is_not_an_array_of_indices_is_refused():
    with pytest.raises(TypeError, match="a message cannot hold a object"):
        msgspec.msgpack.Encoder(enc_hook=to_wire).encode(object())
    list_of_ints = msgspec.msgpack.encode(
        {
            "type": "Plan",
            "step": 1,
            "prefill": [
                {"slot": 0, "state_slot": 0, "start": 0, "token_ids": [1], "kv_slots": [1]}
            ],
        }
    )
    with pytest.raises(msgspec.ValidationError, match="cannot be read from a list"):
        msgspec.msgpack.Decoder(Plan, dec_hook=from_wire).decode(list_of_ints)
