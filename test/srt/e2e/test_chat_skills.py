"""Chats with the embedded model by HTTP: a schema, a calculator, further questions."""

from __future__ import annotations

import httpx
import pytest
from skill_rig import SKILLS

from mamba2_math.skills import held_out

CHATS = 8
FEWEST = 5  # of them right; docs/training.md has the shares of all held-out ones


@pytest.mark.e2e
@pytest.mark.parametrize("skill", SKILLS)
def test_the_embedded_model_can_do_what_it_was_taught(skill: str, client: httpx.Client) -> None:
    right = [SKILLS[skill](client, chat) for chat in held_out(skill)[:CHATS]]
    assert sum(right) >= FEWEST, right
