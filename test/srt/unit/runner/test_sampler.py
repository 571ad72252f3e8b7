"""The sampler: keyed noise, filters against a plain reference, penalties, and independence."""

from __future__ import annotations

import math

import pytest
import torch
from tensor_checks import host_backend, sample

from mamba_eagle.backend.token_ops import TokenOps
from mamba_eagle.core import SamplingParams
from mamba_eagle.devices import choose_backend
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.kernels.sampling_noise import naive
from mamba_eagle.kernels.sampling_noise import torch as noise_torch
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_parts.torch import NO_KEY
from mamba_eagle.parallel.groups import ALONE
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.tree.accept import accept, truncate
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree, ancestor_matrix, single_node_tree

torch.set_num_threads(1)
EOS = 0


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How many standard deviations the statistic is above its mean (Wilson and Hilferty)."""
    used = probabilities > 0
    assert observed[~used].sum() == 0, "sampled something of probability 0"
    expected = probabilities[used].double() * observed.sum()
    assert expected.min() >= 5, "too few samples to judge"
    statistic = ((observed[used] - expected) ** 2 / expected).sum().item()
    freedom = int(used.sum()) - 1
    if freedom == 0:
        return 0.0
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


# ── noise ────────────────────────────────────────────────────────────────────────────────────


def rows(count: int, seed: int = 1, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count,), seed), torch.arange(first, first + count)


def uniform(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return noise_torch.hash_bits(seed, position, vocab_size).double() / 2**noise_torch.BITS


def test_the_hash_is_splitmix64() -> None:
    assert naive.splitmix64(1234567) == 6457827717110365317  # the published test vector
    for seed, position in [(0, 0), (2**63 - 1, 131_071), (1234567, 1)]:
        expected = [naive.hash_bits(seed, position, token) for token in range(5)]
        got = noise_torch.hash_bits(torch.tensor([seed]), torch.tensor([position]), 5)
        assert got[0].tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_hashes_are_uniform(seed: int) -> None:
    values = uniform(*rows(64, seed), 4096)
    for picture in (
        values,
        (values * 256) % 1,
        (values * 65536) % 1,
    ):  # from the 1st, 9th, 17th bit
        observed = torch.histc(picture, bins=256, min=0, max=1)
        assert abs(chi_square(observed, torch.full((256,), 1 / 256))) < 5


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(lambda: (uniform(*rows(64), 2048), uniform(*rows(64, 2), 2048)), id="seeds"),
        pytest.param(
            lambda: (uniform(*rows(64), 2048), uniform(*rows(64, first=1), 2048)), id="positions"
        ),
        pytest.param(
            lambda: (uniform(*rows(64), 2048)[:, :-1], uniform(*rows(64), 2048)[:, 1:]), id="tokens"
        ),
        pytest.param(
            lambda: (uniform(*rows(64), 2048)[1:, :-1], uniform(*rows(64), 2048)[:-1, 1:]),
            id="tokens-against-positions",
        ),
        pytest.param(
            lambda: (uniform(*rows(64, 3, first=1), 2048), uniform(*rows(64, 2, first=2), 2048)),
            id="seeds-against-positions",
        ),
    ],
)
def test_neighbours_are_independent(pair) -> None:
    left, right = (x.flatten() for x in pair())
    cells = (left * 16).long() * 16 + (right * 16).long()
    observed = cells.bincount(minlength=256)
    assert abs(chi_square(observed, torch.full((256,), 1 / 256))) < 5
    assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 5 / math.sqrt(len(left))


def test_noise_is_finite_and_has_the_gumbel_moments() -> None:
    noise = gumbel(*rows(512), 2048).double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("bits", [0, 1, 2**noise_torch.BITS - 1], ids=["lowest", "low", "highest"])
def test_noise_is_finite_at_the_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_torch, "hash_bits", lambda *_: torch.tensor([[bits]]))
    assert noise_torch.gumbel(*rows(1), 1).isfinite().all()


def test_noise_depends_on_nothing_else() -> None:
    together = gumbel(torch.tensor([1, 2, 3]), torch.tensor([7, 8, 9]), 100)
    alone = gumbel(torch.tensor([2]), torch.tensor([8]), 37)
    assert torch.equal(together[1:2, :37], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1, 2048, 5003])
def test_noise_on_a_gpu_equals_the_cpu(vocab_size: int) -> None:
    from mamba_eagle.kernels.sampling_noise import triton

    seed, position = torch.tensor([0, 5, 2**63 - 1]), torch.tensor([0, 131_071, 77])
    on_gpu = seed.cuda(), position.cuda()
    bits = noise_torch.hash_bits(seed, position, vocab_size)
    assert torch.equal(noise_torch.hash_bits(*on_gpu, vocab_size).cpu(), bits)
    noise = noise_torch.gumbel(seed, position, vocab_size)
    torch.testing.assert_close(
        triton.gumbel(*on_gpu, vocab_size).cpu(), noise, rtol=1e-5, atol=1e-5
    )


# ── sampling ─────────────────────────────────────────────────────────────────────────────────


def state_with(*params: SamplingParams, vocab: int, prompt_len: int = 0) -> SamplingState:
    """Slot i holds params[i]."""
    state = SamplingState(len(params), vocab, (EOS,), host_backend())
    for slot, one in enumerate(params):
        state.set(slot, one, prompt_len, [])
    return state


def kept_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p in plain Python."""
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if kept and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


