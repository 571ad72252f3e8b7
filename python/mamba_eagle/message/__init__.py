"""The whole protocol between the three processes.

    server    ── Generate, Abort, StopAt ────────────────────────▶ scheduler
    server    ── FlushCache, GetState, Profile ──────────────────▶ scheduler
    server    ── LoadAdapter, UnloadAdapter ────────────────────▶ scheduler
    server    ── Pause, Continue, ChangeModel ───────────────────▶ scheduler
    server    ── ExportPrefix, ImportPrefix ─────────────────────▶ scheduler
    server    ── OpenSession, CloseSession ──────────────────────▶ scheduler
    server    ── AskRanks ───────────────────────────────────────▶ scheduler, and on to the runner
    server    ◀── Ready, [RequestOutput], StateReply ───────────── scheduler
    server    ◀── ProfileReply, Done, RankReply, PrefixMoved ───── scheduler
    scheduler ── Plan, CompileGrammar, Profile, Shutdown ────────▶ runner
    scheduler ── ReadAdapter, DropAdapter, ChangeModel ──────────▶ runner
    scheduler ◀── Ready, StepResult, ProfileReply, Done ────────── runner
    scheduler ◀── GrammarCompiled, AdapterRead, RankReply ──────── runner
    server process ◀── Heartbeat ───────────────────── scheduler and runner

Two rules make slots safe without locks. Plans are executed in the order in which they are sent, so
a slot may be reused as soon as the last plan that uses it has been sent. And it is not known which
nodes a plan in flight will accept, so its requests keep their slots until its result has arrived.

Positions count tokens of prompt and output from 0. A request has *processed* a token when the
target has. The last token of a request is never processed: ``processed = total - 1``.
"""

from typing import Generic, Literal, TypeVar

import msgspec

from mamba_eagle.core import DEFAULT_VERSION, FinishReason, SamplingParams, TreeShape
from mamba_eagle.message.indices import Indices, indices


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of every message; the class name travels as its tag."""


class Answer(Message):
    """The answer to a question, whose ``call_id`` it repeats."""

    call_id: int
    problem: str = ""  # why nothing has changed


A = TypeVar("A")


class Question(Message, Generic[A], kw_only=True):
    """Answered by an ``A``, or by one of each rank."""

    call_id: int = 0  # given where it is asked (tokenizer/manager.py)


# ── server → scheduler ───────────────────────────────────────────────────────────────────────


class Returned(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What comes back beside a request's tokens."""

    return_logprob: bool = False
    top_logprobs: int = 0
    token_ids_logprob: list[int] = []  # tokens whose logprobs are wanted at each position
    return_spec_trace: bool = False
    pooling: str = ""  # how its hidden states become an embedding (core.POOLINGS); "": none
    return_hidden_states: bool = False
    return_routed_experts: bool = False


class Generate(Returned, tag=True, kw_only=True):
    """A prompt, checked and tokenized, and what to make of it. The server process has one for each
    prompt, and sends one for each of its samples."""

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    n: int = 1  # samples; 1 in what is sent
    seed: int | None = None  # None: a random one; ``sampling`` has a sample's own when it is sent
    logprob_start: int = -1  # first prompt position whose logprob is requested; -1: none
    routed_experts_start: int = 0  # position of the first token whose experts are read
    adapter: str = ""  # the name of one that was loaded; "": none
    priority: int = 0  # higher ones first
    arrival_time: float = 0.0  # time.time() when the HTTP request arrived
    # what the client asks of the prefix cache, none of which changes a text:
    salt: str = ""  # only requests of the same salt share what is cached
    pin_seconds: float = 0.0  # for this long the prompt is evicted after all that is not pinned
    checkpoints: list[int] = []  # prompt positions at which to save the state
    session: str = ""  # while it is open, what its last request has run is pinned

    def sample_rid(self, i: int) -> str:
        """The name of sample i of n."""
        return self.rid if self.n == 1 else f"{self.rid}_{i}"


