"""Logits under bit masks, in each form against naive.py."""

from __future__ import annotations

import pytest
import torch
from forms import backend_of, device_of, every_form, in_the_interpreter

from mamba_eagle.kernels.token_mask import naive

test_in_the_interpreter = in_the_interpreter


@every_form
@pytest.mark.parametrize("vocab, rows", [(96, [0, 2]), (70, [1]), (2500, [2, 0, 1])])
def test_refused_tokens_are_minus_infinity_and_raw_logits_stay(
    form: str, vocab: int, rows: list[int]
) -> None:
    """Words of all kinds: full, empty, mixed, and a last one with bits past the vocabulary."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator)
    words = (vocab + 31) // 32
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), generator=generator).int()
    masks[:, 0], masks[0, 1] = -1, 0
    device = device_of(form)
    given = logits.to(device)
    masked = backend_of(form).mask_logits(
        given, torch.tensor(rows, device=device), masks.to(device)
    )
    assert torch.equal(masked.cpu(), naive.mask_logits(logits, torch.tensor(rows), masks))
    assert torch.equal(given.cpu(), logits)  # never in place: logprobs are of the raw logits
    assert masked.isinf().any() and masked.data_ptr() != given.data_ptr()