FILTERS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.5}, id="cold"),
    pytest.param({"temperature": 1.7}, id="hot"),
    pytest.param({"top_k": 3}, id="top-k"),
    pytest.param({"top_p": 0.7}, id="top-p"),
    pytest.param({"top_p": 0.7, "temperature": 1.7}, id="top-p-hot"),
    pytest.param({"top_k": 5, "top_p": 0.8}, id="top-k-top-p"),
    # two of the four have 0.6 of their mass, but not 0.6 of the whole
    pytest.param({"top_k": 4, "top_p": 0.6}, id="top-p-of-the-top-k"),
    pytest.param({"min_p": 0.2}, id="min-p"),
    pytest.param({"min_p": 0.2, "temperature": 0.6}, id="min-p-cold"),
    pytest.param({"top_k": 6, "top_p": 0.9, "min_p": 0.3, "temperature": 1.3}, id="all"),
    pytest.param({"min_p": 1.0}, id="min-p-one"),
    pytest.param({"top_p": 1e-9}, id="top-p-tiny"),
    pytest.param({"top_p": 1e-30}, id="top-p-vanishing"),
    pytest.param({"top_k": 100}, id="top-k-above-the-vocabulary"),
    pytest.param({"top_k": 0}, id="top-k-of-all"),
]
LOGITS = [0.3, 1.9, -1.0, 1.2, 0.0, 0.9, 1.5, -0.4]


@pytest.mark.parametrize("seed", [1, 987654321])
@pytest.mark.parametrize("options", FILTERS)
def test_samples_follow_the_filtered_distribution(options: dict, seed: int) -> None:
    params = SamplingParams(seed=seed, **options)
    state = state_with(params, vocab=len(LOGITS))
    count = 20_000
    positions = torch.arange(count).unsqueeze(0)
    logits = torch.tensor(LOGITS).expand(1, count, -1)
    tokens = sample(state, [0], logits, positions, None)
    assert tokens.shape == (1, count)
    observed = tokens[0].bincount(minlength=len(LOGITS))
    assert chi_square(observed, torch.tensor(kept_probabilities(LOGITS, params))) < 4


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 2, "top_p": 0.99}])
def test_of_equal_logits_the_first_rank_first(options: dict) -> None:
    """Six equal tokens (0.0 and -0.0 are equal too): two of them are kept, or those up to 0.4."""
    logits = torch.tensor([-9.0, 0.0, -0.0, 0.0, -9.0, -0.0, 0.0, 0.0])
    state = state_with(SamplingParams(**options), vocab=8)
    tokens = sample(state, [0], logits.expand(1, 500, -1), torch.arange(500).unsqueeze(0), None)
    kept = {1, 2} if "top_k" in options else {1, 2, 3}
    assert set(tokens.flatten().tolist()) == kept


