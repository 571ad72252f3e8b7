"""The kinds of heads that can be trained, by the name that --algorithm takes."""

from __future__ import annotations

from mamba_eagle.train.drafter.eagle import EagleRecipe
from mamba_eagle.train.drafter.eagle3 import Eagle3Recipe
from mamba_eagle.train.drafter.mtp import MtpRecipe
from mamba_eagle.train.drafter.recipe import Recipe

RECIPES: dict[str, type[Recipe]] = {
    "eagle": EagleRecipe,
    "eagle3": Eagle3Recipe,
    "mtp": MtpRecipe,
}
