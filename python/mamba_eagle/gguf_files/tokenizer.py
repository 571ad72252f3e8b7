"""The vocabulary of a GGUF file, and its tokenizer, as transformers would have loaded it from the
checkpoint.

Byte-level BPE (``gpt2``) splits texts by a pattern that the file only names; what a name stands
for is taken from ``src/llama-vocab.cpp`` of llama.cpp. SentencePiece (``llama``) has scores instead
of merges, from which the merges follow.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from mamba_eagle.gguf_files.file import GgufFile, open_gguf
from mamba_eagle.model_config import UnsupportedModel

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Control tokens that end a turn. Files name one or two end tokens by id; a chat model's end of
# turn is often a third, which its generation_config.json has and the file has not.
END_TEXTS = ("<|im_end|>", "<|eot_id|>")
ENDS = ("eos", "eot", "eom")


def token_texts(file: GgufFile) -> list[str]:
    """Raises: UnsupportedModel if the file has no vocabulary."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModel(
            f"{file.path} has no vocabulary (tokenizer.ggml.tokens); name the model's own with "
            "--tokenizer-path"
        )
    return list(tokens)


def token_types(file: GgufFile) -> list[int]:
    """One for each token; NORMAL where the file says nothing."""
    types = file.metadata.get("tokenizer.ggml.token_type") or []
    return list(types) or [NORMAL] * len(token_texts(file))


def special_id(file: GgufFile, role: str) -> int | None:
    """The token of a role (bos, eos, unk, padding), if there is one."""
    value: Any = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return value if type(value) is int else None


def end_tokens(file: GgufFile) -> list[int]:
    """All tokens that end a text."""
    found = {special_id(file, role) for role in ENDS}
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    if tokens:
        types = token_types(file)
        texts = {token: number for number, token in enumerate(tokens) if types[number] == CONTROL}
        found |= {texts.get(text) for text in END_TEXTS}
    return sorted(number for number in found if number is not None)


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


def fast_tokenizer(path: str | Path) -> Any:
    """A fast tokenizer of transformers, with the file's chat template.

    Raises: UnsupportedModel, OSError
    """
    # Imported here: it takes seconds, and grammars need the Rust tokenizer alone.
    from transformers import PreTrainedTokenizerFast

    file = open_gguf(path)
    made = PreTrainedTokenizerFast(
        tokenizer_object=rust_tokenizer(file),
        clean_up_tokenization_spaces=False,
        **special_texts(file),
    )
    made.chat_template = chat_template(file)
    return made


def rust_tokenizer(file: GgufFile) -> Tokenizer:
    """Raises: UnsupportedModel naming a kind of vocabulary, or of splitting, that is not
    supported."""
    kind = file.metadata.get("tokenizer.ggml.model", "none")
    if kind not in KINDS:
        raise UnsupportedModel(
            f"{file.path} has a vocabulary of the kind {kind!r:.200}; known: {sorted(KINDS)}. "
            "Name the model's own with --tokenizer-path"
        )
    made = KINDS[kind](file)
    types = token_types(file)
    # what is found in a text before it is split
    made.add_tokens(
        [
            AddedToken(text, normalized=False, special=types[number] != USER_DEFINED)
            for number, text in enumerate(token_texts(file))
            if types[number] in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )
    return made


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


def _byte_level(file: GgufFile) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre {name!r:.200} is not supported; known: "
            f"{sorted(SPLITTINGS)}. Name the model's own tokenizer with --tokenizer-path"
        )
    splitting = SPLITTINGS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _needed(file, "merges")]
    made = Tokenizer(BPE(_vocabulary(file), merges, ignore_merges=splitting.whole_words))
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in splitting.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    made.decoder = decoders.ByteLevel()
    _frame(made, file, splitting.bos)
    return made


def _sentence_piece(file: GgufFile) -> Tokenizer:
    # Imported here: it takes a second, and few files need it.
    from transformers.convert_slow_tokenizer import generate_merges

    tokens, scores = token_texts(file), _needed(file, "scores")
    types, unknown = token_types(file), special_id(file, "unknown")
    words = {
        text: number
        for number, text in enumerate(tokens)
        if types[number] not in (CONTROL, UNKNOWN, BYTE, UNUSED)
    }
    merges = generate_merges(words, {text: scores[number] for text, number in words.items()})
    unk_token = None if unknown is None else tokens[unknown]
    made = Tokenizer(
        BPE(_vocabulary(file), merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend("▁")] if prefixed else []
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _frame(made, file, bos=True)
    return made


KINDS: dict[str, Callable[[GgufFile], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentence_piece}


def _needed(file: GgufFile, key: str) -> list[Any]:
    values: list[Any] | None = file.metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        raise UnsupportedModel(
            f"{file.path} lacks tokenizer.ggml.{key}; name the model's own tokenizer with "
            "--tokenizer-path"
        )
    return values


def _vocabulary(file: GgufFile) -> dict[str, int]:
    """Without what pads it to a round number."""
    types = token_types(file)
    texts = enumerate(token_texts(file))
    return {text: number for number, text in texts if types[number] != UNUSED}


def _frame(made: Tokenizer, file: GgufFile, bos: bool) -> None:
    """The tokens around each text. bos: whether it begins with one if the file does not say."""
    tokens = token_texts(file)
    around = {
        "bos": file.metadata.get("tokenizer.ggml.add_bos_token", bos),
        "eos": file.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {role: special_id(file, role) for role, wanted in around.items() if wanted}
    known = {role: (tokens[number], number) for role, number in ids.items() if number is not None}
    if known:
        begin, end = ([known[role][0]] if role in known else [] for role in ("bos", "eos"))
        one, other = ([*begin, text, *end] for text in ("$A", "$B"))
        second = [f"{part}:1" for part in other]
        made.post_processor = TemplateProcessing(
            single=one, pair=[*one, *second], special_tokens=list(known.values())
        )
