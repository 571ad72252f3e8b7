"""The server's settings: one frozen dataclass, from which the command line is made."""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamba_eagle.core import PLAIN, TreeShape, candidates
from mamba_eagle.models.heads import draft_algorithm, head_in
from mamba_eagle.spec.drafters import DRAFTERS, draft_source

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_MODEL = ASSETS / "mamba2-math-6m"
EMBEDDED_HEADS = {  # by the drafter that they are for
    "EAGLE": ASSETS / "mamba2-math-6m-eagle",
    "EAGLE3": ASSETS / "mamba2-math-6m-eagle3",
    "MTP": ASSETS / "mamba2-math-6m-mtp",
    "NEXTN": ASSETS / "mamba2-math-6m-mtp",
}
EMBEDDED_DRAFTERS = {**EMBEDDED_HEADS, "STANDALONE": ASSETS / "mamba2-math-1m"}


class ConfigError(ValueError):
    """Settings that cannot work; ``problems`` lists every one with its remedy."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def setting(
    default: Any, help: str, choices: tuple[str, ...] | None = None, may_be_empty: bool = True
) -> Any:
    """may_be_empty: whether a text that is given on the command line may be "" (an unset variable
    of a shell)."""
    metadata = {"help": help, "choices": choices, "may_be_empty": may_be_empty}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """What the scheduler and the runner need to know."""

    model_path: str = setting(
        "", "checkpoint folder or Hugging Face name; empty: the embedded model"
    )
    revision: str = setting("", "branch, tag or commit of a Hugging Face name")
    tokenizer_path: str = setting("", "tokenizer folder; empty: the model's")
    load_format: str = setting(
        "auto", "where weights come from; dummy: random ones", ("auto", "safetensors", "dummy")
    )
    device: str = setting("auto", "where the model runs", ("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "weights and activations; auto: float32 on a CPU, the checkpoint's on a GPU",
        ("auto", "float32", "bfloat16", "float16"),
    )
    context_length: int = setting(0, "longest prompt plus output; 0: the model's own limit")
    random_seed: int = setting(0, "seeds dummy weights")
    cpu_threads: int = setting(0, "threads of the model runner on a CPU; 0: all cores but one")

    max_running_requests: int = setting(32, "requests decoded at the same time")
    max_total_tokens: int = setting(0, "KV slots; 0: from the memory there is")
    max_mamba_cache_size: int = setting(
        0, "checkpoint slots, running and cached; 0: from the memory there is"
    )
    mem_fraction_static: float = setting(0.85, "share of GPU memory for weights and pools")
    chunked_prefill_size: int = setting(
        0, "most prompt tokens in one step; 0: 1024 on a CPU, 8192 on a GPU"
    )
    schedule_policy: str = setting(
        "fcfs", "order of waiting requests: arrival, or longest cached prefix", ("fcfs", "lpm")
    )
    disable_radix_cache: bool = setting(False, "do not reuse prefixes")
    disable_overlap_schedule: bool = setting(False, "wait for each step before planning the next")
    disable_cuda_graph: bool = setting(False, "on a GPU: launch each operation of a step by itself")
    mamba_ssm_dtype: str = setting("float32", "dtype of checkpoints", ("float32", "bfloat16"))
    mamba_verify_mode: str = setting(
        "deferred",
        "deferred: rows and folds; snapshot: one state a tree node",
        ("deferred", "snapshot"),
    )
    mamba_rows: int = setting(0, "row buffer of a request, in tokens; 0: from the tree")
    mamba_checkpoint_interval: int = setting(
        64, "tokens between checkpoints inside a prompt, where slots are free; 0: none"
    )

    speculative_algorithm: str = setting(
        "auto",
        "drafter; auto: what the drafter's folder is made for; without one NONE, for the embedded "
        "model EAGLE",
        ("auto", *DRAFTERS, "NONE"),
    )
    speculative_draft_model_path: str = setting(
        "", "the drafter's folder; the embedded model has one for every drafter that needs one"
    )
    speculative_num_steps: int = setting(5, "depth of the draft tree")
    speculative_eagle_topk: int = setting(2, "lanes of the draft tree; 1: a chain")
    speculative_num_draft_tokens: int = setting(8, "nodes verified in a step, the root included")
    speculative_adaptive: bool = setting(
        True, "draft in each step what is fastest: this tree, a smaller one, a chain, or nothing"
    )
    speculative_ngram_max_trie_depth: int = setting(
        12, "NGRAM: tokens of the longest n-gram, those matched and the one behind them"
    )
    speculative_ngram_capacity: int = setting(
        2_000_000, "NGRAM: n-grams remembered at the same time, 40 bytes of host memory each"
    )

    log_level: str = setting("info", "what is logged", ("debug", "info", "warning", "error"))

    def resolved(self) -> EngineConfig:
        """The same settings with model, drafter and defaults that depend on others filled in.

        Raises: ConfigError with every problem found.
        """
        values: dict[str, Any] = {}
        embedded = self.model_path in ("", "embedded", str(EMBEDDED_MODEL))
        values["model_path"] = str(EMBEDDED_MODEL) if embedded else self.model_path
        values["tokenizer_path"] = self.tokenizer_path or values["model_path"]
        draft = self.speculative_draft_model_path
        problems = self._find_folders(values)
        algorithm = self.speculative_algorithm
        if embedded and not draft:
            draft = str(EMBEDDED_DRAFTERS.get("EAGLE" if algorithm == "auto" else algorithm, ""))
        folder = values.setdefault("speculative_draft_model_path", draft)
        if algorithm == "auto":
            algorithm = draft_algorithm(folder) if folder else "NONE"
        values["speculative_algorithm"] = algorithm
        config = dataclasses.replace(self, **values)
        problems += config.problems()
        if problems:
            raise ConfigError(problems + config.drafter_problems())
        return config

    def drafter_problems(self) -> list[str]:
        """Why the drafter's folder does not fit the target, where both can be read. The runner
        looks at that as it starts; here it is for those who fail before, since it takes torch."""
        drafter = DRAFTERS.get(self.speculative_algorithm)
        if drafter is None or self._folder_problems():
            return []
        folders = (self.model_path, self.speculative_draft_model_path or self.model_path)
        if not all(map(os.path.isdir, folders)):
            return []
        from mamba_eagle.models.config import ModelConfig, UnsupportedModel

        try:
            target = ModelConfig.from_pretrained(self.model_path)
            return draft_source(self.speculative_algorithm)(self, target).problems()
        except (OSError, UnsupportedModel) as error:
            return [str(error)]

    def _find_folders(self, values: dict[str, Any]) -> list[str]:
        """Turns Hugging Face names in ``values`` into folders. Returns what could not be found."""
        from mamba_eagle.models.hub import NotFound, checkpoint_folder

        problems = []
        weights = self.load_format != "dummy"
        name, tokenizer = values["model_path"], values["tokenizer_path"]
        draft = self.speculative_draft_model_path
        wanted = [("model_path", name, self.revision, weights)]
        if tokenizer != name:
            wanted.append(("tokenizer_path", tokenizer, "", False))
        if draft and self.speculative_algorithm != "NONE":
            wanted.append(("speculative_draft_model_path", draft, "", weights))
        for field_name, path, revision, with_weights in wanted:
            try:
                values[field_name] = str(checkpoint_folder(path, revision, with_weights))
            except NotFound as error:
                problems.append(f"--{field_name.replace('_', '-')} {path}: {error}")
        if tokenizer == name:
            values["tokenizer_path"] = values["model_path"]
        return problems

    def problems(self) -> list[str]:
        """Every setting that cannot work, with its value and what to change."""
        wrong = []
        if self.max_running_requests < 1:
            wrong.append(f"--max-running-requests {self.max_running_requests}: must be 1 or more")
        for name in (
            "chunked_prefill_size",
            "max_total_tokens",
            "max_mamba_cache_size",
            "context_length",
            "mamba_rows",
            "mamba_checkpoint_interval",
            "cpu_threads",
        ):
            if getattr(self, name) < 0:
                wrong.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 0 or more")
        if not 0 < self.mem_fraction_static <= 1:
            wrong.append(f"--mem-fraction-static {self.mem_fraction_static}: must be in (0, 1]")
        if self.speculative_algorithm in DRAFTERS:
            wrong += self.tree_shape.problems()
        return wrong + self._folder_problems()

    def _folder_problems(self) -> list[str]:
        """Whether the drafter's folder is there and of its kind."""
        name, folder = self.speculative_algorithm, self.speculative_draft_model_path
        drafter = DRAFTERS.get(name)
        if drafter is None:
            return []
        if drafter.needs_folder and not folder:
            return [
                f"--speculative-algorithm {name} needs --speculative-draft-model-path, the folder "
                f"of a drafter made for {self.model_path}"
            ]
        made_for = head_in(folder) if folder else None
        if made_for is not None and DRAFTERS[made_for] != drafter:
            return [
                f"--speculative-algorithm {name}: {folder} has a head for {made_for}; leave the "
                "flag out, or name the folder of another drafter"
            ]
        return []

    @property
    def tree_shape(self) -> TreeShape:
        """The tree of a verify step; a single node without a drafter."""
        if self.speculative_algorithm == "NONE":
            return TreeShape()
        return TreeShape(
            topk=self.speculative_eagle_topk,
            steps=self.speculative_num_steps,
            nodes=self.speculative_num_draft_tokens,
        )

    @property
    def step_shapes(self) -> list[TreeShape]:
        """Those that decode steps may have."""
        adaptive = self.speculative_adaptive and self.tree_shape != PLAIN
        return candidates(self.tree_shape) if adaptive else [self.tree_shape]


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """The engine's settings and those of the HTTP side."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(30000, "port to listen on")
    served_model_name: str = setting("", "name in replies; empty: the model path")
    api_key: str = setting(
        "",
        "clients must send it, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; others can read "
        "it in the list of processes: see --api-key-file, and MAMBA_EAGLE_API_KEY in the "
        "environment",
        may_be_empty=False,
    )
    api_key_file: str = setting(
        "", "file of keys, one per line, any of which clients may send", may_be_empty=False
    )
    skip_tokenizer_init: bool = setting(False, "serve token ids only")
    max_queued_requests: int = setting(4096, "requests waiting before 503 is answered")
    max_body_size: int = setting(8, "MiB of a request's body, at most")
    stream_interval: int = setting(1, "tokens between two streamed pieces, at least")
    log_requests: bool = setting(False, "log each request's metadata, without its prompt")
    log_prompts: bool = setting(False, "with --log-requests: log prompts and stop strings, too")

    def resolved(self) -> ServerConfig:
        config = super().resolved()
        assert isinstance(config, ServerConfig)
        if self.model_path and not self.served_model_name:
            # a Hugging Face name has become a folder of the cache: clients know the name
            return dataclasses.replace(config, served_model_name=self.model_path)
        return config


def add_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """One ``--flag`` a field; the field's default and help are the flag's."""
    hints = typing.get_type_hints(config)
    for spec in dataclasses.fields(config):
        flag = "--" + spec.name.replace("_", "-")
        help_text = spec.metadata["help"]
        if spec.default != "":
            help_text += f" (default: {spec.default})"
        kind = hints[spec.name]
        assert not isinstance(kind, types.UnionType)
        if kind is bool and spec.default:
            pair = argparse.BooleanOptionalAction  # --flag and --no-flag
            parser.add_argument(flag, action=pair, default=True, help=help_text)
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=help_text)
        else:
            may_be_empty = spec.metadata["may_be_empty"]
            parser.add_argument(
                flag,
                type=kind if may_be_empty else _not_empty,
                # A default text would be taken for one that was given.
                default=spec.default if may_be_empty else argparse.SUPPRESS,
                choices=spec.metadata["choices"],
                help=help_text,
            )


def _not_empty(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError(
            "is empty (an unset variable?): give a value, or leave the flag out"
        )
    return value


def from_arguments(config: type, arguments: argparse.Namespace) -> Any:
    """The dataclass from parsed flags; other flags of the parser are left alone."""
    names = {spec.name for spec in dataclasses.fields(config)}
    return config(**{name: value for name, value in vars(arguments).items() if name in names})