class Abort(Message):
    """End the request with this exact id."""

    rid: str


class StopAt(Message):
    """End a request at a stop string: its output is its first ``num_tokens`` output tokens."""

    rid: str
    num_tokens: int
    matched: str  # the stop string


class FlushCache(Question["Done"]):
    """Empty the prefix cache, unless requests run or wait."""


class GetState(Question["StateReply"]):
    """Gauges and counters, and what the prefix cache holds: the first ``max_nodes`` nodes of its
    tree, with up to ``max_tokens`` of their tokens each."""

    max_nodes: int = 0
    max_tokens: int = 0


class Profile(Question["ProfileReply"]):
    """Record the next ``steps`` steps in a file at ``path``, or, with 0 steps, end what is being
    recorded; goes on to the runner, which answers."""

    path: str = ""
    steps: int = 0


class ExportPrefix(Question["PrefixMoved"]):
    """Write what the prefix cache has of a prompt to a new file."""

    token_ids: list[int]
    salt: str
    path: str


class ImportPrefix(Question["PrefixMoved"]):
    """Take what another server has exported."""

    path: str


class OpenSession(Question["Done"]):
    name: str
    seconds: float  # without a request, after which it ends


class CloseSession(Question["Done"]):
    name: str


class LoadAdapter(Question["Done"]):
    """Serve the adapter in the folder ``path`` under ``name`` from now on, in place of another of
    that name."""

    name: str
    path: str


class UnloadAdapter(Question["Done"]):
    """Serve it no more; requests that have begun end with it."""

    name: str


# What becomes of running requests: "keep" holds them in place, with their rows and states;
# "retract" sends them back to the queue; "wait" lets them end and holds those that come later.
PauseMode = Literal["keep", "retract", "wait"]


class Pause(Question["Done"]):
    """No request begins until a Continue; answered once no step is under way."""

    mode: PauseMode


