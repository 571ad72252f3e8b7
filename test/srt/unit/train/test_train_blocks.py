"""Blocks from many positions in one training pass: each is what a drafter would propose there."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import VOCAB, write_model
from torch import Tensor

from mamba_eagle.layers.block_attention import BlockAttention
from mamba_eagle.layers.context import Rotation
from mamba_eagle.train.batches import Answer, PaddedAnswers, pad_answers
from mamba_eagle.train.heads import TRAINABLE_HEADS
from mamba_eagle.train.heads.block import TrainableBlockDrafter
from mamba_eagle.train.heads.config import block_draft_config
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.target import TargetOutputs, load_target, run_target

torch.set_num_threads(1)

CPU = torch.device("cpu")
DEPTH = 4
ANSWERS = [
    Answer([(7 * i + 3) % VOCAB for i in range(15)], 3),
    Answer([(5 * i + 1) % VOCAB for i in range(11)], 4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


def make_head(
    folder: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch, **values: Any
) -> TrainableBlockDrafter:
    """values: of config.json, in place of those of a new drafter."""

    def changed(*args: Any) -> dict[str, Any]:
        return {**block_draft_config(*args), **values}

    monkeypatch.setattr("mamba_eagle.train.heads.block.block_draft_config", changed)
    kind = values.get("markov_head_type", "vanilla")
    settings = TrainSettings(
        target=str(folder), algorithm=algorithm, depth=DEPTH, draft_layers=2, markov_rank=8,
        markov_head=kind,
    )  # fmt: skip
    head = TRAINABLE_HEADS[algorithm](settings, load_target(folder, CPU), ANSWERS)
    assert isinstance(head, TrainableBlockDrafter)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.module.named_parameters():
        if "markov_w2" in name or "sink" in name:  # zeros in a new drafter
            parameter.data.normal_(0, 2.0, generator=generator)
    return head


class OneBlock:
    """The plainest context: one anchor, keys of features and block in one row after the other."""

    rotation: Rotation | None = None

    def __init__(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """positions [N]; keys and values [L, anchor, kv, D], of the features before the anchor."""
        self.positions, self.keys, self.values = positions, keys, values

    def attention(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.cat([torch.arange(self.keys.shape[1]), self.positions])
        k = torch.cat([self.keys[layer.index], k])
        v = torch.cat([self.values[layer.index], v])
        out = torch.zeros_like(q)
        for i, position in enumerate(self.positions.tolist()):
            for h in range(q.shape[1]):
                kv = h // (q.shape[1] // k.shape[1])
                scores, shown = [], []
                for j, place in enumerate(places.tolist()):
                    if layer.causal and place > position:
                        continue
                    if layer.window and abs(position - place) >= layer.window:
                        continue
                    scores.append(float(q[i, h] @ k[j, kv]) * layer.scale)
                    shown.append(v[j, kv])
                if layer.attention_sink_bias is not None:
                    scores.append(float(layer.attention_sink_bias[h]))
                    shown.append(torch.zeros_like(shown[0]))
                shares = torch.tensor(scores).softmax(0)
                out[i, h] = (shares[:, None] * torch.stack(shown)).sum(0)
        return out


@torch.no_grad()
def alone(head: TrainableBlockDrafter, features: Tensor, answer: Answer, anchor: int) -> Tensor:
    """The drafting rows of one block, [k, hidden]: features [l, W] of its answer."""
    model, N = head.module, head.block.num_rows(DEPTH)
    taps = features[:anchor, head.target.config.hidden_size :]
    keys, values = model.context_kv(model.context(taps), torch.arange(anchor))
    tokens = torch.tensor([[answer.tokens[anchor]] + [head.block.mask_token] * (N - 1)])
    ctx = OneBlock(anchor + torch.arange(N), keys, values)
    embedded = model.embed(tokens, head.target.parts.embedding)
    return model(embedded, ctx)[N - DEPTH :]


VARIANTS = {
    "dflash": ("dflash", {}),
    "dflash-window": ("dflash", {"layer_types": ["sliding_attention", "full_attention"],
                                 "sliding_window": 4, "attention_sink_bias": True}),
    "dspark": ("dspark", {}),
    "dspark-anchor-row": ("dspark", {"sample_from_anchor": False, "block_size": DEPTH + 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_is_what_a_drafter_would_propose_there(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other blocks are in the pass: attention worked out key by key."""
    algorithm, values = VARIANTS[name]
    head = make_head(folder, algorithm, monkeypatch, **values)
    rng = random.Random(2)
    drawn = [answer.draw_anchors(3, rng) for answer in ANSWERS]
    padded = pad_answers(drawn, DEPTH, CPU)
    features = run_target(head.target, padded).features
    with torch.no_grad():
        rows = head.rows(padded, features)
    for i, answer in enumerate(drawn):
        assert answer.anchors is not None and len(answer.anchors) == 3
        for a, anchor in enumerate(answer.anchors):
            expected = alone(head, features[i], answer, anchor)
            torch.testing.assert_close(rows[i, a], expected, rtol=1e-4, atol=1e-5)


