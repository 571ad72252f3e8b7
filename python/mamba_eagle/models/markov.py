"""What DSpark (arXiv 2607.05147) adds to a block drafter: a Markov head, which makes a row's
logits depend on the token before it, and a confidence head."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.dflash_config import block_config, held_tokens
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard


class Step(NamedTuple):
    """What the Markov head makes of a token; r is its rank."""

    code: Tensor  # [n, r]; ``markov_w2`` turns it into a bias of the logits
    state: Tensor  # [n, r]; of the ``rnn`` kind, for the next step; else as it was


class MarkovHead(Layer):
    """A bias of low rank r for a row's logits, given the token t before it: ``W2 code``.

        vanilla  code = W1[t]
        gated    code = sigmoid(Wg [h; W1[t]] + b) · W1[t]
        rnn      (a, c, o) = Wj [s; W1[t]; h] + b;  a = sigmoid(a)
                 s' = a · s + (1 - a) · tanh(c);  code = tanh(o)

    h is the row's hidden state after the final norm, s the state after the rows before it on the
    same path (zeros at the first).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        block, size = block_config(config), config.hidden_size
        self.rank = rank = block.markov_rank
        self.markov_w1 = Embedding(config.vocab_size, rank)
        self.vocabulary = block.draft_vocab_size
        self.markov_w2 = Linear(rank, held_tokens(config).size)
        self.markov_w2.may_hold = False  # drafts read some of its rows
        self.gate_proj = self.joint_proj = None
        if block.markov_kind == "gated":
            self.gate_proj = Linear(size + rank, rank, bias=True)
        elif block.markov_kind == "rnn":
            self.joint_proj = Linear(2 * rank + size, 3 * rank, bias=True)

    def head_cuts(self, shard: Shard) -> dict[str, Cut]:
        return {"markov_w2.weight": rows(shard.span(self.vocabulary))}

    @property
    def has_state(self) -> bool:
        return self.joint_proj is not None

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> Step:
        """embedded [n, r]: ``markov_w1`` of the tokens before; hidden [n, hidden_size]; state
        [n, r], used by the ``rnn`` kind alone."""
        if self.gate_proj is not None:
            gate = self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid()
            return Step(gate * embedded, state)
        if self.joint_proj is None:
            return Step(embedded, state)
        joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
        keep, new, out = joint.chunk(3, dim=-1)
        keep = keep.sigmoid()
        return Step(out.tanh(), keep * state + (1 - keep) * new.tanh())


class ConfidenceHead(Layer):
    """The probability that a draft is accepted if all before it are: [n] float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        block = block_config(config)
        self.reads_markov = block.confidence_reads_markov
        width = config.hidden_size + (block.markov_rank if self.reads_markov else 0)
        self.proj = Linear(width, 1, bias=True)
        self.proj.may_hold = False
        self.proj.weight = nn.Parameter(self.proj.weight.float())
        assert self.proj.bias is not None
        self.proj.bias = nn.Parameter(self.proj.bias.float())

    def logit(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """hidden [n, hidden_size] of the row, embedded [n, r] of the token before it -> [n], before
        the sigmoid."""
        inputs = torch.cat([hidden, embedded], dim=-1) if self.reads_markov else hidden
        return self.proj(inputs.float())[:, 0]
