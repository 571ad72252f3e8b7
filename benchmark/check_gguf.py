"""Is a GGUF file of llama.cpp's converter read as what it was made from?

Makes a small random checkpoint of each family, with the embedded model's tokenizer, has
convert_hf_to_gguf.py convert it, and compares the logits of the file, as the server loads it, with
those of transformers for the checkpoint, and its tokenizer with the checkpoint's. The files that
the tests write themselves (test/srt/models/gguf_writer.py) are compared with the converter's: same
keys, same tensors.

    python -m benchmark.check_gguf --llama-cpp DIR        # a checkout of ggml-org/llama.cpp

The converter runs by this Python, with the gguf package of the checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "test/srt" / part) for part in ("models", "rigs")]

import gguf_writer  # noqa: E402
import peer_models  # noqa: E402
from gguf import GGUFReader  # noqa: E402
from tiny_model import load_model  # noqa: E402

from mamba_eagle.embedded import EMBEDDED_MODEL  # noqa: E402
from mamba_eagle.layers.context import FullSequenceContext  # noqa: E402
from mamba_eagle.tokenizer.text import TextTokenizer  # noqa: E402

# The converter knows tokenizers by a hash of what they make of one text; the embedded model's is
# none of them, so its name is given: digits one by one, then GPT-2's pattern. And config.json is
# read as it is: transformers adds the keys of experts to a Nemotron-H without any.
CONVERT = """
import json, pathlib, runpy, sys
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
base.ModelBase.load_hparams = staticmethod(
    lambda folder, *_, **__: json.loads((pathlib.Path(folder) / "config.json").read_text())
)
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[1:]]
runpy.run_path("convert_hf_to_gguf.py", run_name="__main__")
"""
TEXTS = (
    "What is 12 + 345? It's twelve plus 345.",
    "Tom has 3 apples.\n\n  He buys  7 more,\tdoesn't he?  ",
    "<s>Zürich, 北京 🦙</s> 1234567",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="folder for checkpoints and files")
    parser.add_argument("--only", nargs="*", default=list(gguf_writer.PEERS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        worst = [check(name, folder, args.llama_cpp) for name in args.only]
    sys.exit(1 if max(worst) > 2e-4 else 0)


def check(name: str, folder: Path, llama_cpp: Path) -> float:
    """The largest difference of logits."""
    checkpoint, file = folder / name, folder / f"{name}.gguf"
    own = folder / f"{name}-own.gguf"
    model = make_checkpoint(name, checkpoint)
    convert(checkpoint, file, llama_cpp)
    gguf_writer.write(checkpoint, own)
    tokens = torch.randint(0, 2048, (2, 45), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = peer_models.peer_logits(model, tokens)
    loaded = load_model(file)
    hidden = loaded(tokens.flatten(), FullSequenceContext(*tokens.shape))
    difference = float((loaded.compute_logits(hidden).view_as(expected) - expected).abs().max())
    mine, theirs = TextTokenizer.load(str(file)), TextTokenizer.load(str(checkpoint))
    same_ids = all(mine.encode(text) == theirs.encode(text) for text in TEXTS)
    same_chat = mine.hf.chat_template == theirs.hf.chat_template
    print(
        f"{name:22} logits differ by {difference:.1e} (of {float(expected.std()):.1f} wide), "
        f"tokens {'equal' if same_ids else 'DIFFER'}, "
        f"chat template {'equal' if same_chat else 'DIFFERS'}, "
        f"written by the tests: {differences(file, own) or 'equal'}"
    )
    return difference if same_ids and same_chat else float("inf")


def make_checkpoint(name: str, folder: Path) -> Any:
    """A checkpoint as it is published, where transformers writes another config.json."""
    prefix, settings = gguf_writer.PEERS[name]
    peer_models.PEERS[name] = (prefix, {**settings, "vocab_size": 2048})
    model = peer_models.make_peer(name)
    model.save_pretrained(folder)
    for path in EMBEDDED_MODEL.glob("*token*.json"):
        shutil.copy(path, folder)
    gguf_writer.as_published(folder)
    return model


def convert(checkpoint: Path, file: Path, llama_cpp: Path) -> None:
    command = [sys.executable, "-c", CONVERT, str(checkpoint.resolve())]
    command += ["--outfile", str(file.resolve()), "--outtype", "f32", "--no-mtp"]
    path = os.pathsep.join([str(llama_cpp / "gguf-py"), str(llama_cpp)])
    done = subprocess.run(
        command,
        cwd=llama_cpp,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"converting {checkpoint} failed:\n{done.stderr[-3000:]}")


def differences(file: Path, own: Path) -> str:
    """What the two files do not share: keys and values, names, shapes and bytes of tensors."""
    theirs, mine = GGUFReader(file), GGUFReader(own)
    wrong = []
    for key, field in mine.fields.items():
        if key.startswith(("GGUF.", "general.", "tokenizer.")) and key != "general.architecture":
            continue
        if key not in theirs.fields:
            wrong.append(f"{key} is not theirs")
        elif theirs.fields[key].contents() != field.contents():
            wrong.append(f"{key} {field.contents()}, theirs {theirs.fields[key].contents()}")
    left = {tensor.name: tensor for tensor in theirs.tensors}
    for tensor in mine.tensors:
        other = left.pop(tensor.name, None)
        if other is None:
            wrong.append(f"{tensor.name} is not theirs")
        elif list(other.shape) != list(tensor.shape):
            wrong.append(f"{tensor.name} {list(tensor.shape)}, theirs {list(other.shape)}")
        elif not np.allclose(other.data, tensor.data, rtol=1e-6):  # torch's exp and numpy's
            wrong.append(f"{tensor.name} has other values")
    return ", ".join([*wrong, *(f"{name} is missing" for name in left)])


if __name__ == "__main__":
    main()
