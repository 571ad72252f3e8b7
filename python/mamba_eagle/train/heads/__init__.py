"""The kinds of draft heads that can be trained, one file each, by the name of --algorithm."""

from mamba_eagle.train.heads.base import TrainableHead
from mamba_eagle.train.heads.block import TrainableDflash
from mamba_eagle.train.heads.dspark import TrainableDspark
from mamba_eagle.train.heads.eagle import TrainableEagle
from mamba_eagle.train.heads.eagle3 import TrainableEagle3
from mamba_eagle.train.heads.mtp import TrainableMtp

TRAINABLE_HEADS: dict[str, type[TrainableHead]] = {
    "eagle": TrainableEagle,
    "eagle3": TrainableEagle3,
    "mtp": TrainableMtp,
    "dflash": TrainableDflash,
    "dspark": TrainableDspark,
}
