"""Which model, in which numbers, on what, and over how many processes."""

import os
from dataclasses import dataclass

from mamba_eagle.config.flags import Settings, setting

QUANTIZATIONS = ("auto", "fp8", "nvfp4", "int8", "int4", "none")
ON_A_CPU = ("int8", "int4")  # --quantization that only a CPU multiplies
ON_A_GPU = ("nvfp4",)  # and that only a GPU does
NO_SUMS_ON_A_CPU = (
    "is for GPUs, and processes on a CPU exchange over gloo; leave the flag out, or use "
    "--device cuda"
)
# Of the runner on any machine: tens of thousands would end it while it starts them.
MAX_THREADS = 256


@dataclass(frozen=True)
class ModelSettings(Settings):
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
    exact: bool = setting(
        False,
        "on a GPU, give a token's logits the same bits however it is served: alone or in a batch, "
        "drafted or not, in any chunk of a prompt, from the cache or not; for models and hybrids "
        "with Mamba2 or gated DeltaNet, in 16 bits and float8. On a CPU they have them without it, "
        "or are refused with it",
    )
    context_length: int | None = setting(
        None, "maximum length of prompt plus output, in tokens; auto: the model's limit", minimum=1
    )

    def problems(self) -> list[str]:
        wrong = super().problems()
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
        if self.quantize_lm_head and self.quantization in ("auto", "none"):
            wrong.append(
                f"--quantize-lm-head: --quantization {self.quantization} rounds no weights; use "
                "--quantization fp8, nvfp4, int8 or int4, or leave the flag out"
            )
        return wrong

    def products_missing(self, flag: str, kind: str) -> list[str]:
        """Why these weights of few bits cannot be multiplied by here."""
        if kind in ON_A_GPU:
            device, dtypes, elsewhere = "cuda", ["bfloat16", "float16"], "int4"
        elif kind in ON_A_CPU:
            device, dtypes, elsewhere = "cpu", ["float32"], "fp8"
        else:
            return []
        return [
            f"{flag} {kind}: {other} {value} has no such products; use {remedy}"
            for other, value, fitting, remedy in (
                ("--device", self.device, [device], f"--device {device}, or {flag} {elsewhere}"),
                ("--dtype", self.dtype, dtypes, f"--dtype {dtypes[0]}"),
            )
            if value not in ("auto", *fitting)
        ]


@dataclass(frozen=True)
class RankSettings(Settings):
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
        "", "how many layers each of these stages holds, as in 30,26; default: equal bytes"
    )
    pp_turns: bool = setting(
        False,
        "stages take turns, instead of working at the same time for different requests. On GPUs "
        "without access to each other's memory they do anyway",
    )
    nnodes: int = setting(
        1,
        "number of machines of a Ray cluster that these processes are spread over, as many on "
        "each; this machine is the first",
        minimum=1,
    )
    all_reduce: str = setting(
        "auto",
        "how the parts of --tp-size processes on GPUs are added up in steps; symmetric: over "
        "memory that GPUs with NVLink share, by our own kernel, with the norm that follows; auto: "
        "NCCL or symmetric, whichever is faster here for each number of tokens; what cannot be "
        "had, or adds up anything else, leaves it to NCCL. On a CPU it is gloo",
        ("auto", "nccl", "symmetric"),
    )
    check_ranks: int = setting(
        0,
        "compare the state of these processes whenever this many steps are done, and end at the "
        "first difference; 0: never",
        minimum=0,
    )

    @property
    def num_ranks(self) -> int:
        """Runner processes, on all nodes together."""
        return self.tp_size * self.pp_size

    @property
    def answering_rank(self) -> int:
        """The one that sends results: the first of the last stage, where tokens are sampled."""
        return (self.pp_size - 1) * self.tp_size

    @property
    def ranks_per_node(self) -> int:
        """Node k has the ranks from k times this number on."""
        return self.num_ranks // self.nnodes

    @property
    def stage_layers(self) -> list[int]:
        """The numbers in --pp-layers; []: none are given. Raises: ValueError."""
        return [int(part) for part in self.pp_layers.split(",")] if self.pp_layers else []

    def problems(self) -> list[str]:
        wrong = super().problems()
        if self.nnodes > 1 and self.num_ranks % self.nnodes:
            wrong.append(
                f"--nnodes {self.nnodes}: {self.num_ranks} processes cannot be spread evenly over "
                f"{self.nnodes} machines; choose --tp-size and --pp-size so that it divides their "
                "product"
            )
        return wrong + self._stage_problems()

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

    def sum_problems(self, device: str) -> list[str]:
        """Why --all-reduce cannot be had. device: that of --device."""
        name = self.all_reduce
        if name in ("nccl", "auto"):
            return []
        given = f"--all-reduce {name}"
        if device == "cpu":
            return [f"{given}: {NO_SUMS_ON_A_CPU}"]
        if self.tp_size == 1:
            return [f"{given}: with --tp-size 1 there is nothing to add up; leave the flag out"]
        if self.tp_size > self.ranks_per_node:
            return [
                f"{given}: {self.tp_size} processes of a stage are spread over several machines, "
                "and it is for those of one; use --all-reduce nccl"
            ]
        return []
