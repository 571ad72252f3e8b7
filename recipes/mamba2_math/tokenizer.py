"""The embedded model's tokenizer: byte-level BPE of 2048 entries, every digit a token of its own.

``python -m mamba2_math.tokenizer --output DIR [--extra-data FILE]`` learns the merges from
generated problems and, when given, from the questions and answers of a GSM8K file, so that ordinary
English is not spelled letter by letter. Encoding adds no token: a document begins with its text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mamba2_math.draft import document
from mamba2_math.problems import generate

VOCAB_SIZE = 2048
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

# A user turn is a question and an assistant turn its answer, as in the few-shot prompts. A system
# turn is plain text before the first question. Of tools the model sees names and parameters.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ 'Tools: ' }}
{%- for tool in tools -%}
{%- set shape = tool.function.parameters or {} -%}
{{ ', ' if not loop.first }}{{ tool.function.name }}({{ (shape.properties or {}) | join(', ') }})
{%- endfor -%}
{{ '\\n\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content or '' -%}
{%- if message.role == 'assistant' -%}
{{ 'Answer:' if loop.first else '\\nAnswer:' }}
{%- set said = content | trim -%}
{%- if said -%}{{ '' if said[0] in '{[' else ' ' }}{{ said }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set name, arguments = call.function.name, call.function.arguments -%}
{{ '<tool_call>\\n{"name": ' }}{{ name | tojson }}{{ ', "arguments": ' }}{{ arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{ '\\n<tool_response>\\n' }}{{ content }}{{ '\\n</tool_response>' }}
{%- else -%}
{{ '\\n\\n' if not loop.first }}{{ 'Question: ' if message.role == 'user' }}{{ content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\nAnswer:' }}{%- endif -%}
"""


def read_records(path: Path) -> list[dict[str, str]]:
    """The records of a GSM8K jsonl file (fields ``question`` and ``answer``)."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so any text encodes
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gave {tokenizer.get_vocab_size()} of {vocab_size} tokens: give more text"
        )
    return tokenizer


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that ``transformers.AutoTokenizer.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "special_tokens_map.json", special)
    write_json(folder / "tokenizer_config.json", config)


def training_texts(seed: int, count: int, extra: Path | None) -> Iterator[str]:
    for problem in generate(seed, count):
        yield document(**problem)
    if extra is not None:
        for record in read_records(extra):
            yield document(record["question"], record["answer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--count", type=int, default=12_000, help="generated problems to learn from"
    )
    parser.add_argument("--extra-data", type=Path, help="a GSM8K train.jsonl (optional)")
    args = parser.parse_args()
    save_tokenizer(
        train_tokenizer(training_texts(args.seed, args.count, args.extra_data)), args.output
    )


if __name__ == "__main__":
    main()
