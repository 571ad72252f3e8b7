"""The adapters of a model: some in slots on the device, all on the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import rounded
from mamba_eagle.layers.adapters import AdapterSize, MatrixSlots, reading
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.delta_rule import GatedDeltaNet
from mamba_eagle.layers.kimi_delta import KimiDeltaAttention
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import GatedMLP, PackedGatedMLP, ReluSquaredMLP
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.short_conv import ShortConv
from mamba_eagle.lora.peft import Pair, PeftFolder
from mamba_eagle.models.base import CausalLM, Target
from mamba_eagle.models.loader import place_of
from mamba_eagle.models.split import Split

MIXERS = (Attention, GatedDeltaNet, KimiDeltaAttention, Mamba2Mixer, ShortConv)
OWNERS = (*MIXERS, GatedMLP, PackedGatedMLP, ReluSquaredMLP)


def adaptable(model: nn.Module) -> dict[str, Linear]:
    """The matrices that take adapters, by the names of their weights: those of attention, of
    recurrent layers, of MLPs and of shared experts."""
    return {
        f"{name}.{leaf}.weight": part
        for name, module in model.named_modules()
        if isinstance(module, OWNERS)
        for leaf, part in module.named_children()
        if isinstance(part, Linear)
    }


HostAdapter: TypeAlias = dict[str, Pair]  # one that was read: what it adds, by place


class AdapterSlots:
    """Adapters by number, as the scheduler counts them; it says which slot each is to lie in, and
    which slot a request reads. A rank holds its part of them."""

    def __init__(
        self,
        model: CausalLM,
        split: Split | None,
        ops: LayerOps,
        num_slots: int,
        max_rank: int,
        requests: int,
        device: torch.device,
    ) -> None:
        """requests: request slots."""
        self.max_rank, self.num_slots = max_rank, num_slots
        self.dtype, self.device = model.dtype, device
        self.hides_factors = bool(model.config.raw.get("hides_factors"))
        split = split or Split(model, {})
        self.whole, self.cuts, self.places = split.whole, split.cuts, split.places(model)
        self.sizes = {name: part.weight.shape for name, part in adaptable(self.whole).items()}
        self.additions: dict[str, MatrixSlots] = {}
        self.products: list[Linear] = []  # those with additions
        within: dict[Linear, dict[str, AdapterSize]] = {}
        for name, part in adaptable(model).items() if num_slots else ():
            outputs, inputs = part.weight.shape
            product, first = part.within or (part, 0)
            size = AdapterSize(num_slots, max_rank, inputs, outputs, first)
            within.setdefault(product, {})[name] = size
        for product, sizes in within.items():
            product.additions = ops.additions(list(sizes.values()), model.dtype, device)
            self.additions.update(zip(sizes, product.additions.parts))
            self.products.append(product)
        self._kept: dict[int, HostAdapter] = {}
        self._of_request = [-1] * requests
        self._of_request_on_device = torch.full((requests,), -1, device=device)

    @property
    def nbytes(self) -> int:
        return sum(added.nbytes for added in self.additions.values())

    # ── adapters ──

    def read(self, path: str) -> HostAdapter:
        """This rank's part of the adapter in a folder. In any thread: changes nothing.

        Raises: AdapterError with all that is wrong, and nothing but headers has been read then.
        """
        folder = PeftFolder(path)
        targets, wrong = {}, []
        if folder.rank() > self.max_rank:
            wrong.append(
                f"rank {folder.rank()}: this server has room for {self.max_rank}; start it with a "
                "larger --max-lora-rank"
            )
        for module in folder.modules:
            target, problem = self._target(folder, module)
            wrong += [problem] if problem else []
            if target is not None:
                targets[module] = target
        if self.hides_factors:
            wrong.append(
                "this model's weights were multiplied by factors that its GGUF file does not name, "
                "and an adapter needs them too: serve the safetensors that the file was made from"
            )
        folder.refuse(wrong)
        pairs = folder.read()
        own = {}
        for module, target in targets.items():
            name = self.places.get(target.name)
            if name in self.additions:
                own[name] = self._part(target, pairs[module])
        return own

    def _target(self, folder: PeftFolder, module: str) -> tuple[Target | None, str]:
        """Where a module's pair goes, and what is wrong with it."""
        names = (module, f"{getattr(self.whole, 'names', ['model'])[0]}.{module}")
        found = [place_of(self.whole, f"{name}.weight") for name in names]
        target = next((one for one in found if one is not None and one.name in self.sizes), None)
        if target is None:
            return None, (
                f"unexpected: {module}, which this model does not have, or which takes no adapter "
                "(projections of attention and recurrent layers, MLPs and shared experts do)"
            )
        outputs, inputs = self.sizes[target.name]
        if folder.size_of(module) != (outputs, inputs):
            given = " x ".join(map(str, folder.size_of(module)))
            return None, f"shape of {module}: {given} in the file, {outputs} x {inputs} here"
        return target, ""

    def _part(self, target: Target, pair: Pair) -> Pair:
        """What a rank computes: of a matrix cut by rows its outputs, of one cut by columns what its
        inputs add to the sum of all ranks."""
        down, up = pair.down, pair.up * target.scale
        cut = self.cuts.get(target.name)
        if cut is not None and cut.axis == 0:
            up = cut.of(up)
        elif cut is not None:
            down = cut.of(down)
        return Pair(*(part.to(self.dtype).contiguous() for part in (down, up)))

    def keep(self, number: int, adapter: HostAdapter) -> None:
        self._kept[number] = adapter

    @property
    def kept(self) -> dict[int, HostAdapter]:
        """All that were read, by number; no weight of the model is in them."""
        return dict(self._kept)

    def drop(self, number: int) -> None:
        """No plan names it any more."""
        self._kept.pop(number, None)

    def load(self, slot: int, number: int) -> None:
        """Copy an adapter to a slot that no running request reads."""
        pairs = self._kept[number]
        for name, added in self.additions.items():
            outputs, inputs = added.size.outputs, added.size.inputs
            nothing = Pair(torch.empty(0, inputs), torch.empty(outputs, 0))
            added.put(slot, *pairs.get(name, nothing))

    # ── requests ──

    def admit(self, request: int, slot: int) -> None:
        """The request in request slot ``request`` reads slot ``slot``; -1: none."""
        if self._of_request[request] != slot:
            self._of_request[request] = slot
            self._of_request_on_device[request] = slot

    def any(self, requests: Sequence[int]) -> bool:
        """Whether one of them has an adapter."""
        return any(self._of_request[request] >= 0 for request in requests)

    @contextmanager
    def over(self, requests: Tensor, each: int | Tensor, rows: int | None = None) -> Iterator[None]:
        """Within, the rows of a pass have the adapters of their requests: ``each`` rows of every
        one of ``requests`` [b]; int64. rows: of all requests; None: wait for the device's sum."""
        slots = self._of_request_on_device[requests]
        with reading(slots.repeat_interleave(each, output_size=rows)):
            yield

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launch all kernels once that additions can need."""
        for product in self.products:
            assert product.additions is not None
            outputs, inputs = product.weight.shape
            for n in product.additions.sizes:
                y, x = (
                    torch.zeros(n, size, dtype=self.dtype, device=self.device)
                    for size in (outputs, inputs)
                )
                slots = torch.zeros(n, dtype=torch.int64, device=self.device)
                product.additions(y, x, slots)
                if product.rounding is not None:
                    product.additions(y, rounded(x, product.rounding), slots)