class Continue(Question["Done"]):
    """Ends a pause, if there is one."""


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Folders to read weights from; "": as before."""

    target: str = ""
    drafter: str = ""
    version: str = ""  # what replies call them from then on; "": as before
    received: bool = False  # the folders hold what groups have sent; all else is as before


class ChangeModel(Question["Done"]):
    """Load other weights, give memory back, or take it again; goes on to the runner once no request
    holds a slot and the prefix cache is empty."""

    weights: Weights | None = None
    release: list[str] = []  # tags (core.MEMORY_TAGS); memory is free while one is released
    resume: list[str] = []


class JoinGroup(msgspec.Struct, tag=True, kw_only=True):
    """Meet a trainer, which is rank 0, and other ranks in a group of torch.distributed."""

    group: str
    host: str  # where the trainer's store listens
    port: int
    size: int  # ranks, the trainer's among them
    first_rank: int  # of this engine's ranks
    backend: str  # nccl or gloo
    seconds: float  # that joining, and each tensor later, may take


class LeaveGroup(msgspec.Struct, tag=True):
    """Leave a group."""

    group: str


class TensorInfo(msgspec.Struct, array_like=True):
    """A tensor that a trainer is about to send."""

    name: str  # as the model's checkpoint has it
    dtype: str  # as torch names it
    shape: list[int]


class TakeTensors(msgspec.Struct, tag=True, kw_only=True):
    """Receive the trainer's broadcasts and write them to a folder. Names, shapes and dtypes are
    compared with the checkpoint that is served before the first one; where they do not fit, or
    something fails later, the group is left."""

    group: str
    folder: str
    tensors: list[TensorInfo]
    is_drafter: bool
    # > 0: several travel side by side as bytes, until they are more than that
    chunk_bytes: int


class SumWeights(msgspec.Struct, tag=True):
    """Checksums of the weights as each rank holds them."""


RankTask = JoinGroup | LeaveGroup | TakeTensors | SumWeights


class AskRanks(Question["list[RankReply]"]):
    """Done by each rank beside its steps."""

    task: RankTask


# ── scheduler → server ───────────────────────────────────────────────────────────────────────


class TokenLogprob(msgspec.Struct, array_like=True):
    """One position: the token's own logprob and the best ones, both before penalties and
    filters, and before the temperature unless --logprobs-at-temperature is set."""

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[float, int]] = []  # (logprob, token id), best first
    named: list[float] = []  # of the request's token_ids_logprob


class StepTrace(msgspec.Struct, array_like=True):
    """One decode step of one request: the tree of T nodes, and the accepted path.

    Node 0 is the root, the last token before the step. In a plain step the tree is its root.
    """

    tokens: list[int]  # [T]
    parents: list[int]  # [T]; node indices, each lower than the node's own; the root's is 0
    scores: list[float]  # [T]; log-probability of the path under the drafter; the root's is 0
    accepted: list[int]  # nodes on the accepted path, the root first
    bonus: int  # the target's token at the end of the path
    refused: list[int] = []  # nodes that the request's grammar does not allow, and those below them


class RoutedExperts(msgspec.Struct, array_like=True):
    """The experts of consecutive tokens of a request, in each layer."""

    start: int  # position of the first one; what is said of a position again replaces it
    count: int
    experts: bytes  # [count, layers, k] int32, little-endian; 0 in layers without experts


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The output of a request since its previous RequestOutput."""

    rid: str
    token_ids: list[int] = []
    finish: FinishReason | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    # if the server speculates, totals over all decode steps of the request, plain ones included:
    verify_steps: int = 0
    accepted_drafts: int = 0  # drafted tokens that were accepted
    proposed_drafts: int = 0  # most that could have been accepted: the sum of the trees' depths
    accept_histogram: list[int] = []  # [i]: steps that accepted i drafted tokens
    retractions: int = 0
    queue_time: float = 0.0  # seconds between arrival and first prefill
    logprobs: list[TokenLogprob] = []  # one per token of token_ids, if requested
    input_logprobs: list[TokenLogprob] = []  # once, with the first output, if requested
    trace: StepTrace | None = None  # of the step that generated token_ids, if requested
    embedding: bytes = b""  # with the first output, if requested: float32, little-endian
    weight_version: str = DEFAULT_VERSION  # of the weights that made token_ids
    experts: list[RoutedExperts] = []  # of tokens that the target has processed, if requested
    hidden: list[bytes] = []  # if requested, what each of token_ids was sampled from: a hidden
    # state after the final norm, float32, little-endian; of a prompt alone: its last token's


class ShapeUse(msgspec.Struct, kw_only=True):
    """Statistics of the decode steps of one tree shape since the start, over all batch sizes."""

    steps: int
    accept_length: float  # mean tokens per request and step
    step_ms: float  # mean milliseconds per step


class SpeculationState(msgspec.Struct, kw_only=True):
    """The tree shapes in use, by name: "plain", or topk x depth x nodes as in "2x5x8"."""

    adaptive: bool = False
    current: str = "plain"  # shape of the latest decode step
    # the drafter is disabled: new requests are untracked, except for probes (JSON: given_up)
    disabled: bool = msgspec.field(name="given_up", default=False)
    shapes: dict[str, ShapeUse] = {}


class CacheUse(msgspec.Struct, kw_only=True):
    """What the prefix cache did since the start. The kind of a state is why it was saved."""

    hits: dict[str, int] = {}  # requests that continued from a state, by its kind
    saved_tokens: dict[str, int] = {}  # prompt tokens that they need not run
    evicted_states: int = 0
    evicted_tokens: int = 0  # KV slots
    loaded_tokens: dict[str, int] = {}  # prompt tokens that came from lower tiers, by tier
    lost_copies: dict[str, int] = {}  # what could not be copied or read there, by tier


class PrefixMoved(Answer):
    """Answers an ExportPrefix or an ImportPrefix."""

    tokens: int = 0  # of the prefix; a prompt that begins with them need not run them again


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
    token_ids: list[int] = []  # the first ones, if they were asked for


