"""What the server process knows of a request: its samples, their text and where they stand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from mamba_eagle.core import FinishReason, shown
from mamba_eagle.message import Generate, RequestOutput, StepTrace, StopAt, TokenLogprob
from mamba_eagle.tokenizer.detokenize import Detokenizer
from mamba_eagle.tokenizer.stop import StopFinder, StopStrings


class VersionSpan(NamedTuple):
    """Tokens [start, end) of an output, and the version of the weights that made them."""

    version: str
    start: int
    end: int


class Sample:
    """One output of one prompt. Tokens go in, visible text and counts come out.

    Tokens are taken one by one even where a message brings several, so text, ids and counts do
    not depend on speculation. What comes after the end is dropped.
    """

    def __init__(
        self,
        request: LiveRequest,
        prompt: Generate,
        rid: str,
        engine_rid: str,
        index: int,
        detokenizer: Detokenizer | None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.rid = rid  # the name that clients see
        self.engine_rid = engine_rid  # never used twice, unlike a client's rid
        self.index = index
        self.seed = 0  # its own, drawn where the client gave none
        self.output_ids: list[int] = []
        # Those that no one has taken yet: a reply keeps them in a smaller form.
        self.logprobs: list[TokenLogprob] = []
        self.input_logprobs: list[TokenLogprob] = []
        self.hidden: list[bytes] = []  # as in RequestOutput, likewise
        self.traces: list[StepTrace] = []
        self._versions: list[tuple[int, str]] = []  # first tokens, and versions of the weights
        self.embedding = b""  # float32, little-endian
        self._experts = bytearray()  # [tokens, layers, k] int32
        self.experts_width = 0  # bytes per token
        self.finish: FinishReason | None = None
        self.finish_time = 0.0
        self.last = RequestOutput(rid=engine_rid)  # the latest counters
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.told = 0  # tokens that a stream has sent
        self.sent = False  # to the scheduler
        self.text = ""
        self._told_text = 0  # characters that ``new_text`` has given
        self._detokenizer = detokenizer
        self._stops = StopFinder(request.stop_strings(prompt.sampling.stop))

    def take(self, output: RequestOutput) -> StopAt | None:
        """Adds an output; gives the message for the scheduler if a stop string became complete."""
        self.last = output
        version = output.weight_version
        if output.token_ids and (not self._versions or self._versions[-1][1] != version):
            self._versions.append((len(self.output_ids), version))
        if output.input_logprobs:
            self.input_logprobs.extend(output.input_logprobs)
        if output.trace is not None:
            self.traces.append(output.trace)
        for part in output.experts:
            width = self.experts_width = len(part.experts) // part.count
            place = (part.start - self.prompt.routed_experts_start) * width
            kept = part.experts[max(-place, 0) :]
            place = max(place, 0)
            self._experts[place : place + len(kept)] = kept
        if output.embedding:
            self.embedding = output.embedding
        if not output.token_ids:
            self.hidden += output.hidden
        finish = output.finish
        final = len(output.token_ids) - 1 if finish is not None and finish.kind == "stop" else -1
        for position, token in enumerate(output.token_ids):
            self.output_ids.append(token)
            if output.logprobs:
                self.logprobs.append(output.logprobs[position])
            if output.hidden:
                self.hidden.append(output.hidden[position])
            if position == final and not self.prompt.sampling.no_stop_trim:
                break  # a stop token is counted, but is not part of the text
            if self._detokenizer is not None and self._add_text(self._detokenizer.push(token)):
                assert self.finish is not None and isinstance(self.finish.matched, str)
                return StopAt(
                    rid=self.engine_rid,
                    num_tokens=len(self.output_ids),
                    matched=self.finish.matched,
                )
        if finish is not None:
            self.end(finish)
        return None

    def _add_text(self, piece: str) -> bool:
        """Whether a stop string has become complete; then the text is cut and the sample ends."""
        if not piece:
            return False
        self.text += piece
        sampling = self.prompt.sampling
        if not self._stops:
            return False
        match = self._stops.find(self.text)
        if match is None or len(self.output_ids) < sampling.min_new_tokens:
            return False
        self.text = self.text[: match.end if sampling.no_stop_trim else match.start]
        self._detokenizer = None
        self.end(FinishReason(kind="stop", matched=match.string))
        return True

    def end(self, reason: FinishReason) -> None:
        """The last thing that happens to a sample; a second end is ignored."""
        if self.finish is not None:
            return
        if self._detokenizer is not None:
            self.text += self._detokenizer.flush()
        self.finish = reason
        self.finish_time = time.time()

    def visible_text(self) -> str:
        """The text that can no longer change: without what may begin a stop string."""
        if self.finish is not None or not self._stops:
            return self.text
        held = self._stops.held_back()
        return self.text[: len(self.text) - held] if held else self.text

    def new_text(self) -> str:
        """What ``visible_text`` has more than at the last call."""
        text = self.visible_text()[self._told_text :]
        self._told_text += len(text)
        return text

    @property
    def routed_experts(self) -> bytes:
        """From ``routed_experts_start`` on, of all tokens but the last, which the model has not
        read: int32 [tokens, layers, k]."""
        prompt = self.prompt
        count = len(prompt.token_ids) - prompt.routed_experts_start + len(self.output_ids) - 1
        return bytes(self._experts[: max(count, 0) * self.experts_width])

    @property
    def versions(self) -> list[VersionSpan]:
        """Which weights made which tokens of the output."""
        ends = [start for start, _ in self._versions[1:]] + [len(self.output_ids)]
        return [VersionSpan(own, start, end) for (start, own), end in zip(self._versions, ends)]

    @property
    def error(self) -> FinishReason | None:
        """The finish reason, if it is one that clients must see as an error."""
        finish = self.finish
        return finish if finish is not None and finish.failure is not None else None


class LiveRequest:
    """One HTTP request: its prompts, once it has started all their samples, and who waits for
    them."""

    def __init__(self, rid: str, prompts: Sequence[Generate] = ()) -> None:
        self.rid = rid
        self.prompts = prompts
        self.timeout = 0.0  # seconds from arrival to the end; 0: no limit
        self.kept_tokens: frozenset[int] = frozenset()  # special tokens that its texts keep
        self.trace_parent = ""  # the caller's span, as its traceparent header names it
        self.samples: list[Sample] = []
        self.open = 0  # samples that have not ended
        self.arrival = time.time()
        self.names: list[str] = []  # all rids by which it or a part of it can be ended
        self.deadline: asyncio.TimerHandle | None = None
        # A stream waits for each change, a plain reply only for the end.
        self.changed = asyncio.Event()
        self.news: dict[int, Sample] = {}  # by index: those with a change that no one looked at
        self.done = asyncio.Event()
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}

    def stop_strings(self, strings: list[str]) -> StopStrings:
        """Prepared; prompts with the same ones share them."""
        key = tuple(strings)
        if key not in self._stop_strings:
            self._stop_strings[key] = StopStrings(strings)
        return self._stop_strings[key]

    def tell(self, sample: Sample) -> None:
        """The sample has a token more, or has ended."""
        self.news[sample.index] = sample
        self.changed.set()


class EngineDead(RuntimeError):
    """The engine is gone, or the server is being stopped."""


class QueueFull(RuntimeError):
    """More requests than the server holds at a time."""


class DuplicateRid(ValueError):
    """A live request has this name already."""


class LiveSamples:
    """A request's names stay taken until all of its samples have ended."""

    def __init__(self) -> None:
        self._samples: dict[str, Sample] = {}  # by engine rid
        self._names: dict[str, list[Sample]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def free_names(self, live: LiveRequest) -> set[str]:
        """All names of a request that may start.

        Raises: DuplicateRid if one of them is taken.
        """
        names = {live.rid}
        for prompt in live.prompts:
            names.update((prompt.rid, *map(prompt.sample_rid, range(prompt.n))))
        if taken := names & self._names.keys():
            raise DuplicateRid(
                f"rid = {shown(min(taken))}: a request of this name is running: choose another, or "
                "omit it"
            )
        return names

    def add(self, sample: Sample) -> None:
        self._samples[sample.engine_rid] = sample
        for name in {sample.request.rid, sample.prompt.rid, sample.rid}:
            self._names.setdefault(name, []).append(sample)

    def get(self, engine_rid: str) -> Sample | None:
        return self._samples.get(engine_rid)

    def named(self, rid: str | None) -> list[Sample]:
        """The samples of exactly this name, those that have ended too; None: all that are live."""
        return list(self._samples.values() if rid is None else self._names.get(rid, ()))

    def remove(self, sample: Sample) -> None:
        """It has ended."""
        del self._samples[sample.engine_rid]
        if sample.request.open == 0:
            for name in sample.request.names:
                self._names.pop(name, None)
