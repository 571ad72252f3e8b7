"""What ``mamba-eagle train-drafter`` can be told: one frozen dataclass, from which its flags are
made."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_eagle.config import setting

# Flags that decide neither the answers nor the weights: a run may go on with others.
FREE = ("device", "max_running_requests", "micro_tokens", "log_every", "eval_every", "save_seconds")


@dataclass(frozen=True)
class TrainSettings:
    target: str = setting("", "checkpoint folder or Hugging Face name, or: embedded")
    algorithm: str = setting("eagle", "kind of head", ("eagle", "eagle3", "mtp"))
    data: str = setting(
        "",
        "jsonl file; a line has text, prompt, question, messages or token_ids (docs/training.md)",
    )
    output: str = setting("", "folder for the answers, the checkpoint and the head")
    device: str = setting("auto", "where to run", ("auto", "cpu", "cuda"))
    seed: int = setting(0, "of the head's first weights, the order of the data and sampling")

    prompt_template: str = setting(
        "Question: {question}\nAnswer:", "prompt of a line that has a question"
    )
    skip_generation: bool = setting(
        False, "learn from the answers that the file has, not from the target's own"
    )
    temperature: float = setting(0.0, "of the target's answers")
    max_new_tokens: int = setting(512, "longest answer")
    max_length: int = setting(2048, "longest prompt and answer together, in tokens")
    max_running_requests: int = setting(64, "prompts answered at the same time")

    depth: int = setting(5, "draft tokens in sequence that the head is trained for")
    head_pattern: str = setting(
        "*-", "layers of the head: * attention, - MLP, M Mamba2 (eagle and mtp)"
    )
    draft_vocab_size: int = setting(
        32000, "tokens that an eagle3 head can draft: the most frequent ones of the answers"
    )
    mtp_modules: int = setting(
        1, "modules of an mtp head; 1: one module repeated at every depth, else as many as --depth"
    )

    epochs: float = setting(3.0, "passes over the answers")
    steps: int = setting(0, "optimizer steps instead of --epochs")
    batch_size: int = setting(16, "answers in a step, over all processes together")
    micro_tokens: int = setting(
        4096, "tokens run at once on a device, padding included; a step takes several such passes"
    )
    lr: float = setting(0.0, "peak learning rate of AdamW; 0: 0.5 / hidden size of the target")
    held_out: int = setting(64, "answers that are not trained on, for measuring acceptance")
    log_every: int = setting(20, "steps between two lines of progress")
    eval_every: int = setting(0, "steps between two measurements; 0: ten in the run")
    save_seconds: float = setting(300.0, "seconds between two checkpoints")

    def problems(self) -> list[str]:
        """Every setting that cannot work, with its value and what to change."""
        wrong = []
        for name in ("target", "data", "output"):
            if not getattr(self, name):
                wrong.append(f"{flag(name)} is missing")
        for name, least in {
            "max_new_tokens": 2,
            "max_length": 4,
            "max_running_requests": 1,
            "depth": 1,
            "draft_vocab_size": 1,
            "mtp_modules": 1,
            "batch_size": 1,
            "micro_tokens": 1,
            "held_out": 1,
            "log_every": 1,
            "steps": 0,
            "eval_every": 0,
            "seed": 0,
        }.items():
            if getattr(self, name) < least:
                wrong.append(f"{flag(name)} {getattr(self, name)}: must be {least} or more")
        for name in ("temperature", "lr", "save_seconds"):
            if getattr(self, name) < 0:
                wrong.append(f"{flag(name)} {getattr(self, name)}: must be 0 or more")
        if self.epochs <= 0 and not self.steps:
            wrong.append(f"--epochs {self.epochs}: must be above 0, or give --steps")
        if "{question}" not in self.prompt_template:
            wrong.append(
                f"--prompt-template {self.prompt_template!r}: must contain {{question}}, where the "
                "question goes"
            )
        if not self.head_pattern or set(self.head_pattern) - set("*-M"):
            wrong.append(
                f"--head-pattern {self.head_pattern!r}: must be letters of layers, * (attention), "
                "- (MLP) and M (Mamba2), one at least"
            )
        return wrong


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