def outputs_of(head: TrainableBlockDrafter, padded: PaddedAnswers) -> TargetOutputs:
    return run_target(head.target, padded)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_head_is_taught_with_the_tokens_that_it_will_follow(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an answer is what the head drafts, then each place's best token is the answer's."""
    head = make_head(folder, "dspark", monkeypatch, markov_head_type=kind)
    tokens = [int(n) for n in torch.randint(0, VOCAB, (12,), generator=torch.manual_seed(3))]
    anchor = 5
    for _ in range(2):  # what is drafted depends on tokens up to the anchor alone
        answer = Answer(tokens, 3, (anchor,))
        padded = pad_answers([answer], DEPTH, CPU)
        target = outputs_of(head, padded)
        with torch.no_grad():
            rows = head.rows(padded, target.features)
            drafts = head.chains(rows[0], torch.tensor([tokens[anchor]]))[0].tolist()
            logits = head.module.logits(rows[0, 0], head.target.lm_head)
            taught = head.biased(logits, rows, padded)
        tokens = tokens[: anchor + 1] + drafts + tokens[anchor + 1 + DEPTH :]
    assert taught.argmax(-1).tolist() == drafts
    assert drafts != logits.argmax(-1).tolist(), "the head would change nothing"


def test_the_losses_are_the_published_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Place by place, of the mean over places, with weights that fall with the distance."""
    for algorithm in ("dflash", "dspark"):
        head = make_head(folder, algorithm, monkeypatch)
        answers = [ANSWERS[0]._replace(anchors=(4, 13))]  # the second has room for one draft
        padded = pad_answers(answers, DEPTH, CPU)
        target = outputs_of(head, padded)
        num_drafts = [answers[0].num_drafts(j) for j in range(DEPTH)]
        assert num_drafts == [2, 1, 1, 1]
        total = 0.0
        with torch.no_grad():
            found = float(head.loss(padded, target, num_drafts))
            hidden = head.rows(padded, target.features)
            flat = head.module.logits(hidden.flatten(0, 2)[padded.blocks.flat], head.target.lm_head)
            logits = head.biased(flat, hidden, padded)
            places = [(0, j) for j in range(DEPTH)] + [(1, 0)]
            for n, (a, j) in enumerate(places):
                anchor = answers[0].anchors[a]
                p = target.probs[anchor + j - answers[0].prompt_len].double()
                q = logits[n].double().softmax(-1)
                label = answers[0].tokens[anchor + j + 1]
                if algorithm == "dflash":
                    value = float(-(p * q.log()).sum())
                else:
                    rate = float(torch.minimum(p, q).sum())
                    model, before = head.module, torch.tensor([answers[0].tokens[anchor + j]])
                    embedded = model.markov_head.markov_w1(before)
                    logit = float(model.confidence_head.logit(hidden[0, a, j][None], embedded))
                    c = 1 / (1 + math.exp(-logit))
                    sure = rate * math.log(c) + (1 - rate) * math.log(1 - c)
                    value = -0.1 * math.log(float(q[label])) + 0.9 * (1 - rate) - sure
                total += math.exp(-j / 4.0) * value
        assert found == pytest.approx(total / 5, rel=1e-4)


def test_anchors_differ_from_step_to_step_and_are_roots(folder: Path) -> None:
    rng = random.Random(0)
    seen = {ANSWERS[0].draw_anchors(3, rng).anchors for _ in range(8)}
    assert len(seen) > 4
    assert all(3 <= anchor < 14 for anchors in seen for anchor in anchors or ())
    assert ANSWERS[1].draw_anchors(50, rng).anchors == tuple(range(4, 10))
