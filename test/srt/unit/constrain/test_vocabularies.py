"""Vocabularies of grammars: byte-level BPE, SentencePiece's with byte fallback, padded ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import byte_level, metaspace

from mamba_eagle.constrain.grammar import choice_grammar, regex_grammar, text_grammar
from mamba_eagle.constrain.vocabulary import (
    NoVocabulary,
    Vocabulary,
    read_tokenizer,
    tokenizer_json,
)
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.tokenizer.text import TextTokenizer

TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level-merged": byte_level(("yes", " no")),
    "byte-fallback": metaspace(),
}


def of(tokenizer: TextTokenizer, padding: int = 0) -> Vocabulary:
    size = len(tokenizer.hf) + padding
    return Vocabulary(tokenizer_json(tokenizer.hf), size, [tokenizer.hf.eos_token_id])


def special_in(tokenizer: str) -> dict[str, int]:
    """Of a tokenizer.json."""
    added = json.loads(tokenizer)["added_tokens"]
    return {token["content"]: token["id"] for token in added if token["special"]}


def texts(vocabulary: Vocabulary, tokenizer: TextTokenizer, grammar: str, count: int) -> set[str]:
    """What random walks through the grammar's masks write, as the detokenizer spells it."""
    luck, found = np.random.default_rng(1), set()
    for _ in range(count):
        matcher, output = vocabulary.matcher(grammar), []
        while True:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            tokens = np.unpackbits(mask, bitorder="little").nonzero()[0]
            assert len(tokens) and tokens.max() < len(tokenizer.hf)
            token = int(luck.choice(tokens))
            if token in vocabulary.eos:
                break
            assert matcher.try_consume_tokens([token]) == 1
            output.append(token)
        detokenizer = tokenizer.detokenizer([], True)
        pieces = [detokenizer.push(token) for token in output]
        found.add("".join(pieces) + detokenizer.flush())
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("padding", [0, 45])
def test_what_the_masks_allow_is_spelled_as_the_grammar_says(name: str, padding: int) -> None:
    """Letters of several bytes, too, whose tokens are parts of a letter; padding is never taken."""
    tokenizer = TOKENIZERS[name]
    vocabulary = of(tokenizer, padding)
    pattern = r"(yes|é中){1,2}( no)?[!ü]"
    found = texts(vocabulary, tokenizer, regex_grammar(pattern).text, 12)
    assert len(found) > 4 and all(re.fullmatch(pattern, text) for text in found), found
    words = ["é", "yes!", "中中"]
    assert texts(vocabulary, tokenizer, choice_grammar(words).text, 12) == set(words)


def test_special_tokens_are_no_text() -> None:
    """They can be asked for by name, and a pattern for any text never allows them."""
    vocabulary = of(TOKENIZERS["byte-level"])
    special = TOKENIZERS["byte-level"].special_tokens()
    assert special == {"<pad>": 0, "<s>": 1, "</s>": 2}
    anything = np.frombuffer(
        vocabulary.matcher(regex_grammar(r"(.|\n)+").text).compute_bitmask(), dtype=np.uint8
    )
    assert not np.unpackbits(anything, bitorder="little")[:3].any()
    named = vocabulary.matcher(text_grammar("a<s>b", special).text)
    assert named.try_consume_tokens([3 + ord("a"), 1, 3 + ord("b")]) == 3
    spelled = vocabulary.matcher(text_grammar("a<s>b").text)
    assert spelled.try_consume_tokens([3 + byte for byte in b"a<s>b"]) == 5


def test_a_folder_and_its_loaded_tokenizer_give_one_vocabulary(tmp_path: Path) -> None:
    """The runner reads the folder, the server has it loaded: tokens that tokenizer_config.json
    adds must be there in both."""
    tokenizer = byte_level()
    tokenizer.hf.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added: dict[str, Any] = config.setdefault("added_tokens_decoder", {})
    token = {"content": "<think>", "lstrip": False, "normalized": False, "rstrip": False}
    added["259"] = {**token, "single_word": False, "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = TextTokenizer.load(str(tmp_path))
    assert loaded.hf.convert_tokens_to_ids("<think>") == 259
    assert loaded.special_tokens()["<think>"] == 259
    grammar = text_grammar("<think>a", {"<think>": 259}).text
    for text in (read_tokenizer(str(tmp_path)), tokenizer_json(loaded.hf)):
        vocabulary = Vocabulary(text, 300, [2])
        assert special_in(text)["<think>"] == 259
        assert vocabulary.matcher(grammar).try_consume_tokens([259, 3 + ord("a")]) == 2


def test_an_added_token_that_the_model_lacks_spoils_no_grammar() -> None:
    """transformers gives some families an ``<|endoftext|>`` that their vocabulary does not have."""
    tokenizer = byte_level()
    size = len(tokenizer.hf)
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    vocabulary = Vocabulary(tokenizer_json(tokenizer.hf), size, [2])
    assert texts(vocabulary, tokenizer, choice_grammar(["é", "yes"]).text, 12) == {"é", "yes"}
    assert vocabulary.matcher(text_grammar("<s>", {"<s>": 1}).text).try_consume_tokens([1]) == 1
    named = vocabulary.matcher(text_grammar("<|endoftext|>", {"<|endoftext|>": size}).text)
    assert named.is_error()


def test_what_cannot_be_a_vocabulary_says_why(tmp_path: Path) -> None:
    text = tokenizer_json(byte_level().hf)
    with pytest.raises(NoVocabulary, match="eos_token_id"):
        Vocabulary(text, 300, [])
    with pytest.raises(NoVocabulary, match="cannot read"):
        Vocabulary("{", 300, [2])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(NoVocabulary, match=re.escape(str(tmp_path))):
        read_tokenizer(str(tmp_path))


def test_a_vocabulary_does_not_depend_on_the_locale() -> None:
    read = (
        "import sys; from mamba_eagle.constrain.vocabulary import read_tokenizer; "
        "sys.stdout.buffer.write(read_tokenizer(sys.argv[1]).encode())"
    )
    ascii_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", read, str(EMBEDDED_MODEL)],
        env={**os.environ, **ascii_locale},
        capture_output=True,
        timeout=100,
    )
    assert ran.stdout.decode() == read_tokenizer(str(EMBEDDED_MODEL)), ran.stderr
