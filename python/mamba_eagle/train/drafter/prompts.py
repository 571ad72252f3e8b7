"""``--data``: a jsonl file of prompts, in any of the forms that data sets have.

    {"text": …} or {"prompt": …}            the prompt as it is
    {"question": …}                         put into --prompt-template
    {"messages": [{"role", "content"}, …]}  put into the tokenizer's chat template
    {"token_ids": […]}                      needs no tokenizer

With --skip-generation a line has its answer too: ``answer`` beside the first two, ``answer_ids``
beside the last, a last turn of the assistant among messages. Otherwise that turn is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.model_config import ModelConfig
from mamba_eagle.tokenizer.text import TextTokenizer

SHOWN_PROBLEMS = 10


class DataError(ValueError):
    """Lines that cannot be used; the text names each with its number."""


class Prompt(NamedTuple):
    line: int  # its number in the file, from 1; what an answer is filed under
    token_ids: list[int]
    answer: list[int]  # the file's own; [] unless it was asked for


class Parsed(NamedTuple):
    """A line before its texts are tokenized; what is token ids already stays as it is."""

    line: int
    prompt: str | list[int]
    answer: str | list[int]
    special: bool = True  # the prompt gets the tokenizer's special tokens


class PromptReader:
    """Turns lines into token ids, as the server turns requests into them."""

    def __init__(
        self, tokenizer_folder: str, config: ModelConfig, template: str, own_answers: bool
    ) -> None:
        self.folder, self.config = tokenizer_folder, config
        self.template, self.own_answers = template, own_answers

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        try:
            return TextTokenizer.load(self.folder)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.folder} has no tokenizer ({error}), so each line must have token_ids"
            ) from None

    def read(self, path: Path) -> list[Prompt]:
        """Raises: DataError naming every line that is wrong (the first ten of them)."""
        parsed: list[Parsed] = []
        wrong: dict[int, str] = {}
        for number, line in numbered_lines(path):
            try:
                parsed.append(self._parse(number, parse_object(line)))
            except LineError as error:
                wrong[number] = str(error)
        prompts = self._tokenize(parsed)
        wrong |= {p.line: "the prompt is empty" for p in prompts if not p.token_ids}
        if wrong:
            lines = [f"{path}, line {number}: {wrong[number]}" for number in sorted(wrong)]
            rest = [f"… and {len(lines) - SHOWN_PROBLEMS} more"] if lines[SHOWN_PROBLEMS:] else []
            raise DataError("\n".join(lines[:SHOWN_PROBLEMS] + rest))
        if not prompts:
            raise DataError(f"{path} has no lines: give one JSON object a line")
        return prompts

    def _parse(self, number: int, record: dict[str, Any]) -> Parsed:
        if "token_ids" in record:
            answer_ids = self._ids(record, "answer_ids") if self.own_answers else []
            return Parsed(number, self._ids(record, "token_ids"), answer_ids)
        if "messages" in record:
            return Parsed(number, *self._chat(record["messages"]), special=False)
        name = next((n for n in ("text", "prompt", "question") if n in record), None)
        if name is None:
            raise LineError(
                f"has {sorted(record)}; needs text, prompt, question, messages or token_ids"
            )
        prompt = string(record, name)
        if name == "question":
            prompt = self.template.replace("{question}", prompt)
        if not self.own_answers:
            return Parsed(number, prompt, [])
        answer = string(record, "answer")
        if name == "question" and not prompt[-1:].isspace() and not answer[:1].isspace():
            answer = " " + answer  # "Answer:" and what follows are words of their own
        return Parsed(number, prompt, answer)

    def _tokenize(self, parsed: list[Parsed]) -> list[Prompt]:
        """All texts at once: one by one they take longer than many a training."""
        plain = {p.prompt for p in parsed if isinstance(p.prompt, str) and not p.special}
        plain |= {p.answer for p in parsed if isinstance(p.answer, str)}
        whole = {p.prompt for p in parsed if isinstance(p.prompt, str) and p.special}
        ids = {True: self._encode(whole, special=True), False: self._encode(plain, special=False)}
        prompts = []
        for line, prompt, answer, special in parsed:
            if isinstance(prompt, str):
                prompt = ids[special][prompt]
            if isinstance(answer, str):
                answer = self._ended(ids[False][answer])
            prompts.append(Prompt(line, prompt, answer))
        return prompts

    def _encode(self, texts: set[str], special: bool) -> dict[str, list[int]]:
        order = sorted(texts)
        return dict(zip(order, self.tokenizer.encode_all(order, special))) if order else {}

    def _chat(self, messages: Any) -> tuple[str, str | list[int]]:
        """The prompt, and the answer if it is wanted."""
        if not (isinstance(messages, list) and messages and all(map(is_turn, messages))):
            raise LineError("messages must be a list of objects with role and content")
        turns = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not turns:
            raise LineError("messages has no turn before the assistant's")
        try:
            text = self.tokenizer.render_chat(turns)
            whole = self.tokenizer.hf.apply_chat_template(messages, tokenize=False)
        except ValueError as error:
            raise LineError(str(error)) from None
        if not self.own_answers:
            return text, []
        if turns is messages:
            raise LineError("--skip-generation needs a last message of role assistant")
        if not whole.startswith(text):
            raise LineError(
                "the chat template writes an earlier turn otherwise once it is answered, so the "
                "answer cannot be told from the prompt: leave --skip-generation away"
            )
        return text, whole[len(text) :]

    def _ended(self, answer: list[int]) -> list[int]:
        """Up to the model's stop token, which the target would have written where there is none."""
        stops = self.config.eos_token_ids
        for i, token in enumerate(answer):
            if token in stops:
                return answer[: i + 1]
        return [*answer, *stops[:1]]

    def _ids(self, record: dict[str, Any], name: str) -> list[int]:
        ids, vocab = record.get(name), self.config.vocab_size
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise LineError(f"{name} must be a list of integers, it is {shown(ids)}")
        if outside := [token for token in ids if not 0 <= token < vocab]:
            raise LineError(f"{name} has {outside[0]}: token ids are between 0 and {vocab - 1}")
        return ids


class LineError(ValueError):
    """What is wrong with one line."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, from number 1.

    Raises: DataError
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--data {path} cannot be read: {error}") from None


def parse_object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise LineError(f"is no JSON ({error}): {shown(line)}") from None
    if not isinstance(record, dict):
        raise LineError(f"must be a JSON object, it is {shown(record)}")
    return record


def string(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise LineError(f"{name} must be a text that is not empty, it is {shown(value)}")
    return value


def is_turn(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