@pytest.mark.parametrize("tries", [1, 7, 30, 300], ids="first-try-{}".format)
def test_how_many_are_ordered_first_changes_nothing(tries: int) -> None:
    """The CPU's short cut: whatever it tries first, the last key is that of the definition, which
    ranks with a part of the tokens find digit by digit."""
    torch.manual_seed(0)
    scores = (torch.randn(4, 200, 300) * 4).round()
    keys = Columns(ALONE, 300).keys(scores)
    weights = torch.randint(0, 9, keys.shape) ** 4
    total = weights.sum(-1, keepdim=True)
    limit = (total * torch.tensor([0.02, 0.5, 0.9, 1.0]).view(4, 1, 1)).long().clamp(min=1)
    free = torch.zeros_like(limit, dtype=torch.bool)
    free[2, :9] = True
    above = torch.where(keys.unsqueeze(-2) > keys.unsqueeze(-1), weights.unsqueeze(-2), 0).sum(-1)
    expected = keys.masked_fill(above >= limit, keys.max()).amin(-1, keepdim=True)
    assert torch.equal(Columns(ALONE, 300).order(scores)._last_by_digits(weights, limit), expected)
    expected[free] = NO_KEY
    for node in (slice(None), *(slice(node, node + 1) for node in range(200))):
        order = Columns(ALONE, 300).order(scores[:, node])  # one is often complete at once
        limits = (limit[:, node], [tries, 300], free[:, node])
        assert torch.equal(order.last_kept(weights[:, node], *limits), expected[:, node])


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=5, min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, top_p=0.5, min_p=0.5),
    SamplingParams(seed=4, frequency_penalty=0.5, presence_penalty=0.4, top_k=50),
    SamplingParams(seed=5, logit_bias={3: 5.0, 4: -5.0}),
    SamplingParams(temperature=0.0, min_new_tokens=3),
    SamplingParams(seed=6, min_p=0.1, temperature=2.0),
    SamplingParams(seed=7, top_k=1),
]


def test_tokens_do_not_depend_on_the_batch() -> None:
    vocab, nodes, batch = 200, 6, len(MIXED)
    torch.manual_seed(0)
    state = state_with(*MIXED, vocab=vocab)
    state.observe_accepted(
        torch.arange(batch), torch.randint(0, 9, (batch, 4)), torch.full((batch,), 4)
    )
    logits = (torch.randn(batch, nodes, vocab) * 3).bfloat16()
    tree = chain(torch.randint(0, vocab, (batch, nodes)))
    positions = tree.depths + torch.arange(batch).unsqueeze(1)
    slots = list(range(batch))
    together = sample(state, slots, logits, positions, tree)
    for row in range(batch):
        one = Tree(*[field[row : row + 1] for field in tree])
        here = slice(row, row + 1)
        alone = sample(state, [row], logits[here], positions[here], one)
        assert torch.equal(alone, together[here]), MIXED[row]
    order = torch.randperm(batch)
    shuffled = sample(
        state,
        order.tolist(),
        logits[order],
        positions[order],
        Tree(*[field[order] for field in tree]),
    )
    assert torch.equal(shuffled, together[order])


def test_greedy_in_a_mixed_batch_is_the_argmax() -> None:
    torch.manual_seed(0)
    state = state_with(*MIXED[:4], MIXED[9], vocab=100)
    logits = torch.randn(5, 3, 100).bfloat16()
    positions = torch.arange(3).expand(5, -1)
    tokens = sample(state, [0, 1, 2, 3, 4], logits, positions, None)
    assert torch.equal(tokens[0], logits[0].argmax(-1))
    assert torch.equal(tokens[4], logits[4].argmax(-1))  # a top-k of one
    assert not torch.equal(tokens[1], logits[1].argmax(-1))


