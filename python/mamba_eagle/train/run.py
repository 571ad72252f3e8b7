"""One run of ``train-drafter``, from the prompts to the finished head."""

import hashlib
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mamba_eagle.bench import facts
from mamba_eagle.config import ConfigError, EngineConfig, ModelSettings, flag_of
from mamba_eagle.core import SamplingParams
from mamba_eagle.devices import resolve_device
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.loader import load_weights
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.runner.assemble import START_ERRORS
from mamba_eagle.train.acceptance import Acceptance
from mamba_eagle.train.answers import AnswerFile, answer_all
from mamba_eagle.train.batches import Split, split_held_out, usable_answers
from mamba_eagle.train.heads import TRAINABLE_HEADS
from mamba_eagle.train.prompts import DataError, Example, PromptReader
from mamba_eagle.train.settings import CHANGEABLE, TrainSettings
from mamba_eagle.train.target import load_target
from mamba_eagle.train.trainer import Diverged, Trainer, set_precision
from mamba_eagle.train.world import World

NAME = "training.json"


class Record:
    """The ``training.json`` of one output folder."""

    def __init__(self, settings: TrainSettings) -> None:
        self.path = Path(settings.output) / NAME
        self.settings = asdict(settings)
        self.data_hash = hashlib.sha256(Path(settings.data).read_bytes()).hexdigest()

    def check(self) -> bool:
        """Returns: whether the folder holds a finished run of these settings.

        Raises: ConfigError if its run was started with settings that give other answers or weights.
        """
        if not self.path.is_file():
            return False
        before = json.loads(self.path.read_text(encoding="utf-8"))
        wrong = [
            f"{flag_of(name)} {self.settings[name]}: {self.path.parent} was started with {value}"
            for name, value in before["settings"].items()
            if name not in (*CHANGEABLE, "output", "data") and value != self.settings.get(name)
        ]
        if before["data_sha256"] != self.data_hash:
            wrong.append(
                f"--data {self.settings['data']}: {self.path.parent} was started with another "
                "content of the file"
            )
        if wrong:
            raise ConfigError([*wrong, "resume with the same settings or choose another --output"])
        return bool(before["finished"])

    def write(self, command: str, result: dict[str, Any] | None = None) -> None:
        """Writes the file atomically.

        Args:
            result: what the training has achieved; None when it starts.
        """
        value = {
            "finished": result is not None,
            "command": command,
            "settings": self.settings,
            "data_sha256": self.data_hash,
            **(result or {}),
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path)


RUN_ERRORS = (*START_ERRORS, OSError, DataError, Diverged)


def train(settings: TrainSettings, config: EngineConfig, command: str) -> bool:
    """Returns: False if SIGTERM or Ctrl-C has ended the run early.

    Raises: RUN_ERRORS, each with the cause and a remedy.
    """
    world = World.join(resolve_device(settings.device))
    try:
        return _train(settings, config, command, world)
    finally:
        world.leave()


def _train(settings: TrainSettings, config: EngineConfig, command: str, world: World) -> bool:
    folder = Path(settings.output)
    target_config = read_model_config(settings.target)
    prompts = read_prompts(settings, config, target_config, world)
    head_class = TRAINABLE_HEADS[settings.algorithm]
    if problems := head_class.problems(settings, target_config):
        raise ConfigError(problems)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--output {folder}: cannot create this folder: {error}"]) from None
    record = Record(settings)
    if record.check():
        world.log(f"{folder} holds a finished run of these settings: nothing to do")
        return True
    world.wait()  # all processes have read the record before it is written
    if world.is_first:
        record.write(command)
    answered = get_answers(settings, config, prompts, world)
    data = make_split(settings, answered, world)

    set_precision()
    target = load_target(Path(settings.target), world.device)
    head = head_class(settings, target, data.training)
    if settings.init_from:
        head.load(Path(settings.init_from))
    trainer = Trainer(settings, head, target, data, world)
    if not trainer.run():
        world.log(f"stopped after step {trainer.number}; run the same command again to resume")
        return False
    world.wait()  # the first process has written the head before all read it
    load_weights(head.module, folder)  # measure what was saved, rounded to bfloat16
    acceptance = trainer.measure()
    world.log(f"held out, as saved: {acceptance}")
    if world.is_first:
        record.write(command, results(trainer, acceptance))
        trainer.state_path.unlink()
    serve = ["mamba-eagle", "serve", "--model-path", settings.target]
    serve += ["--speculative-algorithm", settings.algorithm.upper()]
    serve += ["--speculative-draft-model-path", settings.output]
    world.log(f"serve it: {shlex.join(serve)}")
    return True


