"""Reads ``--data``: a jsonl file of prompts in any of the forms that data sets commonly have.

    {"text": …} or {"prompt": …}            the prompt itself
    {"question": …}                         inserted into --prompt-template
    {"messages": [{"role", "content"}, …]}  rendered with the tokenizer's chat template
    {"token_ids": […]}                      needs no tokenizer

With --skip-generation each line also has its answer: ``answer`` in the first two forms,
``answer_ids`` in the last, and the assistant's last turn in messages. Otherwise that turn is
ignored.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.chat.render import Chat, ChatTemplate
from mamba_eagle.core import shown
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.tokenizer.text import TextTokenizer

MAX_SHOWN_PROBLEMS = 10


class DataError(ValueError):
    """Unusable lines of the data; the message names each with its line number."""


class LineError(ValueError):
    """The problem with one line."""


class Example(NamedTuple):
    line: int  # its line number in the file, from 1; answers are stored under it
    prompt: list[int]
    answer: list[int]  # stop token included; empty before it is generated


class Parsed(NamedTuple):
    """A line whose texts are not tokenized yet; token ids are kept as they are."""

    line: int
    prompt: str | list[int]
    answer: str | list[int]
    add_special_tokens: bool = True  # to the prompt


class PromptReader:
    """Turns lines into token ids in the way the server does for requests."""

    def __init__(
        self, tokenizer_folder: str, config: ModelConfig, template: str, read_answers: bool
    ) -> None:
        self.folder, self.config = tokenizer_folder, config
        self.template, self.read_answers = template, read_answers

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        try:
            return TextTokenizer.load(self.folder)
        except Exception as error:  # the libraries raise any kind
            raise DataError(
                f"{self.folder} has no tokenizer ({error}): add one, or give token_ids in each line"
            ) from None

    def read(self, path: Path) -> list[Example]:
        """Raises: DataError naming every invalid line, or the first ten of them."""
        parsed: list[Parsed] = []
        wrong: dict[int, str] = {}
        for number, line in numbered_lines(path):
            try:
                parsed.append(self._parse(number, parse_object(line)))
            except LineError as error:
                wrong[number] = str(error)
        prompts = self._tokenize(parsed)
        wrong |= {p.line: "the prompt is empty" for p in prompts if not p.prompt}
        if wrong:
            raise DataError(list_problems(path, wrong))
        if not prompts:
            raise DataError(f"{path} has no lines: give one JSON object per line")
        return prompts

    def _parse(self, number: int, record: dict[str, Any]) -> Parsed:
        if "token_ids" in record:
            answer_ids = self._ids(record, "answer_ids") if self.read_answers else []
            return Parsed(number, self._ids(record, "token_ids"), answer_ids)
        if "messages" in record:
            prompt, answer = self._chat(record["messages"])
            return Parsed(number, prompt, answer, add_special_tokens=False)
        name = next((n for n in ("text", "prompt", "question") if n in record), None)
        if name is None:
            raise LineError(
                f"needs one of text, prompt, question, messages or token_ids; has only "
                f"{shown(sorted(record))}"
            )
        prompt = string(record, name)
        if name == "question":
            prompt = self.template.replace("{question}", prompt)
        if not self.read_answers:
            return Parsed(number, prompt, [])
        answer = string(record, "answer")
        if name == "question" and not prompt[-1:].isspace() and not answer[:1].isspace():
            answer = " " + answer  # separates the answer from the template's "Answer:"
        return Parsed(number, prompt, answer)

    def _tokenize(self, parsed: list[Parsed]) -> list[Example]:
        """Encodes all texts in two calls; encoding them one by one could take longer than the
        training itself."""
        with_special: set[str] = set()
        without_special: set[str] = set()
        for p in parsed:
            if isinstance(p.prompt, str):
                (with_special if p.add_special_tokens else without_special).add(p.prompt)
            if isinstance(p.answer, str):
                without_special.add(p.answer)
        ids = {True: self._encode(with_special, True), False: self._encode(without_special, False)}
        prompts = []
        for line, prompt, answer, add_special_tokens in parsed:
            if isinstance(prompt, str):
                prompt = ids[add_special_tokens][prompt]
            if isinstance(answer, str):
                answer = self._end(ids[False][answer])
            prompts.append(Example(line, prompt, answer))
        return prompts

    def _encode(self, texts: set[str], add_special_tokens: bool) -> dict[str, list[int]]:
        if not texts:
            return {}  # without loading the tokenizer
        order = sorted(texts)
        return dict(zip(order, self.tokenizer.encode_all(order, add_special_tokens)))

    def _chat(self, messages: Any) -> tuple[str, str | list[int]]:
        """The prompt's text, and that of the answer if answers are read."""
        if not (isinstance(messages, list) and messages and all(map(is_turn, messages))):
            raise LineError(
                f"messages must be a list of objects with role and content, it is {shown(messages)}"
            )
        turns = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not turns:
            raise LineError("messages has no turn before the assistant's")
        try:
            prompt = ChatTemplate(self.tokenizer.hf).render(Chat(turns))
            whole = self.tokenizer.hf.apply_chat_template(messages, tokenize=False)
        except ValueError as error:
            raise LineError(str(error)) from None
        if not self.read_answers:
            return prompt, []
        if turns is messages:
            raise LineError("--skip-generation needs a last message of role assistant")
        if not whole.startswith(prompt):
            raise LineError(
                "the chat template renders earlier turns differently once they are answered, so "
                "the answer cannot be separated from the prompt: omit --skip-generation"
            )
        return prompt, whole[len(prompt) :]

    def _end(self, answer: list[int]) -> list[int]:
        """Cuts the answer after its first stop token; adds the model's stop token if it has none,
        since the target would have generated one."""
        stops = self.config.eos_token_ids
        for i, token in enumerate(answer):
            if token in stops:
                return answer[: i + 1]
        return [*answer, *stops[:1]]

    def _ids(self, record: dict[str, Any], name: str) -> list[int]:
        ids, vocab_size = record.get(name), self.config.vocab_size
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise LineError(f"{name} must be a list of integers, it is {shown(ids)}")
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise LineError(
                f"{name} has {shown(outside[0])}: token ids are between 0 and {vocab_size - 1}"
            )
        return ids


def list_problems(path: Path, wrong: dict[int, str]) -> str:
    """One line per problem, in the order of the file, up to MAX_SHOWN_PROBLEMS."""
    lines = [f"{path}, line {number}: {wrong[number]}" for number in sorted(wrong)]
    if len(lines) > MAX_SHOWN_PROBLEMS:
        lines[MAX_SHOWN_PROBLEMS:] = [f"… and {len(lines) - MAX_SHOWN_PROBLEMS} more"]
    return "\n".join(lines)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines with their numbers, from 1.

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
        json.dumps(record, ensure_ascii=False).encode()  # no halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise LineError(f"is not valid JSON ({error}): {shown(line)}") from None
    if not isinstance(record, dict):
        raise LineError(f"must be a JSON object, it is {shown(record)}")
    return record


def string(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise LineError(f"{name} must be a non-empty string, it is {shown(value)}")
    return value


def is_turn(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()
