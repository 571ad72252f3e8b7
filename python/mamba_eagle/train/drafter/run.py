"""One run of ``train-drafter``, from the prompts to the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mamba_eagle.bench import facts
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.models.config import ModelConfig
from mamba_eagle.models.loader import load_weights
from mamba_eagle.runner.model_runner import START_ERRORS, resolve_device
from mamba_eagle.train import loop
from mamba_eagle.train.drafter.acceptance import Acceptance
from mamba_eagle.train.drafter.answers import Answered, AnswerFile, Budget, answer_all
from mamba_eagle.train.drafter.batches import Split, split, usable
from mamba_eagle.train.drafter.prompts import DataError, Prompt, PromptReader
from mamba_eagle.train.drafter.recipes import RECIPES
from mamba_eagle.train.drafter.record import Record
from mamba_eagle.train.drafter.settings import TrainSettings
from mamba_eagle.train.drafter.target import load_target
from mamba_eagle.train.drafter.trainer import Diverged, Trainer
from mamba_eagle.train.drafter.world import World

RUN_ERRORS = (*START_ERRORS, OSError, DataError, Diverged)


def train(settings: TrainSettings, config: EngineConfig, command: str) -> bool:
    """Returns: False when SIGTERM or Ctrl-C has ended it early.

    Raises: RUN_ERRORS, with what is wrong and what to do.
    """
    world = World.join(resolve_device(settings.device))
    try:
        return _train(settings, config, command, world)
    finally:
        world.leave()


def _train(settings: TrainSettings, config: EngineConfig, command: str, world: World) -> bool:
    folder = Path(settings.output)
    target_config = ModelConfig.from_pretrained(settings.target)
    prompts = read_prompts(settings, config, target_config, world)
    recipe_class = RECIPES[settings.algorithm]
    if wrong := recipe_class.problems(settings, target_config):
        raise ConfigError(wrong)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--output {folder}: no such folder can be made: {error}"]) from None
    record = Record(settings)
    if record.check():
        world.say(f"{folder} is trained already: nothing to do")
        return True
    world.wait()  # nobody writes before all have read
    if world.is_first:
        record.write(command)
    answered = get_answers(settings, config, prompts, world)
    data = make_split(settings, answered, world)

    loop.set_precision()
    target = load_target(Path(settings.target), world.device)
    recipe = recipe_class(settings, target, data.training)
    trainer = Trainer(settings, recipe, target, data, world)
    if not trainer.run():
        world.say(f"stopped after step {trainer.number}; the same command goes on from there")
        return False
    world.wait()  # the first process writes the head, all read it
    load_weights(recipe.module, folder)  # what is measured now is what was saved
    acceptance = trainer.measure()
    world.say(f"held out, as saved: {acceptance}")
    if world.is_first:
        record.write(command, outcome(trainer, acceptance))
        (folder / "training.pt").unlink()
    world.say(serve_hint(settings))
    return True


def read_prompts(
    settings: TrainSettings, config: EngineConfig, target: ModelConfig, world: World
) -> list[Prompt]:
    """The prompts that leave room for an answer of two tokens.

    Raises: DataError
    """
    reader = PromptReader(
        config.tokenizer_path, target, settings.prompt_template, settings.skip_generation
    )
    prompts = reader.read(Path(settings.data))
    fitting = [p for p in prompts if len(p.token_ids) + 2 <= longest(settings, target)]
    if not fitting:
        raise DataError(
            f"all {len(prompts)} prompts have {longest(settings, target) - 1} tokens or more: "
            "raise --max-length"
        )
    if left_out := len(prompts) - len(fitting):
        world.say(f"{left_out} of {len(prompts)} prompts are too long for --max-length: left out")
    check_held_out(settings, len(fitting))
    return fitting


def check_held_out(settings: TrainSettings, answers: int) -> None:
    """Raises: DataError when there is nothing left to train on."""
    if answers <= settings.held_out:
        raise DataError(
            f"{answers} answers, of which --held-out {settings.held_out} are not trained on: "
            "give more prompts or lower --held-out"
        )


def longest(settings: TrainSettings, target: ModelConfig) -> int:
    """Tokens of prompt and answer together; a target without a limit says 0."""
    return min(settings.max_length, target.max_position_embeddings or settings.max_length)


def get_answers(
    settings: TrainSettings, config: EngineConfig, prompts: list[Prompt], world: World
) -> list[Answered]:
    """The file's own, or the target's, of which each process makes a part."""
    if settings.skip_generation:
        return [Answered(*prompt) for prompt in prompts]
    file = AnswerFile(Path(settings.output), world.rank)
    if world.is_first:
        file.repair()
    world.wait()
    done = file.read()
    world.wait()  # nobody writes before all have read
    left = [prompt for prompt in prompts if prompt.line not in done]
    if done:
        world.say(f"{len(prompts) - len(left)} of {len(prompts)} prompts are answered already")
    budget = Budget(
        settings.temperature,
        settings.max_new_tokens,
        longest(settings, ModelConfig.from_pretrained(settings.target)),
        settings.seed,
    )
    answer_all(config, left[world.rank :: world.size], budget, file)
    world.wait()
    made = file.read()
    return [made[prompt.line] for prompt in prompts]


def make_split(settings: TrainSettings, answered: list[Answered], world: World) -> Split:
    """Raises: DataError when there is too little to train on."""
    answers = usable(answered, settings.max_length)
    if left_out := len(answered) - len(answers):
        world.say(f"{left_out} of {len(answered)} answers have no place for a draft: left out")
    check_held_out(settings, len(answers))
    return split(answers, settings.held_out, settings.seed)


def outcome(trainer: Trainer, acceptance: Acceptance) -> dict[str, Any]:
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


def serve_hint(settings: TrainSettings) -> str:
    return (
        f"serve it: mamba-eagle serve --model-path {settings.target} --speculative-algorithm "
        f"{settings.algorithm.upper()} --speculative-draft-model-path {settings.output}"
    )
