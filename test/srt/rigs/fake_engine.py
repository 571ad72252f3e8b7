"""The scheduler's side of the pipes in a thread: scripted tokens instead of a model.

``script(request)`` gives the tokens of a request and its finish reason; ``chunk`` tokens go into
each message. A request whose script is None stays silent until it is aborted.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from tiny_tokenizer import spell

from mamba_eagle.core import FinishReason
from mamba_eagle.message import (
    Abort,
    CacheNode,
    CacheUse,
    Done,
    FlushCache,
    Generate,
    GetState,
    LoadAdapter,
    Profile,
    ProfileReply,
    Ready,
    RequestOutput,
    ShapeUse,
    SpeculationState,
    StateReply,
    StepTrace,
    StopAt,
    TokenLogprob,
    UnloadAdapter,
)
from mamba_eagle.message.channel import Receiver, Sender

Script = Callable[[Generate], "tuple[list[int], FinishReason] | None"]


CACHE_USE = CacheUse(
    hits={"tail": 3, "output": 1},
    saved_tokens={"tail": 50, "output": 20},
    evicted_states=2,
    evicted_tokens=30,
)
CACHE_STATE = {
    "max_total_num_tokens": 100.0,
    "num_free_kv_slots": 40.0,
    "num_cached_tokens": 50.0,
    "num_locked_tokens": 20.0,
    "num_pinned_tokens": 10.0,
    "num_pinned_checkpoints": 2.0,
    "max_mamba_cache_size": 8.0,
    "num_free_checkpoints": 3.0,
    "num_cached_checkpoints": 4.0,
    "num_used_checkpoints": 1.0,
    "max_journals": 4.0,
    "num_free_journals": 1.0,
    "num_cached_journals": 2.0,
    "prompt_tokens_total": 140.0,
    "cached_tokens_total": 70.0,
}
NODES = [
    CacheNode(
        parent=-1, start=0, tokens=20, kind="tail", evicted_first=False, locks=1, age=2, children=3
    ),
    CacheNode(
        parent=0, start=20, tokens=5, kind="", evicted_first=False, locks=0, age=90, children=0
    ),
    CacheNode(
        parent=0, start=20, tokens=9, kind="spare", evicted_first=True, locks=0, age=9e5, children=0
    ),
]


def length_of(tokens: list[int]) -> FinishReason:
    return FinishReason(kind="length", length=len(tokens))


class FakeEngine:
    def __init__(
        self, socket_dir: str, script: Script, chunk: int = 1, vocab_size: int = 300, **ready: Any
    ) -> None:
        self.script = script
        self.chunk = chunk
        self.pause = 0.0  # seconds between messages
        self.received: list[Any] = []
        self._trace_path = ""
        self._told: set[str] = set()  # whose input logprobs were sent
        self._live: dict[str, tuple[Generate, list[int], FinishReason] | None] = {}
        self._context = zmq.Context()
        self._in: Receiver[Any] = Receiver(self._context, socket_dir, "to_scheduler")
        self._out: Sender[Any] = Sender(self._context, socket_dir, "to_server")
        self._stop = threading.Event()
        values: dict[str, Any] = {
            "max_kv_slots": 1000,
            "max_state_slots": 100,
            "max_running_requests": 8,
            "context_length": 64,
            "vocab_size": vocab_size,
            "eos_token_ids": [2],
        }
        self._out.send(Ready(**{**values, **ready}))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._in.close()
        self._out.close()
        self._context.destroy(linger=0)

    def of(self, kind: type) -> list[Any]:
        return [item for item in self.received if isinstance(item, kind)]

    def wait_for(self, kind: type, count: int = 1, seconds: float = 60.0) -> list[Any]:
        """Those received so far, once there are so many, or at the latest after ``seconds``."""
        deadline = time.monotonic() + seconds
        while len(self.of(kind)) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.of(kind)

    def _run(self) -> None:
        while not self._stop.is_set():
            busy = any(entry is not None for entry in self._live.values())
            while (item := self._in.receive(timeout_ms=0 if busy else 5)) is not None:
                self.received.append(item)
                self._handle(item)
                busy = True
            if busy:
                self._step()

    def _handle(self, item: Any) -> None:
        if isinstance(item, Generate):
            scripted = self.script(item)
            self._live[item.rid] = None
            if scripted is not None:
                tokens, finish = scripted
                self._live[item.rid] = (item, list(tokens), finish)
        elif isinstance(item, Abort):
            if item.rid is None:
                self._live.clear()
            self._live.pop(item.rid or "", None)
        elif isinstance(item, StopAt):
            self._live.pop(item.rid, None)
        elif isinstance(item, FlushCache):
            self._out.send(Done(call_id=item.call_id, problem="busy" if self._live else ""))
        elif isinstance(item, GetState):
            state = {"num_running_reqs": float(len(self._live)), "gen_throughput": 12.5}
            state |= CACHE_STATE if item.max_nodes else {}
            nodes = NODES[: item.max_nodes]
            if item.max_tokens:
                first = msgspec.structs.replace(nodes[0], token_ids=spell("hello"))
                nodes = [first, *nodes[1:]]
            tree = ShapeUse(steps=7, accept_length=2.5, step_ms=1.5)
            speculation = SpeculationState(
                adaptive=True, current="2x5x8", disabled=True, shapes={"2x5x8": tree}
            )
            self._out.send(
                StateReply(
                    call_id=item.call_id,
                    state=state,
                    speculation=speculation,
                    cache=CACHE_USE,
                    nodes=nodes,
                )
            )
        elif isinstance(item, LoadAdapter | UnloadAdapter):
            wrong = isinstance(item, LoadAdapter) and "wrong" in item.path
            problem = "its shapes are wrong" if wrong else ""
            self._out.send(Done(call_id=item.call_id, problem=problem))
        elif isinstance(item, Profile):
            problem = "" if item.steps or self._trace_path else "nothing is being recorded"
            self._trace_path = item.path or self._trace_path
            self._out.send(
                ProfileReply(
                    call_id=item.call_id, path=self._trace_path, steps=item.steps, problem=problem
                )
            )

    def _step(self) -> None:
        outputs = []
        for rid, entry in list(self._live.items()):
            if entry is None:
                continue
            request, tokens, finish = entry
            now, rest = tokens[: self.chunk], tokens[self.chunk :]
            outputs.append(
                RequestOutput(
                    rid=rid,
                    token_ids=now,
                    finish=None if rest else finish,
                    cached_tokens=1,
                    verify_steps=1,
                    accepted_drafts=len(now) - 1 if now else 0,
                    proposed_drafts=4,
                    accept_histogram=[0] * (len(now) - 1) + [1],
                    queue_time=0.001,
                    logprobs=[self._logprob(token, request) for token in now]
                    if request.return_logprob
                    else [],
                    input_logprobs=self._input_logprobs(request),
                    trace=self._trace(now) if request.return_spec_trace and now else None,
                    embedding=self.embed(request) if request.pooling else b"",
                )
            )
            self._live[rid] = (request, rest, finish)
            if not rest:
                del self._live[rid]
        if outputs:
            self._out.send(outputs)
            if self.pause:
                time.sleep(self.pause)

    def _logprob(self, token: int, request: Generate) -> TokenLogprob:
        best = [(-0.5, token), *((-1.5 - i, 3 + i) for i in range(request.top_logprobs - 1))]
        top = best[: request.top_logprobs]
        named = [-0.5 - i for i in range(len(request.token_ids_logprob))]
        return TokenLogprob(token_id=token, logprob=-0.5, top=top, named=named)

    def _trace(self, tokens: list[int]) -> StepTrace:
        """A chain, accepted as a whole."""
        size = len(tokens)
        parents = [max(node - 1, 0) for node in range(size)]
        scores = [-0.5 * node for node in range(size)]
        return StepTrace([3, *tokens[:-1]], parents, scores, list(range(size)), tokens[-1])

    def embed(self, request: Generate) -> bytes:
        """The number of tokens, and the first and the last one, each as a number."""
        ids = request.token_ids
        return struct.pack("<3f", len(ids), ids[0], ids[-1])

    def _input_logprobs(self, request: Generate) -> list[TokenLogprob]:
        start = request.logprob_start
        if start < 0 or not request.return_logprob or request.rid in self._told:
            return []
        self._told.add(request.rid)
        return [
            TokenLogprob(token_id=token, logprob=None)
            if position == 0
            else self._logprob(token, request)
            for position, token in enumerate(request.token_ids)
            if position >= start
        ]
