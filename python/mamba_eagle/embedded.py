"""Paths of the model, the drafters and the problems that come with the package."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_MODEL = ASSETS / "mamba2-math-6m"
EMBEDDED_HEADS = {  # by drafter
    "EAGLE": ASSETS / "mamba2-math-6m-eagle",
    "EAGLE3": ASSETS / "mamba2-math-6m-eagle3",
    "MTP": ASSETS / "mamba2-math-6m-mtp",
    "NEXTN": ASSETS / "mamba2-math-6m-mtp",
    "DSPARK": ASSETS / "mamba2-math-6m-dspark",
}
EMBEDDED_DRAFTERS = {**EMBEDDED_HEADS, "STANDALONE": ASSETS / "mamba2-math-1m"}