def test_an_all_greedy_batch_reads_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_with(SamplingParams(temperature=0.0), MIXED[1], vocab=10)
    monkeypatch.setattr(state, "numbers", None)
    logits = torch.randn(1, 2, 10)
    tokens = sample(state, [0], logits, torch.zeros(1, 2, dtype=torch.int64), None)
    assert torch.equal(tokens, logits.argmax(-1))


def test_the_same_position_draws_the_same_token_in_any_tree() -> None:
    """Speculation changes which node samples a position, not what is sampled."""
    torch.manual_seed(0)
    state = state_with(SamplingParams(seed=9), vocab=50)
    logits = torch.randn(1, 5, 50)
    positions = torch.tensor([[7, 8, 8, 9, 10]])
    tokens = sample(state, [0], logits, positions, None)
    for node in range(5):
        here = slice(node, node + 1)
        alone = sample(state, [0], logits[:, here], positions[:, here], None)
        assert torch.equal(alone, tokens[:, here])


# ── penalties, bias, stop tokens ─────────────────────────────────────────────────────────────


def chain(tokens: torch.Tensor) -> Tree:
    batch, nodes = tokens.shape
    depths = torch.arange(nodes).expand(batch, -1)
    parents = (depths - 1).clamp(min=0)
    scores = torch.zeros(batch, nodes)
    return Tree(tokens, parents, depths, ancestor_matrix(parents, nodes), scores)


PENALTIES = [
    pytest.param({"repetition_penalty": 1.3}, id="repetition"),
    pytest.param({"repetition_penalty": 0.8}, id="repetition-below-one"),
    pytest.param({"frequency_penalty": 0.7}, id="frequency"),
    pytest.param({"presence_penalty": 1.1}, id="presence"),
    pytest.param(
        {"repetition_penalty": 1.2, "frequency_penalty": -0.3, "presence_penalty": 0.5}, id="all"
    ),
]


def penalized(logits: torch.Tensor, prompt: list[int], output: list[int], params) -> list[float]:
    """The definition, token by token."""
    result = logits.tolist()
    for token in range(len(result)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        count = output.count(token)
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return result


def best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


@pytest.mark.parametrize("options", PENALTIES)
def test_penalties_equal_their_definition_over_a_sequence(options: dict) -> None:
    params = SamplingParams(temperature=0.0, **options)
    vocab, prompt = 12, [3, 3, 5, 1]
    state = SamplingState(2, vocab, (EOS,), host_backend())
    state.set(1, params, len(prompt), prompt[:1])
    state.observe(1, torch.tensor(prompt[1:]), start=1)
    torch.manual_seed(0)
    output: list[int] = []
    for step in range(40):
        logits = torch.randn(1, 1, vocab)
        position = torch.tensor([[len(prompt) + step]])
        root = single_node_tree(torch.tensor([(prompt + output)[-1]]))
        token = sample(state, [1], logits, position, root)
        assert token.item() == best(penalized(logits[0, 0], prompt, output, params))
        output.append(int(token))
        state.observe_accepted(torch.tensor([1]), token, torch.tensor([1]))


@pytest.mark.parametrize("options", PENALTIES)
def test_penalties_in_a_tree_equal_penalties_one_after_the_other(options: dict) -> None:
    params = SamplingParams(temperature=0.0, **options)
    vocab, prompt, output = 6, [3, 3, 5], [1, 2]
    #        root 2 ─┬─ 4 ─┬─ 4 ── 1      the root has been counted with the output
    #                └─ 2  └─ 5
    tokens = torch.tensor([[2, 4, 2, 4, 5, 1]])
    parents = torch.tensor([[0, 0, 0, 1, 1, 3]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 3]])
    tree = Tree(tokens, parents, depths, ancestor_matrix(parents, 3), torch.zeros(1, 6))
    paths = [[], [4], [2], [4, 4], [4, 5], [4, 4, 1]]
    torch.manual_seed(0)
    for _ in range(50):
        state = state_with(params, vocab=vocab, prompt_len=3)
        state.observe(0, torch.tensor(prompt), start=0)
        state.observe_accepted(torch.tensor([0]), torch.tensor([output]), torch.tensor([2]))
        logits = torch.randn(1, 6, vocab)
        got = sample(state, [0], logits, depths + 5, tree)
        for node, path in enumerate(paths):
            expected = best(penalized(logits[0, node], prompt, output + path, params))
            assert got[0, node].item() == expected, (node, path)


