"""POST /generate: the samples run, and each as it is replied."""

import base64
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from mamba_eagle.core import DEFAULT_VERSION, FinishReason
from mamba_eagle.message import StepTrace, TokenLogprob
from mamba_eagle.server.apis import sse
from mamba_eagle.server.apis.generate.body import GenerateBody, parse_generate
from mamba_eagle.server.bodies.kinds import takes
from mamba_eagle.server.bodies.served import Job
from mamba_eagle.server.errors import failure_status, json_response
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.sample import Sample
from mamba_eagle.tokenizer.text import TextTokenizer

Entry = tuple[float | None, int, str | None]  # logprob, token id, text if asked for
SIDES = ("input", "output")
# A stream's events are cumulative. Once one has more logprobs than this, the next waits until the
# output has grown by the share, so that all of them together stay a few times as long as the last.
MANY_LOGPROBS = 2048
GROWTH = 1 / 8


def finish_dict(reason: FinishReason) -> dict[str, Any]:
    """The form clients read in meta_info.finish_reason."""
    known = reason.as_dict()
    return {**known, "status_code": failure_status(reason)} if reason.kind == "abort" else known


def step_dict(trace: StepTrace, name: Callable[[int], str] | None) -> dict[str, Any]:
    """A step as clients read it; ``name`` gives the text of a token, if there is a tokenizer."""
    step: dict[str, Any] = msgspec.structs.asdict(trace)
    if not trace.refused:
        del step["refused"]  # it is there only where a grammar has refused a node
    if name is not None:
        step["token_texts"] = [name(token) for token in trace.tokens]
        step["bonus_text"] = name(trace.bonus)
    return step


class Reply:
    """Builds the reply of one sample; for a stream again and again. What was made once is kept
    as JSON: a sample's logprobs may be a million."""

    def __init__(self, sample: Sample, tokenizer: TextTokenizer | None, with_text: bool) -> None:
        self.sample = sample
        self._name = tokenizer.token_text if tokenizer is not None else None
        self._text = self._name if with_text else None
        self._told_traces = 0
        self._ids = sse.JsonList()
        asked = {"top": sample.prompt.top_logprobs, "token_ids": sample.prompt.token_ids_logprob}
        kinds = ("token", *(kind for kind, wanted in asked.items() if wanted))
        names = [f"{side}_{kind}_logprobs" for side in SIDES for kind in kinds]
        self._logprobs = {name: sse.JsonList() for name in names}
        self._hidden = sse.JsonList()

    def as_dict(self) -> dict[str, Any]:
        """The reply as it stands, with parts in JSON already."""
        self._ids.extend(self.sample.output_ids[self._ids.num_items :])
        return {
            "text": self.sample.visible_text(),
            "output_ids": self._ids.raw(),
            "meta_info": self.meta_info(),
        }

    def meta_info(self) -> dict[str, Any]:
        sample = self.sample
        counters = sample.last
        count = len(sample.output_ids)
        meta: dict[str, Any] = {
            "id": sample.rid,
            "finish_reason": finish_dict(sample.finish) if sample.finish is not None else None,
            "prompt_tokens": len(sample.prompt.token_ids),
            "completion_tokens": count,
            "cached_tokens": counters.cached_tokens,
            "e2e_latency": (sample.finish_time or time.time()) - sample.request.arrival,
            "weight_version": counters.weight_version,
        }
        if counters.weight_version != DEFAULT_VERSION:
            meta["weight_versions"] = [span._asdict() for span in sample.versions]
        if counters.verify_steps:
            proposed = counters.proposed_drafts
            meta["spec_accept_length"] = count / counters.verify_steps
            meta["spec_accept_rate"] = counters.accepted_drafts / proposed if proposed else 0.0
            meta["spec_verify_ct"] = counters.verify_steps
            for accepted in ("spec_accept_token_num", "spec_num_correct_drafts"):
                meta[accepted] = counters.accepted_drafts
            for drafted in ("spec_draft_token_num", "spec_num_proposed_drafts"):
                meta[drafted] = proposed
            meta["spec_accept_histogram"] = counters.accept_histogram
        if sample.prompt.return_spec_trace:
            # not from the beginning each time: a long stream's events would grow without end
            new = sample.traces[self._told_traces :]
            meta["spec_trace"] = [step_dict(trace, self._name) for trace in new]
            self._told_traces = len(sample.traces)
        if sample.prompt.return_logprob or sample.prompt.return_hidden_states:
            self.take()
        if sample.prompt.return_hidden_states and sample.finish is not None:
            meta["hidden_states"] = self._hidden.raw()
        if sample.prompt.return_routed_experts and sample.finish is not None:
            meta["routed_experts"] = base64.b64encode(sample.routed_experts).decode()
        if sample.prompt.return_logprob:
            meta |= {name: items.raw() for name, items in self._logprobs.items()}
        return meta

    # ── logprobs and hidden states ───────────────────────────────────────────────────────────

    def take(self) -> None:
        """Takes the sample's new ones over."""
        sample = self.sample
        rows = [np.frombuffer(row, dtype="<f4").tolist() for row in sample.hidden]
        if rows and not self._hidden.num_items:
            rows[0] = [rows[0]]  # of the prompt's tokens, as SGLang has it: the last one
        self._hidden.extend(rows)
        sample.hidden = []
        self.add_logprobs("input", sample.input_logprobs)
        self.add_logprobs("output", sample.logprobs)
        sample.input_logprobs, sample.logprobs = [], []

    def add_logprobs(self, side: str, items: Sequence[TokenLogprob]) -> None:
        lists, named = self._logprobs, self.sample.prompt.token_ids_logprob
        own = [self._entry(item.logprob, item.token_id) for item in items]
        lists[f"{side}_token_logprobs"].extend(own)
        if self.sample.prompt.top_logprobs:
            lists[f"{side}_top_logprobs"].extend([self._best(item) for item in items])
        if named:
            lists[f"{side}_token_ids_logprobs"].extend(
                [[self._entry(*each) for each in zip(item.named, named)] or None for item in items]
            )

    def spacing(self, interval: int) -> int:
        """How many new tokens the next event of a stream waits for, at least ``interval``."""
        tokens = sum(self._logprobs[f"{side}_token_logprobs"].num_items for side in SIDES)
        prompt = self.sample.prompt
        if tokens * (1 + prompt.top_logprobs + len(prompt.token_ids_logprob)) <= MANY_LOGPROBS:
            return interval
        return max(interval, int(tokens * GROWTH))

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        return (logprob, token_id, self._text(token_id) if self._text is not None else None)

    def _best(self, item: TokenLogprob) -> list[Entry] | None:
        if item.logprob is None:  # the first token of a prompt follows nothing
            return None
        return [self._entry(logprob, token_id) for logprob, token_id in item.top]


