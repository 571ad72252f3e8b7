"""The whole protocol between the processes.

    tokenizer ── Generate, Abort, StopAt ────────────────────────▶ scheduler
    tokenizer ── FlushCache, GetState, GetCache ─────────────────▶ scheduler
    tokenizer ◀── Ready, Outputs, FlushReply, StateReply, CacheReply ─ scheduler
    scheduler ── Plan, Shutdown ─────────────────────────────────▶ runner
    scheduler ◀── RunnerReady, StepResult ──────────────────────── runner

Two rules make slots safe without locks. Plans run in the order in which they were sent, so an
index may be given away again as soon as the plan that last uses it has been sent. And what a plan
in flight will accept is not known, so its request keeps its slots until its result is back.

Positions count tokens of prompt and output from 0. A request has *run* a token when the target
model has processed it; the last token of a request is never run: ``run = total - 1``.
"""

from __future__ import annotations

import msgspec

from mamba_eagle.core import FinishReason, SamplingParams, TreeShape
from mamba_eagle.message.indices import Indices, indices


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of every message; the class name travels as its tag."""


# ── tokenizer → scheduler ────────────────────────────────────────────────────────────────────


class CacheHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asks of the prefix cache. None of it changes a text."""

    salt: str = ""  # only requests of the same salt share what is cached
    pin_seconds: float = 0.0  # for so long the prompt is evicted after all that is not pinned
    positions: list[int] = []  # of the prompt at which its state is to be saved


class Generate(Message):
    """One sample of one prompt (n > 1 arrives as n messages)."""

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    logprob_start: int = -1  # first prompt position whose logprob is wanted; -1: none
    top_logprobs: int = 0
    return_spec_trace: bool = False
    cache: CacheHints = CacheHints()
    arrival_time: float = 0.0  # time.time() at the HTTP side


class Abort(Message):
    """End one request, by its exact id, or all of them (rid None)."""

    rid: str | None = None


class StopAt(Message):
    """A stop string is complete: the request's output is its first ``num_tokens`` tokens."""

    rid: str
    num_tokens: int
    matched: str


class FlushCache(Message):
    call_id: int


class GetState(Message):
    call_id: int


class GetCache(Message):
    """What the prefix cache holds, and the first ``max_nodes`` nodes of its tree."""

    call_id: int
    max_nodes: int


# ── scheduler → tokenizer ────────────────────────────────────────────────────────────────────


class Ready(Message):
    """The engine can take requests; what it can hold."""

    max_kv_slots: int
    max_state_slots: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    scheduler_pid: int
    runner_pid: int
    details: dict[str, str | int | float] = {}  # model facts and sizes, for /server_info


class TokenLogprob(msgspec.Struct, array_like=True):
    """One position: the token's own logprob and the best ones, both before any filter."""

    token_id: int
    logprob: float | None  # None: the first token of a prompt has none
    top: list[tuple[float, int]] = []


class StepTrace(msgspec.Struct, array_like=True):
    """What one decode step did for one request: T nodes drafted, a path of them accepted.

    Node 0 is the root, the last token before the step. A plain step is a tree of its root alone.
    """

    tokens: list[int]  # [T]
    parents: list[int]  # [T]; node indices, each below the node's own; the root's is 0
    scores: list[float]  # [T]; log-probability of the path under the drafter; the root's is 0
    accepted: list[int]  # nodes on the accepted path, the root first
    bonus: int  # the target's token at the end of the path


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came since the last one for this request."""

    rid: str
    token_ids: list[int] = []
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    # of decode steps, plain ones among them, if the server speculates:
    verify_steps: int = 0
    accepted_drafts: int = 0  # drafted tokens that were accepted, of …
    proposed_drafts: int = 0  # … so many: the depths of the trees
    accept_histogram: list[int] = []  # [i]: steps that accepted i drafted tokens
    retractions: int = 0
    queue_time: float = 0.0  # seconds between arrival and first prefill
    logprobs: list[TokenLogprob] = []  # one a token of token_ids, if asked for
    input_logprobs: list[TokenLogprob] = []  # once, with the first output
    trace: StepTrace | None = None  # of the step that made token_ids, if asked for


class Outputs(Message):
    outputs: list[RequestOutput]


class FlushReply(Message):
    call_id: int
    ok: bool
    message: str = ""


class ShapeUse(msgspec.Struct, kw_only=True):
    """What the decode steps of one tree shape did since the start, whatever their batch sizes."""

    steps: int
    accept_length: float  # tokens of a request in a step
    step_ms: float  # mean time of a step


class SpeculationState(msgspec.Struct, kw_only=True):
    """What is drafted. Shapes go by name: "plain", or topk x steps x nodes as in "2x5x8"."""

    adaptive: bool = False
    current: str = "plain"  # the last step's
    # /server_info calls it given_up: drafts are of no use, and new requests are not tracked
    disabled: bool = msgspec.field(name="given_up", default=False)
    shapes: dict[str, ShapeUse] = {}


class CacheUse(msgspec.Struct, kw_only=True):
    """What the prefix cache did since the start. The kind of a state is why it was saved."""

    hits: dict[str, int] = {}  # requests that continued from a state, by its kind
    saved_tokens: dict[str, int] = {}  # prompt tokens that they need not run
    evicted_states: int = 0
    evicted_tokens: int = 0  # KV slots


class StateReply(Message):
    """Gauges and counters of the scheduler, for /server_info, /get_load and /metrics."""

    call_id: int
    state: dict[str, float]
    speculation: SpeculationState
    cache: CacheUse = msgspec.field(default_factory=CacheUse)


class CacheNode(msgspec.Struct, kw_only=True):
    """A run of tokens in the prefix cache's tree: [start, start + tokens) of some prefixes."""

    parent: int  # index in the list; -1: none, it starts at position 0
    start: int
    tokens: int
    kind: str  # of the state after its last token (StateKind); "": none
    evicted_first: bool  # that state is spare and was never hit
    locks: int  # requests that read it
    age: float  # seconds since a prompt or an output last ran through it
    children: int