def read_prompts(
    settings: TrainSettings, config: ModelSettings, target: ModelConfig, world: World
) -> list[Example]:
    """The prompts that leave room for an answer of two tokens.

    Raises: DataError
    """
    reader = PromptReader(
        config.tokenizer_path, target, settings.prompt_template, settings.skip_generation
    )
    prompts = reader.read(Path(settings.data))
    max_length = max_sequence_length(settings, target)
    fitting = [p for p in prompts if len(p.prompt) + 2 <= max_length]
    if not fitting:
        raise DataError(
            f"all {len(prompts)} prompts have {max_length - 1} tokens or more: raise --max-length"
        )
    if dropped := len(prompts) - len(fitting):
        world.log(f"skipping {dropped} of {len(prompts)} prompts: too long for --max-length")
    check_held_out(settings, len(fitting))
    return fitting


def check_held_out(settings: TrainSettings, num_answers: int) -> None:
    """Raises: DataError if no answer would be left to train on."""
    if num_answers <= settings.held_out:
        raise DataError(
            f"--held-out {settings.held_out} leaves none of {num_answers} answers to train on: "
            "give more prompts or lower --held-out"
        )


def max_sequence_length(settings: TrainSettings, target: ModelConfig) -> int:
    """Tokens of prompt and answer together. A target without a limit says 0."""
    return min(settings.max_length, target.max_position_embeddings or settings.max_length)


def get_answers(
    settings: TrainSettings, config: EngineConfig, prompts: list[Example], world: World
) -> list[Example]:
    """The answers in the data file, or the target's, of which each process generates a share."""
    if settings.skip_generation:
        return prompts
    file = AnswerFile(Path(settings.output), world.rank)
    if world.is_first:
        file.repair()
    world.wait()
    done = file.read()
    world.wait()  # all processes have read the files before one is written
    missing = [prompt for prompt in prompts if prompt.line not in done]
    if done:
        world.log(f"{len(prompts) - len(missing)} of {len(prompts)} prompts are already answered")
    max_length = max_sequence_length(settings, read_model_config(settings.target))

    def sampling(asked: Example) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=min(settings.max_new_tokens, max_length - len(asked.prompt)),
            temperature=settings.temperature,
            seed=settings.seed * 1_000_003 + asked.line,  # differs from line to line
        )

    answer_all(config, missing[world.rank :: world.size], sampling, file)
    world.wait()
    answers = file.read()
    return [answers[prompt.line] for prompt in prompts]


def make_split(settings: TrainSettings, answered: list[Example], world: World) -> Split:
    """Raises: DataError if too few answers are left to train on."""
    answers = usable_answers(answered, settings.max_length)
    if dropped := len(answered) - len(answers):
        world.log(f"skipping {dropped} of {len(answered)} answers: too short to draft in")
    check_held_out(settings, len(answers))
    return split_held_out(answers, settings.held_out, settings.seed)


def results(trainer: Trainer, acceptance: Acceptance) -> dict[str, Any]:
    return {
        "acceptance": acceptance.as_dict(),
        "answers": len(trainer.data.training),
        "held_out": len(trainer.data.held_out),
        "steps": trainer.number,
        "trained_tokens": trainer.trained_tokens,
        "seconds": round(trainer.seconds, 1),
        "processes": trainer.world.size,
        "device": facts.device_name(trainer.world.device.type),
        "commit": facts.commit(),
    }
