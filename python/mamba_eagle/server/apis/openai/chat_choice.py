"""Choices of chat completions: reasoning, content and tool calls, whole and in pieces."""

import uuid
from collections.abc import Iterator
from typing import Any

from mamba_eagle.chat.live_calls import ArgumentsPiece, ToolCall
from mamba_eagle.chat.parse import OutputParser, Piece, TextPiece
from mamba_eagle.message import TokenLogprob
from mamba_eagle.server.apis.openai.body import OpenAIJob
from mamba_eagle.server.apis.openai.choice import Choice
from mamba_eagle.tokenizer.sample import Sample
from mamba_eagle.tokenizer.text import TextTokenizer


class ChatChoice(Choice):
    """``parser`` reads this sample's text and no other's."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    lists = ("content",)

    def __init__(
        self, sample: Sample, tokenizer: TextTokenizer, job: OpenAIJob, parser: OutputParser
    ) -> None:
        super().__init__(sample, tokenizer, job)
        self._parser = parser
        self._begun = False
        self._calls = 0  # given out so far

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
        return self._choice(message=message, logprobs=self._new_logprobs())

    def of_reply(self) -> dict[str, Any]:
        return self.prompt_logprobs()

    def pieces(self) -> Iterator[dict[str, Any]]:
        # taken first: the meta_info of a sample that has ended takes what is left of it
        new, logprobs = self._new_pieces(), self._new_logprobs()
        if not self._begun:
            self._begun = True
            first = self._choice(delta={"role": "assistant", "content": ""}, logprobs=None)
            yield {**first, "finish_reason": None}
        deltas = [self._delta(piece) for piece in new if _says_something(piece)]
        if not deltas and (logprobs or self._has_new_steps):
            deltas = [{"content": ""}]
        for delta in deltas:
            piece = self._choice(delta=delta, logprobs=logprobs)
            logprobs = None
            yield {**piece, "finish_reason": None}
        if self.sample.finish is not None:
            yield self._choice(delta={}, logprobs=None)

    def _new_pieces(self) -> list[Piece]:
        pieces = self._parser.feed(self._new_text())
        if self.sample.finish is not None:
            pieces = pieces + self._parser.finish()
        return pieces

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, TextPiece):
            return {piece.field: piece.text}
        if isinstance(piece, ArgumentsPiece):
            more = {"index": self._calls - 1, "function": {"arguments": piece.text}}
            return {"tool_calls": [more]}
        index = self._calls
        self._calls += 1
        return {"tool_calls": [_call(piece, index)]}

    def _choice(self, **content: Any) -> dict[str, Any]:
        choice = super()._choice(**content)
        if self._calls and choice["finish_reason"] == "stop":
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


def _says_something(piece: Piece) -> bool:
    return not isinstance(piece, ArgumentsPiece) or bool(piece.text)


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
