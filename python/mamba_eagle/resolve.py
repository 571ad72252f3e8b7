"""Settings with their open ends filled in: folders for Hugging Face names, the embedded model and
its drafters, and the draft algorithm that a folder is made for."""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from mamba_eagle.backend.forecast import multiplies_four_bits_faster, multiplies_integers, on_cpu
from mamba_eagle.config import ConfigError, DraftSettings, EngineConfig, ServerConfig, flag_of
from mamba_eagle.drafters import DRAFTERS, head_algorithm
from mamba_eagle.embedded import EMBEDDED_DRAFTERS, EMBEDDED_MODEL
from mamba_eagle.hub import NotFound, checkpoint_folder
from mamba_eagle.torchless import show_torch

Config = TypeVar("Config", bound=EngineConfig)


def resolve(config: Config) -> Config:
    """The same settings, ready for the scheduler and the runner.

    Raises: ConfigError with every problem found.
    """
    values: dict[str, Any] = {}
    embedded = config.model_path in ("", "embedded", str(EMBEDDED_MODEL))
    values["model_path"] = str(EMBEDDED_MODEL) if embedded else config.model_path
    values["tokenizer_path"] = config.tokenizer_path or values["model_path"]
    draft = config.speculative_draft_model_path
    problems = find_folders(config, values)
    algorithm = config.speculative_algorithm
    if embedded and not draft:
        draft = str(EMBEDDED_DRAFTERS.get("EAGLE" if algorithm == "auto" else algorithm, ""))
    folder = values.setdefault("speculative_draft_model_path", draft)
    if algorithm == "auto":
        # One that cannot be read counts as a model: the error is reported when it is loaded.
        algorithm = (head_in(folder) or "STANDALONE") if folder else "NONE"
    values["speculative_algorithm"] = algorithm
    drafts_on_cpu = algorithm in DRAFTERS and config.num_ranks == 1 and on_cpu(config)
    # A node costs nearly as much there as a step of a model in the cache: branches do not pay.
    chain = config.tree_of(usual_topk=1)
    tree = chain if drafts_on_cpu and not chain.problems() else config.drafted_tree
    values["speculative_eagle_topk"] = tree.topk
    values["speculative_num_steps"] = tree.depth
    values["speculative_num_draft_tokens"] = tree.nodes
    if drafts_on_cpu and algorithm == "EAGLE" and drafts_from_few_bits(config):
        bits = "int4" if multiplies_four_bits_faster() else "int8"
        values["speculative_draft_model_quantization"] = bits
    if isinstance(config, ServerConfig) and not config.served_model_name:
        # clients know the Hugging Face name, not the folder of the cache
        values["served_model_name"] = config.model_path or EMBEDDED_MODEL.name
    config = dataclasses.replace(config, **values)
    problems += config.problems() + head_problems(config)
    if problems:
        raise ConfigError(problems + drafter_problems(config))
    return config


def drafts_from_few_bits(config: EngineConfig) -> bool:
    """Whether the flags leave the bits open, and there are products of integers."""
    given = (config.speculative_draft_model_quantization, config.quantization)
    return given == ("same", "auto") and multiplies_integers(config)


def drafter_problems(config: EngineConfig) -> list[str]:
    """Why the drafter does not fit the target. The runner finds out as it starts; this is for
    settings that never get there, so that everything is reported at once."""
    if head_problems(config):
        return []
    show_torch()  # the server process needs it for nothing else
    from mamba_eagle.drafting import drafter_problems

    return drafter_problems(config)


def find_folders(config: EngineConfig, values: dict[str, Any]) -> list[str]:
    """Turns the Hugging Face names in ``values`` into folders. Returns what could not be found."""
    problems = []
    weights = config.load_format != "dummy"
    name, tokenizer = values["model_path"], values["tokenizer_path"]
    draft = config.speculative_draft_model_path
    wanted = [("model_path", name, config.revision, weights)]
    if tokenizer != name:
        wanted.append(("tokenizer_path", tokenizer, "", False))
    if draft and config.speculative_algorithm != "NONE":
        wanted.append(("speculative_draft_model_path", draft, "", weights))
    for field_name, path, revision, with_weights in wanted:
        try:
            values[field_name] = str(checkpoint_folder(path, revision, with_weights))
        except (NotFound, OSError, RuntimeError) as error:  # no permission, no such ~user
            problems.append(f"{flag_of(field_name)} {path}: {error}")
    if tokenizer == name:
        values["tokenizer_path"] = values["model_path"]
    return problems


def head_problems(config: DraftSettings) -> list[str]:
    """Whether the drafter's folder has a head for another drafter."""
    algorithm, folder = config.speculative_algorithm, config.speculative_draft_model_path
    if algorithm not in DRAFTERS or not folder:
        return []
    made_for = head_in(folder)
    if made_for is None or DRAFTERS[made_for] == DRAFTERS[algorithm]:
        return []
    return [
        f"--speculative-algorithm {algorithm}: {folder} has a head for {made_for}; leave the "
        "flag out, or name the folder of another drafter"
    ]


def head_in(folder: str | Path) -> str | None:
    """The algorithm that a folder's head is for; None for a model or an unreadable folder."""
    try:
        values = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return head_algorithm(values) if isinstance(values, dict) else None
