"""The settings of ``mamba-eagle train-drafter``: one frozen dataclass, from which its flags are
generated."""

from dataclasses import dataclass
from pathlib import Path

from mamba_eagle.config import flag_of, setting
from mamba_eagle.config.flags import Settings

# Settings that affect neither the answers nor the weights: a resumed run may change them.
CHANGEABLE = tuple(
    "device max_running_requests micro_tokens log_every eval_every save_seconds".split()
)


@dataclass(frozen=True)
class TrainSettings(Settings):
    target: str = setting("", "target model: checkpoint folder, Hugging Face name, or: embedded")
    algorithm: str = setting(
        "eagle", "kind of head", ("eagle", "eagle3", "mtp", "dflash", "dspark")
    )
    data: str = setting(
        "",
        "jsonl file of prompts, each line with text, prompt, question, messages or token_ids "
        "(docs/training.md)",
    )
    output: str = setting("", "folder for the answers, the training state and the head")
    init_from: str = setting(
        "", "folder of a head of the same sizes, whose training this goes on with"
    )
    device: str = setting("auto", "device to run on", ("auto", "cpu", "cuda"))
    seed: int = setting(
        0, "seed for initial weights, the order of the data and sampling", minimum=0
    )

    prompt_template: str = setting(
        "Question: {question}\nAnswer:", "prompt for lines with a question"
    )
    skip_generation: bool = setting(
        False, "train on the answers in the data file instead of generating the target's own"
    )
    temperature: float = setting(0.0, "sampling temperature of the target's answers", minimum=0)
    max_new_tokens: int = setting(512, "maximum length of an answer in tokens", minimum=2)
    max_length: int = setting(
        2048, "maximum length of prompt and answer together in tokens", minimum=4
    )
    max_running_requests: int = setting(64, "prompts answered at the same time", minimum=1)

    depth: int = setting(5, "number of consecutive draft tokens to train for", minimum=1)
    head_pattern: str = setting(
        "*-", "layers of the head: * attention, - MLP, M Mamba2 (eagle and mtp)"
    )
    draft_vocab_size: int = setting(
        32000,
        "vocabulary of an eagle3 head: this many of the answers' most frequent tokens",
        minimum=1,
    )
    mtp_modules: int = setting(
        1, "modules of an mtp head: 1 (used at every depth) or as many as --depth", minimum=1
    )
    draft_layers: int = setting(5, "layers of a dflash or dspark drafter", minimum=1)
    max_anchors: int = setting(
        512,
        "positions of an answer from which a dflash or dspark drafter drafts per step",
        minimum=1,
    )
    loss_decay: float = setting(
        4.0, "dflash and dspark: drafts after which a draft's weight in the loss falls to 1/e"
    )
    markov_rank: int = setting(256, "rank of a dspark drafter's Markov head", minimum=1)
    markov_head: str = setting(
        "vanilla", "kind of a dspark drafter's Markov head", ("vanilla", "gated", "rnn")
    )

    epochs: float = setting(3.0, "passes over the answers")
    steps: int = setting(0, "number of optimizer steps; 0: set by --epochs", minimum=0)
    batch_size: int = setting(16, "answers per step, over all processes", minimum=1)
    micro_tokens: int = setting(
        4096,
        "maximum number of tokens per forward pass, padding included; a step may take several",
        minimum=1,
    )
    lr: float = setting(
        0.0, "peak learning rate of AdamW; 0: 0.5 / hidden size of the target", minimum=0
    )
    held_out: int = setting(64, "answers kept out of training to measure acceptance", minimum=1)
    log_every: int = setting(20, "steps between progress lines", minimum=1)
    eval_every: int = setting(
        0, "steps between measurements of acceptance; 0: ten per run", minimum=0
    )
    save_seconds: float = setting(300.0, "seconds between saves", minimum=0)

    def problems(self) -> list[str]:
        """All invalid settings, each with its value and a remedy."""
        problems = [
            f"{flag_of(name)} is missing"
            for name in ("target", "data", "output")
            if not getattr(self, name)
        ]
        problems += super().problems()
        if self.init_from and not Path(self.init_from).is_dir():
            problems.append(f"--init-from {self.init_from}: there is no such folder")
        if self.epochs <= 0 and not self.steps:
            problems.append(f"--epochs {self.epochs}: must be above 0, or give --steps")
        if self.loss_decay <= 0:
            problems.append(f"--loss-decay {self.loss_decay}: must be above 0")
        if "{question}" not in self.prompt_template:
            problems.append(
                f"--prompt-template {self.prompt_template!r:.200}: must contain {{question}} where "
                "the question goes"
            )
        if not self.head_pattern or set(self.head_pattern) - set("*-M"):
            problems.append(
                f"--head-pattern {self.head_pattern!r:.200}: must consist of one or more of "
                "* (attention), - (MLP) and M (Mamba2)"
            )
        return problems
