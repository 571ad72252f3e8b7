"""DSPARK: a block drafter whose Markov head makes each draft depend on the one before it."""

from mamba_eagle.drafting.block_trees import MarkovTrees
from mamba_eagle.drafting.dflash import DFlashSource


class DSparkSource(DFlashSource):
    trees = MarkovTrees

    def problems(self) -> list[str]:
        wrong = super().problems()
        if not self.block.markov_rank:
            wrong.append(
                f"drafter {self.path} has no Markov head (markov_rank): use "
                "--speculative-algorithm DFLASH"
            )
        return wrong
