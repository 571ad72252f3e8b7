"""DFlash (arXiv 2602.06036): the places of a block are drafted independently of each other."""

from torch import Tensor

from mamba_eagle.train.heads.block import Drafted, TrainableBlockDrafter


class TrainableDflash(TrainableBlockDrafter):
    """Learns the target's distribution: cross entropy, which is the divergence that published
    drafters are trained with, up to a constant."""

    architecture = "DFlashDraftModel"

    def place_loss(self, drafted: Drafted) -> Tensor:
        return -(drafted.probs * drafted.logits.log_softmax(-1)).sum(-1)
