"""Choices of the OpenAI replies, whole and in pieces."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from msgspec import Raw

from mamba_eagle.chat.live_calls import ArgumentsPiece, ToolCall, ends_call
from mamba_eagle.chat.parse import Piece, TextPiece
from mamba_eagle.core import FinishReason
from mamba_eagle.message import TokenLogprob
from mamba_eagle.server.apis.generate.route import Reply, step_dict
from mamba_eagle.server.apis.openai.body import CompletionBody, OpenAIJob
from mamba_eagle.server.apis.sse import JsonList, json_parts
from mamba_eagle.tokenizer.detokenize import Detokenizer
from mamba_eagle.tokenizer.sample import Sample
from mamba_eagle.tokenizer.text import TextTokenizer


class Choice(ABC):
    """One sample; remembers what of it was streamed."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    lists: ClassVar[tuple[str, ...]]  # of the logprobs

    def __init__(self, sample: Sample, tokenizer: TextTokenizer, job: OpenAIJob) -> None:
        self.sample = sample
        self.index = sample.index
        self.tokenizer = tokenizer
        self.job = job
        self._total = 0.0  # of the output's logprobs
        self._told_steps = 0
        self._meta = Reply(sample, tokenizer, False) if job.body.return_meta_info else None
        self._logprobs = {name: JsonList() for name in self.lists}
        self._prompt_items: list[TokenLogprob] = []
        self._prompt_logprobs: list[Raw] = []

    @property
    def mean_logprob(self) -> float:
        """The mean over the output; 0 unless logprobs were asked for."""
        return self._total / max(1, len(self.sample.output_ids))

    async def make_prompt_logprobs(self) -> None:
        """In turns, since all of them come with the first token."""
        entries = [partial(self._prompt_entry, item) for item in self._prompt_items]
        self._prompt_logprobs = await json_parts([*entries])

    def prompt_logprobs(self) -> dict[str, Any]:
        """The field that has them, if they were asked for."""
        asked = self.job.body.prompt_logprobs is not None
        return {"prompt_logprobs": self._prompt_logprobs} if asked else {}

    def of_reply(self) -> dict[str, Any]:
        """Fields of the reply that this API has there, not in the choice."""
        return {}

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The choice of a reply that is not streamed."""

    @abstractmethod
    def pieces(self) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that say what is new; the last one has the finish reason."""

    @abstractmethod
    def _columns(self, items: list[TokenLogprob]) -> tuple[list[Any], ...]:
        """What ``items`` add to each of ``lists``."""

    def take_logprobs(self) -> None:
        """Takes the sample's new ones over, in their final form."""
        sample = self.sample
        if self._meta is not None:
            self._meta.add_logprobs("input", sample.input_logprobs)
            self._meta.add_logprobs("output", sample.logprobs)
        items = (sample.input_logprobs if self.job.echoes else []) + sample.logprobs
        self._total += sum(item.logprob or 0.0 for item in sample.logprobs)
        if self.job.body.prompt_logprobs is not None:
            self._prompt_items += sample.input_logprobs
        sample.input_logprobs, sample.logprobs = [], []
        if self.job.logprobs is not None and items:
            for column, more in zip(self._logprobs.values(), self._columns(items)):
                column.extend(more)

    def _prompt_entry(self, item: TokenLogprob) -> dict[str, Any] | None:
        """As vLLM has it: the token's own and the best ones, by id. Only these have a rank."""
        if item.logprob is None:  # the first token follows nothing
            return None
        name = self.tokenizer.token_text
        ranks = {token: rank for rank, (_, token) in enumerate(item.top, 1)}
        best = item.top[: self.job.body.prompt_logprobs]
        found = {item.token_id: item.logprob, **{token: x for x, token in best}}
        return {
            str(token): {"logprob": x, "rank": ranks.get(token), "decoded_token": name(token)}
            for token, x in found.items()
        }

    def _new_logprobs(self) -> dict[str, Any] | None:
        self.take_logprobs()
        lists = self._logprobs
        if not lists[self.lists[0]].num_items:
            return None
        self._logprobs = {name: JsonList() for name in self.lists}
        return {name: items.raw() for name, items in lists.items()}

    def _choice(self, finish: FinishReason | None, **content: Any) -> dict[str, Any]:
        """finish: of the sample, where its last words are said, or all."""
        choice = {
            "index": self.index,
            **content,
            "finish_reason": finish.kind if finish is not None else None,
        }
        if finish is not None and finish.kind == "stop":
            choice["matched_stop"] = finish.matched
        if finish is not None and self._meta is not None:
            choice["meta_info"] = self._meta.meta_info()
        if self._has_new_steps:
            new = self.sample.traces[self._told_steps :]
            choice["spec_trace"] = [step_dict(trace, self.tokenizer.token_text) for trace in new]
            self._told_steps += len(new)
        return choice

    @property
    def _has_new_steps(self) -> bool:
        """A request has traces if it asks for them (``return_spec_trace``)."""
        return len(self.sample.traces) > self._told_steps


