"""Weights from safetensors files, or random ones of the right shapes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from mamba_eagle.hub import is_gguf
from mamba_eagle.models.base import Target
from mamba_eagle.models.config_json import read_json, read_values
from mamba_eagle.models.rooms import Rooms
from mamba_eagle.models.split import Split
from mamba_eagle.models.staging import DTYPES, Staging
from mamba_eagle.models.stored import Opened, Part, Stored
from mamba_eagle.parallel.cut import Cut
from mamba_eagle.quantization.layout import UNUSED, Packed
from mamba_eagle.quantization.layouts import layout_of
from mamba_eagle.quantization.matrix import Matrix

if TYPE_CHECKING:
    from mamba_eagle.models.gguf_checkpoint import GgufCheckpoint

log = logging.getLogger("mamba_eagle.models")

INDEX = "model.safetensors.index.json"
PROGRESS_FROM_BYTES = 1 << 28  # smaller checkpoints load too fast for a progress bar
MAX_SHOWN = 40  # names in a message
Slice = tuple[int | None, int | None]  # which one of a stack, and which half of it; None: all
MAPPED_BYTES = 256 << 20  # how much of an open file may stay in memory


class CheckpointError(ValueError):
    """The files do not fit the model; the text lists every name that is wrong."""


@contextlib.contextmanager
def created_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Modules made inside have their parameters on ``device``, in ``dtype`` by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def load_weights(
    model: nn.Module,
    folder: str | Path,
    rooms: Rooms | None = None,
    split: Split | None = None,
    staging: Staging | None = None,
) -> None:
    """Copies the checkpoint's tensors into the model's parameters and buffers, converting dtypes.

    The headers of all files are compared with the model first. Then the tensors that the model
    needs are read one by one, so that only part of one file is in memory beside the parameters.
    split: if the model is a rank's part of a larger one. staging: to the model's device, if it has
    memory of its own; without it a rank reads only its part of the files.

    rooms: those of the model, if it may keep matrices of few bits; None: these are dequantized.

    Raises: CheckpointError listing all names that are missing, unexpected or of another shape;
    ConfigError if the weights do not fit in memory.
    """
    rooms, split = rooms or Rooms(model), split or Split(model, {})
    checkpoint = open_checkpoint(folder)
    refuse(checkpoint.folder, misfits(split.whole, checkpoint.contents))
    checkpoint.log_quantization()
    if checkpoint.packed:
        rooms.of_few_bits()
    wrong = []
    contents = checkpoint.contents
    parts: dict[str, Part] = {}
    places = split.places(model)
    for name in contents:
        if (target := place_of(split.whole, name)) is not None:
            part = part_of(target, split.cuts).held_as(places)
            if part is not None:
                parts[name] = part._replace(packed=name in checkpoint.packed)
    parts = dict(sorted(parts.items(), key=lambda item: rooms.turn(item[1].target.name)))
    total = sum(contents[name].nbytes for name in parts)
    rooms.begin(str(checkpoint.folder), total / max(1, sum(contents[n].numel for n in parts)))
    log.info("loading %s, %.2f GB in the files", checkpoint.folder.name, total / 1e9)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"loading {checkpoint.folder.name}",
        disable=total < PROGRESS_FROM_BYTES,
    ) as progress:
        for name, stored in checkpoint.tensors(parts, total // 20, staging):
            progress.update(contents[name].nbytes)
            try:
                value = checkpoint.value(name, stored)
            except ValueError as error:
                wrong.append(f"scale of {name}: {error}")
                continue
            target, cut, packed = parts[name]
            rooms.put(target, cut.of(value) if cut is not None and packed else value)
    refuse(checkpoint.folder, wrong)
    rooms.finish()


def refuse(folder: Path, wrong: list[str]) -> None:
    """Raises: CheckpointError if anything is wrong."""
    if wrong:
        shown = "\n  ".join(shortened(wrong))
        raise CheckpointError(f"{folder} does not fit its config.json:\n  {shown}")


def shortened(wrong: list[str]) -> list[str]:
    """The beginning of a long list; a layer of experts has a thousand names."""
    rest = len(wrong) - MAX_SHOWN
    return wrong if rest <= 0 else [*wrong[:MAX_SHOWN], f"… {rest} more"]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint, by name. Only headers are read: eight bytes of length, then JSON
    (the safetensors format, https://huggingface.co/docs/safetensors).

    Raises: CheckpointError naming every file that is missing or broken, and what is there twice.
    """
    found: dict[str, Stored] = {}
    broken, twice = [], []
    places = weight_map(folder) or {}
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt"):  # checks that tensors fill the file, side by side
                stored = read_header(path)
                # a file may have an older form of what the index has elsewhere
                stored = {n: s for n, s in stored.items() if places.get(n, path.name) == path.name}
        except (SafetensorError, OSError) as error:
            broken.append(f"{path}: {error}")
            continue
        twice += [f"{name}: in {found[name].file} and {path}" for name in stored if name in found]
        found.update(stored)
    if broken:
        raise CheckpointError(
            "not safetensors files, or incomplete; download them again (in a git clone: "
            "git lfs pull):\n  " + "\n  ".join(broken)
        )
    if twice:
        raise CheckpointError(
            f"{folder} has tensors twice; remove the files of another model or an older download:"
            "\n  " + "\n  ".join(shortened(twice))
        )
    return found


