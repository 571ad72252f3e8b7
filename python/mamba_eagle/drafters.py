"""Drafters by name, and the draft heads that are published for them. Plain data: the command line
and the scheduler read it without loading torch."""

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Where a drafter is implemented, and what it needs."""

    module: str  # a file of drafting/, imported once the drafter is chosen
    source: str  # the DraftSource in it
    needs_folder: bool = True  # --speculative-draft-model-path
    needs_history: bool = False  # it reads FirstChunk.history


# by the name that --speculative-algorithm takes
DRAFTERS = {
    "EAGLE": Entry("eagle", "EagleSource"),
    "EAGLE3": Entry("eagle3", "EagleThreeSource"),
    "NEXTN": Entry("mtp", "MtpSource", needs_folder=False),
    "MTP": Entry("mtp", "MtpSource", needs_folder=False),
    "STANDALONE": Entry("standalone", "StandaloneSource"),
    "DFLASH": Entry("dflash", "DFlashSource"),
    "DSPARK": Entry("dspark", "DSparkSource"),
    "NGRAM": Entry("ngram", "NgramSource", needs_folder=False, needs_history=True),
}

# architectures entry of a head's config.json -> the drafter that uses it
HEADS = {
    "EagleHead": "EAGLE",
    "LlamaForCausalLMEagle3": "EAGLE3",
    "Eagle3LlamaForCausalLM": "EAGLE3",
    "Eagle3DraftModel": "EAGLE3",
    "Eagle3Speculator": "EAGLE3",
    "NemotronHMTPModel": "MTP",
    "DFlashDraftModel": "DFLASH",
    "Qwen3DFlashDraftModel": "DFLASH",
    "Qwen3DSparkModel": "DSPARK",
    "DSparkDraftModel": "DSPARK",
}


def needs_history(algorithm: str) -> bool:
    """Whether the drafter needs the tokens of a prefix that was found in the cache."""
    entry = DRAFTERS.get(algorithm)
    return entry is not None and entry.needs_history


def head_algorithm(values: dict[str, Any]) -> str | None:
    """The drafter for a config.json; None if it describes a whole model."""
    architecture = (values.get("architectures") or ["?"])[0]
    if architecture not in HEADS and "draft_vocab_size" in values and "dflash_config" not in values:
        return "EAGLE3"  # SafeAILab's heads carry the architecture of their target
    return HEADS.get(architecture)
