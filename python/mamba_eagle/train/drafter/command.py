"""``mamba-eagle train-drafter --target PATH --algorithm eagle --data FILE --output DIR``.

Answers the prompts of FILE with the target, trains a head on the answers, and leaves a folder that
``serve`` takes.
The same command again goes on where a run was stopped. For several GPUs:
``torchrun --nproc-per-node 8 -m mamba_eagle.train.drafter.command …``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys

from mamba_eagle.config import ConfigError, EngineConfig, add_arguments, from_arguments
from mamba_eagle.resolve import resolve
from mamba_eagle.train.drafter.settings import TrainSettings

STOPPED, INTERRUPTED = 128 + 15, 128 + 2  # exit codes after SIGTERM, SIGINT, as of shells


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mamba-eagle train-drafter", description="Train a draft head for a model."
    )
    add_arguments(parser, TrainSettings)
    return parser


def engine_config(settings: TrainSettings) -> EngineConfig:
    """The engine that answers prompts: plain decoding of the target.

    Raises: ConfigError with every problem found, those of ``settings`` among them.
    """
    problems = settings.problems()
    config = EngineConfig(
        model_path=settings.target,
        device=settings.device,
        speculative_algorithm="NONE",
        max_running_requests=settings.max_running_requests,
        disable_overlap_schedule=True,
    )
    try:
        config = resolve(config)
    except ConfigError as error:
        problems += [p.replace("--model-path", "--target") for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return config


def main(argv: list[str] | None = None) -> int:
    # Read when torch is first imported; see bench_one_batch.main.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    argv = sys.argv[1:] if argv is None else argv
    settings: TrainSettings = from_arguments(TrainSettings, make_parser().parse_args(argv))
    try:
        config = engine_config(settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = dataclasses.replace(settings, target=config.model_path)
    from mamba_eagle.train.drafter.run import RUN_ERRORS, train  # imports torch: --help has not to

    try:
        finished = train(settings, config, shlex.join(["mamba-eagle", "train-drafter", *argv]))
    except RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # outside of the training loop, which ends in order
        print("stopped; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    return 0 if finished else STOPPED


if __name__ == "__main__":
    sys.exit(main())
