"""Every setting, once: two frozen dataclasses, from which the command line is made. Plain data;
resolve.py fills in what takes a look at files."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mamba_eagle.core import PLAIN, POOLINGS, TreeShape
from mamba_eagle.drafters import DRAFTERS
from mamba_eagle.events_config import read_events_config
from mamba_eagle.limits import MAX_BODY_SIZE

QUANTIZATIONS = ("auto", "fp8", "nvfp4", "int8", "int4", "none")
ON_A_CPU = ("int8", "int4")  # --quantization that only a CPU multiplies
ON_A_GPU = ("nvfp4",)  # and that only a GPU does
FLASHINFER_SUMS = (2, 4, 8, 16)  # processes whose parts --all-reduce flashinfer adds up
NO_SUMS_ON_A_CPU = (
    "is for GPUs, and processes on a CPU exchange over gloo; leave the flag out, or use "
    "--device cuda"
)
DEFAULT_TREE = TreeShape(topk=2, depth=5, nodes=8)
# A node costs nearly as much there as a step of a model in the cache: branches do not pay.
CPU_CHAIN = TreeShape(topk=1, depth=5, nodes=6)
# Of the runner on any machine: tens of thousands would end it while it starts them.
MAX_THREADS = 256


class ConfigError(ValueError):
    """Settings that cannot work; ``problems`` lists every one with its remedy."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    minimum: int | None = None,
    group: str = "",
    may_be_empty: bool = True,
    repeats: bool = False,
) -> Any:
    """A field that becomes a flag.

    Args:
        default: None means ``auto``: the runner decides when it knows the model and the machine.
        help: one phrase; the default is added to it.
        minimum: the smallest value that works.
        group: the heading in ``--help`` that begins with this setting.
        may_be_empty: whether a text on the command line may be "", as an unset variable gives.
        repeats: whether the flag may be given several times; the value is a tuple then.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "group": group,
        "may_be_empty": may_be_empty,
        "repeats": repeats,
    }
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class EngineConfig:
    """What the scheduler and the runner need to know."""

    model_path: str = setting(
        "",
        "checkpoint folder, GGUF file or Hugging Face name (default: the embedded model)",
        group="model",
    )
    revision: str = setting("", "branch, tag or commit, if --model-path is a Hugging Face name")
    tokenizer_path: str = setting(
        "", "tokenizer folder, GGUF file or Hugging Face name (default: --model-path)"
    )
    load_format: str = setting(
        "auto",
        "source of the weights; dummy: random ones of the right shapes",
        ("auto", "safetensors", "dummy"),
    )
    random_seed: int = setting(0, "seed for --load-format dummy")
    device: str = setting(
        "auto", "where the model runs; auto: on a GPU if there is one", ("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and activations; auto: float32 on a CPU, the checkpoint's on a GPU",
        ("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting(
        "auto",
        "weights and products of few bits; auto: as the checkpoint stores them, where the device "
        "multiplies them so; fp8: float8 for any checkpoint; for checkpoints that are not "
        "quantized, nvfp4: floats of four bits, on a GPU; int8, int4: integers in groups of 32, on "
        "a CPU; none: all in --dtype",
        QUANTIZATIONS,
    )
    quantize_lm_head: bool = setting(
        False,
        "with --quantization fp8, nvfp4 or int4, also multiply by lm_head in these bits; without, "
        "it keeps --dtype with fp8 and nvfp4 and has 8 bits with int4",
    )
    cpu_threads: int | None = setting(
        None,
        "threads that run the model on a CPU; auto: all cores but one of eight, at least one, and "
        "32 at most",
        minimum=1,
    )
    cpu_prompt_dtype: str = setting(
        "float32",
        "on a CPU, how prompts are multiplied by weights of 16 bits; bfloat16: several times as "
        "fast where the processor has instructions for it (AMX, AVX-512 BF16), elsewhere as "
        "float32; takes a second copy of these weights, and texts may part at near-ties",
        choices=("float32", "bfloat16"),
    )
    context_length: int | None = setting(
        None, "maximum length of prompt plus output, in tokens; auto: the model's limit", minimum=1
    )

    tp_size: int = setting(
        1,
        "tensor parallelism: number of processes that each hold a part of the model, on a GPU each",
        minimum=1,
        group="several processes",
    )
    pp_size: int = setting(
        1,
        "pipeline parallelism: number of stages that each hold some of the layers; each stage has "
        "--tp-size processes",
        minimum=1,
    )
    pp_layers: str = setting(
        "",
        "how many layers each of these stages holds, as in 30,26; default: equal bytes",
    )
    nnodes: int = setting(
        1,
        "number of machines that these processes are spread over, as many on each; run the same "
        "command on all of them, with --node-rank",
        minimum=1,
    )
    all_reduce: str = setting(
        "auto",
        "how the parts of --tp-size processes on GPUs are added up in steps; symmetric: over "
        "memory that GPUs with NVLink share, by torch's kernels or our own, with the norm that "
        "follows; flashinfer: its one-shot kernel, with the norm, which the first start compiles "
        "for minutes; auto: NCCL or symmetric, whichever is faster here for each number of tokens; "
        "what cannot be had, or adds up anything else, leaves it to NCCL. On a CPU it is gloo",
        ("auto", "nccl", "symmetric", "flashinfer"),
    )
    check_ranks: int = setting(
        0,
        "compare the state of these processes every so many steps, and end at the first "
        "difference; 0: never",
        minimum=0,
    )

    max_running_requests: int = setting(
        32,
        "maximum number of requests decoded at the same time",
        minimum=1,
        group="memory and scheduling",
    )
    max_total_tokens: int | None = setting(
        None, "number of KV slots, one per token; auto: what fits into memory", minimum=1
    )
    max_mamba_cache_size: int | None = setting(
        None,
        "number of state slots, for running requests and the prefix cache; auto: what fits into "
        "memory",
        minimum=1,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of keys and values in KV slots; auto: --dtype; fp8_e4m3: half of the memory of 16 "
        "bits, rounded",
        ("auto", "fp8_e4m3"),
    )
    max_journals: int = setting(
        -1,
        "number of saved journals, each with which the prefix cache continues at any of the tokens "
        "that follow a state; -1: half as many as state slots on a CPU, none on a GPU; 0: none",
    )
    mem_fraction_static: float = setting(0.85, "fraction of GPU memory for weights and pools")
    chunked_prefill_size: int | None = setting(
        None,
        "maximum number of prompt tokens per step; auto: 1024 on a CPU, 8192 on a GPU",
        minimum=1,
    )
    schedule_policy: str = setting(
        "fcfs",
        "order of waiting requests; fcfs: first come, first served; lpm: longest cached prefix "
        "first; priority: by the field of that name, and running requests step back for higher "
        "ones",
        ("fcfs", "lpm", "priority"),
    )
    queue_timeout: float = setting(
        0.0, "seconds that a request may wait to be started; then it gets status 504; 0: any"
    )
    disable_radix_cache: bool = setting(False, "do not reuse the prefixes of earlier requests")
    kv_events_config: str = setting(
        "",
        "publishes which blocks of tokens the prefix cache could reuse, in vLLM's format over ZMQ; "
        'a JSON object, such as {"endpoint": "tcp://127.0.0.1:5557"} (default: none); prompts can '
        "be read from it",
        may_be_empty=True,
    )
    disable_overlap_schedule: bool = setting(
        False, "wait for the result of each step before planning the next"
    )
    disable_cuda_graph: bool = setting(
        False, "on a GPU, launch the operations of a step one by one"
    )

    mamba_ssm_dtype: str = setting(
        "float32",
        "dtype of the recurrent states in state slots",
        ("float32", "bfloat16", "float16"),
        group="Mamba2 layers",
    )
    mamba_ssm_rounding: str = setting(
        "stochastic",
        "how a state is rounded to 16 bits when it is written; stochastic: up or down at random, "
        "by the request's seed and the position, so that the average is right",
        ("stochastic", "nearest"),
    )
    mamba_verify_mode: str = setting(
        "deferred",
        "how trees are verified; deferred: one row per node, folded into the state later; "
        "snapshot: one state per node",
        ("deferred", "snapshot"),
    )
    mamba_rows: int | None = setting(
        None, "rows buffered per request, one per token; auto: derived from the tree", minimum=1
    )
    mamba_checkpoint_interval: int = setting(
        64,
        "tokens between the states kept inside a prompt, while state slots are free; 0: keep none",
        minimum=0,
    )

    speculative_algorithm: str = setting(
        "auto",
        "draft algorithm; auto: inferred from the drafter's config.json, NONE without a drafter "
        "(EAGLE for the embedded model)",
        ("auto", *DRAFTERS, "NONE"),
        group="drafting",
    )
    speculative_draft_model_path: str = setting(
        "",
        "folder or Hugging Face name of the drafter (default: for the embedded model, the drafter "
        "that comes with it)",
    )
    speculative_draft_model_quantization: str = setting(
        "same",
        "weights of few bits of the drafter, with the values of --quantization; same: what that "
        "says, and int8 for EAGLE on a CPU where that says auto",
        ("same", *QUANTIZATIONS),
    )
    speculative_num_steps: int | None = setting(None, "depth of the draft tree; auto: 5")
    speculative_eagle_topk: int | None = setting(
        None, "branching factor of the draft tree; 1: a chain; auto: 2, on a CPU 1"
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "number of nodes verified per step, including the root; auto: 8, on a CPU 6",
    )
    speculative_draft_p_min: float = setting(
        0.5,
        "on a CPU, greedy requests: a chain of drafts ends where the drafter thinks it less likely "
        "than so that all of it is accepted; 0: never",
    )
    speculative_adaptive: bool = setting(
        True, "use the fastest draft for each step: this tree, a smaller one, a chain, or none"
    )
    speculative_ngram_max_trie_depth: int = setting(
        12, "NGRAM: maximum length of an n-gram, including the token it predicts"
    )
    speculative_ngram_capacity: int = setting(
        2_000_000, "NGRAM: maximum number of n-grams kept, 40 bytes of host memory each"
    )

    simulate_acc_len: float = setting(
        0.0,
        "for benchmarks with dummy weights: every step accepts so many tokens on average, whatever "
        "the target says, and texts mean nothing; 0: off (SGLang: SGLANG_SIMULATE_ACC_LEN)",
    )

    log_level: str = setting(
        "info",
        "least severe messages that are logged",
        ("debug", "info", "warning", "error"),
        group="logging",
    )
    log_format: str = setting("text", "text, or one JSON object per line", ("text", "json"))

    @property
    def num_ranks(self) -> int:
        """Runner processes, on all nodes together."""
        return self.tp_size * self.pp_size

    @property
    def answering_rank(self) -> int:
        """The one that sends results: the first of the last stage, where tokens are sampled."""
        return (self.pp_size - 1) * self.tp_size

    @property
    def stage_layers(self) -> list[int]:
        """The numbers in --pp-layers; []: none are given. Raises: ValueError."""
        return [int(part) for part in self.pp_layers.split(",")] if self.pp_layers else []

    def _stage_problems(self) -> list[str]:
        given = f"--pp-layers {self.pp_layers:.200}"
        try:
            counts = self.stage_layers
        except ValueError:
            return [f"{given}: must be numbers with commas between, as in 30,26"]
        if counts and len(counts) != self.pp_size:
            return [
                f"{given}: {len(counts)} numbers for --pp-size {self.pp_size}; give one per stage"
            ]
        return [f"{given}: each stage needs 1 layer or more"] if min(counts, default=1) < 1 else []

    def _sum_problems(self) -> list[str]:
        name = self.all_reduce
        if name in ("nccl", "auto"):
            return []
        given = f"--all-reduce {name}"
        if self.device == "cpu":
            return [f"{given}: {NO_SUMS_ON_A_CPU}"]
        if self.tp_size == 1:
            return [f"{given}: with --tp-size 1 there is nothing to add up; leave the flag out"]
        if self.tp_size > self.ranks_per_node:
            return [
                f"{given}: {self.tp_size} processes of a stage are spread over several machines, "
                "and it is for those of one; use --all-reduce nccl"
            ]
        if name == "flashinfer" and self.tp_size not in FLASHINFER_SUMS:
            sizes = ", ".join(map(str, FLASHINFER_SUMS))
            return [
                f"{given}: has kernels for --tp-size {sizes}, not for {self.tp_size}; use "
                "--all-reduce symmetric or nccl"
            ]
        return []

    def problems(self) -> list[str]:
        """Every setting that cannot work, with its value and what to change. Looks at no file."""
        wrong = [
            f"{flag_of(spec.name)} {value}: must be {minimum} or more"
            + (", or auto" if spec.default is None else "")
            for spec in dataclasses.fields(self)
            if (minimum := spec.metadata["minimum"]) is not None
            and (value := getattr(self, spec.name)) is not None
            and value < minimum
        ]
        try:
            read_events_config(self.kv_events_config)
        except ValueError as error:
            wrong += str(error).splitlines()
        if self.nnodes > 1 and self.num_ranks % self.nnodes:
            wrong.append(
                f"--nnodes {self.nnodes}: {self.num_ranks} processes cannot be spread evenly over "
                f"{self.nnodes} machines; choose --tp-size and --pp-size so that it divides their "
                "product"
            )
        if self.max_journals < -1:
            wrong.append(
                f"--max-journals {self.max_journals}: must be 0 or more, or -1 for half as many as "
                "state slots"
            )
        if self.context_length == 1:
            wrong.append(
                "--context-length 1: must be 2 or more, one prompt token and one of output; or "
                "auto for the model's own limit"
            )
        cores = os.cpu_count() or 1
        max_threads = max(MAX_THREADS, cores)
        if self.cpu_threads is not None and self.cpu_threads > max_threads:
            wrong.append(
                f"--cpu-threads {self.cpu_threads}: must be {max_threads} or less; this machine "
                f"has {cores} cores, and more threads than cores make it slower"
            )
        if not 0 < self.mem_fraction_static <= 1:
            wrong.append(
                f"--mem-fraction-static {self.mem_fraction_static}: must be above 0 and at most 1"
            )
        wrong += self._quantization_problems()
        wrong += self._stage_problems() + self._sum_problems()
        return wrong + self._drafting_problems() + self.simulation_problems()

    def _drafting_problems(self) -> list[str]:
        wrong, least = [], self.speculative_draft_p_min
        if not 0 <= least <= 1:
            given = f"--speculative-draft-p-min {least:g}"
            wrong.append(f"{given}: must be between 0 and 1, a probability")
        drafter = DRAFTERS.get(self.speculative_algorithm)
        if drafter is not None:
            wrong += self.tree_shape.problems()
            if drafter.needs_folder and not self.speculative_draft_model_path:
                wrong.append(
                    f"--speculative-algorithm {self.speculative_algorithm} needs "
                    "--speculative-draft-model-path, the folder of a drafter made for "
                    f"{self.model_path}"
                )
        return wrong

    def _quantization_problems(self) -> list[str]:
        wrong = []
        if self.quantize_lm_head and self.quantization in ("auto", "none"):
            wrong.append(
                f"--quantize-lm-head: --quantization {self.quantization} rounds no weights; use "
                "--quantization fp8, nvfp4, int8 or int4, or leave the flag out"
            )
        for flag, kind in self.quantizations.items():
            wrong += self._products_missing(flag, kind)
        return wrong

    @property
    def quantizations(self) -> dict[str, str]:
        """What the flags for weights of few bits say, the target's and the drafter's."""
        drafter = self.speculative_draft_model_quantization
        given = {"--quantization": self.quantization}
        if drafter != "same" and self.speculative_algorithm != "NONE":
            given["--speculative-draft-model-quantization"] = drafter
        return given

    def _products_missing(self, flag: str, kind: str) -> list[str]:
        if kind in ON_A_GPU:
            return [
                f"{flag} {kind}: {other} {value} has no such products; use {remedy}"
                for other, value, none, remedy in (
                    ("--device", self.device, "cpu", f"--device cuda, or {flag} int4"),
                    ("--dtype", self.dtype, "float32", "--dtype bfloat16"),
                )
                if value == none
            ]
        if kind not in ON_A_CPU:
            return []
        cpu, float32 = ("auto", "cpu"), ("auto", "float32")
        return [
            f"{flag} {kind}: {other} {value} has no such products; use {remedy}"
            for other, value, wanted, remedy in (
                ("--device", self.device, cpu, f"--device cpu, or {flag} fp8"),
                ("--dtype", self.dtype, float32, "--dtype float32"),
            )
            if value not in wanted
        ]

    def simulation_problems(self) -> list[str]:
        """Why --simulate-acc-len cannot be had."""
        length, most = self.simulate_acc_len, self.tree_shape.depth + 1
        flag = f"--simulate-acc-len {length:g}"
        if length == 0.0:
            return []
        if self.speculative_algorithm == "NONE":
            return [
                f"{flag}: without a drafter each step makes one token; set --speculative-algorithm"
            ]
        if not 1 <= length <= most:
            return [
                f"{flag}: must be between 1 and {most}, the most that a tree of "
                f"--speculative-num-steps {self.tree_shape.depth} can gain per step; or 0 for off"
            ]
        return []

    @property
    def ranks_per_node(self) -> int:
        """Node k has the ranks from k times this number on."""
        return self.num_ranks // self.nnodes

    @property
    def num_journals(self) -> int | None:
        """None: to be derived from the number of state slots."""
        if self.disable_radix_cache:
            return 0
        return None if self.max_journals < 0 else self.max_journals

    @property
    def journal_rows(self) -> int:
        """Tokens per saved journal: 64 before the end of any output, what three steps may add, and
        enough room that anchors need not be moved with each step."""
        accepts = self.tree_shape.depth + 1
        return max(128, 96 + 3 * accepts)

    @property
    def tree_shape(self) -> TreeShape:
        """The tree of a verify step; a single node without a drafter."""
        return PLAIN if self.speculative_algorithm == "NONE" else self.drafted_tree

    @property
    def drafted_tree(self) -> TreeShape:
        """The tree that a drafter makes, by the settings and what is usual."""
        usual = (DEFAULT_TREE.topk, DEFAULT_TREE.depth, DEFAULT_TREE.nodes)
        return TreeShape(*(u if given is None else given for given, u in zip(self._tree, usual)))

    @property
    def names_tree(self) -> bool:
        """Whether a part of the tree's shape is set."""
        return self._tree != (None, None, None)

    @property
    def _tree(self) -> tuple[int | None, int | None, int | None]:
        return (
            self.speculative_eagle_topk,
            self.speculative_num_steps,
            self.speculative_num_draft_tokens,
        )


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """The engine's settings, those of the HTTP side, and how nodes find each other."""

    node_rank: int = setting(
        0, "which of --nnodes machines this is; 0 has the HTTP side", minimum=0, group="nodes"
    )
    dist_init_addr: str = setting(
        "",
        "with --nnodes: HOST:PORT of node 0, the same on all nodes; it listens there, at the next "
        "two ports, and at one more for each process of another node",
        may_be_empty=False,
    )
    dist_timeout: int = setting(
        300, "seconds in which all nodes must have joined node 0", minimum=1
    )
    cluster_key: str = setting(
        "",
        "secret that all nodes share, 16 characters or more; the list of processes shows it: "
        "prefer --cluster-key-file, or the variable MAMBA_EAGLE_CLUSTER_KEY",
        may_be_empty=False,
    )
    cluster_key_file: str = setting("", "file with that secret", may_be_empty=False)

    host: str = setting("127.0.0.1", "address to listen on", group="HTTP")
    port: int = setting(30000, "port to listen on")
    root_path: str = setting(
        "", "path under which a proxy offers this server, such as /llm; with and without it works"
    )
    ssl_certfile: str = setting(
        "", "certificate chain in PEM; makes the server speak HTTPS", may_be_empty=False
    )
    ssl_keyfile: str = setting(
        "", "private key in PEM, if it is not in --ssl-certfile", may_be_empty=False
    )
    served_model_name: str = setting("", "model name in replies (default: --model-path)")
    api_key: str | tuple[str, ...] = setting(
        (),
        "key that clients must send, as 'Authorization: Bearer KEY' or 'x-api-key: KEY' (default: "
        "none); may be given several times; the list of processes shows it: prefer "
        "--api-key-file, or the variable MAMBA_EAGLE_API_KEY",
        may_be_empty=False,
        repeats=True,
    )
    api_key_file: str = setting(
        "", "file of keys, one per line; clients must send any of them", may_be_empty=False
    )
    admin_api_key: str = setting(
        "",
        "key of an operator, which is then needed for what changes the server for all: "
        "/flush_cache and abort_all; and in any case to see texts in GET /cache?text=1 (default: "
        "none)",
        may_be_empty=False,
    )
    skip_tokenizer_init: bool = setting(False, "load no tokenizer and serve token ids only")
    chat_template: str = setting(
        "",
        "Jinja file of the chat template, or the template itself (default: the tokenizer's)",
        may_be_empty=False,
    )
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls: nemotron_3, nemotron_nano_v2, granite_4, falcon_h1, "
        "qwen3, qwen3_coder, hermes, or a JSON file like theirs; none: calls stay text; auto: the "
        "tokenizer's response_template, else what its chat template shows",
    )
    reasoning_parser: str = setting(
        "auto", "how it writes reasoning, by the same names; auto: as --tool-call-parser"
    )
    pooling_method: str = setting(
        "last",
        "what /v1/embeddings makes a vector of: the hidden state of the last token, or the mean of "
        "all",
        POOLINGS,
    )
    max_queued_requests: int = setting(
        4096, "maximum number of waiting requests; further ones get status 503", minimum=0
    )
    max_body_size: int = setting(8, "maximum size of a request's body, in MiB", minimum=1)
    stream_interval: int = setting(
        1, "minimum number of tokens between two chunks of a stream", minimum=1
    )
    incremental_streaming_output: bool = setting(
        False,
        "let streams of /generate send what is new instead of all so far; a request's "
        "'incremental' comes first",
    )
    request_timeout: float = setting(
        0.0, "seconds that a request may take; then it gets status 504; 0: any"
    )
    log_requests: bool = setting(False, "log the metadata of each request, without its prompt")
    log_prompts: bool = setting(False, "with --log-requests, also log prompts and stop strings")
    cors_origins: str = setting(
        "auto",
        "web pages that may use the server, by origin (https://host[:port], with commas between): "
        "*: all; off: only the server's own; auto: all with --api-key, else those of this machine",
    )
    otlp_traces_endpoint: str = setting(
        "",
        "address of an OpenTelemetry collector that gets spans of requests, such as "
        "http://localhost:4318/v1/traces (default: none)",
    )
    metrics_prefix: str = setting(
        "sglang,vllm",
        "other servers under whose names /metrics shows the numbers too, with commas between: "
        "sglang, vllm; none",
    )
    max_connections: int = setting(
        4096, "maximum number of open connections; further ones get status 503", minimum=1
    )
    header_timeout: float = setting(10.0, "seconds in which a request's headers must arrive")
    body_timeout: float = setting(
        30.0, "seconds in which a request's body, or its next 64 KiB, must arrive"
    )
    write_timeout: float = setting(
        30.0, "seconds without progress before a client that does not read is disconnected"
    )
    sse_keep_alive: float = setting(
        15.0, "seconds of silence after which a stream gets a comment; 0: never"
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that open requests have to finish after SIGTERM or Ctrl-C"
    )
    watchdog_timeout: float = setting(
        60.0, "seconds without a sign of life from the engine before the server ends; 0: never"
    )

    @property
    def metrics_prefixes(self) -> list[str]:
        """Of --metrics-prefix."""
        names = [name.strip() for name in self.metrics_prefix.split(",")]
        return [name for name in names if name and name != "none"]

    def problems(self) -> list[str]:
        wrong = super().problems()
        if self.simulate_acc_len and self.speculative_adaptive:
            wrong.append(
                f"--simulate-acc-len {self.simulate_acc_len:g}: smaller trees than the one that is "
                "set would not accept that many; add --no-speculative-adaptive"
            )
        wrong += [
            f"--metrics-prefix {name}: must be sglang, vllm or none, with commas between"
            for name in self.metrics_prefixes
            if name not in ("sglang", "vllm")
        ]
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            wrong.append(
                f"--root-path {self.root_path}: must begin with / and not end with it, as in /llm"
            )
        if not 1 <= self.port <= 65535:
            wrong.append(f"--port {self.port}: must be between 1 and 65535")
        for name in ("header_timeout", "body_timeout", "write_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                wrong.append(f"{flag_of(name)} {seconds:g}: must be more than 0 seconds")
        for name in ("shutdown_timeout", "sse_keep_alive", "request_timeout", "queue_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                wrong.append(f"{flag_of(name)} {seconds:g}: must be 0 seconds or more")
        if not (self.watchdog_timeout == 0 or 2 <= self.watchdog_timeout < math.inf):
            wrong.append(
                f"--watchdog-timeout {self.watchdog_timeout:g}: must be 2 seconds or more, or 0 "
                "for no watchdog"
            )
        if self.max_body_size > MAX_BODY_SIZE:
            wrong.append(f"--max-body-size {self.max_body_size}: must be {MAX_BODY_SIZE} or less")
        return wrong


def engine_part(config: EngineConfig) -> EngineConfig:
    """The settings that scheduler and runner need, and no others."""
    return EngineConfig(
        **{spec.name: getattr(config, spec.name) for spec in dataclasses.fields(EngineConfig)}
    )


def own_engine_part(config: ServerConfig) -> EngineConfig:
    """The same for the engine that this server starts: ``tokenizer_path`` is empty if the server
    loads no tokenizer, since nobody can ask for a grammar then."""
    engine = engine_part(config)
    return dataclasses.replace(engine, tokenizer_path="") if config.skip_tokenizer_init else engine


# ── the command line ──


def add_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag per field, with the field's default and help. A setting whose default is None also
    takes ``auto``, and 0, which meant ``auto`` up to version 0.1."""
    hints = typing.get_type_hints(config)
    place: argparse._ActionsContainer = parser
    for spec in dataclasses.fields(config):
        if group := spec.metadata["group"]:
            place = parser.add_argument_group(group)
        flag, kind, help_text = flag_of(spec.name), hints[spec.name], spec.metadata["help"]
        if kind is bool and spec.default:
            pair = argparse.BooleanOptionalAction  # --flag and --no-flag
            place.add_argument(flag, action=pair, default=True, help=help_text)
        elif kind is bool:
            place.add_argument(flag, action="store_true", help=help_text)
        elif spec.metadata["repeats"]:
            name = _metavar(spec.name, str)
            place.add_argument(
                flag,
                action="append",
                type=_reader(str, spec.metadata["may_be_empty"]),
                default=argparse.SUPPRESS,
                metavar=name,
                help=help_text,
            )
        else:
            default = "auto" if spec.default is None else spec.default
            may_be_empty = spec.metadata["may_be_empty"]
            place.add_argument(
                flag,
                type=_reader(kind, may_be_empty),
                # argparse reads a default text as if it had been given.
                default=spec.default if may_be_empty else argparse.SUPPRESS,
                choices=spec.metadata["choices"],
                metavar=None if spec.metadata["choices"] else _metavar(spec.name, kind),
                help=help_text if default == "" else f"{help_text} (default: {default})",
            )


def _reader(kind: Any, may_be_empty: bool) -> Callable[[str], Any]:
    """Reads the value of a flag."""
    if kind == int | None:
        return _number_or_auto
    reader: Callable[[str], Any] = kind if may_be_empty else _not_empty
    return reader


def _not_empty(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError(
            "is empty (an unset variable?): give a value, or leave the flag out"
        )
    return value


def _number_or_auto(text: str) -> int | None:
    """None for ``auto``, and for 0."""
    if text == "auto":
        return None
    try:
        return int(text) or None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is neither a number nor auto") from None


def _metavar(name: str, kind: Any) -> str:
    """PATH for model_path, N for a number."""
    return name.rpartition("_")[2].upper() if kind is str else "N" if kind is not float else "F"


def from_arguments(config: type, arguments: argparse.Namespace) -> Any:
    """The dataclass from parsed flags; other flags of the parser are ignored."""
    names = {spec.name for spec in dataclasses.fields(config)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return config(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
    )
