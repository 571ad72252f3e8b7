"""How a flat prefill batch is divided among requests, in the form that the prefill kernels read.

Built on the host once for all layers, and sent in one copy that the host does not wait for.

```
 tokens      0 ───────────────── 7 ────────────── 12         two requests
 segments    [0, 3)→4  [3, 7)→0  [7, 12)→1  [12, 12)→2       each ends where a state is saved: →slot
 requests    0 … 1, from 0       2 … 3, from -1              their segments, the slot to start from
```
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

CONV_TOKENS = 16  # tokens of one request per program of the convolution


class Prompt(NamedTuple):
    """The next ``length`` tokens of a request: [first, first + length) of the flat batch.

    ``source`` is the state slot that holds the state before them, or -1 to start from zeros.
    ``saves`` are pairs (tokens after ``first``, state slot), in increasing order: the state after
    that many tokens goes to that slot. After 0 tokens it is a copy of the source. One position may
    be saved to several slots. Only the last save may overwrite the request's own source.
    """

    first: int
    length: int
    source: int
    saves: Sequence[tuple[int, int]]


class Room(NamedTuple):
    """Rows of a plan's tables. Those that are left over are requests without segments, and blocks
    behind the end of their request."""

    requests: int
    segments: int
    blocks: int


FILLERS = ((0, 0, -1), (0, 0, -1), (0, 1 << 30))


class PrefillPlan(NamedTuple):
    """b requests, the longest first; S segments; n tokens. Tables are int32 and contiguous."""

    requests: Tensor  # [b, 3]: first segment, end of its segments, source slot or -1
    segments: Tensor  # [S, 3]: first token, end of its tokens, slot for the state there or -1
    blocks: Tensor  # [·, 2]: request, first token of a block of its tokens
    tokens: int  # n
    block: int  # tokens per block; a request's last block may have fewer
    ends: list[tuple[int, int]]  # of each segment, on the host: which prompt, tokens up to its end


def prefill_plan(
    prompts: Sequence[Prompt],
    to_device: Callable[..., Tensor] = torch.tensor,
    block: int = CONV_TOKENS,
    room: Room | None = None,
) -> PrefillPlan:
    """The plan for prompts that lie one after the other in the batch.

    Args:
        to_device: makes a tensor, where the kernels run, of a list and ``dtype=``.
        block: tokens per program of the convolution.
        room: at least as many rows as the tables need; None: just as many.
    Raises: ValueError if a prompt is empty, a save lies outside its prompt, saves are not in
        increasing order, a slot is saved to twice, or a slot that is saved to is read by another
        prompt.
    """
    _check(prompts)
    requests: list[tuple[int, ...]] = []
    segments: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    ends = []
    for index in sorted(range(len(prompts)), key=lambda index: -prompts[index].length):
        prompt = prompts[index]
        begin, end = prompt.first, prompt.first + prompt.length
        blocks += [(len(requests), token) for token in range(begin, end, block)]
        first_segment = len(segments)
        for offset, slot in prompt.saves:
            segments.append((begin, prompt.first + offset, slot))
            ends.append((index, offset))
            begin = prompt.first + offset
        if begin < end:
            segments.append((begin, end, -1))
            ends.append((index, prompt.length))
        requests.append((first_segment, len(segments), prompt.source))
    given = (requests, segments, blocks)
    for table, filler, rows in zip(given, FILLERS, room or ()):
        table += [filler] * (rows - len(table))
    sent = in_one_copy([[n for row in table for n in row] for table in given], to_device)
    tables = [flat.view(-1, len(table[0])) for flat, table in zip(sent, given)]
    return PrefillPlan(*tables, sum(prompt.length for prompt in prompts), block, ends)


def _check(prompts: Sequence[Prompt]) -> None:
    written: dict[int, Prompt] = {}
    for prompt in prompts:
        if prompt.length < 1:
            raise ValueError(f"a prompt of {prompt.length} tokens: must have at least one")
        offsets = [0, *(offset for offset, _ in prompt.saves)]
        if offsets != sorted(offsets) or offsets[-1] > prompt.length:
            raise ValueError(
                f"saves after {offsets[1:]} of {prompt.length} tokens: they must increase, from 0 "
                "to the prompt's length"
            )
        for i, (_, slot) in enumerate(prompt.saves):
            if slot in written:
                raise ValueError(f"state slot {slot} is saved to twice in one batch")
            if slot == prompt.source and i < len(prompt.saves) - 1:
                raise ValueError(
                    f"state slot {slot} is read and then saved to before the last save: "
                    "only the last save may overwrite the source"
                )
            written[slot] = prompt
    for prompt in prompts:
        if written.get(prompt.source, prompt) is not prompt:
            raise ValueError(
                f"state slot {prompt.source} is read by one request of the batch and saved "
                "to by another: put them into separate batches"
            )


def in_one_copy(
    lists: Sequence[Sequence[int]],
    to_device: Callable[..., Tensor],
    dtype: torch.dtype = torch.int32,
) -> list[Tensor]:
    """Each as a tensor. All begin at multiples of 16 bytes, so that lists of any length take the
    same machine code."""
    padded = [[*each, *[0] * (-len(each) % 4)] for each in lists]
    sent = to_device(list(chain.from_iterable(padded)), dtype=dtype).split(list(map(len, padded)))
    return [part[: len(each)] for part, each in zip(sent, lists)]