class CompletionChoice(Choice):
    object_name = chunk_name = "text_completion"
    lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, sample: Sample, tokenizer: TextTokenizer, job: OpenAIJob) -> None:
        super().__init__(sample, tokenizer, job)
        self._echo = job.echoes[sample.index // job.body.samples] if job.echoes else ""
        assert isinstance(job.body, CompletionBody)
        self._body = job.body
        self._offset = 0  # of the next token in the text
        self._echoed = len(sample.prompt.token_ids) if job.echoes else 0  # tokens
        self._begins_at = len(self._echo)
        self._placed = 0  # tokens
        self._reader: Detokenizer
        self._told_ids = 0

    def whole(self) -> dict[str, Any]:
        return {**self._piece(), **self.prompt_logprobs()}

    def pieces(self) -> Iterator[dict[str, Any]]:
        piece = self._piece()
        news = ("text", "logprobs", "finish_reason", "spec_trace", "token_ids")
        if any(map(piece.get, news)):
            yield piece

    def _piece(self) -> dict[str, Any]:
        echo, self._echo = self._echo, ""
        text, logprobs = echo + self.sample.new_text(), self._new_logprobs()
        piece = self._choice(self.sample.finish, text=text, logprobs=logprobs)
        if self._body.return_token_ids:
            ids = self.sample.output_ids
            if not self._told_ids:
                piece["prompt_token_ids"] = self.sample.prompt.token_ids
            piece["token_ids"] = ids[self._told_ids :]
            self._told_ids = len(ids)
        return piece

    def _columns(self, items: list[TokenLogprob]) -> tuple[list[Any], ...]:
        name = self.tokenizer.token_text
        if self._body.return_tokens_as_token_ids:
            name = "token_id:{}".format
        tokens = [name(item.token_id) for item in items]
        offsets = [self._place(item.token_id) for item in items]
        best = [
            {name(token_id): logprob for logprob, token_id in item.top[: self.job.logprobs]}
            if self.job.logprobs and item.logprob is not None
            else None
            for item in items
        ]
        return tokens, [item.logprob for item in items], best, offsets

    def _place(self, token_id: int) -> int:
        """Where the next token begins in the text: not the sum of the tokens' own texts, since one
        may be a part of a character, or special and left out."""
        if self._placed == self._echoed:  # the output begins
            self._offset = self._begins_at
            prompt = self.sample.prompt
            skips = prompt.sampling.skip_special_tokens
            self._reader = self.tokenizer.detokenizer(prompt.token_ids, skips)
        elif self._placed == 0:
            self._reader = self.tokenizer.detokenizer((), True)
        self._placed += 1
        place = self._offset
        self._offset += len(self._reader.push(token_id))
        return place


class ChatChoice(Choice):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    lists = ("content",)

    def __init__(self, sample: Sample, tokenizer: TextTokenizer, job: OpenAIJob) -> None:
        super().__init__(sample, tokenizer, job)
        self._parser = job.make_parser()
        self._begun = False
        self._calls = 0  # given out so far
        self._has_called = False  # a whole call

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for piece in self._new_pieces():
            delta = self._delta(piece)
            if calls := delta.get("tool_calls"):
                del calls[0]["index"]
                message.setdefault("tool_calls", []).extend(calls)
            else:
                for name, text in delta.items():
                    message[name] = (message.get(name) or "") + text
        if message["content"] is None and not self._calls:
            message["content"] = ""
        logprobs = self._new_logprobs()
        return self._choice(self.sample.finish, message=message, logprobs=logprobs)

    def of_reply(self) -> dict[str, Any]:
        return self.prompt_logprobs()

    def pieces(self) -> Iterator[dict[str, Any]]:
        # All at once: the sample may end while they are sent, and one that was made then would take
        # its last logprobs along.
        return iter(list(self._pieces()))

    def _pieces(self) -> Iterator[dict[str, Any]]:
        # taken first: the meta_info of a sample that has ended takes what is left of it
        new, logprobs = self._new_pieces(), self._new_logprobs()
        if not self._begun:
            self._begun = True
            yield self._choice(None, delta={"role": "assistant", "content": ""}, logprobs=None)
        deltas = [
            self._delta(piece)
            for piece in new
            if not isinstance(piece, ArgumentsPiece) or piece.text  # else it ends a call
        ]
        if not deltas and (logprobs or self._has_new_steps):
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._choice(None, delta=delta, logprobs=logprobs)
            logprobs = None
        if self.sample.finish is not None:
            yield self._choice(self.sample.finish, delta={}, logprobs=None)

    def _new_pieces(self) -> list[Piece]:
        new = self._parser.read(self.sample.new_text(), self.sample.finish is not None)
        self._has_called |= any(map(ends_call, new))
        return new

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, TextPiece):
            return {piece.field: piece.text}
        if isinstance(piece, ArgumentsPiece):
            more = {"index": self._calls - 1, "function": {"arguments": piece.text}}
            return {"tool_calls": [more]}
        index = self._calls
        self._calls += 1
        return {"tool_calls": [_call(piece, index)]}

    def _choice(self, finish: FinishReason | None, **content: Any) -> dict[str, Any]:
        choice = super()._choice(finish, **content)
        if self._has_called and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        return choice

    def _columns(self, items: list[TokenLogprob]) -> tuple[list[Any], ...]:
        return ([self._entry(item) for item in items],)

    def _entry(self, item: TokenLogprob) -> dict[str, Any]:
        entry = self._token(item.token_id, item.logprob)
        best = item.top[: self.job.logprobs]
        entry["top_logprobs"] = [self._token(token, logprob) for logprob, token in best]
        return entry

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