def test_only_accepted_tokens_are_counted() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    state = state_with(params, params, SamplingParams(), vocab=5)
    state.observe_accepted(
        torch.tensor([1, 0, 2]),
        torch.tensor([[4, 4, 3], [1, 2, 3], [1, 1, 1]]),
        torch.tensor([2, 0, 3]),
    )
    assert state.output_counts[1].tolist() == [0, 0, 0, 0, 2]
    assert state.output_counts[0].tolist() == [0, 0, 0, 0, 0]


def test_a_retracted_request_counts_its_own_output_as_output() -> None:
    """Prompt [1, 2], output [3, 3, 4]; history ends, and chunks begin, on either side of it."""
    sequence, prompt_len = [1, 2, 3, 3, 4], 2
    params = SamplingParams(presence_penalty=1.0)
    for cut in range(len(sequence) + 1):
        state = SamplingState(1, 6, (EOS,), host_backend())
        state.set(0, params, prompt_len, sequence[:cut])
        state.observe(0, torch.tensor(sequence[cut:], dtype=torch.int64), start=cut)
        assert state.prompt_seen[0].tolist() == [False, True, True, False, False, False]
        assert state.output_counts[0].tolist() == [0, 0, 0, 2, 1, 0]


def test_a_slot_forgets_its_last_request() -> None:
    first = SamplingParams(
        frequency_penalty=2.0, logit_bias={2: 9.0}, min_new_tokens=5, stop_token_ids=[3]
    )
    state = state_with(first, vocab=6)
    state.observe(0, torch.tensor([1, 1]), start=0)
    state.set(0, SamplingParams(temperature=0.0, presence_penalty=0.1), 0, [])
    assert not state.output_counts.any()
    assert not state.prompt_seen.any()
    assert not state.bias.any()
    assert not state.stops.any()
    state.set(0, SamplingParams(temperature=0.0), 0, [])
    state.observe(0, torch.tensor([1, 1]), start=0)
    assert not state.output_counts.any()


@pytest.mark.parametrize(
    ("bias", "expected"),
    [({2: 100.0}, 2), ({1: -100.0}, 3), ({1: -100.0, 3: -100.0, 0: 50.0}, 0), ({}, 1)],
    ids=["raised", "lowered", "both", "none"],
)
def test_logit_bias(bias: dict[int, float], expected: int) -> None:
    state = state_with(SamplingParams(temperature=0.0, logit_bias=bias), vocab=4)
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    assert sample(state, [0], logits, torch.tensor([[0]]), None).item() == expected


def test_bias_comes_before_the_filters() -> None:
    state = state_with(SamplingParams(top_p=0.5, min_p=0.5, logit_bias={2: 100.0}), vocab=4)
    logits = torch.zeros(1, 100, 4)
    assert (sample(state, [0], logits, torch.arange(100).unsqueeze(0), None) == 2).all()


