"""A runner without a model: it executes plans on pools that record what was written to them.

It is the oracle for the scheduler and the cache. A KV slot records which token at which position
was written to it, and a state slot records the tokens that its state covers. Before a slot is read,
its record is compared with what the request needs. The "model" is a hash of the token prefix, so a
text depends only on the prompt and the seed. Any use of a wrong slot raises an AssertionError.

It can also return impossible results for requests with certain seeds (``Fault``).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from fake_drafter import FakeDrafter

from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.core import SamplingParams
from mamba_eagle.drafters import needs_history
from mamba_eagle.message import (
    DecodeBatch,
    FirstChunk,
    Generate,
    JournalPart,
    Plan,
    PrefillItem,
    Ready,
    RequestOutput,
    RequestResult,
    StepResult,
    StepTrace,
    TokenLogprob,
)
from mamba_eagle.scheduler.scheduler import Scheduler

VOCAB = 50
EOS = 7


def noise(*values: object) -> int:
    return crc32(repr(values).encode())


def next_token(prefix: tuple[int, ...], sampling: SamplingParams, num_output: int) -> int:
    """The model's token, which depends on prefix and seed alone. It is never a stop token before
    min_new_tokens."""
    token = noise(prefix, sampling.seed) % VOCAB
    stops = sampling.stop_tokens((EOS,))
    while num_output < sampling.min_new_tokens and token in stops:
        token = (token + 1) % VOCAB
    return token


def expected_text(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The output of a request that is served alone, one token per step, without a cache."""
    tokens: list[int] = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_new_tokens:
        tokens.append(next_token(tuple(tokens), sampling, len(tokens) - len(prompt)))
        if tokens[-1] in sampling.stop_tokens((EOS,)):
            break
    return tokens[len(prompt) :]


def embedding_of(prompt: list[int]) -> bytes:
    return str(prompt).encode()


@dataclass
class Slot:
    """A request as the runner sees it."""

    state_slot: int
    sampling: SamplingParams
    output_start: int
    tokens: list[int]  # all tokens; once prefill is finished, the last is not processed
    table: list[int] = field(default_factory=list)  # KV slots of processed tokens
    folded: int = 0
    decoding: bool = False
    ended: bool = False
    traced: bool = False
    logprobs: bool = False  # whether logprobs of output tokens are requested
    tracked: bool = True  # whether the drafter tracks the request
    pooling: str = ""
    trail: int = -1  # journal slot that keeps the rows of output tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.output_start


Spoil = Callable[[RequestResult, Slot], None]


class Fault(NamedTuple):
    """A fault in the results of one request, from some step on."""

    after: int  # output tokens that the request has before the first wrong result
    spoil: Spoil


def no_token(result: RequestResult, slot: Slot) -> None:
    """The runner's result if the logits are not finite, or all tokens are banned."""
    result.tokens, result.nodes, result.logprobs = [], [], []


def outside_the_vocabulary(result: RequestResult, slot: Slot) -> None:
    result.tokens[-1] = VOCAB


def more_tokens_than_nodes(result: RequestResult, slot: Slot) -> None:
    result.tokens = result.tokens + [1] * 100


def more_nodes_than_the_tree_has(result: RequestResult, slot: Slot) -> None:
    result.tokens = result.tokens + [1] * 100
    result.nodes = [*range(len(result.tokens))]


def the_root_twice(result: RequestResult, slot: Slot) -> None:
    result.nodes, result.tokens = [0, 0], [result.tokens[0], 1]


def no_logprobs(result: RequestResult, slot: Slot) -> None:
    result.logprobs = []


def stops_too_early(result: RequestResult, slot: Slot) -> None:
    result.tokens[-1] = EOS
    slot.ended = True


def goes_on_after_a_stop(result: RequestResult, slot: Slot) -> None:
    result.nodes, result.tokens = [0, 1], [EOS, 1]
    result.logprobs = result.logprobs[:1] * 2


