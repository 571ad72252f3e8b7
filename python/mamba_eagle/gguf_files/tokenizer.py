"""A GGUF file's vocabulary as a tokenizer.json (https://huggingface.co/docs/tokenizers).

Byte-level BPE (``gpt2``) splits texts by a pattern that the file only names; what a name stands
for is taken from ``src/llama-vocab.cpp`` of llama.cpp. SentencePiece (``llama``) has scores instead
of merges, from which the merges follow.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from mamba_eagle.gguf_files.file import GgufFile
from mamba_eagle.gguf_files.tokens import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    special_id,
    token_texts,
    token_types,
)
from mamba_eagle.model_config import UnsupportedModel

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitting(NamedTuple):
    """How texts are cut into words before the merges."""

    patterns: tuple[str, ...]  # one after the other
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges
    bos: bool = False  # texts begin with the first token, unless the file says otherwise


ONE_DIGIT = Splitting((r"\p{N}", GPT2))
LIKE_LLAMA3 = Splitting((LLAMA3,), whole_words=True, bos=True)

# tokenizer.ggml.pre -> how it splits
SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "granite-docling"), Splitting((GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "command-r"), ONE_DIGIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting((LLAMA3,))),
    **dict.fromkeys(("llama-bpe", "llama3", "falcon3", "falcon-h1", "pixtral"), LIKE_LLAMA3),
    "qwen2": Splitting((QWEN2,)),
    "qwen35": Splitting((QWEN35,)),
    "tekken": Splitting((TEKKEN,), whole_words=True, bos=True),
}


def tokenizer_json(file: GgufFile) -> str:
    """The text of a tokenizer.json.

    Raises: UnsupportedModel naming a kind of vocabulary, or of splitting, that is not supported.
    """
    kind = file.metadata.get("tokenizer.ggml.model", "none")
    if kind not in KINDS:
        raise UnsupportedModel(
            f"{file.path} has a vocabulary of the kind {kind!r:.200}; known: {sorted(KINDS)}. "
            "Name the model's own with --tokenizer-path"
        )
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(file),
        **KINDS[kind](file),
    }
    return json.dumps(values, ensure_ascii=False)


def special_texts(file: GgufFile) -> dict[str, str]:
    """bos_token, eos_token, unk_token and pad_token, where the file names them."""
    tokens = token_texts(file)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {name: special_id(file, role) for name, role in roles.items()}
    return {
        f"{name}_token": tokens[number]
        for name, number in found.items()
        if number is not None and number < len(tokens)
    }


def chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template, or several by name."""
    begin = "tokenizer.chat_template"
    named = {
        key.removeprefix(begin + "."): text
        for key, text in file.metadata.items()
        if key.startswith(begin + ".")
    }
    default: str | None = file.metadata.get(begin)
    if not named:
        return default
    return {**({"default": default} if default else {}), **named}


def _added(file: GgufFile) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split."""
    types = token_types(file)
    return [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[number] != USER_DEFINED,
        }
        for number, text in enumerate(token_texts(file))
        if types[number] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _byte_level(file: GgufFile) -> dict[str, Any]:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre {name!r:.200} is not supported; known: "
            f"{sorted(SPLITTINGS)}. Name the model's own tokenizer with --tokenizer-path"
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise UnsupportedModel(
            f"{file.path} lacks tokenizer.ggml.merges; name the model's own tokenizer with "
            "--tokenizer-path"
        )
    splitting = SPLITTINGS[name]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in splitting.patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**level, "use_regex": False}],
        },
        "post_processor": _frame(file, splitting.bos),
        "decoder": {**level, "use_regex": False},
        "model": _bpe(
            file,
            [merge.split(" ", 1) for merge in merges],
            ignore_merges=splitting.whole_words,
        ),
    }


def _sentence_piece(file: GgufFile) -> dict[str, Any]:
    # Imported here: it takes a second, and few files need it.
    from transformers.convert_slow_tokenizer import generate_merges

    tokens = token_texts(file)
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise UnsupportedModel(
            f"{file.path} lacks tokenizer.ggml.scores; name the model's own tokenizer with "
            "--tokenizer-path"
        )
    types, unknown = token_types(file), special_id(file, "unknown")
    words = {
        text: number
        for number, text in enumerate(tokens)
        if types[number] not in (CONTROL, UNKNOWN, BYTE, UNUSED)
    }
    merges = generate_merges(words, {text: scores[number] for text, number in words.items()})
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "post_processor": _frame(file, bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            file,
            [list(pair) for pair in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


KINDS: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}


def _bpe(file: GgufFile, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    types = token_types(file)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        # what pads a vocabulary to a round number is not a token
        "vocab": {
            text: number for number, text in enumerate(token_texts(file)) if types[number] != UNUSED
        },
        "merges": merges,
        **options,
    }


def _frame(file: GgufFile, bos: bool) -> dict[str, Any] | None:
    """The tokens around each text. bos: whether it begins with one if the file does not say."""
    tokens = token_texts(file)
    around = {
        "bos": bool(file.metadata.get("tokenizer.ggml.add_bos_token", bos)),
        "eos": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    ids = {role: special_id(file, role) for role, wanted in around.items() if wanted}
    known = {role: number for role, number in ids.items() if number is not None}
    if not known:
        return None

    def special(role: str, segment: int) -> list[dict[str, Any]]:
        if role not in known:
            return []
        return [{"SpecialToken": {"id": tokens[known[role]], "type_id": segment}}]

    def framed(name: str, segment: int) -> list[dict[str, Any]]:
        text = [{"Sequence": {"id": name, "type_id": segment}}]
        return [*special("bos", segment), *text, *special("eos", segment)]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in known.values()
        },
    }
