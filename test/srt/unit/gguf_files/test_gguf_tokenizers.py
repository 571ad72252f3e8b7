"""The vocabulary of a GGUF file makes the tokens that the checkpoint's own tokenizer makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType

from mamba_eagle.constrain.vocabulary import NoVocabulary, Vocabulary, read_tokenizer
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.gguf_files.file import open_gguf
from mamba_eagle.gguf_files.tokenizer import end_tokens, rust_tokenizer
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.tokenizer.text import TextTokenizer

TEXTS = (
    "What is 12 + 345? It's twelve plus 345.",
    "Tom has 3 apples.\n\n  He buys  7 more,\tdoesn't he?  ",
    "<s>Zürich, 北京 🦙</s> 1234567 <pad>",
    " ",
    "",
)


def write(path: Path, **changes: Any) -> Path:
    """Metadata alone: keys with two underscores for dots; None leaves a key out."""
    values = {**BYTE_LEVEL, **{key.replace("__", "."): value for key, value in changes.items()}}
    writer = GGUFWriter(path, "mamba2")
    for key, value in values.items():
        name = key if key.startswith("tokenizer.chat") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_embedded() -> dict[str, Any]:
    """The embedded model's vocabulary as the converter writes it, padded by two tokens."""
    values = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    template = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())["chat_template"]
    vocabulary = values["model"]["vocab"]
    special = {token["content"] for token in values["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    merges = values["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*tokens, "[PAD2048]", "[PAD2049]"],
        "token_type": [*map(int, types), int(TokenType.UNUSED), int(TokenType.UNUSED)],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "padding_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
        "tokenizer.chat_template": template,
    }


BYTE_LEVEL = of_embedded()