class FakeRunner:
    """``rows``: tokens that a request can process before a fold must update its state slot.
    ``journals``: journal slots, whose rows record the prefix that ends with their token."""

    def __init__(
        self,
        kv_slots: int,
        state_slots: int,
        requests: int,
        context: int,
        rows: int = 9,
        journals: int = 0,
        journal_rows: int = 128,
        moves_anchors: bool = True,
        drafter_reads: str = "nothing",
        cohorts: int = 1,
    ):
        self.ready = Ready(
            cohorts=cohorts,
            max_kv_slots=kv_slots,
            max_state_slots=state_slots,
            max_running_requests=requests,
            context_length=context,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            max_journals=journals,
            journal_rows=journal_rows,
            moves_anchors=moves_anchors,
            drafter_reads=drafter_reads,
        )
        self.drafter = FakeDrafter(drafter_reads, recurrent=not moves_anchors)
        self.journals: list[dict[int, tuple[int, ...]]] = [{} for _ in range(journals)]
        self.replays = self.moves = 0
        self.rows = rows
        self.needs_history = False  # whether all requests need it, as with some drafters
        self.kv: list[tuple[int, int] | None] = [None] * kv_slots  # (token, position)
        self.state_slots: list[tuple[int, ...] | None] = [None] * state_slots
        self.slots: dict[int, Slot] = {}
        self.last_step = 0
        self.prefilled_tokens = 0
        self.drafts_accepted = True  # whether some drafts are accepted
        self.tracked = 0  # number of tracked requests so far
        self.decode_steps: Counter[str] = Counter()  # by name of the shape
        self.faults: dict[int, Fault] = {}  # by seed of the request
        self.tiered = False  # whether there are lower tiers of the cache

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def execute(self, plan: Plan) -> StepResult:
        prefill = self.begin(plan)
        decode = self.commit(plan.decode) if plan.decode is not None else []
        seconds = 1.0 + noise("seconds", plan.step) % 4 / 10  # no shape is clearly the best
        return StepResult(step=plan.step, prefill=prefill, decode=decode, decode_seconds=seconds)

    def begin(self, plan: Plan) -> list[RequestResult]:
        """All but what depends on the tokens that the target takes."""
        assert plan.step == self.last_step + 1, "plans must be numbered in order"
        self.last_step = plan.step
        assert plan.releases or plan.prefill or plan.decode or self.tiered, "an empty plan"
        for slot in plan.untrack:
            assert self.slots[slot].tracked, "untracked twice"
            self.slots[slot].tracked = False
            self.drafter.untrack(slot)
        for release in plan.releases:
            assert release.fold_to in (-1, release.keep_to)
            slot = self.slots[release.slot]
            kept = (release.keep_to, slot.state_slot, slot.tokens, slot.table)
            self.drafter.release(release.slot, *kept)
            self._release(release.slot, release.fold_to)
        self.leave(plan)
        for ended in plan.end_trails:
            assert self.slots[ended].trail >= 0, "a trail ended twice"
            self.slots[ended].trail = -1
        for move in plan.moves:
            if move.save >= 0:
                self.state_slots[move.save] = self.state_slots[move.state_slot]
            if move.save_journal >= 0:
                self.journals[move.save_journal] = dict(self.journals[move.journal.slot])
            state = self._replay(move.journal, move.state_slot)
            self.state_slots[move.state_slot] = state
            self.moves += 1
        self.come(plan)
        self.tracked += sum(item.is_first and item.track for item in plan.prefill)
        written: list[int] = []
        for item in plan.prefill:
            written += item.kv_slots
        if plan.decode is not None:
            written += [kv for nodes in plan.decode.kv_slots for kv in nodes]
        assert len(written) == len(set(written)), "a KV slot is written twice in one step"
        saved = [save.state_slot for item in plan.prefill for save in item.saves]
        saved += [slot.state_slot for slot in self.slots.values()]
        saved += [item.state_slot for item in plan.prefill if item.is_first]
        assert len(saved) == len(set(saved)), "a state slot has two writers"
        read = {item.source for item in plan.prefill if item.is_first}
        in_place = {
            item.state_slot
            for item in plan.prefill
            if item.is_first and item.source == item.state_slot
        }
        clash = read & set(saved) - in_place
        assert not clash, "a state slot is read and written in one step"
        # A real runner processes all prompts of a step in one pass, so none may read another's KV.
        fresh = set(written)
        for item in plan.prefill:
            prefix = item.first.prefix_kv_slots if item.first else ()
            assert not fresh & set(prefix), "prefix KV is written in the same step"
        prefill = [self._prefill(item) for item in plan.prefill]
        if plan.decode is not None:
            self._verify(plan.decode)
        return prefill

    def leave(self, plan: Plan) -> None:
        """Copies to lower tiers of the cache."""

    def come(self, plan: Plan) -> None:
        """Copies from them."""

    def _write_row(self, journal: int, prefix: tuple[int, ...]) -> None:
        self.journals[journal][(len(prefix) - 1) % self.ready.journal_rows] = prefix

    def _replay(self, part: JournalPart, state_slot: int) -> tuple[int, ...]:
        """The tokens of the state after a journal's part."""
        state = self.state_slots[state_slot]
        assert state is not None and len(state) == part.start < part.end
        for position in range(part.start, part.end):
            row = self.journals[part.slot].get(position % self.ready.journal_rows)
            assert row is not None and row[:-1] == state, "not the row of the next token"
            state = row
        return state

    def _release(self, slot_id: int, fold_to: int) -> None:
        slot = self.slots.pop(slot_id)
        if fold_to >= 0:
            assert slot.decoding, "only a request that has finished its prompt can be folded"
            self._check(slot)
            assert slot.folded <= fold_to <= len(slot.table)
            self.state_slots[slot.state_slot] = tuple(slot.tokens[:fold_to])

    def _check(self, slot: Slot) -> None:
        """The request's KV slots and state slot still hold its own tokens."""
        for position, kv in enumerate(slot.table):
            assert self.kv[kv] == (slot.tokens[position], position), (
                f"KV slot {kv} should hold token {slot.tokens[position]} of position {position}, "
                f"but holds {self.kv[kv]}"
            )
        state = self.state_slots[slot.state_slot]
        assert state == tuple(slot.tokens[: slot.folded]), "S0 is not the request's own"

    def _prefill(self, item: PrefillItem) -> RequestResult:
        assert len(item.token_ids) == len(item.kv_slots) > 0
        if item.first is not None:
            slot = self._start(item, item.first)
        else:
            slot = self.slots[item.slot]
            assert slot.state_slot == item.state_slot and not slot.decoding
            assert slot.tracked == item.track
        assert item.start == len(slot.table) == len(slot.tokens)
        self._check(slot)
        for token, kv in zip(item.token_ids, item.kv_slots):
            self.kv[kv] = (token, len(slot.tokens))
            slot.tokens.append(token)
            slot.table.append(kv)
        self.prefilled_tokens += len(item.token_ids)
        self.drafter.overwritten(item.kv_slots)
        self.drafter.observe(item, slot.tokens, slot.table)
        if item.journal is not None:
            rows = item.journal
            assert rows.end - rows.start <= self.ready.journal_rows
            for position in range(max(rows.start, item.start), min(rows.end, len(slot.tokens))):
                self._write_row(rows.slot, tuple(slot.tokens[: position + 1]))
        end, before = len(slot.tokens), item.start
        for save in item.saves:
            assert before < save.position <= end, "saves must increase within the chunk"
            before = save.position
            self.state_slots[save.state_slot] = tuple(slot.tokens[: save.position])
        slot.folded = end
        self.state_slots[slot.state_slot] = tuple(slot.tokens)
        result = RequestResult()
        if item.logprob_start >= 0:
            assert item.start <= item.logprob_start < end
            result.input_logprobs = [
                TokenLogprob(slot.tokens[position], -float(position))
                for position in range(item.logprob_start, end)
            ]
        if item.is_last:
            result.embedding = embedding_of(slot.tokens) if slot.pooling else b""
            slot.decoding, slot.trail = True, item.trail
            if slot.sampling.max_new_tokens > 0:
                self._emit(slot, result)
                self._spoil(slot, result, before=0)
            else:
                slot.ended = True
                result.tokens = [3]
        return result

    def _start(self, item: PrefillItem, first: FirstChunk) -> Slot:
        assert item.slot not in self.slots, f"request slot {item.slot} is taken"
        assert first.pooling != "mean" or item.start == 0
        prefix: tuple[int, ...] = ()
        if first.load_from >= 0:
            state = self.state_slots[first.load_from]
            assert state is not None
            if first.replay is not None:
                assert first.replay.end == item.start
                state = self._replay(first.replay, first.load_from)
                self.replays += 1
            assert len(state) == item.start
            prefix = state
        assert len(first.prefix_kv_slots) == item.start == len(prefix)
        slot = Slot(
            state_slot=item.state_slot,
            sampling=first.sampling,
            output_start=first.output_start,
            tokens=list(prefix),
            table=list(first.prefix_kv_slots),
            folded=item.start,
            traced=first.return_spec_trace,
            logprobs=first.return_logprob,
            pooling=first.pooling,
            tracked=item.track,
        )
        if first.sampling.reads_history or self.needs_history:
            assert first.history.tolist() == slot.tokens
        self.state_slots[item.state_slot] = prefix
        self.slots[item.slot] = slot
        return slot

    # ── decode ───────────────────────────────────────────────────────────────────────────────

    def _emit(self, slot: Slot, result: RequestResult) -> None:
        token = next_token(tuple(slot.tokens), slot.sampling, slot.num_output)
        if slot.logprobs:
            result.logprobs.append(TokenLogprob(token, -float(len(slot.tokens))))
        slot.tokens.append(token)
        result.tokens.append(token)
        is_stop = token in slot.sampling.stop_tokens((EOS,))
        slot.ended = is_stop or slot.num_output >= slot.sampling.max_new_tokens

    def _spoil(self, slot: Slot, result: RequestResult, before: int) -> None:
        """Spoil the result if a fault applies. before: output tokens before this step."""
        fault = self.faults.get(slot.sampling.seed)
        if fault is not None and before >= fault.after:
            fault.spoil(result, slot)

    def _verify(self, batch: DecodeBatch) -> None:
        """Read what is processed, and write the nodes."""
        assert len(batch.slots) == len(set(batch.slots)) == len(batch.kv_slots)
        self.decode_steps[batch.shape.name] += 1
        for slot, kv_slots in zip(batch.slots, batch.kv_slots):
            assert self.slots[slot].decoding and len(kv_slots) == batch.shape.nodes
            self.drafter.overwritten(kv_slots)
            for kv in kv_slots:
                self.kv[kv] = None  # rejected drafts are garbage
            self._check(self.slots[slot])

    def commit(self, batch: DecodeBatch) -> list[RequestResult]:
        """Of a step that has begun."""
        return [
            self._walk(self.slots[slot], batch, kv) for slot, kv in zip(batch.slots, batch.kv_slots)
        ]

    def _walk(self, slot: Slot, batch: DecodeBatch, kv_slots: list[int]) -> RequestResult:
        """Accept a path of the tree that depends on the prefix and seed alone."""
        assert all(self.kv[kv] is None for kv in kv_slots), "a step has lost its nodes"
        self._check(slot)
        if slot.ended:
            return RequestResult(folded=slot.folded)
        rng = random.Random(noise("accept", slot.tokens, slot.sampling.seed))
        drafts = rng.randint(0, min(batch.shape.depth, batch.shape.nodes - 1))
        drafts *= self.drafts_accepted
        path = [0, *sorted(rng.sample(range(1, batch.shape.nodes), drafts))]
        root, before = slot.tokens[-1], slot.num_output
        result = RequestResult()
        for node in path:
            self.kv[kv_slots[node]] = (slot.tokens[-1], len(slot.table))
            slot.table.append(kv_slots[node])
            if slot.trail >= 0:
                self._write_row(slot.trail, tuple(slot.tokens))
            result.nodes.append(node)
            self._emit(slot, result)
            if slot.ended:
                break
        if len(slot.table) - slot.folded > self.rows:
            slot.folded = len(slot.table)
            self.state_slots[slot.state_slot] = tuple(slot.tokens[: slot.folded])
        result.folded = slot.folded
        if slot.traced:
            result.trace = self._trace(root, batch.shape.nodes, result)
        self._spoil(slot, result, before)
        return result

    def _trace(self, root: int, num_nodes: int, walk: RequestResult) -> StepTrace:
        """A star of invalid tokens, with the accepted path."""
        tokens, parents = [root] + [-1] * (num_nodes - 1), [0] * num_nodes
        for parent, node, token in zip(walk.nodes, walk.nodes[1:], walk.tokens):
            tokens[node], parents[node] = token, parent
        scores = [-float(node) for node in range(num_nodes)]
        return StepTrace(tokens, parents, scores, walk.nodes, walk.tokens[-1])