class StateReply(Answer, kw_only=True):
    """For /server_info, /get_load, /metrics and /cache."""

    state: dict[str, float]
    speculation: SpeculationState
    cache: CacheUse = msgspec.field(default_factory=CacheUse)
    nodes: list[CacheNode] = []  # parents before their children


class ProfileReply(Answer, kw_only=True):
    """The runner's, which the scheduler passes on."""

    path: str = ""  # of the trace, which is whole once a Profile of 0 steps was answered
    steps: int = 0  # that it holds so far


class Done(Answer):
    """Done, unless it names a problem: then all is as it was. Of a ChangeModel, the runner's."""


class RankReply(Answer, kw_only=True):
    """A rank's own."""

    rank: int
    checksums: dict[str, str] = {}  # hexadecimal digits, by tensor


# ── scheduler → runner ───────────────────────────────────────────────────────────────────────


class StateSave(msgspec.Struct, array_like=True):
    """Write the state after the request's first ``position`` tokens to a state slot."""

    position: int
    state_slot: int


class JournalPart(msgspec.Struct, array_like=True):
    """Rows of the tokens [start, end) of a request, in a journal slot."""

    slot: int
    start: int
    end: int


class AnchorMove(msgspec.Struct, array_like=True):
    """Advance the state in a state slot, which is that after ``journal.start`` tokens, by rows."""

    journal: JournalPart
    state_slot: int
    save: int = -1  # >= 0: copy the state to this state slot before
    save_journal: int = -1  # >= 0: copy the journal slot to this one before


class DraftStart(msgspec.Struct, array_like=True):
    """The drafter has followed the cached prefix up to ``position`` only, before the target's
    start, and processes the tokens between as well."""

    position: int
    token_ids: Indices  # of [position, start)
    state_slot: int = -1  # with its own state at ``position``; -1: it has none or needs none


class DraftCopy(msgspec.Struct, array_like=True):
    """The drafter's keys and values of some tokens, for KV slots of the prefix cache that lack
    them."""

    sources: Indices  # KV slots
    targets: Indices


class FirstChunk(Returned, kw_only=True):
    """What the runner is to know of a request, and what precedes its first chunk. With the pooling
    "mean" it starts at position 0."""

    sampling: SamplingParams
    output_start: int  # prompt length as the client counts it: tokens from here on are output
    # (a retracted request prefills its own output again)
    load_from: int = -1  # state slot with the state at the chunk's start; -1: that is 0
    replay: JournalPart | None = None  # rows up to the start: the state is that at replay.start
    draft_start: DraftStart | None = None
    # of all tokens before the chunk: their KV slots, and, if sampling, a grammar or the drafter
    # needs them, the tokens
    prefix_kv_slots: Indices = msgspec.field(default_factory=indices)
    history: Indices = msgspec.field(default_factory=indices)
    logprob_temperature: float = 1.0  # that divides logits of the output before logprobs are taken
    adapter: int = -1  # its slot; -1: none
    salted: bool = False  # a drafter must not draft for others from its text


class PrefillItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Process prompt tokens [start, start + len(token_ids)) of the request in ``slot``."""

    slot: int  # request slot: row buffer, KV slot table, sampling state
    state_slot: int  # the request's own state slot, S0; after the first chunk it holds the state
    # at ``start``
    start: int
    token_ids: Indices
    kv_slots: Indices  # one per token
    saves: list[StateSave] = []  # positions in (start, start + len], increasing
    first: FirstChunk | None = None  # None: chunks of this request came before
    is_last: bool = True  # sample the first output token after this chunk
    track: bool = True  # the drafter tracks the request
    draft_copy: DraftCopy | None = None  # once the drafter has processed the chunk
    journal: JournalPart | None = None  # keep the rows of these prompt tokens
    trail: int = -1  # journal slot that keeps the rows of the output
    logprob_start: int = -1  # position of the first requested logprob in this chunk; -1: none

    @property
    def is_first(self) -> bool:
        return self.first is not None

    @property
    def source(self) -> int:
        """The state slot with the state that the chunk starts from; -1: the empty one's."""
        return self.state_slot if self.first is None else self.first.load_from


class DecodeBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Draft, verify and accept one tree per request."""

    shape: TreeShape
    slots: list[int]  # [requests] request slots
    kv_slots: list[list[int]]  # [requests][nodes]


class AdapterCopy(msgspec.Struct, array_like=True):
    """Copy an adapter that was read to a slot on the device."""

    slot: int
    number: int


class Blocks(msgspec.Struct, array_like=True):
    """What a copy reads or writes in one tier of the prefix cache, of consecutive tokens.

    On the device these are slots; in a lower tier they are units of its memory, of which a state
    and a journal take several.
    """

    tier: int  # 0: the device, 1: host memory, 2: disk, 3: a file for or from another server
    kv: Indices  # one per token; empty: no keys and values are copied
    state: Indices  # empty: no state
    journal: Indices  # empty: no rows


class TierCopy(msgspec.Struct, array_like=True):
    """Copy blocks of the prefix cache to the tier above or below.

    What leaves the device is read after the plan's releases and before all else is written; what
    comes to it is written after the plan's moves.
    """

    number: int
    source: Blocks
    target: Blocks
    label: bytes = b""  # to disk or a file: what is said of it there
    path: str = ""  # of the file


class Release(msgspec.Struct, array_like=True):
    """The request in ``slot`` has left."""

    slot: int  # request slot
    fold_to: int = -1  # >= 0: first bring its state slot to that position, since the prefix cache
    # keeps it; -1: its state is discarded
    keep_to: int = -1  # >= 0: the prefix cache keeps that many of its first tokens


class Plan(Message):
    """One step: releases first, then anchors, then prefill, then decode.

    A plan without prompts and trees is answered once one of the copies that are under way has
    ended, or after a moment.

    It needs the results of all steps up to ``after``, in the tables; steps between that one and
    this may still be on their way through the pipeline stages. With one stage that is of no
    consequence: plans are executed one after the other.
    """

    step: int
    after: int = -1  # never decreases from plan to plan; -1: all steps before
    untrack: list[int] = []  # request slots that become untracked, before everything else
    releases: list[Release] = []
    adapters: list[AdapterCopy] = []  # to slots that no request reads now
    end_trails: list[int] = []  # request slots whose output is no longer kept
    copies: list[TierCopy] = []
    arrived: list[int] = []  # copies that have ended: this plan and later ones may use their blocks
    empties_disk: bool = False  # the disk tier forgets all, before any copy
    moves: list[AnchorMove] = []
    prefill: list[PrefillItem] = []
    decode: DecodeBatch | None = None


class Shutdown(Message):
    """Exit; there is no reply."""


class CompileGrammar(Message):
    """Compile a grammar beside the steps; the answer is a GrammarCompiled of the same text."""

    text: str


class ReadAdapter(Message):
    """Read an adapter beside the steps; each rank answers with an AdapterRead."""

    number: int
    path: str


class DropAdapter(Message):
    """Forget an adapter that no later plan copies."""

    number: int


# ── runner → scheduler ───────────────────────────────────────────────────────────────────────

# What a drafter must be given of a prefix that it has not followed.
DrafterReads = Literal["nothing", "tokens", "features"]


class TierSizes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lower tiers of the prefix cache, in units of memory; the same on all ranks."""

    host_units: int = 0  # 0: there are no lower tiers
    disk_units: int = 0
    kv_units: int = 0  # of a token: 1, or 0 if the model has no keys and values
    state_units: int = 1  # of a state
    journal_units: int = 1  # of a journal slot
    disk_log: str = ""  # file that says what the disk has


