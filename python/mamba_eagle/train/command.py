"""``mamba-eagle train-drafter --target PATH --algorithm eagle --data FILE --output DIR``.

Answers the prompts of FILE with the target, trains a head on the answers, and leaves a folder that
``serve`` can load. Run again, the same command resumes where it was stopped. On several GPUs:
``torchrun --nproc-per-node 8 -m mamba_eagle.train.command …``.
"""

import dataclasses
import os
import shlex
import sys

from mamba_eagle.config import ConfigError, EngineConfig, Parser, add_arguments, from_arguments
from mamba_eagle.resolve import resolve
from mamba_eagle.train.settings import TrainSettings

# Exit codes after SIGTERM and SIGINT, as shells report them.
STOPPED = 128 + 15
INTERRUPTED = 128 + 2


def make_parser() -> Parser:
    parser = Parser(prog="mamba-eagle train-drafter", description="Train a draft head for a model.")
    add_arguments(parser, TrainSettings)
    return parser


def engine_config(settings: TrainSettings) -> EngineConfig:
    """The configuration of the engine that answers the prompts: the target without a drafter.

    Raises: ConfigError listing all problems, those of ``settings`` included.
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
    from mamba_eagle.train.run import RUN_ERRORS, train  # imports torch, which --help does not need

    try:
        finished = train(settings, config, shlex.join(["mamba-eagle", "train-drafter", *argv]))
    except RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while answering; the training loop ends in an orderly way
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    return 0 if finished else STOPPED


if __name__ == "__main__":
    sys.exit(main())
