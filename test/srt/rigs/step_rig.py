"""Decode steps that accept all numbers of drafts, and the bits of the logits that they make.

Drafts are the plain text with mistakes, in trees of any form."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from runner_harness import Engine, Live, greedy
from tiny_model import VOCAB
from torch import Tensor

from mamba_eagle.tree.tree import Tree, ancestor_matrix


class Text(NamedTuple):
    live: Live
    logits: dict[int, Tensor]  # by position of the token that they follow

    def bits(self, position: int) -> bytes:
        return self.logits[position].numpy().tobytes()


def made(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[Text]:
    """Texts of requests whose prompts share a pass, and which then run side by side."""
    found: dict[int, dict[int, Tensor]] = defaultdict(dict)
    step = engine.runner.step
    commit = step._commit_target

    def recording(slots: Tensor, kv_slots: Tensor, verified: Any, *others: Any) -> Any:
        outcome = commit(slots, kv_slots, verified, *others)
        for r, slot in enumerate(slots.tolist()):
            for node in outcome.accepted.nodes[r, : outcome.accepted.count[r]].tolist():
                position = int(verified.positions[r, node])
                found[slot][position] = verified.logits[r, node].clone()
        return outcome

    step._commit_target = recording  # type: ignore[method-assign]
    lives = [engine.admit(prompt, greedy(new_tokens)) for prompt in prompts]
    items = [engine.chunk(live, len(live.tokens)) for live in lives]
    for live, item, result in zip(lives, items, engine.execute(prefill=items).prefill):
        engine.after_chunk(live, item, result)
    engine.finish(lives)
    step._commit_target = commit  # type: ignore[method-assign]
    texts = [Text(live, found[live.slot]) for live in lives]
    for live in lives:
        engine.release(live)
    return texts


def partings(engine: Engine, plain: list[Text], seed: int) -> list[tuple[int, int]]:
    """Where logits are not those of the plain texts, bit by bit: (text, position). The texts' other
    prompts share a pass, and steps gain at least four numbers of tokens."""
    draft_from(engine, [text.live.tokens for text in plain], seed)
    prompts = [text.live.tokens[: text.live.prompt_len] for text in plain]
    found = made(engine, prompts, len(plain[0].live.output))
    gained = {len(step.tokens) for text in found for step in text.live.steps}
    assert len(gained) >= 4 and max(gained) >= 4
    parted = []
    for i, (text, exact) in enumerate(zip(found, plain, strict=True)):
        for at in exact.logits:
            if at not in text.logits or text.bits(at) != exact.bits(at):
                parted.append((i, at))
        assert parted or text.live.tokens == exact.live.tokens
    return parted


def draft_from(engine: Engine, texts: list[list[int]], seed: int) -> None:
    """Let ``engine`` draft trees of any form along the texts, with mistakes."""
    chance, table = random.Random(seed), engine.runner.step.table

    def propose(slots: Tensor, part: Any, noise: Any) -> Tree:
        shape, trees = part.shape, []
        for slot in slots.tolist():
            at, root = int(table.processed[slot]), int(table.last_token[slot])
            text = chance.choice([text for text in texts if text[at : at + 1] == [root]])
            trees.append(random_tree(chance, text[at:], shape.topk, shape.depth, shape.nodes))
        tokens, parents, depths = (torch.tensor(each) for each in zip(*trees, strict=True))
        ancestors = ancestor_matrix(parents, shape.depth)
        return Tree(tokens, parents, depths, ancestors, torch.zeros(tokens.shape))

    engine.runner.drafter.propose = propose  # type: ignore[method-assign]


def random_tree(
    chance: random.Random, text: list[int], topk: int, depth: int, nodes: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths. text: what follows, the root first."""
    depths, above = [0], [0]
    if topk == 1:
        depths, above = list(range(nodes)), [max(0, i - 1) for i in range(nodes)]
    else:
        while len(depths) < nodes:  # nodes in the order of their depths
            low = max(0, depths[-1] - 1)
            open_to = [i for i, d in enumerate(depths) if low <= d < depth]
            above.append(chance.choice(open_to))
            depths.append(depths[above[-1]] + 1)
            if depths[-1] < depths[-2]:
                depths.pop(), above.pop()
    tokens, right = [text[0]], {0}
    wrong_from = chance.randint(1, depth + 2)
    for i in range(1, nodes):
        taken = any(above[j] == above[i] and j in right for j in range(1, i))
        known = above[i] in right and depths[i] < min(len(text), wrong_from) and not taken
        if known:
            right.add(i)
        tokens.append(text[depths[i]] if known else chance.randrange(VOCAB))
    return tokens, above, depths
