"""Trains the embedded 6M hybrid, or with ``--config`` another model on the same text.

``python -m mamba2_math.pretrain --output DIR``: eight minutes on one H100 by default. The
text is generated (see ``problems.py``); a GSM8K file can be mixed in with ``--extra-data``. Weights
stay float32 with bfloat16 products on a GPU, and are rounded to bfloat16 at the end; the last lines
printed are measured after rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mamba2_math import loop, skills
from mamba2_math.checkpoint import MODEL_CONFIG, load_weights, save_model
from mamba2_math.data import VALIDATION_STREAM, ProblemEncoder, Sequences, SequenceStream
from mamba2_math.draft import Problem
from mamba2_math.evaluate import accuracy, exact_match, make_questions, share_written
from mamba2_math.problems import held_out, stream
from mamba2_math.skills.chat import READ, SKIPPED, WRITTEN
from mamba2_math.training_context import TrainingContext
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.layers.block import Block
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.heads.base import initialize
from mamba_eagle.train.trainer import autocast, set_precision

WEIGHTS = {READ: 0.2, WRITTEN: 1.0, SKIPPED: 0.0}  # of a token in the loss
SHOTS = 5


def to_device(sequences: Sequences, device: str) -> tuple[Tensor, Tensor]:
    """tokens int64 and their weights float32, both [count, length]."""
    tokens = torch.from_numpy(sequences.tokens.astype(np.int64))
    table = np.array([WEIGHTS[kind] for kind in sorted(WEIGHTS)], dtype=np.float32)
    weights = torch.from_numpy(table[sequences.kinds])
    if device.startswith("cuda"):
        tokens, weights = tokens.pin_memory(), weights.pin_memory()
    return tokens.to(device, non_blocking=True), weights.to(device, non_blocking=True)


def language_loss(model: NemotronHForCausalLM, tokens: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy of the next token."""
    count, length = tokens.shape
    hidden = model(tokens.flatten(), TrainingContext(count, length))
    logits = model.compute_logits(hidden).view(count, length, -1)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum()


def compiled(function: Callable) -> Callable:
    """``torch.compile(function)``, or the function itself where compiling fails."""
    fast, chosen = torch.compile(function, dynamic=False), None

    def call(*args):
        nonlocal chosen
        if chosen is None:
            try:
                result = fast(*args)
                chosen = fast
                return result
            except Exception as error:  # a compiler may fail in any way; the run must not
                print(f"torch.compile failed, running without: {error!r}"[:500], flush=True)
                chosen = function
        return chosen(*args)

    return call


def compile_layers(model: NemotronHForCausalLM) -> None:
    """For passes with gradients. Each kind of layer is compiled once, however many there are; the
    model as a whole takes 86 s."""
    fast = compiled(Block.forward)

    def run_layers(layers: Sequence, hidden: Tensor, embedded: Tensor, ctx: Any) -> Tensor:
        step = fast if torch.is_grad_enabled() else Block.forward
        for layer in layers:
            hidden = step(layer, hidden, ctx)
        return hidden

    model.run_layers = run_layers


def validation_problems(seed: int, count: int) -> list[Problem]:
    return list(itertools.islice(stream(10_000_019 * VALIDATION_STREAM + seed), count))


def evaluate(model: NemotronHForCausalLM, encoder: ProblemEncoder, problems: list[Problem]) -> str:
    shots = validation_problems(1, SHOTS)
    zero = exact_match(model, make_questions(problems, encoder))
    few = exact_match(model, make_questions(problems, encoder, shots))
    return f"exact match {zero:.3f}, with {SHOTS} examples {few:.3f}"


def train(args: argparse.Namespace, config: dict[str, Any]) -> NemotronHForCausalLM:
    """config: the model's config.json."""
    per_block = min(128, max(4, args.batch_rows))
    data = SequenceStream(
        args.tokenizer, args.seed, args.length, args.workers, per_block, args.extra_data
    )
    try:
        return _train(args, config, data)
    finally:
        data.close()


def _train(
    args: argparse.Namespace, config: dict[str, Any], data: SequenceStream
) -> NemotronHForCausalLM:
    set_precision()
    device = args.device
    model = NemotronHForCausalLM(parse_config(config)).float()
    initialize(model, args.seed)
    if args.init_from is not None:
        load_weights(model, args.init_from)
    model.to(device)
    count = sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    print(f"{count / 1e6:.2f} M parameters, {name}, {args.workers} data workers", flush=True)

    if args.compile:
        compile_layers(model)
    encoder = ProblemEncoder(args.tokenizer)
    problems = validation_problems(0, args.eval_count)
    loop.run(
        args,
        model,
        data,
        compute_loss=lambda: language_loss(model, *to_device(data.batch(args.batch_rows), device)),
        evaluate=lambda: evaluate(model, encoder, problems),
        save=lambda: save_model(model, args.output, args.tokenizer, config),
    )
    return model


def report(model: NemotronHForCausalLM, args: argparse.Namespace) -> None:
    """Prints what the rounded model does on the held-out problems."""
    encoder = ProblemEncoder(args.tokenizer)
    problems = list(held_out())[: args.final_count]
    if not problems:
        return
    with autocast(args.device):
        print("held out:", evaluate(model, encoder, problems), flush=True)
        for skill in skills.SKILLS:
            chats = encoder.encode_chats(list(skills.held_out(skill)[: args.final_count]))
            print(f"held out: {skill} {share_written(model, chats):.3f}", flush=True)
        for name, shots in (("0 examples", 0), (f"{SHOTS} examples", SHOTS)):
            start = time.monotonic()
            questions = make_questions(problems, encoder, validation_problems(1, shots))
            share = accuracy(model, questions, encoder)
            seconds = time.monotonic() - start
            print(f"held out: greedy accuracy {share:.3f}, {name}, {seconds:.0f} s", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    loop.add_arguments(parser, minutes=8.0, lr=3e-3)
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument(
        "--config", type=Path, help="config.json of a nemotron_h model; default: the embedded one's"
    )
    parser.add_argument("--init-from", type=Path, help="go on from this checkpoint's weights")
    parser.add_argument("--final-count", type=int, default=200, help="held-out problems to report")
    args = parser.parse_args(argv)
    loop.fill_defaults(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    config = json.loads(args.config.read_text(encoding="utf-8")) if args.config else MODEL_CONFIG
    model = train(args, config)
    save_model(model, args.output, args.tokenizer, config)
    load_weights(model, args.output)  # what is measured now is what was saved
    print(f"saved {args.output}", flush=True)
    report(model, args)


if __name__ == "__main__":
    main()
