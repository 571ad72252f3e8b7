"""GGUF files of a checkpoint: F16 by llama.cpp's converter, then Q8_0 and Q4_0 by its library, all
matrices in the same format. Random checkpoints have no vocabulary, and get none.

    python llama_cpp_files.py convert LLAMA_SOURCE FOLDER OUT    (needs torch, transformers)
    python llama_cpp_files.py quantize FROM OUT FORMAT           (needs llama-cpp-python)

LLAMA_SOURCE is a checkout of llama.cpp, or vendor/llama.cpp in the source package of
llama-cpp-python. Called by benchmark/cpu_vs_llama.py.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from pathlib import Path
from typing import Any


def convert(source: str, folder: str, out: str) -> None:
    sys.path[:0] = [source, str(Path(source, "gguf-py"))]
    from conversion import granite, mamba  # llama.cpp's

    mamba.Mamba2Model.set_vocab = no_vocabulary
    granite.GraniteHybridModel.get_attn_layers = attention_layers
    script = str(Path(source, "convert_hf_to_gguf.py"))
    sys.argv = [script, folder, "--outfile", out, "--outtype", "f16"]
    runpy.run_path(script, run_name="__main__")


def no_vocabulary(model: Any) -> None:
    model._set_vocab_none()
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def attention_layers(model: Any) -> list[int]:
    """The converter's own overlooks the names that transformers has given them lately."""
    kinds = model.hparams["layer_types"]
    return [i for i, kind in enumerate(kinds) if kind in ("attention", "full_attention")]


def quantize(given: str, out: str, form: str) -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form}")
    params.pure = True
    code = llama_cpp.llama_model_quantize(given.encode(), out.encode(), ctypes.byref(params))
    if code != 0:
        raise SystemExit(f"llama_model_quantize returned {code} for {given} -> {out}")


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    {"convert": convert, "quantize": quantize}[action](*arguments)
