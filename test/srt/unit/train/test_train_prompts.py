"""The lines of --data: every form is read as the server reads it, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizer import EOS, byte_level, spell

from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.prompts import DataError, Example, PromptReader

TEMPLATE = "Question: {question}\nAnswer:"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG = parse_config(
    {
        "hybrid_override_pattern": "-",
        "vocab_size": 259,
        "hidden_size": 8,
        "intermediate_size": 8,
        "eos_token_id": EOS,
    }
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = byte_level().hf
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(folder)
    return folder


def read(folder: Path, records: list, read_answers: bool = False, template: str = TEMPLATE):
    path = folder / "data.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return PromptReader(str(folder), CONFIG, template, read_answers).read(path)


QUESTION = {"question": "1+1?", "answer": "2"}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"text": "ab", "answer": "c"}, spell("ab"), "c"),
        ({"prompt": "ab", "answer": "c"}, spell("ab"), "c"),
        (QUESTION, spell("Question: 1+1?\nAnswer:"), " 2"),
        ({"messages": CHAT}, [*spell("user: hi"), EOS, *spell("\nassistant: ")], "yo"),
    ],
    ids=["text", "prompt", "question", "messages"],
)
def test_forms(tokenizer: Path, record: dict, prompt: list[int], answer: str) -> None:
    """An answer ends with the stop token, whatever the template writes behind it."""
    assert read(tokenizer, [record]) == [Example(1, prompt, [])]
    ended = [*spell(answer), EOS]
    assert read(tokenizer, [record], read_answers=True) == [Example(1, prompt, ended)]


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    records = [{"token_ids": [5, 6]}, "", {"token_ids": [7], "answer_ids": [8, EOS]}]
    assert read(tmp_path, records) == [Example(1, [5, 6], []), Example(3, [7], [])]
    assert read(tmp_path, records[2:], read_answers=True) == [Example(1, [7], [8, EOS])]
    with pytest.raises(DataError, match="has no tokenizer"):
        read(tmp_path, [{"text": "a"}])


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="has no tokenizer"):
        read(tmp_path, [{"text": "a"}])


def test_a_prompt_template_of_ones_own(tokenizer: Path) -> None:
    assert read(tokenizer, [QUESTION], template="{question} = ") == [
        Example(1, spell("1+1? = "), [])
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', "line 2: is not valid JSON"),
        ('{"text": "\\ud800"}', "line 2: is not valid JSON .*surrogates"),
        ("[" * 10**6, "line 2: is not valid JSON .*recursion"),
        ('{"text": ' + "9" * 5000 + "}", "line 2: is not valid JSON .*4300 digits"),
        ("[1]", "line 2: must be a JSON object"),
        ({"txt": "a"}, r'line 2: needs one of text, prompt, .*; has only \["txt"\]'),
        ({"text": ""}, "text must be a non-empty string"),
        ({"text": 5}, "text must be a non-empty string, it is 5"),
        ({"token_ids": [1, 259]}, "token_ids has 259: token ids are between 0 and 258"),
        ({"token_ids": [1.5]}, "token_ids must be a list of integers"),
        ({"token_ids": []}, "the prompt is empty"),
        ({"messages": [{"role": "user"}]}, "messages must be a list of objects with role"),
        ({"messages": CHAT[1:]}, "no turn before the assistant's"),
    ],
)
def test_bad_lines_are_named(tokenizer: Path, line, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(tokenizer, [{"text": "good"}, line])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a"}, "answer must be a non-empty string"),
        ({"token_ids": [5]}, "answer_ids must be a list"),
        ({"messages": CHAT[:1]}, "needs a last message of role assistant"),
    ],
)
def test_answers_that_are_missing_are_named(tokenizer: Path, record: dict, said: str) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{said}"):
        read(tokenizer, [record], read_answers=True)


def test_all_bad_lines_are_listed_at_once_up_to_ten(tokenizer: Path) -> None:
    with pytest.raises(DataError) as error:
        read(tokenizer, ["{}"] * 14)
    lines = str(error.value).splitlines()
    assert [f"line {i + 1}:" in line for i, line in enumerate(lines[:10])] == [True] * 10
    assert lines[10] == "… and 4 more"


def test_a_file_without_lines_or_none_at_all(tokenizer: Path) -> None:
    with pytest.raises(DataError, match="has no lines"):
        read(tokenizer, [])
    with pytest.raises(DataError, match="cannot be read"):
        PromptReader(str(tokenizer), CONFIG, TEMPLATE, False).read(tokenizer / "none.jsonl")