@pytest.fixture(scope="module")
def own() -> TextTokenizer:
    return TextTokenizer.load(str(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(str(write(tmp_path_factory.mktemp("gguf") / "a.gguf")))


def test_byte_level_tokens_are_those_of_the_checkpoint(
    own: TextTokenizer, read: TextTokenizer
) -> None:
    for text in TEXTS:
        ids = own.encode(text)
        assert read.encode(text) == ids
        for skip in (True, False):
            assert read.decode(ids, skip) == own.decode(ids, skip)
    assert read.special_tokens() == own.special_tokens()
    assert read.hf.get_vocab() == own.hf.get_vocab(), "padding is no token"
    assert (read.hf.bos_token, read.hf.eos_token, read.hf.pad_token) == ("<s>", "</s>", "<pad>")


def test_chats_are_rendered_by_the_files_template(
    own: TextTokenizer, read: TextTokenizer, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    rendered = [
        tokenizer.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for tokenizer in (read, own)
    ]
    assert rendered[0] == rendered[1] != ""
    both = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    several = TextTokenizer.load(str(write(tmp_path / "a.gguf", **both)))
    assert several.hf.chat_template == {"default": "one", "tool_use": "two"}
    none = TextTokenizer.load(str(write(tmp_path / "b.gguf", **{"tokenizer.chat_template": None})))
    assert none.hf.chat_template is None


def test_grammars_read_the_same_vocabulary(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf")
    text = read_tokenizer(str(file))
    assert Vocabulary(text, 2050, [2]).eos == (2,)
    added = json.loads(text)["added_tokens"]
    special = {token["content"]: token["id"] for token in added if token["special"]}
    assert special == {"<pad>": 0, "<s>": 1, "</s>": 2}
    with pytest.raises(NoVocabulary, match="kind 'rwkv'"):
        read_tokenizer(str(write(tmp_path / "b.gguf", model="rwkv")))


def test_texts_begin_and_end_with_the_tokens_that_the_file_names(
    own: TextTokenizer, tmp_path: Path
) -> None:
    ids = own.encode("It's 12")
    cases: dict[str, tuple[dict[str, Any], list[int]]] = {
        "both": ({"add_bos_token": True, "add_eos_token": True}, [1, *ids, 2]),
        "none": ({"add_bos_token": None}, ids),
    }
    for name, (changes, expected) in cases.items():
        made = TextTokenizer.load(str(write(tmp_path / f"{name}.gguf", **changes)))
        assert made.encode("It's 12") == expected
    # by the name of the splitting, where the file does not say
    like_llama = write(tmp_path / "llama.gguf", pre="llama-bpe", add_bos_token=None)
    assert TextTokenizer.load(str(like_llama)).encode("It's")[0] == 1
    quiet = write(tmp_path / "quiet.gguf", pre="llama-bpe")
    assert TextTokenizer.load(str(quiet)).encode("It's")[0] != 1


# name -> a text and its words; a space is written Ġ and a line break Ċ
SPLIT = {
    "gpt-2": ("It's 123, Ünder\n\n x", ["It", "'s", "Ġ123", ",", "ĠÃľnder", "ĊĊ", "Ġx"]),
    "starcoder": ("It's 123, x", ["It", "'s", "Ġ", "1", "2", "3", ",", "Ġx"]),
    "dbrx": ("It'S 12345,\n x", ["It", "'S", "Ġ", "123", "45", ",Ċ", "Ġx"]),
    "falcon-h1": ("It'S 12345,\n x", ["It", "'S", "Ġ", "123", "45", ",Ċ", "Ġx"]),
    "qwen2": ("It'S 123,\n x", ["It", "'S", "Ġ", "1", "2", "3", ",Ċ", "Ġx"]),
    "qwen35": ("It'S 1\u0915\u093e,\n x", ["It", "'S", "Ġ", "1", "à¤ķà¤¾", ",Ċ", "Ġx"]),
    "tekken": ("It's camelCase 12/\n", ["It", "'s", "Ġcamel", "Case", "Ġ", "1", "2", "/Ċ"]),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_name_stands_for_its_way_of_splitting(name: str, tmp_path: Path) -> None:
    text, words = SPLIT[name]
    made = rust_tokenizer(open_gguf(write(tmp_path / "a.gguf", pre=name)))
    assert [word for word, _ in made.pre_tokenizer.pre_tokenize_str(text)] == words


def test_whole_words_are_taken_whatever_the_merges(tmp_path: Path) -> None:
    """As llama.cpp does for the names that say so: here is a token that no merge makes."""
    word = next(token for token in BYTE_LEVEL["tokens"] if token.startswith("Ġ") and token[5:])
    number = BYTE_LEVEL["tokens"].index(word)
    merges = [merge for merge in BYTE_LEVEL["merges"] if merge.replace(" ", "") != word]
    found = {}
    for name in ("dbrx", "llama-bpe"):
        file = write(tmp_path / f"{name}.gguf", pre=name, merges=merges)
        found[name] = TextTokenizer.load(str(file)).encode(word.replace("Ġ", " "))
    assert found["llama-bpe"] == [number]
    assert number not in found["dbrx"]


def test_all_tokens_that_end_a_text_are_known(tmp_path: Path) -> None:
    """Those that the file names, and the end of a turn, which it often does not."""
    tokens, types = list(BYTE_LEVEL["tokens"]), list(BYTE_LEVEL["token_type"])
    tokens[300], types[300] = "<|im_end|>", int(TokenType.CONTROL)
    tokens[301] = "<|eot_id|>"  # an ordinary token that looks like one
    file = write(tmp_path / "a.gguf", tokens=tokens, token_type=types, eot_token_id=7)
    assert end_tokens(open_gguf(file)) == [2, 7, 300]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre 'deepseek-llm' is not supported; known"),
        ({"pre": None}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"model": None}, "kind 'none'; known: .* --tokenizer-path"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"model": "llama"}, "lacks tokenizer.ggml.scores"),
        ({"tokens": None}, "has no vocabulary .* --tokenizer-path"),
    ],
)
def test_other_vocabularies_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        rust_tokenizer(open_gguf(write(tmp_path / "a.gguf", **changes)))


# ── SentencePiece ──

PIECES = ("▁the", "the", "▁t", "he", "▁he", "▁hello", "hello", "llo", "el", "th", "lo", "▁w", "or")


def sentence_piece(text: str, numbers: dict[str, int], scores: list[float]) -> list[int]:
    """The algorithm itself: of all neighbours that join to a token, those with the best score are
    joined, the first ones first; then characters that are no token are spelled in bytes."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in zip(parts, parts[1:])]
        known = [(scores[numbers[one]], -at) for at, one in enumerate(joined) if one in numbers]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = [joined[at]]
    ids = []
    for part in parts:
        spelled = [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
        ids += [numbers[part]] if part in numbers else spelled
    return ids


def test_sentence_piece_tokens_are_those_of_its_algorithm(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    letters = sorted({letter for piece in PIECES for letter in piece})
    tokens += [*PIECES, *letters]
    types += [TokenType.NORMAL] * (len(PIECES) + len(letters))
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) + len(letters))]
    file = write(
        tmp_path / "a.gguf",
        model="llama",
        pre="default",
        tokens=tokens,
        token_type=[int(kind) for kind in types],
        scores=scores,
        merges=None,
        unknown_token_id=0,
        add_bos_token=None,
    )
    read = TextTokenizer.load(str(file))
    numbers = {token: number for number, token in enumerate(tokens)}
    for text in ("the hello", "he lloworth the other", "Zürich tthhe", "hellohello  w"):
        ids = read.encode(text)
        assert ids == [1, *sentence_piece(text, numbers, scores)]
        assert read.decode(ids) == text
    assert read.hf.unk_token == "<unk>"