@pytest.mark.parametrize(
    ("options", "banned"),
    [
        ({}, {EOS}),
        ({"stop_token_ids": [2]}, {EOS, 2}),
        ({"stop_token_ids": [2], "ignore_eos": True}, {2}),
        ({"ignore_eos": True}, set()),
    ],
    ids=["eos", "stop-tokens", "ignore-eos", "nothing"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_new_tokens(
    options: dict, banned: set[int], temperature: float
) -> None:
    prompt_len, least = 10, 3
    params = SamplingParams(temperature=temperature, min_new_tokens=least, **options)
    state = state_with(params, vocab=4, prompt_len=prompt_len)
    positions = torch.arange(prompt_len, prompt_len + 6).unsqueeze(0)
    for favourite in range(4):
        logits = torch.zeros(1, 6, 4)
        logits[..., favourite] = 50.0
        tokens = sample(state, [0], logits, positions, None)[0].tolist()
        for made, token in enumerate(tokens):
            if favourite in banned and made < least:
                assert token not in banned
            else:
                assert token == favourite


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_where_no_token_can_be_sampled_there_is_none(options: dict) -> None:
    """Logits that are not finite, all tokens banned, noise that overflows; other nodes and the
    requests beside it have their tokens."""
    vocab, banned = 6, {"min_new_tokens": 3, "stop_token_ids": [*range(6)]}
    state = SamplingState(3, vocab, (EOS,), host_backend())
    state.set(0, SamplingParams(seed=1, **options), 10, [])
    state.set(1, SamplingParams(seed=2, **banned, **options), 10, [])
    state.set(2, SamplingParams(seed=3, **{**options, "temperature": 1e39}), 10, [])
    logits = torch.randn(3, 6, vocab, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(10, 16).expand(3, 6)
    clean = sample(state, [0, 1, 2], logits, positions, None)
    assert (clean[0] >= 0).all()
    assert clean[1, :3].tolist() == [NO_TOKEN] * 3 and (clean[1, 3:] >= 0).all()
    assert clean[2].tolist() == [NO_TOKEN] * 6
    logits[0, 1, 4], logits[0, 2], logits[0, 3, 0] = math.nan, -math.inf, math.inf
    found = sample(state, [0, 1, 2], logits, positions, None)
    assert found[0, 1:4].tolist() == [NO_TOKEN] * 3
    found[0, 1:4] = clean[0, 1:4]
    assert torch.equal(found, clean)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
def test_nothing_waits_for_the_device_and_tokens_equal_the_cpu() -> None:
    vocab, batch = 5003, len(MIXED)
    torch.manual_seed(0)
    logits = torch.randn(batch, 12, vocab) * 4
    steps = [torch.randn(batch, 1 if step == 0 else 4, vocab).log_softmax(-1) for step in range(4)]
    slots = list(range(batch))

    def one_step(state: SamplingState, inputs: list[torch.Tensor]) -> list:
        where, roots, remaining, stop_tokens, on_device, *drafts = inputs
        for slot, params in enumerate(MIXED):
            state.set(slot, params, 3, [1, 2, 3])
        candidates = Candidates(roots, 4)
        for log_probs in drafts:
            candidates.expand(TopTokens(*log_probs.topk(4)))
        tree = candidates.select(12)
        positions = tree.depths + 4
        tokens = sample(state, slots, on_device, positions, tree)
        cut = truncate(accept(tree, tokens, 4), stop_tokens, remaining)
        state.observe_accepted(where, cut.tokens, cut.count)
        return [*tree, tokens, cut.count, cut.finished]

    inputs = [
        torch.arange(batch),
        torch.arange(batch),
        torch.full((batch,), 9),
        torch.full((batch, 2), -1),
        logits,
        *steps,
    ]
    expected = one_step(SamplingState(batch, vocab, (EOS,), host_backend()), inputs)
    state = SamplingState(batch, vocab, (EOS,), choose_backend(torch.device("cuda"), torch.float32))
    limited = [slot for slot in slots if MIXED[slot].top_k > 1]  # without a top-p beside them
    moved = [tensor.cuda() for tensor in inputs]
    one_step(state, moved)  # compiles, allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = one_step(state, moved)
        positions = torch.arange(12, device="cuda").expand(len(limited), -1)
        sample(state, limited, moved[4][: len(limited)], positions, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for on_gpu, on_cpu in zip(got, expected):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu)


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("top", [0, 1, 5])
def test_token_logprobs_equal_log_softmax(top: int) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(7, 30) * 4, torch.randint(0, 30, (7, 3))
    expected = logits.log_softmax(-1)
    got = TokenOps().token_logprobs(logits, tokens, top)
    torch.testing.assert_close(got.logprob, expected.gather(1, tokens))
    values, ids = expected.topk(top)
    torch.testing.assert_close(got.top_values, values)
    assert torch.equal(got.top_ids, ids)
