"""The tokenizer of a GGUF file, as transformers would have loaded it from the checkpoint."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mamba_eagle.gguf_files.file import open_gguf
from mamba_eagle.gguf_files.tokenizer import chat_template, special_texts, tokenizer_json


def fast_tokenizer(path: str | Path) -> Any:
    """A fast tokenizer of transformers, with the file's chat template.

    Raises: UnsupportedModel, OSError
    """
    file = open_gguf(path)
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json(file)),
        clean_up_tokenization_spaces=False,
        **special_texts(file),
    )
    made.chat_template = chat_template(file)
    return made
