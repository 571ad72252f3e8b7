"""The part of a model that a rank or a pipeline stage holds, as loading needs it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mamba_eagle.layers.layer import Layer
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.parallel.cut import Cut
from mamba_eagle.parallel.shard import Shard


@dataclass(frozen=True)
class Split:
    """``whole`` has the names and shapes that checkpoints have; it is on the meta device and takes
    no memory. ``cuts``: by parameter name; a parameter that is not in it is copied."""

    whole: nn.Module
    cuts: dict[str, Cut]

    def places(self, model: nn.Module) -> dict[str, str]:
        """The names in ``whole`` of what ``model``, a part of it, has -> the names in ``model``.
        They differ where layers share weights and the first one is in another stage."""
        every = {
            name: id(tensor)
            for find in (self.whole.named_parameters, self.whole.named_buffers)
            for name, tensor in find(remove_duplicate=False)
        }
        first: dict[int, str] = {}
        for name, tensor in every.items():
            first.setdefault(tensor, name)
        own = [*dict(model.named_parameters()), *dict(model.named_buffers())]
        return {first[every[name]]: name for name in own}


def split_model(
    make: Callable[[ModelConfig], nn.Module],
    config: ModelConfig,
    shard: Shard,
    stages: int = 1,
    head: Shard | None = None,
) -> Split | None:
    """How rank ``shard`` of each of this many pipeline stages gets its part of the model of this
    whole ``config``; None: all of it. head: its part of the vocabulary, if that is another."""
    head, shard = shard if head is None else head, shard.of(config)
    if shard.size == head.size == stages == 1:
        return None
    with torch.device("meta"):
        whole = make(config)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    cuts = {}
    for module in whole.modules():
        for name, cut in cuts_of(module, shard, head).items():
            if (parameter := _tensor(module, name)) is not None and id(parameter) in names:
                cuts[names[id(parameter)]] = cut
    return Split(whole, cuts)


def cuts_of(module: nn.Module, shard: Shard, head: Shard) -> dict[str, Cut]:
    if not isinstance(module, Layer):
        return {}
    of_layers = module.cuts(shard) if shard.size > 1 else {}
    return of_layers | (module.head_cuts(head) if head.size > 1 else {})


def split_pays(whole: nn.Module, shard: Shard, blocks: int, bytes_per_sum: int) -> bool:
    """Whether ranks that have parts of a small model's layers save more, since each reads less,
    than their sums cost. Each block ends in one, and so does each matrix that is split by columns.

    whole: may be on the meta device. bytes_per_sum: as ``Place`` has it.
    """
    if shard.size == 1:
        return False
    saved, sums = 0.0, 0
    for module in whole.modules():
        for name, cut in cuts_of(module, shard, Shard()).items():
            if (parameter := _tensor(module, name)) is not None:
                saved += parameter.nbytes * (1 - 1 / shard.size)
                sums += cut.axis == 1 and parameter.ndim == 2
    return saved >= max(sums, blocks) * bytes_per_sum


def _tensor(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of this name; None if the module has none, as without a bias."""
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        if part not in module._modules:
            return None
        module = module._modules[part]  # type: ignore[assignment]
    return module._parameters.get(leaf)