class EarlierStage(FakeRunner):
    """A stage that begins each plan as soon as it is made, and commits it no sooner than another
    one needs it."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.begun: deque[Plan] = deque()
        self.answers: dict[int, list[RequestResult]] = {}  # by step
        self.most_begun = 0

    def take(self, plan: Plan) -> None:
        assert plan.after < plan.step
        self.commit_until(plan.after)
        open_slots = {slot for each in self.begun if each.decode for slot in each.decode.slots}
        named = plan.decode.slots if plan.decode is not None else []
        assert open_slots.isdisjoint(named), "a request goes on before its last step is committed"
        self.begin(plan)
        self.begun.append(plan)
        self.most_begun = max(self.most_begun, len(self.begun))

    def commit_until(self, step: int) -> None:
        while self.begun and self.begun[0].step <= step:
            plan = self.begun.popleft()
            batch = plan.decode
            self.answers[plan.step] = [] if batch is None else self.commit(batch)


class Server:
    """Scheduler and fake runner, with results as late as the overlap allows; checks the
    scheduler's integrity after every step."""

    def __init__(
        self,
        config,
        runner: FakeRunner,
        rng: random.Random | None = None,
        earlier: EarlierStage | None = None,
    ) -> None:
        """earlier: a pipeline stage before the one that answers."""
        self.earlier = earlier
        self.scheduler = Scheduler(config, runner.ready)
        self.runner = runner
        for each in (runner, earlier) if earlier is not None else (runner,):
            each.needs_history = needs_history(config.speculative_algorithm)
        self.rng = rng
        self.plans: deque[Plan] = deque()
        self.answers: dict[int, list[RequestResult]] = {}  # by step
        self.texts: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.input_logprobs: dict[str, list[TokenLogprob]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.traces: dict[str, list[StepTrace]] = {}
        self.embeddings: dict[str, bytes] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            before = self.last.get(output.rid)
            assert before is None or before.finish is None, "an output after the end"
            self.texts.setdefault(output.rid, []).extend(output.token_ids)
            self.input_logprobs.setdefault(output.rid, []).extend(output.input_logprobs)
            self.logprobs.setdefault(output.rid, []).extend(output.logprobs)
            if output.trace is not None:
                self.traces.setdefault(output.rid, []).append(output.trace)
            if output.embedding:
                assert output.rid not in self.embeddings, "sent twice"
                self.embeddings[output.rid] = output.embedding
            self.last[output.rid] = output

    def add(self, rid: str, prompt: list[int], sampling: SamplingParams, **rest) -> None:
        generate = Generate(rid=rid, token_ids=prompt, sampling=sampling, **rest)
        self.take(self.scheduler.add(generate))

    def step(self) -> None:
        """Send as many plans as the scheduler makes, then process one result."""
        while (plan := self.scheduler.plan()) is not None:
            self.plans.append(plan)
            if self.earlier is not None:
                self.earlier.take(plan)
            self.scheduler.check_integrity()
            if self.rng is not None and self.rng.random() < 0.3:
                break
        if self.plans:
            result = self.runner.execute(self.plans.popleft())
            self.answers[result.step] = result.decode
            self.take(self.scheduler.process(result))
            self.scheduler.check_integrity()

    def finish(self, max_steps: int = 20000) -> None:
        """Serve until the scheduler is idle, then check that no slot is held."""
        for _ in range(max_steps):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle, "requests are stuck: " + repr(self.scheduler.state())
        self.scheduler.check_integrity()
        slots, cache = self.scheduler.slots, self.scheduler.slots.cache
        assert slots.kv.num_free + cache.num_kv == slots.kv.total
        assert cache.evictable_kv == cache.num_kv
        if isinstance(cache, RadixCache) and self.runner.ready.drafter_reads != "nothing":
            self.runner.drafter.check(cache)
        assert slots.states.num_free + cache.num_states == slots.states.total
        assert slots.journals.num_free + cache.num_journals == slots.journals.total
        assert slots.requests.num_free == slots.requests.total
        assert not self.runner.slots
        if self.earlier is not None:
            self.earlier.commit_until(self.scheduler.stats.num_steps)
            assert self.earlier.answers == self.answers and not self.earlier.slots