class CacheReply(Message):
    """Numbers alone: neither tokens nor text."""

    call_id: int
    state: dict[str, float]  # as in StateReply
    cache: CacheUse
    nodes: list[CacheNode]  # parents before their children


# ── scheduler → runner ───────────────────────────────────────────────────────────────────────


class StateSave(msgspec.Struct, array_like=True):
    """Write the state after the first ``position`` tokens of the request into a slot."""

    position: int
    state_slot: int


class PrefillItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Run prompt tokens [start, start + len(token_ids)) of the request in ``slot``."""

    slot: int  # request slot: row buffer, slot table, sampling state
    state_slot: int  # the request's own state slot, S0; holds its state at ``start`` after
    # the first chunk
    start: int
    token_ids: Indices
    kv_slots: Indices  # one per token
    saves: list[StateSave] = []  # positions in (start, start + len], increasing
    is_first: bool = True
    is_last: bool = True  # sample the first output token after this chunk
    # of the first chunk only:
    load_from: int = -1  # state slot with the state at ``start``; -1: start is 0
    prefix_kv_slots: Indices = msgspec.field(default_factory=indices)  # KV slots of [0, start)
    sampling: SamplingParams | None = None
    output_start: int = 0  # prompt length as the client counts it: tokens from here on are output
    # (a retracted request prefills its own output again)
    # all tokens of [0, start), if sampling or the drafter needs them:
    history: Indices = msgspec.field(default_factory=indices)
    return_spec_trace: bool = False
    # of every chunk:
    track: bool = True  # the drafter takes it in
    logprob_start: int = -1  # absolute position of the first wanted logprob in this chunk; -1: none
    top_logprobs: int = 0
    return_logprob: bool = False


class DecodeBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Draft, verify and accept one tree for each request. Row i of kv_slots: node i's slot."""

    shape: TreeShape
    slots: list[int]
    kv_slots: list[list[int]]  # [requests][nodes]


class Release(msgspec.Struct, array_like=True):
    """The request in ``slot`` has left. ``fold_to`` >= 0: first bring its state slot to that
    position (from then on it belongs to the cache); -1: its state is not wanted."""

    slot: int
    fold_to: int = -1


class Plan(Message):
    """One step: releases first, then prefill, then decode."""

    step: int
    untrack: list[int] = []  # before all: slots of requests that the drafter may forget
    releases: list[Release] = []
    prefill: list[PrefillItem] = []
    decode: DecodeBatch | None = None


class Shutdown(Message):
    pass


# ── runner → scheduler ───────────────────────────────────────────────────────────────────────


class RunnerReady(Message):
    max_kv_slots: int
    max_state_slots: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    pid: int
    chunked_prefill_size: int = 1024  # most prompt tokens in one step
    details: dict[str, str | int | float] = {}


class PrefillResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``token`` is the first output token, -1 unless the chunk was the last."""

    token: int = -1
    logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] = []  # positions logprob_start … end of the chunk


class DecodeResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A walk from the root: ``nodes`` were accepted, ``tokens`` are new; as many of each.

    Both are already cut after a stop token and at max_new_tokens. Both are empty for a request
    that had ended in the step before.
    """

    tokens: list[int] = []
    nodes: list[int] = []  # tree nodes on the accepted path, the root (0) first
    folded: int = 0  # position of the request's state slot after this step
    logprobs: list[TokenLogprob] = []
    trace: StepTrace | None = None  # if asked for


class StepResult(Message):
    """Answers a Plan; lists are in the plan's order."""

    step: int
    prefill: list[PrefillResult] = []
    decode: list[DecodeResult] = []
    seconds: float = 0.0  # the runner's time for the step
    decode_seconds: float = 0.0  # of it, for drafting, verifying and accepting
    idle_seconds: float = 0.0  # between the end of the last step and the beginning of this one


ToScheduler = Generate | Abort | StopAt | FlushCache | GetState | GetCache
ToTokenizer = Ready | Outputs | FlushReply | StateReply | CacheReply
ToRunner = Plan | Shutdown
FromRunner = RunnerReady | StepResult