def read_header(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.tell()
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        found[name] = Stored(path, shape, dtype, end - begin, begin=data + begin)
    return found


def place_of(model: nn.Module, name: str) -> Target | None:
    """Where a checkpoint's tensor goes; None if it is not needed."""
    if name.endswith(UNUSED):
        return None
    place: Callable[[str], Target | None] = getattr(model, "target", Target)
    return place(name)


def misfits(model: nn.Module, stored: dict[str, Stored]) -> list[str]:
    """Every name that is missing, unexpected, or of the wrong shape or dtype. The model may be on
    the meta device."""
    rooms = Rooms(model).tensors
    seen: dict[str, set[Slice]] = {}
    wrong: list[str] = []
    for name, found in stored.items():
        target = place_of(model, name)
        if target is None:
            continue
        if target.name not in rooms:
            wrong.append(f"unexpected: {name}")
            continue
        seen.setdefault(target.name, set()).add((target.index, target.half))
        if problem := misfit(rooms[target.name], target, found):
            wrong.append(f"{problem.what} of {name}: {problem.why}")
    for name, room in rooms.items():
        wrong += [f"missing: {gap}" for gap in gaps(name, room, seen.get(name, set()))]
    return wrong


def weight_problems(make: Callable[[], nn.Module], folder: str | Path) -> list[str]:
    """``misfits`` of a model that is yet to be made, with the folder's name. Reads headers only and
    allocates nothing."""
    try:
        with torch.device("meta"):
            model = make()
        wrong = shortened(misfits(model, open_checkpoint(folder).contents))
        return [f"{folder}: {one}" for one in wrong]
    except CheckpointError as error:
        return [str(error)]


class Misfit(NamedTuple):
    what: str
    why: str


def misfit(room: Tensor, target: Target, found: Stored) -> Misfit | None:
    """Why a tensor does not fit its place, if it does not."""
    if found.is_floating_point and not room.is_floating_point():
        return Misfit("dtype", f"{found.dtype} in the file, an integer dtype in the model")
    if room.is_floating_point() and not found.is_floating_point:
        return Misfit("dtype", f"{found.dtype} in the file, and config.json names no quantization")
    shape = tuple(room.shape)
    if target.index is not None:
        if target.index >= shape[0]:
            return Misfit("shape", f"index {target.index}, but only {shape[0]} by config.json")
        shape = shape[1:]
        if target.half is not None:
            shape = (shape[0] // 2, *shape[1:])
    if found.shape != shape:
        return Misfit("shape", f"{list(found.shape)} in the file, {list(shape)} by config.json")
    return None


def gaps(name: str, room: Tensor, seen: set[Slice]) -> list[str]:
    """The names that were not in the checkpoint; for a stacked parameter, its slices."""
    if not seen:
        return [name]
    if (None, None) in seen:
        return []
    there = {i for i, half in seen if half is None or {(i, 0), (i, 1)} <= seen}
    return [f"{name}[{i}]" for i in range(room.shape[0]) if i not in there]


def part_of(target: Target, cuts: dict[str, Cut]) -> Part:
    cut = cuts.get(target.name)
    if cut is None:
        return Part(target, None)
    if target.index is not None:
        cut = cut.of_one(is_half=target.half is not None)
    if isinstance(target.scale, Tensor):  # a factor for each row
        target = replace(target, scale=cut.of(target.scale))
    return Part(target, cut)


class Checkpoint:
    """A folder's tensors, with its matrices of few bits.

    ``contents`` describes them as a model has them: one weight per matrix, instead of its values
    and scales.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: CheckpointError for broken files; UnsupportedModel, FileNotFoundError."""
        self.folder = folder
        self.layout = layout_of(read_values(folder))
        self.stored = stored_tensors(folder)
        self.packed: dict[str, Packed] = {}
        self.contents = dict(self.stored)
        for matrix in self.layout.matrices(self.stored):
            for name in (matrix.values, *matrix.others):
                self.contents.pop(name, None)
            found = self.stored[matrix.values]
            self.packed[matrix.name] = matrix
            self.contents[matrix.name] = Stored(
                found.file, matrix.shape, "F8", found.nbytes, matrix.values
            )
        self._open: dict[Path, Any] = {}

    def log_quantization(self) -> None:
        layout = self.layout
        if layout.name:
            log.info("%s: weights are %s", self.folder, layout.name)
        if layout.kv_cache:
            what = "%s: the KV cache uses the dtype of --kv-cache-dtype, not %s"
            log.info(what, self.folder, layout.kv_cache)

    def value(self, name: str, stored: Tensor) -> Tensor | Matrix:
        """The tensor of ``contents``, from the one of the file.

        Raises: ValueError if it is a matrix without scales, or if they do not fit.
        """
        matrix = self.packed.get(name)
        return stored if matrix is None else matrix.read(stored, self._read)

    def tensors(
        self, parts: dict[str, Part], mapped_bytes: int, staging: Staging | None
    ) -> Iterator[Opened]:
        """What a device can take as it is stored is there already, and cut there: read whole by
        threads, it comes sooner than a part by the page faults of one. The rest is in the host's
        memory."""

        def is_staged(name: str) -> bool:
            stored = self.contents[name]
            return not parts[name].packed and stored.dtype in DTYPES and stored.nbytes > 0

        for staged, names in groupby(parts, is_staged):
            together = {name: parts[name] for name in names}
            if staged and staging is not None:
                values = staging.tensors([self.contents[name] for name in together])
                for (name, part), value in zip(together.items(), values):
                    yield Opened(name, value if part.cut is None else part.cut.of(value))
            else:
                yield from checkpoint_tensors(self.contents, together, mapped_bytes)

    def _read(self, name: str) -> Tensor:
        if name not in self.stored:
            raise ValueError(f"there is no {name}")
        path = self.stored[name].file
        if path not in self._open:  # opening one parses its header, which takes milliseconds
            self._open[path] = safe_open(path, framework="pt").__enter__()
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor


def open_checkpoint(path: str | Path) -> Checkpoint | GgufCheckpoint:
    """Of a folder, or of a GGUF file.

    Raises: CheckpointError, UnsupportedModel, OSError
    """
    if not is_gguf(path):
        return Checkpoint(Path(path))
    # Imported here: few checkpoints need its packages.
    from mamba_eagle.models.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(Path(path))


def checkpoint_tensors(
    stored: dict[str, Stored], parts: dict[str, Part], mapped_bytes: int
) -> Iterator[Opened]:
    """The named tensors, on the CPU: what ``parts`` says of them, but float8 ones as a whole, since
    their scales are for the whole. Files are closed and opened again after ``mapped_bytes``: what
    was read stays in memory until then."""
    limit = max(1 << 20, min(MAPPED_BYTES, mapped_bytes))
    at, names = 0, list(parts)
    while at < len(names):
        left, path = limit, stored[names[at]].file
        with safe_open(path, framework="pt") as file:
            while at < len(names) and left > 0 and stored[names[at]].file == path:
                part, name = parts[names[at]], stored[names[at]].key or names[at]
                if part.cut is None or part.packed:
                    value = file.get_tensor(name)
                else:
                    value = part.cut.of(file.get_slice(name))
                left -= value.nbytes
                yield Opened(names[at], value)
                del value
                at += 1


def weight_map(folder: Path) -> dict[str, str] | None:
    """Each tensor's file, by the index; None without one."""
    index = folder / INDEX
    if not index.is_file():
        return None
    places = read_json(index).get("weight_map")
    names = places.values() if isinstance(places, dict) else [None]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{index}: weight_map must name a file for each tensor")
    return places


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded ones by their index."""
    whole = folder / "model.safetensors"
    places = weight_map(folder)
    if places is not None:
        files = [folder / name for name in sorted(set(places.values()))]
    elif whole.is_file():
        files = [whole]  # other files may hold the same weights again
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        pickled = sorted(path.name for path in folder.glob("*.bin"))[:3]
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing) or 'safetensors files'}. Pickled weights "
            f"({', '.join(pickled) or '*.bin'}) can run code and are never read; convert them once "
            "with torch.load(path, weights_only=True) and safetensors.torch.save_file("
            "{n: t.clone() for n, t in weights.items()}, 'model.safetensors'). "
            "--load-format dummy makes random weights"
        )
    # safetensors would say that they are not there
    if closed := [str(path) for path in files if not os.access(path, os.R_OK)]:
        raise CheckpointError(f"this user may not read {', '.join(closed)}: change mode or owner")
    return files


def random_weights(
    model: nn.Module, seed: int, rooms: Rooms | None = None, split: Split | None = None
) -> None:
    """Weights for ``--load-format dummy``: activations keep their size, and a seed gives the same
    ones again. They are made on the parameters' device. rooms, split: as for ``load_weights``; a
    rank gets its part of the weights that the whole model would get."""
    rooms, split = rooms or Rooms(model), split or Split(model, {})
    own, whole = (dict(each.named_parameters()) for each in (model, split.whole))
    places = split.places(model)
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, like in whole.items():
            held = places.get(name)  # None: another stage's, drawn all the same
            device = rooms.device if held is None else rooms.device_of(own[held])
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            value = random_weight(name, like, generators[device])
            if held is None:
                continue
            if name in split.cuts and value.dim():
                value = split.cuts[name].of(value)
            rooms.put(Target(held), value)
    rooms.finish()


DUMMY_SIZE = 0.05  # of dummy weights, at most


def random_weight(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Values for the parameter ``name``, which ``like`` is; of its shape, or one for all."""
    leaf, device = name.rsplit(".", 1)[-1], generator.device
    if leaf in ("A_log", "dt_bias"):
        low, high = (0.0, 2.5) if leaf == "A_log" else (-6.0, -2.0)
        values = torch.rand(like.shape, generator=generator, device=device)
        return values * (high - low) + low
    if leaf == "D" or "norm" in name:
        return torch.ones((), device=device)
    if leaf.endswith("bias"):
        return torch.zeros((), device=device)
    values = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)
    # sums over more inputs have smaller weights, so that activations keep their size through layers
    # of any width; in place: the largest tensor may take gigabytes
    return values.mul_(min(DUMMY_SIZE, like.shape[-1] ** -0.5))
