"""The vocabulary of a GGUF file: its tokens, and what each is for."""

from typing import Any

from mamba_eagle.gguf_files.file import GgufFile
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