class PieceReply(Reply):
    """What is new since the last event: a stream as long as its text, not as its square."""

    _told_ids = 0

    def as_dict(self) -> dict[str, Any]:
        text, new_ids = self.sample.new_text(), self.sample.output_ids[self._told_ids :]
        self._told_ids += len(new_ids)
        reply = {"text": text, "output_ids": new_ids, "meta_info": self.meta_info()}
        self._logprobs = {name: sse.JsonList() for name in self._logprobs}
        return reply


router = APIRouter()


@router.api_route("/generate", methods=["POST", "PUT"], openapi_extra=takes(GenerateBody))
async def generate(request: Request) -> Response:
    state = server_state(request)
    job = await state.read(request, parse_generate)
    state.submit(job)
    tokenizer = state.manager.tokenizer
    pieces = job.body.incremental
    pieces = state.config.incremental_streaming_output if pieces is None else pieces
    kind = PieceReply if job.body.stream and pieces else Reply
    replies = [kind(sample, tokenizer, job.body.return_text_in_logprobs) for sample in job.samples]
    as_list = job.body.is_batch or len(replies) > 1
    if job.body.stream:
        return sse.EventStream(state, job, stream_replies(state, job, as_list, replies))
    await sse.wait_for_success(
        request, state, job, lambda sample: replies[sample.index].take(), sse.sample_error
    )
    parts = await sse.json_parts([reply.as_dict for reply in replies])
    return json_response(parts if as_list else parts[0])


async def stream_replies(
    state: ServerState, job: Job[GenerateBody], as_list: bool, replies: list[Reply]
) -> AsyncGenerator[bytes, None]:
    """Replies as they stand, or pieces of them; of several samples each names its ``index``."""
    interval = state.config.stream_interval
    begun = False
    async for sample in sse.updates(job, lambda sample: replies[sample.index].spacing(interval)):
        error = sse.sample_error(sample)
        if error is not None and not begun:
            raise error
        begun = True
        body = error.body() if error is not None else replies[sample.index].as_dict()
        if as_list:
            body["index"] = sample.index
        yield sse.event(body)
    yield sse.DONE
