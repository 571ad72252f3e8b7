"""Tokenizers made on the spot: bytes alone, and bytes with a few merges."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mamba_eagle.tokenizer.detokenize import byte_alphabet
from mamba_eagle.tokenizer.text import TextTokenizer

PAD, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3  # byte b is token 3 + b
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_level(merged: tuple[str, ...] = ()) -> TextTokenizer:
    """Every byte a token, then the ``merged`` ASCII words."""
    letters = {byte: char for char, byte in byte_alphabet().items()}
    vocabulary = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    for byte in range(256):
        vocabulary[letters[byte]] = FIRST_BYTE + byte
    merges: list[tuple[str, str]] = []
    for word in merged:
        entry = "".join(letters[byte] for byte in word.encode())
        for end in range(2, len(entry) + 1):
            if entry[:end] not in vocabulary:
                vocabulary[entry[:end]] = len(vocabulary)
                merges.append((entry[: end - 1], entry[end - 1]))
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT
    return TextTokenizer(fast)


def metaspace() -> TextTokenizer:
    """SentencePiece's way: words begin with U+2581, unknown bytes are spelled <0xNN>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁Hello": 3, "▁world": 4, "!": 5}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    inner.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))


def spell(text: str) -> list[int]:
    """The byte tokens of a text."""
    return [FIRST_BYTE + byte for byte in text.encode()]