class Ready(Message):
    """The model is loaded: what is served, and what there is room for. The scheduler's says that
    the engine accepts requests."""

    max_kv_slots: int
    max_state_slots: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    details: dict[str, str | int | float] = {}  # model facts and sizes, for /server_info
    # for the scheduler:
    rank: int = 0
    chunked_prefill_size: int = 1024  # most prompt tokens per step, unless a flag sets it
    max_journals: int = 0  # journal slots
    journal_rows: int = 0  # of each
    moves_anchors: bool = False  # whether an anchor can be brought forward by rows alone
    drafter_reads: DrafterReads = "nothing"
    cohorts: int = 1  # groups of requests whose decode steps it executes at the same time
    tiers: TierSizes = TierSizes()


class RequestResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step has made for one request, of a chunk of its prompt or of its tree.

    ``tokens`` are already cut after a stop token and at max_new_tokens. There is at most one after
    a prompt's last chunk, and none after the others; of a tree there are as many as ``nodes``. Both
    are empty if the request had ended in the previous step, or if no token could be sampled: the
    scheduler then fails it.
    """

    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []  # one per token, if requested
    problem: str = ""  # what the request's grammar says if no token could be sampled
    experts: bytes = b""  # of the chunk or the accepted nodes, if requested, as in RoutedExperts
    # if requested, as in RequestOutput: of the last chunk's last token, or one per node
    hidden: list[bytes] = []
    # of a chunk
    input_logprobs: list[TokenLogprob] = []  # from logprob_start to the end of the chunk
    embedding: bytes = b""  # after the last chunk, if requested: float32, little-endian
    # of a tree
    nodes: list[int] = []  # those on the accepted path, the root (0) first
    folded: int = 0  # position of the state in the request's state slot after this step
    trace: StepTrace | None = None  # if requested


class GrammarCompiled(Message):
    """A grammar is compiled, or cannot be: then its requests say so when they are served."""

    text: str


class AdapterRead(Message):
    """A rank has read an adapter, or says what is wrong with it."""

    number: int
    problem: str = ""


class StepResult(Message):
    """Answers a Plan; lists are in the plan's order."""

    step: int
    prefill: list[RequestResult] = []
    decode: list[RequestResult] = []
    seconds: float = 0.0  # the runner's time for the whole step
    decode_seconds: float = 0.0  # the part of it for drafting, verifying and accepting; 0: none was
    idle_seconds: float = 0.0  # between the end of the previous step and the start of this one
    num_compiled: int = 0  # kernels and graphs that the runner made since it was ready: none
    copied: list[int] = []  # copies that have ended since the last result
    lost: list[int] = []  # those that failed: their blocks are not in the target tier
    problems: dict[int, str] = {}  # of those to and from files of other servers: why


# ── scheduler and runner → watchdog of the server process ────────────────────────────────────


class Heartbeat(Message):
    """Sent every BEAT_SECONDS; the watchdog concludes from it that a process still works.

    The scheduler sends it from its main loop, the runner from a thread of its own: a step may
    take minutes.
    """

    role: str  # "scheduler" or "runner"
    rank: int = 0  # of several runners
    busy: bool = False  # scheduler: requests run or wait; runner: it has a plan to execute
    steps: int = 0  # scheduler: planned since the start; runner: finished since the start
    stuck_seconds: float = 0.0  # runner: how long its main thread has shown no sign of progress


BEAT_SECONDS = 0.5

OfCache = FlushCache | GetState | ExportPrefix | ImportPrefix | OpenSession | CloseSession
OfModel = Profile | AskRanks | LoadAdapter | UnloadAdapter | Pause | Continue | ChangeModel
Asked = OfCache | OfModel
ToScheduler = Generate | Abort | StopAt | Asked
ToServer = Ready | list[RequestOutput] | StateReply | ProfileReply | Done | RankReply | PrefixMoved
BesideSteps = CompileGrammar | ReadAdapter | DropAdapter | Profile | AskRanks
ToRunner = Plan | Shutdown | ChangeModel | BesideSteps
FromRunner = Ready | StepResult | ProfileReply | GrammarCompiled | AdapterRead | Done | RankReply
ToWatchdog = Heartbeat
